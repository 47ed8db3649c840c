"""Does exact learn what fast learns? The test loss of every model and task, at the default parameters.

    python benchmarks/quality.py
    python benchmarks/quality.py --case regression --case tokens

Each is trained by the pipeline's own scripts, under ``single``.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from ruamel.yaml import YAML

from common import BATCH, LEARNING_RATE, ROOT, few, save, some, stage, with_out_dir
from samebits.records.run import Evaluation, read_run

CASES = {
    "vectors": ("vectors", "mlp"),
    "wide": ("vectors", "wide_mlp"),
    "regression": ("regression", "mlp"),
    "images": ("images", "convnet"),
    "tokens": ("tokens", "gpt"),
}
NUMERICS = ("fast", "exact")
SAMPLES = few(65_536, 1024)


def measure(task: str, model: str, folder: Path) -> dict[str, Any]:
    """Test losses in both numerics, and what the exact training counted."""
    params = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["data"]["task"], params["model"]["name"], params["train"]["repeats"] = task, model, 1
    params["data"]["num_samples"] = SAMPLES
    params["train"]["global_batch_size"], params["train"]["optimizer"]["lr"] = BATCH, LEARNING_RATE
    YAML().dump(params, folder / "params.yaml")
    stage("prepare", folder=folder)
    losses: dict[str, float] = {}
    for numerics in NUMERICS:
        stage("train", "--strategy", "single", "--numerics", numerics, "--no-tracking", folder=folder)
        stage("evaluate", f"runs/single-{numerics}", "--out-dir", "evaluation", folder=folder)
        evaluation = Evaluation.read(folder / f"evaluation/single-{numerics}.json", made_by="evaluate.py")
        losses[numerics] = evaluation.eval_loss
    exact = read_run(folder / "runs/single-exact")
    assert exact.record.arithmetic
    return {
        "task": task,
        "model": model,
        "steps": len(exact.losses),
        "eval_loss": losses,
        "relative_difference": losses["exact"] / losses["fast"] - 1,
        "weights_sha256": exact.record.weights_sha256,
        **exact.record.arithmetic.model_dump(),
    }


@click.command(help=__doc__)
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="These alone.")
@with_out_dir
def main(names: tuple[str, ...], out_dir: Path) -> None:
    cases = []
    for name in names or some(CASES):
        with TemporaryDirectory(prefix="samebits-") as folder:
            case = measure(*CASES[name], Path(folder))
        cases.append(case)
        print(f"{name}: {case['eval_loss']}, {case['relative_difference']:+.3%}", flush=True)
    print(save(out_dir, "quality", {"question": "whether exact learns what fast learns", "cases": cases}))


if __name__ == "__main__":
    main()
