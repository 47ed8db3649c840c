"""Clocks, statistics, and the timed slices beside a training."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conftest import small
from samebits import timing
from samebits.data.batches import Batches, equal_parts, load_split
from samebits.data.card import read_card
from samebits.measurement import Slices, reference, references, time_slices
from samebits.metrics import percentile, ratios, relative_difference, spread
from samebits.models.build import build_model
from samebits.numerics.fast import FastNumerics
from samebits.params import parse_params
from samebits.placement import place
from samebits.progress import Progress
from samebits.rounding import PERTURBATION, envelope, measure_rounding
from samebits.strategies import make_strategy
from samebits.timing import StepClock
from samebits.trainer import Snapshot, Trainable, train, warm_up

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 95, 3.0), ([1, 2, 3, 4], 50, 2.5), ([4, 1, 3, 2], 0, 1), ([1, 2, 3, 4], 100, 4), ([0, 10], 5, 0.5)],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(1, 1, 0), (0, 0, 0), (1, 2, 0.5), (-1, 1, 2), (0, 1e-30, 1), (math.nan, 1, math.inf), (math.inf, 1, math.inf)],
)
def test_relative_difference(a, b, expected):
    assert relative_difference(a, b) == expected == relative_difference(b, a)


def test_spread_and_ratios():
    assert spread([3, 1, 2]) == {"median": 2, "low": 1, "high": 3}
    assert ratios([2, 9], [1, 3]) == [2, 3]
    with pytest.raises(ValueError, match="zip"):
        ratios([1], [1, 2])


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


def test_speed_up_is_the_median_of_chunks_with_the_range_of_repeats():
    seconds = {"single": [[2.0, 2.0], [3.0, 3.0]], "own": [[1.0, 2.0], [1.0, 1.0]], "share": [[1.0, 1.0], [1.5, 1.5]]}
    slices = Slices(4, 2, seconds, None)
    assert slices.speedup() == {"median": 2.5, "low": pytest.approx(4 / 3), "high": 3.0}
    assert slices.bound() == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert Slices(4, 2, {"own": [[1.0]]}, None).speedup() is None


@pytest.fixture
def trainable(data_dir):
    """A training of 8 steps in this process, with dropout and momentum, so that state has somewhere to hide."""

    def make(**settings):
        model = {"name": "mlp", "kwargs": {"hidden": [16], "dropout": 0.2}}
        params = parse_params(small(model=model, clip_grad_norm=1.0, **settings))
        placement = place("single", params.train, gpus=0, cores=1)
        strategy = make_strategy(placement, params.train)
        card = read_card(data_dir(params) / "card.json")
        data = load_split(data_dir(params), card, "train")
        numerics = FastNumerics(params.train, CPU, card.loss)
        model = build_model(params.model, card, params.seed)
        layout = equal_parts(64, accum=params.train.grad_accum_steps)
        batches = Batches(data, card, seed=0, global_batch_size=64, layout=layout, device=CPU)
        job = Trainable(model, batches, strategy, numerics, params)
        return SimpleNamespace(job=job, params=params, data=data, card=card, numerics=numerics)

    return make


@pytest.mark.parametrize(
    "settings", [{}, {"grad_accum_steps": 4}, {"precision": "fp16"}, {"optimizer": {"name": "adamw"}}]
)
def test_warm_up_trains_nothing(settings, trainable):
    plain, warmed = trainable(**settings).job, trainable(**settings).job
    plain.reset()
    expected = train(plain, 8, step_seconds=1, tracker=Progress("", 8, shown=False)).losses
    before = Snapshot(warmed.model)._values
    assert warm_up(warmed, 5) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, warmed.model.parameters(), strict=True))
    assert train(warmed, 8, step_seconds=1e-4, tracker=Progress("", 8, shown=False)).losses == expected


def test_the_tracker_hears_every_step_once(trainable):
    heard = []
    tracker = SimpleNamespace(losses=lambda *part: heard.append(part))
    job = trainable().job
    job.reset()
    training = train(job, 8, step_seconds=0.2, tracker=tracker)
    assert [(first, len(losses), len(rates)) for first, losses, rates in heard] == [
        (1, 2, 2),
        (3, 2, 2),
        (5, 2, 2),
        (7, 2, 2),
    ]
    assert [loss for _, losses, _ in heard for loss in losses] == training.losses
    assert [rate for _, _, rates in heard for rate in rates] == job.rates(0, 8)
    assert len(training.step_seconds) == 8


def test_slices_repeat_the_training_and_references_do_not_disturb_it(trainable):
    made = trainable()
    untrained = build_model(made.params.model, made.card, made.params.seed)
    made.job.reset()
    training = train(made.job, 8, step_seconds=1, tracker=Progress("", 8, shown=False))
    two = place("ddp", parse_params(small(num_devices=2, oversubscribe=True)).train, gpus=0, cores=2)
    made.job.strategy.placement = two
    made_from = (untrained, made.data, made.card, made.params, "fast", made.job.strategy)
    others = {name: reference(name, *made_from) for name in references(two, "fast")}
    assert {name: job.batches.rows for name, job in others.items()} == {"single": 64, "share": 32}
    slices = time_slices(made.job, others, list(others), training.losses, step_seconds=0.1, repeats=2)
    assert slices.first_difference is None
    assert {name: [len(chunks) for chunks in repeats] for name, repeats in slices.seconds.items()} == {
        "own": [8, 8], "single": [8, 8], "share": [8, 8]
    }  # fmt: skip
    assert slices.speedup()["low"] > 0


def test_a_loss_that_is_not_repeated_is_found(trainable):
    made = trainable()
    made.job.reset()
    losses = train(made.job, 8, step_seconds=1, tracker=Progress("", 8, shown=False)).losses
    losses[5] *= 1 + 1e-7
    assert time_slices(made.job, {}, [], losses, step_seconds=0.01, repeats=1).first_difference == 6


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


def test_the_twin_starts_a_rounding_away_and_leaves_the_training_as_it_was(trainable):
    made = trainable()
    made.job.reset()
    losses = train(made.job, 8, step_seconds=1, tracker=Progress("", 8, shown=False)).losses
    final = Snapshot(made.job.model)
    found = measure_rounding(made.job, losses, final, seed=0, step_seconds=1e-3)
    assert found["steps"] == 8
    assert 0 < found["losses"][-1][1] < 1e-3
    assert set(found["weights"]) == {name for name, _ in made.job.model.named_parameters()}
    assert PERTURBATION / 10 < max(found["weights"].values()) < 1e-2
    assert measure_rounding(made.job, losses, final, seed=0, step_seconds=1e-3) == found
    assert measure_rounding(made.job, losses, final, seed=0, step_seconds=1.0)["steps"] == 3  # no time for more
    made.job.reset()
    assert train(made.job, 8, step_seconds=1, tracker=Progress("", 8, shown=False)).losses == losses


def test_an_envelope_keeps_where_the_difference_rises():
    assert envelope([1.0] * 6, [1.0, 1.1, 1.0, 1.11, 2.0, 1.5]) == [[2, 0.0909], [5, 0.5]]
