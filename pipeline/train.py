"""Stage train, whose code is in the library."""

from samebits.stages.train import main

if __name__ == "__main__":
    main()
