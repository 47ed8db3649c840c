"""Try all of this repository on a host with GPUs, and write gpu-check.json, one file to send back.

It holds facts of the host, versions, hashes, figures, and what failed; no environment, no names, no paths. The
working tree stays as it is.

With --here it runs under the Python and the PyTorch that there are, also where neither DVC nor MLflow is installed
and no network is: the stages are called one by one. tools/gpu_wheels.py gathers what else it needs.

The file is written after each command. --minutes ends in time; --add goes on with the file of an earlier call.

\b
Examples:
  make gpu-check
  make gpu-check ONLY=tests
  PYTHONPATH=src:site python tools/gpu_check.py --here --only host --only repro --minutes 8
  PYTHONPATH=src:site python tools/gpu_check.py --here --only speed --minutes 8 --add
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recorded_commands import LINES, Check, cleaned
from samebits.errors import HostError, UserError, exit_on_error, reason
from samebits.files import write_json
from samebits.host import count_cores, count_gpus, driver_facts, may_share_gpus, torch_build
from samebits.numerics.environment import ENVIRONMENT, prepare_environment
from samebits.params import load_params
from samebits.records.provenance import git_state, versions
from samebits.records.run import read_run
from samebits.results.comparison import Comparison
from samebits.results.lock import Lock, read_lock
from samebits.results.verify import BITS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
GPU_PARAMS = ROOT / "gpu/params.yaml"
_FACTS = "from samebits.host import host_facts; print(host_facts().model_dump_json())"


def host(check: Check) -> None:
    """Facts of the host: the kit's with CUDA started, and NVML's without."""
    out = check.run("host", sys.executable, "-c", _FACTS, minutes=5)
    check.steps["host"] |= {"driver": driver_facts(ask_cuda=True).model_dump(mode="json")}
    if out:
        check.steps["host"]["facts"] = json.loads(out)


def doctor(check: Check) -> None:
    """Findings of the doctor, with those of the model."""
    folder = ["--folder", "gpu"] if count_gpus() else []
    call = ["doctor", *folder, "--model", "--json"]
    out = check.run("doctor", *check.samebits, *call, minutes=10, MLFLOW_TRACKING_URI="")
    if out:
        findings = json.loads(out)["findings"]
        check.steps["doctor"]["findings"] = [
            {key: cleaned(str(value)) for key, value in finding.items() if value} for finding in findings
        ]


def tests(check: Check) -> None:
    """Results of ``tests/gpu``, which include the CPU's golden hashes."""
    report = check.folder / "tests.xml"
    without = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the benchmark plugin warns, which is an error here
    command = [sys.executable, "-m", "pytest", "-v", *without, f"--junitxml={report}", "tests/gpu"]
    if find_spec("xdist") and may_share_gpus():
        command += ["-n", str(max(1, min(8, count_cores() // 2))), "--dist", "load"]
    unset = [f"--unset={name}" for name in sorted(check.set_here)]  # so that stages have to set them themselves
    check.run("tests", "env", *unset, *command, minutes=120, OMP_NUM_THREADS="2")
    if report.exists():
        cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314 - pytest wrote it
        failed = {f"{case.get('classname')}::{case.get('name')}": said for case in cases if (said := _why(case))}
        marks = [mark for case in cases if (mark := case.find("skipped")) is not None]
        skipped = Counter(cleaned(mark.get("message") or "") for mark in marks)
        step = check.steps["tests"]
        step |= {"tried": len(cases), "skipped": dict(skipped), "failed": failed}
        if count_gpus() and skipped.total() == len(cases):
            step["exit_code"] = step["exit_code"] or 5  # a run of nothing is no success


def _why(case: ET.Element) -> list[str]:
    """The last lines of pytest's report of a failure."""
    texts = [part.text or part.get("message") or "" for part in case if part.tag in ("failure", "error")]
    return [cleaned(line) for text in texts for line in text.splitlines()[-LINES:]]


def verify(check: Check) -> None:
    """The exact runs of ``dvc.lock``, trained again."""
    out = check.run("verify", *check.samebits, "verify", minutes=30)
    if not check.steps["verify"]["exit_code"]:  # a failed command's output is recorded already
        check.steps["verify"]["said"] = [cleaned(line) for line in out.splitlines()]


def cost(check: Check) -> None:
    """Cost of exact numerics over fast."""
    command = [sys.executable, "benchmarks/exact.py", "--rounds", "10", "--out-dir", str(check.folder / "results")]
    check.run("cost", *command, minutes=60)
    for file in (check.folder / "results").rglob("exact.json"):
        check.steps["cost"]["cases"] = json.loads(file.read_text(encoding="utf-8"))["cases"]


def repro(check: Check) -> None:
    """The pipeline at its defaults in a clone. Without DVC its stages run one by one in an empty folder.

    Its steps are short, so that on a GPU it shows the bits, and ``speed`` the speed.
    """
    if check.here:
        _stages(check, "repro", ROOT / "params.yaml")
    else:
        clone = check.folder / "clone"
        check.run("repro", "git", "clone", "--quiet", str(ROOT), str(clone), minutes=5)
        if check.steps["repro"]["exit_code"]:
            return
        # The clone's own code, without the user's server and cluster.
        environ = {"PYTHONPATH": str(clone / "src"), "MLFLOW_TRACKING_URI": "", "SAMEBITS_LAUNCHER": ""}
        check.run("repro", "dvc", "repro", minutes=30, cwd=clone, **environ)
        _figures(check, "repro", clone)
    if "weights_sha256" in check.steps["repro"]:
        folder = check.folder / ("repro" if check.here else "clone")
        check.steps["repro"]["same_bits"] = same_bits(folder, read_lock(ROOT))


def speed(check: Check) -> None:
    """The stages one by one with the parameters for GPUs, whose steps are arithmetic and not launches."""
    _stages(check, "speed", GPU_PARAMS)


def same_bits(folder: Path, lock: Lock) -> dict[str, bool]:
    """Whether the weights and losses of each exact run are those of ``dvc.lock``, by its name."""
    bits = {path: md5 for stage in lock.stages for path, md5 in lock.files(stage).items() if Path(path).name in BITS}
    found: dict[str, bool] = {}
    for path, md5 in bits.items():
        name = Path(path).parent.name
        if name.endswith("-exact") and (folder / path).exists():
            same = hashlib.md5((folder / path).read_bytes()).hexdigest() == md5  # noqa: S324 - as DVC has it
            found[name] = found.get(name, True) and same
    return found


def _stages(check: Check, name: str, params: Path) -> None:
    folder = check.folder / name
    folder.mkdir()
    (folder / "params.yaml").write_bytes(params.read_bytes())
    train = load_params(folder / "params.yaml").train
    runs = [(strategy, numerics) for numerics in train.numerics for strategy in train.strategies]
    trainings = [["train", "--strategy", strategy, "--numerics", numerics] for strategy, numerics in runs]
    for stage, *options in (["host"], ["prepare"], *trainings, ["evaluate"], ["compare"]):
        untracked = ["--no-tracking"] if stage in ("train", "compare") else []
        script = str(ROOT / f"pipeline/{stage}.py")
        check.run(name, sys.executable, script, *options, *untracked, minutes=15, cwd=folder)
    _figures(check, name, folder)


def _figures(check: Check, name: str, folder: Path) -> None:
    """Record the figures of a pipeline that ran in a folder, and what it trained."""
    file = folder / "reports/comparison.json"
    if file.exists():
        comparison = Comparison.read(file, made_by="dvc repro")
        records = [read_run(folder / "runs" / row.name).record for row in comparison.rows]
        model, batch = comparison.params.model, comparison.params.train.global_batch_size
        kwargs = model.model_dump(mode="json", exclude_defaults=True).get("kwargs")
        check.steps[name] |= {
            "trained": f"{model.name}{f' {json.dumps(kwargs)}' if kwargs else ''} at batch {batch}",
            "rows": {row.name: row.model_dump(mode="json") for row in comparison.rows},
            "weights_sha256": {record.name: record.weights_sha256 for record in records},
        }


def _has_gpus() -> bool:
    """Whether there is a GPU, usable or not. The steps show why one is not."""
    try:
        return count_gpus() > 0
    except HostError:
        return True


def _why_none() -> str:
    """Why there is no GPU to check."""
    build = torch_build()
    if problem := driver_facts().problem:
        return problem
    if build.cuda is None:
        return f"torch {build.version} is not built for CUDA: make gpu-check TORCH=gpu"
    return f"the driver answers, and CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')} leaves none"


STEPS: dict[str, Callable[[Check], None]] = {
    step.__name__: step for step in (host, doctor, tests, verify, repro, speed, cost)
}


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--only", type=click.Choice(list(STEPS)), multiple=True, help="This step alone; may be repeated.")
@click.option(
    "--out", default="gpu-check.json", show_default=True, type=click.Path(path_type=Path), help="File to write."
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="End after so many, with what there is.")
@click.option("--add", is_flag=True, help="Keep the other steps of the file, which must be of the same commit.")
@click.option("--here", is_flag=True, help="With the Python and PyTorch that there are, without DVC and MLflow.")
@click.option("--without-gpu", is_flag=True, help="Go on where there is none, to try this command.")
def main(  # noqa: D103 - click
    only: tuple[str, ...], out: Path, *, minutes: float | None, add: bool, here: bool, without_gpu: bool
) -> None:
    with exit_on_error():
        if not without_gpu and not _has_gpus():
            raise HostError(f"no GPU that torch can use: {_why_none()}", hint="see `samebits doctor`")
        set_here = ENVIRONMENT.keys() - os.environ.keys()
        prepare_environment()  # for all commands
        if here:
            os.environ |= {"SAMEBITS_RUNTIME": "host", "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        git = git_state()
        facts = {"commit": git.commit, "git": git.problem and cleaned(git.problem), "dirty": git.dirty}
        steps = known_steps(out, git.commit) if add else {}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

            def save() -> None:  # so that a host that dies leaves what it has done
                write_json(out, {**facts, "versions": versions(), "steps": check.steps})

            limit = inf if minutes is None else minutes
            check = Check(Path(folder), set_here, here=here, minutes=limit, steps=steps, save=save)
            for name in only or STEPS:
                steps.pop(name, None)
                try:
                    STEPS[name](check)
                except Exception as error:  # noqa: BLE001 - a broken step must not end the others
                    step = check.steps.setdefault(name, {"exit_code": 0, "seconds": 0.0})
                    step["exit_code"] = step["exit_code"] or 1
                    step["problem"] = cleaned(f"{type(error).__name__}: {error}")
                save()
        failed = [name for name, step in check.steps.items() if step["exit_code"]]
        click.echo(f"{out}: {len(check.steps) - len(failed)} of {len(check.steps)} steps went well")
    sys.exit(1 if failed else 0)


def known_steps(out: Path, commit: str | None) -> dict[str, dict[str, Any]]:
    """The steps of an earlier file. Raises UserError: it is of another commit, or is no such file."""
    if not out.exists():
        return {}
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
        made, steps = found["commit"], dict(found["steps"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{out}: no file of this check: {reason(error)}", hint="leave --add away") from None
    if made != commit:
        raise UserError(f"{out} is of commit {made}, this is {commit}", hint="leave --add away")
    return steps


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
