"""The image's name, mounts, and the place of a stage, without an engine. tests/system/container has one."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest
from ruamel.yaml import YAML

from conftest import ROOT, needs_root
from samebits.doctor import containers
from samebits.engines import docker_run, image, stage
from samebits.engines.docker import SOCKET, address_of, connect, gpu_request
from samebits.errors import HostError, UserError
from samebits.here import CLI, TOLD
from samebits.host import visible_uuids
from samebits.host.cluster_environment import find_nodes
from samebits.host.variables import IMAGE, RUNTIME
from samebits.records.provenance import RECORDED

NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


def compose(name):
    yaml = YAML(typ="safe")
    yaml.constructor.add_constructor("!reset", lambda loader, node: "reset")
    yaml.constructor.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, deep=True))
    return yaml.load((ROOT / name).read_text())


# -- names -----------------------------------------------------------------------------------------------------


NAMED = ("Dockerfile", "requirements.uv.lock", "requirements.cpu.lock", "requirements.gpu.lock")


def compose_environment(folder):
    """The variables that tools/env.sh writes for Compose."""
    for name in (*NAMED, "tools/env.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["sh", "tools/env.sh"], cwd=folder, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())


def test_compose_and_the_kit_name_one_image(tmp_path):
    folder = tmp_path / "alice/samebits"
    values, other = compose_environment(folder), compose_environment(tmp_path / "bob/samebits")
    assert values["COMPOSE_PROJECT_NAME"] != other["COMPOSE_PROJECT_NAME"]
    assert values["SAMEBITS_GPU_IMAGE"] == image.image_name("gpu", ROOT)
    assert values["SAMEBITS_CPU_IMAGE"] == image.image_name("cpu", ROOT)
    assert values["SAMEBITS_PULL_POLICY"] == "missing"  # one that was loaded is taken
    assert (values["SAMEBITS_ROOT"], values["SAMEBITS_GIT"]) == (str(folder), str(folder))
    assert [image.variant_of(values[f"SAMEBITS_{name}_IMAGE"]) for name in ("CPU", "GPU")] == ["cpu", "gpu"]
    assert image.variant_of("samebits:changed") is None


@pytest.mark.parametrize(("machine", "prefix"), [("x86_64", ""), ("aarch64", "arm64-"), ("ppc64le", "ppc64le-")])
def test_an_image_of_another_architecture_has_another_name(machine, prefix, program, tmp_path, monkeypatch):
    """A clone and a registry may be shared by hosts of both kinds."""
    program("uname", f"echo {machine}")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    name = image.image_name("gpu", ROOT)
    assert name.startswith(f"samebits:gpu-{prefix}")
    assert compose_environment(tmp_path)["SAMEBITS_GPU_IMAGE"] == name
    assert (image.variant_of(name), len(name)) == ("gpu", len(f"samebits:gpu-{prefix}") + 12)


@needs_root
def test_a_container_works_as_the_owner_of_the_clone(tmp_path):
    os.chown(tmp_path, 4321, 4322)
    values = compose_environment(tmp_path)
    assert (values["SAMEBITS_GID"], docker_run.user_of(tmp_path)) == ("4322", "4321:4322")
    assert (tmp_path / ".env").stat().st_uid == 4321


SAVED = {"name": "kit", "id": "sha256:1", "digest": None, "base": None, "layers": ["sha256:2"], "sha256": "3" * 64}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[]", r"kit\.tar\.json: the file: Input should be "),
        ("3", r"kit\.tar\.json: the file: Input should be "),
        ("{}", r"kit\.tar\.json: name: Field required\. hint: run `samebits container save` again"),
        (json.dumps({**SAVED, "sha256": 7}), r"kit\.tar\.json: sha256: Input should be a valid string"),
        (json.dumps(SAVED), r"kit\.tar: SHA-256 .*, expected 333333333333: it is not whole"),
        (None, r"kit\.tar\.json: no such file\. hint: copy it too"),
        (os.mkfifo, r"kit\.tar\.json: cannot be read: expected a regular file"),
    ],
)
def test_an_image_whose_record_is_damaged_is_not_loaded(record, message, tmp_path):
    (tmp_path / "kit.tar").write_text("no archive")
    if callable(record):
        record(tmp_path / "kit.tar.json")
    elif record:
        (tmp_path / "kit.tar.json").write_text(record)
    with pytest.raises(UserError, match=message):
        image.load_image(None, tmp_path / "kit.tar")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_an_image_is_loaded_from_a_file_alone(make, tmp_path):
    make(tmp_path / "kit.tar")
    (tmp_path / "kit.tar.json").write_text(json.dumps(SAVED))
    with pytest.raises(UserError, match=r"kit\.tar: cannot be read: expected a regular file\. hint: name the file"):
        image.load_image(None, tmp_path / "kit.tar")
    with pytest.raises(UserError, match="File name too long"):
        image.load_image(None, tmp_path / ("x" * 300))
    with pytest.raises(UserError, match=r"none\.tar: no such file\. hint: name the file that `samebits container sav"):
        image.load_image(None, tmp_path / "none.tar")


def test_compose_takes_the_overlay_for_cpus_as_long_as_no_driver_answers(program, tmp_path):
    for code, file in ((0, None), (9, "docker-compose.yml:docker-compose.cpu.yml"), (0, None)):
        program("nvidia-smi", f"exit {code}")
        assert compose_environment(tmp_path).get("COMPOSE_FILE") == file
    (tmp_path / ".env").write_text("COMPOSE_FILE=mine.yml\nOTHER=x\n")
    values = compose_environment(tmp_path)
    assert (values["COMPOSE_FILE"], values["OTHER"]) == ("mine.yml", "x")


@pytest.mark.parametrize(
    ("runtimes", "described", "file"),
    [
        ('{"runc":{}}', "kind: nvidia.com/gpu", "docker-compose.yml:docker-compose.cdi.yml"),
        ('{"runc":{}}', "kind: others.com/gpu", None),
        ('{"nvidia":{},"runc":{}}', "kind: nvidia.com/gpu", None),
        ("", "kind: nvidia.com/gpu", None),  # no engine answers
    ],
)
def test_compose_takes_gpus_by_the_device_interface_where_that_is_all(runtimes, described, file, program, tmp_path):
    folder = tmp_path / "cdi"
    folder.mkdir()
    (folder / "some.yaml").write_text(described)
    program("nvidia-smi", "exit 0")
    program("docker", f"""case "$*" in *Runtimes*) echo '{runtimes}' ;; *CDISpecDirs*) echo {folder} ;; esac""")
    for _ in range(2):  # the second time over its own .env
        assert compose_environment(tmp_path).get("COMPOSE_FILE") == file


def test_the_overlay_for_the_device_interface_changes_the_request_alone():
    ((name, service),) = compose("docker-compose.cdi.yml")["services"].items()
    (request,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (name, {*service}) == ("experiment", {"deploy"})
    assert (request["driver"], request["device_ids"]) == ("cdi", ["nvidia.com/gpu=all"])


def test_what_a_user_has_put_into_the_environment_stays(tmp_path):
    mine = {"SAMEBITS_PORT": "5001", "BASE_IMAGE": "mirror/cuda@sha256:1", "SAMEBITS_MOUNTS": "/datasets"}
    lines = [f"{name}={value}" for name, value in mine.items()]
    (tmp_path / ".env").write_text("\n".join([*lines, "SAMEBITS_GID=77777", ""]))
    values = compose_environment(tmp_path)
    assert mine.items() <= values.items()
    assert values["SAMEBITS_GID"] != "77777"
    assert compose_environment(tmp_path) == values


def test_a_name_follows_what_decides_on_the_packages(tmp_path):
    for name in ("Dockerfile", "requirements.uv.lock", "requirements.cpu.lock"):
        (tmp_path / name).write_text(name)
    before = image.image_name("cpu", tmp_path)
    (tmp_path / "requirements.cpu.lock").write_text("other")
    assert image.image_name("cpu", tmp_path) != before
    assert image.wanted_image("cpu", tmp_path, {IMAGE: "mine:1"}) == "mine:1"
    with pytest.raises(HostError, match=r"no requirements\.gpu\.lock here, which an image is made from"):
        image.image_name("gpu", tmp_path)


# -- where a stage runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "devices", "cuda", "error"),
    [
        ("C", "8", None, "13.0", None),
        ("C", "8", "2,3", "13.0", None),
        ("C", "8", "", "13.0", None),
        ("E", "2", "MIG-00000001-0000-5000-8000-000000000000", "13.0", None),
        ("F", "2", "1", "13.0", None),
        ("C", "4", None, "13.0", "4 GPUs on the host, 8 for torch in mine"),
        ("C", "8", None, None, "8 GPUs on the host, 0 for torch in mine"),
        ("C", "0", None, None, None),
    ],
)
def test_inside_gpus_are_counted_before_a_choice_among_them(name, given, devices, cuda, error, gpu_host):
    gpu_host(name, cuda=cuda, devices=devices)
    environ = {**os.environ, stage.INSIDE: "1", docker_run.GPUS: given, "SAMEBITS_IMAGE": "mine"}
    with pytest.raises(HostError, match=error) if error else nullcontext():
        stage.enter(["pipeline/train.py"], environ)


def test_inside_the_kits_image_a_repository_of_ones_own_has_no_locks_to_compare_with(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    environ = {stage.INSIDE: "1", "SAMEBITS_IMAGE": "samebits:cpu-0123456789ab"}
    stage.enter([*CLI, "stage", "host"], environ)
    monkeypatch.chdir(ROOT)
    stage.enter(["pipeline/train.py"], environ)
    assert capsys.readouterr().err == ""
    stage.enter(["pipeline/host.py"], environ)
    assert capsys.readouterr().err.startswith("warning: samebits:cpu-0123456789ab is not of the locks here. hint: ")


@pytest.mark.parametrize(
    ("name", "devices", "given", "lock"),
    [
        ("C", None, 8, "gpu"),
        ("C", "2,3", 8, "gpu"),
        ("C", "", 0, "cpu"),
        ("E", "MIG-00000001-0000-5000-8000-000000000001", 2, "gpu"),
        ("F", None, 2, "gpu"),
        ("F with a lost GPU", "0", 1, "gpu"),  # the other has no name to ask the engine for it
        ("A with a lost GPU", "0,1", 3, "gpu"),
    ],
)
def test_a_container_is_given_all_gpus_unless_they_are_hidden(name, devices, given, lock, gpu_host, monkeypatch):
    gpu_host(name[0], *(["gpu 2", "fails all GPU_IS_LOST"] if "lost" in name else []), devices=devices)
    monkeypatch.setattr(stage, "connect", lambda environ: engine())
    monkeypatch.setattr(stage, "require_image", lambda client, wanted, environ: wanted)
    monkeypatch.setattr(stage, "wanted_image", lambda variant, root, environ: variant)
    place = stage.find_place(environ=os.environ)
    assert (place.gpus, place.image) == (given, lock)
    monkeypatch.setattr(stage, "connect", lambda environ: engine(runtimes=["runc"]))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostError, match="does not offer this host's GPUs") if given else nullcontext():
        stage.find_place(environ=os.environ)


@pytest.mark.parametrize(
    ("script", "environ", "explained"),
    [
        ("pipeline/host.py", {"DVC_STAGE": "host"}, True),
        ("pipeline/train.py", {"DVC_STAGE": "train@single-fast"}, False),
        ("pipeline/train.py", {}, True),
        ("pipeline/train.py", {TOLD: "1"}, False),  # as of `verify`, behind its data
        ("pipeline/host.py", {RUNTIME: "host"}, False),  # which was asked for
        ("pipeline/train.py", {RUNTIME: "container", stage.INSIDE: "1"}, False),  # it is there already
    ],
)
def test_without_an_engine_a_stage_runs_where_it_is_and_one_line_says_why(script, environ, explained, capsys):
    stage.enter([script], {**environ, **NO_ENGINE})
    expected = (
        "on the host, not in the image: no Docker engine: /nowhere/docker.sock is not there. "
        "hint: install and start Docker, or set SAMEBITS_RUNTIME=host\n"
    )
    assert capsys.readouterr().err == (expected if explained else "")


def test_where_nothing_of_docker_is_a_stage_says_nothing_of_it(program, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("samebits.engines.docker.SOCKET", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    environ = {"DOCKER_CONFIG": str(tmp_path)}
    stage.enter(["pipeline/host.py"], environ)
    assert capsys.readouterr().err == ""
    with pytest.raises(HostError, match="no Docker engine"):
        stage.enter(["pipeline/host.py"], {RUNTIME: "container", **environ})
    program("docker", "")
    stage.enter(["pipeline/host.py"], environ)
    assert capsys.readouterr().err.startswith("on the host, not in the image: no Docker engine")


@pytest.mark.parametrize(
    ("runtime", "address", "error", "message"),
    [
        ("container", NO_ENGINE, HostError, "no Docker engine"),
        ("container", {"DOCKER_HOST": "tcp://10.0.0.1:2375"}, HostError, "another host's"),
        ("docker", {}, UserError, "SAMEBITS_RUNTIME: got 'docker', accepts auto, container or host"),
    ],
)
def test_a_container_that_is_asked_for_must_be_had(runtime, address, error, message):
    with pytest.raises(error, match=message):
        stage.enter(["pipeline/train.py"], {RUNTIME: runtime, **address})


@pytest.mark.parametrize(("allowed", "hint"), [(True, "start Docker"), (False, "the group docker")])
def test_an_engine_that_does_not_answer(allowed, hint, tmp_path, monkeypatch):
    def no_client(**_):
        raise docker.errors.DockerException("nobody listens.")

    (tmp_path / "docker.sock").touch()
    monkeypatch.setattr(docker, "DockerClient", no_client)
    monkeypatch.setattr(os, "access", lambda path, mode: allowed)
    with pytest.raises(HostError, match=r"no Docker engine answers at .*/docker\.sock: nobody listens\. h") as silent:
        connect({"DOCKER_HOST": f"unix://{tmp_path}/docker.sock"})
    assert hint in silent.value.hint


def test_a_stage_ends_with_its_exit_code_if_there_is_no_engine(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "pipeline/prepare.py")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin", "PYTHONPATH": str(ROOT / "src"), "SAMEBITS_RUNTIME": "container", **NO_ENGINE},
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


SERVER = "http://mlflow:5000"


def mounted(folder, uri=SERVER, **environ):
    return docker_run.mounts_of(folder, uri, environ=environ)


def test_the_repository_is_mounted_and_a_store_elsewhere(repository, tmp_path):
    (tmp_path / "store").mkdir()
    (repository / "pipeline").mkdir()
    for store in (f"sqlite:///{tmp_path}/store/mlflow.db", f"file://{tmp_path}/store"):
        assert mounted(repository, store) == [repository, tmp_path / "store"]
    assert mounted(repository / "pipeline") == [repository]


def test_a_folder_that_git_does_not_know_is_mounted_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert mounted(tmp_path) == [tmp_path]
    monkeypatch.setenv("PATH", "")
    assert mounted(tmp_path) == [tmp_path]


def test_an_experiment_of_a_queue_sees_the_repository_that_it_is_of(repository):
    inner = repository / ".dvc/tmp/exps/tmpabc"
    inner.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet"], cwd=inner, check=True)
    assert mounted(inner) == [repository]


def test_a_worktree_sees_git(repository, tmp_path):
    commands = (["commit", "--allow-empty", "-qm", "x"], ["worktree", "add", "-q", str(tmp_path / "tree")])
    for command in commands:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", *identity, *command], cwd=repository, check=True)
    assert mounted(tmp_path / "tree") == [repository / ".git", tmp_path / "tree"]


def test_a_cache_of_dvcs_that_is_elsewhere_is_mounted(repository, tmp_path):
    (repository / ".dvc").mkdir()
    (repository / ".dvc/config.local").write_text("[cache]\n    dir = ../../cache\n    type = symlink\n")
    assert mounted(repository) == [repository]  # as long as it is not there, nothing links to it
    (tmp_path / "cache").mkdir()
    assert mounted(repository) == [tmp_path / "cache", repository]


def test_certificates_are_mounted_as_files(repository, tmp_path):
    (tmp_path / "ca.crt").touch()
    assert docker_run.mounts_of(repository, SERVER, certificates=[tmp_path / "ca.crt"], environ={}) == [
        tmp_path / "ca.crt",
        repository,
    ]


@pytest.fixture
def datasets(tmp_path):
    for name in ("far", "further"):
        (tmp_path / name).mkdir()
    return [tmp_path / "far", tmp_path / "further"]


def test_what_the_user_names_is_mounted(repository, datasets):
    far, further = datasets
    assert mounted(repository, SAMEBITS_MOUNTS=f"{far}:../further") == [far, further, repository]
    assert mounted(repository, SAMEBITS_MOUNTS=f"{far}::{repository}/.git") == [far, repository]


@pytest.mark.parametrize(
    "line", ["SAMEBITS_MOUNTS={}", 'SAMEBITS_MOUNTS = "{}"', "SAMEBITS_MOUNTS=/x\nSAMEBITS_MOUNTS={}"]
)
def test_what_a_line_of_the_environment_file_names_is_mounted(line, repository, datasets):
    far, further = datasets
    (repository / ".env").write_text(f"SAMEBITS_PORT=5001\n{line.format(far)}\nSAMEBITS_MOUNTS_TOO=/y\n")
    assert mounted(repository) == [far, repository]
    assert mounted(repository, SAMEBITS_MOUNTS=str(further)) == [further, repository]  # the environment wins
    assert mounted(repository, SAMEBITS_MOUNTS="") == [repository]
    inner = repository / ".dvc/tmp/exps/tmpabc"
    inner.mkdir(parents=True)
    assert mounted(inner) == [far, repository]


def test_mounts_that_are_not_there_are_told(repository):
    with pytest.raises(UserError, match="SAMEBITS_MOUNTS: /not/there: no such file or folder"):
        mounted(repository, SAMEBITS_MOUNTS="/not/there")


@pytest.mark.parametrize(
    ("folder", "uri"),
    [*((folder, SERVER) for folder in ("/", "/tmp", "/etc", "/usr/bin", "/dev/null", "/home")),
     ("/tmp", "sqlite:////tmp/mlflow.db")],
)  # fmt: skip
def test_nothing_hides_the_images_own_files(folder, uri, repository):
    with pytest.raises(HostError, match=f"{folder} cannot be mounted: the image has its own"):
        mounted(repository, uri, **({"SAMEBITS_MOUNTS": folder} if uri == SERVER else {}))


def test_a_folder_in_a_folder_of_the_images_own_can_be_mounted(repository):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        assert mounted(repository, SAMEBITS_MOUNTS=folder) == [repository, Path(folder)]


# -- paths that would not be seen ------------------------------------------------------------------------------


@pytest.fixture
def command_for(repository, monkeypatch):
    """The command that the engine gets in the repository."""
    monkeypatch.chdir(repository)
    for name in ("SAMEBITS_MOUNTS", *docker_run.TRUST):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    place = stage.Place(client=None, image=None, gpus=0)
    return lambda *argv: stage.command_for(place, ["python", "pipeline/train.py", *argv])


@pytest.mark.parametrize("option", ["--out-dir", "--data-dir", "--params"])
@pytest.mark.parametrize("path", ["/tmp/not/there", "/data", "../elsewhere", "out/../../far", "linked/x"])
def test_an_option_that_names_what_is_not_mounted_is_refused(option, path, command_for, repository, tmp_path):
    (tmp_path / "far").mkdir()
    (repository / "linked").symlink_to(tmp_path / "far")
    for argv in ([option, path], [f"{option}={path}"]):
        with pytest.raises(UserError, match=f"{option}: {path} is not mounted in the container") as refused:
            command_for("--strategy", "ddp", *argv)
        assert "SAMEBITS_MOUNTS" in refused.value.hint


def test_an_option_that_names_what_is_mounted_is_not(command_for, repository, datasets, monkeypatch):
    far, _ = datasets
    argv = ("--out-dir", str(far / "new/run"), f"--data-dir={repository}/data", "--params", "other.yaml")
    monkeypatch.setenv("SAMEBITS_MOUNTS", str(far))
    command = command_for(*argv)
    assert (command.argv[2:], command.mounts, command.cwd) == ([*argv], [far, repository], repository)
    command_for("--out-dir")  # without a value, which the script itself complains of


FILES = {"inputs": "here.npy", "targets": "here.safetensors:y"}


@pytest.mark.parametrize(
    ("key", "params"),
    [
        ("data.kwargs.inputs", {"data": {"task": "file", "kwargs": {**FILES, "inputs": "{far}/x.npy"}}}),
        ("data.kwargs.targets", {"data": {"task": "file", "kwargs": {**FILES, "targets": "{far}/x.safetensors:y"}}}),
        ("data.kwargs.split", {"data": {"task": "file", "kwargs": {**FILES, "split": "../far/x.npy"}}}),
        ("data.kwargs.inputs", {"data": {"task": "file", "kwargs": {**FILES, "inputs": "linked.npy"}}}),
        ("model.source", {"model": {"name": "net:make", "source": "{far}/net.py"}}),
    ],
)
def test_a_parameter_that_names_what_is_not_mounted_is_refused(
    key, params, command_for, repository, datasets, monkeypatch
):
    far, _ = datasets
    (repository / "linked.npy").symlink_to(far / "x.npy")
    text = json.dumps(params).replace("{far}", str(far))
    for name in ("params.yaml", "other.yaml"):
        (repository / name).write_text(text)
        argv = ["--params", name] if name == "other.yaml" else []
        with pytest.raises(UserError, match=rf"{key}: (.*far.*|linked.npy) is not mounted") as refused:
            command_for(*argv)
        assert "SAMEBITS_MOUNTS" in refused.value.hint
        monkeypatch.setenv("SAMEBITS_MOUNTS", str(far))
        assert command_for(*argv).mounts == [far, repository]
        monkeypatch.delenv("SAMEBITS_MOUNTS")
        (repository / name).unlink()


@pytest.mark.parametrize("text", ["data: [", "sed: 0\n", None, "model: {name: 'net:make', source: net.py}\n"])
def test_wrong_parameters_are_left_to_the_command_inside(text, command_for, repository):
    if text:
        (repository / "params.yaml").write_text(text)
    assert command_for().mounts == [repository]


def test_a_result_never_stays_in_the_container_also_where_the_host_would_do(command_for, monkeypatch, repository):
    (repository / "src/samebits").mkdir(parents=True)
    monkeypatch.setattr(stage, "find_place", lambda **_: stage.Place(client=None, image=None, gpus=0))
    with pytest.raises(UserError, match="--out-dir: /tmp/not/there is not mounted in the container"):
        stage.enter(["pipeline/compare.py", "--out-dir", "/tmp/not/there"], {})


@pytest.mark.parametrize(
    ("pid", "environ", "writes", "delivers"),
    [
        (1, {stage.INSIDE: "1"}, True, True),
        (1, {stage.INSIDE: "1"}, False, False),  # there is nothing new
        (7, {stage.INSIDE: "1"}, True, False),  # somebody else ends the container, and delivers
        (1, {}, True, False),
        (1, {stage.INSIDE: "1", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n0"}, True, False),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_what_ends_a_container_delivers_first(fails, pid, environ, writes, delivers, monkeypatch, tmp_path, capsys):
    """In a folder that machines share, the logs may be those of node 0."""
    monkeypatch.chdir(tmp_path)
    stage.LOGS.mkdir(parents=True)
    (stage.LOGS / "old.jsonl").touch()
    log = stage.LOGS / "new.jsonl"
    monkeypatch.setattr(stage, "sync", lambda: (0, {log: "MLflow is away"}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        with pytest.raises(HostError) if fails else nullcontext(), stage.delivered(environ):
            if writes:
                log.touch()
            if fails:
                raise HostError("no device", hint="none")
    said = f"{log}: MLflow is away. hint: samebits track sync\n"
    assert capsys.readouterr().err == (said if delivers else "")


# -- what the engine is asked for ------------------------------------------------------------------------------


def engine(*options, runtimes=("runc", "nvidia"), devices=(), **told):
    known = {
        "SecurityOptions": list(options),
        "Runtimes": {name: {} for name in runtimes},
        "DiscoveredDevices": [{"Source": "cdi", "ID": device} for device in devices],
        **told,
    }
    return SimpleNamespace(info=lambda: known)


def create_arguments(tmp_path, uri="http://mlflow:5000", *, gpus=0, client=None, **environ):
    attrs = {"RepoDigests": ["registry.example/samebits@sha256:1"]}
    known = SimpleNamespace(id="sha256:0", tags=["samebits:x"], labels={image.BASE_LABEL: "base"}, attrs=attrs)
    command = docker_run.ContainerCommand(
        argv=["true"], cwd=tmp_path, mounts=[tmp_path], tracking_uri=uri, gpus=gpus, environ=environ
    )
    return docker_run.create_arguments(client or engine(), known, command)


def test_a_container_whose_owner_has_ended_is_removed():
    """tests/system/container has more owners, and an engine."""
    mine, removed = docker_run.identity(os.getpid()), []  # the id of "ended" is another process's now
    gone = mine.replace(f":{os.getpid()}:", ":4194305:")
    known = [
        SimpleNamespace(id=name, labels={docker_run.OWNER: owner}, remove=lambda name=name, **_: removed.append(name))
        for name, owner in (("mine", mine), ("ended", f"{mine}0"), ("another's", ""), ("gone", gone))
    ]
    client = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: known))
    assert docker_run.sweep(client) == removed == ["ended", "gone"]


def test_gpus_come_with_the_limits_that_nccl_needs(tmp_path):
    arguments = create_arguments(tmp_path, gpus=2)
    (request,) = arguments["device_requests"]
    assert (request.count, request.capabilities) == (-1, [["gpu"]])
    assert {limit.name: limit.hard for limit in arguments["ulimits"]} == docker_run.LIMITS
    assert arguments["environment"]["SAMEBITS_HOST_GPUS"] == "2"
    assert "NVIDIA_VISIBLE_DEVICES" not in arguments["environment"]
    assert (create_arguments(tmp_path)["device_requests"], create_arguments(tmp_path)["ulimits"]) == ([], [])
    assert create_arguments(tmp_path)["shm_size"] == 8 * 2**30
    assert create_arguments(tmp_path, SAMEBITS_SHM_SIZE="16g")["shm_size"] == 16 * 2**30
    with pytest.raises(HostError, match="the engine does not offer the GPUs to containers"):
        create_arguments(tmp_path, gpus=1, client=engine(runtimes=["runc"]))
    with pytest.raises(UserError, match="SAMEBITS_SHM_SIZE: got 'many', accepts bytes, or k, m or g of them"):
        create_arguments(tmp_path, SAMEBITS_SHM_SIZE="many")


@pytest.mark.parametrize(
    "started_by",
    [
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n0", "PET_MASTER_PORT": "29501"},
        {
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1",
            "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29502",
        },
    ],
)  # fmt: skip
def test_a_container_finds_the_other_machines_as_its_command_would_outside(started_by, tmp_path):
    """Otherwise each machine would train alone, as node 0."""
    environ = create_arguments(tmp_path, **started_by)["environment"]
    assert find_nodes(environ=environ) == find_nodes(environ=started_by)
    assert find_nodes(environ=environ).rank == 1


def test_what_has_several_machines_is_told_of_them_as_by_torchrun(tmp_path):
    """An image has none of Slurm's commands to ask."""
    by_slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[0-1]"}
    command = docker_run.ContainerCommand(argv=[], cwd=tmp_path, mounts=[], tracking_uri="", gpus=0, environ={})
    assert stage._with_nodes(command, {}) == command
    told = stage._with_nodes(command, by_slurm)
    assert told.several_nodes
    assert told.environ.items() >= {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n0"}.items()
    assert stage._with_nodes(replace(command, argv=["train.py", "--nodes=2"]), {}).several_nodes


def test_gpus_are_asked_for_as_the_engine_offers_them(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    request = gpu_request(engine(runtimes=["runc"], devices=["nvidia.com/gpu=0", "nvidia.com/gpu=all"]))
    assert (request.driver, request.device_ids) == ("cdi", ["nvidia.com/gpu=all"])
    assert gpu_request(engine(runtimes=["runc"])) is None
    assert gpu_request(SimpleNamespace(info=dict)) is None


def test_compose_passes_what_a_run_records_of_nccl():
    """The kit's own engine passes all of NCCL's variables, by their prefixes."""
    given = compose("docker-compose.yml")["services"]["experiment"]["environment"]
    recorded = {name for name in RECORDED if "NCCL_" in name}
    assert {name: value for name, value in given.items() if "NCCL_" in name} == dict.fromkeys(recorded)
    assert all(docker_run._is_passed(name, "1", ()) for name in recorded)


@pytest.mark.parametrize(
    ("name", "text", "offers"),
    [
        ("nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n- name: all\n", True),
        ("nvidia.json", '{"kind": "nvidia.com/gpu", "devices": [{"name": "all"}]}', True),
        ("other.yaml", "kind: example.com/nic\ndevices: [{name: all}]\n", False),
        ("nvidia.yaml.bak", "kind: nvidia.com/gpu\ndevices: [{name: all}]\n", False),
        ("nvidia.yaml", "kind: [\n", False),
        ("nvidia.yaml", "kind: nvidia.com/gpu\n", False),
        ("nvidia.yaml", "- nvidia.com/gpu\n", False),
    ],
)
def test_docker_before_28_does_not_list_the_devices_that_specifications_describe(
    name, text, offers, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / name).write_text(text)
    folders = [str(tmp_path / "none"), str(tmp_path)]
    request = gpu_request(engine(runtimes=["runc"], CDISpecDirs=folders))
    assert (request and request.device_ids) == (["nvidia.com/gpu=all"] if offers else None)
    assert gpu_request(engine(runtimes=["runc"], CDISpecDirs=[])) is None  # injection is off


def test_gpus_that_are_kept_from_this_process_are_kept_from_a_container(gpu_host, monkeypatch):
    """The engine is outside the control group, and would give all GPUs."""
    monkeypatch.setenv("PATH", "/nowhere")
    gpu_host("F")
    request = gpu_request(engine())
    assert (request.count, len(request.device_ids)) == (0, 2)
    named = [f"nvidia.com/gpu={uuid}" for uuid in request.device_ids]
    cdi = engine(runtimes=["runc"], devices=[*named, "nvidia.com/gpu=all"])
    assert gpu_request(cdi).device_ids == named
    with pytest.raises(HostError, match=r"does not offer nvidia\.com/gpu=GPU-\S+, .*device-name-strategy=uuid"):
        gpu_request(engine(runtimes=["runc"], devices=["nvidia.com/gpu=0", "nvidia.com/gpu=all"]))
    gpu_host("F", "gpu 1", "fails all GPU_IS_LOST", "gpu 2", "fails all GPU_IS_LOST")
    with pytest.raises(HostError, match="no GPU that this process may use can be read, so a container can be given"):
        gpu_request(engine())
    gpu_host("A")
    assert gpu_request(engine()).count == -1


def test_a_container_is_given_no_dead_gpu_and_finds_those_that_were_chosen(gpu_host, tmp_path):
    """With the dead GPU a container may not start, and without it the others have other indices."""
    gpu_host("A")
    whole = create_arguments(tmp_path, gpus=4, CUDA_VISIBLE_DEVICES="1,3")["environment"]
    assert whole["CUDA_VISIBLE_DEVICES"] == "1,3"
    uuids = visible_uuids({})
    gpu_host("A", "gpu 2", "fails all GPU_IS_LOST")
    arguments = create_arguments(tmp_path, gpus=3, CUDA_VISIBLE_DEVICES="1,3")
    (request,) = arguments["device_requests"]
    assert request.device_ids == [uuids[0], uuids[1], uuids[3]]
    assert arguments["environment"]["CUDA_VISIBLE_DEVICES"] == f"{uuids[1]},{uuids[3]}"
    assert arguments["environment"]["SAMEBITS_HOST_GPUS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in create_arguments(tmp_path, gpus=3)["environment"]


@needs_root
def test_what_an_engine_does_to_users_is_met(tmp_path, monkeypatch):
    os.chown(tmp_path, 4321, 4321)
    plain = create_arguments(tmp_path, gpus=1, client=engine("name=seccomp,profile=default"))
    assert (plain["user"], plain["userns_mode"]) == ("4321:4321", None)
    assert plain["security_opt"] == ["no-new-privileges:true"]
    rootless = create_arguments(tmp_path, gpus=1, client=engine("name=seccomp,profile=default", "name=rootless"))
    assert rootless["user"] == "0:0"
    assert {limit.name for limit in rootless["ulimits"]} == {"stack", "nofile"}
    assert create_arguments(tmp_path, client=engine("name=userns"))["userns_mode"] == "host"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert create_arguments(tmp_path)["user"] == f"1234:{os.getegid()}"
    assert "label=disable" in create_arguments(tmp_path, client=engine("name=selinux"))["security_opt"]


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
    assert create_arguments(tmp_path, uri)["network_mode"] == mode


def test_variables_of_the_kits_parts_go_inside_and_no_others(tmp_path):
    (tmp_path / "src/samebits").mkdir(parents=True)
    passed = {
        "NCCL_DEBUG": "INFO",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "SSL_CERT_FILE": str(tmp_path / "ca.crt"),
    }
    others = {
        "TRITON_CACHE_DIR": "/var/cache/of/the/host",
        "AWS_SECRET_ACCESS_KEY": "x",
        "SAMEBITS_RUNTIME": "container",
        "SAMEBITS_MOUNTS": str(tmp_path),
        "SAMEBITS_IMAGE": "mine",
        "HOME": "/root",
    }
    assert create_arguments(tmp_path, **passed, **others)["environment"] == {
        **passed,
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


def test_compose_is_told_what_the_engine_knows(program, tmp_path):
    program(
        "docker",
        "case $* in info*) echo '[name=rootless]';; *Digest*gpu-*) echo registry/x@sha256:1;; "
        "*.Id*gpu-*) echo sha256:0;; *) exit 1;; esac",
    )
    program("nvidia-ctk", "echo 'NVIDIA Container Toolkit CLI version 1.18.1'\necho 'commit: 1.2.3'")
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    told = {
        "SAMEBITS_GID": "0",
        "SAMEBITS_MEMLOCK": str(-1 if hard == resource.RLIM_INFINITY else hard),
        "SAMEBITS_GPU_IMAGE_ID": "sha256:0",
        "SAMEBITS_GPU_IMAGE_DIGEST": "registry/x@sha256:1",
        "SAMEBITS_CPU_IMAGE_ID": "",
        "SAMEBITS_CPU_IMAGE_DIGEST": "",
        "SAMEBITS_CONTAINER_TOOLKIT": "1.18.1",
    }
    assert told.items() <= compose_environment(tmp_path).items()


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [
        ("1.9.0", "warning", "1.9.0 is older than 1.17.8"),
        ("1.17.7", "warning", "1.17.7 is older than 1.17.8: a container may take the host over"),
        ("1.17.8", "ok", "1.17.8"),
        ("1.20.0", "ok", "1.20.0"),
        (None, "ok", "does not say its version"),
    ],
)
def test_a_toolkit_that_lets_containers_take_the_host_over_is_told(version, status, text, monkeypatch):
    monkeypatch.setattr(containers, "toolkit_version", lambda: version)
    (finding,) = containers.toolkit(engine(), 2)
    assert finding.status == status
    assert text in finding.text
    assert finding.hint is None or "bulletins: https://" in finding.hint


@pytest.mark.parametrize(("needed", "status"), [(True, "failed"), (False, "warning")])
def test_without_the_toolkit_stages_run_on_the_host_unless_they_may_not(needed, status, monkeypatch):
    monkeypatch.setattr(containers, "gpu_request", lambda client: None)
    (finding,) = containers.toolkit(engine(), 2, needed=needed)
    assert (finding.status, "nvidia-container-toolkit" in finding.hint) == (status, True)
    (finding,) = containers.inside(stage.Place(client=engine(), image=None, gpus=2))
    assert (finding.status, finding.text) == ("skipped", "the engine gives containers no GPU")


def test_where_stages_run_on_the_host_no_engine_is_asked():
    findings = list(containers.containers(0, {"SAMEBITS_RUNTIME": "host", "DOCKER_HOST": "unix:///nowhere"}))
    assert [(one.name, one.status) for one in findings if one.name != "owner"] == [("container", "skipped")]


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
    locks = {f"requirements.{name}.lock" for name in ("cpu", "gpu", "uv")}
    assert kept == {"pyproject.toml", "README.md", "src", "wheels"} | locks
    assert {".git", ".env", "data", "secrets"} & kept == set()


COMPOSE = [f"docker-compose{overlay}.yml" for overlay in ("", ".cpu", ".cdi", ".postgres")]
SERVICES = [(name, service) for name in COMPOSE for service in compose(name)["services"]]


@pytest.mark.parametrize(("name", "service"), SERVICES)
def test_no_service_has_more_than_it_needs(name, service):
    definition = compose(name)["services"][service]
    assert not {"privileged", "network_mode", "pid", "ipc", "devices"} & set(definition)
    assert "docker.sock" not in str(definition)
    assert all(port.startswith("127.0.0.1:") for port in definition.get("ports", []))
    if "image" in definition and name != "docker-compose.cpu.yml":
        assert definition["cap_drop"] == ["ALL"]
        assert definition["security_opt"] == ["no-new-privileges:true"]
        assert definition["read_only"] is True
        if definition["user"] == "0:0":  # to become the owner of the clone, who has none of these
            assert definition["cap_add"] == ["SETUID", "SETGID", "SETPCAP"]
            assert "--bounding-set=-all" in definition["entrypoint"][2]
        else:
            assert "cap_add" not in definition
        assert "@sha256:" in definition["image"] or definition["pull_policy"] == "${SAMEBITS_PULL_POLICY:-build}"


def test_the_health_check_asks_the_api_and_the_grace_is_longer_than_the_launchers():
    services = compose("docker-compose.yml")["services"]
    assert "/api/2.0/mlflow/" in str(services["mlflow"]["healthcheck"]["test"])
    assert services["experiment"]["stop_grace_period"] == "60s"
    assert services["experiment"]["entrypoint"][4:7] == ["tini", "-g", "--"]
    assert services["experiment"]["depends_on"] == {"mlflow": {"condition": "service_healthy"}}
    (device,) = services["experiment"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_no_file_holds_a_secret():
    overlay = compose("docker-compose.postgres.yml")
    assert overlay["secrets"] == {"postgres_password": {"file": "secrets/postgres_password"}}
    assert "POSTGRES_PASSWORD" not in overlay["services"]["postgres"]["environment"]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", "/secrets/", "/wheels/"} <= set(ignored)
