"""A real engine, images of this tree, and clones that belong to an unprivileged user.

SAMEBITS_TEST_BASE names the base of the CPU image, SAMEBITS_TEST_OTHER_BASE one with another Python and C library, and
SAMEBITS_TEST_DOCKER the docker command; by default the Dockerfile's own base is pulled. With SAMEBITS_NEEDS_ENGINE
nothing here is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from conftest import ROOT, copy_sources, small
from patience import patient
from ports import free_port
from samebits.engines.docker import connect
from samebits.engines.docker_run import OWNER
from samebits.engines.image import image_name
from samebits.errors import HostError

UID = 4321  # nobody's on any host
BIN = Path(sys.executable).parent
DOCKER = os.environ.get("SAMEBITS_TEST_DOCKER", "docker")
CPU = "docker-compose.cpu.yml"
BASE = {"BASE_IMAGE": os.environ["SAMEBITS_TEST_BASE"]} if os.environ.get("SAMEBITS_TEST_BASE") else {}
"""The variable that gives Compose's builds another base than the Dockerfile's own."""


def missing(reason):
    """Skip a test, or fail it if the environment promises an engine."""
    if os.environ.get("SAMEBITS_NEEDS_ENGINE"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine():
    try:
        client = connect()
    except HostError as error:
        missing(f"no Docker engine: {error}")
    with closing(client):
        yield client


@pytest.fixture(scope="session")
def compose_plugin():
    try:
        subprocess.run([DOCKER, "compose", "version"], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        missing(f"no Docker Compose: {error}")


class Clone:
    """The files of this tree in a repository of its own, with small parameters."""

    def __init__(self, folder, **train):
        self.folder = folder
        copy_sources(folder)
        self.params = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
        chosen = small(**{"numerics": ["fast", "exact"], "repeats": 1, **train})
        self.params["data"] |= chosen["data"]
        self.params["train"] |= chosen["train"]
        YAML().dump(self.params, folder / "params.yaml")
        self.environ = {
            **os.environ,
            "PATH": f"{BIN}:{Path(DOCKER).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder / "src"),
        }
        for name in ("MLFLOW_TRACKING_URI", "SAMEBITS_RUNTIME", "SAMEBITS_IMAGE", "SAMEBITS_MOUNTS", "VIRTUAL_ENV"):
            self.environ.pop(name, None)
        for name in ("AUTHOR", "COMMITTER"):
            self.environ |= {f"GIT_{name}_NAME": "test", f"GIT_{name}_EMAIL": "test@localhost"}
        self("git", "init", "--quiet")
        self("git", "add", "--all")
        self("git", "commit", "--quiet", "--message", "test")

    def run(self, *command, **environ):
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=patient(1200),
            stdin=subprocess.DEVNULL,
        )

    def start(self, *command, **environ):
        """A command that goes on, with pipes for what it writes."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env={**self.environ, **environ}, **pipes)

    def __call__(self, *command, **environ):
        done = self.run(*command, **environ)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def samebits(self, *arguments, **environ):
        return self("samebits", *arguments, **environ)

    def append(self, name, text):
        file = self.folder / name
        file.write_text(file.read_text() + text)

    def give_to(self, uid):
        subprocess.run(["chown", "-R", f"{uid}:{uid}", str(self.folder)], check=True)

    def exact(self):
        """The bits of the exact runs, by file."""
        return {
            f"{strategy}/{name}": (self.folder / f"runs/{strategy}-exact" / name).read_bytes()
            for strategy in ("single", "dp", "ddp")
            for name in ("model.safetensors", "losses.csv")
        }


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    def make(name, **train):
        return Clone(tmp_path_factory.mktemp(name), **train)

    return make


def add_wheels(checkout):
    """Copy the wheels of PIP_FIND_LINKS to the folder that a build looks into."""
    wheels = os.environ.get("PIP_FIND_LINKS")
    if wheels and Path(wheels).is_dir():
        shutil.copytree(wheels, checkout.folder / "wheels", dirs_exist_ok=True)


@pytest.fixture(scope="session")
def image(engine, clone):
    """Name of the CPU image of this tree, which Compose has built."""
    checkout = clone("build")
    add_wheels(checkout)
    for name in ("data/leaked", "secrets/leaked", "runs/leaked", ".env.local", "src/.env"):
        (checkout.folder / name).parent.mkdir(exist_ok=True)
        (checkout.folder / name).write_text("do-not-leak-me")
    secrets = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"), "do-not-leak-me")
    Compose(checkout, CPU, **secrets, **BASE)("build")
    return image_name("cpu", checkout.folder)


@pytest.fixture(scope="session")
def other_image(engine, clone):
    """Builds an image from a clone through the SDK, with another Python and C library where there is a base for that.

    The GPU lock's packages come from an index alone, for every Python.
    """
    base = os.environ.get("SAMEBITS_TEST_OTHER_BASE")

    def make(checkout):
        arguments = ["--lock", "gpu", "--base", base] if base else ["--lock", "cpu"]
        return checkout.samebits("container", "build", "--rebuild", *arguments).strip()

    make(clone("other"))
    return make


def containers(engine, checkout):
    """Containers of a clone's commands. Others may belong to a parallel run."""
    labelled = engine.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True)
    return [one for one in labelled if one.attrs["Config"]["WorkingDir"] == str(checkout.folder)]


class Compose:
    """One project of a clone's Compose files; ``fresh`` is without the .env that tools/env.sh writes.

    After a block it is down.
    """

    def __init__(self, checkout, *overlays, fresh=False, **environ):
        self.checkout, self.port = checkout, free_port()
        files = [argument for name in ("docker-compose.yml", *overlays) for argument in ("-f", name)]
        self.command = [DOCKER, "compose", *files]
        self.environ = {"SAMEBITS_PORT": str(self.port), **environ}
        if not fresh:
            checkout("sh", "tools/env.sh")

    def __call__(self, *arguments):
        return self.checkout(*self.command, *arguments, **self.environ)

    def wait(self, service):
        done = self.checkout.run(*self.command, "wait", service, **self.environ)
        assert done.returncode == 0, self("logs", service)[-4000:]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.checkout.run(*self.command, "down", "--volumes", "--timeout", "5", **self.environ)

    def id_of(self, service):
        return self("ps", "--all", "--quiet", service).strip()


def read(folder, name):
    return json.loads((folder / name).read_text())
