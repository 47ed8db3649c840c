"""A server that is not to be trusted with more than the runs it is sent."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tracking_fixtures import (  # noqa: F401 - two fixtures
    finish,
    make_migrated_store,
    make_repository,
    result,
    setup,
    start,
    write_files,
)

from conftest import wait_for
from ports import free_port
from samebits.errors import UserError
from samebits.tracking.artifacts import require_own_place
from samebits.tracking.delivery import Delivery, sync
from samebits.tracking.store import answers, connect, find_run_files, tracking_uri

SERVER = "https://me:secret@mlflow.example:5000/base"


@pytest.mark.parametrize(
    "uri",
    ["mlflow-artifacts:/1/2/artifacts", "mlflow-artifacts://mlflow.example:5000/1", "s3://bucket/1", "gs://bucket/1",
     "wasbs://box@account.blob.core.windows.net/1", "abfss://box@account.dfs.core.windows.net/1"],
)  # fmt: skip
def test_places_of_the_servers_own_and_object_stores_are_taken(uri):
    require_own_place(uri, SERVER)


@pytest.mark.parametrize(
    "uri",
    ["mlflow-artifacts://other.example/1", "mlflow-artifacts://mlflow.example/1", "file:///home/me/.ssh", "/home/me",
     "home", "http://mlflow.example:5000/1", "https://mlflow.example:5000/1", "ftp://mlflow.example/1", "sftp://h/1",
     "hdfs://h/1", "dbfs:/1", "runs:/1/2", "models:/1", "r2://bucket@evil.example/1", "b2://bucket@evil.example/1",
     "MLFLOW-ARTIFACTS://other.example/1", "FILE:///home/me"],
)  # fmt: skip
def test_other_places_are_refused_and_told_without_a_password(uri):
    with pytest.raises(UserError, match="MLflow's server keeps the files at"):
        require_own_place(uri, SERVER)
    require_own_place(uri, "sqlite:////home/me/mlflow.db")  # which this user's own processes write


class Seen(BaseHTTPRequestHandler):
    def handle_one_request(self):
        self.server.seen.append(self.rfile.read1())


@pytest.fixture
def listener():
    """Another host than the server's; the logins that it was sent."""
    server = HTTPServer(("127.0.0.1", 0), Seen)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def says(repository, migrated_store, tmp_path_factory, monkeypatch):
    """A real MLflow server whose experiments say that their files are there."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    shutil.copy(migrated_store, folder)
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
               "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]  # fmt: skip
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, start_new_session=True, env=environ
        )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{port}")
    wait_for(lambda: answers(uri), seconds=600)

    def say(place):
        connect(uri).create_experiment("samebits")
        with sqlite3.connect(folder / "mlflow.db") as database:
            database.execute("UPDATE experiments SET artifact_location = ?", [place])

    yield say
    os.killpg(process.pid, 15)
    process.wait()


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
def test_no_file_and_no_login_goes_where_a_server_says(place, says, listener, repository, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    says(place.format(home=home, port=listener.server_port))
    write_files(repository / "runs" / "ddp-fast", "one")
    log = start("one")
    setup(log)
    path = finish(log)
    count, problems = sync()
    assert (count, listener.seen, list(home.rglob("*"))) == (0, [], [])
    assert "MLflow's server keeps the files at" in problems[path]
    run_id = Delivery(path).state.run_id
    assert connect(tracking_uri()).get_run(run_id).info.status == "FAILED"
    with pytest.raises(UserError, match="expected a place of its own or an object store"):
        find_run_files(run_id, repository / "scratch")
    assert listener.seen == []
