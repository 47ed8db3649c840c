"""``python -m faults``: see ``campaign``."""

from faults.disk import preload

if __name__ == "__main__":
    preload()  # before torch is imported: it starts Python again
    from faults.campaign import main

    main()
