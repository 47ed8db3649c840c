"""Run every operation of PyTorch's own test database under the exact engine and print what came out, as JSON.

    python tests/numerics/operations_probe.py > out.json

Called in several environments by ``tests/system/test_operations.py``; golden hashes are in ``golden/operations.txt``.
For each operation: how many samples were computed, how many were refused and why, a hash over the inputs and one over
results and gradients, and which results are far from PyTorch's own.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext

import torch
from torch.utils._pytree import tree_leaves, tree_map

from samebits.errors import UserError
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.initialization import portable_initialization

SAMPLES = {torch.float32: 6, torch.int64: 3, torch.float64: 2, torch.bfloat16: 2, torch.complex64: 2}
ORDERS = {"argsort", "kthvalue", "sort", "topk"}  # which of equal elements is first is PyTorch's; floats all differ
NO_MODE = {"to_sparse"}  # leave the world of dense tensors
UNINITIALISED = "empty"  # in the name of an operation whose results are whatever is in memory
DIGITS = 12  # of a hash in the golden file


def probe_in(environ, *names):
    """What this script prints in an environment; the database yields some samples in the order of a set."""
    done = subprocess.run(
        [sys.executable, __file__, *names],
        env={**os.environ, "PYTHONHASHSEED": "0", **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def golden(found):
    """Hashes of the inputs and of the results by operation, as they stand in the golden file."""
    return {
        name: (entry["inputs"][:DIGITS], entry["hash"][:DIGITS])
        for name, entry in found.items()
        if UNINITIALISED not in name
    }


def tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def update(digest, values):
    for t in values:
        if t.layout != torch.strided:
            continue
        digest.update(f"{t.dtype}{tuple(t.shape)}".encode())
        plain = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())


def floats(values):
    return [t for t in values if t.dtype == torch.float32 and t.requires_grad]


def attempt(op, sample, mode):
    """Results, gradients of the inputs."""
    copied = tree_map(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x,
        (sample.input, sample.args, sample.kwargs),
    )
    inputs = floats(tensors(copied))
    with mode or nullcontext():
        results = tensors(op(copied[0], *copied[1], **copied[2]))
    grads = []
    wanted = [t for t in results if t.is_floating_point() and t.requires_grad]
    if inputs and wanted:
        weights = [(torch.arange(t.numel(), device=t.device) % 7 + 1).to(t.dtype).div(8).view(t.shape) for t in wanted]
        with Engine() if mode else nullcontext():
            grads = torch.autograd.grad(wanted, inputs, weights, allow_unused=True)
    return [t.detach() for t in results], [g for g in grads if g is not None]


def close(got, expected):
    return len(got) == len(expected) and all(map(_close, got, expected))


def _close(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == torch.bfloat16:  # what rounds at each operation is far from what rounds once
        return True
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a, b, rtol=2e-4, atol=2e-5, equal_nan=True)
    return torch.equal(a, b)


def name_of(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def all_samples(op, types=SAMPLES):
    """Samples of an operation, the same on every host: PyTorch's own draws differ between environments."""
    torch.manual_seed(0)
    with portable_initialization(0):
        return [sample for dtype in types for sample in samples_of(op, dtype)]


def samples_of(op, dtype):
    if dtype not in op.dtypes or (op.name in ORDERS and dtype != torch.float32):
        return []
    wanted = op.supports_autograd and dtype == torch.float32
    # Not op.sample_inputs, which seeds PyTorch's own generators for each sample: half the time, and none is used here.
    return itertools.islice(op.sample_inputs_func(op, "cpu", dtype, wanted), SAMPLES[dtype])


def probe(op):
    found = {"computed": 0, "refused": {}, "far": [], "hash": "", "inputs": ""}
    digest, given = hashlib.sha256(), hashlib.sha256()
    for number, sample in enumerate(all_samples(op)):
        try:
            expected = attempt(op, sample, None)
        except Exception:  # noqa: BLE001 - a sample that PyTorch itself refuses
            continue
        update(given, tensors((sample.input, sample.args, sample.kwargs)))
        try:
            got = attempt(op, sample, Engine(Draws(0, number, [0])))
        except UserError as error:
            found["refused"][str(error)] = found["refused"].get(str(error), 0) + 1
            continue
        found["computed"] += 1
        update(digest, [*got[0], *got[1]])
        if not close(got[0], expected[0]):
            found["far"].append(f"sample {number}: results")
        elif not close(got[1], expected[1]):
            found["far"].append(f"sample {number}: gradients")
    found["hash"], found["inputs"] = digest.hexdigest(), given.hexdigest()
    return found


def main():
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("PROBE_THREADS", "1")))
    only = sys.argv[1:]
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    out = {}
    for op in op_db:
        name = name_of(op)
        if name in NO_MODE or (only and op.name not in only):
            continue
        try:
            out[name] = probe(op)
        except Exception as error:  # noqa: BLE001 - reported
            out[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
