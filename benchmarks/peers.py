"""The same training in other libraries' loops, each as in the library's documentation.

Their sampler has the kit's order of samples, so that the work is the same. Drawing that order is not timed.
"""

from __future__ import annotations

import logging
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bare import OPTIMIZER, resetting
from common import Variant

if TYPE_CHECKING:
    from torch import Tensor

    from bare import Loop, Setting


def _loader(setting: Setting) -> DataLoader[Any]:
    """The tutorials' loader, with the order in place of ``shuffle=True``."""
    _, rows = setting.order.shape
    sampler = setting.order.flatten().tolist()
    return DataLoader(TensorDataset(*setting.data), batch_size=rows, sampler=sampler, num_workers=0)


def dataloader(setting: Setting, name: str) -> Variant:
    """PyTorch's tutorials: a DataLoader over a TensorDataset."""
    model, loader = setting.model, _loader(setting)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)

    def run() -> None:
        losses = []
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        setting.losses[name] = torch.stack(losses).tolist()

    return Variant(run, resetting(model, optimizer.state.clear))


def accelerate(setting: Setting, name: str) -> Variant:
    """Accelerate's quick start: everything prepared, and its ``backward``."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = torch.optim.SGD(setting.model.parameters(), **OPTIMIZER)
    model, optimizer, loader = accelerator.prepare(setting.model, plain, _loader(setting))

    def run() -> None:
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        setting.losses[name] = torch.stack(losses).tolist()

    return Variant(run, resetting(setting.model, plain.state.clear))


def lightning(setting: Setting, name: str) -> Variant:
    """Lightning's Trainer with automatic optimisation, without its features beside the loop.

    Each slice has a new Trainer. Its clock runs from the start to the end of the training, without the set-up.
    """
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: list[Tensor] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = setting.model

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            inputs, targets = batch
            loss = F.cross_entropy(self.model(inputs), targets)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), **OPTIMIZER)

    class Clock(pl.Callback):  # type: ignore[misc]
        started = spent = 0.0

        def on_train_start(self, *_: Any) -> None:
            self.started = setting.clock()

        def on_train_end(self, *_: Any) -> None:
            self.spent = setting.clock() - self.started

    module, loader, clock = Module(), _loader(setting), Clock()
    trainers: list[pl.Trainer] = []

    def make_trainer() -> None:
        trainers[:] = [
            pl.Trainer(
                max_epochs=1,
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[clock],
            )
        ]

    def run() -> float:
        losses.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about loaders without workers; these read from memory
            trainers[0].fit(module, loader)
        setting.losses[name] = torch.stack(losses).tolist()
        return clock.spent

    return Variant(run, resetting(setting.model, make_trainer))


PEERS: dict[str, Loop] = {"dataloader": dataloader, "lightning": lightning, "accelerate": accelerate}


def available() -> tuple[dict[str, Loop], dict[str, str]]:
    """The installed peers, and the version of each package, or why it is unavailable."""
    loops, packages = dict(PEERS), {}
    for package in ("lightning", "accelerate"):
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            packages[package] = "unavailable: not installed"
            del loops[package]
    return loops, packages
