"""``samebits container``: the image, and commands inside it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from samebits.engines.docker import connect, find_image
from samebits.engines.image import (
    Variant,
    build_image,
    facts_of,
    image_name,
    load_image,
    require_image,
    save_image,
    wanted_image,
)
from samebits.host import count_visible
from samebits.params import require_repository

if TYPE_CHECKING:
    from docker.models.images import Image

PATH = click.Path(path_type=Path)
AS_VARIANT = click.option(
    "--lock", type=click.Choice(get_args(Variant)), help="Packages of which lock.  [default: gpu where there are GPUs]"
)


@click.group()
def container() -> None:
    """Build the image that experiments run in, and run commands inside it.

    Stages run inside by themselves where an engine has the image; SAMEBITS_RUNTIME=auto|container|host decides.
    """


@container.command()
@AS_VARIANT
@click.option("--base", help="Base image in place of the Dockerfile's own.")
@click.option("--rebuild", is_flag=True, help="Also where there is one; its trainings are then stale.")
@click.option("--torch-backend", help="Where torch's wheel comes from, as uv's option of that name: cpu, cu130, auto.")
def build(lock: Variant | None, base: str | None, rebuild: bool, torch_backend: str | None) -> None:
    """Build the image for the locks of this folder.

    Wheels in the folder wheels/ are taken before those of an index.

    \b
    Examples:
      samebits container build
      samebits container build --lock cpu --base registry.example/cuda:13.0.2-base-ubuntu24.04
    """
    require_repository()
    client, variant = connect(), lock or _variant()
    name = image_name(variant)
    if find_image(client, name) is None or rebuild:
        build_image(client, name, variant, base=base, torch_backend=torch_backend)
    else:
        click.echo("it is there already; --rebuild makes another", err=True)
    click.echo(name)


@container.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True)
def run(command: tuple[str, ...]) -> None:
    """Run a COMMAND of this folder in the image, without input, and end with its exit code.

    \b
    Examples:
      samebits container run samebits doctor
      samebits container run dvc repro
      samebits container run python -m pytest tests/gpu
    """
    from samebits.engines.stage import command_for, find_place, run_inside

    place = find_place()
    sys.exit(run_inside(place, command_for(place, command)))


@container.command()
def shell() -> None:
    """A shell in the image, with this folder.

    \b
    Example:
      samebits container shell
    """
    from samebits.engines.container import run_at_terminal
    from samebits.engines.stage import command_for, find_place

    place = find_place()
    sys.exit(run_at_terminal(place.client, place.image, command_for(place, ["bash"], interactive=True)))


@container.command()
@AS_VARIANT
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(lock: Variant | None, as_json: bool) -> None:
    """What is known of the image for these locks.

    \b
    Example:
      samebits container info --json
    """
    name, image = _present_image(lock)
    facts = {"name": name, **asdict(facts_of(image)), "size_gib": round(image.attrs["Size"] / 2**30, 2)}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        for key, value in facts.items():
            click.echo(f"{key.replace('_', ' '):12} {value if value is not None else '-'}")


@container.command()
@click.argument("file", type=PATH)
@AS_VARIANT
def save(file: Path, lock: Variant | None) -> None:
    """Keep the exact image as a FILE, with its id and SHA-256 beside it.

    \b
    Example:
      samebits container save samebits-gpu.tar
    """
    name, image = _present_image(lock)
    for path in save_image(image, name, file):
        click.echo(path)


@container.command()
@click.argument("file", type=PATH)
def load(file: Path) -> None:
    """Bring back an image from a FILE that `samebits container save` wrote.

    Its SHA-256 is checked first, and the layers of what was loaded after that.

    \b
    Example:
      samebits container load samebits-gpu.tar
    """
    click.echo(load_image(connect(), file))


def _variant() -> Variant:
    return "gpu" if count_visible() else "cpu"


def _present_image(lock: Variant | None) -> tuple[str, Image]:
    """Name and image of the stages; the image must be present."""
    name = wanted_image(lock or _variant())
    return name, require_image(connect(), name)
