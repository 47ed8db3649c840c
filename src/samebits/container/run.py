"""Run one command in a container, as if it ran here: same folder, same user, live output, signals, exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from samebits.container.engine import is_rootless, toolkit_version
from samebits.container.image import facts_of
from samebits.errors import HostError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image

OWNER = "samebits.owner"
"""Label with the process that removes a container; when that is gone, whoever comes next does."""

GRACE_SECONDS = 45.0  # between the first signal and the end of patience: workers write a checkpoint first
_PASSED = (
    "SAMEBITS_",
    "MLFLOW_",
    "NCCL_",
    "DVC_",
    "CUDA_",
    "ATEN_",
    "MKL_",
    "OMP_",
    "TORCH_",
    "GIT_AUTHOR_",
    "GIT_COMMITTER_",
)
_PASSED_NAMES = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY",
                 "HTTPS_PROXY", "NO_PROXY"}  # fmt: skip
_SET_INSIDE = {"SAMEBITS_RUNTIME", "CUDA_HOME"}
GPU_LIMITS = {"memlock": -1, "stack": 67108864, "nofile": 65536}
"""What NVIDIA asks for; an engine that may not raise limits itself refuses them, so that they are not for all."""

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Job:
    """A command and what it gets; ``mounts`` are folders at their own paths."""

    command: Sequence[str]
    cwd: Path
    mounts: Sequence[Path]
    tracking_uri: str
    gpus: bool
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    interactive: bool = False


def owner_of(folder: Path, *, rootless: bool = False) -> str:
    """``uid:gid`` for a container: the caller's; of root the folder's owner, whose files these are.

    To a rootless engine the caller is root inside, and any other number somebody else outside.
    """
    if rootless:
        return "0:0"
    if os.geteuid() != 0:
        return f"{os.geteuid()}:{os.getegid()}"
    status = folder.stat()
    return f"{status.st_uid}:{status.st_gid}"


def settings(client: DockerClient, image: Image, job: Job) -> dict[str, Any]:
    """What the engine is asked for."""
    from docker.types import DeviceRequest, Mount, Ulimit

    passed = {
        name: value
        for name, value in job.environ.items()
        if (name.startswith(_PASSED) or name in _PASSED_NAMES) and name not in _SET_INSIDE
    }
    source = job.cwd / "src"
    toolkit = toolkit_version() if job.gpus else None
    local_server = urlsplit(job.tracking_uri).hostname in _LOOPBACK
    return {
        "image": image.id,
        "command": list(job.command),
        "working_dir": str(job.cwd),
        "user": owner_of(job.cwd, rootless=is_rootless(client)),
        "environment": {
            **passed,
            **facts_of(image).environ(),
            **({"SAMEBITS_CONTAINER_TOOLKIT": toolkit} if toolkit else {}),
            "SAMEBITS_IMAGE": next(iter(image.tags), str(image.id)),
            "MLFLOW_TRACKING_URI": job.tracking_uri,
            **({"PYTHONPATH": str(source)} if source.is_dir() else {}),
        },
        "mounts": [Mount(str(path), str(path), type="bind") for path in job.mounts],
        "labels": {OWNER: _identity(os.getpid())},
        "init": True,
        "read_only": True,
        "tmpfs": {"/tmp": "mode=1777,exec", "/home/samebits": "mode=1777"},  # noqa: S108 - inside, and its own
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "shm_size": job.environ.get("SAMEBITS_SHM_SIZE", "8g"),
        "ulimits": [Ulimit(name=name, soft=limit, hard=limit) for name, limit in GPU_LIMITS.items()]
        if job.gpus
        else [],
        "network_mode": "host" if local_server else "bridge",
        "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])] if job.gpus else [],
        "stdin_open": job.interactive,
        "tty": job.interactive,
    }


def run(client: DockerClient, image: Image, job: Job) -> int:
    """Run a command and return its exit code; its output goes to ours. The container is gone afterwards.

    Raises:
        HostError: the engine cannot start it.
    """
    from docker.errors import APIError

    sweep(client)
    try:
        container = client.containers.create(**settings(client, image, job))
    except APIError as error:
        raise HostError(f"no container could be made: {first_line(str(error))}", hint="see `docker info`") from None
    try:
        with _signals_passed_on(container):
            # Before the start: attached to a container that has ended, one would wait for ever.
            parts = container.attach(stream=True, demux=True)
            try:
                container.start()
            except APIError as error:
                hint = "with GPUs, see `samebits doctor` for the container toolkit"
                raise HostError(f"the container could not be started: {error.explanation}", hint=hint) from None
            for out, err in parts:
                for stream, data in ((sys.stdout, out), (sys.stderr, err)):
                    if data:
                        stream.buffer.write(data)
                        stream.flush()
            return int(container.wait()["StatusCode"])
    finally:
        with suppress(APIError):
            container.remove(force=True, v=True)


def output(client: DockerClient, image: Image, job: Job) -> tuple[int, str]:
    """Exit code and output of a short command."""
    container = client.containers.create(**settings(client, image, job))
    try:
        container.start()
        code = int(container.wait(timeout=120)["StatusCode"])
        return code, container.logs().decode(errors="replace").strip()
    finally:
        container.remove(force=True, v=True)


@contextmanager
def _signals_passed_on(container: Container) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the command inside; a second one, or none that helps, ends the container."""
    from docker.errors import APIError

    timers: list[threading.Timer] = []

    def kill(signum: int) -> None:
        with suppress(APIError):  # it has ended by itself
            container.kill(signal=signum)

    def pass_on(signum: int, _: object) -> None:
        kill(signal.SIGKILL if timers else signum)
        timer = threading.Timer(GRACE_SECONDS, kill, [signal.SIGKILL])
        timer.daemon = True
        timer.start()
        timers.append(timer)

    before = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def sweep(client: DockerClient) -> list[str]:
    """Remove containers whose owner has ended without doing so; their ids.

    Of one that cannot be seen from here, the owner before the host's last start or in another namespace, only a
    container that has ended is removed.
    """
    from docker.errors import APIError

    swept = []
    for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        owner = container.labels[OWNER]
        place, _, pid = owner.rpartition("/")[0].rpartition(":")
        ended = _identity(pid) != owner if place == _place() else container.status == "exited"
        if ended:
            with suppress(APIError):
                container.remove(force=True, v=True)
                swept.append(str(container.id))
    return swept


def _identity(pid: int | str) -> str:
    """A process: where it runs, its number, and its time of start, because numbers come again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{_place()}:{pid}/{fields[19]}"


def _place() -> str:
    """Where process numbers are told apart: this host since its last start, and the namespace on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
