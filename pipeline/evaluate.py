"""Stage evaluate, whose code is in the library."""

from samebits.stages.evaluate import main

if __name__ == "__main__":
    main()
