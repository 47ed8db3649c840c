"""Evaluation on the whole test split, each sample exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch.nn import functional as F

from samebits.data.batches import model_inputs

if TYPE_CHECKING:
    from torch import nn

    from samebits.data.batches import Batch
    from samebits.data.card import Card


class Evaluation(TypedDict):
    """Mean loss, accuracy where there are classes, and how far the loss stands above the floor."""

    eval_loss: float
    accuracy: float | None
    floor: float
    teacher_loss: float
    above_floor: float
    samples: int


def evaluate(module: nn.Module, data: Batch, card: Card, *, batch_size: int, device: torch.device) -> Evaluation:
    """Evaluate on one device; the last batch is short, never padded.

    Sums are kept in float64. ``above_floor`` is ``eval_loss / floor - 1``.
    """
    inputs, targets = data
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    was_training = module.training
    module.eval()
    with torch.inference_mode():
        for start in range(0, len(inputs), batch_size):
            x = model_inputs(inputs[start : start + batch_size].to(device), card)
            y = targets[start : start + batch_size].to(device)
            outputs = module(x).float()
            if card.loss == "mse":
                losses = F.mse_loss(outputs, y, reduction="none")
            else:
                outputs, y = outputs.flatten(0, -2), y.flatten()
                losses = F.cross_entropy(outputs, y, reduction="none")
                correct += (outputs.argmax(dim=-1) == y).sum()
            loss_sum += losses.double().sum()
    module.train(was_training)
    loss = loss_sum.item() / targets.numel()
    return {
        "eval_loss": loss,
        "accuracy": correct.item() / targets.numel() if card.num_classes is not None else None,
        "floor": card.floor,
        "teacher_loss": card.test.teacher_loss,
        "above_floor": loss / card.floor - 1,
        "samples": len(inputs),
    }
