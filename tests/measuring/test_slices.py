"""Clocks, statistics, and the timed slices beside a training."""

import copy
import math
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conftest import small
from samebits.errors import UserError
from samebits.measuring import references as references_module
from samebits.measuring import slices as slices_module
from samebits.measuring.prolonging import Prolonging
from samebits.measuring.references import copy_of, make_reference, reference_names
from samebits.measuring.rounding import PERTURBATION, envelope, measure_rounding
from samebits.measuring.slices import Slices, time_slices
from samebits.numerics.fast import FastNumerics
from samebits.params import parse_params
from samebits.records.run import TwinLoss, relative_difference
from samebits.strategies import STRATEGIES
from samebits.training import meters as timing
from samebits.training.loop import Snapshot, Tracker, train, warm_up
from samebits.training.meters import StepClock
from samebits.training.models.build import build_model
from samebits.training.setup import Setup
from samebits.training.worker import Worker
from samples import placed, ratio
from trainables import make_trainable

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


@pytest.fixture
def trainable(data_dir):
    return partial(make_trainable, data_dir)


@pytest.mark.parametrize(
    "settings", [{}, {"grad_accum_steps": 4}, {"precision": "fp16"}, {"optimizer": {"name": "adamw"}}]
)
def test_warm_up_trains_nothing(settings, trainable):
    plain, warmed = trainable(**settings).trainable, trainable(**settings).trainable
    plain.reset()
    expected = train(plain, 8, step_seconds=1, tracker=Tracker()).losses
    before = Snapshot(warmed.model)._values
    assert warm_up(warmed, 5) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, warmed.model.parameters(), strict=True))
    assert train(warmed, 8, step_seconds=1e-4, tracker=Tracker()).losses == expected


def test_the_tracker_hears_every_step_once(trainable):
    heard, begun = [], []
    tracker = SimpleNamespace(losses=lambda *part: heard.append(part), step=begun.append)
    trained = trainable().trainable
    trained.reset()
    training = train(trained, 8, step_seconds=0.2, tracker=tracker)
    assert [(first, len(losses), len(rates)) for first, losses, rates in heard] == [
        (1, 2, 2),
        (3, 2, 2),
        (5, 2, 2),
        (7, 2, 2),
    ]
    assert begun == list(range(1, 9))
    assert [loss for _, losses, _ in heard for loss in losses] == training.losses
    assert [rate for _, _, rates in heard for rate in rates] == trained.rates(0, 8)
    assert len(training.step_seconds) == 8


def test_slices_repeat_the_training_and_references_do_not_disturb_it(trainable):
    made = trainable()
    untrained = build_model(made.params.model, made.card, made.params.seed)
    made.trainable.reset()
    training = train(made.trainable, 8, step_seconds=1, tracker=Tracker())
    params = parse_params(small(num_devices=2, oversubscribe=True))
    two, split = placed("ddp", params, gpus=0)
    setup = Setup(made.params, "fast", made.card, split=split, worker=made.trainable.worker)
    others = {
        name: make_reference(name, untrained=untrained, data=made.data, setup=setup, placement=two)
        for name in reference_names(two, "fast")
    }
    rows = {name: len(one.batches.micro_batch(0, 0).inputs) for name, one in others.items()}
    assert rows == {"single": 64, "share": 32, "together": 32}
    slices = time_slices(
        made.trainable, others, list(others), training.losses, step_seconds=0.05, prolonging=Prolonging(2, 0.0)
    )
    assert slices.first_difference is None
    assert {name: [len(chunks) for chunks in repeats] for name, repeats in slices.seconds.items()} == {
        "strategy": [8, 8], "single": [8, 8], "share": [8, 8], "together": [8, 8]
    }  # fmt: skip
    assert slices.speedup().low > 0


@pytest.mark.parametrize(("lacks", "names"), [("single", ("share", "together")), ("share", ()), ("together", ())])
def test_a_reference_with_the_whole_batch_that_does_not_fit_leaves_the_others(lacks, names, trainable, monkeypatch):
    """Also what a batch is too large for on one device is divided into its parts, and weak scaling is timed."""
    made = trainable(repeats=3, prolong_s=0.0)
    two, split = placed("ddp", parse_params(small(num_devices=2, oversubscribe=True)), gpus=0)
    setup = Setup(made.params, "fast", made.card, split=split, worker=made.trainable.worker)
    real = references_module.make_reference
    monkeypatch.setattr(
        references_module, "make_reference", lambda name, **kw: None if name == lacks else real(name, **kw)
    )
    untrained = build_model(made.params.model, made.card, made.params.seed)
    references = references_module.make_references(untrained, made.data, setup, two)
    assert (references.names, tuple(references.here), references.problem.kind) == (names, names, "no_memory")
    if names:
        made.trainable.reset()
        losses = train(made.trainable, 8, step_seconds=1, tracker=Tracker()).losses
        slices = slices_module.measure_slices(made.trainable, references, losses, made.params.train, step_seconds=0.05)
        assert (slices.problem.kind, slices.speedup(), slices.bound()) == ("no_memory", None, None)
        assert slices.seconds.keys() == {"strategy", *names}
    else:
        assert references.here == {}


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("CUDA error: out of memory")])
@pytest.mark.parametrize("which", ["single", "share"])
def test_a_reference_that_runs_out_of_memory_later_costs_the_references_alone(error, which, trainable):
    def fail(*_):
        raise error

    made = trainable()
    made.trainable.reset()
    losses = train(made.trainable, 8, step_seconds=1, tracker=Tracker()).losses
    others = {name: trainable().trainable for name in ("single", "share")}
    steps = iter([others[which].step] * 3 + [fail] * 9)
    others[which].step = lambda *arguments: next(steps)(*arguments)
    slices = time_slices(made.trainable, others, list(others), losses, step_seconds=0.05, prolonging=Prolonging(2, 0.0))
    assert slices.problem.kind == "no_memory"
    assert {name: [len(chunks) for chunks in repeats] for name, repeats in slices.seconds.items()} == {
        "strategy": [8, 8]
    }
    made.trainable.step = fail
    with pytest.raises(type(error), match="out of memory"):
        time_slices(made.trainable, {}, [], losses, step_seconds=0.05, prolonging=Prolonging(2, 0.0))


def switches():
    return (
        torch.get_deterministic_debug_mode(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def test_a_fast_reference_runs_under_its_own_switches(trainable, data_dir):
    """The price of exact is not that of a fast training with exact's attention kernels, and without its determinism."""
    seen = {}

    def watched(one, name):
        step = one.step

        def watching(*arguments):
            seen.setdefault(name, set()).add(switches())
            return step(*arguments)

        one.step = watching
        return one

    made = trainable()
    untrained = build_model(made.params.model, made.card, made.params.seed)
    params = made.params
    placement, split = placed("single", params, numerics="exact", gpus=0)
    setup = Setup(params, "exact", made.card, split=split, worker=Worker([CPU]))
    setup.numerics.configure()
    try:
        exact = setup.trainable(setup.place(copy.deepcopy(untrained)), setup.batches(made.data))
        fast = make_reference("fast", untrained=untrained, data=made.data, setup=setup, placement=placement)
        exact.reset()
        losses = exact.mean_losses(exact.run(0, exact.rates(0, 2), StepClock(CPU)))
        both = {"fast": watched(fast, "fast")}
        time_slices(watched(exact, "exact"), both, ["fast"], losses, step_seconds=0.1, prolonging=Prolonging(1, 0.0))
    finally:
        made.setup.numerics.configure()
        torch.set_deterministic_debug_mode("default")
    assert seen == {"exact": {(0, False, False, False, False)}, "fast": {(2, True, True, True, True)}}


ACCELERATED = {"dp": ["single"], "ddp": ["single", "share"]}


def make_both_references(strategy, made, params, about):
    """The references of a strategy that accelerates models as its own class says; ``about`` hears each name before."""
    untrained = build_model(made.params.model, made.card, made.params.seed)
    placement, split = placed(strategy, params, gpus=2)
    parallel = Worker([CPU])
    parallel.compiles = STRATEGIES[strategy].compiles
    setup = Setup(params, "fast", made.card, split=split, worker=parallel)
    for name in ("single", "share"):
        about(name)
        make_reference(name, untrained=untrained, data=made.data, setup=setup, placement=placement)


def test_a_reference_is_compiled_as_what_it_stands_for(trainable, monkeypatch):
    begun, compiled = [], []
    monkeypatch.setattr(FastNumerics, "compile", lambda self, module: compiled.append(begun[-1]) or module)
    made = trainable()
    params = parse_params(small(compile=True, num_devices=2, oversubscribe=True))
    for strategy, names in ACCELERATED.items():
        make_both_references(strategy, made, params, begun.append)
        assert compiled == names
        compiled.clear()


def test_a_reference_is_captured_as_what_it_stands_for(trainable, monkeypatch):
    begun, captured = ["training"], []
    monkeypatch.setattr(FastNumerics, "graphs", True)
    monkeypatch.setattr(FastNumerics, "capture", lambda self, *given: captured.append((begun[-1], *given)))
    made = trainable()
    assert [name for name, *_ in captured] == ["training"]
    _, module, sample, check = captured.pop()
    assert type(module) is type(made.trainable.module)  # before a strategy wraps it
    assert (sample.step, check.step) == (0, 1)
    assert sample.inputs.shape == check.inputs.shape
    params = parse_params(small(num_devices=2, oversubscribe=True))
    for strategy, names in ACCELERATED.items():
        make_both_references(strategy, made, params, begun.append)
        assert [name for name, *_ in captured] == names
        captured.clear()


def test_a_loss_that_is_not_repeated_is_found(trainable):
    made = trainable()
    made.trainable.reset()
    losses = train(made.trainable, 8, step_seconds=1, tracker=Tracker()).losses
    losses[5] *= 1 + 1e-7
    assert (
        time_slices(made.trainable, {}, [], losses, step_seconds=0.01, prolonging=Prolonging(1, 0.0)).first_difference
        == 6
    )


def test_a_snapshot_covers_buffers_that_are_not_saved():
    model = nn.BatchNorm1d(3)
    model.register_buffer("hidden", torch.zeros(2), persistent=False)
    snapshot = Snapshot(model)
    model(torch.randn(8, 3)).sum().backward()
    model.hidden += 1
    snapshot.restore()
    assert model.hidden.tolist() == [0, 0]
    assert model.running_mean.tolist() == [0, 0, 0]
    assert model.num_batches_tracked == 0
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
    made = trainable()
    made.trainable.reset()
    losses = train(made.trainable, 8, step_seconds=1, tracker=Tracker()).losses
    final = Snapshot(made.trainable.model)
    found = measure_rounding(made.trainable, losses, final, seed=0, step_seconds=1e-3)
    assert found.steps == 8
    assert 0 < found.losses[-1].difference < 1e-3
    assert set(found.weights) == {name for name, _ in made.trainable.model.named_parameters()}
    assert PERTURBATION / 10 < max(found.weights.values()) < 1e-2
    assert measure_rounding(made.trainable, losses, final, seed=0, step_seconds=1e-3) == found
    assert measure_rounding(made.trainable, losses, final, seed=0, step_seconds=1.0).steps == 3  # no time for more
    made.trainable.reset()
    assert train(made.trainable, 8, step_seconds=1, tracker=Tracker()).losses == losses


def test_a_twin_that_diverges_measures_nothing(trainable):
    made = trainable()
    made.trainable.reset()
    losses = train(made.trainable, 8, step_seconds=1, tracker=Tracker()).losses
    final = Snapshot(made.trainable.model)
    made.trainable.numerics.loss = lambda outputs, targets: outputs.sum() * math.inf
    assert measure_rounding(made.trainable, losses, final, seed=0, step_seconds=1e-3) is None


def test_an_envelope_keeps_where_the_difference_rises():
    assert envelope([1.0] * 6, [1.0, 1.1, 1.0, 1.11, 2.0, 1.5]) == (
        TwinLoss(step=2, difference=0.0909),
        TwinLoss(step=5, difference=0.5),
    )
