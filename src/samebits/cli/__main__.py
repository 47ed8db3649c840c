"""``python -m samebits.cli``, as each machine of an allocation starts it."""

from samebits.cli import main

if __name__ == "__main__":
    main()
