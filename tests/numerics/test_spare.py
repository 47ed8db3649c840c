"""Memory of dropped gradients is lent again, and to nobody else while somebody has it."""

import pytest
import torch

import exact_probe
from samebits.numerics.exact import spare
from samebits.numerics.exact.engine import EagerDispatchMode, below
from samebits.numerics.exact.spare import SpareMemory

SHAPE = torch.Size((2, 3))


@pytest.fixture
def small(monkeypatch):
    """Memory of any size is lent."""
    monkeypatch.setattr(spare, "_LARGE", 0)


@pytest.mark.usefixtures("small")
def test_what_is_given_back_is_lent_again():
    memory = SpareMemory()
    first, other = memory.numbers(SHAPE), memory.numbers(SHAPE)
    place = first.data_ptr()
    memory.give_back(torch.ones(SHAPE, dtype=torch.float64))  # of somebody else
    assert memory.numbers(SHAPE).data_ptr() not in (place, other.data_ptr())
    memory.give_back(first.detach())
    memory.give_back(first)  # is known no longer
    with below.watched_by(EagerDispatchMode()):
        assert memory.numbers(SHAPE).data_ptr() != place
    assert memory.numbers(torch.Size((3, 2))).data_ptr() != place
    assert memory.numbers(SHAPE).data_ptr() == place
    assert memory.numbers(SHAPE).data_ptr() != place


def test_small_memory_is_left_to_the_allocator():
    memory = SpareMemory()
    memory.give_back(memory.numbers(SHAPE))
    assert not memory._lent
    assert not memory._back


@pytest.mark.usefixtures("small")
def test_weights_lie_where_those_of_the_step_before_lay_unless_somebody_has_these():
    memory, weight = SpareMemory(), torch.ones(SHAPE, dtype=torch.float64)
    first = memory.values("weight", weight)
    place, part = first.data_ptr(), first[0]
    del first
    assert memory.values("weight", weight).data_ptr() != place  # a part of them is held
    assert part.tolist() == [1.0] * 3
    del part
    place = memory.values("weight", weight).data_ptr()
    again = memory.values("weight", weight.mul_(2.0))
    assert (again.data_ptr(), again.dtype, again.tolist()) == (place, torch.float32, [[2.0] * 3] * 2)
    del again
    assert memory.values("other", weight).data_ptr() != place
    assert memory.values("weight", torch.ones(3, 2)).shape == (3, 2)
    with below.watched_by(EagerDispatchMode()):
        assert memory.values("weight", torch.ones(3, 2)).data_ptr() != memory._values["weight"].data_ptr()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_training_has_the_same_bits(splits, monkeypatch):
    """Also where several micro-batches of a step have gradients at a time."""
    expected, taken, numbers = exact_probe.train("mlp", splits=splits), [], SpareMemory.numbers
    monkeypatch.setattr(spare, "_LARGE", 0)

    def watched(memory, shape):
        had = len(memory._back)
        found = numbers(memory, shape)
        taken.append(had - len(memory._back))
        return found

    monkeypatch.setattr(SpareMemory, "numbers", watched)
    assert exact_probe.train("mlp", splits=splits) == expected
    assert 0 < sum(taken) < len(taken)
