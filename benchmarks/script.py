"""The least script that trains a multi-layer perceptron; it prints its peak of resident memory in MiB.

python benchmarks/script.py data/train.safetensors BATCH STEPS HIDDEN...
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


def main(file: str, batch: int, steps: int, *hidden: int) -> None:
    torch.set_num_threads(1)
    data = load_file(file)
    inputs, targets = data["inputs"], data["targets"]
    widths = [inputs.shape[1], *hidden, int(targets.max()) + 1]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.randperm(len(inputs))
    for step in range(steps):
        rows = order[step * batch : (step + 1) * batch]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    print(next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:")))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
