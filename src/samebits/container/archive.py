"""The exact image as a file, because registries delete old ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.container.image import facts_of
from samebits.errors import UserError
from samebits.files import atomic, read_json, sha256, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from docker import DockerClient
    from docker.models.images import Image


def record_of(file: Path) -> Path:
    """Where the SHA-256 and the image's id are kept."""
    return file.with_name(f"{file.name}.json")


def save_image(image: Image, name: str, file: Path) -> list[Path]:
    """Write the image with its name to ``file``, and its id, digests, layers and SHA-256 beside it."""
    with atomic(file) as temporary, temporary.open("wb") as stream:
        for chunk in image.save(named=name if name in image.tags else bool(image.tags)):
            stream.write(chunk)
    facts = facts_of(image)
    record = {
        "name": name,
        "id": facts.image_id,
        "digest": facts.digest,
        "base": facts.base,
        "layers": _layers(image),
        "sha256": sha256(file),
    }
    write_json(record_of(file), record)
    return [file, record_of(file)]


def load_image(client: DockerClient, file: Path) -> str:
    """Load what ``save_image`` wrote, and return its name.

    Raises:
        UserError: a file is missing or damaged, or holds another image than it says.
    """
    if not file.exists():
        raise UserError(f"{file}: no such file", hint="name the file that `samebits container save` wrote")
    if not record_of(file).exists():
        raise UserError(f"{record_of(file)}: no such file", hint="copy it too: the hashes are in it")
    record: dict[str, Any] = read_json(record_of(file), made_by="samebits container save")
    found = sha256(file)
    if found != record["sha256"]:
        raise UserError(
            f"{file}: SHA-256 {found[:12]}, expected {record['sha256'][:12]}: it is not whole",
            hint="copy it again",
        )
    with file.open("rb") as stream:
        (image, *_) = client.images.load(stream)
    if _layers(image) != record["layers"]:  # its id depends on the engine's way of keeping images
        raise UserError(f"{file}: holds another image than {record['name']}", hint="copy both files again")
    return str(record["name"])


def _layers(image: Image) -> list[str]:
    return [str(layer) for layer in image.attrs["RootFS"]["Layers"]]
