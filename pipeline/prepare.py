"""Stage prepare, whose code is in the library."""

from samebits.stages.prepare import main

if __name__ == "__main__":
    main()
