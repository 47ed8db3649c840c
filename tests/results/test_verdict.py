"""Verdicts on losses and weights."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from samebits.errors import UserError
from samebits.records.run import Rounding, Run, TwinLoss
from samebits.remarks import BatchLoss, MixedSamples
from samebits.results.verdict import (
    FIRST_STEPS,
    Tolerance,
    Verdict,
    WeightsVerdict,
    compare_losses,
    compare_runs,
    compare_weights,
    settings_that_differ,
    worst,
)
from samebits.results.verdict_text import say_comparison, sentences
from samples import host, placed, run_record, timing

TOLERANCE = Tolerance(["fp32"], [Rounding(perturbation=1, steps=3, losses=(), weights={"a": 2.5e-5, "b": 2.5e-5})])


@pytest.mark.parametrize(
    ("losses", "grade", "first", "largest", "at", "beyond"),
    [
        ([2.0, 1.5, 1.0], "bitwise", None, 0.0, None, None),
        ([2.0, 1.5, 1.0 + 5e-5], "within tolerance", 3, 5e-5, 3, None),
        ([2.0 + 1e-5, 1.5, 1.0], "within tolerance", 1, 5e-6, 1, None),
        ([2.0, 1.5 + 1e-5, 2.0], "diverged", 2, 0.5, 3, 3),
        ([4.0, 3.0, 1.0], "diverged", 1, 0.5, 1, 1),
        ([2.0, math.nan, 1.0], "diverged", 2, None, 2, 2),
        ([2.0, 1.5], "diverged", None, 0.0, None, None),
    ],
)
def test_losses(losses, grade, first, largest, at, beyond):
    verdict = compare_losses([2.0, 1.5, 1.0], losses, Tolerance(["fp32"]))
    assert (verdict.grade, verdict.first_difference, verdict.largest_at, verdict.first_beyond) == (
        grade,
        first,
        at,
        beyond,
    )
    assert verdict.largest_relative == (None if largest is None else pytest.approx(largest, rel=1e-3))
    json.dumps(verdict.model_dump(mode="json"), allow_nan=False)


def test_a_loss_that_is_not_finite_is_said_to_be_so():
    verdict = Verdict(
        grade="diverged",
        losses=compare_losses([2.0, 1.5], [2.0, math.nan], Tolerance(["fp32"])),
        weights=WeightsVerdict(grade="bitwise", tolerance=1.0, tensors=1),
    )
    assert sentences(verdict)[0].startswith(
        "losses: diverged: first at step 2 of 2, 1.5 and not finite, beyond a tolerance of 0.0001"
    )


def save(path, **tensors):
    save_file(tensors, path)
    return path


A, B = torch.tensor([3.0, 4.0]), torch.zeros(2)


@pytest.mark.parametrize(
    ("other", "grade", "different", "largest", "where"),
    [
        ({"a": A, "b": B}, "bitwise", 0, 0.0, None),
        ({"a": A + 1e-4, "b": B}, "within tolerance", 1, 1.414e-4 / 5, "a"),
        ({"a": A, "b": B + 1e-9}, "diverged", 1, 1.0, "b"),
        ({"a": A * 2, "b": B}, "diverged", 1, 0.5, "a"),
        ({"a": A, "b": -B}, "within tolerance", 1, 0.0, "b"),  # the sign of zero is a bit like any other
        ({"a": A / 0, "b": B}, "diverged", 1, None, "a"),
    ],
)
def test_weights(other, grade, different, largest, where, tmp_path):
    found = compare_weights(save(tmp_path / "x", a=A, b=B), save(tmp_path / "y", **other), TOLERANCE)
    assert (found.grade, found.different, found.largest_in) == (grade, different, where)
    assert found.largest_relative == (None if largest is None else pytest.approx(largest, rel=1e-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8])
def test_every_type_that_a_model_has_is_measured(dtype, tmp_path):
    first, second = torch.tensor([100, 100]).to(dtype), torch.tensor([100, 101]).to(dtype)
    found = compare_weights(save(tmp_path / "x", a=first), save(tmp_path / "y", a=second), Tolerance(["fp32"]))
    assert found.largest_relative == pytest.approx(1 / np.linalg.norm([100, 101]), rel=0.01)


def test_a_type_that_cannot_be_measured_is_still_compared(tmp_path):
    first = torch.ones(2).to(torch.float8_e4m3fn)
    same = compare_weights(save(tmp_path / "x", a=first), save(tmp_path / "y", a=first.clone()), Tolerance(["fp32"]))
    other = compare_weights(
        tmp_path / "x", save(tmp_path / "y", a=(first.float() * 2).to(first.dtype)), Tolerance(["fp32"])
    )
    assert (same.grade, other.grade, other.largest_relative) == ("bitwise", "diverged", None)


@pytest.mark.parametrize(
    ("other", "problem"),
    [({"a": A}, "only one of them has b"), ({"a": A, "b": torch.zeros(3)}, r"b is F32 [2] and F32 [3]")],
)
def test_models_of_different_kinds(other, problem, tmp_path):
    found = compare_weights(save(tmp_path / "x", a=A, b=B), save(tmp_path / "y", **other), TOLERANCE)
    assert (found.grade, found.problem) == ("diverged", problem)
    losses = compare_losses([2.0, 1.5], [2.0], Tolerance(["fp32"]))
    said = sentences(Verdict(grade="diverged", losses=losses, weights=found))
    assert said[0].endswith("; the first 1 are the same bits")
    assert said[1] == f"weights: diverged: {problem}"


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "y").write_bytes(b"no")
    with pytest.raises(UserError, match=r"y: not a safetensors file"):
        compare_weights(save(tmp_path / "x", a=A), tmp_path / "y", TOLERANCE)


def run(folder, losses, weights, strategy="single", **record):
    folder.mkdir()
    save(folder / "model.safetensors", a=weights)
    return Run(folder, run_record(strategy, **record), timing(), losses)


def test_two_runs_with_what_differs_between_them(tmp_path):
    first = run(tmp_path / "x", [2.0, 1.0], A, host=host(torch="2.13.0"))
    other = run(tmp_path / "y", [2.0, 1.0], A * (1 + 1e-5), host=host(torch="2.14.0\nbitwise"))
    verdict, differences = compare_runs(first, other), settings_that_differ(first, other)
    assert (verdict.grade, verdict.losses.grade) == ("within tolerance", "bitwise")
    assert differences == {"host.torch": ("2.13.0", "2.14.0\nbitwise")}
    weights = (
        "weights: within tolerance: 1 of 1 tensors differ, the largest relative difference is 1e-05 in a, "
        "tolerance there 1"
    )
    assert sentences(verdict) == ("losses: bitwise, all 2 steps", weights)
    assert say_comparison(verdict, differences).splitlines() == [
        "≈ within tolerance",
        "  losses: bitwise, all 2 steps",
        f"  {weights}",
        "what differs between the two",
        "  host.torch: 2.13.0 | 2.14.0\\nbitwise",
    ]


@pytest.mark.parametrize(
    ("beside", "grade", "judged"),
    [
        ({}, "diverged", "diverged"),
        ({"batch_norms": ("BatchNorm1d in model.1",)}, "not comparable", None),
        ({"notes": (BatchLoss(part="device", samples=4, batch=8),)}, "not comparable", None),
        ({"notes": (MixedSamples(part="device", difference=0.1),)}, "not comparable", None),
    ],
)
def test_the_same_draws_judge_runs_that_only_draws_can_set_apart(beside, grade, judged, tmp_path):
    record = {"draws": ("Dropout in model.2",), **beside}
    first = run(tmp_path / "x", [2.0, 1.0], A, same_draws=(2.0, 1.0), **record)
    two = placed("ddp", gpus=0, cores=2)[0]
    other = run(tmp_path / "y", [2.0, 1.5], A * 3, "ddp", same_draws=(2.0, 1.5), placement=two, **record)
    verdict = compare_runs(first, other)
    assert (verdict.grade, verdict.same_draws and verdict.same_draws.grade) == (grade, judged)


def twin(*points, steps=6):
    losses = tuple(TwinLoss(step=step, difference=difference) for step, difference in points)
    return Rounding(perturbation=2**-18, steps=steps, losses=losses, weights={"a": 0.01, "b": 0.1, "c": 0.02})


TWIN = twin((2, 1e-5), (4, 1e-3))


@pytest.mark.parametrize(
    ("twins", "expected"),
    [
        ([TWIN], [1e-6, 4e-5, 4e-5, 4e-3, 4e-3, 4e-3, 2e-2, 2e-2]),
        ([None, twin((2, 1e-5), (4, 1e-3), steps=8)], [1e-6, 4e-5, 4e-5, 4e-3, 4e-3, 4e-3, 4e-3, 4e-3]),
        ([TWIN, twin((1, 1e-3))], [4e-3] * 6 + [2e-2] * 2),
        ([], [1e-4] * 8),
    ],
)
def test_the_tolerance_is_what_rounding_did(twins, expected):
    tolerance = Tolerance(["fp32"], twins)
    assert tolerance.losses(8) == pytest.approx(expected)
    shown = max((one.steps for one in twins if one), default=0)
    assert [tolerance.is_measured(step) for step in range(1, 9)] == [step <= shown for step in range(1, 9)]
    expected = {"a": 0.08, "b": 0.4, "other": 0.08} if twins else dict.fromkeys(("a", "b", "other"), 1.0)
    assert tolerance.weights(["a", "b", "other"]) == pytest.approx(expected)


def test_without_a_twin_the_first_steps_are_held_to_more():
    limits = Tolerance(["fp32"]).losses(FIRST_STEPS + 1)
    assert limits == [1e-4] * FIRST_STEPS + [2e-2]


def test_the_coarser_precision_sets_the_tolerance():
    assert Tolerance(["fp32", "bf16"]).losses(9) == Tolerance(["bf16"]).losses(9) > Tolerance(["fp32"]).losses(9)
    assert worst("bitwise", "diverged", "within tolerance") == "diverged"


@pytest.mark.attack("a malicious server")
def test_a_twin_with_very_many_points_blocks_nothing():
    """Their order is its own business: the largest difference up to a step counts."""
    points = [TwinLoss(step=1 + number % 40_000, difference=0.1) for number in range(40_000)]
    twin = Rounding(perturbation=1, steps=40_000, losses=(TwinLoss(step=2, difference=0.2), *points), weights=None)
    assert Tolerance(["fp32"], [twin]).losses(200_000)[:3] == [0.4, 0.8, 0.8]
