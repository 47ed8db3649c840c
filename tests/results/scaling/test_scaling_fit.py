"""The cost model, its fit, and projections, on points whose coefficients are known."""

import math
import random

import pytest

from samebits.errors import UserError
from samebits.results.scaling.assemble import held_out, project
from samebits.results.scaling.fit import LEAST_ERROR, Point, fit, over
from samebits.results.scaling.model import BACKWARD_SHARE, Coefficients, Step, columns_with_overlap, costs, is_longer
from samebits.results.scaling.network import parse_network

LINK = Coefficients(fixed=1e-3, per_row=1e-5, contention=1e-4, contention_per_row=5e-7, per_byte=1e-9, latency=2e-4)
BYTES = 4_000_000


def gradients(messages=1, size=BYTES):
    return Step(devices=1, rows=0, bytes=size, messages=messages)


def step(devices, rows, *, messages=1, size=BYTES):
    return Step(devices=devices, rows=rows, bytes=size, messages=messages, sharing=devices)


def measured(by, *steps, noise=0.0, seed=0):
    draw = random.Random(seed)
    return [
        Point(**one.model_dump(), seconds=costs(by, one).seconds * (1 + draw.uniform(-noise, noise))) for one in steps
    ]


def steps_of(*devices, batch=1024, messages=1):
    """What a scaling run measures: strong, weak, and with few samples."""
    found = [Step(devices=1, rows=batch)]
    for n in devices:
        for rows in (batch // n, batch, 16):
            shared = Step(devices=n, rows=rows, sharing=n)
            found += [Step(devices=1, rows=rows), shared, step(n, rows, messages=messages)]
        found.append(Step(devices=1, rows=n * batch))
    return found


def test_a_step_by_hand():
    by = Coefficients(fixed=1, per_row=2, contention=3, contention_per_row=4, per_byte=5, latency=6, overlap=0.5)
    found = costs(by, Step(devices=4, rows=10, bytes=8, messages=2, sharing=3))
    assert found.compute == 1 + 20 + 2 * (3 + 40)
    assert found.communication == 5 * 8 * 6 / 4 + 6 * 2 * 3 * 2
    assert found.hidden == pytest.approx(0.5 * 0.5 * 20 * BACKWARD_SHARE)  # backward is the shorter
    assert found.seconds == found.compute + found.communication - found.hidden


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        (Step(devices=1, rows=10), 21.0),
        (Step(devices=1, rows=10, bytes=100), 21.0),  # nobody to send to
        (Step(devices=2, rows=10), 21.0),  # each by itself, on a host of its own
        (Step(devices=2, rows=10, sharing=2), 24.0),
        (Step(devices=2, rows=0, bytes=100), 100.0),  # an all-reduce alone
        (Step(devices=4, rows=0, bytes=100), 150.0),
        (Step(devices=4, rows=0, bytes=100, messages=7), 150.0),  # and nothing to hide it behind
    ],
)
def test_what_is_in_a_step(one, seconds):
    assert costs(Coefficients(fixed=1, per_row=2, contention=3, per_byte=1, overlap=1), one).seconds == seconds


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("messages", [1, 4])
@pytest.mark.parametrize("rows", [1, 1000])
def test_the_columns_are_the_model(overlap, messages, rows):
    by = LINK.model_copy(update={"overlap": overlap})
    one = step(4, rows, messages=messages)
    row = columns_with_overlap(one, overlap, longer=is_longer(by, one))
    values = (by.fixed, by.per_row, by.contention, by.contention_per_row, by.per_byte, by.latency)
    assert sum(a * b for a, b in zip(row, values, strict=True)) == pytest.approx(costs(by, one).seconds)


PLANTED = [
    LINK,
    LINK.model_copy(update={"contention": 0.0, "contention_per_row": 0.0}),
    LINK.model_copy(update={"latency": 0.0, "per_byte": 1e-8}),
    LINK.model_copy(update={"fixed": 0.0, "per_row": 1e-4}),
]


@pytest.mark.parametrize("by", PLANTED)
def test_planted_coefficients_are_found(by):
    found = fit(measured(by, *steps_of(2, 4)))
    assert found.coefficients.model_dump() == pytest.approx(by.model_dump(), rel=1e-6, abs=1e-15)
    assert max(map(abs, found.residuals)) < 1e-9
    assert found.scatter == LEAST_ERROR  # no clock is better


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by", PLANTED)
def test_noise_of_two_percent_leaves_projections_within_their_ranges(by, seed):
    found = fit(measured(by, *steps_of(2, 4), noise=0.02, seed=seed))
    assert 0.004 < found.scatter < 0.03
    for devices in (8, 16):
        for rows in (1024 // devices, 1024):
            truth, estimate = costs(by, step(devices, rows)).seconds, found.estimate(step(devices, rows))
            assert estimate.low < truth < estimate.high
            assert estimate.low < estimate.median < estimate.high


def test_no_coefficient_is_negative():
    """Noise may make devices faster together than alone."""
    faster = LINK.model_copy(update={"contention": -5e-4, "contention_per_row": 0.0})
    found = fit(measured(faster, *steps_of(2, 4)))
    values = [value for one in found.candidates for value in one.coefficients.model_dump().values()]
    assert min(values) == 0.0
    assert max(found.residuals) > 0.01


def test_overlap_is_found_where_an_all_reduce_alone_was_measured_too():
    by = LINK.model_copy(update={"overlap": 0.75, "per_byte": 2e-9})
    alone = [step(2, 0, size=size) for size in (100_000, BYTES)]
    found = fit(measured(by, *steps_of(2, messages=8), *alone))
    assert found.coefficients.model_dump() == pytest.approx(by.model_dump(), rel=1e-6)


def test_what_two_devices_do_not_tell_is_a_range():
    """Two devices that sent one size of gradients: it may all be latency, or all bandwidth."""
    by = LINK.model_copy(update={"contention": 0.0, "contention_per_row": 0.0})
    found = fit(measured(by, *steps_of(2)))
    estimate = found.estimate(step(8, 1024))
    least, most = (
        costs(by.model_copy(update=update), step(8, 1024)).seconds
        for update in ({"per_byte": 1e-9 + 4e-4 / BYTES, "latency": 0.0}, {"per_byte": 0.0, "latency": 2.2e-3})
    )
    assert estimate.low < least < most < estimate.high
    assert found.range_of("latency")[0] == 0.0
    assert found.range_of("latency")[1] == pytest.approx(2.2e-3, rel=0.02)


def test_an_all_reduce_of_another_size_tells_it():
    by = LINK.model_copy(update={"contention": 0.0, "contention_per_row": 0.0})
    alone = [step(2, 0, size=size) for size in (4_000, 400_000, BYTES)]
    found = fit(measured(by, *steps_of(2), *alone))
    assert found.coefficients.latency == pytest.approx(by.latency, rel=1e-3)
    estimate = found.estimate(step(8, 1024))
    assert estimate.high < 1.1 * estimate.low
    assert estimate.median == pytest.approx(costs(by, step(8, 1024)).seconds, rel=1e-3)


def test_too_few_points_are_refused():
    alone = measured(LINK, Step(devices=1, rows=8), Step(devices=1, rows=16), Step(devices=1, rows=32))
    for points in (alone, alone[:1], measured(LINK, step(2, 8), step(2, 16))):
        with pytest.raises(UserError, match=r"points, expected at least 3.* hint: measure more"):
            fit(points)


@pytest.mark.parametrize(
    ("text", "speed", "latency"),
    [
        ("400Gb/s,5us", 50e9, 5e-6),
        ("50GB/s, 5 us", 50e9, 5e-6),
        ("12.5 MB/s,0ns", 12.5e6, 0.0),
        ("100Mbit/s,1.5ms", 12.5e6, 1.5e-3),
        ("100Mbps,0.001s", 12.5e6, 1e-3),
        ("8kb/s,2µs", 1e3, 2e-6),
        ("3Tb/s,20us", 375e9, 20e-6),
        ("7B/s,1s", 7.0, 1.0),
    ],
)
def test_a_network_is_read(text, speed, latency):
    found = parse_network(text)
    assert (found.bytes_per_second, found.latency_seconds) == pytest.approx((speed, latency))
    assert " " not in found.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got '', expected a bandwidth, a comma and a latency"),
        ("400Gb/s", "got '400Gb/s', expected a bandwidth, a comma and a latency"),
        ("400,5us", "got '400', expected a bandwidth such as 400Gb/s. hint: b is bits and B is bytes"),
        ("400G/s,5us", "got '400G/s', expected a bandwidth"),
        ("400Gb,5us", "got '400Gb', expected a bandwidth"),
        ("400gb/s,5us", "got '400gb/s', expected a bandwidth"),
        ("-4Gb/s,5us", "got '-4Gb/s', expected a bandwidth"),
        ("0Gb/s,5us", "got '0Gb/s', expected a bandwidth above 0"),
        ("1e400Gb/s,5us", "got '1e400Gb/s', expected a bandwidth above 0"),
        ("400Gb/s,5", "got '5', expected a latency such as 5us"),
        ("400Gb/s,5us,1", "got '5us,1', expected a latency"),
        ("400Gb/s,1e400s", "got '1e400s', expected a latency below 1000000 s"),
        ("5us,400Gb/s", "got '5us', expected a bandwidth"),
    ],
)
def test_a_network_that_is_none_is_refused(text, message):
    with pytest.raises(UserError) as caught:
        parse_network(text)
    assert str(caught.value).startswith(f"--network: {message}")


def test_a_ring_waits_for_its_slowest_link():
    slow, fast = parse_network("1Gb/s,1ms"), parse_network("400Gb/s,1us")
    assert over(LINK, None) == LINK
    assert over(LINK, fast) == LINK
    assert over(LINK, slow) == LINK.model_copy(update={"per_byte": 8e-9, "latency": 1e-3})


def test_what_is_given_of_a_network_has_no_error_of_the_fit():
    found = fit(measured(LINK, *steps_of(2, 4), noise=0.02))
    estimate = found.estimate(step(64, 16), parse_network("4Gb/s,400us"))
    assert math.log(estimate.high / estimate.low) < 1.25 * 4 * found.scatter


def test_a_projection_says_what_it_is():
    found = fit(measured(LINK, *steps_of(2, 4)))
    slow = parse_network("1Gb/s,1ms")
    alone = costs(LINK, Step(devices=1, rows=1024)).seconds
    arguments = {"batch": 1024, "gradients": gradients(), "per_host": 4, "network": slow, "alone": alone}
    strong, weak = (project(found, 16, scaling=name, **arguments) for name in ("strong", "weak"))
    assert (strong.kind, strong.rows, weak.rows) == ("projection", 64, 1024)
    assert strong.network == weak.network == "1Gb/s,1ms"
    for one, rows, factor in ((strong, 64, 1), (weak, 1024, 16)):
        beyond = Step(devices=16, rows=rows, bytes=BYTES, sharing=4)
        truth = costs(over(LINK, slow), beyond).seconds
        assert one.step_ms.median == pytest.approx(1e3 * truth)
        assert one.speedup.median == pytest.approx(factor * alone / truth)
        assert one.speedup.low < one.speedup.median < one.speedup.high
    within = project(found, 4, scaling="strong", **arguments)
    assert within.network is None  # the devices of one host
    assert within.step_ms.median == pytest.approx(1e3 * costs(LINK, step(4, 256)).seconds)


def test_a_number_of_devices_that_was_held_out():
    points = measured(LINK, *steps_of(2, 4, 8))
    trainings = [("strong", point) for point in points if point.bytes and point.rows == 1024 // point.devices]
    found = list(held_out(points, trainings))
    assert [one.devices for one in found] == [2, 4, 8]
    assert max(abs(one.error) for one in found) < 1e-6
    slower = [p.model_copy(update={"seconds": 2 * p.seconds}) if p.devices == 8 else p for p in points]
    (last,) = held_out(slower, [("strong", p) for p in slower if p.devices == 8][:1])
    assert last.error == pytest.approx(-0.5)


def test_nothing_is_held_out_of_one_number_of_devices():
    points = measured(LINK, *steps_of(2))
    assert list(held_out(points, [("strong", point) for point in points if point.bytes])) == []
