"""How honest is the interval of a speed-up? ``python tools/intervals.py`` simulates hosts whose speed-up is known.

It prints, as a table in Markdown, how many of a hundred 95% intervals hold the truth, and half the width of the middle
one in percent of the ratio: for the kit's, and for others that it was chosen from. A measurement is simulated as the
kit takes it: repeats of eight chunks, in each of which four slices take turns. ``--prolonged`` goes on from two repeats
until the interval is narrow enough, as a training does. ``--repeats 1`` has other numbers of repeats.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from pages import row, table
from samebits.params.schema import Train
from samebits.records.statistics import NARROW, RESAMPLES, paired_ratio, resampled_medians

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from samebits.records.run import Ratio

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Interval = tuple[float, float]

TRUTH = 1.5
CHUNKS = 8
SLICES = 4
PLANNED = Train().repeats - 1
NOISE = 0.01  # standard deviation of the logarithm of a chunk's time, on every host
MOST = 12  # repeats of a prolonged measurement


@dataclass(frozen=True)
class Host:
    """A simulated host. ``disturb`` changes the logarithms of the times of a measurement, ``(2, repeats, chunks)``.

    The first of the two is the slice of ``single``, the second that of the strategy.
    """

    name: str
    disturb: Callable[[np.random.Generator, Floats], Floats]

    def measure(self, rng: np.random.Generator, repeats: int) -> tuple[Floats, Floats]:
        """Seconds of both by repeat and chunk. Their undisturbed ratio is ``TRUTH``."""
        logs = self.disturb(rng, rng.normal(0, NOISE, (2, repeats, CHUNKS)))
        single, strategy = np.exp(logs)
        return TRUTH * single, strategy


def _drift(rng: np.random.Generator, logs: Floats) -> Floats:
    """The host loses a tenth of its speed in each repeat and also wanders. Turns rotate as in the kit."""
    _, repeats, chunks = logs.shape
    turns = repeats * chunks * SLICES
    speed = np.cumsum(rng.normal(0.1 / (chunks * SLICES), 0.004, turns)).reshape(repeats * chunks, SLICES)
    number = np.arange(repeats * chunks)
    for which, place in enumerate((1, 0)):  # the strategy comes first, then single
        logs[which] += speed[number, (place - number) % SLICES].reshape(repeats, chunks)
    return logs


def _bursts(rng: np.random.Generator, logs: Floats) -> Floats:
    """Another program runs now and then. A strategy that waits for two devices meets it twice as often."""
    for part, often in zip(logs, (0.1, 0.2), strict=True):
        part += (rng.random(part.shape) < often) * np.log1p(rng.exponential(0.5, part.shape))
    return logs


def _runs(_: np.random.Generator, logs: Floats) -> Floats:
    """Slowness lasts: neighbouring chunks are correlated by 0.6."""
    for chunk in range(1, logs.shape[2]):
        logs[:, :, chunk] = 0.6 * logs[:, :, chunk - 1] + 0.8 * logs[:, :, chunk]
    return logs


def _luck(rng: np.random.Generator, logs: Floats, *, scale: float) -> Floats:
    """Each slice has its own speed, such as by the placement of its threads and memory."""
    logs += rng.normal(0, scale, (2, logs.shape[1], 1))
    return logs


def _tails(rng: np.random.Generator, logs: Floats) -> Floats:
    """Noise of Student's distribution with 2 degrees of freedom, whose variance is infinite."""
    return NOISE * np.asarray(rng.standard_t(2, logs.shape), np.float64)


def _loud(_: np.random.Generator, logs: Floats) -> Floats:
    """Five times the noise."""
    logs *= 5
    return logs


HOSTS = (
    Host("quiet", lambda _, logs: logs),
    Host("loud: five times the noise", _loud),
    Host("heavy tails: Student's t, 2 degrees", _tails),
    Host("drift", _drift),
    Host("bursts", _bursts),
    Host("disturbances that last", _runs),
    Host("a little luck by slice, 0.5%", partial(_luck, scale=0.005)),
    Host("much luck by slice, 2%", partial(_luck, scale=0.02)),
)


def _logs(above: Floats, below: Floats) -> Floats:
    logs: Floats = np.log(above / below)
    return logs


def _ratio(above: Floats, below: Floats) -> Ratio:
    ratio = paired_ratio(above.tolist(), below.tolist())
    assert ratio
    return ratio


def the_kits(above: Floats, below: Floats) -> Interval:
    """Nested percentile bootstrap of the median, widened."""
    ratio = _ratio(above, below)
    return ratio.low, ratio.high


def range_of_repeats(above: Floats, below: Floats) -> Interval:
    """No interval: the smallest and the largest ratio of a repeat."""
    values = above.sum(axis=1) / below.sum(axis=1)
    return float(values.min()), float(values.max())


def percentile(above: Floats, below: Floats, *, whole_repeats: bool) -> Interval:
    """Percentile bootstrap of the median, not widened."""
    low, high = np.exp(np.percentile(resampled_medians(_logs(above, below), whole_repeats=whole_repeats), (2.5, 97.5)))
    return float(low), float(high)


def accelerated(above: Floats, below: Floats) -> Interval:
    """BCa of the mean without the outer fifths, as if all chunks were independent (Efron 1987)."""
    from statistics import NormalDist

    values, normal = _logs(above, below).ravel(), NormalDist()
    drawn = _trimmed(values[np.random.default_rng(0).integers(0, values.size, (RESAMPLES, values.size))])
    left_out = np.array([_trimmed(np.delete(values, i)) for i in range(values.size)])
    away = left_out.mean() - left_out
    acceleration = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    share = np.clip(np.mean(drawn < _trimmed(values)), 1 / RESAMPLES, 1 - 1 / RESAMPLES)
    bias = normal.inv_cdf(float(share))
    z = [bias + normal.inv_cdf(level) for level in (0.025, 0.975)]
    levels = [100 * normal.cdf(bias + one / (1 - acceleration * one)) for one in z]
    low, high = np.exp(np.percentile(drawn, levels))
    return float(low), float(high)


def _trimmed(values: Floats) -> Floats:
    cut = values.shape[-1] // 5
    trimmed: Floats = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)
    return trimmed


ESTIMATORS: dict[str, Callable[[Floats, Floats], Interval]] = {
    "the kit's": the_kits,
    "range of repeats": range_of_repeats,
    "percentile, chunks": partial(percentile, whole_repeats=False),
    "percentile, nested": partial(percentile, whole_repeats=True),
    "BCa, trimmed mean": accelerated,
}


def coverage(
    host: Host, estimator: Callable[[Floats, Floats], Interval], *, repeats: int, trials: int
) -> tuple[float, float]:
    """The share of intervals that hold the truth, and half the median width over it. Each trial has its own seed."""
    found = [estimator(*host.measure(np.random.default_rng(seed), repeats)) for seed in range(trials)]
    return _judged(found)


def _judged(found: Sequence[Interval]) -> tuple[float, float]:
    held = sum(low <= TRUTH <= high for low, high in found) / len(found)
    return held, median((high - low) / 2 / TRUTH for low, high in found)


def prolonged(host: Host, *, trials: int) -> tuple[float, float, float]:
    """Coverage, half the median width and mean number of repeats of measurements that go on until they are narrow."""
    found, counts = [], []
    for seed in range(trials):
        above, below = host.measure(np.random.default_rng(seed), MOST)
        count, ratio = PLANNED, _ratio(above[:PLANNED], below[:PLANNED])
        while ratio.half_width > NARROW and count < MOST:
            count += 1
            ratio = _ratio(above[:count], below[:count])
        found.append((ratio.low, ratio.high))
        counts.append(count)
    return *_judged(found), sum(counts) / trials


def table_planned(trials: int, counts: Sequence[int] = (PLANNED, 4, 8)) -> Iterator[str]:
    """Coverage and half width of each estimator, by host and repeats."""
    yield from table("host", "repeats", *ESTIMATORS)
    for host in HOSTS:
        for repeats in counts:
            cells = [coverage(host, one, repeats=repeats, trials=trials) for one in ESTIMATORS.values()]
            yield row(host.name, str(repeats), *(f"{held:.0%}, ±{width:.1%}" for held, width in cells))


def table_prolonged(trials: int) -> Iterator[str]:
    """Coverage, half width and repeats of prolonged measurements, by host."""
    yield from table("host", "coverage", "half width", "mean of repeats")
    for host in HOSTS:
        held, width, repeats = prolonged(host, trials=trials)
        yield row(host.name, f"{held:.0%}", f"±{width:.1%}", f"{repeats:.1f}")


def main() -> None:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="measurements of each host")
    parser.add_argument("--prolonged", action="store_true", help="measurements that go on until they are narrow")
    parser.add_argument("--repeats", type=int, nargs="+", default=(PLANNED, 4, 8), help="of a measurement")
    arguments = parser.parse_args()
    trials = arguments.trials
    for line in table_prolonged(trials) if arguments.prolonged else table_planned(trials, arguments.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
