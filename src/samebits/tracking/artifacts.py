"""Where a server may have this user's files read and written: what a run says of that is the server's word alone."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from samebits.errors import UserError, without_password

if TYPE_CHECKING:
    from collections.abc import Callable

_OBJECT_STORES = {"s3", "gs", "wasbs", "abfss"}
"""Whose hosts are the environment's or a cloud's own, so that no login goes to another one."""


@cache
def guard_artifacts() -> None:
    """Have MLflow's client ask ``require_own_place``."""
    guard_places(require_own_place)


def guard_places(check: Callable[[str, str], None]) -> None:
    """Have MLflow call ``check`` wherever it finds out how to reach files: with their address, and with its store's."""
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories

    def guarded(make: Callable[..., Any]) -> Callable[..., Any]:
        def checked(artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> Any:
            check(artifact_uri, tracking_uri or "")
            try:
                return make(artifact_uri, tracking_uri=tracking_uri, registry_uri=registry_uri)
            except AssertionError:  # MLflow's, of a run that has its files at another run's
                raise _refusal(artifact_uri) from None

        return checked

    known: dict[str, Any] = get_registered_artifact_repositories()
    for scheme, make in list(known.items()):
        known[scheme] = guarded(make)


def require_own_place(artifact_uri: str, tracking_uri: str) -> None:
    """Raise UserError: a server names a place for files that is neither its own nor an object store."""
    server, place = urlsplit(tracking_uri), urlsplit(artifact_uri)
    if server.scheme not in ("http", "https") or place.scheme in _OBJECT_STORES:
        return
    if place.scheme == "runs":  # which stands for the place of a run's files, and MLflow asks again with that
        return
    if place.scheme == "mlflow-artifacts" and place.netloc in ("", server.netloc, server.netloc.rpartition("@")[2]):
        return
    raise _refusal(artifact_uri)


def _refusal(artifact_uri: str) -> UserError:
    place = without_password(artifact_uri) or "an address without text"
    return UserError(
        f"MLflow's server keeps the files at {place}, expected a place of its own or an object store",
        hint="start it with --artifacts-destination, or ask who runs it; see SECURITY.md",
    )
