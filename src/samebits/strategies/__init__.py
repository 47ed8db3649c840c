"""The strategies by which a training uses several devices. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from samebits.strategies.ddp import DDP
from samebits.strategies.dp import DP
from samebits.strategies.single import SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from samebits.strategies.interface import Strategy

    StrategyName = str

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (SINGLE, DP, DDP)}
"""All strategies by name; every list has this order."""

BASELINE = SINGLE
"""The strategy that every ratio compares with."""


def any_has_ranks(names: Iterable[StrategyName]) -> bool:
    """Whether some of the strategies train by ranks."""
    return any(STRATEGIES[name].has_ranks for name in names)


if not TYPE_CHECKING:
    StrategyName = Literal[tuple(STRATEGIES)]
