"""A progress bar on a terminal; nothing where stderr is not one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.trainer import Tracker


class Progress:
    """A tracker that shows how far a training is, if it is ``shown``, and passes everything on to ``following``."""

    def __init__(self, name: str, total_steps: int, following: Sequence[Tracker] = (), *, shown: bool = True) -> None:
        tqdm.monitor_interval = 0  # no thread beside the training
        self._bar = tqdm(total=total_steps, desc=name, unit="step", disable=None if shown else True, leave=False)
        self._following = following

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Advance by the steps that are done."""
        for tracker in self._following:
            tracker.losses(first_step, losses, learning_rates)
        self._bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
        self._bar.update(len(losses))

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
