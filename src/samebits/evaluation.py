"""Evaluation on the whole test split, each sample exactly once."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, TypedDict

import torch

from samebits import diagnosis
from samebits.checkpoint import load_weights
from samebits.data.batches import load_split, model_inputs
from samebits.data.card import read_card
from samebits.errors import UserError
from samebits.files import write_json
from samebits.host import count_gpus
from samebits.models.build import build_model
from samebits.numerics.batch import MicroBatch
from samebits.numerics.fast import prepare_environment
from samebits.numerics.make import make_numerics
from samebits.placement import place

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from samebits.data.batches import Batch
    from samebits.data.card import Card
    from samebits.numerics.interface import Numerics
    from samebits.params import Params
    from samebits.params.schema import NumericsName


class Evaluation(TypedDict):
    """Mean loss, accuracy where there are classes, and how far the loss stands above the floor."""

    eval_loss: float
    accuracy: float | None
    floor: float | None
    teacher_loss: float | None
    above_floor: float | None
    samples: int


def evaluate(
    module: nn.Module, numerics: Numerics, data: Batch, card: Card, *, batch_size: int, device: torch.device
) -> Evaluation:
    """Evaluate on one device; the last batch is short, never padded.

    The sum of the losses is exact, and rounded once. ``above_floor`` is ``eval_loss / floor - 1``, None where the
    floor is not known.
    """
    inputs, targets = data
    losses: list[float] = []
    correct = torch.zeros((), dtype=torch.int64, device=device)
    was_training = module.training
    module.eval()
    with torch.no_grad():
        for start in range(0, len(inputs), batch_size):
            x = model_inputs(inputs[start : start + batch_size].to(device), card)
            y = targets[start : start + batch_size].to(device)
            outputs = numerics.outputs(module, MicroBatch(x, y, step=0))
            losses += numerics.losses(outputs, y).tolist()
            if card.num_classes is not None:
                correct += (outputs.flatten(0, -2).argmax(dim=-1) == y.flatten()).sum()
    module.train(was_training)
    loss = math.fsum(losses) / targets.numel()
    return {
        "eval_loss": loss,
        "accuracy": correct.item() / targets.numel() if card.num_classes is not None else None,
        "floor": card.floor,
        "teacher_loss": card.test.teacher_loss,
        "above_floor": loss / card.floor - 1 if card.floor is not None else None,
        "samples": len(inputs),
    }


def evaluate_run(params: Params, numerics_name: NumericsName, *, data_dir: Path, out_dir: Path) -> Evaluation:
    """Evaluate ``out_dir/model.safetensors`` on the first device and write ``out_dir/evaluation.json``.

    Raises:
        UserError: the data or the weights are missing, or are not those of ``params``.
    """
    card = read_card(data_dir / "card.json")
    weights = out_dir / "model.safetensors"
    if not weights.exists():
        raise UserError(f"{weights}: no such file", hint="run `python pipeline/train.py` first")
    prepare_environment()
    device = torch.device("cuda", 0) if count_gpus() else torch.device("cpu")
    torch.set_num_threads(1)  # the result must not depend on the host's number of cores
    numerics = make_numerics(numerics_name, params, device, card.loss, tuple(card.target_shape))
    numerics.configure()
    model = build_model(params.model, card, params.seed, numerics.building())
    for note in load_weights(model, weights):
        sys.stderr.write(f"{weights}: {note}\n")
    numerics.adopt(model)
    module = numerics.module(model.to(device))
    parts = params.shards(numerics_name) or params.train.grad_accum_steps
    batch_size = params.train.global_batch_size // parts  # what single has room for; a shard, as it was trained
    data = load_split(data_dir, card, "test")
    try:
        result = evaluate(module, numerics, data, card, batch_size=batch_size, device=device)
    except Exception as error:
        placement = place("single", params.train, gpus=int(device.type == "cuda"), cores=1)
        raise diagnosis.explain(error, placement=placement, model=model) from error
    write_json(out_dir / "evaluation.json", result)
    return result
