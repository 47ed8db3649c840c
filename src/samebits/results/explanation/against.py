"""Two runs beside each other: whether a longer step is a slower training, or has more samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.files import Part
from samebits.results.figures import milliseconds

if TYPE_CHECKING:
    from samebits.records.run import Run


AS_FAST = 0.9
"""Of the samples per second before: a cause of less than a tenth is not named, either."""


class Change(Part):
    """A run over another one: ratios of the samples of a step, of its time, and of samples per second.

    ``batch_grew``: the step takes longer for its samples alone: the training is as fast, or faster.
    """

    samples: float
    step: float
    samples_per_second: float
    batch_grew: bool


def change(run: Run, before: Run) -> Change:
    """How ``run`` differs in speed from the run ``before``."""
    samples = run.record.params.train.global_batch_size / before.record.params.train.global_batch_size
    step = run.timing.step_time_ms / before.timing.step_time_ms
    return Change(
        samples=samples,
        step=step,
        samples_per_second=samples / step,
        batch_grew=samples > 1 and step > 1 and samples / step >= AS_FAST,
    )


def say_change(one: Change, run: Run, before: Run) -> str:
    """The change from the run ``before`` to ``run`` in one sentence."""
    steps = f"{milliseconds(run.timing.step_time_ms)} in place of {milliseconds(before.timing.step_time_ms)}"
    text = f"Against {before.name}, a step takes {one.step:.2f} times as long ({steps})"
    if one.samples == 1:
        return f"{text}, for as many samples: {one.samples_per_second:.2f} times the samples per second."
    conclusion = "the batch grew, not a sample's time" if one.batch_grew else "compare samples per second, not steps"
    return (
        f"{text}, but has {one.samples:g} times the samples: {one.samples_per_second:.2f} times the samples per "
        f"second; {conclusion}."
    )
