"""``fast``: PyTorch's own kernels, with deterministic algorithms; the same bits on one kind of host and layout."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samebits.numerics.outputs import tensor_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from samebits.numerics.batch import MicroBatch
    from samebits.numerics.interface import OverRanks
    from samebits.params.schema import Train

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is deterministic only with a fixed workspace
    "NCCL_ALGO": "Ring",  # the tree and NVLS reductions change their order between calls
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which NVML counts
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() must not start CUDA before the fork
}
"""Variables to set before CUDA starts, where the user has not set them."""


def prepare_environment() -> None:
    """Set ``ENVIRONMENT``; called before anything may start CUDA."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class ForwardPass(nn.Module):
    """The module that a strategy wraps: the user's model under autocast, reduced to one tensor.

    Autocast is entered here and not in the loop, because ``DataParallel`` runs replicas in threads of their
    own; the output is a tensor so that its ``gather`` can put the parts together.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self._device_type, self._dtype = device_type, dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's tensor, or the ``logits`` of its output object."""
        context = torch.autocast(self._device_type, self._dtype) if self._dtype else nullcontext()
        with context:
            return tensor_of(self.model(inputs))


class FastNumerics:
    """Precision, loss, backward pass and optimizer of one training in PyTorch's own arithmetic."""

    name: Literal["fast"] = "fast"
    reduction: Literal["mean"] = "mean"

    def __init__(self, train: Train, device: torch.device, loss: Literal["cross_entropy", "mse"]) -> None:
        self._train, self._device, self._loss = train, device, loss
        self._dtype = _AUTOCAST.get(train.precision)
        self._scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "fp16")
        self._initial_scale = self._scaler.state_dict()

    def configure(self) -> None:
        """Set this process's precision and determinism; called once in a worker."""
        self.set_precision()
        torch.backends.cudnn.benchmark = False
        torch.set_deterministic_debug_mode("error")  # not use_deterministic_algorithms, which imports the compiler
        # Filling costs time. What would read such memory is taken care of: see ``reset``.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def set_precision(self) -> None:
        """Set what float32 means on this process's GPUs; enough for a training that is only timed."""
        mode = "tf32" if self._train.precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = mode
        torch.backends.cudnn.allow_tf32 = mode == "tf32"  # else reading it, as PyTorch's own code does, raises
        torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]

    def building(self) -> AbstractContextManager[object]:
        """PyTorch's own arithmetic."""
        return nullcontext()

    def adopt(self, model: nn.Module) -> None:
        """Nothing is changed."""

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state."""
        return model.state_dict()

    def module(self, model: nn.Module) -> nn.Module:
        """What a strategy wraps."""
        return ForwardPass(model, self._device.type, self._dtype)

    def compile(self, module: nn.Module) -> nn.Module:
        """The module compiled, for a strategy that allows it."""
        torch._inductor.config.deterministic = True
        compiled: nn.Module = torch.compile(module)  # type: ignore[assignment]
        return compiled

    def outputs(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """Run the module."""
        found: Tensor = module(batch.inputs)
        return found

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in float32; any axes between the first and the last count as samples."""
        outputs = outputs.float()
        if self._loss == "mse":
            return F.mse_loss(outputs, targets)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target."""
        outputs = outputs.float()
        if self._loss == "mse":
            return F.mse_loss(outputs, targets, reduction="none").flatten()
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of params.yaml; fused on GPUs, which also keeps ``fp16`` from waiting for the device."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        chosen, fused = self._train.optimizer, self._device.type == "cuda"
        common: dict[str, Any] = {"lr": chosen.lr, "weight_decay": chosen.weight_decay, "fused": fused}
        if chosen.name == "sgd":
            return torch.optim.SGD(parameters, momentum=chosen.momentum, **common)
        return torch.optim.AdamW(parameters, **common)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def settled(self, largest: OverRanks) -> bool:  # noqa: ARG002 - nothing depends on other ranks
        """Gradients always stand."""
        return True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients if asked to, and update the weights."""
        if self._train.clip_grad_norm is not None:
            self._scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._train.clip_grad_norm)
        self._scaler.step(optimizer)
        self._scaler.update()

    def mean_losses(self, losses: Tensor, total: OverRanks, ranks: int) -> list[float]:
        """The mean over ranks, whose parts of a batch are equal."""
        found: list[float] = (total(losses) / ranks).tolist()
        return found

    def state(self) -> dict[str, Any]:
        """The gradient scale of ``fp16``."""
        return dict(self._scaler.state_dict())

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a gradient scale."""
        self._scaler.load_state_dict(state)

    def facts(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def reset(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget what the optimizer and the gradient scale have reached.

        Under ``fp16`` SGD gets its momentum as zeros, which gives what its own first step would: a fused first
        step that is skipped for an overflow would leave the buffer it allocated unwritten.
        """
        self._scaler.load_state_dict(self._initial_scale)
        optimizer.state.clear()
        chosen = self._train.optimizer
        if self._train.precision == "fp16" and chosen.name == "sgd" and chosen.momentum:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
