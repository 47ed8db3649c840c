"""A run that MLflow does not know, told again from its files: after a restored run cache, or in a new clone."""

from __future__ import annotations

import calendar
import itertools
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from samebits.records import Run

RESTORED_TAG = "restored"
SEGMENT_MS = 500  # about as often as a training hands its losses over


def started_ms(run: Run) -> int:
    """When the run began, from its key; from its file's time where the key does not say."""
    stamp = "-".join(str(run.record["run"]).split("-")[:2])
    try:
        return calendar.timegm(time.strptime(stamp, "%Y%m%d-%H%M%S")) * 1000
    except ValueError:
        return int((run.folder / "run.json").stat().st_mtime * 1000)


RESTORED = {RESTORED_TAG: "recorded again from the run's files", "git_commit": "unavailable: recorded from files"}


def events(run: Run, tags: Mapping[str, str] = RESTORED) -> Iterator[dict[str, Any]]:
    """The events of a finished run, in the order and nearly at the times at which they were logged.

    Learning rates are not among a run's files, nor is what the working tree was.
    """
    record, began = run.record, started_ms(run)
    names = ("run", "strategy", "numerics", "placement", "params")
    yield {"event": "start", "time_ms": began, **{name: record[name] for name in names}, "tags": dict(tags)}
    yield {"event": "setup", "time_ms": began, "host": record["host"], "data": record["data"], "data_dir": "data"}
    ends = list(itertools.accumulate(record["measurement"]["step_ms"]))
    first = 1
    for segment, steps in itertools.groupby(ends, key=lambda milliseconds: int(milliseconds // SEGMENT_MS)):
        losses = run.losses[first - 1 : first - 1 + len(list(steps))]
        when = began + (segment + 1) * SEGMENT_MS
        yield {"event": "losses", "time_ms": when, "first_step": first, "losses": losses, "learning_rates": []}
        first += len(losses)
    ended = began + round(ends[-1])
    yield {
        "event": "result",
        "time_ms": ended,
        "run": record["run"],
        "timing": run.timing,
        "out_dir": str(run.folder.resolve()),
        "weights_sha256": record["weights_sha256"],
    }
    yield {"event": "end", "time_ms": ended, "status": "FINISHED"}
