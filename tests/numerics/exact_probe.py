"""Train small models in the exact numerics and print their hashes as JSON; run in several environments.

python tests/numerics/exact_probe.py '{"model": "mlp", "optimizer": "sgd"}' ...
"""

import hashlib
import itertools
import json
import os
import sys
from operator import itemgetter

import torch

from samebits.models.modules.convnet import ConvNet
from samebits.models.modules.gpt import GPT
from samebits.models.modules.mlp import MLP
from samebits.models.nested import leaves_of, mapped, rows_of
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.numerics.initialization import portable_initialization
from samebits.numerics.interface import MicroBatch
from samebits.params import parse_params
from samebits.portable.random import Stream

SAMPLES, SHARDS, STEPS = 32, 8, 6
LENGTH, TOKENS, CLASSES = 16, 12, 5
MODELS = {
    "mlp": lambda: MLP((20,), CLASSES, (24, 16), dropout=0.1),
    "regression": lambda: MLP((20,), 3, (24,)),
    "convnet": lambda: ConvNet((3, 12, 12), CLASSES, width=8),
    "gpt": lambda: GPT(TOKENS, LENGTH, width=16, dropout=0.1),
}


def this_cpu_has(environ):
    """Whether there are the instructions that an environment asks PyTorch for, which else dies of the first of them."""
    wanted, most = environ.get("ATEN_CPU_CAPABILITY", "default"), torch.backends.cpu.get_cpu_capability()
    return wanted == "default" or most in {"avx2": ("AVX2", "AVX512"), "avx512": ("AVX512",)}[wanted]


def data(model):
    stream = Stream(1, "probe")
    if model == "gpt":
        tokens = torch.from_numpy(stream.below(TOKENS, SAMPLES * (LENGTH + 1))).view(SAMPLES, LENGTH + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (SAMPLES, 3, 12, 12) if model == "convnet" else (SAMPLES, 20)
    inputs = torch.from_numpy(stream.normal(SAMPLES * inputs_of(shape))).view(shape).float()
    if model == "regression":
        return inputs, torch.from_numpy(stream.normal(3 * SAMPLES)).view(SAMPLES, 3).float()
    return inputs, torch.from_numpy(stream.below(CLASSES, SAMPLES))


def inputs_of(shape):
    return torch.Size(shape[1:]).numel()


CHOSEN = {"sgd": {"name": "sgd", "lr": 0.05, "weight_decay": 0.01}, "adamw": {"name": "adamw", "lr": 0.003}}
OTHERS = {
    "nesterov": {"name": "sgd", "lr": 0.05, "kwargs": {"nesterov": True}},
    "dampened": {"name": "sgd", "lr": 0.05, "weight_decay": 0.01, "kwargs": {"dampening": 0.1}},
    "betas": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1, "kwargs": {"betas": [0.8, 0.99], "amsgrad": True}},
    "adam": {"name": "adam", "lr": 0.003, "weight_decay": 0.01},
    "adadelta": {"name": "adadelta", "lr": 0.5},
    "adafactor": {"name": "adafactor", "lr": 0.01},
    "adagrad": {"name": "adagrad", "lr": 0.02, "kwargs": {"lr_decay": 0.1}},
    "adamax": {"name": "adamax", "lr": 0.003},
    "asgd": {"name": "asgd", "lr": 0.05, "kwargs": {"t0": 3}},
    "nadam": {"name": "nadam", "lr": 0.003},
    "radam": {"name": "radam", "lr": 0.01},
    "rmsprop": {"name": "rmsprop", "lr": 0.003, "kwargs": {"centered": True, "momentum": 0.5}},
    "rprop": {"name": "rprop", "lr": 0.003},
}
"""Optimizers of PyTorch's that have no code of ours, by a name."""


def settings(optimizer, **train):
    return parse_params({"train": {"optimizer": (CHOSEN | OTHERS)[optimizer], **train}}).train


def train(model, optimizer="sgd", splits=1, *, together=True, fast=False, device="cpu", steps=STEPS, **more):
    """Hash of the final weights, and the losses, of a built-in model, whose shards run ``together`` or one by one."""
    device = torch.device(device)
    inputs, targets = (t.to(device) for t in data(model))
    kind = "mse" if model == "regression" else "cross_entropy"
    chosen = settings(optimizer, **more)
    if fast:
        numerics = FastNumerics(chosen, device, kind)
    else:
        split = {"shards": SHARDS, "samples": SAMPLES}
        numerics = ExactNumerics(chosen, device, kind, tuple(targets.shape[1:]), seed=0, **split)
        if together:
            numerics.apart = None
    return run(numerics, MODELS[model], inputs, targets, shards=SHARDS, splits=splits, steps=steps)


def run(numerics, factory, inputs, targets, *, shards, splits, steps, backwards=False):
    """Hash of the final weights, and the losses; each batch is the whole data, in parts of whole shards.

    With ``backwards`` the last part of a batch comes first, as it does on a rank that has another part.
    """
    numerics.configure()
    with numerics.construction(), portable_initialization(0):
        model = factory()
    model.train()
    numerics.prepare(model)
    if targets is None:
        numerics.take_data("own")
    model.to(next(tensor.device for _, tensor in leaves_of(inputs)))
    torch.manual_seed(0)
    module, optimizer = numerics.module(model), numerics.optimizer(model)
    sums, rows, losses = numerics.reduction == "sum", rows_of(inputs) // shards, []
    bounds = [shards * i // splits for i in range(splits + 1)]
    parts = [*itertools.pairwise(bounds)]
    for step in range(steps):
        while True:
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for first, last in reversed(parts) if backwards else parts:
                part = slice(first * rows, last * rows)
                batch = MicroBatch(*mapped(itemgetter(part), (inputs, targets)), step, range(first, last))
                loss = numerics.loss(numerics.forward(module, batch), batch.targets)
                numerics.backward(loss if sums else loss * (last - first) / shards)
                total = total + loss.detach()
            if numerics.accepts_grads(lambda values: values):
                break
        numerics.step(optimizer)
        losses += numerics.mean_losses(total.reshape(1), lambda values: values, 1 if sums else splits)
    digest = hashlib.sha256()
    for name, tensor in sorted(numerics.model_state_dict(model).items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), losses


def main():
    torch.set_num_threads(int(os.environ.get("PROBE_THREADS", "1")))
    print(json.dumps([train(**json.loads(case)) for case in sys.argv[1:]]))


if __name__ == "__main__":
    main()
