"""Train every model for some steps on the stand-in for CUDA and print what the host did, as JSON.

    LD_PRELOAD=libcuda.so.1 python tests/rehearsal/steps_probe.py [CASE ...]

A case fails as it would on a GPU where PyTorch's host code refuses it: a tensor on another device, a type without a
kernel, an operation without a deterministic form. For each case: the error or null, and where a step waited for the
device. Nothing is computed, so values mean nothing.
"""

import ctypes
import itertools
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch

from samebits.models import MODELS as SPECS
from samebits.numerics.environment import prepare_environment
from samebits.numerics.exact.self_test import check
from samebits.params import parse_params
from samebits.strategies import StrategyName
from samebits.strategies.placement import Devices
from samebits.training.batches import on_device
from samebits.training.collectives import INIT_METHOD
from samebits.training.loop import warm_up
from samebits.training.placement import place
from samebits.training.setup import Setup
from samebits.training.worker import make_worker
from samples import card

SRC = str(Path(__file__).resolve().parents[2] / "src" / "samebits")
BATCH, SAMPLES, CLASSES, TOKENS, LENGTH = 16, 64, 5, 12, 16
VECTORS = {"input_shape": [20], "num_classes": CLASSES}
SEQUENCES = {"input_shape": [LENGTH], "input_dtype": "int64", "num_classes": TOKENS, "target_shape": [LENGTH]}
HERE = "tests/rehearsal/user_models.py"
MODELS = {
    "mlp": ({"name": "mlp", "kwargs": {"hidden": [24, 16], "dropout": 0.1}}, VECTORS),
    "wide_mlp": ({"name": "wide_mlp", "kwargs": {"hidden": [64, 64]}}, VECTORS),
    "convnet": ({"name": "convnet", "kwargs": {"width": 8}}, {"input_shape": [3, 12, 12], "num_classes": CLASSES}),
    "gpt": ({"name": "gpt", "kwargs": {"width": 16, "dropout": 0.1}}, SEQUENCES),
    "decoder": ({"name": "user_models:decoder", "source": HERE}, SEQUENCES),
    "rotary": ({"name": "user_models:decoder", "kwargs": {"rotary": True}, "source": HERE}, SEQUENCES),
    "mixed": ({"name": "user_models:mixed", "source": HERE}, {**SEQUENCES, "num_classes": CLASSES, "target_shape": []}),
}
BROKEN = {
    how: ({"name": "user_models:broken", "kwargs": {"how": how}, "source": HERE}, {**VECTORS, "input_shape": [3, 8, 8]})
    for how in ("constant on the CPU", "product of integers", "adaptive pooling", "reads a value")
}
NUMERICS = ("fast fp32", "fast tf32", "fast bf16", "fast fp16", "exact fp32")
STRATEGIES = get_args(StrategyName)
OPTIMIZERS = ("sgd", "adamw")
CASES = [
    f"{model}: {numerics} {strategy} {optimizer}"
    for model, numerics, strategy, optimizer in itertools.product(MODELS, NUMERICS, STRATEGIES, OPTIMIZERS)
]
"""Those with adamw accumulate gradients and clip them; their data is on the host, where it has to be fetched from."""
BROKEN_CASES = [f"{how}: {numerics} single sgd" for how in BROKEN for numerics in ("fast fp32", "exact fp32")]


def params_of(model, numerics, strategy, optimizer, precision):
    adamw = optimizer == "adamw"
    return parse_params(
        {
            "data": {
                "task": SPECS[model[0]["name"]].tasks[0] if model[0]["name"] in SPECS else "vectors",
                "num_samples": SAMPLES,
            },
            "model": model[0],
            "train": {
                "numerics": [numerics],
                "strategies": [strategy],
                "precision": precision,
                "global_batch_size": BATCH,
                "grad_accum_steps": 2 if adamw else 1,
                "clip_grad_norm": 1.0 if adamw else None,
                "optimizer": {"name": optimizer, "lr": 0.01, "weight_decay": 0.1},
                "num_devices": 2,
            },
            "exact": {"shards": 4},
        }
    )


def data_of(facts):
    def tensor(shape, dtype, below):
        return torch.arange(SAMPLES * torch.Size(shape).numel()).remainder(below).view(SAMPLES, *shape).to(dtype)

    inputs = tensor(facts.input_shape, getattr(torch, facts.input_dtype), facts.num_classes)
    return inputs, tensor(facts.target_shape, torch.int64, facts.num_classes)


@contextmanager
def waits():
    """Count where the host waits for the device: lines of the library, or what else called it.

    Raises AssertionError: the stand-in has counted others than PyTorch has told of.
    """
    found = Counter()

    def note(message, category, filename, lineno, file=None, line=None):
        assert "synchronizing CUDA operation" in str(message), message
        inner = next((f for f in reversed(traceback.extract_stack()) if f.filename.startswith(SRC)), None)
        found[f"{inner.filename.removeprefix(SRC)[1:]}:{inner.name}" if inner else Path(filename).name] += 1

    counted = ctypes.CDLL(None).no_gpu_waited
    before = counted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # which warns of itself
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found.total() == counted() - before, (found, counted() - before)


@contextmanager
def begun(params, facts, data, strategy, numerics):
    """A training in its second step, as a stage makes it. ``data`` is what ``batches`` takes, or a function of it."""
    check.agrees = lambda got, expected: True  # the self-test of exact runs, and its results mean nothing
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    placement, split = place(strategy, params, numerics, Devices(gpus=2, cores=2))
    chosen = make_worker(placement, params.train)
    setup = Setup(params, numerics, facts, split=split, worker=chosen, rough=True)  # values mean nothing here
    with tempfile.TemporaryDirectory() as folder:
        os.environ[INIT_METHOD] = f"file://{folder}/store"
        setup.enter_process()
        try:
            module = setup.place(setup.build())
            batches = setup.batches(data(setup))
            setup.try_step(module, batches, placement, wants_ranks=True)
            trainable = setup.trainable(module, batches)
            warm_up(trainable, 2)
            trainable.step(0, 0.1)
            yield trainable
        finally:
            chosen.close()
            torch.set_deterministic_debug_mode("default")


def rehearse(model, numerics, precision, strategy, optimizer):
    """Some steps of a training after its start; return the waits of the second, and of the first of the next epoch."""
    params = params_of(model, numerics, strategy, optimizer, precision)
    facts = card(**model[1])
    data = data_of(facts)
    given = (lambda _: data) if optimizer == "adamw" else lambda setup: on_device(data, setup.worker.device)
    with begun(params, facts, given, strategy, numerics) as trainable:
        with waits() as where:
            loss = trainable.step(1, 0.1)
        with waits() as later:
            trainable.step(trainable.batches.steps_per_epoch, 0.1)
        trainable.mean_losses(torch.stack([loss]))
        return {"waits": dict(sorted(where.items())), "waits_in_new_epoch": dict(sorted(later.items()))}


def main():
    prepare_environment()
    out = {}
    for case in sys.argv[1:] or [*CASES, *BROKEN_CASES]:
        name, _, rest = case.partition(": ")
        try:
            out[case] = {"error": None, **rehearse({**MODELS, **BROKEN}[name], *rest.split())}
        except Exception as error:  # noqa: BLE001 - reported
            out[case] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
