"""Medians, ratios, and whether their intervals hold the truth as often as they say."""

import math

import numpy as np
import pytest

from intervals import CHUNKS, HOSTS, coverage, percentile, prolonged, range_of_repeats, the_kits
from samebits.records.run import Ratio
from samebits.records.statistics import paired_ratio, ratios, spread, student, widening
from samples import ratio

HOST = {host.name.partition(":")[0].partition(",")[0]: host for host in HOSTS}


def test_spread_and_ratios():
    assert spread([3, 1, 2]).model_dump() == {"median": 2, "low": 1, "high": 3}
    assert ratios([2, 9], [1, 3]) == [2, 3]
    with pytest.raises(ValueError, match="zip"):
        ratios([1], [1, 2])


@pytest.mark.parametrize(
    ("low", "high", "holds_one", "half_width"),
    [(0.9, 1.1, True, 0.1), (1.0, 1.2, True, 0.1), (0.8, 1.0, True, 0.1), (1.01, 1.2, False, 0.095),
     (0.5, 0.9, False, 0.2)],
)  # fmt: skip
def test_what_a_ratio_shows(low, high, holds_one, half_width):
    found = Ratio(median=1.0, low=low, high=high)
    assert (found.holds_one, found.half_width) == (holds_one, pytest.approx(half_width))


NOISE = np.exp(np.random.default_rng(5).normal(0, 0.02, (3, CHUNKS)))
ONES = np.ones_like(NOISE)


def of(above, below):
    return paired_ratio(np.asarray(above).tolist(), np.asarray(below).tolist())


@pytest.mark.parametrize(
    ("above", "below", "expected"),
    [
        ([[2.0, 2.0]], [[1.0, 1.0]], ratio(2.0)),  # without noise there is no doubt
        ([[2.0], [4.0]], [[1.0], [2.0]], ratio(2.0)),
        ([[2.0]], [[1.0]], None),
        ([], [], None),
        ([[2.0, 2.0]], [[1.0, 0.0]], None),
        ([[-2.0, 2.0]], [[1.0, 1.0]], None),
    ],
)
def test_ratios_that_are_known(above, below, expected):
    assert of(above, below) == expected


def test_an_interval_follows_from_its_times_alone():
    found = of(NOISE, ONES)
    assert found.low < found.median < found.high
    assert found.median == pytest.approx(np.median(NOISE), rel=1e-3)
    assert of(NOISE, ONES) == found
    upside_down = of(ONES, NOISE)
    assert upside_down.median == pytest.approx(1 / found.median)
    assert upside_down.half_width == pytest.approx(found.half_width, rel=0.25)  # other resamples
    longer = of(7 * NOISE, 2 * ONES)
    assert (longer.median, longer.low) == (pytest.approx(3.5 * found.median), pytest.approx(3.5 * found.low))


def test_repeats_that_differ_count_for_more_than_their_chunks():
    lucky = NOISE * [[0.9], [1.0], [1.1]]
    assert of(lucky, ONES).half_width > 3 * of(NOISE, ONES).half_width
    assert widening(np.log(lucky)) > student(3.0) / student(math.inf)


def test_one_repeat_is_as_sure_as_its_chunks():
    by_chunks = student(CHUNKS - 1) / student(math.inf) * math.sqrt(CHUNKS / (CHUNKS - 1))
    assert widening(np.log(NOISE[:1])) == pytest.approx(by_chunks)


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # of tables; 0.5 is taken for 1
    [(0.5, 12.706), (1, 12.706), (1.1, 10.276), (1.5, 6.017), (2, 4.303), (2.5, 3.575), (5, 2.571), (20, 2.086),
     (120, 1.980), (math.inf, 1.960)],
)  # fmt: skip
def test_students_quantiles(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, rel=0.005)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("quiet", 0.93, 1.0), ("loud", 0.93, 1.0), ("heavy tails", 0.93, 1.0), ("drift", 0.93, 1.0), ("bursts", 0.93, 1.0),
     ("a little luck by slice", 0.88, 0.98), ("much luck by slice", 0.72, 0.95)],
)  # fmt: skip
def test_an_interval_holds_the_truth_as_often_as_is_said(name, least, most):
    """Of two repeats; nothing but more of them tells the luck of a slice."""
    held, _ = coverage(HOST[name], the_kits, repeats=2, trials=150)
    assert least <= held <= most


def test_what_the_interval_replaced_held_it_less_often():
    assert coverage(HOST["quiet"], range_of_repeats, repeats=2, trials=150)[0] < 0.7
    plain, width = coverage(
        HOST["much luck by slice"], lambda a, b: percentile(a, b, whole_repeats=True), repeats=4, trials=150
    )
    kits, wider = coverage(HOST["much luck by slice"], the_kits, repeats=4, trials=150)
    assert plain < kits
    assert width < wider


def test_prolonging_narrows_and_stays_honest():
    held, width, repeats = prolonged(HOST["loud"], trials=100)
    assert (held >= 0.93, width < 0.05, 2 < repeats < 6) == (True, True, True)
    assert prolonged(HOST["quiet"], trials=50)[2] < 2.1
