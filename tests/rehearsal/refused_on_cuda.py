"""Write down which operations PyTorch refuses on CUDA, out of its own test database, on the stand-in; print lines.

    LD_PRELOAD=libcuda.so.1 python tests/rehearsal/refused_on_cuda.py

A line is an ATen operation, the type of its first tensor, and what PyTorch said: that there is no kernel for the type,
or that there is none whose result is the same each time. ``refused.txt`` holds these lines.
"""

import json
import re
import sys
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from operations_on_cuda import on_cuda
from operations_probe import NO_MODE, samples_of, tensors

TYPES = (torch.float32, torch.int64, torch.float64)
SAID = re.compile(r"""^("?\w+"?) (not implemented for '\w+'|does not have a deterministic implementation)""")


def name_of(func):
    """An operation with its overload, the same in place."""
    name = func.overloadpacket.__name__
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return f"{name}.{func._overloadname}"


class _Watch(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except (NotImplementedError, RuntimeError) as error:
            if (said := SAID.match(str(error))) and (given := tensors((args, kwargs))):
                dtype = str(given[0].dtype).removeprefix("torch.")
                self._found.add(f"{name_of(func)} {dtype}: {said[1].strip(chr(34))} {said[2]}")
            raise


def main():
    torch.backends.cudnn.enabled = False  # of which the stand-in knows convolutions alone
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    warnings.simplefilter("ignore")
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = set()
    for op in op_db:
        if op.name in NO_MODE:
            continue
        for sample in (sample for dtype in TYPES for sample in samples_of(op, dtype)):
            sample = on_cuda(op.name, sample)
            with _Watch(found):
                try:
                    results = tensors(op(sample.input, *sample.args, **sample.kwargs))
                    wanted = [t for t in results if t.requires_grad]
                    if wanted:
                        torch.autograd.backward([t.sum() for t in wanted])
                except Exception:  # noqa: BLE001 - noted, or of no concern
                    pass
    json.dump(sorted(found), sys.stdout)


if __name__ == "__main__":
    main()
