"""How a machine of a training failed, as it tells the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from samebits.errors import CollectiveError, Interrupted, SamebitsError, WithHint
from samebits.files import Part

if TYPE_CHECKING:
    from collections.abc import Sequence


class Report(Part):
    """How a node failed; ``waited``: only for want of another."""

    node: int
    message: str
    hint: str
    exit_code: int
    waited: bool

    @classmethod
    def of(cls, error: WithHint, node: int) -> Self:
        """An error of this node."""
        waited = isinstance(error, CollectiveError)
        return cls(node=node, message=error.message, hint=error.hint, exit_code=error.exit_code, waited=waited)

    def error(self, name: str = "") -> WithHint:
        """As an error here, of the node with such a name."""
        if self.exit_code > 128:
            return Interrupted(self.exit_code - 128)
        return PeerError(self, f"node {self.node} ({name})" if name else f"node {self.node}")


class PeerError(SamebitsError):
    """The failure of a node, as all of them say it."""

    def __init__(self, report: Report, where: str) -> None:
        super().__init__(f"{where}: {report.message}", hint=report.hint)
        self.report, self.exit_code = report, report.exit_code


def root_cause(reports: Sequence[Report]) -> Report | None:
    """The first that did not only wait for another."""
    return next((report for report in reports if not report.waited), reports[0] if reports else None)
