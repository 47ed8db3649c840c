"""The Docker engine: connection, properties, images, and this host's GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml.error import YAMLError

from samebits.errors import HostError, UserError, few, first_line
from samebits.host import allowed_gpus
from samebits.params import read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from docker import DockerClient as DockerClient
    from docker.models.images import Image as Image
    from docker.types import DeviceRequest


@contextmanager
def engine_errors(what: str = "the container engine fails", hint: str = "see `docker info`") -> Iterator[None]:
    """Raise HostError for errors of the engine or of the connection to it."""
    from docker.errors import DockerException
    from requests import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        raise HostError(f"{what}: {why(error)}", hint=hint) from None


def why(error: Exception) -> str:
    """The engine's message, in one line."""
    return first_line(str(getattr(error, "explanation", None) or error))


SOCKET = "unix:///var/run/docker.sock"
_SECONDS = 30


class NoEngineError(HostError):
    """This host has nothing of Docker, so no user expects an image to be used."""


def connect(environ: Mapping[str, str] = os.environ) -> DockerClient:
    """A client of the engine that DOCKER_HOST or docker's context names, else of this host's engine.

    Raises:
        NoEngineError: there is no engine.
        HostError: the engine does not answer, or is on another host, without this host's files; or see ``address_of``.
    """
    address = address_of(environ)
    if not address.startswith("unix://"):
        raise HostError(
            f"the Docker engine {address} is another host's, which has not this folder",
            hint="unset DOCKER_HOST, or run samebits on that host",
        )
    socket = address.removeprefix("unix://")
    if not os.path.exists(socket):  # noqa: PTH110 - Path.exists raises if the caller may not enter a folder above
        kind = HostError if address != SOCKET or shutil.which("docker") else NoEngineError
        raise kind(f"no Docker engine: {socket} is not there", hint="install and start Docker")
    import docker
    from docker.errors import DockerException

    try:
        client = docker.DockerClient(base_url=address, timeout=_SECONDS)
        client.ping()
    except DockerException as error:
        allowed = os.access(socket, os.R_OK | os.W_OK)
        hint = "start Docker" if allowed else "add yourself to the group docker and log in again"
        raise HostError(f"no Docker engine answers at {socket}: {first_line(str(error))}", hint=hint) from None
    client.api.timeout = None  # type: ignore[assignment] # none: starts with eight GPUs and images of several GB take long
    return client


def address_of(environ: Mapping[str, str] = os.environ) -> str:
    """Address of the engine that the ``docker`` command would talk to.

    Raises:
        HostError: docker's context cannot be read.
    """
    if address := environ.get("DOCKER_HOST"):
        return address
    config = Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if "DOCKER_CONTEXT" not in environ and not config.exists():
        return SOCKET
    from docker.context import ContextAPI

    try:
        context = ContextAPI.get_context(environ.get("DOCKER_CONTEXT"))
    except Exception as error:  # noqa: BLE001 - the SDK raises no narrower one for a damaged context
        text = f"docker's context cannot be read: {first_line(str(error))}"
        raise HostError(text, hint="see `docker context ls`, or set DOCKER_HOST") from None
    return str(context.Host).removeprefix("http+") if context and context.Host else SOCKET


def info_of(client: DockerClient) -> dict[str, Any]:
    """The engine's answer to ``docker info``. Raises HostError: it fails."""
    with engine_errors():
        return client.info()


def traits(client: DockerClient) -> set[str]:
    """The engine's security options, by its own names: ``rootless``, ``userns``, ``selinux`` and others."""
    options = info_of(client).get("SecurityOptions") or []
    return {part.removeprefix("name=") for option in options for part in option.split(",")}


def gpu_request(client: DockerClient) -> DeviceRequest | None:
    """Request for this process's NVIDIA GPUs, to NVIDIA's runtime, its hook, or a device interface (CDI).

    None if the engine does not offer GPUs. The container gets no GPU that a control group hides from this process.

    Raises:
        HostError: the device interface lacks a name for one of these GPUs, or none of them can be read.
    """
    from docker.types import DeviceRequest

    info, allowed = info_of(client), allowed_gpus()
    if allowed is not None and not allowed:
        hint = "see what nvidia-smi says, or set SAMEBITS_RUNTIME=host"
        raise HostError("no GPU that this process may use can be read, so a container can be given none", hint=hint)
    if "nvidia" in (info.get("Runtimes") or {}) or shutil.which("nvidia-container-runtime-hook"):
        which = {"count": -1} if allowed is None else {"device_ids": allowed}
        return DeviceRequest(**which, capabilities=[["gpu"]])
    found = info.get("DiscoveredDevices")  # by Docker 28 and newer
    offered = {str(device.get("ID", "")) for device in found} if found else set(_devices_of(info.get("CDISpecDirs")))
    if not any(name.startswith("nvidia.com/gpu") for name in offered):
        return None
    names = [f"nvidia.com/gpu={gpu}" for gpu in (["all"] if allowed is None else allowed)]
    if allowed is not None and (missing := sorted({*names} - offered)):
        hint = "`nvidia-ctk cdi generate` with --device-name-strategy=uuid, or set SAMEBITS_RUNTIME=host"
        raise HostError(f"the engine does not offer {few(missing)}, and this process may use no other GPU", hint=hint)
    return DeviceRequest(driver="cdi", device_ids=names)


def _devices_of(folders: Sequence[str] | None) -> Iterator[str]:
    """Names of the devices that specifications in these folders describe, as the engine reads them (CDI, SPEC.md)."""
    for file in (file for folder in folders or () for file in sorted(Path(folder).glob("*"))):
        if file.suffix in (".json", ".yaml"):
            with suppress(OSError, YAMLError, ValueError, TypeError, KeyError):  # such a file describes none
                described = read_yaml(file.read_text(encoding="utf-8"))  # of which JSON is a part
                yield from [f"{described['kind']}={device['name']}" for device in described["devices"]]


def find_image(client: DockerClient, name: str) -> Image | None:
    """An image of the engine by name, digest or id; None if it is missing. Nothing is pulled.

    Raises:
        UserError: the name is not valid for an image.
        HostError: the engine fails.
    """
    from docker.errors import APIError, ImageNotFound

    with engine_errors():
        try:
            return client.images.get(name)
        except ImageNotFound:
            return None
        except APIError as error:
            if not error.is_client_error():
                raise
            hint = "name an image as registry/name:tag, or unset SAMEBITS_IMAGE"
            raise UserError(f"{name}: {why(error)}", hint=hint) from None


def toolkit_version() -> str | None:
    """Version of NVIDIA's Container Toolkit on this host; None if unknown."""
    try:
        done = subprocess.run(["nvidia-ctk", "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\d+\.\d+\.\d+", done.stdout)
    return match[0] if match else None
