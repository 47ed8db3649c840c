"""What a container gets: the caller's user and folders, GPUs, limits, and the variables that matter."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from samebits.container.engine import gpu_request, toolkit_version, traits
from samebits.container.image import facts_of
from samebits.container.owner import OWNER, identity
from samebits.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from docker import DockerClient
    from docker.models.images import Image

GPUS = "SAMEBITS_HOST_GPUS"
"""Variable with the number of GPUs that the host has for a job; a container that shows others is an error."""

TRUST = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH")
"""Variables with files of certificates, which a container gets at their own paths."""

_PASSED = (
    "SAMEBITS_", "MLFLOW_", "DVC_", "GIT_AUTHOR_", "GIT_COMMITTER_", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "PYTORCH_",
    "TORCH", "TRITON_", "ATEN_", "MKL_", "OMP_",
)  # fmt: skip
_PASSED_NAMES = {
    *TRUST, "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "http_proxy",
    "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
}  # fmt: skip
_NOT_INSIDE = {"SAMEBITS_RUNTIME", "SAMEBITS_CONTAINER"}

LIMITS = {"memlock": -1, "stack": 67108864, "nofile": 65536}
"""What NVIDIA asks for beside GPUs. An engine that may not raise limits refuses them, so that they are not for all."""


@dataclass(frozen=True)
class Job:
    """A command and what it gets; ``mounts`` are folders and files at their own paths, ``gpus`` a number."""

    command: Sequence[str]
    cwd: Path
    mounts: Sequence[Path]
    tracking_uri: str
    gpus: int
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
    """What the engine is asked for.

    Raises:
        UserError: SAMEBITS_SHM_SIZE is no size.
    """
    from docker.types import Mount

    known = traits(client)
    rootless = "rootless" in known
    return {
        "image": image.id,
        "command": list(job.command),
        "working_dir": str(job.cwd),
        "user": owner_of(job.cwd, rootless=rootless),
        "group_add": [] if rootless or os.geteuid() == 0 else [str(group) for group in os.getgroups()],
        "userns_mode": "host" if "userns" in known else None,
        "environment": _environment(image, job),
        "mounts": [Mount(str(path), str(path), type="bind") for path in job.mounts],
        "labels": {OWNER: identity(os.getpid())},
        "init": True,
        "read_only": True,
        # Exec, because compilers of kernels load what they wrote there.
        "tmpfs": {"/tmp": "mode=1777,exec", "/home/samebits": "mode=1777,exec"},  # noqa: S108 - inside, and its own
        "cap_drop": ["ALL"],
        # Relabelling what is mounted would change files of the host's, so that SELinux keeps out instead.
        "security_opt": ["no-new-privileges:true", *(["label=disable"] if "selinux" in known else [])],
        "shm_size": _shared_memory(job.environ),
        "ulimits": _limits(rootless=rootless) if job.gpus else [],
        "network_mode": "host" if _is_here(job.tracking_uri) else "bridge",
        "device_requests": [gpu_request(client)] if job.gpus else [],
        "stdin_open": job.interactive,
        "tty": job.interactive,
    }


def _environment(image: Image, job: Job) -> dict[str, str]:
    toolkit = toolkit_version() if job.gpus else None
    source = job.cwd / "src"
    return {
        **{name: value for name, value in job.environ.items() if _is_passed(name, value, job.mounts)},
        **facts_of(image).environ(),
        **({"SAMEBITS_CONTAINER_TOOLKIT": toolkit} if toolkit else {}),
        "SAMEBITS_IMAGE": next(iter(image.tags), str(image.id)),
        GPUS: str(job.gpus),
        **({} if job.gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}),  # where NVIDIA's runtime is the default one
        "MLFLOW_TRACKING_URI": job.tracking_uri,
        "TINI_KILL_PROCESS_GROUP": "1",  # a signal reaches what the command has started, as Ctrl-C on a terminal
        **({"PYTHONPATH": str(source)} if source.is_dir() else {}),
    }


def _is_passed(name: str, value: str, mounts: Sequence[Path]) -> bool:
    """A path of the host's means nothing inside, unless it is mounted."""
    if name in _NOT_INSIDE or not (name.startswith(_PASSED) or name in _PASSED_NAMES):
        return False
    path = Path(value)
    return not path.is_absolute() or any(mount in (path, *path.parents) for mount in mounts)


def _shared_memory(environ: Mapping[str, str]) -> int:
    """Bytes of /dev/shm: NCCL needs more than Docker's 64 MB."""
    from docker.errors import DockerException
    from docker.utils import parse_bytes

    size = environ.get("SAMEBITS_SHM_SIZE") or "8g"
    try:
        return int(parse_bytes(size))
    except DockerException:
        raise UserError(f"SAMEBITS_SHM_SIZE: got {size!r}, accepts bytes, or k, m or g of them", hint="16g") from None


def _limits(*, rootless: bool) -> list[Any]:
    from docker.types import Ulimit

    allowed = {name: limit for name, limit in LIMITS.items() if not (rootless and name == "memlock")}
    return [Ulimit(name=name, soft=limit, hard=limit) for name, limit in allowed.items()]


def _is_here(tracking_uri: str) -> bool:
    """Whether a server is reached on this host's loopback alone."""
    name = urlsplit(tracking_uri).hostname or ""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return address.is_loopback or address.is_unspecified
