"""Let torch's version file say that torch was built for the CUDA version in STAND_IN_CUDA, or for none if it is empty.

STAND_IN_HIP names ROCm's version instead. samebits reads that file instead of importing torch.
"""

import os
import runpy
from typing import Any

_read = runpy.run_path


def _told(path_name: str, init_globals: dict[str, Any] | None = None, run_name: str | None = None) -> dict[str, Any]:
    facts = _read(path_name, init_globals, run_name)
    if path_name.endswith("/torch/version.py") and "STAND_IN_CUDA" in os.environ:
        cuda = os.environ["STAND_IN_CUDA"]
        facts["cuda"], facts["hip"] = cuda or None, os.environ.get("STAND_IN_HIP")
        local = f"cu{cuda.replace('.', '')}" if cuda else f"rocm{facts['hip']}" if facts["hip"] else "cpu"
        facts["__version__"] = f"{facts['__version__'].partition('+')[0]}+{local}"
    return facts


runpy.run_path = _told
