"""The image for this repository's locks: name, build, facts, and its archive as a file."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from samebits.engines.docker import engine_errors, find_image
from samebits.errors import HostError, UserError, first_line, reason
from samebits.files import Part, atomic, read_json, regular, write_json
from samebits.hashes import sha256
from samebits.here import of_kit
from samebits.host.variables import IMAGE
from samebits.records.provenance import git_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import DockerClient
    from docker.models.images import Image

Variant = Literal["cpu", "gpu"]

BASE_LABEL = "org.opencontainers.image.base.name"
REVISION_LABEL = "org.opencontainers.image.revision"
LOCK_LABEL = "samebits.lock"


_ARCHITECTURES = {"x86_64": "", "aarch64": "arm64-"}  # others have the kernel's name


def image_name(variant: Variant, root: Path = Path()) -> str:
    """``samebits:VARIANT-DIGEST``, with a digest of the files that determine what is installed.

    Where the machine is not amd64, its architecture stands before the digest.

    ``tools/env.sh`` makes the same name for Compose.

    Raises:
        HostError: one of these files is missing.
    """
    digest = hashlib.sha256()
    for name in ("Dockerfile", "requirements.uv.lock", f"requirements.{variant}.lock"):
        try:
            digest.update((root / name).read_bytes())
        except FileNotFoundError:
            hint = f"run this at the root of the repository, or name an image in {IMAGE}"
            raise HostError(f"no {name} here, which an image is made from", hint=hint) from None
    machine = platform.machine()
    return f"samebits:{variant}-{_ARCHITECTURES.get(machine, f'{machine}-')}{digest.hexdigest()[:12]}"


def variant_of(name: str) -> Variant | None:
    """The variant in an image's name; None if it is not a name from ``image_name``."""
    match = re.fullmatch(r"samebits:(cpu|gpu)-([a-z0-9_]+-)?[0-9a-f]{12}", name)
    return cast("Variant", match[1]) if match else None


def wanted_image(variant: Variant, root: Path = Path(), environ: Mapping[str, str] = os.environ) -> str:
    """Name of the image for stages. Raises HostError: the files that determine it are missing."""
    return environ.get(IMAGE) or image_name(variant, root)


def build_image(
    client: DockerClient, name: str, variant: Variant, *, base: str | None, torch_backend: str | None
) -> None:
    """Build from the Dockerfile of this folder, with progress on stderr. Raises HostError: a step failed."""
    arguments = {"LOCK": variant, "REVISION": git_state().told}
    if base:
        arguments["BASE_IMAGE"] = base
    if torch_backend:
        arguments["TORCH_BACKEND"] = torch_backend
    hint = f"see the lines above; without the network, see {of_kit('docs/guides/containers.md')}"
    with engine_errors("the image could not be built", hint):
        events = client.api.build(
            path=str(Path.cwd()), tag=name, buildargs=arguments, rm=True, forcerm=True, decode=True,
            use_config_proxy=True,
        )  # fmt: skip
        for event in events:
            sys.stderr.write(event.get("stream") or event.get("status", ""))
            if "error" in event:
                raise HostError(f"the image could not be built: {str(event['error']).strip()}", hint=hint)


def require_image(client: DockerClient, name: str, environ: Mapping[str, str] = os.environ) -> Image:
    """The image of that name. Raises HostError: the engine does not have it."""
    image = find_image(client, name)
    if image is not None:
        return image
    if environ.get(IMAGE):
        raise HostError(f"no image {name}, which {IMAGE} names", hint=f"load or pull it, or unset {IMAGE}")
    raise HostError(f"no image {name} for these locks", hint="`samebits container build` makes it")


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """Facts of an image that a run records; ``digest`` is the registry's, None for a local build."""

    image_id: str
    digest: str | None
    base: str | None
    lock: str | None
    revision: str | None

    def environ(self) -> dict[str, str]:
        """The facts as a container's variables, which ``samebits.host`` reads."""
        known = {"ID": self.image_id, "DIGEST": self.digest, "BASE": self.base}
        return {f"SAMEBITS_IMAGE_{name}": value for name, value in known.items() if value}


def facts_of(image: Image) -> ImageFacts:
    """The engine's facts of an image."""
    labels = image.labels
    digests = [str(digest) for digest in image.attrs.get("RepoDigests") or []]
    return ImageFacts(
        image_id=str(image.id),
        digest=digests[0] if digests else None,
        base=labels.get(BASE_LABEL),
        lock=labels.get(LOCK_LABEL),
        revision=labels.get(REVISION_LABEL),
    )


def record_of(file: Path) -> Path:
    """Path of the record that ``save_image`` writes beside its file."""
    return file.with_name(f"{file.name}.json")


class SavedImage(Part):
    """Record of an image archive: the image's facts, and the SHA-256 of the file."""

    name: str
    id: str
    digest: str | None
    base: str | None
    layers: tuple[str, ...]
    sha256: str


def save_image(image: Image, name: str, file: Path) -> list[Path]:
    """Write the image with its name to ``file``, and a record beside it; returns both paths.

    Such a file keeps the exact image, which a registry may delete.
    """
    failed = engine_errors("the engine does not give the image")
    with atomic(file) as temporary, temporary.open("wb") as stream, failed:
        for chunk in image.save(named=name if name in image.tags else bool(image.tags)):
            stream.write(chunk)
    facts = facts_of(image)
    record = SavedImage(
        name=name,
        id=facts.image_id,
        digest=facts.digest,
        base=facts.base,
        layers=_layers(image),
        sha256=sha256(file),
    )
    write_json(record_of(file), record.model_dump(mode="json"))
    return [file, record_of(file)]


def load_image(client: DockerClient, file: Path) -> str:
    """Load what ``save_image`` wrote, and return its name.

    Raises:
        UserError: a file is missing or damaged, or holds no image, or another image than the record names.
        HostError: the engine has no space left.
    """
    from docker.errors import DockerException

    named = "name the file that `samebits container save` wrote"
    try:
        regular(file)
        record = _read_record(record_of(file))
        digest = sha256(file)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file", hint=named) from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {reason(error)}", hint=named) from None
    if digest != record.sha256:
        raise UserError(
            f"{file}: SHA-256 {digest[:12]}, expected {record.sha256[:12]}: it is not whole",
            hint="copy it again",
        )
    with file.open("rb") as stream, engine_errors():
        try:
            images = client.images.load(stream)
        except DockerException as error:
            if "no space left" in str(error):
                hint = "see `docker system df`"
                raise HostError(f"{file}: the engine has no space left for it", hint=hint) from None
            what = f"{file}: the engine takes no image from it: {first_line(str(error))}"
            raise UserError(what, hint=named) from None
    # By layers, because ids depend on the engine's image store.
    if [_layers(image) for image in images] != [record.layers]:
        raise UserError(f"{file}: holds another image than {record.name}", hint="copy both files again")
    return record.name


def _read_record(path: Path) -> SavedImage:
    if not path.exists():
        raise UserError(f"{path}: no such file", hint="copy it too: the hashes are in it")
    made_by = "samebits container save"
    return SavedImage.parse(read_json(path, made_by=made_by), path, made_by=made_by)


def _layers(image: Image) -> tuple[str, ...]:
    return tuple(str(layer) for layer in image.attrs["RootFS"]["Layers"])
