r"""Try all of this repository on a host with GPUs, and write gpu-check.json, one file to send back.

It holds facts of the host, versions, hashes, figures, and what failed; no environment, no names, no paths. The
working tree stays as it is.

With --here it runs under the Python and the PyTorch that there are, also where neither DVC nor MLflow is installed
and no network is: the stages are called one by one.

\b
Examples:
  make gpu-check
  make gpu-check ONLY=tests
  PYTHONPATH=src python tools/gpu_check.py --here --only tests --only repro
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samebits.errors import HostError, exit_on_error, without_password
from samebits.files import write_json
from samebits.host import count_cores, count_gpus, driver_facts, may_share_gpus, torch_build
from samebits.numerics.environment import ENVIRONMENT, prepare_environment
from samebits.params import load_params
from samebits.records.provenance import git_state, versions
from samebits.records.run import read_run
from samebits.results.comparison import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

ROOT = Path(__file__).resolve().parent.parent
_LINES = 60  # last lines of a failed command's output
_REPORT_SECONDS = 60.0
_FACTS = "from samebits.host import host_facts; print(host_facts().model_dump_json())"
_COMMAND = "from samebits.cli import main; main()"  # needs no installed script


class Check:
    """Runs commands, which may fail, and records their output."""

    def __init__(self, folder: Path, set_here: Collection[str] = (), *, here: bool = False) -> None:
        """``set_here`` names variables that this process has set. ``here``: the package is not installed."""
        self.folder, self.set_here, self.here = folder, set_here, here
        self.samebits = [sys.executable, "-P", "-c", _COMMAND] if here else ["samebits"]
        self.steps: dict[str, dict[str, Any]] = {}

    def run(self, name: str, *command: str, minutes: float, cwd: Path = ROOT, **environ: str) -> str:
        """Run one command to its end and return its stdout.

        At a time-out its whole session is ended, or it would keep GPUs from the next step.
        """
        click.echo(f"{name} ...", err=True)
        started = time.monotonic()
        pipe, env = subprocess.PIPE, {**os.environ, **environ}
        with subprocess.Popen(
            command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=60 * minutes)
                code = process.returncode
            except subprocess.TimeoutExpired:
                _end_group(process)
                stdout, stderr = process.communicate()
                code = 124
            except BaseException:
                _end_group(process)
                raise
        said = f"{stdout}\n{stderr}"
        step = self.steps.setdefault(name, {"exit_code": 0, "seconds": 0.0})
        seconds = time.monotonic() - started
        step |= {"exit_code": step["exit_code"] or code, "seconds": round(step["seconds"] + seconds, 1)}
        if code:
            step.setdefault("said", []).extend(cleaned(line) for line in said.strip().splitlines()[-_LINES:])
        click.echo(f"{name}: {'ok' if code == 0 else f'failed with {code}'} in {seconds:.1f} s", err=True)
        return stdout


def _end_group(leader: subprocess.Popen[str]) -> None:
    """End a process and its session. SIGINT comes first: pytest then reports what it has done so far."""
    with suppress(ProcessLookupError):
        leader.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(_REPORT_SECONDS)
        os.killpg(leader.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(10)
        os.killpg(leader.pid, signal.SIGKILL)


def cleaned(text: str) -> str:
    """A line without passwords and without the names of folders, the user and the host."""
    folders = {str(ROOT): ".", tempfile.gettempdir(): "TMP", str(Path.home()): "~"}
    for path in sorted(folders, key=len, reverse=True):  # longest first: one may lie in another
        text = text.replace(path, folders[path]) if path != "/" else text
    text = re.sub(r"pytest-of-[^/\s]+", "pytest-of-USER", text)
    with suppress(OSError, KeyError):
        text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text) if getpass.getuser() != "root" else text
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
    return re.sub(r"\x1b\[[\d;]*m", "", without_password(text))


def host(check: Check) -> None:
    """Facts of the host: the kit's with CUDA started, and NVML's without."""
    out = check.run("host", sys.executable, "-c", _FACTS, minutes=5)
    check.steps["host"] |= {"driver": driver_facts().model_dump(mode="json")}
    if out:
        check.steps["host"]["facts"] = json.loads(out)


def doctor(check: Check) -> None:
    """Findings of the doctor, with those of the model."""
    out = check.run("doctor", *check.samebits, "doctor", "--model", "--json", minutes=10, MLFLOW_TRACKING_URI="")
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
    return [cleaned(line) for text in texts for line in text.splitlines()[-_LINES:]]


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
    """The pipeline at its defaults in a clone. Without DVC its stages run one by one in an empty folder."""
    if check.here:
        _stages(check)
        return
    clone = check.folder / "clone"
    check.run("repro", "git", "clone", "--quiet", str(ROOT), str(clone), minutes=5)
    if check.steps["repro"]["exit_code"]:
        return
    # The clone's own code, without the user's server and cluster.
    environ = {"PYTHONPATH": str(clone / "src"), "MLFLOW_TRACKING_URI": "", "SAMEBITS_LAUNCHER": ""}
    check.run("repro", "dvc", "repro", minutes=30, cwd=clone, **environ)
    _figures(check, clone)


def _stages(check: Check) -> None:
    folder = check.folder / "stages"
    folder.mkdir()
    (folder / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    train = load_params(folder / "params.yaml").train
    runs = [(strategy, numerics) for numerics in train.numerics for strategy in train.strategies]
    trainings = [["train", "--strategy", strategy, "--numerics", numerics] for strategy, numerics in runs]
    for stage, *options in (["host"], ["prepare"], *trainings, ["evaluate"], ["compare"]):
        untracked = ["--no-tracking"] if stage in ("train", "compare") else []
        script = str(ROOT / f"pipeline/{stage}.py")
        check.run("repro", sys.executable, script, *options, *untracked, minutes=15, cwd=folder)
    _figures(check, folder)


def _figures(check: Check, folder: Path) -> None:
    """Record the figures of a pipeline that ran in a folder."""
    file = folder / "reports/comparison.json"
    if file.exists():
        rows = Comparison.read(file, made_by="dvc repro").rows
        check.steps["repro"]["rows"] = {row.name: row.model_dump(mode="json") for row in rows}
        records = [read_run(folder / "runs" / row.name).record for row in rows]
        check.steps["repro"]["weights_sha256"] = {record.name: record.weights_sha256 for record in records}


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


STEPS: dict[str, Callable[[Check], None]] = {step.__name__: step for step in (host, doctor, tests, verify, cost, repro)}


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--only", type=click.Choice(list(STEPS)), multiple=True, help="This step alone; may be repeated.")
@click.option(
    "--out", default="gpu-check.json", show_default=True, type=click.Path(path_type=Path), help="File to write."
)
@click.option("--here", is_flag=True, help="With the Python and PyTorch that there are, without DVC and MLflow.")
@click.option("--without-gpu", is_flag=True, help="Go on where there is none, to try this command.")
def main(only: tuple[str, ...], out: Path, *, here: bool, without_gpu: bool) -> None:  # noqa: D103 - click
    with exit_on_error():
        if not without_gpu and not _has_gpus():
            raise HostError(f"no GPU that torch can use: {_why_none()}", hint="see `samebits doctor`")
        set_here = ENVIRONMENT.keys() - os.environ.keys()
        prepare_environment()  # for all commands
        if here:
            os.environ |= {"SAMEBITS_RUNTIME": "host", "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            check = Check(Path(folder), set_here, here=here)
            git = git_state()
            for name in only or STEPS:
                try:
                    STEPS[name](check)
                except Exception as error:  # noqa: BLE001 - a broken step must not end the others
                    step = check.steps.setdefault(name, {"exit_code": 0, "seconds": 0.0})
                    step["exit_code"] = step["exit_code"] or 1
                    step["problem"] = cleaned(f"{type(error).__name__}: {error}")
                problem = git.problem and cleaned(git.problem)
                facts = {"commit": git.commit, "git": problem, "dirty": git.dirty, "versions": versions()}
                # Written after each step, so that a host that dies leaves the steps before.
                write_json(out, {**facts, "steps": check.steps})
        failed = [name for name, step in check.steps.items() if step["exit_code"]]
        click.echo(f"{out}: {len(check.steps) - len(failed)} of {len(check.steps)} steps went well")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
