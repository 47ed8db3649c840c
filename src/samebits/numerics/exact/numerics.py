"""``exact`` as the training loop sees it."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Literal

import torch

from samebits.errors import UserError, few
from samebits.numerics.exact.elementary import divisor
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.losses import each_loss, summed_loss
from samebits.numerics.exact.module import ExactModule, narrowed, require_plain, widen
from samebits.numerics.exact.optimizers import SGD, AdamW
from samebits.numerics.exact.windows import Windows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from samebits.numerics.batch import MicroBatch
    from samebits.numerics.interface import OverRanks
    from samebits.params.schema import Train


class ExactNumerics:
    """One set of bits for any device, strategy and number of devices.

    A global batch has so many ``samples`` in so many ``shards``, with targets of ``target_shape``. ``independent``: the
    model is known to treat each sample by itself, so that shards need not be kept apart.
    """

    name: Literal["exact"] = "exact"
    reduction: Literal["sum"] = "sum"

    def __init__(
        self,
        train: Train,
        device: torch.device,
        loss: Literal["cross_entropy", "mse"],
        target_shape: tuple[int, ...],
        *,
        seed: int,
        shards: int,
        samples: int,
        independent: bool,
    ) -> None:
        self._train, self._device, self._loss = train, device, loss
        self._seed, self._shards, self._samples, self._independent = seed, shards, samples, independent
        self._targets = samples * math.prod(target_shape)
        self._groups: list[list[nn.Parameter]] = []
        self._replaced: dict[str, Tensor] = {}
        self.windows = Windows()

    def configure(self) -> None:
        """Choose forms of operations that the engine can see into; called once in a worker."""
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_math_sdp(True)
        torch.backends.mha.set_fastpath_enabled(False)
        torch.backends.opt_einsum.enabled = False  # else the order of products depends on a package
        torch._C._jit_set_texpr_fuser_enabled(False)

    def building(self) -> Engine:
        """What a factory computes is exact too; random numbers are for ``portable_initialization`` to draw."""
        return Engine(during="the model's construction")

    def adopt(self, model: nn.Module) -> None:
        """Give the model float64 parameters; see ``widen``."""
        require_plain(model)
        self._groups, self._replaced = widen(model)
        if "torch._dynamo" in sys.modules and not self._train.compile:
            torch.compiler.set_stance("force_eager")  # for functions that the model compiles

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """What is saved: the state of the model as it was built."""
        return narrowed(model)

    def module(self, model: nn.Module) -> nn.Module:
        """What a strategy wraps."""
        return ExactModule(
            model,
            windows=self.windows,
            shards=self._shards,
            global_batch=self._samples,
            seed=self._seed,
            independent=self._independent,
        )

    def compile(self, module: nn.Module) -> nn.Module:
        """The module as it is: a compiler may fuse what must be rounded apart."""
        return module

    def outputs(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """Run the module on whole shards; (samples, ...)."""
        numbers = torch.tensor(list(batch.shards), device=batch.inputs.device)
        inputs = batch.inputs.reshape(len(batch.shards), -1, *batch.inputs.shape[1:])
        found: Tensor = module(inputs, numbers, batch.step)
        return found.flatten(0, 1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum over samples."""
        return summed_loss(outputs, targets, self._loss, self._targets, self.windows)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target, rounded once."""
        return each_loss(outputs, targets, self._loss)[0].flatten()

    def optimizer(self, model: nn.Module) -> SGD | AdamW:  # noqa: ARG002 - its parameters were adopted
        """The optimizer of params.yaml."""
        chosen = self._train.optimizer
        common: dict[str, Any] = {
            "lr": chosen.lr,
            "weight_decay": chosen.weight_decay,
            "terms": self._targets,
            "clip": self._train.clip_grad_norm,
        }
        if chosen.name == "sgd":
            return SGD(self._groups, momentum=chosen.momentum, **common)
        return AdamW(self._groups, **common)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        with Engine():
            loss.backward()  # type: ignore[no-untyped-call]

    def settled(self, largest: OverRanks) -> bool:
        """Whether the gradients stand; if not, the step is to be made again. Every rank must call it.

        Raises:
            UserError: a parameter was used that is not the model's any more, or a magnitude is infinite or NaN.
        """
        stray = [place for place, parameter in self._replaced.items() if parameter.grad is not None]
        if stray:
            raise UserError(
                f"exact: {few(stray)}: forward uses it from beside the model, where it is not trained",
                hint="read the parameter from its module in forward, as in self.layer.weight",
            )
        self._replaced.clear()  # the first step has shown it
        return self.windows.settle(largest, self._device)

    def step(self, optimizer: SGD | AdamW) -> None:
        """Update the weights."""
        optimizer.step()

    def mean_losses(self, losses: Tensor, total: OverRanks, ranks: int) -> list[float]:  # noqa: ARG002
        """Mean losses of global batches from the sums of this rank's parts."""
        mean = total(losses).div_(divisor(losses, self._targets))
        found: list[float] = mean.to(torch.float32).tolist()
        return found

    def state(self) -> dict[str, Any]:
        """The windows."""
        return {"tops": dict(self.windows.tops), "widened": self.windows.widened}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to windows."""
        self.windows.clear()
        self.windows.tops |= state["tops"]
        self.windows.widened = state["widened"]

    def facts(self) -> dict[str, Any]:
        """Steps that were made again, and the share of numbers that were too small for a sum over the batch."""
        lost, there = self.windows.below()
        return {"steps_made_again": self.windows.widened, "below_window": lost / there if there else 0.0}

    def reset(self, optimizer: SGD | AdamW) -> None:
        """Forget what the optimizer and the windows have reached."""
        optimizer.state.clear()
        self.windows.clear()
