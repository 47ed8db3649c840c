"""The image, Compose and the SDK's runner against a real Docker engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from container_tools import (
    UID,
    Compose,
    build,
    clone,  # noqa: F401 - a fixture
    containers,
    engine,  # noqa: F401
    image,  # noqa: F401
    read,
    wait_until,
)

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1500)]

CPU = "docker-compose.cpu.yml"
RUNS = [f"{strategy}-{numerics} x{2 if strategy == 'ddp' else 1}" for numerics in ("fast", "exact")
        for strategy in ("single", "dp", "ddp")]  # fmt: skip


# -- the image -------------------------------------------------------------------------------------------------


def test_the_image_says_what_it_is_made_of(engine, image):
    found = engine.images.get(image)
    labels = found.labels
    assert labels["samebits.lock"] == "cpu"
    assert labels["org.opencontainers.image.base.name"] == (os.environ.get("SAMEBITS_TEST_BASE") or labels[
        "org.opencontainers.image.base.name"])  # fmt: skip
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert found.attrs["Config"]["User"] == "1000:1000"


def test_nothing_of_git_data_or_secrets_is_in_it(engine, image):
    command = ["sh", "-c", "find / -xdev \\( -name .git -o -name .env -o -name dvc.lock -o -name postgres_password \\)"]
    assert engine.containers.run(image, command, user="0", remove=True).decode().split() == []


def test_an_edit_of_the_code_rebuilds_no_packages(engine, image, clone):
    made = clone("edit")
    made.append("src/samebits/__init__.py", "# edited\n")
    before = engine.images.get(image).attrs["RootFS"]["Layers"]
    assert build(made, "cpu", os.environ.get("SAMEBITS_TEST_BASE")) == image
    after = engine.images.get(image).attrs["RootFS"]["Layers"]
    same = sum(a == b for a, b in zip(before, after, strict=True))
    assert len(before) - 3 <= same < len(before)


# -- Compose ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(image, clone):
    """A clone of an unprivileged user, in which ``docker compose up`` has run."""
    made = clone("compose")
    made.give_to(UID)
    project = Compose(made, CPU)
    try:
        project("up", "--detach", "--no-build")
        project.wait("experiment")
        yield project
    finally:
        project.down()


def ask(port, route, body=None, host=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Host": host} if host else {})}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/2.0/mlflow/{route}", data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_the_runs_are_on_the_server_with_metrics_and_artifacts(finished):
    experiment = ask(finished.port, "experiments/get-by-name?experiment_name=samebits")["experiment"]
    found = ask(finished.port, "runs/search", {"experiment_ids": [experiment["experiment_id"]], "max_results": 50})
    runs = {run["info"]["run_name"]: run for run in found["runs"]}
    assert set(RUNS) < set(runs)
    for name in RUNS:
        metrics = {metric["key"] for metric in runs[name]["data"]["metrics"]}
        tags = {tag["key"]: tag["value"] for tag in runs[name]["data"]["tags"]}
        assert {"loss", "eval_loss", "training_seconds"} <= metrics
        assert (tags["in_container"], len(tags["git_commit"])) == ("True", 40)
        files = ask(finished.port, f"artifacts/list?run_id={runs[name]['info']['run_id']}")["files"]
        assert {"model.safetensors", "losses.csv"} <= {file["path"] for file in files}


def test_what_it_made_belongs_to_the_clones_owner(finished):
    made = [path for path in finished.made.folder.rglob("*") if path.name != ".env"]
    assert {path.lstat().st_uid for path in made} == {UID}
    assert (finished.made.folder / "reports/index.html").exists()


def test_no_process_is_root_and_nothing_is_granted(finished, engine):
    server = engine.containers.get(finished.id_of("mlflow"))
    uids = {row[0] for row in server.top(ps_args="-eo uid,pid")["Processes"]}
    assert uids == {str(UID)}
    for service in ("mlflow", "experiment"):
        host = engine.containers.get(finished.id_of(service)).attrs["HostConfig"]
        assert (host["Privileged"], host["CapDrop"], host["ReadonlyRootfs"]) == (False, ["ALL"], True)


def test_another_host_header_is_refused(finished):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(finished.port, "experiments/search?max_results=1", host="evil.example")
    refused.value.close()
    assert refused.value.code == 403


def test_the_port_answers_on_loopback_alone(finished):
    listed = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    for address in [address for address in listed if ":" not in address]:
        with socket.socket() as probe:
            probe.settimeout(5)
            assert probe.connect_ex((address, finished.port)) != 0


def test_other_commands_run_in_the_same_place(finished):
    command = [
        "run",
        "--rm",
        "--no-deps",
        "-T",
        "experiment",
        "samebits",
        "compare",
        "runs/single-exact",
        "runs/dp-exact",
    ]
    assert finished(*command).splitlines()[0] == "bitwise"


# -- stages of dvc repro on the host ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_the_host(clone):
    """The bits of the exact runs, trained on the host."""
    made = clone("host")
    made("dvc", "repro", SAMEBITS_RUNTIME="host")
    return made


def test_stages_in_the_container_have_the_bits_of_the_host(image, clone, on_the_host, engine):
    made = clone("inside")
    made("dvc", "repro", SAMEBITS_RUNTIME="container")
    assert made.exact() == on_the_host.exact()
    here, there = read(made.folder, "host.json"), read(on_the_host.folder, "host.json")
    assert (here["in_container"], there["in_container"]) == (True, False)
    assert here["image_id"] == engine.images.get(image).id
    assert containers(engine) == []


def test_another_python_and_c_library_have_the_bits_of_the_host(clone, on_the_host, engine):
    base = os.environ.get("SAMEBITS_TEST_OTHER_BASE")
    if base is None:
        pytest.skip("SAMEBITS_TEST_OTHER_BASE names no base")
    made = clone("other")
    name = build(made, "gpu", base)
    made("dvc", "repro", SAMEBITS_RUNTIME="container", SAMEBITS_IMAGE=name)
    here, there = read(made.folder, "host.json"), read(on_the_host.folder, "host.json")
    assert here["python"] != there["python"]
    assert here["libc"] != there["libc"]
    assert made.exact() == on_the_host.exact()


def test_by_default_the_image_is_used_where_it_is_there(image, clone):
    made = clone("auto")
    assert "on the host" not in made.run("python", "pipeline/host.py").stderr
    assert read(made.folder, "host.json")["image"] == image
    made.append("requirements.cpu.lock", "# other\n")
    said = made.run("python", "pipeline/host.py").stderr
    assert "on the host, not in the image: no image samebits:cpu-" in said
    assert "`samebits container build` makes it" in said
    assert read(made.folder, "host.json")["in_container"] is False


def test_exit_codes_and_errors_come_out(image, clone):
    made = clone("codes", epochs=0)
    done = made.run("python", "pipeline/prepare.py", SAMEBITS_RUNTIME="container")
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    assert made.run("samebits", "container", "run", "sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_training_and_leaves_no_container(signum, code, image, clone, engine):
    made = clone("signal", epochs=5000)
    made("python", "pipeline/prepare.py", SAMEBITS_RUNTIME="container")
    command = ["python", "pipeline/train.py", "--strategy", "ddp", "--numerics", "exact"]
    process = subprocess.Popen(
        command, cwd=made.folder, env={**made.environ, "SAMEBITS_RUNTIME": "container"}, stderr=subprocess.PIPE
    )
    wait_until(lambda: list((made.folder / ".samebits/resume").glob("*/0*")))
    process.send_signal(signum)
    process.communicate(timeout=120)
    assert process.returncode == code
    assert containers(engine) == []
    made.samebits("track", "sync")
    query = (
        "import mlflow; c = mlflow.MlflowClient(); e = c.get_experiment_by_name('samebits').experiment_id; "
        "print(*[r.info.status for r in c.search_runs([e])])"
    )
    uri = f"sqlite:///{made.folder}/mlflow.db"
    found = wait_until(
        lambda: made("python", "-W", "ignore", "-c", query, MLFLOW_TRACKING_URI=uri).split() == ["KILLED"]
    )
    assert found


def test_a_runner_that_is_killed_leaves_what_the_next_one_removes(image, clone, engine):
    made = clone("killed")
    process = subprocess.Popen(
        ["samebits", "container", "run", "sleep", "600"], cwd=made.folder, env=made.environ, stderr=subprocess.PIPE
    )
    wait_until(lambda: [c for c in containers(engine) if c.status == "running"])
    process.kill()
    process.communicate()
    assert len(containers(engine)) == 1
    made.samebits("container", "run", "true")
    assert containers(engine) == []


# -- the rest of the command -----------------------------------------------------------------------------------


def test_an_image_is_kept_as_a_file_and_comes_back(image, clone, engine, tmp_path):
    made = clone("archive")
    small = engine.images.get(os.environ.get("SAMEBITS_TEST_BASE") or image)
    small.tag("samebits", "kept")
    file = tmp_path / "kept.tar"
    code = (
        "import sys, docker; from pathlib import Path; from samebits.container.archive import save_image; "
        "save_image(docker.from_env(timeout=600).images.get('samebits:kept'), 'samebits:kept', Path(sys.argv[1]))"
    )
    made(sys.executable, "-c", code, str(file))
    engine.images.remove("samebits:kept")
    assert made.samebits("container", "load", str(file)).strip() == "samebits:kept"
    assert engine.images.get("samebits:kept").id == small.id == read(tmp_path, "kept.tar.json")["id"]
    with file.open("ab") as stream:
        stream.write(b"more")
    refused = made.run("samebits", "container", "load", str(file))
    assert (refused.returncode, "it is not whole" in refused.stderr) == (2, True)
    engine.images.remove("samebits:kept")


def test_the_doctor_looks_inside(image, clone):
    made = clone("doctor")
    done = made.run("samebits", "doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["container"]["text"].startswith("Docker ")
    assert found["image"]["text"].startswith(image)
    assert found["inside: mlflow"]["status"] == "ok"
    assert found["owner"]["status"] == "ok"


# -- PostgreSQL ------------------------------------------------------------------------------------------------


def test_mlflow_keeps_its_runs_in_postgresql(image, clone, engine):
    name = os.environ.get("SAMEBITS_TEST_POSTGRES")
    made = clone("postgres")
    (made.folder / "secrets").mkdir()
    (made.folder / "secrets/postgres_password").write_text("a-word")
    made.give_to(UID)
    project = Compose(made, CPU, "docker-compose.postgres.yml", **({"POSTGRES_IMAGE": name} if name else {}))
    try:
        project("up", "--detach", "--no-build", "--wait", "mlflow")
        run = ask(project.port, "runs/create", {"experiment_id": "0"})["run"]["info"]["run_id"]
        counted = project("exec", "-T", "postgres", "psql", "-U", "mlflow", "-d", "mlflow", "-Atc",
                          f"select count(*) from runs where run_uuid = '{run}'")  # fmt: skip
        assert counted.strip() == "1"
        server = engine.containers.get(project.id_of("mlflow"))
        assert "a-word" not in str(server.attrs)
    finally:
        project.down()
