"""Answers and failures of an engine. The SDK talks to a socket that answers as one does."""

import gc
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
from click.testing import CliRunner
from docker.context.config import get_context_id
from docker.models.images import Image

from samebits.cli.commands import main
from samebits.doctor.containers import containers, image
from samebits.engines.container import _Relay, output, run_at_terminal
from samebits.engines.docker import connect, find_image, gpu_request, traits
from samebits.engines.docker_run import ContainerCommand
from samebits.engines.image import build_image, image_name, load_image, save_image
from samebits.engines.stage import enter
from samebits.errors import HostError, UserError
from samebits.host.variables import IMAGE, RUNTIME

HANGS_UP = None
ANSWERS = {
    "GET /_ping": [(200, "OK")],
    "GET /version": [(200, {"Version": "28.1.0", "ApiVersion": "1.44"})],
    "GET /info": [(200, {"DockerRootDir": "/not/there", "Runtimes": {"nvidia": {}}})],
    "GET /containers/json": [(200, [])],
    "GET /containers/one/json": [(200, {"Id": "one", "Config": {"Tty": False}})],
    "POST /containers/create": [(201, {"Id": "one"})],
    "POST /containers/one/start": [(204, b"")],
    "POST /containers/one/wait": [(200, {"StatusCode": 7})],
    "DELETE /containers/one": [(200, "")],
}


class Request(BaseHTTPRequestHandler):
    """Gives the answers for a request one after the other, and then the last one again and again."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0].removeprefix("/v1.44")
        known = self.server.answers[f"{self.command} {path}"]
        answer = known.pop(0) if known[1:] else known[0]
        self.server.asked.append(self.requestline.split()[1].removeprefix("/v1.44"))
        if answer is HANGS_UP:
            return
        status, body = answer
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if path == "/containers/one/start":
            self.server.started.set()
        elif path == "/containers/one/attach":  # there is nothing to read before
            self.server.started.wait(60)
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that http.server looks for

    def log_message(self, *_):
        pass


class Engine(ThreadingUnixStreamServer):
    """A client that has gone is no error of the engine's, which prints them."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def engine():
    """Start a server with these answers; gives DOCKER_HOST and the list of its requests."""
    folder = tempfile.TemporaryDirectory()  # a socket's path has 107 bytes at most, and pytest's own may be longer
    socket = f"{folder.name}/docker.sock"
    server = Engine(socket, Request)
    server.asked, server.started = [], threading.Event()

    def start(**answers):
        server.answers = {name: list(known) for name, known in {**ANSWERS, **answers}.items()}
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        return {"DOCKER_HOST": f"unix://{socket}"}, server.asked

    with folder, server:
        yield start
        server.shutdown()


def output_of_true(client, gpus=0):
    """Run a short command in a container."""
    image = SimpleNamespace(id="sha256:0", tags=["samebits:x"], labels={}, attrs={})
    command = ContainerCommand(
        argv=["true"], cwd=Path(), mounts=[Path()], tracking_uri="http://mlflow:5000", gpus=gpus, environ={}
    )
    return output(client, image, command)


KIT = {
    "Id": "sha256:0123456789abcdef", "RepoTags": ["kit:1"],
    "Config": {"Labels": {"org.opencontainers.image.base.name": "base"}}, "RootFS": {"Layers": ["sha256:2"]},
}  # fmt: skip
THERE, GONE = (200, KIT), (404, {"message": "No such image"})


@pytest.fixture
def container(engine, tmp_path, monkeypatch):
    """Start an engine with these answers; gives ``samebits container``, for the image kit:1, and the requests."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").touch()

    def start(**answers):
        environ, asked = engine(**answers)
        return lambda *given: CliRunner().invoke(main, ["container", *given], env={**environ, IMAGE: "kit:1"}), asked

    return start


def test_an_image_that_was_saved_is_loaded_if_it_is_the_same(container, tmp_path):
    other = (200, {**KIT, "RootFS": {"Layers": ["sha256:3"]}})
    call, _ = container(
        **{"GET /images/kit:1/json": [GONE, THERE, THERE, other], "GET /images/kit:1/get": [(200, b"an archive")],
           "POST /images/load": [(200, {"stream": "Loaded image: kit:1\n"})]}
    )  # fmt: skip
    assert call("save", "kit.tar").stderr.startswith("error: no image kit:1, which SAMEBITS_IMAGE names. hint: load or")
    assert call("save", "kit.tar").stdout == "kit.tar\nkit.tar.json\n"
    assert (tmp_path / "kit.tar").read_bytes() == b"an archive"
    assert call("load", "kit.tar").stdout == "kit:1\n"
    assert call("load", "kit.tar").stderr.startswith("error: kit.tar: holds another image than kit:1. hint: copy both")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the SDK leaves a build's context open
def test_an_image_is_built_from_the_locks_of_the_folder_once(container, tmp_path):
    for file in ("Dockerfile", "requirements.uv.lock", "requirements.cpu.lock"):
        (tmp_path / file).touch()
    name = image_name("cpu", tmp_path)
    steps = [(200, {"stream": "Step 1/9\n"}), (200, {"error": "no wheel\n"})]
    call, asked = container(**{f"GET /images/{name}/json": [GONE, THERE], "POST /build": steps})
    done = call("build", "--base", "mine", "--torch-backend", "cu130")
    assert (done.stdout, done.stderr) == (f"{name}\n", "Step 1/9\n")
    (asked_for,) = [json.loads(parse_qs(line)["buildargs"][0]) for line in asked if line.startswith("/build?")]
    assert asked_for.items() >= {"LOCK": "cpu", "BASE_IMAGE": "mine", "TORCH_BACKEND": "cu130"}.items()
    assert call("build").stderr == "it is there already; --rebuild makes another\n"
    assert call("build", "--rebuild").stderr.startswith("error: the image could not be built: no wheel. hint: see the")
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the SDK leaves the stream's socket open
def test_a_stage_runs_in_the_image_and_ends_as_it_does(engine, tmp_path, monkeypatch, capfdbinary):
    monkeypatch.chdir(tmp_path)
    parts = ((1, b"one\n"), (2, b"two\n"), (1, b"three\n"))  # the engine names the stream and the length of each
    said = b"".join(bytes([stream, 0, 0, 0, 0, 0, 0, len(text)]) + text for stream, text in parts)
    environ, asked = engine(**{"GET /images/kit:1/json": [THERE], "POST /containers/one/attach": [(200, said)]})
    with pytest.raises(SystemExit) as ended:
        enter(["pipeline/host.py"], {**environ, IMAGE: "kit:1"})
    assert (ended.value.code, asked[-1].partition("?")[0]) == (7, "/containers/one")
    assert capfdbinary.readouterr() == (b"one\nthree\n", b"in the image kit:1\ntwo\n")
    gc.collect()


def test_the_doctor_names_the_image():
    (gone,), (there,) = image(None, "kit:1"), image(Image(KIT), "kit:1")
    assert (gone.status, gone.text) == ("warning", "no kit:1 for these locks, so stages run on the host")
    assert there.text == "kit:1, 0123456789ab on base, a base without a digest"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((500, {"message": "mkdir /var/lib/docker/x: no space left on device."}), "no space left on device"),
        (HANGS_UP, "Remote end closed connection without response"),
    ],
)
def test_a_container_that_the_engine_does_not_make_is_told(answer, why, engine):
    environ, _ = engine(**{"POST /containers/create": [answer]})
    with closing(connect(environ)) as client, pytest.raises(HostError) as caught:
        output_of_true(client)
    assert caught.value.message.startswith("no container could be made: ")
    assert why in caught.value.message
    assert caught.value.hint == "see `docker info`"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the SDK leaves a build's context open
@pytest.mark.parametrize("answer", [(500, {"message": "it is ending"}), HANGS_UP])
@pytest.mark.parametrize(
    ("request_line", "ask"),
    [
        ("GET /info", traits),
        ("GET /info", gpu_request),
        ("GET /containers/json", output_of_true),
        ("GET /images/samebits:x/json", lambda client: find_image(client, "samebits:x")),
        ("POST /build", lambda client: build_image(client, "samebits:x", "cpu", base=None, torch_backend=None)),
        ("GET /images/samebits:x/get", lambda client: save_image(Image(TAGGED, client=client), "samebits:x", FILE)),
    ],
)
def test_an_engine_that_fails_is_the_hosts_fault(request_line, ask, answer, engine, tmp_path, monkeypatch):
    """The error is no traceback, and blames no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Dockerfile").touch()
    environ, _ = engine(**{request_line: [answer]})
    with closing(connect(environ)) as client, pytest.raises(HostError) as caught:
        ask(client)
    assert re.search("it is ending|Remote end closed connection", caught.value.message)
    assert list(tmp_path.iterdir()) == [tmp_path / "Dockerfile"]
    del caught
    gc.collect()


TAGGED, FILE = {"Id": "sha256:0", "RepoTags": ["samebits:x"]}, Path("image.tar")
NO_SPACE = {"message": "write /x: no space left on device"}


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((500, NO_SPACE), HostError, "has no space left for it. hint: see `docker system df`"),
        ((200, {"errorDetail": NO_SPACE}), HostError, "has no space left for it. hint: see `docker system df`"),
        (
            (200, {"errorDetail": {"message": "bad tar\nmore"}}),
            UserError,
            "takes no image from it: bad tar. hint: name",
        ),
    ],
)
def test_an_engine_that_takes_no_image_says_whose_fault_it_is(answer, kind, said, engine, tmp_path):
    file = tmp_path / "kit.tar"
    file.write_bytes(b"an archive")
    record = {"name": "kit", "id": "sha256:1", "digest": None, "base": None, "layers": ["sha256:2"]}
    record["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "kit.tar.json").write_text(json.dumps(record))
    environ, _ = engine(**{"POST /images/load": [answer]})
    with closing(connect(environ)) as client, pytest.raises(kind) as caught:
        load_image(client, file)
    assert str(caught.value).startswith(f"{file}: the engine {said}")


def test_what_can_be_no_images_name_is_the_users_fault(engine):
    environ, _ = engine(**{"GET /images/Kit:/json": [(400, {"message": "invalid reference format"})]})
    with closing(connect(environ)) as client, pytest.raises(UserError) as caught:
        find_image(client, "Kit:")
    assert caught.value.message == "Kit:: invalid reference format"
    assert caught.value.hint == "name an image as registry/name:tag, or unset SAMEBITS_IMAGE"


@pytest.mark.parametrize(
    ("terminal", "kind", "message"),
    [
        (False, UserError, "a shell needs a terminal. hint: `samebits container run COMMAND` does without"),
        (True, HostError, "the docker command is not installed. hint: install it, or use `samebits container run`"),
    ],
)
def test_a_shell_that_cannot_be_is_told_before_a_container_is_made(terminal, kind, message, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: terminal))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(kind) as caught:
        run_at_terminal(None, None, None)
    assert str(caught.value) == message


@pytest.mark.parametrize(("gpus", "looked_at"), [(0, "engine"), (2, "toolkit")])
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((500, {"message": 'could not select device driver "" with capabilities: [[gpu]]'}), "could not select device"),
        (HANGS_UP, "Remote end closed connection without response"),
    ],
)
def test_a_container_that_does_not_start_is_told_and_removed(answer, why, gpus, looked_at, engine):
    environ, asked = engine(**{"POST /containers/one/start": [answer]})
    with closing(connect(environ)) as client, pytest.raises(HostError) as caught:
        output_of_true(client, gpus)
    assert caught.value.message.startswith("the container could not be run: ")
    assert why in caught.value.message
    assert caught.value.hint == f"`samebits doctor` looks at the {looked_at}"
    assert asked[-1].startswith("/containers/one?")


@pytest.mark.parametrize("refusal", [(409, {"message": "container one is not running"}), HANGS_UP])
def test_a_signal_that_comes_before_the_command_is_sent_once_it_runs(refusal, engine):
    environ, asked = engine(**{"POST /containers/one/kill": [refusal, (200, "")]})
    with closing(connect(environ)) as client, _Relay(client.containers.get("one")) as relay:
        del asked[:]
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["/containers/one/kill?signal=15"]
        relay.start()  # as after the start of the container
        relay.start()
        os.kill(os.getpid(), signal.SIGTERM)  # whoever asks again does not want to wait
    assert asked == [f"/containers/one/kill?signal={number}" for number in (15, 15, 9)]


def test_the_doctor_goes_on_where_the_engines_disk_and_the_locks_are_not_to_be_seen(engine, tmp_path, monkeypatch):
    """The engine's disk may be that of a virtual machine, and the folder may have no Dockerfile."""
    environ, _ = engine()
    monkeypatch.chdir(tmp_path)
    found = {finding.name: (finding.status, finding.text) for finding in containers(0, environ)}
    assert found == {
        "container": ("ok", "Docker 28.1.0"),
        "container disk": ("skipped", "/not/there cannot be looked at: No such file or directory"),
        "toolkit": ("skipped", "no GPU"),
        "image": ("skipped", "no Dockerfile here, which an image is made from"),
        "owner": ("ok", "what runs have made is yours"),
    }


@pytest.mark.parametrize(
    ("wanted", "status", "text", "hint"),
    [
        ("auto", "skipped", "no Docker engine: {} is not there; stages run here", None),
        ("container", "failed", "no Docker engine: {} is not there", "install and start Docker, or set {}=host"),
    ],
)
def test_the_doctor_says_what_becomes_of_stages_without_an_engine(wanted, status, text, hint, tmp_path, monkeypatch):
    socket = tmp_path / "docker.sock"
    monkeypatch.chdir(tmp_path)
    first, second = containers(0, {"DOCKER_HOST": f"unix://{socket}", RUNTIME: wanted})
    assert (first.name, first.status, first.text) == ("container", status, text.format(socket))
    assert first.hint == (hint and hint.format(RUNTIME))
    assert (second.name, second.status) == ("owner", "ok")


DOCKERS = {"Name": "mine", "Metadata": {}, "Endpoints": {"docker": {"Host": "unix:///run/docker.sock"}}}


@pytest.mark.parametrize(
    ("meta", "certificates", "why"),
    [
        ("{", False, "Detected corrupted meta file for context mine"),
        ("{}", False, "'Endpoints'"),
        (json.dumps(DOCKERS), True, "Path to a certificate and key files must be provided"),
    ],
)
def test_a_context_that_is_damaged_is_not_taken_for_another_engine(meta, certificates, why, tmp_path, monkeypatch):
    name = get_context_id("mine")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "contexts/meta" / name
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(meta)
    if certificates:
        tls = tmp_path / "contexts/tls" / name / "docker"
        tls.mkdir(parents=True)
        for file in ("ca.pem", "cert.pem", "key.pem"):
            (tls / file).symlink_to("/not/there")
    with pytest.raises(HostError) as caught:
        connect({"DOCKER_CONTEXT": "mine"})
    assert caught.value.message.startswith(f"docker's context cannot be read: {why}")
    assert caught.value.hint == "see `docker context ls`, or set DOCKER_HOST"
