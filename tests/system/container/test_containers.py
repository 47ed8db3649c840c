"""The image, Compose and the SDK's runner against a real Docker engine."""

import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
from container_tools import (
    BASE,
    CPU,
    UID,
    Compose,
    add_wheels,
    clone,  # noqa: F401 - a fixture
    compose_plugin,  # noqa: F401
    containers,
    engine,  # noqa: F401
    image,  # noqa: F401
    other_image,  # noqa: F401
    read,
)
from docker.errors import NotFound
from ruamel.yaml import YAML

from conftest import ROOT, smoke, wait_for
from patience import patient
from samebits.engines.docker_run import OWNER, identity, sweep

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1500)]

CDI, POSTGRES = "docker-compose.cdi.yml", "docker-compose.postgres.yml"
RUNS = [f"{strategy}-{numerics} x{2 if strategy == 'ddp' else 1}" for numerics in ("fast", "exact")
        for strategy in ("single", "dp", "ddp")]  # fmt: skip


def short(name):
    """A run's name without its batch and its model."""
    return " ".join(name.split()[:2])


# -- the image -------------------------------------------------------------------------------------------------


def test_the_image_says_what_it_is_made_of(engine, image):
    built = engine.images.get(image)
    base = re.search(r"^ARG BASE_IMAGE=(.+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1]
    assert built.labels["samebits.lock"] == "cpu"
    assert built.labels["org.opencontainers.image.base.name"] == os.environ.get("SAMEBITS_TEST_BASE", base)
    assert re.fullmatch(r"[0-9a-f]{40}", built.labels["org.opencontainers.image.revision"])
    assert built.attrs["Config"]["User"] == "1000:1000"


def test_nothing_of_git_data_or_secrets_is_in_it(engine, image):
    """The folder that it was built from has them, and so has the environment; see the fixture."""
    names = "find / -xdev '(' -name .git -o -name .env -o -name dvc.lock -o -name leaked ')'"
    command = ["sh", "-c", f"{names}; grep -rl do-not-leak-me /opt /home || :"]
    listing = engine.containers.run(image, command, user="0", remove=True)
    assert listing.decode().split() == []
    built = engine.images.get(image)
    assert "do-not-leak-me" not in json.dumps([built.attrs, built.history()])


def test_what_the_compiler_makes_runs_in_it(image, clone):
    checkout = clone("compiled", numerics=["fast"], compile=True, strategies=["single"])
    for script in (["prepare.py"], ["train.py", "--strategy", "single", "--numerics", "fast", "--no-tracking"]):
        checkout("python", f"pipeline/{script[0]}", *script[1:], SAMEBITS_RUNTIME="container")
    assert read(checkout.folder, "runs/single-fast/run.json")["not_applied"] == {}


def test_an_edit_of_the_code_rebuilds_no_packages(engine, other_image, clone):
    checkout = clone("edit")
    before = engine.images.get(other_image(checkout)).attrs["RootFS"]["Layers"]
    checkout.append("src/samebits/__init__.py", "# edited\n")
    after = engine.images.get(other_image(checkout)).attrs["RootFS"]["Layers"]
    same = sum(a == b for a, b in zip(before, after, strict=True))
    assert len(before) - 3 <= same < len(before)


# -- Compose ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlays", [(), (CPU,), (CDI,), (POSTGRES,), (CPU, POSTGRES)])
@pytest.mark.usefixtures("compose_plugin")
def test_compose_accepts_its_files(overlays, clone):
    assert Compose(clone("files"), *overlays)("config", "--quiet") == ""


def test_gpus_are_asked_for_by_their_device_interface(image, clone, engine):
    """The container is made and not started, because there is no GPU."""
    with Compose(clone("cdi"), CDI, SAMEBITS_GPU_IMAGE=image) as project:
        project("create", "--no-build", "experiment")
        (request,) = engine.containers.get(project.id_of("experiment")).attrs["HostConfig"]["DeviceRequests"]
        assert (request["Driver"], request["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=all"])


@pytest.fixture(scope="module")
def finished(image, clone):
    """A clone of an unprivileged user, in which ``docker compose up`` has run."""
    checkout = clone("compose")
    checkout.give_to(UID)
    with Compose(checkout, CPU) as project:
        project("up", "--detach", "--no-build")
        project.wait("experiment")
        yield project


def ask(port, route, body=None, host=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Host": host} if host else {})}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/2.0/mlflow/{route}", data, headers)
    with urllib.request.urlopen(request, timeout=patient(60)) as answer:
        return json.load(answer)


def recorded(project):
    """The runs that a project's server has."""
    with suppress(OSError):  # it does not answer yet
        return ask(project.port, "runs/search", {"experiment_ids": ["1"]}).get("runs", [])
    return []


def test_the_runs_are_on_the_server_with_metrics_and_artifacts(finished, engine, image):
    experiment = ask(finished.port, "experiments/get-by-name?experiment_name=samebits")["experiment"]
    answer = ask(finished.port, "runs/search", {"experiment_ids": [experiment["experiment_id"]], "max_results": 50})
    runs = {short(run["info"]["run_name"]): run for run in answer["runs"]}
    assert set(RUNS) < set(runs)
    for name in RUNS:
        metrics = {metric["key"] for metric in runs[name]["data"]["metrics"]}
        tags = {tag["key"]: tag["value"] for tag in runs[name]["data"]["tags"]}
        assert {"loss", "eval_loss", "training_seconds"} <= metrics
        assert (tags["in_container"], len(tags["git_commit"])) == ("True", 40)
        assert tags["image_id"] == engine.images.get(image).id
        files = ask(finished.port, f"artifacts/list?run_id={runs[name]['info']['run_id']}")["files"]
        assert {"model.safetensors", "losses.csv"} <= {file["path"] for file in files}


def test_what_it_made_belongs_to_the_clones_owner(finished):
    assert {path.lstat().st_uid for path in finished.checkout.folder.rglob("*")} == {UID}
    assert (finished.checkout.folder / "reports/index.html").exists()


def test_no_process_is_root_and_nothing_is_granted(finished, engine):
    server = engine.containers.get(finished.id_of("mlflow"))
    uids = {row[0] for row in server.top(ps_args="-eo uid,pid")["Processes"]}
    assert uids == {str(UID)}
    for service in ("mlflow", "experiment"):
        attrs = engine.containers.get(finished.id_of(service)).attrs
        host = attrs["HostConfig"]
        assert (host["Privileged"], host["CapDrop"], host["ReadonlyRootfs"]) == (False, ["ALL"], True)
        assert attrs["Config"]["User"] == "0:0"
        assert {name.removeprefix("CAP_") for name in host["CapAdd"]} == {"SETUID", "SETGID", "SETPCAP"}
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert "docker.sock" not in str(attrs["Mounts"])


POWERS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


@pytest.mark.parametrize("owner", [0, UID])
@pytest.mark.usefixtures("image")
def test_a_fresh_clone_needs_nothing_but_compose(owner, clone):
    checkout = clone("fresh", numerics=["exact"], strategies=["single", "ddp"])
    add_wheels(checkout)
    checkout.give_to(owner)
    with Compose(checkout, CPU, fresh=True, **BASE) as project:
        project("up", "--detach")
        project.wait("experiment")
        assert {path.lstat().st_uid for path in checkout.folder.rglob("*")} == {owner}
        assert {short(run["info"]["run_name"]) for run in recorded(project)} > {"single-exact x1", "ddp-exact x2"}
        assert read(checkout.folder, "host.json")["image"] == "samebits:cpu"
        inside = project("exec", "-T", "mlflow", "cat", "/proc/1/status", "/proc/1/cmdline").replace("\0", " ")
        said = dict(line.split(":\t", 1) for line in inside.splitlines() if ":\t" in line)
        assert said["Uid"].split() == said["Gid"].split() == 4 * [str(owner)]
        assert {int(said[name], 16) for name in POWERS} == {0}
        assert "tini -- mlflow server" in inside
        done = checkout.run(*project.command, "run", "--rm", "--no-deps", "-T", "experiment", "cat",
                            "/proc/self/status", **project.environ)  # fmt: skip
        assert all(f"{name}:\t{0:016x}" in done.stdout for name in POWERS), done


@pytest.mark.usefixtures("image")
def test_a_worktree_without_its_git_folder_is_refused_by_name(clone, tmp_path):
    checkout = clone("whole")
    checkout("git", "worktree", "add", "--quiet", str(tmp_path / "tree"))
    checkout.folder = tmp_path / "tree"
    add_wheels(checkout)
    with Compose(checkout, CPU, fresh=True, **BASE) as project:
        run = ["run", "--rm", "--no-deps", "-T", "experiment"]
        done = checkout.run(*project.command, *run, **project.environ)
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1] == (
            "error: git's own folder is elsewhere, and is not mounted. hint: sh tools/env.sh"
        )
        checkout("sh", "tools/env.sh")
        assert project(*run, "git", "rev-parse", "--show-toplevel").strip() == str(checkout.folder)


def test_another_host_header_is_refused(finished):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(finished.port, "experiments/search?max_results=1", host="evil.example")
    refused.value.close()
    assert refused.value.code == 403


def test_the_port_answers_on_loopback_alone(finished):
    listed = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    addresses = [address for address in listed if ":" not in address]
    assert addresses
    for address in addresses:
        with socket.socket() as probe:
            probe.settimeout(5)
            assert probe.connect_ex((address, finished.port)) != 0


def test_experiments_run_in_the_same_place(finished):
    run = ["run", "--rm", "--no-deps", "-T", "experiment"]
    verdict = finished(*run, "samebits", "compare", "runs/single-exact", "runs/dp-exact")
    assert verdict.splitlines()[0] == "= bitwise"
    lines = finished(*run, "samebits", "doctor", "--json")
    statuses = {finding["name"]: finding["status"] for finding in json.loads(lines)["findings"]}
    assert (statuses["mlflow"], statuses["container"], statuses["params"]) == ("ok", "skipped", "ok")
    refused = finished.checkout.run(*finished.command, *run, "python", "pipeline/train.py", "--strategy", "none")
    assert refused.returncode == 2
    finished("run", "--rm", "-T", "--user", "0:0", "experiment", "git", "var", "GIT_AUTHOR_IDENT")  # also of root
    finished(*run, "dvc", "exp", "run", "--set-param", "train.numerics=[fast]", "--set-param",
             "train.strategies=[single]", "--set-param", "train.optimizer.lr=0.05")  # fmt: skip
    assert read(finished.checkout.folder, "runs/single-fast/run.json")["params"]["train"]["optimizer"]["lr"] == 0.05


def test_compose_and_the_sdk_tell_a_run_the_same_of_its_image(image, clone, finished):
    checkout = clone("same")
    checkout("python", "pipeline/host.py", SAMEBITS_RUNTIME="container")
    assert read(checkout.folder, "host.json") == read(finished.checkout.folder, "host.json")


def test_the_doctor_reaches_a_server_of_this_host_from_inside(image, clone, finished):
    uri = f"http://localhost:{finished.port}"
    done = clone("reach").run("samebits", "doctor", "--json", MLFLOW_TRACKING_URI=uri)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert (findings["inside: mlflow"]["status"], findings["inside: mlflow"]["text"]) == ("ok", f"{uri} answers")


def test_ctrl_c_ends_the_training_before_its_container(image, clone, engine):
    checkout = clone("interrupted", epochs=5000)
    checkout.give_to(UID)
    with Compose(checkout, CPU) as project:
        up = subprocess.Popen(
            [*project.command, "up", "--no-build"],
            cwd=checkout.folder,
            env={**checkout.environ, **project.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_for(lambda: list((checkout.folder / ".samebits/resume").glob("*/0*")))
        wait_for(lambda: recorded(project))  # the sender has a low priority, and begins late on a busy host
        os.killpg(up.pid, signal.SIGINT)  # as a terminal does
        up.communicate(timeout=patient(120))
        states = {name: engine.containers.get(project.id_of(name)).status for name in ("mlflow", "experiment")}
        assert set(states.values()) == {"exited"}
        project("up", "--detach", "--no-build", "--wait", "mlflow")
        assert [run["info"]["status"] for run in recorded(project)] == ["KILLED"]


# -- stages of dvc repro on the host ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_the_host(clone):
    """The bits of the exact runs, trained on the host."""
    checkout = clone("host", numerics=["exact"])
    checkout("dvc", "repro", SAMEBITS_RUNTIME="host")
    return checkout


def test_stages_in_the_container_have_the_bits_of_the_host(image, clone, on_the_host, engine):
    checkout = clone("inside", numerics=["exact"])
    checkout("dvc", "repro", SAMEBITS_RUNTIME="container")
    assert checkout.exact() == on_the_host.exact()
    here, there = read(checkout.folder, "host.json"), read(on_the_host.folder, "host.json")
    assert (here["in_container"], there["in_container"]) == (True, False)
    assert here["image_id"] == engine.images.get(image).id
    assert read(checkout.folder, "runs/single-exact/run.json")["host"] == here
    assert containers(engine, checkout) == []
    verdicts = checkout.samebits("container", "run", "samebits", "verify")
    assert [line.split(",")[0] for line in verdicts.splitlines()][-3:] == [
        f"{strategy}-exact: bitwise" for strategy in ("single", "dp", "ddp")
    ]


def test_another_python_and_c_library_have_the_bits_of_the_host(clone, other_image, on_the_host):
    if "SAMEBITS_TEST_OTHER_BASE" not in os.environ:
        pytest.skip("SAMEBITS_TEST_OTHER_BASE names no base")
    checkout = clone("elsewhere", numerics=["exact"])
    checkout("dvc", "repro", SAMEBITS_RUNTIME="container", SAMEBITS_IMAGE=other_image(checkout))
    here, there = read(checkout.folder, "host.json"), read(on_the_host.folder, "host.json")
    assert here["python"] != there["python"]
    assert here["libc"] != there["libc"]
    assert checkout.exact() == on_the_host.exact()


def test_a_changed_image_makes_the_trainings_stale_and_nothing_else(image, clone, on_the_host, engine):
    checkout = clone("stale")
    checkout("dvc", "repro", "train@single-fast", SAMEBITS_RUNTIME="container")
    same = checkout("dvc", "repro", "train@single-fast", SAMEBITS_RUNTIME="container")
    assert "Stage 'train@single-fast' didn't change, skipping" in same
    context = io.BytesIO(f"FROM {image}\nLABEL changed=1\n".encode())
    tag = f"samebits:changed-{os.getpid()}"
    engine.images.build(fileobj=context, tag=tag, rm=True)
    changed = checkout("dvc", "repro", "train@single-fast", SAMEBITS_RUNTIME="container", SAMEBITS_IMAGE=tag)
    engine.images.remove(tag)
    assert "Stage 'prepare' didn't change, skipping" in changed
    assert "Running stage 'train@single-fast'" in changed


def test_files_outside_the_repository_are_seen_inside(image, clone, tmp_path):
    rows = np.random.default_rng(0)
    np.save(tmp_path / "inputs.npy", rows.normal(size=(600, 128)).astype("float32"))
    np.save(tmp_path / "targets.npy", rows.integers(0, 10, 600))
    checkout = clone("outside", strategies=["single"], numerics=["exact"])
    names = {name: str(tmp_path / f"{name}.npy") for name in ("inputs", "targets")}
    checkout.params["data"] = {"task": "file", "num_samples": 500, "test_samples": 100, "kwargs": names}
    YAML().dump(checkout.params, checkout.folder / "params.yaml")
    refused = checkout.run("python", "pipeline/prepare.py", SAMEBITS_RUNTIME="container")
    assert refused.returncode == 2
    assert "data.kwargs.inputs: " in refused.stderr
    assert "is not mounted in the container. hint: add a folder that holds it to SAMEBITS_MOUNTS" in refused.stderr
    checkout("python", "pipeline/prepare.py", SAMEBITS_RUNTIME="container", SAMEBITS_MOUNTS=str(tmp_path))
    assert read(checkout.folder, "data/card.json")["task"] == "file"
    (checkout.folder / ".env").write_text(f"SAMEBITS_MOUNTS={tmp_path}\n")
    (checkout.folder / "data/card.json").unlink()
    checkout("dvc", "repro", "train@single-exact", SAMEBITS_RUNTIME="container")
    assert read(checkout.folder, "host.json")["in_container"] is True
    assert read(checkout.folder, "data/card.json")["task"] == "file"


def test_by_default_the_image_is_used_where_it_is_there(image, clone):
    checkout = clone("auto")
    assert "on the host" not in checkout.run("python", "pipeline/host.py").stderr
    assert read(checkout.folder, "host.json")["image"] == image
    checkout.append("requirements.cpu.lock", "# other\n")
    messages = checkout.run("python", "pipeline/host.py").stderr
    assert "on the host, not in the image: no image samebits:cpu-" in messages
    assert "`samebits container build` makes it" in messages
    assert read(checkout.folder, "host.json")["in_container"] is False
    messages = checkout.run("python", "pipeline/host.py", SAMEBITS_IMAGE=image).stderr
    assert messages.splitlines() == [
        f"in the image {image}",
        f"warning: {image} is not of the locks here. hint: `samebits container build`, or `make up`",
    ]


def test_a_repository_of_ones_own_gets_its_answers_in_the_image(image, clone, tmp_path):
    """Of the same parameters, of which git knows nothing yet, and with the library that the image has."""
    checkout, own = clone("installed"), tmp_path / "own"
    own.mkdir()
    checkout.folder, parameters = own, (checkout.folder / "params.yaml").read_text()
    checkout("git", "init", "--quiet")
    checkout.samebits("init")
    (own / "params.yaml").write_text(parameters)
    told = checkout.run("dvc", "repro", SAMEBITS_IMAGE=image, SAMEBITS_RUNTIME="container")
    assert told.returncode == 0, told.stderr
    assert "yes     exact: every bit, under single and ddp, on any host" in told.stdout
    assert read(own, "host.json")["in_container"] is True


def test_results_never_stay_behind_in_a_container(image, clone, tmp_path):
    checkout = clone("behind", numerics=["fast"])
    command = ["python", "pipeline/compare.py", "--no-tracking"]
    for runtime in ("auto", "container"):
        refused = checkout.run(*command, "--out-dir", f"{tmp_path}/reports", SAMEBITS_RUNTIME=runtime)
        assert refused.returncode == 2
        assert f"--out-dir: {tmp_path}/reports is not mounted in the container" in refused.stderr
    environ = {"SAMEBITS_RUNTIME": "container", "SAMEBITS_MOUNTS": str(tmp_path)}
    done = checkout.run(*command, f"--out-dir={tmp_path}/reports", **environ)
    assert (done.returncode, "is not mounted" in done.stderr) == (2, False)  # it ran inside, and there are no runs
    checkout("python", "pipeline/prepare.py", f"--out-dir={tmp_path}/data", **environ)
    assert (tmp_path / "data/card.json").exists()


def test_fewer_gpus_than_on_the_host_are_an_error(image, clone):
    done = clone("gpus").run(
        "samebits", "container", "run", "env", "SAMEBITS_HOST_GPUS=8", "python", "pipeline/host.py"
    )
    assert done.returncode == 3
    assert f"8 GPUs on the host, 0 for torch in {image}" in done.stderr


def test_output_comes_while_the_command_goes_on(image, clone):
    command = ["samebits", "container", "run", "sh", "-c", "echo first; read -r line < wait; echo $line >&2"]
    checkout = clone("live")
    os.mkfifo(checkout.folder / "wait")
    process = checkout.start(*command)
    assert process.stdout.readline() == "first\n"
    assert process.poll() is None
    (checkout.folder / "wait").write_text("second\n")
    assert process.communicate(timeout=patient(120)) == ("", "second\n")


@pytest.mark.parametrize(
    ("script", "signals", "code"),
    [
        ("trap 'echo heard; exit 9' TERM; echo up; sleep 60 & wait", [signal.SIGHUP], 9),  # a terminal that is gone
        ("trap 'echo heard' TERM; echo up; while :; do sleep 0.1; done", 2 * [signal.SIGTERM], 137),  # no patience
    ],
)
def test_other_signals(script, signals, code, image, clone, engine):
    checkout = clone("signals")
    command = ["samebits", "container", "run", "sh", "-c", script]
    process = checkout.start(*command)
    assert process.stdout.readline() == "up\n"
    for signum in signals:
        process.send_signal(signum)
        process.stdout.readline()  # what it says when it has heard of it; two at once would be one
    process.communicate(timeout=patient(120))
    assert process.returncode == code
    assert containers(engine, checkout) == []


def test_exit_codes_and_errors_come_out(image, clone):
    checkout = clone("codes", epochs=0)
    done = checkout.run("python", "pipeline/prepare.py", SAMEBITS_RUNTIME="container")
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    assert checkout.run("samebits", "container", "run", "sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_training_and_leaves_no_container(signum, code, image, clone, engine):
    checkout = clone("signal", epochs=5000)
    checkout("python", "pipeline/prepare.py", SAMEBITS_RUNTIME="container")
    command = ["python", "pipeline/train.py", "--strategy", "ddp", "--numerics", "exact"]
    process = checkout.start(*command, SAMEBITS_RUNTIME="container")
    wait_for(lambda: list((checkout.folder / ".samebits/resume").glob("*/0*")))
    process.send_signal(signum)
    process.communicate(timeout=patient(120))
    assert process.returncode == code
    assert containers(engine, checkout) == []
    checkout.samebits("track", "sync")
    query = (
        "import mlflow; c = mlflow.MlflowClient(); e = c.get_experiment_by_name('samebits').experiment_id; "
        "print(*[r.info.status for r in c.search_runs([e])])"
    )
    uri = f"sqlite:///{checkout.folder}/mlflow.db"
    assert wait_for(
        lambda: checkout("python", "-W", "ignore", "-c", query, MLFLOW_TRACKING_URI=uri).split() == ["KILLED"],
        seconds=120,
    )


def test_a_runner_that_is_killed_leaves_what_the_next_one_removes(image, clone, engine):
    checkout = clone("killed")
    process = checkout.start("samebits", "container", "run", "sleep", "600")
    wait_for(lambda: [c for c in containers(engine, checkout) if c.status == "running"])
    process.kill()
    process.communicate()
    assert len(containers(engine, checkout)) == 1
    checkout.samebits("container", "run", "true")
    assert containers(engine, checkout) == []


def test_only_what_has_surely_lost_its_owner_is_removed(image, engine):
    mine = identity(os.getpid()).split(":")
    labels = {
        "of this process": mine,
        "of a process that has ended": [*mine[:3], "1", "1"],
        "of another user": ["12345", *mine[1:3], "1", "1"],
        "of another namespace": [*mine[:2], "1", "1", "1"],
        "of before the host's start": [mine[0], "boot", *mine[2:]],
    }
    labelled = {name: engine.containers.create(image, "true", labels={OWNER: ":".join(parts)})
            for name, parts in labels.items()}  # fmt: skip
    try:
        removed = sweep(engine)
        swept = {name for name, container in labelled.items() if container.id in removed}
    finally:
        for container in labelled.values():
            with suppress(NotFound):
                container.remove(force=True)
    assert swept == {"of a process that has ended", "of before the host's start"}


def test_what_the_engine_refuses_is_told(image, clone):
    checkout = clone("refused")
    done = checkout.run("samebits", "container", "run", "true", SAMEBITS_SHM_SIZE="-1")
    assert (done.returncode, done.stderr.splitlines()[0][:38]) == (3, "error: no container could be made: SHM"), (
        done.stderr
    )
    done = checkout.run("samebits", "container", "run", "no-such-command")
    assert (done.returncode, "no-such-command" in done.stderr) == (127, True)


# -- the rest of the command -----------------------------------------------------------------------------------


def test_an_image_is_kept_as_a_file_and_comes_back(image, clone, engine, tmp_path):
    checkout = clone("archive")
    small = engine.images.get(os.environ.get("SAMEBITS_TEST_BASE") or image)
    tag = f"samebits:kept-{os.getpid()}"
    small.tag(*tag.split(":"))
    file = tmp_path / "kept.tar"
    written = checkout.samebits("container", "save", str(file), SAMEBITS_IMAGE=tag)
    assert written.split() == [str(file), f"{file}.json"]
    engine.images.remove(tag)
    missing = checkout.run("samebits", "container", "info", SAMEBITS_IMAGE=tag)
    assert f"no image {tag}, which SAMEBITS_IMAGE names" in missing.stderr
    assert checkout.samebits("container", "load", str(file)).strip() == tag
    assert engine.images.get(tag).id == small.id == read(tmp_path, "kept.tar.json")["id"]
    with file.open("ab") as stream:
        stream.write(b"more")
    refused = checkout.run("samebits", "container", "load", str(file))
    assert (refused.returncode, "it is not whole" in refused.stderr) == (2, True)
    record = read(tmp_path, "kept.tar.json")
    for content in (b"", b"no archive", file.read_bytes()[: file.stat().st_size // 2]):
        file.write_bytes(content)
        (tmp_path / "kept.tar.json").write_text(json.dumps({**record, "sha256": hashlib.sha256(content).hexdigest()}))
        refused = checkout.run("samebits", "container", "load", str(file))
        assert refused.returncode == 2, refused.stderr
        assert re.match(rf"error: {file}: (the engine takes no image from it|holds another image)", refused.stderr)
    engine.images.remove(tag)


def test_the_benchmark_of_containers_still_works(image):
    smoke("container", SAMEBITS_IMAGE=image)


def test_the_doctor_looks_inside(image, clone):
    checkout = clone("doctor")
    done = checkout.run("samebits", "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["container"]["text"].startswith("Docker ")
    assert findings["image"]["text"].startswith(image)
    assert findings["inside: mlflow"]["status"] == "ok"
    assert findings["inside: shared memory"]["text"].startswith("8.0 GiB free")
    assert findings["container disk"]["status"] in ("ok", "warning")
    assert findings["owner"]["status"] == "ok"


# -- PostgreSQL ------------------------------------------------------------------------------------------------


def test_mlflow_keeps_its_runs_in_postgresql(image, clone, engine):
    name = os.environ.get("SAMEBITS_TEST_POSTGRES")
    checkout = clone("postgres")
    (checkout.folder / "secrets").mkdir()
    secret = checkout.folder / "secrets/postgres_password"
    secret.write_text("a-word")
    checkout.give_to(UID)
    secret.chmod(0o640)
    with Compose(checkout, CPU, POSTGRES, **({"POSTGRES_IMAGE": name} if name else {})) as project:
        project("up", "--detach", "--no-build", "--wait", "mlflow")
        run = ask(project.port, "runs/create", {"experiment_id": "0"})["run"]["info"]["run_id"]
        counted = project("exec", "-T", "postgres", "psql", "-U", "mlflow", "-d", "mlflow", "-Atc",
                          f"select count(*) from runs where run_uuid = '{run}'")  # fmt: skip
        assert counted.strip() == "1"
        server = engine.containers.get(project.id_of("mlflow"))
        assert "a-word" not in str(server.attrs)
