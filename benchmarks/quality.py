"""Does exact learn what fast learns? The test loss of every model and task, at the default parameters.

    python benchmarks/quality.py
    python benchmarks/quality.py --case regression --case tokens

Each is trained by the pipeline's own scripts, under ``single``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from ruamel.yaml import YAML

from common import ROOT, run, save

CASES = {
    "vectors": ("vectors", "mlp"),
    "wide": ("vectors", "wide_mlp"),
    "regression": ("regression", "mlp"),
    "images": ("images", "convnet"),
    "tokens": ("tokens", "gpt"),
}
NUMERICS = ("fast", "exact")


def measure(task: str, model: str, folder: Path) -> dict[str, Any]:
    """Test losses in both numerics, and what the exact training counted."""
    params = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["data"]["task"], params["model"]["name"], params["train"]["repeats"] = task, model, 1
    YAML().dump(params, folder / "params.yaml")

    def stage(name: str, *arguments: str) -> None:
        run(sys.executable, str(ROOT / "pipeline" / f"{name}.py"), *arguments, folder=folder)

    stage("prepare")
    losses: dict[str, float] = {}
    for numerics in NUMERICS:
        stage("train", "--strategy", "single", "--numerics", numerics, "--no-tracking")
        stage("evaluate", "--strategy", "single", "--numerics", numerics)
        out = folder / "runs" / f"single-{numerics}"
        losses[numerics] = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["eval_loss"]
    record = json.loads((folder / "runs/single-exact/run.json").read_text(encoding="utf-8"))
    steps = len(record["measurement"]["step_ms"])
    return {
        "task": task,
        "model": model,
        "steps": steps,
        "eval_loss": losses,
        "relative_difference": losses["exact"] / losses["fast"] - 1,
        "weights_sha256": record["weights_sha256"],
        **record["arithmetic"],
    }


@click.command(help=__doc__)
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="These alone.")
def main(names: tuple[str, ...]) -> None:
    cases = []
    for name in names or CASES:
        with TemporaryDirectory(prefix="samebits-") as folder:
            cases.append(found := measure(*CASES[name], Path(folder)))
        print(f"{name}: {found['eval_loss']}, {found['relative_difference']:+.3%}", flush=True)
    print(save("quality", {"question": "whether exact learns what fast learns", "cases": cases}))


if __name__ == "__main__":
    main()
