"""Build the image through the engine's own builder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import HostError
from samebits.provenance import git_state

if TYPE_CHECKING:
    from docker import DockerClient

    from samebits.container.image import Variant


def build_image(
    client: DockerClient, name: str, variant: Variant, *, base: str | None, torch_backend: str | None
) -> None:
    """Build from the Dockerfile in the working directory, and show how it goes on stderr.

    Raises:
        HostError: a step failed.
    """
    arguments = {"LOCK": variant, "REVISION": git_state()["commit"]}
    if base:
        arguments["BASE_IMAGE"] = base
    if torch_backend:
        arguments["TORCH_BACKEND"] = torch_backend
    events = client.api.build(
        path=str(Path.cwd()), tag=name, buildargs=arguments, rm=True, forcerm=True, decode=True, use_config_proxy=True
    )
    for event in events:
        text = event.get("stream") or event.get("status", "")
        sys.stderr.write(text)
        if "error" in event:
            hint = "see the lines above; without the network, see docs/guides/containers.md"
            raise HostError(f"the image could not be built: {str(event['error']).strip()}", hint=hint)
