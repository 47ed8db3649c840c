"""A server that is not to be trusted with more than the runs it is sent."""

import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from tracking_fixtures import (  # noqa: F401 - two fixtures
    Server,
    finish,
    make_migrated_store,
    make_repository,
    recorded_from_files,
    setup,
    start,
    write_files,
)

from conftest import wait_for
from patience import patient
from samebits.doctor.store import ask
from samebits.errors import HostError, UserError
from samebits.records.run import FILES
from samebits.tracking import download, limits
from samebits.tracking.delivery import Delivery, sync
from samebits.tracking.download import find_run_files
from samebits.tracking.limits import require_own_place
from samebits.tracking.store import answers, connect, errors_of_the_store, tracking_uri
from standins import Handler, serving

RUN = "0" * 32
JSON = {"Content_Type": "application/json"}
SERVER = "https://me:secret@mlflow.example:5000/base"


@pytest.mark.parametrize(
    "uri",
    ["mlflow-artifacts:/1/2/artifacts", "mlflow-artifacts://mlflow.example:5000/1", "s3://bucket/1", "gs://bucket/1",
     "wasbs://box@account.blob.core.windows.net/1", "abfss://box@account.dfs.core.windows.net/1"],
)  # fmt: skip
def test_artifact_places_of_the_server_itself_and_object_stores_are_accepted(uri):
    require_own_place(uri, SERVER)


@pytest.mark.parametrize(
    "uri",
    ["mlflow-artifacts://other.example/1", "mlflow-artifacts://mlflow.example/1", "file:///home/me/.ssh", "/home/me",
     "home", "http://mlflow.example:5000/1", "https://mlflow.example:5000/1", "ftp://mlflow.example/1", "sftp://h/1",
     "hdfs://h/1", "dbfs:/1", "models:/1", "r2://bucket@evil.example/1", "b2://bucket@evil.example/1",
     "MLFLOW-ARTIFACTS://other.example/1", "FILE:///home/me", "abfss://box@account.evil.example/1",
     "abfss://box@account.dfs.core.windows.net.evil.example/1", "abfss://box@account.dfs.core.windows.net:1/1"],
)  # fmt: skip
@pytest.mark.attack("a malicious server")
def test_other_artifact_places_are_refused_without_showing_a_password(uri):
    with pytest.raises(UserError, match="MLflow's server keeps the files at"):
        require_own_place(uri, SERVER)
    require_own_place(uri, "sqlite:////home/me/mlflow.db")  # which this user's own processes write


class Seen(Handler):
    def handle_one_request(self):
        self.server.seen.append(self.rfile.read1())


@pytest.fixture
def listener():
    """Another host than the server's; the logins that it was sent."""
    with serving(Seen, seen=[]) as server:
        yield server


@pytest.fixture(scope="module")
def real_server(migrated_store, tmp_path_factory):
    """An MLflow server."""
    server = Server(tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("store") / "mlflow.db")
    shutil.copy(migrated_store, server.store)
    server.start()
    try:
        wait_for(lambda: answers(server.uri), seconds=600)
        yield server
    finally:
        server.kill()


@pytest.fixture
def says(repository, real_server, monkeypatch):
    """A real MLflow server whose experiment, a new one, says that its files are there."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{real_server.port}")

    def change(statement, *values):
        with sqlite3.connect(real_server.store) as database:
            database.execute(statement, values)

    def say(place):
        change("UPDATE experiments SET name = 'of a test before ' || experiment_id WHERE name = 'samebits'")
        connect(real_server.uri).create_experiment("samebits")
        change("UPDATE experiments SET artifact_location = ?", place)

    say.set_place = lambda place: change("UPDATE runs SET artifact_uri = ?", place)
    return say


def ended_log():
    log = start("one")
    setup(log)
    return finish(log)


@pytest.mark.parametrize(
    "place",
    [
        "file://{home}",
        *(
            pytest.param(f"{scheme}://127.0.0.1:{{port}}/x", marks=pytest.mark.slow)
            for scheme in ("mlflow-artifacts", "http")
        ),
    ],
)
@pytest.mark.attack("a malicious server")
def test_no_file_and_no_login_goes_where_the_server_points(place, says, listener, repository, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    says(place.format(home=home, port=listener.server_port))
    write_files(repository / "runs" / "ddp-fast", "one")
    path = ended_log()
    count, problems = sync()
    assert (count, listener.seen, list(home.rglob("*"))) == (0, [], [])
    assert "MLflow's server keeps the files at" in problems[path]
    run_id = Delivery(path).state.run_id
    assert connect(tracking_uri()).get_run(run_id).info.status == "FAILED"
    with pytest.raises(UserError, match="expected a place of its own or an object store"):
        find_run_files(run_id, repository / "scratch")
    assert listener.seen == []


def test_a_run_is_fetched_from_a_server(says, repository, tmp_path):
    """As ``says`` leaves it: with files where a server puts them by itself."""
    says("mlflow-artifacts:/1")
    run_id = recorded_from_files(repository / "run")
    assert find_run_files(run_id, tmp_path).record.run == "one"


@pytest.mark.parametrize("uri", ["runs:/{run}", "runs:/{run}/x"])
@pytest.mark.attack("a malicious server")
def test_a_run_with_files_at_another_run_is_refused(uri, says, repository, tmp_path):
    says("mlflow-artifacts:/1")
    client = connect(tracking_uri())
    run_id = client.create_run(client.get_experiment_by_name("samebits").experiment_id).info.run_id
    says.set_place(uri.format(run=run_id))
    with pytest.raises(UserError, match="MLflow's server keeps the files at runs:/"):
        find_run_files(run_id, tmp_path)


def write_for_ever(handler, piece, pause):
    with suppress(OSError):
        while not handler.server.ended.wait(pause):
            handler.wfile.write(piece)


@contextmanager
def until_the_end(handler, monkeypatch, **facts):
    """A server that MLflow's client takes for MLflow's, and whose answers last as long as the block."""
    with serving(handler, ended=threading.Event(), **facts) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        yield server
        server.ended.set()


class Slow(Handler):
    """Answers as MLflow does, by a byte now and then, or by more than it has said."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path.endswith("path=1"):
            listed = [{"path": name, "is_dir": False, "file_size": self.server.sizes.get(name, 10)} for name in FILES]
            return self.answer(json.dumps({"files": listed}).encode(), **JSON)
        if "runs/get" in self.path:
            info = {"run_id": RUN, "run_uuid": RUN, "experiment_id": "1", "user_id": "", "status": "FINISHED",
                    "start_time": 1, "end_time": 2, "artifact_uri": "mlflow-artifacts:/1",
                    "lifecycle_stage": "active"}  # fmt: skip
            return self.answer(json.dumps({"run": {"info": info, "data": {}}}).encode(), **JSON)
        if "path=" in self.path and self.server.sends != "answer":  # is it a folder?
            return self.answer(b'{"files": []}', **JSON)
        self.server.reached.set()
        if self.server.sends == "elsewhere":
            return self.begin(307, Location="http://127.0.0.1:9/x")
        self.begin(length=2**33)
        return write_for_ever(self, *((b"x", 0.05) if self.server.sends == "bytes" else (b"x" * 2**20, 0.0)))


@pytest.fixture
def slow(repository, monkeypatch):
    with until_the_end(Slow, monkeypatch, sizes={}, sends="bytes", reached=threading.Event()) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("model.safetensors", 10**14, "100000000000000 bytes, and at most"),
        ("model.safetensors", -1, "-1 bytes"),
        ("run.json", 2**26 + 1, "67108865 bytes, and at most 67108864 are fetched"),
        ("losses.csv", 2**26 + 1, "67108865 bytes, and at most 67108864 are fetched"),
    ],
)
@pytest.mark.attack("a malicious server")
def test_sizes_that_no_run_has_are_refused(name, size, message, slow, tmp_path):
    slow.sizes[name] = size
    with pytest.raises(HostError, match=f"lists {name} with {message}"):
        find_run_files(RUN, tmp_path)


def test_a_long_fetch_says_how_far_it_is(slow, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(download, "ANSWER_SECONDS", 5.0)
    monkeypatch.setattr(download, "_SAID_SECONDS", 0.5)
    with pytest.raises(HostError, match="has taken too long"):
        find_run_files(RUN, tmp_path)
    assert f"fetching run {RUN}: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("sends", "seconds", "message"),
    [
        ("bytes", 10.0, "MLflow has taken too long to send a run's files"),
        ("file", 3600.0, r"MLflow's server sends more than the \d+ bytes it has listed"),
        ("answer", 3600.0, "MLflow's server answers with more than 16 MiB"),
        ("elsewhere", 3600.0, r"MLflow's server at .* leads to http://127\.0\.0\.1:9/x"),
    ],
)
@pytest.mark.attack("a malicious server")
def test_a_server_that_never_stops_sending_is_given_up(sends, seconds, message, slow, tmp_path, monkeypatch):
    slow.sends = sends
    while not slow.reached.is_set():  # a busy host may import MLflow for longer than the first deadline
        monkeypatch.setattr(download, "ANSWER_SECONDS", seconds)
        with pytest.raises(HostError, match=message):
            find_run_files(RUN, tmp_path)
        seconds *= 4


@pytest.mark.attack("a malicious server")
def test_the_first_signal_ends_a_command_that_waits_for_a_server(slow):
    command = [sys.executable, "-P", "-c", "from samebits.cli import main; main()", "compare", RUN, RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert slow.reached.wait(patient(120))
        process.terminate()
        assert process.wait(patient(20)) == 143


class Hostile(Handler):
    """Answers every call of the API in one way."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.read_body()
        getattr(self, self.server.does)()

    do_GET = do_POST  # noqa: N815

    def body_by_bytes(self):
        self.begin(length=1000000)
        write_for_ever(self, b"x", 0.05)

    def header_by_bytes(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        write_for_ever(self, b"x", 0.05)

    def endless_body(self):
        self.begin(length=2**40)
        write_for_ever(self, b"x" * 2**20, 0.0)

    def packed_body(self):
        self.answer(gzip.compress(bytes(2**28)), Content_Encoding="gzip")

    def elsewhere(self):
        self.server.count = getattr(self.server, "count", 0) + 1
        self.begin(307, Location=self.server.elsewhere)

    def slowly_elsewhere(self):
        time.sleep(0.6)
        self.elsewhere()

    def escapes(self):
        text = json.dumps({"error_code": "INVALID_PARAMETER_VALUE", "message": "\x1b]0;mine\x07\nanother line"})
        self.answer(text.encode(), 400, **JSON)


@pytest.fixture
def hostile(repository, monkeypatch):
    monkeypatch.setattr(limits, "_hosts", set())  # of earlier tests, one of which may have had a listener's port
    with until_the_end(Hostile, monkeypatch) as server:
        yield server


@pytest.mark.parametrize(
    ("does", "seconds", "says"),
    [
        ("body_by_bytes", 1.0, "MLflow's server has not answered within 1 s"),
        ("header_by_bytes", 1.0, "MLflow's server has not answered within 1 s"),
        ("endless_body", 3600.0, "MLflow's server answers with more than 16 MiB"),
        ("packed_body", 3600.0, "MLflow's server answers with more than 16 MiB"),
        ("elsewhere", 3600.0, "leads to {elsewhere}"),
    ],
)
@pytest.mark.attack("a malicious server")
def test_a_log_is_not_delivered_to_a_hostile_server(does, seconds, says, hostile, listener, monkeypatch):
    hostile.does, hostile.elsewhere = does, f"{listener.url}/x"
    monkeypatch.setattr(limits, "ANSWER_SECONDS", seconds)
    path = ended_log()
    count, problems = sync()
    assert (count, listener.seen) == (0, [])
    assert says.format(elsewhere=hostile.elsewhere) in problems[path]


@pytest.mark.parametrize(
    ("elsewhere", "says"),
    [
        ("file:///etc/passwd", "MLflow's server at {here} leads to file:///etc/passwd"),
        ("http://[", "something else than MLflow answers at http://{here}"),
        ("", "something else than MLflow answers at http://{here}"),
    ],
)
@pytest.mark.attack("a malicious server")
def test_the_doctor_names_the_address_that_a_server_redirects_to(elsewhere, says, hostile):
    hostile.does, hostile.elsewhere = "elsewhere", elsewhere
    finding = ask(os.environ["MLFLOW_TRACKING_URI"])
    assert (finding.status, finding.text) == ("failed", says.format(here=f"127.0.0.1:{hostile.server_port}"))


@pytest.mark.attack("a malicious server")
def test_an_answer_may_lead_on_three_times(hostile):
    """Each may take its time."""
    hostile.does, hostile.elsewhere = "elsewhere", f"{hostile.url}/x"
    finding = ask(os.environ["MLFLOW_TRACKING_URI"])
    assert (finding.status, hostile.count <= 5) == ("failed", True)


@pytest.mark.attack("a malicious server")
def test_all_redirects_of_an_answer_have_the_time_of_one(hostile, monkeypatch):
    hostile.does, hostile.elsewhere = "slowly_elsewhere", f"{hostile.url}/x"
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 1.0)
    with pytest.raises(HostError, match="has not answered within 1 s"), errors_of_the_store():
        connect(tracking_uri()).search_experiments()


@pytest.mark.attack("another user of the host")
def test_where_a_server_leads_is_said_without_a_token(hostile, monkeypatch):
    hostile.does, hostile.elsewhere = "elsewhere", "http://S3CRET@elsewhere.example/x"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://S3CRETTOKEN@127.0.0.1:{hostile.server_port}")
    said = f"at 127.0.0.1:{hostile.server_port} leads to http://elsewhere.example/x"
    with pytest.raises(HostError, match=said), errors_of_the_store():
        connect(tracking_uri()).search_experiments()


def test_the_case_of_a_host_and_its_usual_port_do_not_matter(monkeypatch):
    monkeypatch.setattr(limits, "_hosts", set())
    limits.allow_host("HTTPS://MLflow.Example/base")
    limits._require_known_host("https://me@mlflow.example:443/api")
    for url in ("https://mlflow.example:444/api", "http://mlflow.example/api", "https://other.example/api"):
        with pytest.raises(HostError, match="MLflow's server sends a request to"):
            limits._require_known_host(url)


@pytest.mark.attack("a malicious server")
def test_no_server_chooses_addresses_for_parts_of_a_file(hostile):
    """Presigned transfers would go to any host, with any headers and the login that ~/.netrc has for it."""
    from mlflow.environment_variables import (
        MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD,
        MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD,
    )
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

    connect(os.environ["MLFLOW_TRACKING_URI"])
    assert (MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD.get(), MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD.get()) == (False, False)
    for name in ("_multipart_download", "_upload_part"):
        with pytest.raises(HostError, match="to addresses of its choice"):
            getattr(HttpArtifactRepository, name)(None)


@pytest.mark.attack("a malicious server")
def test_a_request_goes_to_no_host_but_the_stores(hostile, listener):
    from mlflow.utils.request_utils import cloud_storage_http_request

    connect(os.environ["MLFLOW_TRACKING_URI"])
    with pytest.raises(HostError, match=r"MLflow's server sends a request to 127\.0\.0\.1:\d+"):
        cloud_storage_http_request("get", f"{listener.url}/x")
    assert listener.seen == []


@pytest.mark.attack("a malicious server")
def test_a_servers_message_is_printed_as_one_line(hostile):
    hostile.does = "escapes"
    path = ended_log()
    _, problems = sync()
    assert problems[path].isprintable()
    assert "mine" in problems[path]


def test_a_run_of_another_server_waits_for_that_servers_login(repository, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    path = finish(start("one"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:2")
    Delivery(path).aim("http://me:***@127.0.0.1:1")
    with pytest.raises(
        HostError, match=r"the login for http://me:\*\*\*@127.0.0.1:1 is not in MLFLOW_TRACKING_URI here"
    ):
        _ = Delivery(path).client


@pytest.mark.attack("a malicious server")
def test_another_server_gets_no_login_of_the_variables(listener, repository, monkeypatch):
    """A run that a server has in part goes on there, also when the user's server is another one by now."""
    path = finish(start("one"))
    Delivery(path).aim(f"http://127.0.0.1:{listener.server_port}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:2")
    login = {"MLFLOW_TRACKING_USERNAME": "bob", "MLFLOW_TRACKING_PASSWORD": "secret", "MLFLOW_TRACKING_TOKEN": "token"}
    for name, value in login.items():
        monkeypatch.setenv(name, value)
    client = Delivery(path).client
    with pytest.raises(Exception, match="failed with exception"):
        client.search_experiments()
    assert listener.seen
    assert b"uthorization" not in b"".join(listener.seen)
    connect(tracking_uri())
    assert {name: os.environ[name] for name in login} == login


def test_a_package_that_a_store_needs_is_named(says, repository, tmp_path):
    says("s3://bucket/1")
    client = connect(tracking_uri())
    run_id = client.create_run(client.get_experiment_by_name("samebits").experiment_id).info.run_id
    with pytest.raises(HostError, match="MLflow's store cannot be used: No module named 'boto"):
        find_run_files(run_id, tmp_path)


def test_a_damaged_artifact_is_named_by_its_run(says, repository, tmp_path):
    says("mlflow-artifacts:/1")
    run_id = recorded_from_files(repository / "run")
    connect(tracking_uri()).log_text(run_id, "{", "run.json")
    with pytest.raises(UserError, match=f"^run {run_id}: run.json: cannot be read") as caught:
        find_run_files(run_id, tmp_path)
    assert str(tmp_path) not in str(caught.value)
