"""Does exact learn what fast learns? The test loss of every model and task, at the default parameters.

    python benchmarks/quality.py
    python benchmarks/quality.py --case regression --case tokens

Each is trained by the pipeline's own scripts, under ``single``. Two users' models are among them: an LSTM, with fewer
samples, and one with BatchNorm, which ``exact`` has by shard, as ``fast`` has it by rank, or by the batch, as ``fast``
has it on one device.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from ruamel.yaml import YAML

from common import BATCH, LEARNING_RATE, ROOT, few, save, some, stage, with_out_dir
from samebits.records.run import Evaluation, read_run

NUMERICS = ("fast", "exact")
SAMPLES = few(65_536, 1024)
OF_A_USER = ROOT / "benchmarks/user_models.py"


def case_of(task: str, name: str, samples: int = SAMPLES, exact: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Changes of the default parameters; ``kwargs`` are the model's."""
    data, model = {"task": task, "num_samples": samples}, {"name": name, "kwargs": kwargs}
    return {"data": data, "model": model, "exact": exact or {}}


RANKS = 8  # one for each shard


CASES = {
    "vectors": case_of("vectors", "mlp"),
    "wide": case_of("vectors", "wide_mlp"),
    "regression": case_of("regression", "mlp"),
    "images": case_of("images", "convnet"),
    "tokens": case_of("tokens", "gpt"),
    **{
        f"batch-norm-{form}": case_of("images", "user_models:Normed", exact={"batch_norm": form})
        for form in ("shard", "global")
    },
    "batch-norm-ranks": {**case_of("images", "user_models:Normed"), "train": {"oversubscribe": True}},
    "recurrent": case_of("tokens", "user_models:LSTM", SAMPLES // 4, vocab=32),
}


def measure(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Test losses in both numerics, and what the exact training counted."""
    params = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    for section, values in changes.items():
        params[section] |= values
    by_rank = "train" in changes
    params["train"] |= {"repeats": 1, "global_batch_size": BATCH}
    params["train"]["optimizer"]["lr"] = LEARNING_RATE
    YAML().dump(params, folder / "params.yaml")
    shutil.copy(OF_A_USER, folder)
    stage("prepare", folder=folder)
    losses: dict[str, float] = {}
    for numerics in NUMERICS:
        strategy = "ddp" if by_rank and numerics == "fast" else "single"
        devices = ("--num-devices", str(RANKS)) if strategy == "ddp" else ()
        stage("train", "--strategy", strategy, "--numerics", numerics, *devices, "--no-tracking", folder=folder)
        stage("evaluate", f"runs/{strategy}-{numerics}", "--out-dir", "evaluation", folder=folder)
        evaluation = Evaluation.read(folder / f"evaluation/{strategy}-{numerics}.json", made_by="evaluate.py")
        losses[numerics] = evaluation.eval_loss
    exact = read_run(folder / "runs/single-exact")
    assert exact.record.arithmetic
    form = "".join(f" with batch_norm: {form}" for form in changes["exact"].values())
    form += f", fast on {RANKS} devices" if by_rank else ""
    return {
        "task": changes["data"]["task"],
        "model": changes["model"]["name"].rpartition(":")[2] + form,
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
            case = measure(CASES[name], Path(folder))
        cases.append(case)
        print(f"{name}: {case['eval_loss']}, {case['relative_difference']:+.3%}", flush=True)
    print(save(out_dir, "quality", {"question": "whether exact learns what fast learns", "cases": cases}))


if __name__ == "__main__":
    main()
