"""What a step computes, counted, and the roof of its device."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samebits.measuring import roofline
from samebits.measuring.roofline import count_flops, measure_roof, multiply_fast
from samebits.numerics.fast import FastNumerics
from samebits.numerics.interface import MicroBatch
from samebits.params import parse_params

CPU = torch.device("cpu")
LAYERS = ((128, 16), (16, 10))
"""Of the model of ``make_trainable``."""
PER_SAMPLE = sum(2 * 2 * m * n for m, n in LAYERS) + 2 * 16 * 10  # outputs, weights' gradients; no gradient of the data


def with_model(model, *shape, classes=10, **changes):
    """As much of a training as is counted."""
    params = parse_params({"train": {"repeats": 2, **changes}})
    batch = MicroBatch(torch.rand(8, *shape), torch.zeros(8, dtype=torch.int64), 0)
    batches = SimpleNamespace(micro_batch=lambda step, index: batch, micro_batches=1)
    worker = SimpleNamespace(ranks=SimpleNamespace(first_alone=lambda work: work()), device=CPU)
    numerics = FastNumerics(params.train, CPU, "cross_entropy")
    return SimpleNamespace(model=model, batches=batches, numerics=numerics, worker=worker, params=params)


@pytest.mark.parametrize(
    ("settings", "step_seconds"),
    [({}, 1e-3), ({}, 100.0), ({"grad_accum_steps": 4}, 1e-3), ({"precision": "bf16"}, 1e-3)],
)
def test_the_products_of_a_step_are_counted(settings, step_seconds, trainable):
    """All of a global batch, however few rows were tried."""
    made = trainable(**settings).trainable
    assert count_flops(made, 64, step_seconds) == (64 * PER_SAMPLE, ())


def test_counting_leaves_no_gradient_and_the_same_weights(trainable):
    made = trainable().trainable
    before = [p.clone() for p in made.model.parameters()]
    count_flops(made, 64, 1e-3)
    assert all(p.grad is None for p in made.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


def test_attention_counts_on_a_cpu():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            heads = (x * self.scale).unflatten(2, (2, 16)).transpose(1, 2)  # 8 samples, 2 heads, 12 places, 16 numbers
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return mixed.flatten(1)[:, :10]

    one_product = 2 * 12 * 12 * 16
    assert count_flops(with_model(Attention(), 12, 32), 8, 1e-3) == (8 * 2 * (2 + 5) * one_product, ())


class Spectrum(nn.Linear):
    def forward(self, x):
        return super().forward(torch.fft.rfft(x).abs())


@pytest.mark.parametrize(
    ("model", "shape", "uncounted"),
    [
        (Spectrum(33, 10), (64,), ("aten::_fft_r2c",)),
        (nn.Sequential(nn.Linear(16, 10), nn.ReLU(), nn.BatchNorm1d(10)), (16,), ()),
    ],
)
def test_products_without_a_formula_are_named(model, shape, uncounted):
    flops, named = count_flops(with_model(model, *shape), 8, 1e-3)
    assert (flops > 0, named) == (True, uncounted)


def test_a_model_that_cannot_be_counted_is_said():
    class Broken(nn.Linear):
        def forward(self, x):
            raise LookupError("not\nhere")

    made = with_model(Broken(4, 10), 4)
    assert measure_roof(made, made.params.train, 8, 1e-3) == roofline.Roof(problem="LookupError: not")


def test_what_was_counted_stays_where_there_is_no_room_for_a_product(monkeypatch):
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": (2**30,)})
    made = with_model(nn.Linear(4, 10), 4)
    measured = measure_roof(made, made.params.train, 8, 1e-3)
    assert (measured.flops_per_step, measured.roof_flops) == (2 * 2 * 8 * 4 * 10, None)
    assert measured.problem.startswith("RuntimeError: ")


def test_a_training_and_its_roof(trainable, monkeypatch):
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": (32, 64)})
    made = trainable(repeats=2)
    measured = measure_roof(made.trainable, made.params.train, 64, 1e-3)
    assert (measured.flops_per_step, measured.problem) == (64 * PER_SAMPLE, None)
    assert measured.roof_flops > 0


@pytest.mark.parametrize(("settings", "name"), [({"repeats": 1}, "fast"), ({"repeats": 2}, "exact")])
def test_where_nothing_is_measured(settings, name):
    made = with_model(nn.Linear(4, 10), 4, **settings)
    made.numerics.name = name
    assert measure_roof(made, made.params.train, 8, 1e-3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_best_product_counts(dtype, monkeypatch):
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": (16, 32)})
    tried = []

    def seconds(a, b, device, repeats):
        assert a.dtype == b.dtype == dtype
        tried.append((a.shape[0], repeats))
        return repeats * {16: 1e-4, 32: 4e-4}[a.shape[0]]

    monkeypatch.setattr(roofline, "_seconds", seconds)
    assert multiply_fast(CPU, dtype) == pytest.approx(2 * 32**3 / 4e-4)
    assert [repeats for size, repeats in tried if size == 16] == [1, 1, 150, 150]


def test_products_that_raise_the_clocks_of_a_gpu_are_not_timed(monkeypatch):
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": (16,)})
    monkeypatch.setattr(roofline, "WARM_UP_SECONDS", {"cpu": 1.0})
    monkeypatch.setattr(roofline, "_WARM_PRODUCTS", 7)
    now = [0.0]
    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def seconds(a, b, device, repeats):
        spent = repeats * (2e-4 if now[0] >= 1 else 2e-6)  # a time before the end of the warm-up would win
        now[0] += 0.3
        return spent

    monkeypatch.setattr(roofline, "_seconds", seconds)
    assert multiply_fast(CPU, torch.float32) == pytest.approx(2 * 16**3 / 2e-4)


def test_sizes_grow_while_there_is_time(monkeypatch):
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": (16, 32, 64)})
    sizes = []
    monkeypatch.setattr(roofline, "_seconds", lambda a, b, device, repeats: sizes.append(a.shape[0]) or 0.02 * repeats)
    multiply_fast(CPU, torch.float32)
    assert set(sizes) == {16}


def test_a_size_without_room_ends_it(monkeypatch):
    monkeypatch.setattr(roofline, "ROOF_SECONDS", 1e9)  # else a slow host would not come to it
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": (16, 2**30)})
    assert multiply_fast(CPU, torch.float32) > 0
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": (2**30,)})
    with pytest.raises(RuntimeError, match="allocate"):
        multiply_fast(CPU, torch.float32)


def test_counting_does_not_import_the_compiler():
    """Which would take a second of every training."""
    code = """
import sys, torch
from torch import nn
from samebits.measuring.roofline import _Counter
with _Counter() as counter:
    nn.Linear(4, 2)(torch.ones(3, 4)).sum().backward()
print(counter.flops, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(2 * (3 * 4 * 2 + 2 * 3 * 4)), "False"]
