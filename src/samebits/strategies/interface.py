"""The interface of a strategy: its traits, how it places a training, and how it wraps a module."""

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
"""How the gradients of several ranks are combined."""


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """How one process wraps a module: its ``devices``, and the ``group`` of its ranks, None for all ranks.

    ``settings`` are the strategy's own settings in params.yaml. ``accumulates``: a step has several backward passes.
    ``hook`` replaces the all-reduce of each bucket of gradients.
    """

    devices: Sequence[torch.device]
    settings: Section | None = None
    accumulates: bool = False
    reduction: Reduction = "mean"
    group: ProcessGroup | None = None
    hook: Callable[..., Any] | None = None


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to use several devices. The defaults are those of a training on one device."""

    name: str
    settings: str | None = None
    """The key of ``train`` with the strategy's own settings."""
    place: Callable[[Request], tuple[Placement, BatchSplit]]
    """Choose the devices, the labels of the results, and the split of the batch."""
    has_ranks: bool = False
    """Each device has its own process, perhaps on several machines."""
    gathers: bool = False
    """The first device also holds the outputs of the others."""
    compiles: bool = True
    """``torch.compile`` takes the wrapped module, and CUDA graphs the one inside."""
    not_applied: Mapping[str, NotAppliedKind] = field(default_factory=dict)
    """Settings of ``fast`` without effect under this strategy, each with the reason."""
    prepare: Callable[[Placement, MutableMapping[str, str]], None] = _nothing
    """Change the environment variables of a process before its process group is made."""
    wrap: Callable[[nn.Module, Wrapping], nn.Module] = lambda module, _: module
    """Wrap a module that is on the first device."""
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]] = lambda _: nullcontext()
    """A block in which a wrapped module's gradients stay local; a step's last backward pass is outside of it."""
    require_reduced: Callable[[nn.Module], None] = _nothing
    """Raise RuntimeError: the last backward pass left gradients that are not combined over the ranks."""
    note_phases: Callable[[nn.Module, Callable[[Any], None]], None] = _nothing
    """Have a wrapped module report its phases beside the forward pass."""

    def settings_of(self, train: Section) -> Section | None:
        """The strategy's own settings in ``train``, None if it has none."""
        settings: Section | None = getattr(train, self.settings) if self.settings else None
        return settings
