"""The speed of one run against another: a longer step is no slower training if it has more samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.files import Part
from samebits.results.figures import milliseconds

if TYPE_CHECKING:
    from samebits.records.run import Run


AS_FAST = 0.9
"""Share of the former samples per second that counts as no slower. Causes below a tenth are not named either."""


class Change(Part):
    """Ratios of a run to another one: samples of a step, time of a step, and samples per second.

    ``batch_grew`` says that the step takes longer only because it has more samples.
    """

    samples: float
    step: float
    samples_per_second: float
    batch_grew: bool


def change(run: Run, before: Run) -> Change:
    """The change in speed from the run ``before`` to ``run``."""
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
