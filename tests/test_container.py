"""The image's name, what is mounted, and where a stage runs; without an engine. tests/container has one."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest
from ruamel.yaml import YAML

from conftest import ROOT
from samebits import host
from samebits.container import image, mounts, stage
from samebits.container.engine import SOCKET, address_of, gpu_request
from samebits.container.job import LIMITS, Job, owner_of, settings
from samebits.doctor import containers
from samebits.errors import HostError, UserError

NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


def compose(name):
    yaml = YAML(typ="safe")
    yaml.constructor.add_constructor("!reset", lambda loader, node: "reset")
    return yaml.load((ROOT / name).read_text())


# -- names -----------------------------------------------------------------------------------------------------


NAMED = ("Dockerfile", "requirements.uv.lock", "requirements.cpu.lock", "requirements.gpu.lock")


def compose_environment(folder, environ=None):
    """What tools/env.sh tells Compose of a folder."""
    for name in (*NAMED, "tools/env.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["sh", "tools/env.sh"], cwd=folder, env=environ, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())


def test_compose_and_the_kit_name_one_image(tmp_path):
    os.chown(tmp_path, 4321, 4321)
    values = compose_environment(tmp_path)
    assert values["SAMEBITS_GPU_IMAGE"] == image.image_name("gpu", ROOT)
    assert values["SAMEBITS_CPU_IMAGE"] == image.image_name("cpu", ROOT)
    assert f"{values['SAMEBITS_UID']}:{values['SAMEBITS_GID']}" == owner_of(tmp_path) == "4321:4321"
    assert (tmp_path / ".env").stat().st_uid == 4321
    assert (values["SAMEBITS_ROOT"], values["SAMEBITS_GIT"]) == (str(tmp_path), str(tmp_path))
    assert [image.variant_of(values[f"SAMEBITS_{name}_IMAGE"]) for name in ("CPU", "GPU")] == ["cpu", "gpu"]
    assert image.variant_of("samebits:changed") is None


def test_two_clones_are_two_projects(tmp_path):
    first, second = (compose_environment(tmp_path / name / "samebits") for name in ("alice", "bob"))
    assert first["COMPOSE_PROJECT_NAME"] != second["COMPOSE_PROJECT_NAME"]


def test_what_a_user_has_put_into_the_environment_stays(tmp_path):
    (tmp_path / ".env").write_text("SAMEBITS_PORT=5001\nSAMEBITS_UID=77\nBASE_IMAGE=mirror/cuda@sha256:1\n")
    values = compose_environment(tmp_path)
    assert values["COMPOSE_FILE"] == "docker-compose.yml:docker-compose.cpu.yml" or host.count_gpus()
    assert (values["SAMEBITS_PORT"], values["BASE_IMAGE"]) == ("5001", "mirror/cuda@sha256:1")
    assert values["SAMEBITS_UID"] != "77"
    assert compose_environment(tmp_path) == values


def test_a_name_follows_what_decides_on_the_packages(tmp_path):
    for name in ("Dockerfile", "requirements.uv.lock", "requirements.cpu.lock"):
        (tmp_path / name).write_text(name)
    before = image.image_name("cpu", tmp_path)
    (tmp_path / "requirements.cpu.lock").write_text("other")
    assert image.image_name("cpu", tmp_path) != before
    assert image.wanted_image("cpu", tmp_path, {image.IMAGE: "mine:1"}) == "mine:1"
    with pytest.raises(HostError, match=r"no requirements\.gpu\.lock here, which an image is made from"):
        image.image_name("gpu", tmp_path)


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


def test_files_that_the_parameters_name_are_mounted_also_behind_links(repository, tmp_path):
    for name in ("far", "linked", "tensors", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (repository / "inside.npy").symlink_to(tmp_path / "linked/file")
    params = {
        "data": {"kwargs": {"inputs": str(tmp_path / "far/file"), "targets": "inside.npy", "split": "missing.npy"}},
        "model": {"source": "../model", "name": f"{tmp_path}/tensors/file:x"},
    }
    YAML().dump(params, repository / "other.yaml")
    expected = [tmp_path / name for name in ("far", "linked", "model", "repository", "tensors")]
    for arguments in (["x.py", "--params", "other.yaml"], ["x.py", "--params=other.yaml"]):
        assert mounts.folders(repository, arguments, "http://mlflow:5000") == expected
    (repository / "params.yaml").write_text("data: [")
    assert mounts.folders(repository, [], "http://mlflow:5000") == [repository]


def test_a_cache_of_dvcs_that_is_elsewhere_is_mounted(repository, tmp_path):
    (repository / ".dvc").mkdir()
    (tmp_path / "cache").mkdir()
    (repository / ".dvc/config.local").write_text("[cache]\n    dir = ../../cache\n    type = symlink\n")
    assert mounts.folders(repository, [], "http://mlflow:5000") == [tmp_path / "cache", repository]


@pytest.mark.parametrize("argument", ["/", "/tmp", "/etc/hosts", "/usr/bin/env", "/usr/none", "/dev/null", "x/" * 3000])
def test_what_is_named_never_hides_the_images_own_files(argument, repository):
    assert mounts.folders(repository, ["cat", argument], "http://mlflow:5000") == [repository]


def test_a_file_in_a_folder_of_the_images_own_is_mounted_by_itself(repository):
    with tempfile.NamedTemporaryFile(dir="/tmp") as file:
        assert mounts.folders(repository, ["cat", file.name], "http://mlflow:5000") == [repository, Path(file.name)]


@pytest.mark.parametrize("arguments", [["--out-dir", "/tmp/not/there"], ["--out-dir=/tmp/not/there"]])
def test_a_result_that_would_stay_inside_is_refused(arguments, repository):
    with pytest.raises(HostError, match="/tmp/not/there would not be seen outside: the image has a /tmp of its own"):
        mounts.folders(repository, arguments, "http://mlflow:5000")


def test_a_store_of_files_is_mounted(repository, tmp_path):
    (tmp_path / "runs").mkdir()
    assert mounts.folders(repository, [], f"file://{tmp_path}/runs") == [repository, tmp_path / "runs"]


def test_a_store_in_a_folder_of_the_images_own_is_refused(repository):
    with pytest.raises(HostError, match="/tmp cannot be mounted: the image has its own"):
        mounts.folders(repository, [], "sqlite:////tmp/mlflow.db")


# -- what the engine is asked for ------------------------------------------------------------------------------


def engine(*options, runtimes=("runc", "nvidia"), devices=()):
    known = {
        "SecurityOptions": list(options),
        "Runtimes": {name: {} for name in runtimes},
        "DiscoveredDevices": [{"Source": "cdi", "ID": device} for device in devices],
    }
    return SimpleNamespace(info=lambda: known)


def asked(tmp_path, uri="http://mlflow:5000", *, gpus=0, client=None, **environ):
    attrs = {"RepoDigests": ["registry.example/samebits@sha256:1"]}
    made = SimpleNamespace(id="sha256:0", tags=["samebits:x"], labels={image.BASE_LABEL: "base"}, attrs=attrs)
    return settings(client or engine(), made, Job(["true"], tmp_path, [tmp_path], uri, gpus, environ))


def test_gpus_come_with_the_limits_that_nccl_needs(tmp_path):
    found = asked(tmp_path, gpus=2)
    (request,) = found["device_requests"]
    assert (request.count, request.capabilities) == (-1, [["gpu"]])
    assert {limit.name: limit.hard for limit in found["ulimits"]} == LIMITS
    assert found["environment"]["SAMEBITS_HOST_GPUS"] == "2"
    assert "NVIDIA_VISIBLE_DEVICES" not in found["environment"]
    assert (asked(tmp_path)["device_requests"], asked(tmp_path)["ulimits"]) == ([], [])
    assert asked(tmp_path)["shm_size"] == 8 * 2**30
    assert asked(tmp_path, SAMEBITS_SHM_SIZE="16g")["shm_size"] == 16 * 2**30
    with pytest.raises(UserError, match="SAMEBITS_SHM_SIZE: got 'many', accepts bytes, or k, m or g of them"):
        asked(tmp_path, SAMEBITS_SHM_SIZE="many")


def test_gpus_are_asked_for_as_the_engine_offers_them(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    request = gpu_request(engine(runtimes=["runc"], devices=["nvidia.com/gpu=0", "nvidia.com/gpu=all"]))
    assert (request.driver, request.device_ids) == ("cdi", ["nvidia.com/gpu=all"])
    assert gpu_request(engine(runtimes=["runc"])) is None
    assert gpu_request(SimpleNamespace(info=dict)) is None


def test_what_an_engine_does_to_users_is_met(tmp_path):
    os.chown(tmp_path, 4321, 4321)
    plain = asked(tmp_path, gpus=1, client=engine("name=seccomp,profile=default"))
    assert (plain["user"], plain["userns_mode"]) == ("4321:4321", None)
    assert plain["security_opt"] == ["no-new-privileges:true"]
    rootless = asked(tmp_path, gpus=1, client=engine("name=seccomp,profile=default", "name=rootless"))
    assert rootless["user"] == "0:0"
    assert {limit.name for limit in rootless["ulimits"]} == {"stack", "nofile"}
    assert asked(tmp_path, client=engine("name=userns"))["userns_mode"] == "host"
    assert "label=disable" in asked(tmp_path, client=engine("name=selinux"))["security_opt"]


@pytest.mark.parametrize(
    ("uri", "mode"),
    [
        ("http://localhost:5000", "host"),
        ("http://127.0.1.1:5000", "host"),
        ("http://[::1]:5000", "host"),
        ("http://0.0.0.0:5000", "host"),
        ("http://mlflow:5000", "bridge"),
        ("http://10.0.0.1:5000", "bridge"),
        ("sqlite:///mlflow.db", "bridge"),
    ],
)
def test_a_server_on_this_host_is_reached_by_its_network(uri, mode, tmp_path):
    assert asked(tmp_path, uri)["network_mode"] == mode


def test_variables_of_the_kits_parts_go_inside_and_no_others(tmp_path):
    (tmp_path / "src").mkdir()
    given = {
        "NCCL_DEBUG": "INFO",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TRITON_CACHE_DIR": "/var/cache/of/the/host",
        "SSL_CERT_FILE": str(tmp_path / "ca.crt"),
        "AWS_SECRET_ACCESS_KEY": "x",
        "SAMEBITS_RUNTIME": "container",
        "SAMEBITS_IMAGE": "mine",
        "HOME": "/root",
    }
    assert asked(tmp_path, **given)["environment"] == {
        "NCCL_DEBUG": "INFO",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "SSL_CERT_FILE": str(tmp_path / "ca.crt"),
        "SAMEBITS_IMAGE": "samebits:x",
        "SAMEBITS_IMAGE_ID": "sha256:0",
        "SAMEBITS_IMAGE_DIGEST": "registry.example/samebits@sha256:1",
        "SAMEBITS_IMAGE_BASE": "base",
        "SAMEBITS_HOST_GPUS": "0",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "PYTHONPATH": str(tmp_path / "src"),
        "TINI_KILL_PROCESS_GROUP": "1",
    }


def test_the_engine_is_that_of_the_docker_command(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    assert address_of(os.environ) == SOCKET
    (tmp_path / "config.json").write_text("{}")
    docker.context.ContextAPI.create_context("mine", orchestrator=None, host="unix:///run/user/1000/docker.sock")
    assert address_of({**os.environ, "DOCKER_CONTEXT": "mine"}) == "unix:///run/user/1000/docker.sock"
    (tmp_path / "config.json").write_text('{"currentContext": "mine"}')
    assert address_of(os.environ) == "unix:///run/user/1000/docker.sock"
    assert address_of({**os.environ, "DOCKER_HOST": "unix:///other.sock"}) == "unix:///other.sock"


def test_compose_is_told_what_the_engine_knows(tmp_path):
    docker = tmp_path / "docker"
    docker.write_text(
        "#!/bin/sh\ncase $* in info*) echo '[name=rootless]';; *Digest*gpu-*) echo registry/x@sha256:1;; "
        "*.Id*gpu-*) echo sha256:0;; *) exit 1;; esac\n"
    )
    toolkit = tmp_path / "nvidia-ctk"
    toolkit.write_text("#!/bin/sh\necho 'NVIDIA Container Toolkit CLI version 1.18.1'\necho 'commit: 1.2.3'\n")
    for script in (docker, toolkit):
        script.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    values = compose_environment(tmp_path / "clone", environ)
    assert (values["SAMEBITS_UID"], values["SAMEBITS_GID"]) == ("0", "0")
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    assert int(values["SAMEBITS_MEMLOCK"]) == (-1 if hard == resource.RLIM_INFINITY else hard)
    assert values["SAMEBITS_GPU_IMAGE_ID"] == "sha256:0"
    assert values["SAMEBITS_GPU_IMAGE_DIGEST"] == "registry/x@sha256:1"
    assert values["SAMEBITS_CPU_IMAGE_ID"] == values["SAMEBITS_CPU_IMAGE_DIGEST"] == ""
    assert values["SAMEBITS_CONTAINER_TOOLKIT"] == "1.18.1"


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [
        ("1.16.1", "warning", "CVE-2024-0132"),
        ("1.17.7", "warning", "1.17.7 has known holes (CVE-2025-23266: "),
        ("1.17.8", "ok", "1.17.8"),
        ("1.20.0", "ok", "1.20.0"),
        (None, "ok", "does not say its version"),
    ],
)
def test_toolkits_with_known_holes_are_named(version, status, text, monkeypatch):
    monkeypatch.setattr(containers, "toolkit_version", lambda: version)
    (found,) = containers.toolkit(engine(), 2)
    assert found.status == status
    assert text in found.text


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
