"""The image's name, what is mounted, and where a stage runs; without an engine. tests/container has one."""

import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from conftest import ROOT
from samebits.container import image, mounts, stage
from samebits.container.run import owner_of
from samebits.errors import HostError, UserError

NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


def compose(name):
    yaml = YAML(typ="safe")
    yaml.constructor.add_constructor("!reset", lambda loader, node: "reset")
    return yaml.load((ROOT / name).read_text())


# -- names -----------------------------------------------------------------------------------------------------


def test_compose_and_the_kit_name_one_image():
    done = subprocess.run(["sh", "tools/env.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert values["SAMEBITS_GPU_IMAGE"] == image.image_name("gpu", ROOT)
    assert values["SAMEBITS_CPU_IMAGE"] == image.image_name("cpu", ROOT)
    assert f"{values['SAMEBITS_UID']}:{values['SAMEBITS_GID']}" == owner_of(ROOT)
    assert Path(values["SAMEBITS_ROOT"]) == ROOT


def test_a_name_follows_what_decides_on_the_packages(tmp_path):
    for name in ("Dockerfile", "requirements.uv.lock", "requirements.cpu.lock"):
        (tmp_path / name).write_text(name)
    before = image.image_name("cpu", tmp_path)
    (tmp_path / "requirements.cpu.lock").write_text("other")
    assert image.image_name("cpu", tmp_path) != before
    assert image.wanted_image("cpu", tmp_path, {image.IMAGE: "mine:1"}) == "mine:1"


# -- where a stage runs ----------------------------------------------------------------------------------------


def test_inside_it_goes_on_where_it_is():
    stage.enter(["pipeline/train.py"], {stage.INSIDE: "1", stage.RUNTIME: "container", **NO_ENGINE})


def test_the_host_can_be_asked_for(capsys):
    stage.enter(["pipeline/host.py"], {stage.RUNTIME: "host", **NO_ENGINE})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "environ", "said"),
    [
        ("pipeline/host.py", {"DVC_STAGE": "host"}, True),
        ("pipeline/train.py", {"DVC_STAGE": "train@single-fast"}, False),
        ("pipeline/train.py", {}, True),
    ],
)
def test_without_an_engine_a_stage_runs_on_the_host_and_one_line_says_why(script, environ, said, capsys):
    stage.enter([script], {**environ, **NO_ENGINE})
    expected = (
        "on the host, not in the image: no Docker engine: /nowhere/docker.sock is not there. "
        "hint: install and start Docker, or set SAMEBITS_RUNTIME=host\n"
    )
    assert capsys.readouterr().err == (expected if said else "")


def test_a_container_that_is_asked_for_must_be_had():
    with pytest.raises(HostError, match="no Docker engine"):
        stage.enter(["pipeline/train.py"], {stage.RUNTIME: "container", **NO_ENGINE})
    with pytest.raises(HostError, match="another host's"):
        stage.enter(["pipeline/train.py"], {stage.RUNTIME: "container", "DOCKER_HOST": "tcp://10.0.0.1:2375"})


def test_another_word_is_refused():
    with pytest.raises(UserError, match="SAMEBITS_RUNTIME: got 'docker', accepts auto, container or host"):
        stage.enter(["pipeline/train.py"], {stage.RUNTIME: "docker"})


def test_a_stage_ends_with_its_exit_code_if_there_is_no_engine(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "pipeline/prepare.py")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin", "SAMEBITS_RUNTIME": "container", **NO_ENGINE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert done.stderr.startswith("error: no Docker engine")


# -- mounts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


def test_the_repository_is_mounted_and_what_lies_outside(repository, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "out").mkdir()
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    arguments = ["pipeline/train.py", "--out-dir", str(tmp_path / "out/new/run"), "--strategy", "ddp"]
    (repository / "pipeline").mkdir()
    found = mounts.folders(repository, arguments, uri)
    assert found == [tmp_path / "out", repository, tmp_path / "store"]
    assert mounts.folders(repository, [], "http://mlflow:5000") == [repository]


def test_an_experiment_of_a_queue_sees_the_repository_that_it_is_of(repository):
    inner = repository / ".dvc/tmp/exps/tmpabc"
    inner.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet"], cwd=inner, check=True)
    assert mounts.folders(inner, [], "http://mlflow:5000") == [repository]


def test_a_worktree_sees_git(repository, tmp_path):
    commands = (["commit", "--allow-empty", "-qm", "x"], ["worktree", "add", "-q", str(tmp_path / "tree")])
    for command in commands:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", *identity, *command], cwd=repository, check=True)
    assert mounts.folders(tmp_path / "tree", [], "http://mlflow:5000") == [repository / ".git", tmp_path / "tree"]


def test_the_whole_file_system_is_never_mounted():
    with pytest.raises(UserError, match="the whole file system"):
        mounts.outermost([Path("/")])


# -- Dockerfile and Compose files ------------------------------------------------------------------------------


def test_the_base_is_pinned_by_its_digest_and_nothing_needs_buildkit():
    text = (ROOT / "Dockerfile").read_text()
    assert "ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:" in text
    assert [line for line in text.splitlines() if line.startswith(("# syntax", "ADD "))] == []
    assert "RUN --mount" not in text
    assert "--require-hashes" in text
    assert [line for line in text.splitlines() if line.startswith("USER ")] == ["USER 1000:1000"]


def test_nothing_but_sources_and_locks_is_sent_to_the_builder():
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    kept = {line[1:] for line in rest if line.startswith("!")}
    assert kept == {
        "pyproject.toml",
        "README.md",
        "src",
        "wheels",
        *(f"requirements.{n}.lock" for n in ("cpu", "gpu", "uv")),
    }
    assert {".git", ".env", "data", "secrets"} & kept == set()


COMPOSE = ["docker-compose.yml", "docker-compose.cpu.yml", "docker-compose.postgres.yml"]
SERVICES = [(name, service) for name in COMPOSE for service in compose(name)["services"]]


@pytest.mark.parametrize(("name", "service"), SERVICES)
def test_no_service_has_more_than_it_needs(name, service):
    found = compose(name)["services"][service]
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add", "devices"} & set(found)
    assert "docker.sock" not in str(found)
    assert all(port.startswith("127.0.0.1:") for port in found.get("ports", []))
    if "image" in found and name != "docker-compose.cpu.yml":
        assert found["cap_drop"] == ["ALL"]
        assert found["security_opt"] == ["no-new-privileges:true"]
        assert found["read_only"] is True
        assert "user" in found
        assert "@sha256:" in found["image"] or "_IMAGE:?" in found["image"]


def test_the_health_check_asks_the_api_and_the_grace_is_longer_than_the_launchers():
    services = compose("docker-compose.yml")["services"]
    assert "/api/2.0/mlflow/" in str(services["mlflow"]["healthcheck"]["test"])
    assert services["experiment"]["stop_grace_period"] == "60s"
    assert services["experiment"]["init"] is True
    assert services["experiment"]["depends_on"] == {"mlflow": {"condition": "service_healthy"}}
    (device,) = services["experiment"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_no_file_holds_a_secret():
    overlay = compose("docker-compose.postgres.yml")
    assert overlay["secrets"] == {"postgres_password": {"file": "secrets/postgres_password"}}
    assert "POSTGRES_PASSWORD" not in overlay["services"]["postgres"]["environment"]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", "/secrets/", "/wheels/"} <= set(ignored)
