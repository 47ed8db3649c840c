"""One way to set a model up in a process, for trainings, their references, evaluation and the doctor's trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from samebits.models import UserModel
from samebits.numerics.draws import SeenDraws
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.training.batches import Batches, load_data, on_device
from samebits.training.diagnosis import require_alike, require_same_again, trial_step
from samebits.training.loop import Snapshot, Trainable
from samebits.training.models.build import build_model
from samebits.training.models.sources import Watched, find_sources, recalled

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.numerics.exact.survey import Refusals
    from samebits.numerics.interface import MicroBatch, Numerics
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.records.card import Card
    from samebits.remarks import ModelNote
    from samebits.strategies.placement import Placement
    from samebits.training.batches import Data
    from samebits.training.models.sources import Sources
    from samebits.training.worker import Worker


_MOST_AGAIN = 2**26  # parameters of a model that is built twice
_AGAIN = "the model is built a second time, as by another process"


class Setup:
    """Builds what a step needs; its methods are called in the order in which they stand here.

    ``rough`` is for who looks at what a model does, and not at its weights: see ``build_model``.
    """

    def __init__(
        self,
        params: Params,
        numerics: NumericsName,
        card: Card,
        *,
        split: BatchSplit,
        worker: Worker,
        rough: bool = False,
    ) -> None:
        self.params, self.card, self.split, self.worker, self._rough = params, card, split, worker, rough
        self.numerics = make_numerics(params, numerics, card, split=split, device=worker.device)
        self.watched = Watched()
        self.draws: tuple[str, ...] = ()
        """Modules that draw random numbers in forward, as ``try_step`` has seen them in fast numerics."""

    def enter_process(self) -> None:
        """Make this process the strategy's worker, with the switches of the numerics and the seed's random streams."""
        self.worker.setup()
        self.numerics.configure()
        self.worker.seed(self.params.seed)

    def build(self) -> nn.Module:
        """The untrained model on the CPU, as its factory made it. Raises UserError: see ``build_model``."""
        with self.watched.opening():
            return self._build(self.numerics.construction())

    def _build(self, within: AbstractContextManager[object]) -> nn.Module:
        return build_model(self.params.model, self.card, self.params.seed, within, rough=self._rough)

    def sources(self) -> Sources | None:
        """What a user's model is made of, as far as it has run here by now."""
        return find_sources(self.params.model, {**recalled(self.params.model), **self.watched.files()})

    def place(self, model: nn.Module) -> nn.Module:
        """Make a model one that these numerics train, on the strategy's device."""
        self.numerics.prepare(model)
        return model.to(self.worker.device)

    def load(self, folder: Path, split: Literal["train", "test"] = "train", *, at_least: int = 0) -> Data:
        """A split of the data, on the device if it fits; over and over if it has fewer samples than ``at_least``.

        Raises UserError: see ``load_data``.
        """
        inputs, targets = load_data(folder, self.card, split)
        if (times := -(-at_least // len(inputs))) > 1:
            inputs, targets = (torch.cat([tensor] * times)[:at_least] for tensor in (inputs, targets))
        return on_device((inputs, targets), self.worker.device)

    def batches(self, data: Data) -> Batches:
        """The micro-batches that this rank feeds to the model, out of ``data``."""
        rank, device = self.worker.rank, self.worker.device
        epochs, seed = self.params.train.epochs, self.params.seed
        return Batches(data, self.card, self.split, rank=rank, seed=seed, device=device, epochs=epochs)

    def try_step(
        self,
        model: nn.Module,
        batches: Batches,
        placement: Placement,
        *,
        wants_ranks: bool,
        before_restore: Callable[[], None] = lambda: None,
    ) -> list[ModelNote]:
        """Run the placed model once, before it is wrapped, and leave it as it was; raises what ``trial_step`` does."""
        model.train()  # as in the training, in whatever mode the factory has left it
        initial = Snapshot(model)
        batch = batches.micro_batch(0, 0)
        self._require_same(model, batch.head(placement.rows_per_device))
        graphs = self.worker.compiles and self.numerics.graphs
        seen = SeenDraws()
        with self.watched.opening():
            notes = trial_step(
                model,
                self.numerics,
                batch,
                card=self.card,
                placement=placement,
                wants_ranks=wants_ranks,
                graphs=graphs,
                seen=seen if self.numerics.name == "fast" else None,
            )
        self.draws = tuple(seen.modules)
        before_restore()
        initial.restore()
        return notes

    def _require_same(self, model: nn.Module, batch: MicroBatch) -> None:
        """Under ``exact``, feed a user's model twice, and build it a second time, whose objects lie elsewhere.

        It has run nowhere before, so that what it keeps of its first pass shows. A second one is built only where there
        surely is room for it, and where the factory makes another. Raises UserError: it gives other bits.
        """
        first = require_same_again(self.numerics, self.numerics.module(model), batch)
        if not first or sum(p.numel() for p in model.parameters()) > _MOST_AGAIN:
            return
        other = self._exact_again()
        again = self.build()
        if {id(p) for p in model.parameters()} & {id(p) for p in again.parameters()}:
            return
        other.prepare(again)
        again.to(self.worker.device).train()
        require_alike(first, other.fingerprint(other.module(again), batch), _AGAIN)

    def survey(self, data: Data, refusals: Refusals) -> None:
        """Note all that ``exact`` refuses of the user's model, which is built once more."""
        numerics = self._exact_again()
        model = self._build(numerics.construction(refusals))
        numerics.survey(model, self.batches(data).micro_batch(0, 0), refusals)

    def _exact_again(self) -> ExactNumerics:
        numerics = make_numerics(self.params, "exact", self.card, split=self.split, device=self.worker.device)
        assert isinstance(numerics, ExactNumerics)
        return numerics

    def trainable(self, model: nn.Module, batches: Batches) -> Trainable:
        """The placed model under the strategy, with its optimizer."""
        return Trainable(model=model, batches=batches, worker=self.worker, numerics=self.numerics, params=self.params)


def make_numerics(
    params: Params, name: NumericsName, card: Card, *, split: BatchSplit, device: torch.device
) -> Numerics:
    """The numerics of that name, for global batches that are split like this."""
    if name == "fast":
        return FastNumerics(params.train, device, card.loss)
    assert split.shards, "exact numerics need shards"
    return ExactNumerics(
        params.train,
        device,
        card.loss,
        tuple(card.target_shape),
        seed=params.seed,
        shards=split.shards,
        samples=split.samples,
        independent=not isinstance(params.model, UserModel),
    )
