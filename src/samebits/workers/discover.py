"""Runs a user's model once to find the files that it imports and opens."""

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
    """Build the model, run one step with the samples of ``data_dir`` on the CPU, and keep the names of files read.

    Raises SamebitsError: the model cannot be built or run.
    """
    train = params.train.model_copy(update={"global_batch_size": params.data.num_samples, "grad_accum_steps": 1})
    params = params.model_copy(update={"train": train.model_copy(update={"compile": False, "num_devices": "auto"})})
    placement, split = place(BASELINE.name, params, "fast", Devices(gpus=0, cores=1))

    def work(reporter: Reporter) -> None:
        run_trial(lambda: _DiscoveryRank(params, placement, split, data_dir), placement, reporter, seconds=_SECONDS)

    launch(work, 1)


class _DiscoveryRank:
    """The only rank of a discovery."""

    def __init__(self, params: Params, placement: Placement, split: BatchSplit, data_dir: Path) -> None:
        self.worker = Worker([torch.device("cpu")])
        self.model: nn.Module | None = None
        self._params, self._placement, self._data_dir = params, placement, data_dir
        self._setup = Setup(params, "fast", read_card(data_dir / "card.json"), split=split, worker=self.worker)

    def run(self) -> None:
        """Build the model, run a step, and keep the names of the files that were read."""
        setup, model = self._setup, self._params.model
        setup.enter_process()
        self.model = setup.place(setup.build())
        setup.try_step(self.model, setup.batches(setup.load(self._data_dir)), self._placement, wants_ranks=False)
        remember(model, setup.watched.files())
        if unseen := setup.watched.unseen():
            sys.stderr.write(f"{model.name} reads {few(unseen)}, which nobody watches: an edit of it trains nothing\n")
