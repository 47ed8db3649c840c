"""How many different results one computation has on one host, in PyTorch's own arithmetic and in exact numerics.

    python benchmarks/bits.py

The same float32 inputs, made from integers, in processes whose environment lets PyTorch and MKL choose other kernels,
as another host would. Two results are different if one bit is. Instruction sets that this host lacks are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import torch
from torch import nn
from torch.nn import functional as F

from common import few, save, with_out_dir
from samebits.host import host_facts
from samebits.numerics.exact.engine import Engine
from samebits.portable.random import Stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

KERNELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("default", {}),
    ("avx2", {}),
    ("avx512", {}),
    ("default", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    ("avx2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    ("avx512", {"MKL_CBWR": "COMPATIBLE"}),
)
NEEDS = {"avx2": "avx2", "avx512": "avx512f"}  # on a CPU without them PyTorch would crash
SIZE = 512
STEPS = 20


def numbers(purpose: str, *shape: int) -> Tensor:
    """Normal float32 numbers, the same on every host."""
    return torch.from_numpy(Stream(0, purpose).normal(torch.Size(shape).numel())).view(shape).float()


def linear_model(x: Tensor) -> Tensor:
    """The weights after some steps of SGD with a hidden layer and cross-entropy."""
    first, second = (numbers(name, SIZE, SIZE).mul_(0.0625).requires_grad_() for name in ("first", "second"))
    classes = torch.arange(SIZE) % 10
    for _ in range(STEPS):
        loss = F.cross_entropy(F.gelu(x @ first) @ second, classes)
        gradients = torch.autograd.grad(loss, [first, second])
        with torch.no_grad():
            for weight, gradient in zip((first, second), gradients, strict=True):
                weight.sub_(gradient.mul(0.0625))
    return torch.cat([first.detach(), second.detach()])


def convolution(x: Tensor) -> Tensor:
    """A convolution of 3 by 3 over 16 channels."""
    return F.conv2d(x.view(4, 16, 64, 64), numbers("kernel", 16, 16, 3, 3))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "addition, multiplication": lambda x: x * x + x,
    "matrix product": lambda x: x @ x,
    "sum of a row": lambda x: x.sum(1),
    "convolution": convolution,
    "x + 0.3 y in one call": lambda x: torch.add(x, x.flip(0), alpha=0.3),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "power": lambda x: x.abs().pow(0.3),
    "GELU": F.gelu,
    "softmax": lambda x: x.softmax(1),
    "LayerNorm": nn.LayerNorm(SIZE),
    f"{STEPS} steps of training": linear_model,
}


def environments() -> list[dict[str, str]]:
    """Environments for which this host has the instruction sets."""
    here = host_facts().cpu.instruction_sets
    kernels = [(isa, mkl) for isa, mkl in KERNELS if isa not in NEEDS or NEEDS[isa] in here]
    return [
        {"ATEN_CPU_CAPABILITY": isa, **mkl, "OMP_NUM_THREADS": threads}
        for isa, mkl in kernels
        for threads in ("1", "2")
    ]


def digests() -> dict[str, dict[str, str]]:
    """Hashes of each operation's result in both arithmetics."""
    x = numbers("inputs", SIZE, SIZE)
    hashes: dict[str, dict[str, str]] = {}
    for name, operation in OPERATIONS.items():
        with Engine():
            exact = operation(x)
        results = {"fast": operation(x), "exact": exact}
        hashes[name] = {
            kind: hashlib.sha256(result.detach().contiguous().numpy().tobytes()).hexdigest()
            for kind, result in results.items()
        }
    return hashes


@click.command(help=__doc__)
@click.option("--here", is_flag=True, help="Print this process's digests alone, as JSON.")
@with_out_dir
def main(here: bool, out_dir: Path) -> None:
    if here:
        print(json.dumps(digests()))
        return
    chosen, by_environment = environments()[: few(None, 1)], []
    for environ in chosen:
        command = [sys.executable, __file__, "--here"]
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
        by_environment.append(json.loads(done.stdout))
    counts = {
        name: {kind: len({hashes[name][kind] for hashes in by_environment}) for kind in ("fast", "exact")}
        for name in OPERATIONS
    }
    for name, count in counts.items():
        print(f"{name:30}{count['fast']:4}{count['exact']:4}")
    record = {"environments": chosen, "different_results": counts}
    print(save(out_dir, "bits", {"question": "how many results one computation has", **record}))


if __name__ == "__main__":
    main()
