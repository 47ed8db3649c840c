"""Run one command in a container as if it ran on the host: live output, signals, exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from samebits.engines.docker import address_of, engine_errors
from samebits.engines.docker_run import ContainerCommand, create_arguments, sweep
from samebits.errors import HostError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image

GRACE_SECONDS = 45.0  # from the first signal to SIGKILL, in which workers write a checkpoint
_PASSED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


@contextmanager
def _new_container(client: DockerClient, image: Image, command: ContainerCommand) -> Iterator[Container]:
    """A container that is removed after the block. Errors of the engine become HostError."""
    from requests import RequestException  # also the SDK's errors of an engine that answers

    with engine_errors("no container could be made"):
        sweep(client)
        container = client.containers.create(**create_arguments(client, image, command))
    hint = "`samebits doctor` looks at the toolkit" if command.gpus else "`samebits doctor` looks at the engine"
    try:
        with engine_errors("the container could not be run", hint):
            yield container
    finally:
        with suppress(RequestException):
            container.remove(force=True, v=True)


def run(client: DockerClient, image: Image, command: ContainerCommand) -> int:
    """Run a command, pass its output on, and return its exit code. Raises HostError: the engine cannot start it."""
    with _new_container(client, image, command) as container, _Relay(container) as relay:
        # Before the start, because an attachment to an ended container would wait for ever.
        parts = container.attach(stream=True, demux=True)
        container.start()
        relay.start()
        for out, err in parts:
            for stream, data in ((sys.stdout, out), (sys.stderr, err)):
                if data:
                    stream.buffer.write(data)
                    stream.flush()
        return int(container.wait()["StatusCode"])


def output(client: DockerClient, image: Image, command: ContainerCommand) -> tuple[int, str]:
    """Exit code and output of a short command. Raises HostError: the engine cannot start it."""
    with _new_container(client, image, command) as container:
        container.start()
        code = int(container.wait(timeout=120)["StatusCode"])
        return code, container.logs().decode(errors="replace").strip()


def run_at_terminal(client: DockerClient, image: Image, command: ContainerCommand) -> int:
    """Run an interactive command at this terminal and return its exit code.

    The SDK cannot connect a terminal, so the ``docker`` command starts the container that the SDK makes.

    Raises:
        HostError: the ``docker`` command is not installed.
        UserError: standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise UserError("a shell needs a terminal", hint="`samebits container run COMMAND` does without")
    docker = shutil.which("docker")
    if docker is None:
        raise HostError("the docker command is not installed", hint="install it, or use `samebits container run`")
    with _new_container(client, image, command) as container:
        start = [docker, "start", "--attach", "--interactive", str(container.id)]
        return subprocess.run(start, env={**os.environ, "DOCKER_HOST": address_of()}, check=False).returncode


class _Relay:
    """Passes the first signal on. A second signal ends the container, as does the end of ``GRACE_SECONDS``."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._waiting: int | None = None  # a signal that came before the command had started
        self._first = True
        self._timer = threading.Timer(GRACE_SECONDS, self._send, [signal.SIGKILL])
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._before = {signum: signal.signal(signum, self) for signum in _PASSED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def __call__(self, signum: int, _: object) -> None:
        if self._first:
            self._first = False
            self._waiting = _PASSED_ON[signal.Signals(signum)]
            self.start()
            self._timer.start()
        else:
            self._send(signal.SIGKILL)

    def start(self) -> None:
        """Send a waiting signal. It goes on waiting if the command has not started."""
        if self._waiting is not None and self._send(self._waiting):
            self._waiting = None

    def _send(self, signum: int) -> bool:
        from requests import RequestException

        with suppress(RequestException):  # not yet, or no more
            self._container.kill(signal=int(signum))
            return True
        return False
