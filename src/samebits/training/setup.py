"""Sets up a model in a process: for trainings, references, evaluation and the doctor's trials."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch

from samebits.errors import UserError
from samebits.models import UserModel
from samebits.numerics.draws import SeenDraws
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.records.batches import groups_of
from samebits.remarks import BatchLoss
from samebits.training.batches import Batches, Pair, load_data, model_inputs, on_device
from samebits.training.datasets import TARGETS, LoadedBatches, described, in_order
from samebits.training.diagnosis import require_alike, require_same_again, trial_step
from samebits.training.loop import Snapshot, Trainable
from samebits.training.metrics import evaluate
from samebits.training.models.build import build_experiment
from samebits.training.models.sources import Watched, find_sources, recalled
from samebits.training.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.models.experiment import Experiment
    from samebits.numerics.exact.survey import Refusals
    from samebits.numerics.interface import MicroBatch, Numerics
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.records.card import Card
    from samebits.remarks import ModelNote
    from samebits.strategies.placement import Placement
    from samebits.training.batches import Feed
    from samebits.training.datasets import AnyData
    from samebits.training.models.sources import Sources
    from samebits.training.worker import Worker


_MOST_AGAIN = 2**26  # parameters of a model that is built twice
_AGAIN = "the model is built a second time, as by another process"


class Setup:
    """Builds the parts of a training. Its methods are called in the order in which they stand here.

    ``rough`` is for trials that do not depend on the weights: see ``build_model``.
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
        self._samples: dict[str, Samples] = {}
        self.draws: tuple[str, ...] = ()
        """Modules that draw random numbers in forward; ``try_step`` finds them, in fast numerics."""

    def enter_process(self) -> None:
        """Prepare this process: join the ranks, set the switches of the numerics, and seed the random streams.

        Raises HostError: a device cannot be used, or gives wrong results.
        """
        self.worker.setup()
        self.numerics.configure()
        self.numerics.require_sound(self.worker)
        self.worker.seed(self.params.seed)

    def build(self) -> nn.Module:
        """Build the untrained model on the CPU. Raises UserError: see ``build_experiment``."""
        with self.watched.opening():
            experiment = self._build(self.numerics.construction())
            if self.card.task == "dataset":
                self._open(experiment)
        return experiment.model

    def _build(self, within: AbstractContextManager[object]) -> Experiment:
        return build_experiment(self.params.model, self.card, self.params.seed, within, rough=self._rough)

    def _open(self, experiment: Experiment) -> None:
        """Open the experiment's datasets, and look at their first samples."""
        given = {"train": experiment.train_data, "test": experiment.test_data}
        for split, dataset in given.items():
            count = getattr(self.card, split).num_samples
            samples = Samples(f"{split}_data", dataset, count, self.params.seed)
            if samples.has < count:
                key = "data.num_samples" if split == "train" else "data.test_samples"
                raise UserError(f"{key}: got {count}, {split}_data has {samples.has} samples", hint="lower it")
            self._samples[split] = samples
        self.card = described(self.card, self._samples["train"])
        if experiment.loss is None and (kind := TARGETS.get(self.card.loss)):
            self._samples = {split: samples.with_targets(kind) for split, samples in self._samples.items()}
        self.numerics.take_data(self.card.loss, self.card.target_shape)

    def sources(self) -> Sources | None:
        """The sources of a user's model, with the files that this process has read so far."""
        if not isinstance(self.params.model, UserModel):
            return None
        return find_sources(self.params.model, {**recalled(self.params.model), **self.watched.files()})

    def place(self, model: nn.Module) -> nn.Module:
        """Prepare a model for these numerics and move it to the worker's device."""
        self.numerics.prepare(model)
        return model.to(self.worker.device)

    def load(self, folder: Path, split: Literal["train", "test"] = "train", *, at_least: int = 0) -> AnyData:
        """A split of the data, on the device if it fits; repeated up to ``at_least`` samples if it has fewer.

        Raises UserError: see ``load_data``.
        """
        if samples := self._samples.get(split):
            return samples.up_to(at_least)
        inputs, targets = load_data(folder, self.card, split)
        if (times := -(-at_least // len(inputs))) > 1:
            inputs, targets = (torch.cat([tensor] * times)[:at_least] for tensor in (inputs, targets))
        return on_device((inputs, targets), self.worker.device)

    def batches(self, data: AnyData) -> Feed:
        """The micro-batches of this rank from ``data``."""
        rank, device = self.worker.rank, self.worker.device
        epochs, seed = self.params.train.epochs, self.params.seed
        if isinstance(data, Samples):
            groups = groups_of(self.split.samples, self.params.total_steps) if self.numerics.name == "exact" else 0
            loader = self.params.train.loader
            return LoadedBatches(data, self.split, loader, rank=rank, seed=seed, device=device, groups=groups)
        return Batches(data, self.card, self.split, rank=rank, seed=seed, device=device, epochs=epochs)

    def in_order(self, data: AnyData, rows: int) -> Iterator[Pair]:
        """All samples once, ``rows`` at a time, on the device; the last batch may be short."""
        device = self.worker.device
        if isinstance(data, Samples):
            return in_order(data, rows, self.params.train.loader, device)
        pieces = zip(*(torch.split(tensor, rows) for tensor in data), strict=True)
        return (Pair(model_inputs(x.to(device), self.card), y.to(device)) for x, y in pieces)

    def try_step(
        self,
        model: nn.Module,
        batches: Feed,
        placement: Placement,
        *,
        wants_ranks: bool,
        before_restore: Callable[[], None] = lambda: None,
    ) -> list[ModelNote]:
        """Run the placed model once before it is wrapped, and restore it. Raises what ``trial_step`` raises."""
        model.train()  # as in the training: the factory may have left another mode
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
                synced=placement.has_ranks and self.params.train.ddp.synchronizes(placement.device_type),
                seen=seen if self.numerics.name == "fast" else None,
            )
        self.draws = tuple(seen.modules)
        notes += self._batch_losses(placement)
        before_restore()
        initial.restore()
        return notes

    def try_metrics(self, model: nn.Module, data: AnyData) -> None:
        """Run the placed model's metrics on some samples, before hours of training. Raises what they raise."""
        initial = Snapshot(model)
        pairs = islice(self.in_order(data, self.split.rows_of_evaluation), 2)
        module, device = self.numerics.module(model), self.worker.device
        evaluate(module, self.numerics, pairs, classes=False, device=device, model=model)
        initial.restore()

    def _batch_losses(self, placement: Placement) -> list[ModelNote]:
        """A note on a loss of several samples that never gets the whole batch."""
        own, split = self.numerics.own_loss, self.split
        samples = split.rows_per_unit if split.shards else placement.rows_per_device
        if own is None or not own.of_batch or samples == split.samples:
            return []
        part: Literal["device", "micro-batch"] = "device" if placement.devices_used > 1 else "micro-batch"
        return [BatchLoss(part="shard" if split.shards else part, samples=samples, batch=split.samples)]

    def _require_same(self, model: nn.Module, batch: MicroBatch) -> None:
        """Under ``exact``, require the same bits from a second pass of a model, and from a second build of it.

        The model has not run before, so state that it keeps from its first pass shows. Objects of a second build lie
        elsewhere in memory. It is built only if it surely fits, and only counts if the factory makes new parameters.
        Raises UserError: the model gives other bits.
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

    def survey(self, data: AnyData, refusals: Refusals) -> None:
        """Build the model once more and note everything in it that ``exact`` refuses."""
        numerics = self._exact_again()
        model = self._build(numerics.construction(refusals)).model
        numerics.survey(model, self.batches(data).micro_batch(0, 0), refusals)

    def _exact_again(self) -> ExactNumerics:
        numerics = make_numerics(self.params, "exact", self.card, split=self.split, device=self.worker.device)
        assert isinstance(numerics, ExactNumerics)
        return numerics

    def trainable(self, model: nn.Module, batches: Feed) -> Trainable:
        """The placed model under the strategy, with its optimizer."""
        return Trainable(model=model, batches=batches, worker=self.worker, numerics=self.numerics, params=self.params)


def make_numerics(
    params: Params, name: NumericsName, card: Card, *, split: BatchSplit, device: torch.device
) -> Numerics:
    """The numerics of that name for global batches with this split."""
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
        batch_norm=params.exact.batch_norm,
    )
