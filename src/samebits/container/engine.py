"""The Docker engine: whether it answers, and whether it offers this host's GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import HostError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import DockerClient as DockerClient
    from docker.models.images import Image as Image

SOCKET = Path("/var/run/docker.sock")
_SECONDS = 30


def connect(environ: Mapping[str, str] = os.environ) -> DockerClient:
    """A client of the engine that DOCKER_HOST names, or of this host's own.

    Raises:
        HostError: none answers, or it is another host's, which has not this host's files.
    """
    address = environ.get("DOCKER_HOST") or f"unix://{SOCKET}"
    if not address.startswith("unix://"):
        raise HostError(
            f"the Docker engine {address} is another host's, which has not this folder",
            hint="unset DOCKER_HOST, or run samebits on that host",
        )
    socket = Path(address.removeprefix("unix://"))
    if not socket.exists():
        raise HostError(f"no Docker engine: {socket} is not there", hint="install and start Docker")
    import docker
    from docker.errors import DockerException

    try:
        client = docker.DockerClient(base_url=address, timeout=_SECONDS)
        client.ping()
    except DockerException as error:
        hint = "add yourself to the group docker and log in again" if "ermission" in str(error) else "start Docker"
        raise HostError(f"no Docker engine answers at {socket}: {first_line(str(error))}", hint=hint) from None
    return client


def offers_gpus(client: DockerClient) -> bool:
    """Whether containers can get NVIDIA GPUs: through a runtime, a hook or a device interface (CDI)."""
    info = client.info()
    devices = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    return (
        "nvidia" in (info.get("Runtimes") or {})
        or any(device.startswith("nvidia.com/gpu") for device in devices)
        or shutil.which("nvidia-container-runtime-hook") is not None
    )


def is_rootless(client: DockerClient) -> bool:
    """Whether the engine runs as an ordinary user."""
    return any("rootless" in option for option in client.info().get("SecurityOptions") or [])


def find_image(client: DockerClient, name: str) -> Image | None:
    """An image of the engine by name, digest or id; None if it is not there. Nothing is pulled."""
    from docker.errors import ImageNotFound

    try:
        return client.images.get(name)
    except ImageNotFound:
        return None


def toolkit_version() -> str | None:
    """Version of the installed toolkit, None if it does not say."""
    try:
        done = subprocess.run(["nvidia-ctk", "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"(\d+\.\d+\.\d+)", done.stdout)
    return found[1] if found else None
