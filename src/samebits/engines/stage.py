"""Choice of the place of a stage: the image for the locks if possible, else the host, with a message."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from samebits.engines.container import run
from samebits.engines.docker import NoEngineError, connect, gpu_request
from samebits.engines.docker_run import GPUS, TRUST, ContainerCommand, is_seen, mounts_of
from samebits.engines.image import image_name, require_image, variant_of, wanted_image
from samebits.errors import HostError, UserError
from samebits.here import TOLD, is_kit, stage_in
from samebits.host import allowed_gpus, count_present, count_visible, torch_build
from samebits.host.cluster_environment import find_nodes
from samebits.host.variables import IMAGE, MOUNTS, RUNTIME, chosen
from samebits.params import load_params
from samebits.records.log import LOGS
from samebits.tasks import FileData
from samebits.tracking.delivery import sync
from samebits.tracking.sender import taken_over
from samebits.tracking.store import tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from docker import DockerClient
    from docker.models.images import Image

Runtime = Literal["auto", "container", "host"]

INSIDE = "SAMEBITS_CONTAINER"
"""Variable that is set in the image, where every stage runs in place."""

FIRST_STAGE = "host"
"""The stage of every ``dvc repro``, which prints the place for all stages."""

_PATH_OPTIONS = ("--folder", "--params", "--data-dir", "--out-dir")


@dataclass(frozen=True)
class Place:
    """The engine, image and number of GPUs for a command.

    The GPUs are all that this process may use, or none. CUDA_VISIBLE_DEVICES selects among them inside, as on the host.
    """

    client: DockerClient
    image: Image
    gpus: int


def requested_runtime(environ: Mapping[str, str] = os.environ) -> Runtime:
    """The value of SAMEBITS_RUNTIME, auto if unset. Raises UserError: it is another value."""
    return cast("Runtime", chosen(RUNTIME, environ) or "auto")


def find_place(root: Path = Path(), environ: Mapping[str, str] = os.environ) -> Place:
    """The place for commands of this host.

    Raises:
        HostError: no engine answers, it lacks the image, or it does not offer this host's GPUs.
    """
    client = connect(environ)
    allowed = allowed_gpus()
    present = count_present() if allowed is None else len(allowed)
    gpus = present if count_visible(environ) else 0
    if gpus and gpu_request(client) is None:
        hint = "install the NVIDIA Container Toolkit: `samebits doctor` looks at it"
        raise HostError("the Docker engine does not offer this host's GPUs", hint=hint)
    name = wanted_image("gpu" if gpus else "cpu", root, environ)
    return Place(client, require_image(client, name, environ), gpus)


def command_for(place: Place, argv: Sequence[str], *, interactive: bool = False) -> ContainerCommand:
    """A command in this folder, with all its mounts.

    Raises:
        HostError: a path that it needs cannot be mounted.
        UserError: a path in its arguments or parameters is not mounted.
    """
    cwd, uri = Path.cwd(), tracking_uri()
    certificates = [Path(os.environ[name]) for name in TRUST if os.environ.get(name)]
    mounts = mounts_of(cwd, uri, certificates=[file for file in certificates if file.is_file()])
    for name, path in named_paths(argv).items():
        if not is_seen(path.resolve(), mounts):
            hint = f"add a folder that holds it to {MOUNTS}, or set {RUNTIME}=host"
            raise UserError(f"{name}: {path} is not mounted in the container", hint=hint)
    return ContainerCommand(
        argv=argv, cwd=cwd, mounts=mounts, tracking_uri=uri, gpus=place.gpus, interactive=interactive
    )


def named_paths(argv: Sequence[str]) -> dict[str, Path]:
    """The paths in a stage's arguments and in its parameters, by option or key."""
    paths = {}
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        option, _, value = argument.partition("=")
        if option in _PATH_OPTIONS:
            paths[option] = Path(value or following)
    with suppress(UserError):  # the command inside reports errors of the file
        params = load_params(paths.get("--params", paths.get("--folder", Path()) / "params.yaml"))
        if params.model.source:
            paths["model.source"] = Path(params.model.source)
        if isinstance(params.data, FileData):
            for key in ("inputs", "targets", "split"):
                if reference := getattr(params.data.kwargs, key):
                    paths[f"data.kwargs.{key}"] = Path(reference.partition(":")[0])  # file.safetensors:tensor
    return paths


def enter(arguments: Sequence[str] = sys.argv, environ: Mapping[str, str] = os.environ) -> None:
    """Run this command in a container if it belongs there, and end with its exit code; else return.

    Raises:
        HostError: SAMEBITS_RUNTIME requires a container and there is none, or it does not show the host's GPUs.
        UserError: a path in its arguments or parameters is not mounted.
    """
    first = stage_in(arguments) == FIRST_STAGE
    if environ.get(INSIDE):
        _check_inside(environ, say=first)
        return
    runtime = requested_runtime(environ)
    if runtime == "host" or (runtime == "auto" and not is_kit() and not environ.get(IMAGE)):
        return  # a user's own repository has no locks, which an image would be made from
    try:
        place = find_place(environ=environ)
        command = _with_nodes(command_for(place, ["python", "-P", *arguments]), environ)
    except HostError as error:
        if runtime == "container":
            raise
        says = first or ("DVC_STAGE" not in environ and TOLD not in environ)
        if says and not isinstance(error, NoEngineError):
            sys.stderr.write(f"on the host, not in the image: {error}, or set {RUNTIME}=host\n")
        return
    if first:
        sys.stderr.write(f"in the image {place.image.tags[0] if place.image.tags else place.image.id}\n")
    raise SystemExit(run_inside(place, command))


def _with_nodes(command: ContainerCommand, environ: Mapping[str, str]) -> ContainerCommand:
    """The command with torchrun's variables for its machines, if there are several: an image lacks Slurm's commands."""
    nodes = find_nodes(environ=environ)
    if nodes.several:
        return replace(command, several_nodes=True, environ={**command.environ, **nodes.environ()})
    return replace(command, several_nodes=any(one.partition("=")[0] == "--nodes" for one in command.argv))


def _check_inside(environ: Mapping[str, str], *, say: bool) -> None:
    """Inside the image, require the host's GPUs, and warn if the image is not that for the locks."""
    name, given = environ.get(IMAGE, "the image"), environ.get(GPUS)
    usable = count_present() if torch_build().cuda else 0
    if given is not None and usable != int(given):
        hint = "see `samebits container run nvidia-smi -L`, and whether the image is of the GPU lock"
        raise HostError(f"{given} GPUs on the host, {usable} for torch in {name}", hint=hint)
    variant = variant_of(name) if is_kit() else None  # elsewhere there are no locks to compare with
    if say and variant and name != image_name(variant):
        sys.stderr.write(f"warning: {name} is not of the locks here. hint: `samebits container build`, or `make up`\n")


def run_inside(place: Place, command: ContainerCommand) -> int:
    """Run a command in the image, and deliver the logs that its sender leaves behind."""
    with taken_over():
        return run(place.client, place.image, command)


@contextmanager
def delivered(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Deliver the block's logs if the container, with its sender, ends with this process, as in a pod.

    Elsewhere a process outside delivers them, or the sender goes on.
    """
    if not environ.get(INSIDE) or os.getpid() != 1:
        yield
        return
    before = set(LOGS.glob("*.jsonl"))
    try:
        yield
    finally:
        if set(LOGS.glob("*.jsonl")) - before and find_nodes(environ=environ).rank == 0:
            for log, problem in sync()[1].items():
                sys.stderr.write(f"{log}: {problem}. hint: samebits track sync\n")
