"""Clocks, statistics, and the timed slices beside a training."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conftest import small
from samebits.errors import UserError
from samebits.measuring import references as references_module
from samebits.measuring import slices as slices_module
from samebits.measuring.prolonging import Prolonging
from samebits.measuring.references import References, copy_of, make_reference, make_references, reference_names
from samebits.measuring.rounding import PERTURBATION, envelope, measure_rounding
from samebits.measuring.slices import Slices, time_slices
from samebits.numerics.fast import FastNumerics
from samebits.params import parse_params
from samebits.records.measurement import Measurement
from samebits.records.run import TwinLoss, relative_difference
from samebits.strategies import STRATEGIES
from samebits.training import meters as timing
from samebits.training.loop import Snapshot, Tracker, train, warm_up
from samebits.training.meters import StepClock
from samebits.training.setup import Setup
from samebits.training.worker import Worker
from samples import placed, ratio
from trainables import train_from_start

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(1, 1, 0), (0, 0, 0), (1, 2, 0.5), (-1, 1, 2), (0, 1e-30, 1), (math.nan, 1, math.inf), (math.inf, 1, math.inf)],
)
def test_relative_difference(a, b, expected):
    assert relative_difference(a, b) == expected == relative_difference(b, a)


def test_the_clock_counts_segments_and_nothing_between_them(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 3.5, 100.0, 104.0, 104.25])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = StepClock(CPU)
    clock.start()
    clock.lap()
    clock.lap()
    assert clock.stop() == 3.5
    clock.start()
    clock.lap()
    clock.stop()
    assert clock.step_seconds == [1.0, 2.0, 4.0]
    assert clock.seconds == 3.5 + 4.25


def test_ratios_are_taken_within_chunks():
    seconds = {
        "single": [[2.0, 20.0], [3.0, 3.0]],
        "strategy": [[1.0, 10.0], [1.0, 1.0]],
        "share": [[1.0, 10.0], [1.5, 1.5]],
    }
    slices = Slices(steps=4, chunk_steps=2, seconds=seconds)
    assert slices.speedup().median == pytest.approx(6**0.5)  # of 2, 2, 3, 3
    assert slices.speedup().low < 2 < 3 < slices.speedup().high
    assert slices.bound() == ratio(2.0)
    assert Slices(steps=4, chunk_steps=2, seconds={"strategy": [[1.0, 2.0]]}).speedup() is None


@pytest.mark.parametrize(
    "settings", [{}, {"grad_accum_steps": 4}, {"precision": "fp16"}, {"optimizer": {"name": "adamw"}}]
)
def test_warm_up_trains_nothing(settings, trainable):
    plain, warmed = trainable(**settings).trainable, trainable(**settings).trainable
    expected = train_from_start(plain).losses
    before = Snapshot(warmed.model)._values
    assert warm_up(warmed, 5, seconds=0.01) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, warmed.model.parameters(), strict=True))
    assert train(warmed, 8, step_seconds=1e-4, tracker=Tracker()).losses == expected


def test_a_warm_up_lasts_until_all_ranks_have_had_their_seconds(trainable):
    """Each time from the initial state, so that no model diverges in it that the training would not make diverge."""
    one = trainable().trainable
    heard, steps, step = iter([True, True, False]), [], one.step
    one.worker.ranks.any_rank = lambda holds: next(heard)
    one.step = lambda number, rate: steps.append(number) or step(number, rate)
    warm_up(one, 3)
    assert steps == [0, 1, 2], "a CPU asks nobody"
    warm_up(one, 3, seconds=1e-9)
    assert steps == [0, 1, 2] * 4


def test_the_tracker_hears_every_step_once(trainable):
    heard, begun = [], []
    tracker = SimpleNamespace(losses=lambda *part: heard.append(part), step=begun.append)
    trained = trainable().trainable
    training = train_from_start(trained, step_seconds=0.2, tracker=tracker)
    parts = [(first, len(losses), len(rates)) for first, losses, rates in heard]
    assert parts == [(1, 2, 2), (3, 2, 2), (5, 2, 2), (7, 2, 2)]
    assert begun == list(range(1, 9))
    assert [loss for _, losses, _ in heard for loss in losses] == training.losses
    assert [rate for _, _, rates in heard for rate in rates] == trained.rates(0, 8)
    assert len(training.step_seconds) == 8


def timed(trainable, others, losses, *, repeats=2, step_seconds=0.05):
    """Slices of a training and of its references, which are not prolonged."""
    prolonging = Prolonging(repeats, 0.0)
    return time_slices(trainable, others, list(others), losses, step_seconds=step_seconds, prolonging=prolonging)


def chunks_of(slices):
    """How many chunks each repeat has, by name."""
    return {name: [len(chunks) for chunks in repeats] for name, repeats in slices.seconds.items()}


def beside(made, strategy="ddp", *, numerics="fast", gpus=0, worker=None, **settings):
    """What makes references, with the set-up of a training under a strategy in place of the one that was made."""
    params = parse_params(small(num_devices=2, oversubscribe=True, **settings))
    placement, split = placed(strategy, params, gpus=gpus, numerics=numerics)
    setup = Setup(params, numerics, made.card, split=split, worker=worker or made.trainable.worker)
    return {"untrained": made.untrained, "data": made.data, "setup": setup, "placement": placement}


def test_slices_repeat_the_training_and_references_do_not_disturb_it(trainable):
    made = trainable()
    losses = train_from_start(made.trainable).losses
    how = beside(made)
    others = {name: make_reference(name, **how) for name in reference_names(how["placement"], "fast")}
    rows = {name: len(one.batches.micro_batch(0, 0).inputs) for name, one in others.items()}
    assert rows == {"single": 64, "share": 32, "together": 32}
    slices = timed(made.trainable, others, losses)
    assert slices.first_difference is None
    assert chunks_of(slices) == {name: [8, 8] for name in ("strategy", "single", "share", "together")}
    assert slices.speedup().low > 0


@pytest.mark.parametrize(
    ("step_seconds", "most", "steps", "chunk", "chunks"), [(0.05, 8, 8, 1, 8), (0.1, 2, 5, 2, 3), (9.0, 8, 1, 1, 1)]
)
def test_a_slice_has_the_steps_of_half_a_second_but_no_more_than_the_training(
    step_seconds, most, steps, chunk, chunks, trainable, monkeypatch
):
    monkeypatch.setattr(slices_module, "CHUNKS", most)
    made = trainable().trainable
    slices = timed(made, {}, train_from_start(made).losses, repeats=1, step_seconds=step_seconds)
    assert (slices.steps, slices.chunk_steps, chunks_of(slices)) == (steps, chunk, {"strategy": [chunks]})


@pytest.mark.parametrize(
    ("least", "steps", "chunk", "chunks"), [(0.01, 8, 1, 8), (0.03, 24, 3, 8), (0.11, 88, 11, 8), (0.0, 8, 1, 8)]
)
def test_a_slice_whose_chunks_would_be_short_begins_the_training_again(
    least, steps, chunk, chunks, trainable, monkeypatch
):
    """On a GPU, where a training may be over in less time than a chunk should take. Its losses are the same again."""
    monkeypatch.setattr(slices_module, "CHUNK_SECONDS", {"cpu": least})
    made = trainable()
    losses = train_from_start(made.trainable).losses
    others = {"single": make_reference("single", **beside(made))}
    asked, run = [], made.trainable.run
    made.trainable.run = lambda start, rates, clock: asked.append((start, len(rates))) or run(start, rates, clock)
    slices = timed(made.trainable, others, losses, repeats=1, step_seconds=0.01)
    assert (slices.steps, slices.chunk_steps, slices.first_difference) == (steps, chunk, None)
    assert chunks_of(slices) == {"strategy": [chunks], "single": [chunks]}
    assert [start % 8 for start, count in asked for start in range(start, start + count)] == [*range(8)] * (steps // 8)
    assert all(start + count <= 8 for start, count in asked)
    Measurement.model_validate_json(slices.measurement([0.01]).model_dump_json())
    losses[5] *= 1 + 1e-7
    assert timed(made.trainable, {}, losses, repeats=1, step_seconds=0.01).first_difference == 6


def test_a_slice_on_a_gpu_is_as_long_as_its_warm_steps_say(trainable, monkeypatch):
    """Clocks have fallen while references were made; then a step would be thought slower than it is."""
    made, warm = trainable(repeats=2), []
    losses = train_from_start(made.trainable).losses
    monkeypatch.setattr(slices_module, "WARM_UP_SECONDS", {"cpu": 1.5})
    monkeypatch.setattr(slices_module, "warm_up", lambda one, steps, *, seconds: warm.append((one, seconds)) or 0.25)
    measured = slices_module.measure_slices(made.trainable, References(), losses, made.params.train, step_seconds=0.05)
    assert (warm, measured.steps) == ([(made.trainable, 1.5)], 2)


@pytest.mark.parametrize(("lacks", "names"), [("single", ("share", "together")), ("share", ()), ("together", ())])
def test_a_reference_with_the_whole_batch_that_does_not_fit_leaves_the_others(lacks, names, trainable, monkeypatch):
    """Also what a batch is too large for on one device is divided into its parts, and weak scaling is timed."""
    made, real = trainable(repeats=3, prolong_s=0.0), make_reference
    monkeypatch.setattr(
        references_module, "make_reference", lambda name, **kw: None if name == lacks else real(name, **kw)
    )
    references = make_references(**beside(made, repeats=3))
    assert (references.names, tuple(references.here), references.problem.kind) == (names, names, "no_memory")
    if names:
        losses = train_from_start(made.trainable).losses
        slices = slices_module.measure_slices(made.trainable, references, losses, made.params.train, step_seconds=0.05)
        assert (slices.problem.kind, slices.speedup(), slices.bound()) == ("no_memory", None, None)
        assert slices.seconds.keys() == {"strategy", *names}


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("CUDA error: out of memory")])
@pytest.mark.parametrize("which", ["single", "share"])
def test_a_reference_that_runs_out_of_memory_later_costs_the_references_alone(error, which, trainable):
    def fail(*_):
        raise error

    made = trainable().trainable
    losses = train_from_start(made).losses
    others = {name: trainable().trainable for name in ("single", "share")}
    steps = iter([others[which].step] * 3 + [fail] * 9)
    others[which].step = lambda *arguments: next(steps)(*arguments)
    slices = timed(made, others, losses)
    assert (slices.problem.kind, chunks_of(slices)) == ("no_memory", {"strategy": [8, 8]})
    made.step = fail
    with pytest.raises(type(error), match="out of memory"):
        timed(made, {}, losses)


def switches():
    return (
        torch.get_deterministic_debug_mode(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def test_a_fast_reference_runs_under_its_own_switches(trainable):
    """The price of exact is not that of a fast training with exact's attention kernels, and without its determinism."""
    seen = {"exact": set(), "fast": set()}

    def watched(one, name):
        step = one.step
        one.step = lambda *arguments: seen[name].add(switches()) or step(*arguments)
        return one

    made = trainable()
    how = beside(made, "single", numerics="exact", worker=Worker([CPU]))
    setup = how["setup"]
    setup.numerics.configure()
    try:
        exact = setup.trainable(setup.place(copy_of(made.untrained)), setup.batches(made.data))
        fast = make_reference("fast", **how)
        losses = train_from_start(exact, 2).losses
        timed(watched(exact, "exact"), {"fast": watched(fast, "fast")}, losses, repeats=1, step_seconds=0.1)
    finally:
        made.setup.numerics.configure()
        torch.set_deterministic_debug_mode("default")
    assert seen == {"exact": {(0, False, False, False, False)}, "fast": {(2, True, True, True, True)}}


def accelerated_references(made, found, **settings):
    """For each strategy the references of which ``found``, a list that making one may add to, has an entry."""
    by_strategy = {}
    for strategy in ("dp", "ddp"):
        parallel = Worker([CPU])
        parallel.compiles = STRATEGIES[strategy].compiles
        by_strategy[strategy] = []
        for name in ("single", "share"):
            found.clear()
            make_reference(name, **beside(made, strategy, gpus=2, worker=parallel, **settings))
            by_strategy[strategy] += [name] * len(found)
    return by_strategy


def test_a_reference_is_compiled_as_what_it_stands_for(trainable, monkeypatch):
    compiled = []
    monkeypatch.setattr(FastNumerics, "compile", lambda self, module: compiled.append(module) or module)
    assert accelerated_references(trainable(), compiled, compile=True) == {"dp": ["single"], "ddp": ["single", "share"]}


def test_a_reference_is_captured_as_what_it_stands_for(trainable, monkeypatch):
    captured = []
    monkeypatch.setattr(FastNumerics, "graphs", True)
    monkeypatch.setattr(FastNumerics, "capture", lambda self, *given: captured.append(given))
    made = trainable()
    ((module, sample, check),) = captured
    assert type(module) is type(made.trainable.module)  # before a strategy wraps it
    assert (sample.step, check.step) == (0, 1)
    assert sample.inputs.shape == check.inputs.shape
    assert accelerated_references(made, captured) == {"dp": ["single"], "ddp": ["single", "share"]}


def test_a_loss_that_is_not_repeated_is_found(trainable):
    made = trainable().trainable
    losses = train_from_start(made).losses
    losses[5] *= 1 + 1e-7
    assert timed(made, {}, losses, repeats=1).first_difference == 6


def test_a_snapshot_covers_buffers_that_are_not_saved():
    model = nn.BatchNorm1d(3)
    model.register_buffer("hidden", torch.zeros(2), persistent=False)
    snapshot = Snapshot(model)
    model(torch.randn(8, 3)).sum().backward()
    model.hidden += 1
    snapshot.restore()
    assert [buffer.tolist() for buffer in model.buffers()] == [[0] * 3, [1] * 3, 0, [0] * 2]
    assert model.weight.grad is None


def test_a_model_that_has_other_tensors_by_now_is_named():
    model = nn.Linear(2, 2)
    snapshot = Snapshot(model)
    model.register_buffer("cache", torch.zeros(3))
    with pytest.raises(UserError, match="forward adds a parameter or buffer to the model"):
        snapshot.restore()


def test_a_model_that_cannot_be_copied_is_named():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(
        UserError, match=r"the model cannot be copied, .*pickle '_thread\.lock' object.* hint: .*train\.rep"
    ):
        copy_of(model)


def test_the_twin_starts_a_rounding_away_and_leaves_the_training_as_it_was(trainable):
    made = trainable().trainable
    losses, final = train_from_start(made).losses, Snapshot(made.model)
    found = measure_rounding(made, losses, final, seed=0, step_seconds=1e-3)
    assert found.steps == 8
    assert 0 < found.losses[-1].difference < 1e-3
    assert set(found.weights) == {name for name, _ in made.model.named_parameters()}
    assert PERTURBATION / 10 < max(found.weights.values()) < 1e-2
    assert measure_rounding(made, losses, final, seed=0, step_seconds=1e-3) == found
    short = measure_rounding(made, losses, final, seed=0, step_seconds=1.0)  # no time for more
    assert (short.steps, short.weights) == (3, None)
    assert train_from_start(made).losses == losses


def test_a_twin_that_diverges_measures_nothing(trainable):
    made = trainable().trainable
    losses, final = train_from_start(made).losses, Snapshot(made.model)
    made.numerics.loss = lambda outputs, targets: outputs.sum() * math.inf
    assert measure_rounding(made, losses, final, seed=0, step_seconds=1e-3) is None


def test_the_weights_of_a_last_update_that_overflows_are_not_compared(trainable):
    made = trainable().trainable
    losses, final = train_from_start(made).losses, Snapshot(made.model)
    final.parameters()[0].fill_(math.inf)
    found = measure_rounding(made, losses, final, seed=0, step_seconds=1e-3)
    assert (found.steps, found.weights) == (8, None)


def test_an_envelope_keeps_where_the_difference_rises():
    assert envelope([1.0] * 6, [1.0, 1.1, 1.0, 1.11, 2.0, 1.5]) == (
        TwinLoss(step=2, difference=0.0909),
        TwinLoss(step=5, difference=0.5),
    )
