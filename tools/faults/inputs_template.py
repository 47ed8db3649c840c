"""A finished pipeline, which cases copy before they damage a part of it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from faults.inputs_bench import Bench
from faults.inputs_params import SMALL_RUN
from faults.subject import ROOT, commit, expect

if TYPE_CHECKING:
    from pathlib import Path

RUN, DP, OTHER = "runs/single-fast", "runs/dp-fast", "runs/other"
_MODEL = """
import torch


def factory(**kwargs):
    return torch.nn.Linear(16, 10)
"""


def make_template(folder: Path) -> Path:
    """Run a small pipeline once, by its own stages, with its run in MLflow's store and its log beside it."""
    bench = Bench(folder, SMALL_RUN)
    work = bench.folder
    (work / "model.py").write_text(_MODEL, encoding="utf-8")
    for name, *arguments in (
        ("prepare",),
        ("host",),
        ("train", "--strategy", "single", "--no-tracking"),
        ("train", "--strategy", "dp", "--no-tracking"),
        ("evaluate",),
        ("compare", "--no-tracking"),
    ):
        child = bench.stage(name, *arguments, seconds=120)
        expect(child.code == 0, f"the pipeline that is to be damaged fails: {name}", child.printed())
    shutil.copytree(work / RUN, work / OTHER)
    for name in ("dvc.lock", "dvc.yaml", ".dvc/config"):
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, work / name)
    shutil.copytree(ROOT / "pipeline", work / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    commit(work, "params.yaml", "model.py", "pipeline", "dvc.lock", "dvc.yaml", ".dvc/config")
    child = bench.call(partial(_write_log, work))
    child = child if child.code else bench.samebits("track", "sync", seconds=120)
    expect(child.code == 0, "the log that is to be damaged cannot be delivered", child.printed())
    return work


def _write_log(work: Path) -> None:
    """The log of the run, and what it was made from."""
    from samebits.records.log import LOGS, RunLog
    from samebits.records.provenance import note_provenance
    from samebits.records.run import read_run
    from samebits.tracking.recorder import events

    run = read_run(work / RUN)
    log = RunLog(LOGS / f"{run.record.run}.jsonl")
    note_provenance(log.path)
    for event in events(run):
        log.append(event)
    log.close()


def own_store(bench: Bench, template: Path) -> str:
    """Let the store of a copied template have its artifacts in the copy, and give the id of its run."""
    with closing(sqlite3.connect(bench.folder / "mlflow.db")) as database:
        for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location")):
            move = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"  # noqa: S608 - names of our own
            database.execute(move, (str(template), str(bench.folder)))
        database.commit()
        ((run_id,),) = database.execute("SELECT run_uuid FROM runs")
    return str(run_id)


def forget_delivery(bench: Bench) -> None:
    """Let the log be as if nothing of it had been delivered, and the store empty but for its tables."""
    for state in (bench.folder / ".samebits/runs").glob("*.state.json"):
        state.unlink()
    with closing(sqlite3.connect(bench.folder / "mlflow.db")) as database:
        database.execute("UPDATE runs SET lifecycle_stage = 'deleted'")
        database.commit()
