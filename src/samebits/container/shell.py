"""A shell in the image. The SDK has no terminal, so the ``docker`` command enters the container that the SDK makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from samebits.container.engine import address_of
from samebits.container.run import made
from samebits.container.stage import job_for
from samebits.errors import HostError, UserError

if TYPE_CHECKING:
    from samebits.container.stage import Place


def open_shell(place: Place) -> int:
    """Start ``bash`` at this terminal and return its exit code.

    Raises:
        HostError: the ``docker`` command is not installed.
        UserError: this is no terminal.
    """
    if not sys.stdin.isatty():
        raise UserError("a shell needs a terminal", hint="`samebits container run COMMAND` does without")
    docker = shutil.which("docker")
    if docker is None:
        raise HostError("the docker command is not installed", hint="install it, or use `samebits container run`")
    job = job_for(place, ["bash"], interactive=True)
    with made(place.client, place.image, job) as container:
        command = [docker, "start", "--attach", "--interactive", str(container.id)]
        environ = {**os.environ, "DOCKER_HOST": address_of()}
        return subprocess.run(command, env=environ, check=False).returncode
