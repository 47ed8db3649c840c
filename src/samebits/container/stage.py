"""Where a stage runs: in the image that fits the locks if that is possible here, else on the host, which is said."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from samebits.container.engine import connect, gpu_request
from samebits.container.image import image_name, require_image, variant_of, wanted_image
from samebits.container.job import GPUS, TRUST, Job
from samebits.container.mounts import folders
from samebits.container.run import run
from samebits.errors import HostError, UserError
from samebits.host import count_gpus, driver_facts
from samebits.runlog import LOGS, start_sender
from samebits.tracking.store import tracking_uri

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from docker import DockerClient
    from docker.models.images import Image

Runtime = Literal["auto", "container", "host"]

RUNTIME = "SAMEBITS_RUNTIME"
INSIDE = "SAMEBITS_CONTAINER"
"""Set in the image: there, everything runs where it is."""

FIRST_STAGE = "host"
"""The stage that runs at every ``dvc repro``, and so the one that says where all of them run."""


@dataclass(frozen=True)
class Place:
    """The image that a command is to run in."""

    client: DockerClient
    image: Image
    gpus: int


def wanted(environ: Mapping[str, str] = os.environ) -> Runtime:
    """What SAMEBITS_RUNTIME asks for.

    Raises:
        UserError: it is something else.
    """
    value = environ.get(RUNTIME) or "auto"
    for known in get_args(Runtime):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise UserError(f"{RUNTIME}: got {value!r}, accepts auto, container or host", hint=f"unset {RUNTIME}")


def find_place(root: Path = Path(), environ: Mapping[str, str] = os.environ) -> Place:
    """The image for this host.

    Raises:
        HostError: no engine answers, it has no such image, or it does not offer this host's GPUs.
    """
    client = connect(environ)
    gpus = len(driver_facts(environ)["gpus"])
    if gpus and gpu_request(client) is None:
        hint = "install the NVIDIA Container Toolkit: `samebits doctor` looks at it"
        raise HostError("the Docker engine does not offer this host's GPUs", hint=hint)
    name = wanted_image("gpu" if gpus else "cpu", root, environ)
    return Place(client, require_image(client, name, environ), gpus)


def job_for(place: Place, command: Sequence[str], *, interactive: bool = False) -> Job:
    """A command of this folder.

    Raises:
        HostError: something that it needs cannot be mounted.
    """
    cwd, uri = Path.cwd(), tracking_uri()
    trusted = [Path(os.environ[name]) for name in TRUST if os.environ.get(name) and Path(os.environ[name]).is_file()]
    return Job(command, cwd, folders(cwd, command, uri, trusted), uri, place.gpus, interactive=interactive)


def enter(arguments: Sequence[str] = sys.argv, environ: Mapping[str, str] = os.environ) -> None:
    """Run this command in the container if that is where it belongs, and end with its exit code.

    It comes back where the command is to run on.

    Raises:
        HostError: the container is asked for and cannot be had, or does not show the host's GPUs.
    """
    first = Path(arguments[0]).stem == FIRST_STAGE
    if environ.get(INSIDE):
        _look_around(environ, say=first)
        return
    runtime = wanted(environ)
    if runtime == "host":
        return
    try:
        place = find_place(environ=environ)
        job = job_for(place, ["python", *arguments])
    except HostError as error:
        if runtime == "container":
            raise
        if first or "DVC_STAGE" not in environ:
            sys.stderr.write(f"on the host, not in the image: {error}, or set {RUNTIME}=host\n")
        return
    if first:
        sys.stderr.write(f"in the image {place.image.tags[0] if place.image.tags else place.image.id}\n")
    raise SystemExit(run_inside(place, job))


def _look_around(environ: Mapping[str, str], *, say: bool) -> None:
    """Inside: whether the GPUs are here, and whether the image is that of the locks."""
    name, gpus = environ.get("SAMEBITS_IMAGE", "the image"), environ.get(GPUS)
    if gpus is not None and count_gpus(environ) != int(gpus):
        hint = "see `samebits container run nvidia-smi -L`, and whether the image is of the GPU lock"
        raise HostError(f"{gpus} GPUs on the host, {count_gpus(environ)} for torch in {name}", hint=hint)
    variant = variant_of(name)
    if say and variant and name != image_name(variant):
        sys.stderr.write(f"warning: {name} is not of the locks here. hint: `samebits container build`, or `make up`\n")


def run_inside(place: Place, job: Job) -> int:
    """Run a job in the image, and have delivered what its sender leaves behind."""
    before = set(LOGS.glob("*.jsonl"))
    try:
        return run(place.client, place.image, job)
    finally:
        for log in set(LOGS.glob("*.jsonl")) - before:
            start_sender(log)  # the one inside has ended with its container
