"""The largest batch from two looks: lines by device, and the first that is full."""

import pytest

from samebits.doctor.fitting import Forecast, largest_batch
from samebits.doctor.memory_trial import StepMemory
from samples import memory


def step(samples, peaks, rooms):
    return StepMemory(memory=memory(samples=samples), peaks=peaks, rooms=rooms)


@pytest.mark.parametrize(
    ("small", "large", "rooms", "expected"),
    [
        # 10 bytes a sample on top of 100: 700 are left for 70 more than 20
        ((200,), (300,), [1000], Forecast(90, 0)),
        ((200,), (300,), [1009], Forecast(90, 0)),
        ((200,), (300,), [250], Forecast(15, 0)),  # less than what was measured
        ((200,), (300,), [50], Forecast(0, 0)),
        ((300,), (300,), [1000], None),  # no line rises
        ((300,), (200,), [1000], None),
        # of dp: the first device gathers, and is full first
        ((250, 50), (400, 100), [1000, 1000], Forecast(60, 0)),
        # but not where the others have less
        ((250, 50), (400, 100), [1000, 200], Forecast(40, 1)),
        ((300, 50), (300, 100), [1000, 200], Forecast(40, 1)),
    ],
)
def test_the_device_that_is_full_first_sets_the_batch(small, large, rooms, expected):
    assert largest_batch(step(10, small, rooms), step(20, large, rooms)) == expected


def test_two_looks_at_one_batch_say_nothing():
    with pytest.raises(AssertionError, match="two different batches"):
        largest_batch(step(10, (1,), [1]), step(10, (2,), [1]))
