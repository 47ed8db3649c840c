"""Run every operation of PyTorch's own test database under the exact engine on the stand-in for CUDA; print JSON.

    LD_PRELOAD=libcuda.so.1 python tests/rehearsal/operations_on_cuda.py [NAME ...]

The same samples run on the CPU first: what the engine computes there, it has to compute on a GPU too, forward and
backward. Of each operation: how many samples were computed, and what went wrong. Also which exact versions were
reached on CUDA tensors.
"""

import ctypes
import json
import sys
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from operations_probe import NO_MODE, SAMPLES, all_samples, attempt, name_of
from samebits.errors import UserError
from samebits.numerics.environment import prepare_environment
from samebits.numerics.exact.batch_norm import ShardNorms
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.operations import EXACT

ONLY_INPUT = {"tensor_split"}  # the other tensors say where to cut, and stay on the CPU
LED_BY_VALUES = {"isin", "cov", "repeat_interleave"}  # what they do next follows from values, of which there are none
ASKED_OF_VALUES = ("into one place twice", "negative")
"""In errors that follow from what the device answered: then it is to answer the other way."""
MORE = {
    "arange": lambda x: torch.arange(0.0, 1.0, 0.25, device=x.device),
    "index_put_impl": lambda x: torch.ops.aten._index_put_impl_(
        x.view(-1).clone(), [torch.arange(4, device=x.device)], x.view(-1)[:4], True
    ),
    "interpolate antialiased": lambda x: F.interpolate(x.view(1, 2, 2, 2), size=3, mode="bicubic", antialias=True),
    "weight_norm": lambda x: torch._weight_norm(x.view(2, 4), x.view(-1)[:2].view(2, 1), 0),
    "grouped_mm": lambda x: torch.ops.aten._grouped_mm(
        x.view(2, 4), torch.ones((2, 4, 4), device=x.device), torch.tensor([1, 2], dtype=torch.int32, device=x.device)
    ),
    "interpolate exactly, 2d": lambda x: F.interpolate(x.view(1, 2, 2, 2), scale_factor=2.0, mode="nearest-exact"),
    "interpolate exactly, 3d": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"),
    "pad 3d": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
    "reflect 2d": lambda x: F.pad(x.view(1, 2, 2, 2), (1, 1, 1, 1), mode="reflect"),
    "reflect 3d": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"),
    "embedding_bag without gradient": lambda x: F.embedding_bag(
        torch.zeros((1, 2), dtype=torch.int64, device=x.device), x.detach().view(4, 2)
    ),
    "interpolate 3d": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "binary_cross_entropy_with_logits as an operation": lambda x: torch.binary_cross_entropy_with_logits(
        x, torch.ones_like(x)
    ),
}
"""What the database does not have."""


@contextmanager
def as_in_training():
    with Engine(Draws(0, 0, [0])) as engine, OneForm(engine, ShardNorms(torch.nn.Module(), engine)):
        yield


def on_cuda(name, sample):
    def move(value):
        return tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, value)

    sample.input = move(sample.input)
    if name not in ONLY_INPUT:
        sample.args, sample.kwargs = move((sample.args, sample.kwargs))
    return sample


def rehearse(op, sample):
    """None, or what PyTorch or the engine says, when truths read from the device are all false and all true."""
    fill = ctypes.CDLL(None).no_gpu_fill
    try:
        for byte in (0, 1):
            fill(byte)
            try:
                attempt(op, sample, as_in_training())
            except Exception as error:  # noqa: BLE001 - reported
                said = f"{type(error).__name__}: {error}"
                if not any(words in said for words in ASKED_OF_VALUES):
                    return said
            else:
                return None
    finally:
        fill(0)
    return said


def probe(op):
    found = {"computed": 0, "errors": []}
    for sample in all_samples(op, SAMPLES):
        try:
            attempt(op, sample, as_in_training())
        except UserError:
            continue
        except Exception:  # noqa: BLE001 - a sample that PyTorch itself refuses
            continue
        error = rehearse(op, on_cuda(op.name, sample))
        found["computed"] += error is None
        found["errors"] += [error] if error else []
    return found


def record_versions(reached):
    """Note in ``reached`` which exact versions give CUDA tensors."""

    def noted(packet, version):
        def run(*args, **kwargs):
            results = version(*args, **kwargs)
            if any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in tree_leaves(results)):
                reached.add(str(packet))
            return results

        return run

    EXACT.update({packet: noted(packet, version) for packet, version in EXACT.items()})


def main():
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    prepare_environment()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    only, reached, out = sys.argv[1:], set(), {}
    record_versions(reached)
    for op in op_db:
        if op.name not in NO_MODE | LED_BY_VALUES and (not only or op.name in only):
            out[name_of(op)] = probe(op)
    for name, function in MORE.items():
        x = torch.ones((1, 1, 2, 2, 2), device="cuda", requires_grad=True)
        with as_in_training():
            y = function(x)
        if y.requires_grad:
            with Engine():
                y.sum().backward()
        out[name] = {"computed": 1, "errors": []}
    json.dump({"operations": out, "reached": sorted(reached), "known": sorted(map(str, EXACT))}, sys.stdout)


if __name__ == "__main__":
    main()
