"""Evaluation on the whole test split, each sample exactly once."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Literal

import torch

from samebits.errors import UserError, reason
from samebits.hashes import sha256
from samebits.here import stage_command
from samebits.host import count_gpus, hide_gpus
from samebits.params import values_affecting
from samebits.records.card import read_card
from samebits.records.run import RECORD, WEIGHTS, Evaluation, RunRecord, require_made_with
from samebits.strategies import BASELINE
from samebits.strategies.placement import Devices
from samebits.training.diagnosis import explain
from samebits.training.metrics import evaluate
from samebits.training.placement import place
from samebits.training.setup import Setup
from samebits.training.weights import load_weights
from samebits.training.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from samebits.params import Params
    from samebits.records.card import Card


def _require_recorded(weights: Path, record: RunRecord) -> None:
    """Raise UserError: the weights are missing, or are not those of the run's record."""
    again = f"train again with `{stage_command('train')}`"
    try:
        digest = sha256(weights)
    except FileNotFoundError:
        raise UserError(f"{weights}: no such file", hint=f"run `{stage_command('train')}` first") from None
    except OSError as error:
        raise UserError(f"{weights}: cannot be read: {reason(error)}", hint=again) from None
    if digest != record.weights_sha256:
        what = f"SHA-256 {digest[:12]}, expected the {record.weights_sha256[:12]} of {RECORD}"
        raise UserError(f"{weights}: {what}", hint=again)


def _require_its_own(file: Path, record: RunRecord, params: Params, card: Card) -> None:
    """Raise UserError: the run has other data, or params under which its model computes something else."""
    if record.data.sha256 != card.sha256:
        got = f"SHA-256 {record.data.sha256[:12]}, and data/ holds {card.sha256[:12]}"
        raise UserError(f"{file}: trained on other data: {got}", hint="train again, or name its --data-dir")
    recorded, given = (values_affecting(one, "evaluation", numerics=record.numerics) for one in (record.params, params))
    require_made_with(file, recorded, given, hint="train again, or name its --params")


def evaluate_run(
    params: Params, *, data_dir: Path, run_dir: Path, at: Callable[[Literal["building", "working"]], object]
) -> Evaluation:
    """Evaluate ``run_dir/model.safetensors`` on the first device, in the numerics of its training.

    This sets switches of the process, so each evaluation needs a process of its own. ``at`` is called with each phase.

    Raises:
        UserError: the data or the run's files are missing, or are not those of ``params``.
    """
    card = read_card(data_dir / "card.json", params)
    record = RunRecord.read(run_dir / RECORD, made_by=stage_command("train"))
    weights = run_dir / WEIGHTS
    _require_recorded(weights, record)
    _require_its_own(run_dir / RECORD, record, params, card)
    gpus = min(1, count_gpus())
    placement, split = place(BASELINE.name, params, record.numerics, Devices(gpus=gpus, cores=1))
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    if not gpus:
        hide_gpus()
    setup = Setup(params, record.numerics, card, split=split, worker=Worker([device]))
    setup.enter_process()
    torch.set_num_threads(1)  # the result must not depend on the host's number of cores
    at("building")
    model = setup.build()
    at("working")
    for note in load_weights(model, weights):
        sys.stderr.write(f"{weights}: {note}\n")
    try:
        module = setup.numerics.module(setup.place(model))
        data = setup.load(data_dir, "test")
        batches = setup.in_order(data, split.rows_of_evaluation)
        classes = setup.card.loss == "cross_entropy"
        loss, accuracy, metrics = evaluate(module, setup.numerics, batches, classes=classes, device=device, model=model)
    except Exception as error:
        raise explain(error, placement=placement, model=model) from error
    if not math.isfinite(loss):
        hint = "its last update may have overflowed: lower train.optimizer.lr, or set train.clip_grad_norm"
        raise UserError(f"{weights}: the loss on the test split is {loss}", hint=hint)
    floor, teacher_loss = (None, None) if setup.numerics.own_loss else (card.floor, card.test.teacher_loss)
    return Evaluation(
        eval_loss=loss,
        accuracy=accuracy,
        floor=floor,
        teacher_loss=teacher_loss,
        above_floor=loss / floor - 1 if floor is not None else None,
        samples=card.test.num_samples,
        weights_sha256=record.weights_sha256,
        metrics=metrics,
    )
