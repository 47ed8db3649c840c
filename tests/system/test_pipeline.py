"""The pipeline as a user runs it: DVC in a repository of its own, with the sources of this one."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from conftest import ROOT, copy_sources
from patience import patient

pytestmark = pytest.mark.slow
PARAMS = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
PARAMS["data"] |= {"num_samples": 1024, "test_samples": 256, "kwargs": {"features": 128}}
PARAMS["train"]["global_batch_size"] = 256
PARAMS["train"]["prolong_s"] = 0.0  # times are not what is tested
PARAMS["model"] = {"name": "mine:make", "kwargs": {"width": 16}, "source": "mine.py"}
MODEL = """from torch import nn

def make(width):
    return nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 10))
"""


class Repository:
    """A fresh repository with the tracked files of this one, and the environment that ``make`` gives its commands.

    It has a ``.venv`` of its own, made by the Makefile as for a new user; only the packages' cache is shared.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = dict(os.environ)
        self.environ["PATH"] = f"{folder}/.venv/bin:{os.environ['PATH']}"
        for name in ("MLFLOW_TRACKING_URI", "MAKEFLAGS", "MAKELEVEL", "VIRTUAL_ENV"):
            self.environ.pop(name, None)
        for name in ("AUTHOR", "COMMITTER"):
            self.environ |= {f"GIT_{name}_NAME": "test", f"GIT_{name}_EMAIL": "test@localhost"}

    def fill(self) -> None:
        copy_sources(self.folder)
        self.write_params(PARAMS)
        (self.folder / "mine.py").write_text(MODEL)
        self("git", "init", "--quiet")
        self.commit()

    def write_params(self, params) -> None:
        YAML().dump(params, self.folder / "params.yaml")

    def commit(self) -> None:
        self("git", "add", "--all")
        self("git", "commit", "--quiet", "--allow-empty", "--message", "test")

    def run(self, *command, **environ) -> subprocess.CompletedProcess[str]:
        environ = {**self.environ, **environ}
        try:
            return subprocess.run(
                command,
                cwd=self.folder,
                env=environ,
                capture_output=True,
                text=True,
                timeout=patient(600),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:  # it would show the first characters alone
            printed = ((error.stdout or b"") + (error.stderr or b"")).decode()
            pytest.fail(f"{shlex.join(command)} took over {error.timeout} s, and had printed:\n{printed}")

    def __call__(self, *command, check=True, **environ) -> str:
        done = self.run(*command, **environ)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def stale(self) -> set[str]:
        """Stages that DVC would run, the always changed one aside."""
        return set(json.loads(self("dvc", "status", "--json", "dvc.yaml"))) - {"host"}

    def json(self, name: str):
        return json.loads((self.folder / name).read_text())

    @contextmanager
    def edited(self, name: str, change: Callable[[str], str] = "{}# edited\n".format) -> Iterator[None]:
        """Change a file for the block."""
        file = self.folder / name
        kept = file.read_text()
        file.write_text(change(kept))
        try:
            yield
        finally:
            file.write_text(kept)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository in which the README's command ran once; the tests below go on from one another, in their order."""
    made = Repository(tmp_path_factory.mktemp("repository"))
    made.fill()
    made.output = made("make", "repro", f"PYTHON={sys.executable}")
    return made


RUNS = [f"{strategy}-{numerics}" for numerics in ("fast", "exact") for strategy in ("single", "dp", "ddp")]
TRAININGS = {f"train@{name}" for name in RUNS}


def ran(output: str) -> set[str]:
    return {line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage '")}


def test_one_command_ends_with_the_answers(repository):
    log = (repository.folder / ".samebits/repro.log").read_text()
    assert ran(log) == {"host", "prepare", "evaluate", "compare"} | TRAININGS
    for name in RUNS:
        assert name in repository.output
        files = {file.name for file in (repository.folder / "runs" / name).iterdir()}
        assert files == {"model.safetensors", "losses.csv", "timing.json", "run.json"}
    rows = repository.json("reports/comparison.json")["rows"]
    assert [f"{row['strategy']}-{row['numerics']}" for row in rows] == RUNS
    assert len({row["weights_sha256"] for row in rows if row["numerics"] == "exact"}) == 1
    assert {file.stem for file in (repository.folder / "reports/evaluation").iterdir()} == set(RUNS)
    assert "| ddp-fast |" in (repository.folder / "reports/comparison.md").read_text()
    (answers,) = re.findall(
        r"^─{100}\n(?:.*\n)+?  the rest   .*; MLflow: make ui$", repository.output, flags=re.MULTILINE
    )
    assert "exact: every bit, under single and ddp, on any host" in answers
    assert len(answers.splitlines()) <= 25
    assert "dvc push" not in repository.output  # the run ends with its answers, not with DVC's advice


def runs_in(repository):
    """Strategy (or ``all``), status, metrics, tags and id of every run in the repository's store."""
    code = (
        "import json, mlflow\n"
        f"client = mlflow.MlflowClient('sqlite:///{repository.folder}/mlflow.db')\n"
        "experiment = client.get_experiment_by_name('samebits').experiment_id\n"
        "runs = client.search_runs([experiment])\n"
        "print(json.dumps([[r.data.tags.get('strategy', 'all'), r.info.status, r.data.metrics, r.data.tags,"
        " r.info.run_id] for r in runs]))\n"
    )
    return json.loads(repository("python", "-W", "ignore", "-c", code).splitlines()[-1])


def test_the_runs_are_in_mlflow(repository):
    runs = runs_in(repository)
    found = {"-".join([run[0], *([run[3]["numerics"]] if "numerics" in run[3] else [])]): run[1:] for run in runs}
    assert sorted(found) == sorted([*RUNS, "all"])
    assert len(found) == len(runs)
    assert found.pop("all")[0] == "FINISHED"
    for status, metrics, tags, _ in found.values():
        assert status == "FINISHED"
        assert {"loss", "eval_loss", "accuracy", "samples_per_sec", "step_time_ms", "step_time_p95_ms"} <= set(metrics)
        assert {"numerics", "num_devices", "weights_sha256", "git_commit", "host_fingerprint", "fallback"} <= set(tags)
    for numerics in ("fast", "exact"):
        assert found[f"single-{numerics}"][1]["speedup"] == 1.0
        _, metrics, tags, _ = found[f"dp-{numerics}"]
        assert "speedup" not in metrics or tags["fallback"] == ""


def test_a_second_call_installs_nothing_and_runs_nothing_but_the_host_stage(repository):
    installed = sorted((repository.folder / ".venv").glob(".installed-*"))
    before = [stamp.stat().st_mtime_ns for stamp in installed]
    repository("make", "repro")
    assert ran((repository.folder / ".samebits/repro.log").read_text()) == {"host"}
    assert [stamp.stat().st_mtime_ns for stamp in installed] == before != []


def test_verify_trains_the_exact_runs_again(repository):
    before = files_in(repository.folder)
    lines = repository("samebits", "verify", "--num-devices", "2").splitlines()
    assert lines == [
        "data: bitwise, prepared again",
        "single-exact: bitwise, single on 1 CPU device",
        "dp-exact: bitwise, dp on 1 CPU device",
        "ddp-exact: bitwise, ddp on 2 CPU devices",
    ]
    assert files_in(repository.folder) == before
    quick = repository("samebits", "verify", "--quick", "--strategy", "single")
    assert quick.splitlines()[1] == "single-exact: bitwise for 8 steps, single on 1 CPU device"


def files_in(folder: Path) -> dict[Path, int]:
    """Every file of the workspace and when it was written, caches of tools aside."""
    names = (path for path in folder.rglob("*") if path.is_file() and not {".venv", ".git", "tmp"} & set(path.parts))
    return {path: path.stat().st_mtime_ns for path in names if "__pycache__" not in path.parts}


def test_verify_says_what_is_not_the_same(repository):
    lock = YAML(typ="safe").load(repository.folder / "dvc.lock")
    entry = lock["stages"]["train@single-exact"]["outs"]
    (digest,) = [out["md5"] for out in entry if out["path"].endswith("model.safetensors")]
    with repository.edited("dvc.lock", lambda text: text.replace(digest, "f" * 32)):
        done = repository.run("samebits", "verify", "--strategy", "single")
    assert done.returncode == 1
    expected = "single-exact: DIFFERENT, single on 1 CPU device: model.safetensors not as in dvc.lock"
    assert done.stdout.splitlines() == ["data: bitwise, prepared again", expected]


def test_verify_says_that_the_lock_is_older(repository):
    for file, name in (("src/samebits/training/loop.py", "src/samebits/training"), ("mine.py", "source.json")):
        with repository.edited(file):
            repository("dvc", "repro", "host")
            output = repository("samebits", "verify", "--quick", "--strategy", "single")
        repository("dvc", "repro", "host")
        assert f"dvc.lock is older than {name}" in output


def ids_in(repository, **tags):
    """Ids of the runs with these tags."""
    return [run_id for *_, found, run_id in runs_in(repository) if tags.items() <= found.items()]


def test_a_run_is_made_again_from_its_id_in_another_clone(repository, tmp_path):
    clone = Repository(tmp_path / "clone")
    repository("git", "clone", "--quiet", str(repository.folder), str(clone.folder))
    clone.environ["PATH"] = repository.environ["PATH"]
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{repository.folder}/mlflow.db"}
    for strategy, numerics in (("dp", "exact"), ("single", "fast")):
        (run_id,) = ids_in(repository, strategy=strategy, numerics=numerics)
        done = clone.run("samebits", "reproduce", run_id, "--yes", **store)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0] == "= bitwise"
        assert f"run {run_id}: " in done.stderr
        (again,) = ids_in(repository, **{"samebits.reproduces": run_id})
        (original,) = ids_in(repository, **{"samebits.reproduced": f"bitwise by {again}"})
        assert original == run_id
    assert clone("git", "status", "--short") == ""
    assert clone("git", "worktree", "list").count("\n") == 1


def test_a_run_of_changed_files_is_made_again_with_its_patch(repository):
    (repository.folder / "new.py").write_text("MORE = 1\n")
    try:
        with repository.edited("mine.py", lambda text: text.replace("nn.ReLU()", "nn.Tanh()")):
            train = ["python", "pipeline/train.py", "--strategy", "single", "--numerics", "exact", "--out-dir", "tried"]
            repository(*train)
            repository("samebits", "track", "sync")
        record = repository.json("tried/run.json")
    finally:
        (repository.folder / "new.py").unlink()
        shutil.rmtree(repository.folder / "tried", ignore_errors=True)
    (run_id,) = ids_in(repository, weights_sha256=record["weights_sha256"])
    refused = repository.run("samebits", "reproduce", run_id)
    assert refused.returncode == 2
    assert "error: nothing was run. hint: " in refused.stderr
    assert {"-", "+"} == {line[0] for line in refused.stderr.splitlines() if "nn.ReLU()" in line or "nn.Tanh()" in line}
    done = repository.run("samebits", "reproduce", run_id, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["grade"] == "bitwise"
    assert repository("git", "status", "--short") in ("", "?? dvc.lock\n")


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("src/samebits/training/loop.py", {"evaluate"} | TRAININGS),
        ("src/samebits/portable/random.py", {"prepare", "evaluate", "compare"} | TRAININGS),
        ("src/samebits/data/user.py", {"prepare"}),
        ("src/samebits/tracking/recorder.py", set()),
        ("src/samebits/results/text.py", {"compare"}),
        ("src/samebits/stages/interface.py", set()),
        ("src/samebits/errors.py", {"compare"}),  # whose labels have words of it
        ("src/samebits/remarks.py", {"compare"}),
        ("src/samebits/doctor/checks.py", set()),
        ("src/samebits/engines/container.py", set()),
    ],
)
def test_an_edit_makes_stale_what_it_can_change(file, stale, repository):
    with repository.edited(file):
        assert repository.stale() == stale


def test_another_host_or_an_edited_model_retrains(repository):
    repository("dvc", "repro", "host", SAMEBITS_CONTAINER="1", SAMEBITS_IMAGE_DIGEST="sha256:other")
    assert {f"train@{name}" for name in RUNS} < repository.stale()
    repository("dvc", "repro", "host")
    assert repository.stale() == set()
    with repository.edited("mine.py"):
        repository("dvc", "repro", "host")
        assert repository.stale() >= {"evaluate"} | TRAININGS
    repository("dvc", "repro", "host")


def commands_of(text: str) -> list[list[str]]:
    """The commands of a guide, in their order."""
    return [shlex.split(line.removeprefix("$ ")) for line in text.splitlines() if line.startswith("$ ")]


def test_the_guides_experiments(repository):
    """From here on in fast numerics alone, which is half of the trainings."""
    repository.write_params({**PARAMS, "train": {**PARAMS["train"], "numerics": ["fast"]}})
    repository("dvc", "repro")
    repository.commit()
    guide, _, _ = (repository.folder / "docs/guides/experiments.md").read_text().partition("## A sweep")
    *commands, restore, checkout = commands_of(guide)
    outputs = {" ".join(command[:3]): repository(*command) for command in commands}
    assert repository.json("reports/comparison.json")["steps"] == 4
    header, _, *rows = [line.split("|") for line in outputs["dvc exp show"].strip().splitlines()]
    assert [name.strip() for name in header[1:-1]] == [
        "Experiment",
        *(["runs/ddp-fast/timing.json:speedup.median"] if any("speedup" in name for name in header) else []),
        "reports/evaluation/ddp-fast.json:eval_loss",
        "params.yaml:train.global_batch_size",
        "params.yaml:train.optimizer.lr",
    ]
    assert any("smaller-batch" in row[1] and row[-3].strip() == "512" for row in rows)
    assert "reports/evaluation/ddp-fast.json" in outputs["dvc metrics show"]
    assert re.search(r"reports/evaluation/single-fast.json +eval_loss ", outputs["dvc metrics diff"])
    assert "train.global_batch_size" in outputs["dvc params diff"]
    page = (repository.folder / "dvc_plots/index.html").read_text()
    assert all(f'"filename": "{name}-fast/losses.csv"' in page for name in ("single", "dp", "ddp"))
    repository(*restore)
    repository(*checkout)
    assert repository.json("reports/comparison.json")["steps"] == 8
    assert repository("git", "status", "--short") == ""


def test_the_guides_sweep(repository):
    """Its runs are in the repository's own store."""
    repository.write_params({**PARAMS, "train": {**PARAMS["train"], "numerics": ["fast"]}})
    repository.commit()
    guide = (repository.folder / "docs/guides/experiments.md").read_text()
    (_, setting), *commands = commands_of(guide.partition("## A sweep")[2])
    name, _, value = setting.partition("=")
    before = runs_in(repository)
    for command in commands:
        output = repository(*command, **{name: value.replace("$PWD", str(repository.folder))})
    assert "Ran experiment(s)" in output or "rate-2" in output
    shown = repository("dvc", "exp", "show", "--csv")
    assert all(f"rate-{number}" in shown for number in (1, 2))
    assert repository("git", "status", "--short") == ""
    assert len(runs_in(repository)) == len(before) + 2 * (len(PARAMS["train"]["strategies"]) + 1)


def test_a_mistake_in_the_params_ends_before_any_training(repository):
    without = {name: value for name, value in PARAMS["train"].items() if name != "compile"}
    for train, message in (
        ({**PARAMS["train"], "epochs": 0}, "train.epochs: got 0: Input should be greater than 0. hint: "),
        (without, "train.compile: missing, and DVC follows every key. hint: add `compile: false`"),
    ):
        repository.write_params({**PARAMS, "train": train})
        output = repository("dvc", "repro", check=False)
        assert f"error: params.yaml: {message}" in output
        assert ran(output) == {"host"}
        assert "Traceback" not in output
