"""Exact numerics: one set of bits for every split, environment and device."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

import exact_probe
from conftest import MODEL_OF_TASK, ROOT, small
from samebits.hashes import sha256

GOLDEN = json.loads((ROOT / "tests/golden/exact.json").read_text())

# Of these the first is tried by default, and the others are slow.
ENVIRONMENTS = [
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"PROBE_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "PROBE_THREADS": "2"},
]
FAST_BY_INSTRUCTION_SET = [{"ATEN_CPU_CAPABILITY": name} for name in ("default", "avx2", "avx512")]
one_part = functools.cache(exact_probe.train)  # what a split is compared with


def probe(environ, cases):
    if not exact_probe.this_cpu_has(environ):
        pytest.skip(f"this CPU has no {environ['ATEN_CPU_CAPABILITY']}")
    command = [sys.executable, exact_probe.__file__, *(json.dumps(case) for case in cases)]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [digest for digest, _ in json.loads(done.stdout)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("optimizer", exact_probe.CHOSEN)
@pytest.mark.parametrize("model", exact_probe.MODELS)
def test_golden_hashes(model, optimizer, together):
    remedy = "python tests/golden/make.py"
    assert one_part(model, optimizer, together=together)[0] == GOLDEN[f"{model} {optimizer}"], remedy


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("splits", [2, 3, 4, 8])
@pytest.mark.parametrize("model", exact_probe.MODELS)
def test_every_split_gives_the_same_bits(model, splits, together):
    assert exact_probe.train(model, "adamw", splits, together=together) == one_part(model, "adamw")


@pytest.mark.parametrize(
    "environ",
    [pytest.param(environ, marks=[pytest.mark.slow] if i else []) for i, environ in enumerate(ENVIRONMENTS)],
    ids=str,
)
def test_every_environment_gives_the_same_bits(environ):
    cases = [
        {"model": model, "optimizer": "adamw", "together": together}
        for model in exact_probe.MODELS
        for together in (True, False)
    ]
    cases += [{"model": "mlp", "optimizer": optimizer} for optimizer in exact_probe.OTHERS]
    assert probe(environ, cases) == [GOLDEN[f"{case['model']} {case['optimizer']}"] for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("task", MODEL_OF_TASK)
def test_the_real_wrappers_give_the_same_bits_with_any_number_of_devices(task, stage, data_dir):
    """Also with more workers than cores, and with numbers that do not divide the shards."""
    settings = {"numerics": ["exact"], "oversubscribe": True, "clip_grad_norm": 1.0}
    data = data_dir(stage.write_params(small(task, **settings)))

    def run(strategy, *arguments):
        stage.train(data, strategy, "--numerics", "exact", *arguments)
        return [sha256(stage.folder / f"runs/{strategy}-exact" / name) for name in ("model.safetensors", "losses.csv")]

    expected = run("single")
    assert run("dp") == expected
    for count in ("2", "3", "8"):
        assert run("ddp", "--num-devices", count) == expected
    stage.write_params(small(task, **settings, grad_accum_steps=2))
    assert run("ddp", "--num-devices", "3") == expected


@pytest.mark.slow
def test_fast_numerics_do_not():
    case = {"model": "mlp", "fast": True, "steps": 20}
    possible = [environ for environ in FAST_BY_INSTRUCTION_SET if exact_probe.this_cpu_has(environ)]
    if len(possible) < 2:
        pytest.skip("this CPU has one set of instructions that PyTorch uses")
    assert len({probe(environ, [case])[0] for environ in possible}) > 1


@pytest.mark.parametrize("model", exact_probe.MODELS)
def test_it_learns_what_fast_learns(model):
    _, exact = exact_probe.train(model, steps=10)
    _, fast = exact_probe.train(model, steps=10, fast=True)
    if model in ("regression", "convnet"):  # without dropout
        assert exact == pytest.approx(fast, rel=1e-3)
    assert exact[-1] < exact[0]


@pytest.mark.parametrize("together", [True, False])
def test_clipping_and_settings_that_change_the_step_do_not_depend_on_the_split(together):
    one = exact_probe.train("mlp", clip_grad_norm=0.1, together=together)
    assert exact_probe.train("mlp", "sgd", 4, clip_grad_norm=0.1, together=together) == one
    assert one != one_part("mlp")


def test_threads_do_not_change_bits():
    torch.set_num_threads(2)
    try:
        assert exact_probe.train("gpt")[0] == GOLDEN["gpt sgd"]
    finally:
        torch.set_num_threads(1)
