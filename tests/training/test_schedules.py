"""Learning rates by step: our own schedules, and those of torch.optim.lr_scheduler."""

import math
import warnings
from typing import get_args

import pytest
import torch
from torch.optim import lr_scheduler

from samebits.errors import UserError
from samebits.params.schema import Optimizer, Schedule, ScheduleName, Train
from samebits.training.schedules import LearningRates

STEPS = 40
ALONE = {"cycle_momentum": False}
GIVEN = {
    "StepLR": {"step_size": 7, "gamma": 0.5},
    "MultiStepLR": {"milestones": [3, 9, 30]},
    "ConstantLR": {"factor": 0.5, "total_iters": 4},
    "LinearLR": {"start_factor": 0.1, "total_iters": 10},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"power": 2.5, "total_iters": 30},
    "CosineAnnealingLR": {"T_max": 15, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 6, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 5, "mode": "exp_range", "gamma": 0.97, **ALONE},
    "OneCycleLR": {"max_lr": 0.7, "total_steps": STEPS, **ALONE},
}


def rates(name, warmup_steps=0, steps=STEPS, trained=STEPS, **kwargs):
    schedule = Schedule(name=name, warmup_steps=warmup_steps, kwargs=kwargs)
    of = LearningRates(Train(optimizer=Optimizer(lr=0.3), schedule=schedule), total_steps=trained).of
    return [of(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("step", "schedule", "warmup", "expected"),
    [
        (0, "constant", 0, 1.0),
        (9, "constant", 0, 1.0),
        (0, "constant", 4, 0.25),
        (3, "cosine", 4, 1.0),
        (4, "cosine", 4, 1.0),
        (7, "cosine", 4, 0.5),
        (5, "cosine", 0, 0.5),
        (25, "cosine", 0, 0.0),
    ],
)
def test_a_rate_of_our_own_schedules(step, schedule, warmup, expected):
    train = Train(optimizer=Optimizer(lr=1.0), schedule=Schedule(name=schedule, warmup_steps=warmup))
    got = LearningRates(train, total_steps=10).of(step)
    assert got == pytest.approx(expected, abs=1e-15)


def test_a_schedule_of_ones_own_gives_factors():
    train = Train(optimizer=Optimizer(lr=0.5), schedule=Schedule(name="cosine", warmup_steps=3))
    of = LearningRates(train, 10, lambda step, steps: step / steps).of
    assert [of(0), of(5), of(9)] == [0.0, 0.25, 0.45]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda step: 1.0, "TypeError"),
        (lambda step, steps: None, "TypeError"),
        (lambda step, steps: -1.0, r"it gives -1\.0 at step 2"),
        (lambda step, steps: math.nan, "it gives nan at step 2"),
    ],
)
def test_a_schedule_that_gives_no_factor_is_said(own, message):
    with pytest.raises(UserError, match=f"^schedule: {message}"):
        LearningRates(Train(), 10, own).of(2)


def test_every_schedule_is_tried():
    assert {"constant", "cosine", *GIVEN} == {*get_args(ScheduleName)}


def test_others_of_pytorch_are_left_out_knowingly():
    """They take functions, other schedules, or a metric."""
    classes = {name: cls for name, cls in vars(lr_scheduler).items() if isinstance(cls, type)}
    there = {name for name, cls in classes.items() if issubclass(cls, lr_scheduler.LRScheduler)} - {*GIVEN}
    assert there == {"LRScheduler", "_LRScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler",
                     "ReduceLROnPlateau"}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_rates_are_pytorchs_without_the_c_library(name, monkeypatch):
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.3)
    schedule, expected = getattr(lr_scheduler, name)(optimizer, **GIVEN[name]), []
    for step in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings(action="ignore"):
            schedule.step() if step < STEPS - 1 else None
    monkeypatch.setattr(math, "cos", None)
    monkeypatch.setattr(math, "pow", None)
    assert rates(name, **GIVEN[name]) == pytest.approx(expected, rel=1e-12)
    assert len({*expected}) > 1


def test_a_warm_up_comes_before_and_the_last_rate_stays():
    plain = rates("OneCycleLR", **ALONE, steps=STEPS - 4, trained=STEPS - 4)
    assert rates("OneCycleLR", **ALONE, warmup_steps=4, steps=STEPS + 9) == [
        *(0.3 * (step + 1) / 4 for step in range(4)), *plain, *[plain[-1]] * 9
    ]  # fmt: skip


def test_the_steps_of_epochs_are_those_that_were_asked_for():
    asked = rates("OneCycleLR", epochs=3, steps_per_epoch=STEPS, **ALONE)
    assert asked == rates("OneCycleLR", total_steps=3 * STEPS, **ALONE)


@pytest.mark.parametrize("name", ["LinearLR", "PolynomialLR", "CosineAnnealingLR", "CyclicLR", "OneCycleLR"])
def test_the_training_gives_what_a_schedule_needs_to_know_of_it(name):
    assert len({*rates(name, **(ALONE if "cycle_momentum" in GIVEN[name] else {}))}) > 3


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("StepLR", {}, r"kwargs: StepLR does not take \{\}: .*missing 1 required positional argument: 'step_size'"),
        ("StepLR", {"size": 3}, r"kwargs\.size: unknown key\. hint: StepLR takes step_size, gamma$"),
        (
            "OneCycleLR",
            {"cycle_momentum": False, "pct_start": 3},
            r"kwargs: OneCycleLR does not take \{.*'pct_start': 3\}: Expected float between",
        ),
        ("OneCycleLR", {"cycle_momentum": True}, r"kwargs\.cycle_momentum: OneCycleLR changes the momentum too"),
        (
            "OneCycleLR",
            {**ALONE, "epochs": 3},
            "kwargs: OneCycleLR takes epochs with steps_per_epoch, without steps_per",
        ),
        (
            "CyclicLR",
            {},
            r"kwargs\.cycle_momentum: CyclicLR changes the momentum too unless told",
        ),
        (
            "OneCycleLR",
            {"cycle_momentum": False, "total_steps": STEPS - 1},
            rf"kwargs: OneCycleLR ends after {STEPS - 1} steps, and the training has {STEPS}\. hint: leave",
        ),
    ],
)
def test_an_argument_that_a_schedule_does_not_take_is_named(name, kwargs, message):
    with pytest.raises(UserError, match=rf"train\.schedule\.{message}"):
        rates(name, **kwargs)
