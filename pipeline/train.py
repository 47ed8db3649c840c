"""Stage train, whose code is in the library. Written by `python tools/generate.py`."""

from samebits.errors import exit_on_error

if __name__ == "__main__":
    with exit_on_error():  # also the imports
        from samebits.stages.train import main

        main()
