"""The kit's training loop against a bare one, written by hand, by paired CPU time on one thread.

    python benchmarks/loop.py

The bare loop keeps all data in memory, indexes whole batches and does nothing else: no schedule, no clock, no
tracker. Both start from the same weights, feed the same batches, and end with the same losses (checked).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import torch
from torch.nn import functional as F

from common import Variant, interleave, ratio_of, save, show, verdict
from samebits.data.batches import Batches, load_split
from samebits.data.prepare import prepare
from samebits.models.build import build_model
from samebits.numerics.fast import FastNumerics
from samebits.params import Params, parse_params
from samebits.placement import place
from samebits.strategies import make_strategy
from samebits.trainer import Trainable, train, warm_up

CASES = {
    "mlp at batch 64": ({"name": "mlp"}, 64, 256),
    "mlp at batch 256": ({"name": "mlp"}, 256, 128),
    "wide_mlp at batch 256": ({"name": "wide_mlp"}, 256, 2),
}
CPU = torch.device("cpu")


class Silent:
    """No tracker."""

    def losses(self, first_step, losses, learning_rates) -> None:
        """Drop them."""


def parameters(model: dict[str, object], batch: int, steps: int) -> Params:
    """A training of so many steps at a constant learning rate."""
    return parse_params(
        {
            "data": {"num_samples": batch * steps, "test_samples": 64},
            "model": model,
            "train": {
                "global_batch_size": batch,
                "epochs": 1,
                "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
                "schedule": {"name": "constant"},
            },
        }
    )


def measure(params: Params, folder: Path, rounds: int) -> dict[str, object]:
    card = prepare(params, folder)
    data = load_split(folder, card, "train")
    strategy = make_strategy(place("single", params.train, gpus=0, cores=1), params.train)
    strategy.setup()
    numerics = FastNumerics(params.train, CPU, card.loss)
    numerics.configure()
    batch, steps = params.train.global_batch_size, params.total_steps
    model = build_model(params.model, card, params.seed)
    batches = Batches(data, card, seed=params.seed, global_batch_size=batch, accum=1, device=CPU)
    job = Trainable(model, batches, strategy, numerics, params)
    warm_up(job, 3)
    losses: dict[str, list[float]] = {}

    def kit() -> None:
        losses["kit"] = train(job, steps, step_seconds=1e-3, tracker=Silent()).losses

    bare_model = build_model(params.model, card, params.seed)
    initial = [p.detach().clone() for p in bare_model.parameters()]
    optimizer = torch.optim.SGD(bare_model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = data
    order = torch.cat([batches._rows(step, 0) for step in range(steps)])

    def bare() -> None:
        found = []
        for step in range(steps):
            rows = order[step * batch : (step + 1) * batch]
            x, y = inputs[rows], targets[rows]
            optimizer.zero_grad()
            loss = F.cross_entropy(bare_model(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses["bare"] = torch.stack(found).tolist()

    def reset_bare() -> None:
        torch.use_deterministic_algorithms(False)
        with torch.no_grad():
            for p, value in zip(bare_model.parameters(), initial, strict=True):
                p.copy_(value)
        optimizer.state.clear()

    def reset_kit() -> None:
        torch.use_deterministic_algorithms(True)
        job.reset()

    variants = {"kit": Variant(kit, reset_kit), "bare": Variant(bare, reset_bare)}
    interleave(variants, 3)
    assert losses["kit"] == losses["bare"], "the two loops do not do the same work"
    seconds = interleave(variants, rounds)
    ratio = ratio_of(seconds["kit"], seconds["bare"])
    milliseconds = {name: 1e3 * sorted(values)[len(values) // 2] / steps for name, values in seconds.items()}
    return {"ratio": ratio, "verdict": verdict(ratio), "cpu_ms_per_step": milliseconds, "steps_per_slice": steps}


@click.command(help=__doc__)
@click.option("--rounds", default=60, show_default=True, help="Slices of each loop.")
def main(rounds: int) -> None:
    cases = {}
    for name, (model, batch, steps) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = measure(parameters(model, batch, steps), Path(folder), rounds)
        show(name, cases[name]["ratio"])
    print(save("loop", {"question": "CPU time of the kit's loop over a bare loop", "cases": cases}))


if __name__ == "__main__":
    main()
