"""Run one command in a container, as if it ran here: live output, signals, exit code."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from samebits.container.job import Job, settings
from samebits.container.owner import sweep
from samebits.errors import HostError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image

GRACE_SECONDS = 45.0  # between the first signal and the end of patience: workers write a checkpoint first
_PASSED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


@contextmanager
def made(client: DockerClient, image: Image, job: Job) -> Iterator[Container]:
    """A container that is gone afterwards; the engine's errors become HostError."""
    from docker.errors import APIError
    from requests import RequestException

    sweep(client)
    try:
        container = client.containers.create(**settings(client, image, job))
    except (APIError, RequestException) as error:
        raise HostError(f"no container could be made: {_why(error)}", hint="see `docker info`") from None
    try:
        yield container
    except (APIError, RequestException) as error:
        hint = "`samebits doctor` looks at the toolkit" if job.gpus else "`samebits doctor` looks at the engine"
        raise HostError(f"the container could not be run: {_why(error)}", hint=hint) from None
    finally:
        with suppress(APIError, RequestException):
            container.remove(force=True, v=True)


def _why(error: Exception) -> str:
    return first_line(str(getattr(error, "explanation", None) or error))


def run(client: DockerClient, image: Image, job: Job) -> int:
    """Run a command and return its exit code; its output goes to ours.

    Raises:
        HostError: the engine cannot start it.
    """
    with made(client, image, job) as container, _signals_passed_on(container) as relay:
        # Before the start: attached to a container that has ended, one would wait for ever.
        parts = container.attach(stream=True, demux=True)
        container.start()
        relay.start()
        for out, err in parts:
            for stream, data in ((sys.stdout, out), (sys.stderr, err)):
                if data:
                    stream.buffer.write(data)
                    stream.flush()
        return int(container.wait()["StatusCode"])


def output(client: DockerClient, image: Image, job: Job) -> tuple[int, str]:
    """Exit code and output of a short command.

    Raises:
        HostError: the engine cannot start it.
    """
    with made(client, image, job) as container:
        container.start()
        code = int(container.wait(timeout=120)["StatusCode"])
        return code, container.logs().decode(errors="replace").strip()


@contextmanager
def _signals_passed_on(container: Container) -> Iterator[_Relay]:
    relay = _Relay(container)
    before = {signum: signal.signal(signum, relay) for signum in _PASSED_ON}
    try:
        yield relay
    finally:
        relay.timer.cancel()
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Relay:
    """Passes the first signal on to the command inside; a second one, or none that helps, ends the container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._waiting: int | None = None  # a signal that came before there was a command
        self._first = True
        self.timer = threading.Timer(GRACE_SECONDS, self._send, [signal.SIGKILL])
        self.timer.daemon = True

    def __call__(self, signum: int, _: object) -> None:
        if self._first:
            self._first = False
            self._waiting = _PASSED_ON[signal.Signals(signum)]
            self.start()
            self.timer.start()
        else:
            self._send(signal.SIGKILL)

    def start(self) -> None:
        """Send what has waited; it goes on waiting if the command has not begun."""
        if self._waiting is not None and self._send(self._waiting):
            self._waiting = None

    def _send(self, signum: int) -> bool:
        from docker.errors import APIError
        from requests import RequestException

        try:
            self._container.kill(signal=int(signum))
        except (APIError, RequestException):
            return False  # not yet, or no more
        return True
