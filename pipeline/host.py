"""Stage host, whose code is in the library."""

from samebits.stages.host import main

if __name__ == "__main__":
    main()
