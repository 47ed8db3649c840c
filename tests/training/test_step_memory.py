"""What of a step's memory is what, counted on a CPU; the allocator's figures are for ``tests/gpu``."""

import pytest
import torch
from torch import nn

from samebits.host import memory_limit, private_bytes
from samebits.training import memory
from samebits.training.memory import measure_memory

WEIGHTS = 4 * (128 * 16 + 16 + 16 * 10 + 10)
INPUTS = 4 * 128 * 64  # of a batch of 64
SGD, ADAMW = {"name": "sgd", "lr": 0.1, "momentum": 0.9}, {"name": "adamw", "lr": 0.01, "momentum": 0.0}


def look(trainable, **settings):
    """The one device of a training after its first step, and the training."""
    made = trainable(**settings).trainable
    made.reset()
    made.step(0, 0.1)
    taken = measure_memory(made, 64)
    assert (taken.source, taken.samples) == ("counted", 64)
    (device,) = taken.devices
    return device, made


@pytest.mark.parametrize(
    ("optimizer", "accum", "state", "gradients"),
    [
        (SGD, 1, WEIGHTS, 0),  # the peak comes with the loss, before there are any
        (SGD, 2, WEIGHTS, WEIGHTS),  # at the second half they are there
        ({**SGD, "momentum": 0.0}, 1, 0, 0),
        (ADAMW, 1, 2 * WEIGHTS + 4 * 4, 0),  # and a count of steps for each of four parameters
    ],
)
def test_the_parts_of_a_step(optimizer, accum, state, gradients, trainable):
    device, _ = look(trainable, optimizer=optimizer, grad_accum_steps=accum)
    assert (device.weights, device.buffers, device.optimizer, device.gradients) == (WEIGHTS, 0, state, gradients)
    assert 16_000 < device.activations - INPUTS / accum < 24_000  # the batch, and what the layers make of it
    assert device.capacity == memory_limit()
    assert 0.5 * private_bytes() < device.baseline < 1.1 * private_bytes()
    assert device.peak == device.tensors + device.baseline


def test_activations_grow_with_the_batch_and_nothing_else_does(trainable):
    small, _ = look(trainable, global_batch_size=64)
    large, _ = look(trainable, global_batch_size=128)
    grown = {name for name in small.PARTS if name != "baseline" and getattr(large, name) != getattr(small, name)}
    assert grown == {"activations"}
    assert large.activations - small.activations == pytest.approx(small.activations, rel=0.05)


def test_a_worker_has_its_share_of_the_host(trainable, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert look(trainable)[0].capacity == memory_limit() // 4


def test_it_is_one_step_and_leaves_no_hooks(trainable):
    """So that the caller's reset gives the training that it would have been."""
    _, made = look(trainable)
    assert not any(p._post_accumulate_grad_hooks for p in made.model.parameters())
    clean = trainable().trainable
    for one in (made, clean):
        one.reset()
        one.step(0, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), clean.model.parameters(), strict=True))


def test_nothing_is_told_of_a_compiled_module(trainable):
    made = trainable().trainable
    made.module._orig_mod = made.module.model  # as torch.compile leaves it
    assert measure_memory(made, 64) is None


def test_the_counter_follows_storages_and_not_tensors():
    counter = memory._Counter()
    old = torch.zeros(100)
    with counter:
        assert counter.live == 0
        new = torch.zeros(50) + 1  # 50 that are freed and 50 that stay
        assert (counter.live, counter.most) == (200, 400)
        views = [old.view(10, 10).t(), new[3:], new.add_(1), old.mul_(2)]  # no memory of their own
        assert (counter.live, counter.most) == (200, 400)
        del new
        assert counter.live == 200  # a view has it
        views.clear()
        assert (counter.live, counter.most) == (0, 400)
        torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=False)  # has no storage to count


def test_the_counter_sees_what_autograd_saves():
    layer, counter = nn.Linear(10, 1000), memory._Counter()
    inputs = torch.ones(20, 10)
    with counter:
        loss = layer(inputs).relu().sum()
        assert counter.live == 4 * (20 * 1000 + 1)  # what relu gave, which its backward pass needs
        loss.backward()
        del loss
    assert counter.live == sum(p.grad.nbytes for p in layer.parameters())


def test_gradients_count_at_the_moment_of_the_peak_alone():
    now = [0]
    watch = memory._Watch(lambda: now)
    now[0] = 10
    watch.gradient(4)  # the peak was before it
    assert (watch.most, watch.gradients_then) == ([10], 0)
    watch.gradient(4)
    now[0] = 11
    watch.see()
    assert (watch.most, watch.gradients_then) == ([11], 8)
    watch.gradient(4)
    watch.see()  # no more than before
    assert (watch.most, watch.gradients_then) == ([11], 8)


@pytest.mark.parametrize(
    ("number", "most", "expected"),
    [
        (0, 50, {"weights": 10, "buffers": 2, "gradients": 7, "optimizer": 20, "activations": 46, "baseline": 5}),
        (1, 50, {"weights": 10, "buffers": 2, "gradients": 0, "optimizer": 0, "activations": 38, "baseline": 9}),
        (1, 11, {"weights": 0, "buffers": 0, "gradients": 0, "optimizer": 0, "activations": 11, "baseline": 9}),
    ],
    ids=["first", "replica", "without a replica"],
)
def test_the_devices_of_dp(number, most, expected):
    """All but the first have weights during a step alone, and one that got no samples has none."""
    held = object.__new__(memory._Held)
    held._weights, held._buffers, held._optimizer, held._gradients, held._there = 10, 2, 20, 3, [40, 9]
    watch = memory._Watch(lambda: [most, most])
    watch.most, watch.gradients_then = [most, most], 4
    found = held.with_step(number, watch, 100)
    assert found.model_dump(exclude={"capacity"}) == expected
    assert found.capacity == 100
