"""A shell in the image. The SDK has no terminal, so the ``docker`` command enters the container that the SDK makes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.container.mounts import folders
from samebits.container.run import Job, settings, sweep
from samebits.errors import HostError
from samebits.tracking.store import tracking_uri

if TYPE_CHECKING:
    from samebits.container.stage import Place


def open_shell(place: Place) -> int:
    """Start ``bash`` at this terminal and return its exit code.

    Raises:
        HostError: the ``docker`` command is not installed.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise HostError("the docker command is not installed", hint="install it, or use `samebits container run`")
    sweep(place.client)
    cwd, uri = Path.cwd(), tracking_uri()
    job = Job(["bash"], cwd, folders(cwd, [], uri), uri, place.gpus, interactive=True)
    container = place.client.containers.create(**settings(place.client, place.image, job))
    try:
        command = [docker, "start", "--attach", "--interactive", str(container.id)]
        return subprocess.run(command, check=False).returncode
    finally:
        container.remove(force=True, v=True)
