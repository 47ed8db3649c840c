"""What a rank reports while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

from samebits.records.progress import tell
from samebits.training.loop import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.records.log import RunLog
    from samebits.workers.rank import Phase


class Progress(Tracker):
    """Reports the step to the launcher, losses to a log and, if ``shown``, progress on a bar."""

    def __init__(
        self, name: str, total_steps: int, at: Callable[[Phase, int], None], log: RunLog | None, *, shown: bool
    ) -> None:
        tqdm.monitor_interval = 0  # no extra thread
        self._bar = tqdm(total=total_steps, desc=name, unit="step", disable=None if shown else True, leave=False)
        self._at, self._log, self._total = at, log, total_steps

    def step(self, step: int) -> None:
        """Report the step to the launcher, which names it if the rank is lost."""
        self._at("training", step)

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Log the losses and advance the bar."""
        if self._log:
            self._log.losses(first_step, losses, learning_rates)
        self._bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
        self._bar.update(len(losses))
        tell("training, step", first_step + len(losses) - 1, self._total)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.close()
