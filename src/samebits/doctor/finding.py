"""Findings, and the decorator of checks, which return findings and never raise."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, ParamSpec

from samebits.errors import HostError, SamebitsError, first_line, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

Status = Literal["ok", "warning", "failed", "skipped"]
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor, with a hint, and the command's exit code, which is 0 unless the check failed.

    ``is_remark``: the text is a remark on the training, which is printed for the first strategy only.
    """

    name: str
    status: Status
    text: str
    hint: str | None = None
    exit_code: int = 0
    is_remark: bool = False

    def as_json(self) -> dict[str, str | int | None]:
        """The finding for readers, without ``is_remark``, which only the doctor uses."""
        return {name: value for name, value in asdict(self).items() if name != "is_remark"}

    def __post_init__(self) -> None:
        assert (self.hint is not None) == (self.status in ("warning", "failed"))
        assert (self.exit_code != 0) == (self.status == "failed")
        for name in ("text", "hint"):  # they may quote a key, a path, or another program's message
            value = getattr(self, name)
            object.__setattr__(self, name, value and one_line(value))


def ok(text: str, *, name: str = "") -> Finding:
    """A check that passed. Without a ``name`` it gets the check's."""
    return Finding(name=name, status="ok", text=text)


def skipped(text: str, *, name: str = "") -> Finding:
    """A check that was not made; the text says why."""
    return Finding(name=name, status="skipped", text=text)


def warning(text: str, hint: str, *, name: str = "", is_remark: bool = False) -> Finding:
    """A problem with which trainings run, but not as well as they could."""
    return Finding(name=name, status="warning", text=text, hint=hint, is_remark=is_remark)


def failed(text: str, hint: str, *, name: str = "", exit_code: int = HostError.exit_code) -> Finding:
    """A problem with which trainings fail or leave no record."""
    return Finding(name=name, status="failed", text=text, hint=hint, exit_code=exit_code)


def of_error(error: SamebitsError, *, name: str = "") -> Finding:
    """The failure of an expected error."""
    return failed(error.message, error.hint, name=name, exit_code=error.exit_code)


def check(name: str) -> Callable[[Callable[P, Finding | list[Finding]]], Callable[P, list[Finding]]]:
    """Decorator of a check: its findings get ``name``, and all its exceptions become findings."""

    def decorate(function: Callable[P, Finding | list[Finding]]) -> Callable[P, list[Finding]]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> list[Finding]:
            try:
                result = function(*args, **kwargs)
            except SamebitsError as error:
                result = of_error(error)
            except Exception as error:  # noqa: BLE001 - one check that breaks must not hide the others
                what = f"the check itself broke: {type(error).__name__}: {first_line(str(error))}"
                result = failed(what, "report it as a bug of samebits; what it checks may be well")
            return [
                replace(item, name=item.name or name) for item in (result if isinstance(result, list) else [result])
            ]

        return checked

    return decorate
