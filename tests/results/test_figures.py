"""Figures for people: digits, units, and ratios with their interval."""

import pytest

from samebits.results.figures import (
    duration,
    fine_percent,
    flops,
    gain,
    joules,
    share,
    three_digits,
    times,
    times_of,
    wall_seconds,
)
from samples import ratio


@pytest.mark.parametrize(
    ("say", "said"),
    [
        (three_digits, {0.1234: "0.123", 99.96: "100", 999.4: "999", 999.7: "1000", 12345.6: "12346"}),
        (fine_percent, {0.0: "0%", 6e-8: "0.000006%", 3.14e-5: "0.0031%", 0.0279: "2.8%", 0.0996: "10%",
                        1.234: "120%"}),
        (share, {None: "–", 0.214: "21%", 1.04: "104%", 0.032: "3.2%", 0.0000021: "0.00021%"}),
        (joules, {None: "–", 0.5: "0.5 J", 12.345: "12.3 J", 1234.5: "1.23 kJ", 4_567_000.0: "4.57 MJ"}),
        (duration, {2: "2 s", 0.0123: "12.3 ms", 4.567e-6: "4.57 us", 1e-8: "10 ns", 1e-12: "0.001 ns"}),
        (wall_seconds, {12345.67: "12345.67", 1.5: "1.50", 0.9999: "1.00", 0.5: "0.500", 0.01043: "0.0104",
                        9.5e-6: "0.00000950"}),
        (flops, {0.000021: "0.021 GFLOP/s", 0.0031: "3.1 GFLOP/s", 0.077: "77 GFLOP/s", 0.21: "210 GFLOP/s",
                 1.0: "1 TFLOP/s", 41.7: "42 TFLOP/s", 988.4: "988 TFLOP/s"}),
    ],
)  # fmt: skip
def test_a_figure_has_the_digits_and_the_unit_that_fit(say, said):
    assert {value: say(value) for value in said} == said


def test_a_rate_has_the_unit_of_the_one_beside_it():
    assert (flops(0.65, 1.2), flops(1.3, 0.9)) == ("0.65 TFLOP/s", "1300 GFLOP/s")


@pytest.mark.parametrize(
    ("value", "text", "shown"),
    [
        (None, "–", ""),
        (ratio(1.0), "1.00x", ""),
        (ratio(2, 1.5, 3), "2.00x (1.50–3.00)", ""),
        (ratio(0.9, 0.8, 0.99), "0.90x (0.80–0.99)", ""),
        (ratio(1.02, 0.98, 1.05), "1.02x (0.98–1.05)", ", no difference shown"),
        (ratio(1.1, 1.0, 1.2), "1.10x (1.00–1.20)", ", no difference shown"),
        (ratio(0.9, 0.8, 1.0), "0.90x (0.80–1.00)", ", no difference shown"),
    ],
)
def test_a_ratio_has_its_interval_and_may_show_no_difference(value, text, shown):
    assert (times(value), gain(value)) == (text, text + shown)


def test_a_ratio_in_a_sentence():
    assert times_of(ratio(2.0), "the speed") == "2.00 times the speed"
    assert times_of(ratio(1.02, 0.98, 1.05), "the speed") == "1.02 times the speed (0.98 to 1.05)"
