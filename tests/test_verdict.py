"""Verdicts on losses and weights."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from samebits.errors import UserError
from samebits.records import Run
from samebits.verdict import FIRST_STEPS, Tolerance, compare_losses, compare_runs, compare_weights, sentences, worst

TOLERANCE = Tolerance(["fp32"], [{"perturbation": 1, "steps": 3, "losses": [], "weights": {"a": 2.5e-5, "b": 2.5e-5}}])


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
    found = compare_losses([2.0, 1.5, 1.0], losses, Tolerance(["fp32"]))
    assert (found["grade"], found["first_difference"], found["largest_at"], found["first_beyond"]) == (
        grade,
        first,
        at,
        beyond,
    )
    assert found["largest_relative"] == (None if largest is None else pytest.approx(largest, rel=1e-3))
    json.dumps(found, allow_nan=largest is None)


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
    assert (found["grade"], found["different"], found["largest_in"]) == (grade, different, where)
    assert found["largest_relative"] == (None if largest is None else pytest.approx(largest, rel=1e-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8])
def test_every_type_that_a_model_has_is_measured(dtype, tmp_path):
    first, second = torch.tensor([100, 100]).to(dtype), torch.tensor([100, 101]).to(dtype)
    found = compare_weights(save(tmp_path / "x", a=first), save(tmp_path / "y", a=second), Tolerance(["fp32"]))
    assert found["largest_relative"] == pytest.approx(1 / np.linalg.norm([100, 101]), rel=0.01)


def test_a_type_that_cannot_be_measured_is_still_compared(tmp_path):
    first = torch.ones(2).to(torch.float8_e4m3fn)
    same = compare_weights(save(tmp_path / "x", a=first), save(tmp_path / "y", a=first.clone()), Tolerance(["fp32"]))
    other = compare_weights(
        tmp_path / "x", save(tmp_path / "y", a=(first.float() * 2).to(first.dtype)), Tolerance(["fp32"])
    )
    assert (same["grade"], other["grade"], other["largest_relative"]) == ("bitwise", "diverged", None)


@pytest.mark.parametrize(
    ("other", "problem"),
    [({"a": A}, "only one of them has b"), ({"a": A, "b": torch.zeros(3)}, r"b is F32 [2] and F32 [3]")],
)
def test_models_of_different_kinds(other, problem, tmp_path):
    found = compare_weights(save(tmp_path / "x", a=A, b=B), save(tmp_path / "y", **other), TOLERANCE)
    assert (found["grade"], found["problem"]) == ("diverged", problem)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "y").write_bytes(b"no")
    with pytest.raises(UserError, match=r"y: not a safetensors file"):
        compare_weights(save(tmp_path / "x", a=A), tmp_path / "y", TOLERANCE)


def run(folder, losses, weights, **record):
    folder.mkdir()
    save(folder / "model.safetensors", a=weights)
    record = {"strategy": "single", "numerics": "fast", "params": {"train": {"precision": "fp32"}}, **record}
    return Run(folder, record, {}, losses)


def test_two_runs_with_what_differs_between_them(tmp_path):
    first = run(tmp_path / "x", [2.0, 1.0], A, host={"torch": "2.13.0", "gpus": []})
    other = run(tmp_path / "y", [2.0, 1.0], A * (1 + 1e-5), strategy="ddp", host={"torch": "2.14.0", "gpus": []})
    found = compare_runs(first, other)
    assert (found["grade"], found["losses"]["grade"]) == ("within tolerance", "bitwise")
    assert found["differences"] == {"host.torch": ("2.13.0", "2.14.0"), "strategy": ("single", "ddp")}
    assert sentences(found) == [
        "losses: bitwise, all 2 steps",
        "weights: within tolerance: 1 of 1 tensors differ, the largest relative difference is 1e-05 in a, "
        "tolerance there 1",
    ]


TWIN = {
    "perturbation": 2**-18,
    "steps": 6,
    "losses": [[2, 1e-5], [4, 1e-3]],
    "weights": {"a": 0.01, "b": 0.1, "c": 0.02},
}


@pytest.mark.parametrize(
    ("twins", "expected"),
    [
        ([TWIN], [1e-6, 4e-5, 4e-5, 4e-3, 4e-3, 4e-3, 2e-2, 2e-2]),
        ([None, {**TWIN, "steps": 8}], [1e-6, 4e-5, 4e-5, 4e-3, 4e-3, 4e-3, 4e-3, 4e-3]),
        ([TWIN, {**TWIN, "losses": [[1, 1e-3]]}], [4e-3] * 6 + [2e-2] * 2),
        ([], [1e-4] * 8),
    ],
)
def test_the_tolerance_is_what_rounding_did(twins, expected):
    tolerance = Tolerance(["fp32"], twins)
    assert tolerance.losses(8) == pytest.approx(expected)
    assert tolerance.measured == bool(twins)
    expected = {"a": 0.08, "b": 0.4, "other": 0.08} if twins else dict.fromkeys(("a", "b", "other"), 1.0)
    assert tolerance.weights(["a", "b", "other"]) == pytest.approx(expected)


def test_without_a_twin_the_first_steps_are_held_to_more():
    limits = Tolerance(["fp32"]).losses(FIRST_STEPS + 1)
    assert limits == [1e-4] * FIRST_STEPS + [2e-2]


def test_the_coarser_precision_sets_the_tolerance():
    assert Tolerance(["fp32", "bf16"]).losses(9) == Tolerance(["bf16"]).losses(9) > Tolerance(["fp32"]).losses(9)
    assert worst("bitwise", "diverged", "within tolerance") == "diverged"
