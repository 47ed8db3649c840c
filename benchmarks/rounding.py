"""What verdicts say of trainings that differ by rounding alone, and of trainings that differ by a small mistake.

    python benchmarks/rounding.py

Each case is trained by the kit's own stages: ``single``, the same under ddp with 2 and 4 workers, and ``single``
again with a mistake. The tolerance is the one that ``samebits compare`` uses.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
from safetensors.numpy import load_file, save_file

from common import BATCH, LEARNING_RATE, MLP, VECTORS, few, save, some, stage, with_out_dir
from samebits.records.card import card_for, read_card
from samebits.records.run import read_run, relative_difference
from samebits.results.verdict import Tolerance, compare_runs

ADAMW = {"name": "adamw", "lr": 0.001, "momentum": 0.0, "weight_decay": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "mlp, SGD": {},
    "mlp, AdamW": {"train": {"optimizer": ADAMW}},
    "mlp, regression": {"data": {"task": "regression"}, "train": {"optimizer": {"lr": 0.01}}},
    "convnet, SGD": {
        "data": {"task": "images", "num_samples": 4096},
        "model": {"name": "convnet"},
        "train": {"optimizer": {"lr": 0.05}},
    },
    "gpt, AdamW": {
        "data": {"task": "tokens", "num_samples": 8192},
        "model": {"name": "gpt"},
        "train": {"optimizer": ADAMW},
    },
}


class Case:
    """The trainings of one case, in a folder of their own."""

    def __init__(self, folder: Path, raw: dict[str, Any]) -> None:
        self.folder, self.raw = folder, raw
        self._stage("prepare", raw)

    def _stage(self, name: str, raw: dict[str, Any], *arguments: str) -> None:
        (self.folder / "params.yaml").write_text(json.dumps(raw))
        stage(name, *arguments, folder=self.folder)

    def train(self, name: str, strategy: str, raw: dict[str, Any], *arguments: str) -> None:
        """Train into the folder ``name``."""
        self._stage("train", raw, "--strategy", strategy, "--out-dir", name, "--no-tracking", *arguments)

    def judge(self, name: str) -> dict[str, Any]:
        """Verdict on a training against ``single``, and the largest used share of the tolerance."""
        reference, run = read_run(self.folder / "single"), read_run(self.folder / name)
        verdict = compare_runs(reference, run)
        losses, twins = verdict.losses, [reference.record.rounding, run.record.rounding]
        limits = Tolerance([reference.record.params.train.precision], twins).losses(losses.steps)
        pairs = zip(reference.losses, run.losses, limits, strict=True)
        return {
            "grade": verdict.grade,
            **losses.model_dump(include={"steps", "first_beyond", "largest_relative"}),
            "tolerance_used": max(relative_difference(a, b) / limit for a, b, limit in pairs),
        }

    def measure(self) -> dict[str, dict[str, Any]]:
        """Train everything and judge it."""
        self.train("single", "single", self.raw)
        for workers in few((2, 4), (2,)):
            self.train(f"ddp, {workers} workers", "ddp", self.raw, "--num-devices", str(workers))
        optimizer = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0, "lr": 0.1, **self.raw["train"]["optimizer"]}
        for name, mistake in (
            ("learning rate 1% higher", {"lr": 1.01 * optimizer["lr"]}),
            ("weight decay of 0.0001", {"weight_decay": 1e-4}),
        ):
            train = {**self.raw["train"], "optimizer": {**optimizer, **mistake}}
            self.train(name, "single", {**self.raw, "train": train})
        split = self.folder / "data" / "train.safetensors"
        tensors = load_file(split)
        for tensor in tensors.values():
            tensor[0] = tensor[1]
        save_file(tensors, split)
        signed = card_for(split, read_card(split.with_name("card.json")))
        split.with_name("card.json").write_text(signed.model_dump_json(), encoding="utf-8")
        self.train("one sample replaced", "single", self.raw)
        names = [path.parent.name for path in sorted(self.folder.glob("*/run.json")) if path.parent.name != "single"]
        return {name: self.judge(name) for name in names}


@click.command(help=__doc__)
@click.option("--precision", "precisions", multiple=True, default=["fp32", "bf16"], show_default=True)
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="These alone.")
@with_out_dir
def main(precisions: tuple[str, ...], names: tuple[str, ...], out_dir: Path) -> None:
    cases = {}
    for name in names or some(CASES):
        changes = CASES[name]
        for precision in few(precisions, precisions[:1]):
            raw = {
                "data": {"num_samples": few(16384, 1024), "test_samples": 64, **changes.get("data", VECTORS)},
                "model": changes.get("model", MLP),
                "train": {
                    "global_batch_size": BATCH,
                    "optimizer": {"lr": LEARNING_RATE},
                    **changes.get("train", {}),
                    "precision": precision,
                    "repeats": 2,
                    "oversubscribe": True,
                },
            }
            with tempfile.TemporaryDirectory() as folder:
                verdicts = Case(Path(folder), raw).measure()
            cases[f"{name}, {precision}"] = verdicts
            for what, verdict in verdicts.items():
                beyond = f", beyond at step {verdict['first_beyond']}" if verdict["first_beyond"] else ""
                print(f"{name}, {precision}: {what}: {verdict['grade']}{beyond}, {verdict['tolerance_used']:.0%} used")
    print(
        save(out_dir, "rounding", {"question": "what verdicts say of rounding and of small mistakes", "cases": cases})
    )


if __name__ == "__main__":
    main()
