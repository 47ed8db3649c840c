"""Options of a container: user, mounts, GPUs, limits, variables, and the process that owns it."""

from __future__ import annotations

import configparser
import ipaddress
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.engines.docker import gpu_request, toolkit_version, traits
from samebits.engines.image import facts_of
from samebits.errors import HostError, UserError
from samebits.here import is_kit, repository_of_experiment
from samebits.host import allowed_gpus, boot_id, visible_uuids
from samebits.host.devices import VISIBLE
from samebits.host.variables import IMAGE, MOUNTS, RUNTIME, SHM_SIZE, VARIABLES
from samebits.tracking.store import address_parts, file_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from docker import DockerClient
    from docker.models.images import Image
    from docker.types import DeviceRequest

GPUS = "SAMEBITS_HOST_GPUS"
"""Variable with a container's number of GPUs before CUDA_VISIBLE_DEVICES; another number inside is an error."""

_SYSTEM_FOLDERS = [Path(f"/{name}") for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")]
_IMAGE_FOLDERS = [
    Path(f"/{name}") for name in ("", "home", "home/samebits", "opt", "opt/samebits", "opt/src", "run", "tmp", "var")
]

OWNER = "samebits.owner"
"""Label with the process that removes a container."""

TRUST = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH")
"""Variables with certificate files, which are mounted at their own paths."""

_PASSED_PREFIXES = (
    "SAMEBITS_", "MLFLOW_", "DVC_", "GIT_AUTHOR_", "GIT_COMMITTER_", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "PYTORCH_",
    "TORCH", "TRITON_", "ATEN_", "MKL_", "OMP_", "PET_",
)  # fmt: skip
_AGENT = {"GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # of torchrun's workers
_PASSED_NAMES = {
    *TRUST, *_AGENT, "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
}  # fmt: skip
_NOT_INSIDE = {RUNTIME, "SAMEBITS_CONTAINER", MOUNTS}

_INFINIBAND = Path("/dev/infiniband")

LIMITS = {"memlock": -1, "stack": 67108864, "nofile": 65536}
"""Limits that NVIDIA requires with GPUs. Without GPUs they are left out: an engine that may not raise them refuses."""


@dataclass(frozen=True, kw_only=True)
class ContainerCommand:
    """A command and its container; ``mounts`` keep their own paths, and ``gpus`` is a number.

    With ``several_nodes`` it uses the host's networks, to reach other machines.
    """

    argv: Sequence[str]
    cwd: Path
    mounts: Sequence[Path]
    tracking_uri: str
    gpus: int
    several_nodes: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    interactive: bool = False


def user_of(folder: Path, *, rootless: bool = False) -> str:
    """``uid:gid`` for a container: the caller's, or the folder's owner's if the caller is root.

    A rootless engine maps root inside to the caller outside, and any other number to another user.
    """
    if rootless:
        return "0:0"
    if os.geteuid() != 0:
        return f"{os.geteuid()}:{os.getegid()}"
    status = folder.stat()
    return f"{status.st_uid}:{status.st_gid}"


def create_arguments(client: DockerClient, image: Image, command: ContainerCommand) -> dict[str, Any]:
    """The options of ``docker run``, as the SDK names them. Raises UserError: SAMEBITS_SHM_SIZE is no size."""
    from docker.types import Mount, Ulimit

    engine = traits(client)
    rootless = "rootless" in engine
    limits = [Ulimit(name=name, soft=limit, hard=limit) for name, limit in LIMITS.items()]
    return {
        "image": image.id,
        "command": list(command.argv),
        "working_dir": str(command.cwd),
        "user": user_of(command.cwd, rootless=rootless),
        "group_add": [] if rootless or os.geteuid() == 0 else [str(group) for group in os.getgroups()],
        "userns_mode": "host" if "userns" in engine else None,
        "environment": _environment(image, command),
        "mounts": [Mount(str(path), str(path), type="bind") for path in command.mounts],
        "labels": {OWNER: identity(os.getpid())},
        "init": True,
        "read_only": True,
        # Exec, because kernel compilers load the libraries that they write there.
        "tmpfs": {"/tmp": "mode=1777,exec", "/home/samebits": "mode=1777,exec"},  # noqa: S108 - the container's own
        "cap_drop": ["ALL"],
        # Without SELinux's labels, because relabelling of mounts would change files of the host.
        "security_opt": ["no-new-privileges:true", *(["label=disable"] if "selinux" in engine else [])],
        "shm_size": _shared_memory(command.environ),
        "ulimits": [limit for limit in limits if command.gpus and not (rootless and limit.name == "memlock")],
        "network_mode": "host" if command.several_nodes or _is_loopback_server(command.tracking_uri) else "bridge",
        "devices": [f"{_INFINIBAND}:{_INFINIBAND}:rwm"] if command.several_nodes and _INFINIBAND.exists() else [],
        "device_requests": [_required_gpus(client)] if command.gpus else [],
        "stdin_open": command.interactive,
        "tty": command.interactive,
    }


def _required_gpus(client: DockerClient) -> DeviceRequest:
    """Request for this process's GPUs. Raises HostError: the engine does not offer them."""
    request = gpu_request(client)
    if request is None:
        hint = "install nvidia-container-toolkit, or set SAMEBITS_RUNTIME=host; see `samebits doctor`"
        raise HostError("the engine does not offer the GPUs to containers", hint=hint)
    return request


def _environment(image: Image, command: ContainerCommand) -> dict[str, str]:
    toolkit = toolkit_version() if command.gpus else None
    return {
        **{name: value for name, value in command.environ.items() if _is_passed(name, value, command.mounts)},
        **facts_of(image).environ(),
        **({"SAMEBITS_CONTAINER_TOOLKIT": toolkit} if toolkit else {}),
        IMAGE: next(iter(image.tags), str(image.id)),
        GPUS: str(command.gpus),
        **_visible_inside(command),
        **({} if command.gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}),  # if NVIDIA's runtime is the default
        "MLFLOW_TRACKING_URI": command.tracking_uri,
        "TINI_KILL_PROCESS_GROUP": "1",  # a signal also reaches child processes, as Ctrl-C on a terminal does
        **({"PYTHONPATH": str(command.cwd / "src")} if is_kit(command.cwd) else {}),
    }


def _visible_inside(command: ContainerCommand) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by UUID if GPUs are requested by name, because their indices may differ inside."""
    if command.gpus and VISIBLE in command.environ and allowed_gpus() is not None:
        return {VISIBLE: ",".join(visible_uuids(command.environ))}
    return {}


def _is_passed(name: str, value: str, mounts: Sequence[Path]) -> bool:
    """Whether a container gets a variable. A path counts only if it is mounted."""
    if name in _NOT_INSIDE or not (name.startswith(_PASSED_PREFIXES) or name in _PASSED_NAMES):
        return False
    path = Path(value)
    return not path.is_absolute() or is_seen(path, mounts)


def _shared_memory(environ: Mapping[str, str]) -> int:
    """Bytes of /dev/shm. NCCL needs more than Docker's default of 64 MB."""
    from docker.errors import DockerException
    from docker.utils import parse_bytes

    size = environ.get(SHM_SIZE) or VARIABLES[SHM_SIZE].default
    try:
        return int(parse_bytes(size))
    except DockerException:
        raise UserError(f"{SHM_SIZE}: got {size!r}, accepts {VARIABLES[SHM_SIZE].accepts}", hint="16g") from None


def _is_loopback_server(tracking_uri: str) -> bool:
    """Whether a server is on this host's loopback interface."""
    name = address_parts(tracking_uri).hostname or ""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return address.is_loopback or address.is_unspecified


# -- mounts, each at its own path because DVC and MLflow store absolute paths ------------------------------------


def mounts_of(
    cwd: Path, tracking_uri: str, *, certificates: Iterable[Path] = (), environ: Mapping[str, str] = os.environ
) -> list[Path]:
    """Files and folders to mount for a command in ``cwd``, none of which lies in another.

    These are its repository and git folder, the folder of a file store of MLflow, an external DVC cache, the entries of
    SAMEBITS_MOUNTS, and ``certificates``.

    Raises:
        UserError: an entry of SAMEBITS_MOUNTS is missing.
        HostError: a path is one at which the image has its own files.
    """
    project = repository_of_experiment(cwd) or cwd
    paths = [*_git_folders(project), *_store_folder(tracking_uri), *_caches(project), *_user_mounts(project, environ)]
    for path in paths:
        if path.resolve() in _IMAGE_FOLDERS or is_seen(path.resolve(), _SYSTEM_FOLDERS):
            hint = "keep the repository, its data and MLflow's store in folders of their own"
            raise HostError(f"{path} cannot be mounted: the image has its own", hint=hint)
    unique = sorted({path.resolve() for path in [*paths, *certificates]})
    return [path for path in unique if not any(outer in path.parents for outer in unique)]


def is_seen(path: Path, mounts: Sequence[Path]) -> bool:
    """Whether a path lies in one of the mounts."""
    return any(mount in (path, *path.parents) for mount in mounts)


def _git_folders(project: Path) -> list[Path]:
    """The working tree of a folder, and its git folder, which is elsewhere for a worktree."""
    command = ["git", "rev-parse", "--path-format=absolute", "--show-toplevel", "--git-common-dir"]
    try:
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return [project]
    return [Path(line) for line in done.stdout.splitlines()]


def _store_folder(tracking_uri: str) -> list[Path]:
    """The folder of a file store of MLflow."""
    if (file := file_of(tracking_uri)) is not None:
        return [file.parent]
    return [Path(address_parts(tracking_uri).path)] if tracking_uri.startswith("file:") else []


def _caches(project: Path) -> Iterator[Path]:
    """An external DVC cache, because results may be links into it."""
    for name in ("config", "config.local"):
        config = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            config.read(project / ".dvc" / name, encoding="utf-8")
        if config.has_option("cache", "dir"):
            folder = project / ".dvc" / config.get("cache", "dir")
            if folder.exists():  # otherwise nothing links into it
                yield folder


def _user_mounts(project: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The entries of SAMEBITS_MOUNTS in the environment, else in ``.env``."""
    value = environ[MOUNTS] if MOUNTS in environ else _env_file_value(project / ".env", MOUNTS)
    for entry in filter(None, value.split(os.pathsep)):
        path = project / entry
        if not path.exists():
            raise UserError(f"{MOUNTS}: {path}: no such file or folder", hint=f"make it, or take it out of {MOUNTS}")
        yield path


def _env_file_value(file: Path, name: str) -> str:
    """The value of the last line ``name=value``; empty if the file or the line is missing."""
    with suppress(OSError):
        for line in reversed(file.read_text(encoding="utf-8", errors="replace").splitlines()):
            key, _, value = line.partition("=")
            if key.strip() == name:
                return value.strip().strip("\"'")
    return ""


# -- removal of containers ---------------------------------------------------------------------------------------
#
# The process that made a container removes it. If that process was killed, the next one does. The engine's
# ``auto_remove`` is no alternative: it removes only ended containers, and a container whose owner was killed keeps its
# GPUs until its training ends.


def identity(pid: int | str) -> str:
    """A process of the caller: user, host, namespace, process id, and start time, because ids are reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{os.geteuid()}:{boot_id()}:{_pid_namespace()}:{pid}:{fields[19]}"


def sweep(client: DockerClient) -> list[str]:
    """Remove the caller's containers whose owner has ended, and return their ids.

    An owner in another process namespace is invisible, and its container is left alone. Owners from before the host's
    last start have all ended.
    """
    from docker.errors import APIError

    removed = []
    for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        owner = container.labels[OWNER]
        uid, boot, namespace, pid, _ = [*owner.split(":"), "", "", "", ""][:5]
        if uid != str(os.geteuid()):
            continue
        if boot != boot_id() or (namespace == _pid_namespace() and identity(pid) != owner):
            with suppress(APIError):
                container.remove(force=True, v=True)
                removed.append(str(container.id))
    return removed


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)
