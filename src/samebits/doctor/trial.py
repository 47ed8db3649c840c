"""What one worker does for the doctor: look at the model, and train it for two steps under one strategy."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from samebits import diagnosis
from samebits.checkpoint import load_weights
from samebits.data.batches import load_split, on_device
from samebits.data.card import read_card
from samebits.doctor.anatomy import mixes_devices
from samebits.doctor.finding import Finding, of_error, ok, warning
from samebits.errors import UserError, few
from samebits.models.attributes import state, unregistered, written
from samebits.models.build import build_model
from samebits.numerics.make import make_numerics
from samebits.rank import batches_of, run_rank
from samebits.strategies import make_strategy
from samebits.summary import devices_of
from samebits.trainer import Snapshot, Trainable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from samebits.numerics.batch import MicroBatch
    from samebits.params import Params
    from samebits.params.schema import NumericsName, StrategyName
    from samebits.placement import Placement

FINDINGS = "findings.jsonl"
STEPS = 2  # ddp says at the second what it missed in the first
_NOTE_HINTS = {
    "BatchNorm": "use nn.GroupNorm, whose result does not depend on how a batch is split",
    "no gradient": "use it in forward, or set its requires_grad to False",
}


@dataclass(frozen=True)
class Trial:
    """One strategy to try; ``out`` is the folder that rank 0 leaves its findings in.

    The trial of ``single`` also looks at the model itself and at ``checkpoint``.
    """

    params: Params
    placement: Placement
    data_dir: Path
    out: Path
    checkpoint: Path | None
    seconds: int
    numerics: NumericsName = "fast"

    @property
    def name(self) -> str:
        """What findings are listed under."""
        return listed_under(self.placement.strategy, self.numerics)


def listed_under(strategy: StrategyName, numerics: NumericsName) -> str:
    """What the findings of a trial are listed under."""
    return "exact" if numerics == "exact" else strategy


class Examination:
    """One rank of a trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.params = trial, trial.params
        self.card = read_card(trial.data_dir / "card.json")
        self.strategy = make_strategy(trial.placement, trial.params.train)
        self.model: nn.Module | None = None

    def say(self, finding: Finding) -> None:
        """Leave a finding at once, so that a crash takes none with it."""
        if self.strategy.rank == 0:
            with (self.trial.out / FINDINGS).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(finding)) + "\n")

    def run(self) -> None:
        """Build the model, look at it if this is ``single``, and train it for two steps."""
        strategy, params, placement, name = self.strategy, self.params, self.trial.placement, self.trial.name
        alone = name == "single"
        strategy.setup()
        shape = tuple(self.card.target_shape)
        numerics = make_numerics(self.trial.numerics, params, strategy.device, self.card.loss, shape)
        numerics.configure()
        strategy.seed(params.seed)
        self.model = model = build_model(params.model, self.card, params.seed, numerics.building())
        if alone:
            self._look(model)
        numerics.adopt(model)
        model.to(strategy.device)
        data = on_device(load_split(self.trial.data_dir, self.card, "train"), strategy.device)
        batches = batches_of(params, self.trial.numerics, data, self.card, strategy)
        batch = batches.micro_batch(0, 0)
        initial, before = Snapshot(model), state(model)
        notes = diagnosis.trial_step(model, numerics, batch, self.card, placement, wants_ddp=False)
        if alone and (names := written(before, state(model))):
            text = f"forward writes {few(names)}: under dp into copies that are thrown away, under ddp on each rank"
            self.say(warning(text, "return it from forward, or update it outside forward", name="model"))
        for note in notes:
            hint = next(hint for start, hint in _NOTE_HINTS.items() if note.startswith(start))
            self.say(warning(note, hint, name=name))
        initial.restore()
        own = Trainable(model, batches, strategy, numerics, params)
        rate = params.train.optimizer.lr
        losses = [own.mean_losses(own.step(step, rate).reshape(1))[0] for step in range(STEPS)]
        if not math.isfinite(losses[0]):
            hint = "look for a division by zero or a logarithm of zero in forward"
            raise UserError(f"the loss of the first batch is {losses[0]}, expected a finite number", hint=hint)
        where = f"{params.train.global_batch_size} samples on {devices_of(placement.as_dict())}"
        self.say(ok(f"{STEPS} steps of {where}, loss {losses[0]:.4g} at first", name=name))
        if alone and placement.device_type == "cpu":
            self._imagine_gpu(model, batch)

    def _look(self, model: nn.Module) -> None:
        count = sum(p.numel() for p in model.parameters())
        self.say(ok(f"{self.params.model.name}, {count:,} parameters", name="model"))
        tensors, modules = unregistered(model)
        if tensors:
            name = tensors[0].rpartition(".")[2].partition("[")[0]
            text = f"{few(tensors)}: tensors beside the parameters and buffers, not moved to a GPU and not saved"
            hint = f'self.register_buffer("{name}", ...) where it is constant, nn.Parameter where it is learnt'
            self.say(warning(text, hint, name="model"))
        if modules:
            text = f"{few(modules)}: modules in a plain container, which are not moved, not trained and not saved"
            self.say(warning(text, "use nn.ModuleList or nn.ModuleDict", name="model"))
        if self.trial.checkpoint is not None:
            self._try_checkpoint(model, self.trial.checkpoint)

    def _try_checkpoint(self, model: nn.Module, path: Path) -> None:
        initial = Snapshot(model)
        try:
            notes = load_weights(model, path)
        except UserError as error:
            self.say(of_error(error, name="checkpoint"))
        else:
            hint = "save model.module.state_dict(), so that any program can load it"
            for note in notes:
                self.say(warning(note, hint, name="checkpoint"))
            self.say(ok(f"{path.name} fits the model", name="checkpoint"))
        initial.restore()

    def _imagine_gpu(self, model: nn.Module, batch: MicroBatch) -> None:
        if place := mixes_devices(model, batch.inputs):
            text = f"{place}: on a GPU, forward would mix a tensor of the CPU with the batch"
            hint = "make it with device=x.device, or keep a constant with register_buffer"
            self.say(warning(text, hint, name="model"))


def try_model(trial: Trial, scratch: Path) -> None:
    """Run one rank; findings go to ``trial.out``, a failure to ``scratch``, from where the launcher raises it."""
    os.dup2(2, 1)  # what a model prints is not the doctor's answer
    if trial.placement.device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in samebits.launch: what NVML does not show must not be found
    signal.alarm(trial.seconds)  # ends a model that never comes back
    run_rank(lambda: Examination(trial), trial.placement, scratch)
