"""``python -m samebits.tracking LOG`` starts the sender."""

import sys
from pathlib import Path

from samebits.tracking.sender import run

if __name__ == "__main__":
    run(Path(sys.argv[1]))
