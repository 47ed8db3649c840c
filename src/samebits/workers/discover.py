"""Run a user's model once, to see what it imports and opens while it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from samebits.errors import few
from samebits.records.card import read_card
from samebits.strategies import BASELINE
from samebits.strategies.placement import Devices
from samebits.training.models.sources import remember
from samebits.training.placement import place
from samebits.training.setup import Setup
from samebits.training.worker import Worker
from samebits.workers.processes import launch
from samebits.workers.rank import run_trial

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.params import Params
    from samebits.strategies.placement import Placement
    from samebits.workers.rank import Reporter

_SECONDS = 120


def discover(params: Params, data_dir: Path) -> None:
    """Build the model and make one step with the samples of ``data_dir``, on the CPU; keep what that reads.

    Raises SamebitsError: it cannot be built, or run.
    """
    train = params.train.model_copy(update={"global_batch_size": params.data.num_samples, "grad_accum_steps": 1})
    params = params.model_copy(update={"train": train.model_copy(update={"compile": False, "num_devices": "auto"})})
    placement, split = place(BASELINE.name, params, "fast", Devices(gpus=0, cores=1))

    def work(reporter: Reporter) -> None:
        run_trial(lambda: _Look(params, placement, split, data_dir), placement, reporter, seconds=_SECONDS)

    launch(work, 1)


class _Look:
    """The one rank of it."""

    def __init__(self, params: Params, placement: Placement, split: BatchSplit, data_dir: Path) -> None:
        self.worker = Worker([torch.device("cpu")])
        self.model: nn.Module | None = None
        self._params, self._placement, self._data_dir = params, placement, data_dir
        self._setup = Setup(params, "fast", read_card(data_dir / "card.json"), split=split, worker=self.worker)

    def run(self) -> None:
        """Build, make a step, and keep what was read."""
        setup, model = self._setup, self._params.model
        setup.enter_process()
        self.model = setup.place(setup.build())
        setup.try_step(self.model, setup.batches(setup.load(self._data_dir)), self._placement, wants_ranks=False)
        remember(model, setup.watched.files())
        if unseen := setup.watched.unseen():
            sys.stderr.write(f"{model.name} reads {few(unseen)}, which nobody watches: an edit of it trains nothing\n")
