"""Checks of the container engine, of its image, and from inside a container."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from samebits.doctor.finding import Finding, check, failed, ok, skipped, warning
from samebits.doctor.machine import LOW_DISK, MIN_DISK, size
from samebits.engines.container import output
from samebits.engines.docker import connect, find_image, gpu_request, info_of, toolkit_version
from samebits.engines.image import facts_of, wanted_image
from samebits.engines.stage import INSIDE, Place, command_for
from samebits.errors import HostError, counted, first_line
from samebits.host.variables import RUNTIME
from samebits.tracking.store import tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from samebits.engines.docker import DockerClient, Image

BULLETINS = "https://www.nvidia.com/en-us/security/"
MIN_TOOLKIT = "1.17.8"
"""The first toolkit in which a container cannot take the host over while it starts (CVE-2025-23266)."""

_RUN_FILES = ("data", "runs", "reports", ".dvc", ".samebits", "mlartifacts", "mlflow.db", "host.json", "dvc.lock")


def containers(gpus: int, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """All checks of containers; one finding if there is no engine."""
    if environ.get(INSIDE):
        yield skipped("this is the image", name="container")
        return
    if environ.get(RUNTIME) == "host":
        yield skipped(f"stages run here, as {RUNTIME} says", name="container")
        yield from owner()
        return
    try:
        client = connect(environ)
    except HostError as error:
        text = error.message
        if environ.get(RUNTIME) == "container":
            yield failed(text, f"{error.hint}, or set {RUNTIME}=host", name="container")
        else:
            yield skipped(f"{text}; stages run here", name="container")
        yield from owner()
        return
    yield ok(f"Docker {client.version()['Version']}", name="container")
    yield from engine_disk(client)
    yield from toolkit(client, gpus, needed=environ.get(RUNTIME) == "container")
    try:
        name = wanted_image("gpu" if gpus else "cpu", environ=environ)
    except HostError as error:
        yield skipped(error.message, name="image")
    else:
        present = find_image(client, name)
        yield from image(present, name)
        if present is not None:
            yield from inside(Place(client, present, gpus))
    yield from owner()


@check("image")
def image(present: Image | None, name: str) -> Finding:
    """Whether the engine has the image for the locks of this folder."""
    if present is None:
        return warning(f"no {name} for these locks, so stages run on the host", "`samebits container build`")
    facts = facts_of(present)
    base = facts.base or "an unknown base"
    pinned = "" if "@sha256:" in base else ", a base without a digest"
    return ok(f"{name}, {facts.image_id.removeprefix('sha256:')[:12]} on {base}{pinned}")


@check("container disk")
def engine_disk(client: DockerClient) -> Finding:
    """Free space in the engine's folder of images."""
    root = Path(info_of(client)["DockerRootDir"])
    try:
        free = shutil.disk_usage(root).free
    except OSError as error:  # the engine runs in a virtual machine
        return skipped(f"{root} cannot be looked at: {error.strerror}")
    text, hint = f"{size(free)} free in {root}", "docker system prune removes what no container uses"
    if free < MIN_DISK:
        return failed(text, hint)
    return warning(f"{text}, less than an image takes", hint) if free < LOW_DISK else ok(text)


@check("toolkit")
def toolkit(client: DockerClient, gpus: int, *, needed: bool = False) -> Finding:
    """NVIDIA's Container Toolkit, which gives containers GPUs. Without it stages run on the host, unless ``needed``."""
    if not gpus:
        return skipped("no GPU")
    if gpu_request(client) is None:
        hint = "install nvidia-container-toolkit, then `nvidia-ctk runtime configure --runtime=docker`, restart Docker"
        text = "the engine does not offer the GPUs to containers"
        return failed(text, hint) if needed else warning(f"{text}, so stages run on the host", hint)
    version = toolkit_version()
    if version is None:
        return ok("the engine offers the GPUs; nvidia-ctk does not say its version")
    if Version(version) < Version(MIN_TOOLKIT):
        text = f"{version} is older than {MIN_TOOLKIT}: a container may take the host over"
        return warning(text, f"install the newest; NVIDIA's bulletins: {BULLETINS}")
    return ok(version)


@check("inside")
def inside(place: Place) -> list[Finding]:
    """Checks inside a container: GPUs, shared memory, and MLflow's API."""

    def look(*command: str) -> tuple[int, str]:
        return output(place.client, place.image, command_for(place, command))

    findings = []
    if place.gpus and gpu_request(place.client) is None:
        return [skipped("the engine gives containers no GPU")]
    if place.gpus:
        code, listing = look("nvidia-smi", "-L")
        seen = sum(line.startswith("GPU ") for line in listing.splitlines())
        hint = "see `samebits container run nvidia-smi -L`, and restart Docker"
        if code:
            findings.append(failed(f"nvidia-smi ended with {code}: {first_line(listing)}", hint))
        elif seen < place.gpus:
            findings.append(failed(f"{seen} of {place.gpus} GPUs are seen in the image", hint))
        else:
            findings.append(ok(counted(seen, "GPU")))
    code, text = look("python", "-P", "-m", "samebits.doctor.inside", str(place.gpus), tracking_uri())
    if code:
        return [*findings, failed(f"python ended with {code}: {text[-200:]}", "`samebits container shell`")]
    answers = [Finding(**answer) for answer in json.loads(text.splitlines()[-1])]
    return [*findings, *(replace(answer, name=f"inside: {answer.name}") for answer in answers)]


@check("owner")
def owner(folder: Path = Path()) -> Finding:
    """Whether files of runs belong to the caller, or to the folder's owner if the caller is root."""
    uid = os.geteuid() if os.geteuid() else folder.stat().st_uid
    files = (file for name in _RUN_FILES for top in [folder / name] if top.exists() for file in (top, *top.glob("*")))
    foreign = [str(file) for file in files if file.lstat().st_uid != uid]
    if foreign:
        more = f" and {len(foreign) - 1} more do" if foreign[1:] else " does"
        hint = f"sudo chown -R {uid} . ; run DVC as their owner, and containers by Compose or samebits"
        return warning(f"{foreign[0]}{more} not belong to you", hint)
    return ok("what runs have made is yours")
