"""Peak resident memory of a training's worker over a bare script that does the same training (see script.py).

    python benchmarks/memory.py

The worker's figures are the kernel's since its training began, when the kit resets them: while it trains, and to its
end, which adds the saved weights and what the kit does after them. It is a fork that shares pages with the launcher
and has touched fewer of the libraries' than a fresh interpreter; the launcher waits beside it with its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from common import ROOT, VECTORS, few, middle_of, ratio_of, result_of, save, show_middle, some, with_out_dir
from samebits.data.prepare import prepare
from samebits.params import parse_params
from samebits.records.run import read_run
from samebits.strategies.placement import Devices
from samebits.training.meters import peak_gib
from samebits.training.placement import place
from samebits.training.worker import Worker
from samebits.workers.worker import TrainRequest, train_as_rank

if TYPE_CHECKING:
    from samebits.params import Params
    from samebits.workers.rank import Reporter

# name -> model, its hidden widths, global batch, steps
CASES = {"mlp at batch 256": ("mlp", (256, 128), 256, 128), "wide_mlp at batch 256": ("wide_mlp", (4096, 4096), 256, 4)}


def life(spec: TrainRequest, reporter: Reporter) -> float:
    """Train in a worker. Returns its peak until its end in GiB."""
    train_as_rank(spec, reporter)
    (peak,) = peak_gib(Worker([torch.device("cpu")]))
    return peak


def peaks_of_kit(params: Params, folder: Path) -> tuple[float, float]:
    """Peaks in MiB while a worker trains and until it ends."""
    placement, split = place("single", params, "fast", Devices(gpus=0, cores=1))
    spec = TrainRequest(
        params=params,
        numerics="fast",
        placement=placement,
        split=split,
        data_dir=folder,
        out_dir=folder,
        key="memory",
        checkpoints=folder / "checkpoints",
    )
    whole = result_of(partial(life, spec))
    training = read_run(folder).timing.peak_memory_gib["device0"]
    assert training, "the kernel does not say it"
    return 1024 * training, 1024 * whole


def resident() -> float:
    """Resident MiB of this process, the launcher."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@click.command(help=__doc__)
@click.option("--rounds", default=few(7, 1), show_default=True, help="Trainings of each kind.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    results = {}
    for name, (model, hidden, batch, steps) in some(CASES).items():
        params = parse_params(
            {
                "data": {**VECTORS, "num_samples": batch * steps, "test_samples": 64},
                "model": {"name": model, "kwargs": {"hidden": hidden}},
                "train": {"global_batch_size": batch, "epochs": 1, "repeats": 1},
            }
        )
        mib: dict[str, list[float]] = {"kit, training": [], "kit, to its end": [], "launcher": [], "bare": []}
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = Path(name_of_folder)
            prepare(params, folder)
            script = [f"{ROOT}/benchmarks/script.py", f"{folder}/train.safetensors"]
            script += [str(value) for value in (batch, steps, *hidden)]
            for _ in range(rounds):
                training, whole = peaks_of_kit(params, folder)
                mib["kit, training"].append(training)
                mib["kit, to its end"].append(whole)
                mib["launcher"].append(resident())
                done = subprocess.run([sys.executable, *script], capture_output=True, text=True, check=True)
                mib["bare"].append(float(done.stdout))
        ratio = ratio_of(mib["kit, training"], mib["bare"])
        print(f"{name}, kit over bare: {ratio['median']:.3f}x")
        for kind, values in mib.items():
            show_middle(f"  {kind}", middle_of(values), "MiB")
        results[name] = {"ratio": ratio, "mib": {kind: middle_of(values) for kind, values in mib.items()}}
    print(
        save(out_dir, "memory", {"question": "peak resident memory of a worker over a bare script", "cases": results})
    )


if __name__ == "__main__":
    main()
