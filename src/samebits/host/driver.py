"""Whether CUDA has started in this process, asked without starting it."""

from __future__ import annotations

import ctypes
import os
import sys

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED, the answer of each function of the driver before cuInit


def cuda_has_started() -> bool:
    """Whether a fork of this process could no longer use CUDA.

    torch knows only whether it has started CUDA itself; the driver's library knows it of any package. That library is
    asked only if it is loaded already.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        count = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD).cuDeviceGetCount
    except (OSError, AttributeError):  # not loaded, or no driver's
        return False
    return bool(count(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)
