"""Plant causes, and see whether ``samebits explain`` names them, and whether its advice brings what it predicts.

    python benchmarks/explain.py                 # all of it
    python benchmarks/explain.py --only data     # one cause; or parts, or nothing

Each planting is trained at three severities. The first cause that is named is compared with what was planted, the
advice is followed, and the gain in samples per second is measured in trainings that take turns. Three trainings have
nothing wrong. ``parts`` compares the sum of the parts with the measured step for four models. It needs root, and a
network namespace of its own, whose loopback it slows down.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import reduce
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from common import ROOT, few, save, some, with_out_dir
from planted import PLANTINGS, SOUND, SOURCE, Case
from samebits.numerics.environment import prepare_environment
from samebits.params import Params, flatten
from samebits.records.run import read_run
from samebits.results.comparison import slice_step_ms
from samebits.results.explanation.against import change
from samebits.results.explanation.explain import explain
from samebits.results.explanation.remedies import TIMES, values_after
from samebits.workers.launch import run_training

if TYPE_CHECKING:
    from samebits.records.run import Run
    from samebits.results.explanation.explain import ExplainedCause, Explanation
    from samebits.strategies import StrategyName

INSIDE = "SAMEBITS_EXPLAIN_INSIDE"
FEATURES, CLASSES = 64, 10  # those of planted_model.py, which only its copy is imported from
STEPS = 32
PAIRS = few(2, 1)  # trainings with and without the advice
SAMPLES = 2**15
DATA = {"task": "vectors", "num_samples": SAMPLES, "test_samples": 64, "kwargs": {"features": FEATURES,
                                                                                 "classes": CLASSES}}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"data": {"task": "vectors"}, "batch": 2048},
    "wide_mlp": {"data": {"task": "vectors"}, "batch": 64},
    "convnet": {"data": {"task": "images"}, "batch": 64},
    "gpt": {"data": {"task": "tokens"}, "batch": 64},
}


class Bench:
    """A folder with data, in which cases are trained."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed, self._count = folder, seed, 0
        shutil.copy(ROOT / "benchmarks" / SOURCE, folder)
        os.chdir(folder)
        sys.path.insert(0, str(folder))

    def params(self, case: Case) -> Params:
        """The params of a case."""
        train = {"num_devices": 2 if case.strategy == "ddp" else 1, "global_batch_size": case.batch, "epochs": 16,
                 "numerics": ["fast"], "strategies": [case.strategy], "repeats": 2, "prolong_s": 0.0,
                 "checkpoint_every_steps": 0,
                 "optimizer": {"name": "sgd", "lr": 0.001, "momentum": 0.9, "weight_decay": 0.0}}  # fmt: skip
        model = {"name": "planted_model:Net", "source": SOURCE, "kwargs": case.model}
        return Params.model_validate(
            {"seed": self._seed, "data": DATA, "model": model, "train": {**train, **case.train}}
        )

    def train(self, params: Params, strategy: StrategyName, around: Any) -> Run:
        """One training in its surroundings."""
        self._count += 1
        out = self._folder / f"runs/{self._count}"
        data = self._prepared(params)
        with around():
            run_training(
                params,
                strategy,
                "fast",
                data_dir=data,
                out_dir=out,
                checkpoints=None,
                steps=min(STEPS, params.total_steps),
            )
        return read_run(out)

    def _prepared(self, params: Params) -> Path:
        """The data for the params, made once."""
        from samebits.data.prepare import prepare

        folder = self._folder / f"data-{params.data.task}-{params.data.num_samples}"
        if not folder.exists():
            prepare(params, folder)
        return folder


def explained(run: Run) -> Explanation:
    """The explanation of a run."""
    explanation = explain(run.record, slice_step_ms(run.record), run.timing.speedup)
    assert explanation
    return explanation


def speed(run: Run) -> float:
    """Samples per second in the plain steps of the marked pass."""
    return run.record.params.train.global_batch_size / explained(run).plain_ms


def parts_over_plain(run: Run) -> float:
    """The sum of the parts over a step without notes, both as the profiling pass has them."""
    alone = explain(run.record, None, None)
    assert alone
    return alone.step_ms / alone.plain_ms


def followed(params: Params, finding: ExplainedCause) -> Params:
    """The params changed as advised."""
    raw = params.model_dump()
    for key, value in values_after(finding.change, flatten(raw)).items():
        *path, last = key.split(".")
        reduce(dict.__getitem__, path, raw)[last] = value
    return Params.model_validate(raw)


def one_case(bench: Bench, name: str, number: int, case: Case) -> dict[str, Any]:
    """Plant a cause, explain the run, follow the advice, and measure the gain."""
    planting = PLANTINGS[name]
    params = bench.params(case)
    run = bench.train(params, case.strategy, case.around)
    explanation = explained(run)
    first = explanation.findings[0] if explanation.findings else None
    result: dict[str, Any] = {
        "planting": name,
        "severity": number,
        "cause": planting.cause,
        "named": first.cause if first else None,
        "share": first.share if first else None,
        "phase": first.phase if first else None,
        "all": [(finding.cause, finding.share and round(finding.share, 3)) for finding in explanation.findings],
        "step_ms": explanation.step_ms,
        "parts_over_plain": parts_over_plain(run),
    }
    of_planted = next((finding for finding in explanation.findings if finding.cause == planting.cause), None)
    if of_planted is None or of_planted.gain is None:
        return result
    other = planting.follow(case) if planting.follow else case
    better = bench.params(other) if planting.follow else followed(params, of_planted)
    speeds: dict[str, list[float]] = {"with": [], "without": [speed(run)]}
    for pair in range(PAIRS):
        if pair:
            speeds["without"].append(speed(bench.train(params, case.strategy, case.around)))
        speeds["with"].append(speed(bench.train(better, other.strategy, other.around)))
    obtained = median(speeds["with"]) / median(speeds["without"])
    predicted = of_planted.gain
    result |= {
        "predicted": predicted.median,
        "range": [predicted.low, predicted.high],
        "obtained": obtained,
        "error": abs(predicted.median - obtained) / obtained,
    }
    return result


def grown_batch(bench: Bench, factor: int) -> dict[str, Any]:
    """Compare step times of two batches: the larger one is the cause."""
    small, large = (bench.train(bench.params(Case("single", batch=batch)), "single", Case().around)
                    for batch in (512, 512 * factor))  # fmt: skip
    one = change(large, small)
    named, step_ms = "batch_grew" if one.batch_grew else None, explained(large).step_ms
    over_plain = parts_over_plain(large)
    return {"planting": "batch that grew", "severity": factor, "cause": "batch_grew", "named": named,
            "step_ms": step_ms, "parts_over_plain": over_plain}  # fmt: skip


def tell(result: dict[str, Any]) -> None:
    """Print a line for a case."""
    right = "right" if result["named"] == result["cause"] else "WRONG"
    gain = (
        f", gain {result['predicted']:.2f} predicted, {result['obtained']:.2f} obtained" if "obtained" in result else ""
    )
    print(
        f"{result['planting']:<32} {result['severity']}: {result['named'] or 'nothing'} ({right}){gain};"
        f" {result['step_ms']:.1f} ms a step, parts {result['parts_over_plain']:.3f} of plain; {result.get('all', '')}",
        flush=True,
    )


def parts(bench: Bench) -> list[dict[str, Any]]:
    """The sum of the parts over the measured step, for four models under each strategy that there is here."""
    results = []
    for name, one in some(MODELS).items():
        for strategy in few(("single", "dp", "ddp"), ("single",)):
            train = {"global_batch_size": one["batch"], "epochs": 1, "numerics": ["fast"], "repeats": 2,
                     "prolong_s": 0.0, "num_devices": 2, "checkpoint_every_steps": 0}  # fmt: skip
            data = {**one["data"], "num_samples": 24 * one["batch"], "test_samples": 64}
            params = Params.model_validate({"data": data, "model": {"name": name}, "train": train})
            run = bench.train(params, strategy, Case().around)
            if run.record.placement.fallback:  # as dp without GPUs, which single shows
                continue
            explanation, ratio = explained(run), parts_over_plain(run)
            results.append(
                {"model": name, "strategy": strategy, "step_ms": explanation.plain_ms, "parts_over_plain": ratio}
            )
            print(
                f"{name:<10} {strategy:<7} {explanation.plain_ms:8.2f} ms a step, parts {ratio:.3f} of it", flush=True
            )
    return results


@click.command(help=__doc__)
@click.option("--only", help="One planting by its name or cause, or sound, grew, parts.")
@click.option("--seed", default=0, show_default=True, help="Of weights, data and the order of cases.")
@with_out_dir
def main(only: str | None, seed: int, out_dir: Path) -> None:
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp(
            "unshare", ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, *sys.argv]
        )
    os.environ["SAMEBITS_RUNTIME"] = "host"
    prepare_environment()
    started = time.perf_counter()
    results: list[dict[str, Any]] = []
    sound: list[dict[str, Any]] = []
    sums: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), seed)
        cases = [
            (planting, number, case)
            for planting, one in some(PLANTINGS).items()
            for number, case in enumerate(one.cases[: few(None, 1)], 1)
        ]
        random.Random(seed).shuffle(cases)
        for planting, number, case in cases:
            if only in (None, planting, PLANTINGS[planting].cause):
                results.append(one_case(bench, planting, number, case))
                tell(results[-1])
        for factor in few((2, 4, 8), (2,)) if only in (None, "grew") else ():
            results.append(grown_batch(bench, factor))
            tell(results[-1])
        for what, case in some(SOUND).items() if only in (None, "sound") else ():
            explanation = explained(bench.train(bench.params(case), case.strategy, case.around))
            sound.append({"training": what, "named": [finding.cause for finding in explanation.findings]})
            print(f"{what}: {sound[-1]['named'] or 'nothing'}", flush=True)
        if only in (None, "parts"):
            sums = parts(bench)
        os.chdir(ROOT)
    seconds = time.perf_counter() - started
    right = sum(result["named"] == result["cause"] for result in results)
    errors = [result["error"] for result in results if "error" in result]
    if results:
        print(f"named right: {right} of {len(results)}")
    if errors:
        print(f"gain: median error {median(errors):.1%} of {len(errors)}")
    print(f"{seconds:.0f} s")
    if only is None:
        matrix = Counter((result["cause"], result["named"] or "nothing") for result in results)
        confusion = [[cause, named, count] for (cause, named), count in sorted(matrix.items())]
        record = {"results": results, "sound": sound, "parts": sums, "confusion": confusion, "seed": seed,
                  "seconds": seconds, "times": TIMES}  # fmt: skip
        print(save(out_dir, "explain", record))


if __name__ == "__main__":
    main()
