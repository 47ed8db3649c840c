"""Stage compare, whose code is in the library. Written by `python tools/generate.py`."""

from samebits.stages.compare import main

if __name__ == "__main__":
    main()
