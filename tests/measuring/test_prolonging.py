"""When slices are repeated once more, and that all ranks do the same."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from samebits.measuring import slices as timing
from samebits.measuring.prolonging import MOST_REPEATS, Prolonging, notes_of, why_stop
from samebits.measuring.slices import time_slices
from samebits.records.measurement import Repeats
from samebits.remarks import Prolonged, Unrepeated
from samples import ratio
from trainables import train_from_start

WIDE, NARROW = ratio(2.0, 1.8, 2.2), ratio(2.0, 1.92, 2.08)


@pytest.mark.parametrize(
    ("known", "changes", "expected"),
    [
        (NARROW, {}, "narrow"),
        (NARROW, {"limit": 0.0}, "narrow"),
        (NARROW, {"count": 1}, None),  # what differs between repeats is not in it
        (NARROW, {"count": 1, "limit": 0.0}, "off"),
        (WIDE, {}, None),
        (WIDE, {"limit": 0.0}, "off"),
        (WIDE, {"spent": 7.9}, None),
        (WIDE, {"spent": 8.1}, "limit"),  # the next would take 2 s
        (WIDE, {"longest": 11.0}, "limit"),
        (WIDE, {"count": MOST_REPEATS}, "most"),
        (None, {}, None),  # a single pair
        (None, {"limit": 0.0}, "off"),
    ],
)
def test_why_no_repeat_follows(known, changes, expected):
    assert why_stop(known, **{"count": 2, "spent": 0.0, "longest": 2.0, "limit": 10.0, **changes}) == expected


def asked(planned, limit, known, *, seconds=2.0):
    """How often ``Prolonging`` wants more, on a clock that a repeat moves by some seconds, and what it then says."""
    now = 100.0
    prolonging = Prolonging(planned, limit, lambda: now)
    answers = iter(known)
    wants = True
    while wants:
        now += seconds
        wants = prolonging.wants_more(None if known == [None] else partial(next, answers))
    return prolonging.result()


@pytest.mark.parametrize(
    ("planned", "limit", "known", "expected"),
    [
        (2, 10.0, [NARROW], {"planned": 2, "count": 2, "prolonged_seconds": 0, "stopped": "narrow"}),
        (2, 10.0, [WIDE, WIDE, NARROW], {"count": 4, "prolonged_seconds": 4, "half_width": 0.04, "stopped": "narrow"}),
        (2, 10.0, [WIDE] * 9, {"count": 7, "prolonged_seconds": 10, "half_width": 0.1, "stopped": "limit"}),
        (2, 1.9, [WIDE], {"count": 2, "prolonged_seconds": 0, "stopped": "limit"}),
        (3, 0.0, [WIDE], {"planned": 3, "count": 3, "prolonged_seconds": 0, "half_width": 0.1, "stopped": "off"}),
        (2, 10.0, [None], {"count": 2, "half_width": None, "stopped": "no_ratio"}),
    ],
)  # fmt: skip
def test_a_measurement_is_prolonged_until_it_is_narrow_or_the_limit_spent(planned, limit, known, expected):
    found = asked(planned, limit, known).model_dump()
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_an_interval_of_one_repeat_is_noted():
    once = Repeats(planned=1, count=1, prolonged_seconds=0.0, half_width=0.01, stopped="off")
    assert notes_of(once) == [Unrepeated()]
    assert notes_of(once.model_copy(update={"half_width": None, "stopped": "no_ratio"})) == []


@pytest.mark.parametrize(
    ("count", "stopped", "noted"), [(2, "narrow", 0), (2, "limit", 0), (5, "narrow", 1), (5, "limit", 1)]
)
def test_that_it_was_prolonged_is_noted(count, stopped, noted):
    repeats = Repeats(planned=2, count=count, prolonged_seconds=6.04, half_width=0.05, stopped=stopped)
    note = Prolonged(planned=2, count=count, prolonged_seconds=6.04, known=stopped == "narrow")
    assert notes_of(repeats) == [note] * noted
    assert notes_of(None) == []


class PlantedClock:
    """A clock of slices, which makes up the seconds of each chunk: 1, with some noise."""

    def __init__(self, noise):
        self._rng, self._noise = np.random.default_rng(0), noise

    def __call__(self, device):
        seconds = float(np.exp(self._rng.normal(0, self._noise)))
        return SimpleNamespace(seconds=seconds, start=lambda: None, lap=lambda: None, stop=lambda: None)


@pytest.fixture
def timed(trainable, monkeypatch):
    """Slices of a small training with planted times, on a host where a repeat takes 1 s."""

    def run(noise, *, limit, planned=2, steps=8, names=("single",), **ranks):
        made = trainable().trainable
        losses = train_from_start(made, steps).losses
        for name, value in ranks.items():
            monkeypatch.setattr(made.worker.ranks, name, value)
        monkeypatch.setattr(timing, "StepClock", PlantedClock(noise))
        others = {name: trainable().trainable for name in names}
        prolonging = Prolonging(planned, limit, partial(next, itertools.count()))
        return time_slices(made, others, list(names), losses, step_seconds=0.05, prolonging=prolonging)

    return run


@pytest.mark.parametrize(
    ("noise", "limit", "names", "stopped", "counts"),
    [
        (0.001, 50.0, ("single",), "narrow", range(2, 3)),
        (0.1, 500.0, ("single",), "narrow", range(3, 40)),
        (0.8, 12.0, ("single",), "limit", range(14, 15)),
        (0.8, 0.0, ("single",), "off", range(2, 3)),
        (0.8, 50.0, ("fast",), "no_ratio", range(2, 3)),
        (0.8, 50.0, (), "no_ratio", range(2, 3)),
    ],
)
def test_a_noisy_host_is_measured_for_longer(noise, limit, names, stopped, counts, timed):
    slices = timed(noise, limit=limit, names=names)
    assert slices.repeats.stopped == stopped
    assert slices.repeats.count in counts
    assert {len(repeats) for repeats in slices.seconds.values()} == {slices.repeats.count}
    assert slices.measurement([1.0]).repeats == slices.repeats
    assert slices.repeats.half_width == (slices.speedup().half_width if "single" in names else None)
    assert slices.problem is None


def test_a_single_pair_tells_nothing_and_two_do(timed):
    slices = timed(0.1, limit=0.0, planned=1, steps=1)
    assert (slices.speedup(), slices.problem.kind, slices.repeats.half_width) == (None, "one_pair", None)
    slices = timed(0.001, limit=50.0, planned=1, steps=1)
    assert (slices.problem, slices.repeats.count > 1, slices.speedup().half_width < 0.05) == (None, True, True)


@pytest.mark.parametrize("repeats", [1, 4])
def test_a_rank_does_what_rank_0_decides(repeats, timed):
    """Its own clock and noise would have it stop elsewhere."""
    told = iter([True] * (repeats - 1) + [False])

    def max_over_ranks(values):
        if values == [False]:  # no problem, or no wish of its own
            asked.append(values)
            return [float(next(told)) if len(asked) % 2 == 0 else 0.0]
        return values

    asked = []
    slices = timed(0.8, limit=5.0, rank=1, max_over_ranks=max_over_ranks)
    assert (len(slices.seconds["strategy"]), slices.repeats) == (repeats, None)
    assert list(told) == []


def test_a_reference_that_fails_prolongs_nothing(timed):
    """On whichever rank it was."""
    answers = iter([True, False])  # after each repeat: somebody's memory ran out; then rank 0's wish

    def max_over_ranks(values):
        return [float(next(answers))] if values == [False] else [float(value) for value in values]

    slices = timed(0.8, limit=500.0, max_over_ranks=max_over_ranks, planned=1)
    assert (slices.problem.kind, slices.repeats.count, slices.repeats.stopped) == ("no_memory", 1, "no_ratio")
    assert set(slices.seconds) == {"strategy"}
