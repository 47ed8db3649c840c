"""What a check found, and how a check is written: it answers with findings and never raises."""

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
    """One line of the doctor's, what to do about it, and the command's exit code because of it, 0 but for a failure.

    ``is_remark``: the text is a remark's on what is trained, which need not be said of each strategy once more.
    """

    name: str
    status: Status
    text: str
    hint: str | None = None
    exit_code: int = 0
    is_remark: bool = False

    def as_json(self) -> dict[str, str | int | None]:
        """What a reader gets; whether two say the same is for the doctor alone."""
        return {name: value for name, value in asdict(self).items() if name != "is_remark"}

    def __post_init__(self) -> None:
        assert (self.hint is not None) == (self.status in ("warning", "failed"))
        assert (self.exit_code != 0) == (self.status == "failed")
        for name in ("text", "hint"):  # they may quote a key, a path, or what somebody else's program said
            value = getattr(self, name)
            object.__setattr__(self, name, value and one_line(value))


def ok(text: str, *, name: str = "") -> Finding:
    """All is well; without a ``name`` it is the check's."""
    return Finding(name=name, status="ok", text=text)


def skipped(text: str, *, name: str = "") -> Finding:
    """Nothing was checked; the text says why."""
    return Finding(name=name, status="skipped", text=text)


def warning(text: str, hint: str, *, name: str = "", is_remark: bool = False) -> Finding:
    """A training runs, but not as well as it could."""
    return Finding(name=name, status="warning", text=text, hint=hint, is_remark=is_remark)


def failed(text: str, hint: str, *, name: str = "", exit_code: int = HostError.exit_code) -> Finding:
    """A training fails, or leaves no trace."""
    return Finding(name=name, status="failed", text=text, hint=hint, exit_code=exit_code)


def of_error(error: SamebitsError, *, name: str = "") -> Finding:
    """The failure that an expected error speaks of."""
    return failed(error.message, error.hint, name=name, exit_code=error.exit_code)


def check(name: str) -> Callable[[Callable[P, Finding | list[Finding]]], Callable[P, list[Finding]]]:
    """Make a function the check of that name: its findings carry the name, and whatever it raises becomes one."""

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
