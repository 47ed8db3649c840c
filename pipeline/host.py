"""Stage host, whose code is in the library. Written by `python tools/generate.py`."""

from samebits.stages.host import main

if __name__ == "__main__":
    main()
