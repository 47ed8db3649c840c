"""Stage compare, whose code is in the library."""

from samebits.stages.compare import main

if __name__ == "__main__":
    main()
