"""Count the kernel launches of one step of each training on the stand-in for CUDA; print JSON.

    LD_PRELOAD=libcuda.so.1 python tests/rehearsal/launches_probe.py [CASE ...]

Of each case, such as "mlp: exact ddp sgd": the launches of its fourth step on this rank's devices, in all threads. The
models are the built-in ones at their defaults, and one of a user. A library call that
computes counts as one launch.
"""

import ctypes
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import get_args

from samebits.data.prepare import prepare
from samebits.models import MODELS
from samebits.numerics.environment import prepare_environment
from samebits.params import parse_params
from samebits.params.schema import NumericsName, Optimizer
from samebits.strategies import STRATEGIES
from steps_probe import HERE, begun

BATCH = 256
DECODER = "a user's decoder"
TRAINED = {**{name: {"name": name} for name in MODELS}, DECODER: {"name": "user_models:decoder", "source": HERE}}
TASKS = {**{name: spec.tasks[0] for name, spec in MODELS.items()}, DECODER: "tokens"}
NUMERICS = get_args(NumericsName)
OPTIMIZERS = get_args(Optimizer.model_fields["name"].annotation)


def case_of(model, numerics, strategy, optimizer):
    return f"{model}: {numerics} {strategy} {optimizer}"


EVERYWHERE = ("sgd", "adamw")  # the others are counted with one model, as what they add does not depend on it
ROWS = [
    (model, optimizer)
    for model, optimizer in itertools.product(TRAINED, OPTIMIZERS)
    if optimizer in EVERYWHERE or model == next(iter(TRAINED))
]
GRAPHS = "exact as graphs"
WAYS = [*itertools.product(NUMERICS, STRATEGIES), *((GRAPHS, name) for name in STRATEGIES if STRATEGIES[name].compiles)]
CASES = [case_of(model, *way, optimizer) for model, optimizer in ROWS for way in WAYS]


def launches(case):
    """Launches of a step. The next step has to have as many, or the figure is none of each step."""
    model, _, rest = case.partition(": ")
    wanted, strategy, optimizer = rest.rsplit(maxsplit=2)
    numerics, *_ = wanted.split()
    params = parse_params(
        {
            "data": {"task": TASKS[model], "num_samples": 8 * BATCH, "test_samples": 8},
            "model": TRAINED[model],
            "train": {
                "numerics": [numerics],
                "cuda_graphs": wanted == GRAPHS,
                "strategies": [strategy],
                "global_batch_size": BATCH,
                "optimizer": {"name": optimizer},
                "num_devices": 2,
            },
        }
    )
    counted = ctypes.CDLL(None).no_gpu_launched
    with tempfile.TemporaryDirectory() as folder:
        facts = prepare(params, Path(folder))
        with begun(params, facts, lambda setup: setup.load(Path(folder)), strategy, numerics) as trainable:
            for step in (1, 2):  # in which a recording is checked
                trainable.step(step, 0.1)
            before = counted()
            trainable.step(3, 0.1)
            between = counted()
            trainable.step(4, 0.1)
            assert counted() - between == between - before, (case, between - before, counted() - between)
            told = trainable.numerics.arithmetic()
            assert told is None or (told.not_replayed is None) == (wanted == GRAPHS), (case, told)
    return between - before


if __name__ == "__main__":
    prepare_environment()
    json.dump({case: launches(case) for case in sys.argv[1:] or CASES}, sys.stdout)
