"""``samebits ui`` on a host with other users: a real server, asked by them and for files that are not its own."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from tracking_fixtures import make_migrated_store  # noqa: F401 - a fixture

from conftest import ROOT, wait_for
from ports import free_port
from samebits.tracking.guarded import OWN_HEADER, OwnPeers, owner_of
from samebits.tracking.ui import announce
from standins import Handler, raising, serving

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="another user's processes take root to start")


@contextmanager
def connection():
    """An accepted connection on loopback: its two ends' addresses, and the peer's socket."""
    with socket.socket() as listener, socket.socket() as peer:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peer.connect(listener.getsockname())
        accepted, client = listener.accept()
        with accepted:
            yield client, accepted.getsockname(), peer


@pytest.mark.attack("another user of the host")
def test_the_owner_of_an_open_connection_is_known():
    with connection() as (client, server, peer):
        assert owner_of(client, server) == os.getuid()
        for another in ((client[0], client[1] ^ 1), ("::1", 1), None):
            assert owner_of(another, server) is None
        peer.close()
        wait_for(lambda: owner_of(client, server) is None, seconds=60)


@pytest.mark.attack("another user of the host")
def test_a_websocket_of_an_unknown_user_is_closed():
    async def send(message):
        said.append(message)

    said, scope = [], {"type": "websocket", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    asyncio.run(OwnPeers(raising(AssertionError("it was let in")), "own")(scope, None, send))
    assert said == [{"type": "websocket.close", "code": 1008}]


@pytest.fixture(scope="module")
def repository(migrated_store, tmp_path_factory):
    """A folder with an empty store."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "params.yaml").touch()
    shutil.copy(migrated_store, folder)
    return folder


@pytest.fixture(scope="module")
def server(repository):
    """The address of ``samebits ui`` over a store of its own, in a folder that has files with libraries' names."""
    for name in ("queue", "sqlalchemy", "flask", "mlflow", "uvicorn"):
        (repository / f"{name}.py").write_text("raise SystemExit('mine')\n")
    port, said = free_port(), repository / "ui.log"
    command = [str(ROOT / ".venv/bin/samebits"), "ui", "--port", str(port)]
    environ = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    with said.open("wb") as output:
        options = {"cwd": repository, "env": environ, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        wait_for(lambda: b"Ready: " in said.read_bytes() or process.poll() is not None, seconds=600)
        assert process.poll() is None, said.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def ask(root, path, value=None):
    """What the server answers to this process."""
    data = None if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
    request = urllib.request.Request(root + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


ASKS = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"X-Forwarded-For": "127.0.0.1", "Host": "localhost"})
try:
    print(urllib.request.urlopen(request, timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def code_for_another(address):
    """What the server answers to a process of another user."""
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*user, sys.executable, "-I", "-c", ASKS, address]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


@needs_root
@pytest.mark.attack("another user of the host")
def test_other_users_are_refused_and_no_file_outside_the_store_is_read_or_written(server, repository):
    api, secret = "/api/2.0/mlflow", repository.parent / f"{repository.name}-home"
    secret.mkdir(mode=0o700)
    (secret / "key").write_text("secret")
    for path in ("/", "/health", f"{api}/experiments/search?max_results=1", "/get-artifact?path=key&run_uuid=0"):
        assert code_for_another(server + path) == "403"
    assert ask(server, "/health") == b"OK"

    link = repository.parent / f"{repository.name}-link"
    link.symlink_to(secret)
    made = 0
    for place in (secret.as_uri(), link.as_uri(), str(secret), f"{repository.as_uri()}/../{secret.name}"):
        try:
            answer = ask(server, f"{api}/experiments/create", {"name": place, "artifact_location": place})
        except urllib.error.HTTPError:
            continue  # MLflow itself refuses it
        made += 1
        experiment = json.loads(answer)["experiment_id"]
        run = json.loads(ask(server, f"{api}/runs/create", {"experiment_id": experiment}))["run"]["info"]
        (secret / run["run_id"] / "artifacts").mkdir(parents=True)
        (secret / run["run_id"] / "artifacts/key").write_text("secret")
        for path, value in (
            (f"/get-artifact?path=key&run_uuid={run['run_id']}", None),
            (f"{api}/artifacts/list?run_id={run['run_id']}", None),
            (f"/ajax-api/2.0/mlflow/upload-artifact?path=authorized_keys&run_uuid={run['run_id']}", b"mine"),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(server, path, value)
            assert b"secret" not in caught.value.read()
            assert caught.value.code in (400, 403)
    assert made > 1
    assert not list(secret.rglob("authorized_keys"))


def test_the_runs_of_the_store_are_served(server, repository):
    api = "/api/2.0/mlflow"
    place = (repository / "mlartifacts").as_uri()
    experiment = json.loads(ask(server, f"{api}/experiments/create", {"name": "own", "artifact_location": place}))
    run = json.loads(ask(server, f"{api}/runs/create", experiment))["run"]["info"]["run_id"]
    ask(server, f"/ajax-api/2.0/mlflow/upload-artifact?path=note.txt&run_uuid={run}", b"text")
    assert ask(server, f"/get-artifact?path=note.txt&run_uuid={run}") == b"text"
    assert list((repository / "mlartifacts").rglob("note.txt"))


EVIL = "http://evil.example"
ANOTHER_PORT = "http://localhost:9999"
MAKES = b'{"name": "of a page"}'
SEARCH, CREATE = "/api/2.0/mlflow/experiments/search?max_results=9", "/api/2.0/mlflow/experiments/create"
JSON, PLAIN = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}
_PAGES = {  # what a page that the user looks at has the browser send: path, headers, body
    "reads by a name of its own that leads to this host": ("/", {"Host": "evil.example"}, None),
    "reads the API by such a name": (SEARCH, {"Host": "evil.example:5000", "Origin": f"{EVIL}:5000"}, None),
    "reads by a name like an address of a private network": (SEARCH, {"Host": "10.evil.example"}, None),
    "reads by another such name": (SEARCH, {"Host": "192.168.0.evil.example:5000"}, None),
    "reads by a name that is no name": (SEARCH, {"Host": "[x].evil.example"}, None),
    "reads by an address of this host in its network": (SEARCH, {"Host": "192.168.0.1"}, None),
    "writes with JSON": (CREATE, {"Origin": EVIL, **JSON}, MAKES),
    "writes with what needs no question before": (CREATE, {"Origin": EVIL, **PLAIN}, MAKES),
    "writes from a frame without an origin": (CREATE, {"Origin": "null", **PLAIN}, MAKES),
    "writes with JSON from another port of this host": (CREATE, {"Origin": ANOTHER_PORT, **JSON}, MAKES),
    "writes a file": ("/ajax-api/2.0/mlflow/upload-artifact?path=x&run_uuid=0", {"Origin": EVIL}, b"x"),
}


def answer_to(server, path, headers, body=None, method=None):
    """The code and the headers of what the server answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(server + path, body, headers, method=method)) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers


@pytest.mark.parametrize("how", _PAGES)
@pytest.mark.attack("a web page in the user's browser")
def test_requests_of_another_sites_page_are_refused(how, server):
    path, headers, body = _PAGES[how]
    assert answer_to(server, path, headers, body)[0] == 403
    assert b"of a page" not in ask(server, SEARCH)


_GRAPHQL = b'{"query": "{mlflowGetExperiment(input: {experimentId: \\"0\\"}) {experiment {name}}}"}'


@pytest.mark.parametrize("origin", [EVIL, ANOTHER_PORT])
@pytest.mark.parametrize(("path", "body"), [(SEARCH, None), ("/", None), ("/graphql", _GRAPHQL)])
@pytest.mark.attack("a web page in the user's browser")
def test_a_page_of_another_origin_reads_nothing(path, body, origin, server):
    code, headers = answer_to(server, path, {"Origin": origin, **JSON}, body)
    assert (code, headers.get("Access-Control-Allow-Origin")) == (403, None)


def test_no_other_site_can_frame_a_page(server):
    code, headers = answer_to(server, "/", {})
    assert (code, headers["X-Frame-Options"]) == (200, "SAMEORIGIN")


@pytest.mark.parametrize("origin", [EVIL, ANOTHER_PORT])
@pytest.mark.attack("a web page in the user's browser")
def test_a_preflight_of_another_origin_allows_no_write(origin, server):
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    _, headers = answer_to(server, CREATE, asks, method="OPTIONS")
    assert headers.get("Access-Control-Allow-Origin") is None


def test_the_servers_own_pages_can_write(server):
    """By whatever name and port it is reached: through a tunnel, the host's own differ."""
    own = {"Host": "localhost:6000", "Origin": "http://localhost:6000", **JSON}
    assert answer_to(server, CREATE, own, b'{"name": "through a tunnel"}')[0] == 200


@pytest.mark.attack("another user of the host")
def test_another_server_on_the_port_is_not_announced(monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which nobody answers
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    values = iter([None, "of another", "own"])

    class Answer(Handler):
        def do_GET(self):
            value = next(values)
            self.begin(**({OWN_HEADER: value} if value else {}))

    with serving(Answer) as other:
        announce(other.server_port, os.getppid(), "own")
    assert next(values, "none left") == "none left"
    assert capsys.readouterr().err.count(f"Ready: {other.url}/") == 1
