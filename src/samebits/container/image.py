"""Which image fits this repository's locks, and what is known of an image."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from samebits.container.engine import find_image
from samebits.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import DockerClient
    from docker.models.images import Image

Variant = Literal["cpu", "gpu"]

IMAGE = "SAMEBITS_IMAGE"
"""Variable with the image to use in place of the locks' own, by any name that the engine knows."""

BASE_LABEL = "org.opencontainers.image.base.name"
REVISION_LABEL = "org.opencontainers.image.revision"
LOCK_LABEL = "samebits.lock"


def image_name(variant: Variant, root: Path = Path()) -> str:
    """``samebits:VARIANT-DIGEST``, whose digest is that of the files that decide what is installed.

    ``tools/env.sh`` makes the same name for Compose.

    Raises:
        HostError: they are not here.
    """
    digest = hashlib.sha256()
    for name in ("Dockerfile", "requirements.uv.lock", f"requirements.{variant}.lock"):
        try:
            digest.update((root / name).read_bytes())
        except FileNotFoundError:
            hint = f"run this at the root of the repository, or name an image in {IMAGE}"
            raise HostError(f"no {name} here, which an image is made from", hint=hint) from None
    return f"samebits:{variant}-{digest.hexdigest()[:12]}"


def variant_of(name: str) -> Variant | None:
    """The lock that an image's name speaks of; None if it is not a name of the locks."""
    found = re.fullmatch(r"samebits:(cpu|gpu)-[0-9a-f]{12}", name)
    return cast("Variant", found[1]) if found else None


def wanted_image(variant: Variant, root: Path = Path(), environ: Mapping[str, str] = os.environ) -> str:
    """The image that a stage should run in.

    Raises:
        HostError: there is nothing here that it could be made from.
    """
    return environ.get(IMAGE) or image_name(variant, root)


def require_image(client: DockerClient, name: str, environ: Mapping[str, str] = os.environ) -> Image:
    """The image of that name.

    Raises:
        HostError: the engine does not have it.
    """
    image = find_image(client, name)
    if image is not None:
        return image
    if environ.get(IMAGE):
        raise HostError(f"no image {name}, which {IMAGE} names", hint=f"load or pull it, or unset {IMAGE}")
    raise HostError(f"no image {name} for these locks", hint="`samebits container build` makes it")


@dataclass(frozen=True)
class ImageFacts:
    """What a run records of its image; ``digest`` is the registry's, None for one that was built here."""

    image_id: str
    digest: str | None
    base: str | None
    lock: str | None
    revision: str | None

    def environ(self) -> dict[str, str]:
        """As a container gets it, for ``samebits.host``."""
        known = {"ID": self.image_id, "DIGEST": self.digest, "BASE": self.base}
        return {f"SAMEBITS_IMAGE_{name}": value for name, value in known.items() if value}


def facts_of(image: Image) -> ImageFacts:
    """What the engine knows of an image."""
    labels = image.labels
    digests = [str(digest) for digest in image.attrs.get("RepoDigests") or []]
    return ImageFacts(
        image_id=str(image.id),
        digest=digests[0] if digests else None,
        base=labels.get(BASE_LABEL),
        lock=labels.get(LOCK_LABEL),
        revision=labels.get(REVISION_LABEL),
    )
