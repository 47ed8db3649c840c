"""One rank of ``doctor --model``: inspect the model, and train it for two steps under one strategy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samebits.doctor.finding import Finding, failed, of_error, ok, warning
from samebits.errors import RefusedError, UserError, caused_by, counted, few, first_line, place_of
from samebits.here import of_kit
from samebits.models.experiment import is_carried
from samebits.numerics.dispatch import EagerDispatchMode, tensors_in
from samebits.numerics.exact.caches import Attributes
from samebits.numerics.exact.survey import Refusals
from samebits.records.card import read_card
from samebits.remarks import BatchNorm
from samebits.results.remarks import ShardsApart
from samebits.results.text import devices_of
from samebits.strategies import BASELINE, any_has_ranks
from samebits.training.loop import Snapshot
from samebits.training.models.attributes import state, unregistered, written
from samebits.training.setup import Setup
from samebits.training.weights import load_weights
from samebits.training.worker import make_worker

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.strategies import StrategyName
    from samebits.strategies.placement import Placement

FINDINGS = "findings.jsonl"
STEPS = 2  # ddp reports in the second step what was missing in the first


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One strategy to try; ``out`` is the folder for the findings of rank 0.

    The trial of ``single`` also checks the model itself, and ``checkpoint``. ``params`` are of a small batch, and
    ``samples_of_unit`` those that a shard has in the training.
    """

    params: Params
    strategy: StrategyName
    numerics: NumericsName
    data_dir: Path
    out: Path
    checkpoint: Path | None
    seconds: int
    samples_of_unit: int = 1

    @property
    def name(self) -> str:
        """The name of the findings."""
        return "exact" if self.numerics == "exact" else self.strategy


_CHANNELS = (1, 3, 4)


class ModelTrialRank:
    """One rank of a trial."""

    def __init__(self, trial: Trial, placement: Placement, split: BatchSplit) -> None:
        self._trial, self._params, self._placement, self._split = trial, trial.params, placement, split
        self._card = read_card(trial.data_dir / "card.json")
        self.worker = make_worker(placement, trial.params.train)
        self.model: nn.Module | None = None

    def say(self, finding: Finding) -> None:
        """Write a finding at once, so that a crash loses none."""
        if self.worker.rank == 0:
            with (self._trial.out / FINDINGS).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(finding)) + "\n")

    def run(self) -> None:
        """Build the model, check it if this is ``single``, and train it for one or two steps."""
        trial, params = self._trial, self._params
        setup = Setup(params, trial.numerics, self._card, split=self._split, worker=self.worker, rough=True)
        setup.enter_process()
        try:
            self._try(setup)
        except Exception as error:
            if caused_by(error, RefusedError):
                self._survey(setup)
            raise

    def _survey(self, setup: Setup) -> None:
        """Report everything that ``exact`` refuses of the model, and not only the first."""
        refusals = Refusals()
        try:
            setup.survey(setup.load(self._trial.data_dir), refusals)
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            text = (
                f"what else is refused is not known: the model raised {type(error).__name__}: {first_line(str(error))}"
            )
            self.say(warning(text, "mend what is told here, and ask again", name=self._trial.name))
        for text, hint in refusals.told():
            self.say(failed(text, hint, name=self._trial.name, exit_code=UserError.exit_code))

    def _try(self, setup: Setup) -> None:
        trial, params, name = self._trial, self._params, self._trial.name
        alone = name == BASELINE.name
        self.model = model = setup.build()
        attributes = Attributes(model)
        if alone:
            self._inspect(model)
        setup.place(model)
        batches = setup.batches(setup.load(trial.data_dir))
        before = state(model)

        def check_written() -> None:
            if alone and (names := written(before, state(model))):
                text = f"forward writes {few(names)}: under dp into copies that are thrown away, by ranks into one each"
                self.say(warning(text, "return it from forward, or update it outside forward", name="model"))

        # A training in exact refuses what ranks cannot train, and no other trial of it has ranks.
        ranks = trial.numerics == "exact" and any_has_ranks(params.train.strategies)
        for note in setup.try_step(model, batches, self._placement, wants_ranks=ranks, before_restore=check_written):
            if isinstance(note, BatchNorm):
                if trial.numerics not in params.train.numerics:  # fast is tried all the same
                    continue
                if trial.numerics == "exact":  # whose shards have few samples in a trial
                    note = note.model_copy(update={"samples": trial.samples_of_unit, "difference": None})
            self.say(warning(note.sentence(), note.HINT, name=name, is_remark=True))
        where = f"{counted(self._split.samples, 'sample')} on {devices_of(self._placement)}"
        if trial.numerics == "exact":  # its trial step was the training
            arithmetic = setup.numerics.arithmetic()
            why = arithmetic and arithmetic.shards_apart
            self.say(ok(f"the same bits in either order, of {where}{'' if why else ', in one pass'}", name=name))
            if why:
                apart = ShardsApart(why=why)
                self.say(warning(apart.sentence(), of_kit(apart.HINT), name=name, is_remark=True))
            return
        trainable = setup.trainable(model, batches)
        trainable.reset()
        rate = params.train.optimizer.lr
        losses = [trainable.mean_losses(trainable.step(step, rate).reshape(1))[0] for step in range(STEPS)]
        if not math.isfinite(losses[0]):
            hint = "look for a division by zero or a logarithm of zero in forward"
            raise UserError(f"the loss of the first batch is {losses[0]}, expected a finite number", hint=hint)
        unasked = "" if trial.numerics in params.train.numerics else f", in {trial.numerics}"
        self.say(ok(f"{STEPS} steps of {where}{unasked}, loss {losses[0]:.4g}", name=name))
        alone_on_cpu = alone and self._placement.device_type == "cpu"
        attributes.taken_back()  # what forward keeps is made on the device of its batch
        if alone_on_cpu and (place := mixes_devices(model, batches.micro_batch(0, 0).inputs)):
            text = f"{place}: on a GPU, forward would mix a tensor of the CPU with the batch"
            hint = "make it with device=x.device, or keep a constant with register_buffer"
            self.say(warning(text, hint, name="model"))

    def _inspect(self, model: nn.Module) -> None:
        count = sum(p.numel() for p in model.parameters())
        self.say(ok(f"{self._params.model.name}, {count:,} parameters", name="model"))
        if len(shape := self._card.input_shape) == 3 and shape[-1] in _CHANNELS and shape[0] not in _CHANNELS:
            hint = "transpose the file if they do: inputs.transpose(0, 3, 1, 2)"
            text = f"samples of shape {tuple(shape)} look as if their channels came last, and PyTorch takes them first"
            self.say(warning(text, hint, name="data"))
        tensors, modules = ([name for name in names if not is_carried(name)] for names in unregistered(model))
        if tensors:
            name = tensors[0].rpartition(".")[2].partition("[")[0]
            text = f"{few(tensors)}: tensors beside the parameters and buffers, not moved to a GPU and not saved"
            hint = f'self.register_buffer("{name}", ...) where it is constant, nn.Parameter where it is learnt'
            self.say(warning(text, hint, name="model"))
        if modules:
            text = f"{few(modules)}: modules in a plain container, which are not moved, not trained and not saved"
            self.say(warning(text, "use nn.ModuleList or nn.ModuleDict", name="model"))
        if self._trial.checkpoint is not None:
            self._try_checkpoint(model, self._trial.checkpoint)

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


class _MixedDevices(Exception):  # noqa: N818 - it never leaves this module
    """An operation got tensors of two devices."""


_ATEN = torch.ops.aten
_MAY_MIX_DEVICES = frozenset(
    {_ATEN._to_copy, _ATEN.copy_, _ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_,
     _ATEN._pack_padded_sequence}
)  # fmt: skip


class _OneDevice(EagerDispatchMode):
    """Refuses operations on tensors of two devices, as CUDA does. Scalars and indices may mix, as there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in _MAY_MIX_DEVICES:
            tensors = tensors_in((args, kwargs))
            if any(t.is_meta for t in tensors) and any(not t.is_meta and t.dim() for t in tensors):
                raise _MixedDevices(func.name())
        return func(*args, **(kwargs or {}))


def mixes_devices(model: nn.Module, inputs: Tensor) -> str | None:
    """The line where a forward pass on a GPU would mix the batch with a CPU tensor, found without a GPU.

    The model moves to the meta device, which has no values, and loses its weights. None if nothing is found, also if
    forward cannot run there because it reads values.
    """
    try:
        with torch.no_grad(), _OneDevice():
            model.to("meta")(inputs.to("meta"))
    except _MixedDevices as error:
        return place_of(error) or f"an operation {error}"
    except Exception:  # noqa: BLE001 - forward runs on the CPU, so this is a limit of the meta device
        return None
    return None
