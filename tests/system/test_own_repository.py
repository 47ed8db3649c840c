"""A user's own repository with the wheel installed: from `samebits init` to the answers, in paths with spaces."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest
from ruamel.yaml import YAML

from conftest import ROOT
from patience import patient

pytestmark = pytest.mark.slow
BUILD = "import sys; from flit_core import buildapi; print(buildapi.build_wheel(sys.argv[1]))"
IDS = """
import mlflow
for run in mlflow.search_runs(search_all_experiments=True, output_format="list"):
    if (run.data.tags.get("strategy"), run.data.tags.get("numerics")) == ("single", "exact"):
        print(run.info.run_id)
"""
EXPERIMENTS = """
import mlflow
for run in mlflow.search_runs(search_all_experiments=True, output_format="list"):
    print(*(run.data.tags.get(name) for name in ("dvc_experiment", "strategy", "numerics")))
"""


class Own:
    """A repository, and an environment that holds the wheel; what the wheel needs is this environment's."""

    def __init__(self, root):
        self.folder, self.environment = root / "my experiment", root / "an environment"
        self.folder.mkdir()
        build = [sys.executable, "-c", BUILD, str(root)]
        wheel = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        venv.create(self.environment, symlinks=True)
        self.bin = self.environment / "bin"
        install = ["uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", self.bin / "python"]
        subprocess.run([*install, root / wheel], check=True)
        (packages,) = self.environment.glob("lib/python*/site-packages")
        (packages / "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        left = ("PYTHONPATH", "VIRTUAL_ENV", "MLFLOW_TRACKING_URI")
        self.environ = {name: value for name, value in os.environ.items() if name not in left}
        self.environ |= {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        for name in ("AUTHOR", "COMMITTER"):
            self.environ |= {f"GIT_{name}_NAME": "test", f"GIT_{name}_EMAIL": "test@localhost"}

    def run(self, *command):
        return subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=patient(900)
        )

    def __call__(self, *command):
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def python(self, *arguments):
        return self("python", "-P", *arguments)

    def repro(self):
        return self.python("-m", "dvc", "repro")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The experiment of `samebits init` at a small size, which has run; the tests go on from it."""
    if shutil.which("uv") is None:
        pytest.skip("no uv, by which the wheel is installed")
    made = Own(tmp_path_factory.mktemp("a user"))
    made("git", "init", "--quiet")
    made("samebits", "init")
    raw = YAML(typ="safe").load(made.folder / "params.yaml")
    raw["data"] |= {"num_samples": 1024, "test_samples": 256, "kwargs": {"features": 128}}
    raw["model"]["kwargs"] = {"width": 16}
    raw["train"] |= {"strategies": ["single", "ddp"], "global_batch_size": 256, "prolong_s": 0.0}
    YAML().dump(raw, made.folder / "params.yaml")
    made("git", "add", "--all")
    made("git", "commit", "--quiet", "--message", "begin")
    made.answers = made.repro().stdout
    return made


def test_the_library_is_the_wheels_and_the_answers_are_printed(own):
    (where,) = own.python("-c", "import samebits; print(samebits.__file__)").stdout.split("\n")[:1]
    assert where.startswith(str(own.environment))
    assert re.search(r"ddp +2 CPU devices", own.answers)
    assert "yes     exact: every bit, under single and ddp, on any host" in own.answers
    assert "dvc repro</pre>" in (own.folder / "reports/index.html").read_text()
    assert own("git", "status", "--short").stdout.split() == ["??", "dvc.lock"]


def test_nothing_is_trained_again_until_the_library_is_another_one(own):
    assert set(json.loads(own.python("-m", "dvc", "status", "--json").stdout)) <= {"host"}
    (module,) = own.environment.glob("lib/python*/site-packages/samebits/stages/compare.py")
    text = module.read_text()
    module.write_text(f"{text}\n# another version\n")
    own.python("-m", "dvc", "repro", "host")
    stale = set(json.loads(own.python("-m", "dvc", "status", "--json").stdout)) - {"host"}
    assert stale >= {"prepare", "train@single-exact", "train@ddp-fast", "evaluate"}
    module.write_text(text)
    own.python("-m", "dvc", "repro", "host")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("verify", "--strategy", "ddp"), "ddp-exact: bitwise, ddp on 2 CPU devices"),
        (("verify", "--quick", "--strategy", "single"), "single-exact: bitwise for"),
        (("report",), "reports/index.html"),
        (("compare", "runs/single-exact", "runs/ddp-exact"), "bitwise"),
        (("explain",), "ddp-fast of experiment:make on vectors, global batch 256: "),
        (("track", "sync"), ""),
        (("launch", "--dry-run", "slurm", "--strategy", "ddp"), "-P -m samebits.cli stage train --strategy ddp"),
    ],
)
def test_every_command_works_there(command, says, own):
    assert says in own("samebits", *command).stdout


def test_the_doctor_finds_nothing_that_only_the_kits_repository_has(own):
    report = json.loads(own.run("samebits", "doctor", "--model", "--json").stdout)
    failed = {finding["name"]: finding for finding in report["findings"] if finding["status"] == "failed"}
    assert not failed
    hints = " ".join(str(finding["hint"]) for finding in report["findings"])
    assert not any(word in hints for word in ("make ", "pipeline/", "docs/"))


def test_a_run_is_trained_again_from_its_commit(own):
    own("samebits", "track", "sync")
    store = f"sqlite:///{own.folder}/mlflow.db"
    (run_id,) = own("env", f"MLFLOW_TRACKING_URI={store}", "python", "-P", "-c", IDS).stdout.split()
    assert "bitwise" in own("samebits", "reproduce", run_id, "--yes").stdout


def test_a_missing_run_names_the_command_of_this_repository(own):
    (own.folder / "runs/ddp-fast/run.json").unlink()
    done = own.run("samebits", "stage", "compare")
    assert done.returncode == 2
    assert "hint: run `samebits stage train --strategy ddp --numerics fast`" in done.stderr


def test_an_experiment_of_dvc_is_known_by_its_name_in_mlflow(own):
    """The last one here, as it leaves another workspace."""
    own("git", "add", "--all")
    own("git", "commit", "--quiet", "--message", "what DVC locked")
    own.python(
        "-m", "dvc", "exp", "run", "--name", "narrow", "-S", "model.kwargs.width=8", "-S", "train.strategies=[ddp]"
    )
    own("samebits", "track", "sync")
    store = f"sqlite:///{own.folder}/mlflow.db"
    told = own("env", f"MLFLOW_TRACKING_URI={store}", "python", "-P", "-c", EXPERIMENTS).stdout.splitlines()
    assert set(told) >= {"narrow ddp exact", "narrow ddp fast"}
