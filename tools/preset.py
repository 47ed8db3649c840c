"""Print the folder of the experiment for this host: an empty line for the default one, ``gpu/`` where torch has GPUs.

    PRESET=default python tools/preset.py

A params.yaml with a model or data of one's own is taken on every host. PRESET overrides the choice. CUDA does not
start: GPUs are counted through NVML.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from samebits.errors import UserError, counted, exit_on_error
from samebits.host import count_gpus
from samebits.models import MODELS
from samebits.params import load_params

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "PRESET"
FOLDERS = {"default": "", "gpu": "gpu/"}
"""Where each experiment lies, as what stands before the name of a file there."""


def choose(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The preset, and a line about it for whoever did not ask for it; empty for the default one.

    Raises:
        UserError: PRESET names another one, or params.yaml is wrong.
        HostError: a driver or GPU does not answer.
    """
    named = environ.get(VARIABLE)
    if named:
        if named not in FOLDERS:
            raise UserError(f"{VARIABLE}: got {named!r}, accepts {' or '.join(FOLDERS)}", hint=f"unset {VARIABLE}")
        return named, ""
    gpus = count_gpus(environ)
    if not gpus:
        return "default", ""
    params = load_params("params.yaml")
    if not params.data.is_drawn or params.model.name not in MODELS:
        own = "data" if params.model.name in MODELS else "model"
        return "default", f"params.yaml, for the {own} of your own in it; {VARIABLE}=gpu takes gpu/params.yaml"
    return "gpu", f"gpu/params.yaml, for the {counted(gpus, 'GPU')} here; {VARIABLE}=default takes params.yaml"


if __name__ == "__main__":
    with exit_on_error():
        preset, line = choose()
        if line:
            sys.stderr.write(f"{line}\n")
        print(FOLDERS[preset])
