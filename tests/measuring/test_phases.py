"""The marked pass in this process, and what it is made of."""

import itertools
import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest
import torch

from patience import patient
from samebits.measuring.bounds import gradient_bytes
from samebits.measuring.phases import TURNS, Twins, break_down, one_thread
from samebits.measuring.tracing import OperationCounter
from samebits.records.breakdown import Launches
from samebits.training import meters
from samebits.training.meters import PhaseClock, Queue, ignore_phase

CPU = torch.device("cpu")
ALONE = Twins(alone=None, half=None, traced=lambda _: None)


def divide(made, twins=ALONE, *, total_steps=8):
    return break_down(made, twins, total_steps=total_steps, step_seconds=0.02)


def test_a_step_is_divided_and_left_as_it_was(trainable):
    made = trainable(grad_accum_steps=2).trainable
    divided = divide(made)
    assert (divided.steps, len(divided.plain_ms), len(divided.noted_ms)) == (3, TURNS, TURNS)
    (rank,) = divided.ranks
    assert all(min(turn.data, turn.forward, turn.backward, turn.optimizer) > 0 for turn in rank.noted)
    assert all(turn.scatter == turn.replicate == turn.gather == 0 for turn in rank.noted)
    assert (rank.alone, divided.traffic, divided.bounds.all_reduces, divided.reads.count) == ((), None, (), 0)
    assert made.notes is ignore_phase


def test_phases_add_up_to_the_step(trainable, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(meters.Queue, "seconds", lambda queue: 0.0)
    divided = divide(trainable(grad_accum_steps=2).trainable)
    (rank,) = divided.ranks
    assert sum(turn.total for turn in rank.noted) == pytest.approx(sum(divided.noted_ms), rel=0.2)


def test_half_a_batch_takes_its_turns(trainable):
    made = trainable().trainable
    divided = divide(made, Twins(alone=None, half=made, traced=lambda _: None), total_steps=2)
    assert (len(divided.bounds.half_ms), divided.steps) == (TURNS, 2)  # a turn is no longer than the training


def test_reads_of_the_forward_pass_are_counted_and_no_others(trainable, monkeypatch):
    made = trainable().trainable
    forward, backward = made.numerics.forward, made.numerics.backward

    def reading(module, batch):
        outputs = forward(module, batch)
        return outputs + 0 * (outputs[0, 0].item() + outputs.sum().item() + bool(outputs[0, 0] > 0))

    def reading_later(loss):
        loss.item()
        backward(loss)

    monkeypatch.setattr(made.numerics, "forward", reading)
    monkeypatch.setattr(made.numerics, "backward", reading_later)
    reads = divide(made).reads
    assert reads.count == 3
    assert reads.ms > 0


def test_launches_are_counted_by_where_they_come_from(trainable):
    """Twice as many micro-batches launch forward and backward twice, and the optimizer once."""
    once, twice = (divide(trainable(grad_accum_steps=count).trainable).launches for count in (1, 2))
    assert 0 < 2 * once.passes < twice.passes < 3 * once.passes  # sums of gradients are added
    assert 0 < once.rest < twice.rest < 2 * once.rest  # batches are made twice


def test_views_and_allocations_launch_nothing():
    phase = ["forward"]
    with OperationCounter(lambda: phase[0]) as counter:
        ones = torch.ones(4, 4)  # fill_
        torch.empty(3).view(3).t().detach()
        product = ones.t() @ ones[:2].T
        phase[0] = "backward"
        product + 1
        phase[0] = "optimizer"
        with torch.profiler.record_function("noted"):
            product.mul_(2).sum().item()
    assert counter.launches() == Launches(passes=3, rest=2)
    assert counter.reads == 0


def test_a_model_that_takes_threads_is_also_held_to_one(trainable, monkeypatch):
    made, asked = trainable().trainable, torch.set_num_threads
    before, forward = torch.get_num_threads(), made.numerics.forward
    seen = []

    def greedy(module, batch):
        torch.set_num_threads(3)
        seen.append(torch.get_num_threads())
        return forward(module, batch)

    monkeypatch.setattr(made.numerics, "forward", greedy)
    torch.set_num_threads(3)
    try:
        divided = divide(made)
    finally:
        asked(before)
    assert len(divided.one_thread_ms) == TURNS
    assert divided.ranks[0].threads == 3
    assert {*seen} == {1, 3}
    assert torch.set_num_threads is asked


def test_one_thread_ends_with_its_block():
    before, asked = torch.get_num_threads(), torch.set_num_threads
    with one_thread():
        torch.set_num_threads(7)
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), torch.set_num_threads) == (before, asked)


def test_gradients_of_what_is_not_trained_are_not_sent(trainable):
    made = trainable().trainable
    whole = sum(p.numel() for p in made.model.parameters())
    first = next(made.model.parameters())
    first.requires_grad_(False)
    assert gradient_bytes(made) == 4 * (whole - first.numel())


# -- clocks ----------------------------------------------------------------------------------------------------


def test_phases_last_until_the_next_one(monkeypatch):
    now = iter([1.0, 1.02, 1.06, 1.07, 1.08])
    monkeypatch.setattr(meters.Queue, "seconds", lambda queue: 0.0)
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = PhaseClock(CPU)
    for phase in ("data", "forward", "host"):
        clock(phase)
    phases = clock.take(2)
    assert (phases.data, phases.forward, phases.total) == pytest.approx((10, 20, 35))
    assert clock.take(1).forward == 0  # what was taken is gone
    clock.close()


def _spin(core, done):
    os.sched_setaffinity(0, {core})
    while not done.is_set():
        pass


def _queued_on(core, sender):
    os.sched_setaffinity(0, {core})
    queue = Queue()
    began, before = time.monotonic(), queue.seconds()
    while time.monotonic() < began + 0.5:
        pass
    queued = queue.seconds() - before
    sender.send((queued, time.monotonic() - began))


def test_waiting_for_a_core_is_told_apart():
    """Four processes share one core: each waits for most of the time."""
    if not os.access("/proc/self/schedstat", os.R_OK):
        pytest.skip("this kernel does not say how long a thread waits for a core")
    core, context = min(os.sched_getaffinity(0)), multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    done = context.Event()
    processes = [context.Process(target=_spin, args=(core, done)) for _ in range(3)]
    processes.append(context.Process(target=_queued_on, args=(core, sender)))
    for process in processes:
        process.start()
    try:
        assert receiver.poll(patient(300))
        queued, seconds = receiver.recv()
    finally:
        done.set()
        for process in processes:
            process.join()
    assert seconds / 4 < queued < seconds


def test_a_queue_that_cannot_be_read_is_empty(monkeypatch):
    def refuse(*_):
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", refuse)
    queue = Queue()
    assert queue.seconds() == 0
    queue.close()
