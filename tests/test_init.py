"""``samebits init``: what it writes into a repository of a user's, and what it leaves alone."""

import json
import subprocess
import sys
import zipfile

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from conftest import ROOT
from samebits.cli.commands import main
from samebits.errors import UserError
from samebits.params import load_params, require_every_key
from samebits.records.run import read_run
from samebits.stages.init import init
from samebits.stages.pipeline import STAGES, stages

NEW = ["params.yaml", "experiment.py", "dvc.yaml", ".gitignore", ".dvcignore", ".dvc/plots/stacked_bars.json"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that DVC knows already, in a path with a space."""
    folder = tmp_path / "my experiment"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc/config").touch()
    monkeypatch.chdir(folder)
    return folder


def in_git(folder):
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)


def test_the_files_are_the_pipeline_without_the_kits_sources(repository):
    in_git(repository)
    (repository / ".gitignore").write_text("mine")  # without an end of its line
    assert CliRunner().invoke(main, ["init"]).stdout.splitlines() == NEW
    params = load_params("params.yaml")
    require_every_key(params, "params.yaml")
    assert (params.model.name, params.model.kwargs) == ("experiment:make", {"width": 256})
    ours, theirs = (YAML(typ="safe").load(folder / "dvc.yaml") for folder in (ROOT, repository))
    assert [*theirs["stages"]] == [*ours["stages"]] == [*STAGES]
    assert [theirs[key] for key in ("plots", "metrics")] == [ours[key] for key in ("plots", "metrics")]
    for name, command in stages().items():
        mine, own = ours["stages"][name], theirs["stages"][name]
        assert own.pop("cmd") == mine.pop("cmd").replace(f"python -P pipeline/{name}.py", f"samebits stage {name}")
        assert own.pop("deps", []) == [*command.spec.reads] == mine.pop("deps", [])[: len(command.spec.reads)]
        assert own == mine
    lines = (repository / ".gitignore").read_text().splitlines()
    assert lines[:2] == ["mine", "# what samebits writes"]
    assert {"/runs/", "/data/card.json", "/reports/evaluation", "/host.json", "/mlflow.db"} < {*lines}
    assert "/data/" not in lines  # which may hold files of one's own


@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml", "experiment.py"])
def test_no_file_is_overwritten(name, repository):
    in_git(repository)
    (repository / name).write_text("mine")
    done = CliRunner().invoke(main, ["init"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {name}: there already. hint: move them away")
    assert {file.name for file in repository.iterdir()} == {".git", ".dvc", name}
    assert (repository / name).read_text() == "mine"


def test_what_was_written_before_is_not_written_twice(repository):
    in_git(repository)
    init()
    before = (repository / ".gitignore").read_text()
    (repository / ".gitignore").write_text(f"{before}theirs\n")
    for name in NEW[:3]:
        (repository / name).unlink()
    assert init() == NEW[:5]
    assert (repository / ".gitignore").read_text() == f"{before}theirs\n"


def test_only_the_root_of_a_git_repository_takes_an_experiment(repository, monkeypatch):
    in_git(repository)
    (repository / "below").mkdir()
    monkeypatch.chdir(repository / "below")
    with pytest.raises(UserError, match=r"below lies inside of the git repository .*my experiment\. hint: run this in"):
        init()
    assert [*(repository / "below").iterdir()] == []


def test_without_git_it_is_said_what_is_missing(tmp_path, monkeypatch, capsys):
    """And DVC is set up without git."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert init() == NEW
    assert "warning: no git repository here: results cannot name their commit, and" in capsys.readouterr().err
    assert "no_scm = True" in (tmp_path / ".dvc/config").read_text()


def test_the_experiment_that_is_written_trains(repository, stage):
    """And its runs depend on the version of the library."""
    init()
    stage.folder = repository
    raw = YAML(typ="safe").load(repository / "params.yaml")
    raw["data"] |= {"num_samples": 512, "test_samples": 200}
    raw["train"] |= {"numerics": ["exact"], "global_batch_size": 64, "epochs": 1, "repeats": 1}
    stage.write_params(raw)
    for name in ("host", "prepare"):
        stage.well(name)
    stage.well("train", "--strategy", "single", "--numerics", "exact", "--no-tracking")
    assert len(read_run(repository / "runs/single-exact").losses) == 8
    made = {name: json.loads((repository / name).read_text()) for name in ("source.json", "files.json")}
    assert set(made["source.json"]["files"]) == {"experiment.py"}
    assert set(made["files.json"]) == {"samebits"}
    assert made["source.json"]["samebits"] == made["files.json"]["samebits"]
    (repository / "src/samebits").mkdir(parents=True)  # as in the kit's own repository, where DVC follows its sources
    stage.well("host")
    assert json.loads((repository / "files.json").read_text()) == {}


def test_the_wheel_has_every_file_of_the_library(tmp_path):
    build = "import sys; from flit_core import buildapi; print(buildapi.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    name = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    listed = ["git", "ls-files", "-co", "--exclude-standard", "src"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    packed = {file for file in zipfile.ZipFile(tmp_path / name).namelist() if ".dist-info/" not in file}
    assert packed == {file.removeprefix("src/") for file in files if (ROOT / file).is_file()}


@pytest.mark.parametrize("name", [".gitignore", ".dvcignore", ".dvc/plots", ".dvc/plots/stacked_bars.json"])
@pytest.mark.attack("a malicious repository or patch")
def test_no_link_is_followed(name, repository, tmp_path_factory):
    in_git(repository)
    outside = tmp_path_factory.mktemp("outside")
    (repository / name).parent.mkdir(parents=True, exist_ok=True)
    (repository / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"^{name}: a link, which is not followed"):
        init()
    assert not (repository / "params.yaml").exists()
    assert [*outside.iterdir()] == []


def test_a_file_that_becomes_longer_stays_as_open_as_it_was(repository):
    in_git(repository)
    (repository / ".gitignore").write_text("mine\n")
    (repository / ".gitignore").chmod(0o600)
    init()
    assert (repository / ".gitignore").stat().st_mode & 0o777 == 0o600
    (repository / "params.yaml").unlink()
    (repository / "dvc.yaml").unlink()
    (repository / "experiment.py").unlink()
    (repository / ".gitignore").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"^\.gitignore: cannot be read: "):
        init()
