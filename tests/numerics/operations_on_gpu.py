"""Run every operation of PyTorch's own test database under the exact engine on the CPU and on a GPU; print JSON.

    python tests/numerics/operations_on_gpu.py [NAME ...]

How many samples were computed on both, and the operations whose results or gradients have other bits on the GPU, or
that fail there alone.
"""

import json
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import get_context

from samebits.numerics.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402 - it reads one of the variables once
from torch.utils._pytree import tree_map  # noqa: E402

from operations_probe import NO_MODE, UNINITIALISED, all_samples, attempt, name_of  # noqa: E402
from samebits.errors import UserError  # noqa: E402
from samebits.host import count_cores  # noqa: E402
from samebits.numerics.exact.batch_norm import ShardNorms  # noqa: E402
from samebits.numerics.exact.engine import Engine  # noqa: E402
from samebits.numerics.exact.forms import OneForm  # noqa: E402
from samebits.numerics.exact.forward_draws import Draws  # noqa: E402
from samebits.numerics.kernels import choose_kernels  # noqa: E402

ONLY_INPUT = {"tensor_split"}  # the other tensors say where to cut, and stay on the CPU
DEVICE = os.environ.get("PROBE_DEVICE", "cuda")


@contextmanager
def as_in_training(number):
    with Engine(Draws(0, number, [0])) as engine, OneForm(engine, ShardNorms(torch.nn.Module(), engine)):
        yield


def moved(op, sample):
    def move(value):
        return tree_map(lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x, value)

    sample.input = move(sample.input)
    if op.name not in ONLY_INPUT:
        sample.args, sample.kwargs = move((sample.args, sample.kwargs))
    return sample


def bits(tensor):
    """The bytes, of all NaN the same ones."""
    t = tensor.detach().cpu().resolve_conj().resolve_neg()
    if t.is_floating_point():
        t = torch.where(t.isnan(), torch.full((), float("nan"), dtype=t.dtype), t)
    return str(t.dtype), tuple(t.shape), torch.cat([t.flatten()]).view(torch.uint8).numpy().tobytes()


def compare(op, sample, number):
    """None if exact does not compute it, "" for equal bits, else what differs."""
    try:
        here = attempt(op, sample, as_in_training(number))
    except Exception:  # noqa: BLE001 - refused, or a sample that PyTorch itself refuses
        return None
    try:
        there = attempt(op, moved(op, sample), as_in_training(number))
    except (Exception, UserError) as error:  # noqa: BLE001 - reported
        return f"sample {number}: {type(error).__name__}: {error}"[:300]
    for name, a, b in zip(("results", "gradients"), here, there, strict=True):
        if [bits(t) for t in a] != [bits(t) for t in b]:
            return f"sample {number}: {name}"
    return ""


def probe(part, parts, only):
    """What ``main`` prints, of every ``parts``-th operation from one on."""
    choose_kernels(fused=False)  # the database freezes these
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    warnings.simplefilter("ignore")
    computed, different = 0, {}
    for op in op_db[part::parts]:
        name = name_of(op)
        if op.name in NO_MODE or UNINITIALISED in name or (only and op.name not in only):
            continue
        try:
            samples = all_samples(op)
        except Exception:  # noqa: BLE001 - operations_probe.py reports it
            continue
        for number, sample in enumerate(samples):
            found = compare(op, sample, number)
            computed += found == ""
            if found:
                different.setdefault(name, []).append(found)
    return {"computed": computed, "different": different}


def main():
    parts = max(1, count_cores() - 2)
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        found = list(pool.map(probe, range(parts), repeat(parts), repeat(sys.argv[1:])))
    different = {name: said for one in found for name, said in one["different"].items()}
    json.dump({"computed": sum(one["computed"] for one in found), "different": different}, sys.stdout)


if __name__ == "__main__":
    main()
