"""What a strategy is: its traits, which devices it gets, and what it makes of a module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    from samebits.batch_split import BatchSplit
    from samebits.remarks import NotAppliedKind
    from samebits.section import Section
    from samebits.strategies.placement import Placement, Request

Reduction = Literal["mean", "sum"]
"""What becomes of the gradients of several ranks."""


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """How one process wraps a module: its own ``devices``, and the ``group`` of its ranks, None for all of them.

    ``settings`` are the strategy's own of params.yaml. ``accumulates``: several backward passes make one step.
    ``hook`` stands in for the all-reduce of a bucket of gradients, where each is to be noted.
    """

    devices: Sequence[torch.device]
    settings: Section | None = None
    accumulates: bool = False
    reduction: Reduction = "mean"
    group: ProcessGroup | None = None
    hook: Callable[..., Any] | None = None


def _as_it_is(module: nn.Module, how: Wrapping) -> nn.Module:  # noqa: ARG001
    return module


def _no_block(module: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG001
    return nullcontext()


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to use several devices, by default as a training on one device does."""

    name: str
    settings: str | None = None
    """The key of ``train`` that holds what it alone is told."""
    place: Callable[[Request], tuple[Placement, BatchSplit]]
    """Which devices it gets, what its figures may be called, and how they share out the batch."""
    has_ranks: bool = False
    """Each device has a process of its own, also on other machines."""
    gathers: bool = False
    """The first device also holds the outputs of the others."""
    compiles: bool = True
    """``torch.compile`` takes the wrapped module, and CUDA graphs the one inside."""
    not_applied: Mapping[str, NotAppliedKind] = field(default_factory=dict)
    """Settings of ``fast`` that do nothing under it, each with the reason."""
    prepare: Callable[[Placement, MutableMapping[str, str]], None] = _nothing
    """Change the environment of a process before its process group is made."""
    wrap: Callable[[nn.Module, Wrapping], nn.Module] = _as_it_is
    """Wrap a module that is on the first device."""
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]] = _no_block
    """A block in which a wrapped module's gradients stay local; a step's last backward pass is outside."""
    require_reduced: Callable[[nn.Module], None] = _nothing
    """Raise RuntimeError: the last backward pass has left gradients that were not combined over the ranks."""
    note_phases: Callable[[nn.Module, Callable[[Any], None]], None] = _nothing
    """Have a wrapped module say what it does beside its forward pass."""

    def settings_of(self, train: Section) -> Section | None:
        """What it alone is told there."""
        settings: Section | None = getattr(train, self.settings) if self.settings else None
        return settings
