"""``fast``: PyTorch's own kernels with deterministic algorithms; same bits on one kind of host and device layout."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samebits.errors import UserError
from samebits.numerics.dispatch import module_paths
from samebits.numerics.graphs import capture
from samebits.numerics.interface import Numerics, computed
from samebits.numerics.kernels import choose_kernels
from samebits.numerics.optimizers import grouped, optimizer_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.models.nested import Nested
    from samebits.numerics.draws import SharedDraws
    from samebits.numerics.interface import AllReduce, LossName, MicroBatch, OwnLoss
    from samebits.params.schema import Train

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FUSED = ("sgd", "adam", "adamw")  # of torch.optim, those with such a kernel for GPUs
_State = MutableMapping[Tensor, dict[str, Any]]


class ForwardPass(nn.Module):
    """The module that a strategy wraps: the user's model under autocast, with one tensor as output.

    Autocast is entered here and not in the loop, because ``DataParallel`` runs replicas in threads of their own. The
    output is a tensor so that its ``gather`` can join the parts.
    """

    def __init__(
        self, model: nn.Module, device_type: str, dtype: torch.dtype | None, own: OwnLoss | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._own = own
        self.loss = own.function if own else None  # a module moves with the others to a replica's device
        self.module_paths = module_paths(model)
        self._device_type, self._dtype = device_type, dtype

    def forward(self, inputs: Nested, targets: Nested = None) -> Tensor:
        """Return the model's tensor, or the ``logits`` of its output object; with an own loss, losses of samples."""
        context = torch.autocast(self._device_type, self._dtype) if self._dtype else nullcontext()
        with context:
            return computed(self.model, self._own, self.loss, inputs, targets)


def _copied(state: _State) -> _State:
    """A copy of an optimizer's state, whose tensors a step changes in place."""
    return {p: {key: v.clone() if isinstance(v, Tensor) else v for key, v in one.items()} for p, one in state.items()}


class FastNumerics(Numerics):
    """Precision, loss, backward pass and optimizer of one training in PyTorch's own arithmetic."""

    name = "fast"
    reduction = "mean"

    def __init__(self, train: Train, device: torch.device, loss: LossName) -> None:
        self._train, self._device = train, device
        self.take_data(loss)
        self._dtype = _AUTOCAST.get(train.precision)
        self._scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "fp16")
        self._initial_scale = self._scaler.state_dict()
        self._shared: SharedDraws | None = None
        self._initial_state: _State = {}

    def configure(self) -> None:
        """Set this process's precision and determinism, with the kernels that PyTorch itself would choose.

        Raises UserError: a variable of NVIDIA's libraries overrules the precision.
        """
        overruled = {"0": self._train.precision == "tf32", "1": self._train.precision != "tf32"}
        given = os.environ.get("NVIDIA_TF32_OVERRIDE", "")
        if self._device.type == "cuda" and overruled.get(given):
            raise UserError(
                f"NVIDIA_TF32_OVERRIDE is {given}, and train.precision is {self._train.precision}",
                hint="unset NVIDIA_TF32_OVERRIDE, which overrules train.precision in NVIDIA's libraries",
            )
        mode = "tf32" if self._train.precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"  # else reading it, as PyTorch's own code does, raises
        torch.backends.cuda.matmul.fp32_precision = mode
        torch.backends.cudnn.allow_tf32 = mode == "tf32"
        torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]
        choose_kernels(fused=True)
        torch.backends.cudnn.benchmark = False
        torch.set_deterministic_debug_mode("error")  # not use_deterministic_algorithms, which imports the compiler
        # Filling costs time. The one reader of such memory is handled in ``reset``.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def module(self, model: nn.Module) -> nn.Module:
        """The model under autocast."""
        return ForwardPass(model, self._device.type, self._dtype, self.take_loss(model, self._device))

    def compile(self, module: nn.Module) -> nn.Module:
        """The module compiled, for a strategy that allows it."""
        torch._inductor.config.deterministic = True
        compiled: nn.Module = torch.compile(module)  # type: ignore[assignment]
        return compiled

    @property
    def graphs(self) -> bool:
        """Whether train.cuda_graphs asks for them and the device supports them."""
        return self._train.cuda_graphs and self._train.why_no_graphs(self._device.type) is None

    def capture(self, module: nn.Module, sample: MicroBatch, check: MicroBatch) -> None:
        """Capture graphs and check them. Raises UserError: the model cannot be captured."""
        capture(module, self._fed(sample), self._fed(check))

    def _fed(self, batch: MicroBatch) -> tuple[Nested, ...]:
        return (batch.inputs, batch.targets) if self.own_loss and batch.targets is not None else (batch.inputs,)

    def forward(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """The module's outputs for all samples at once."""
        with self._shared.of(batch) if self._shared else nullcontext():
            outputs: Tensor = module(*self._fed(batch))
        return outputs

    @contextmanager
    def sharing(self, shared: SharedDraws) -> Iterator[None]:
        """Context in which a sample gets the same draws on any device."""
        self._shared = shared
        try:
            yield
        finally:
            self._shared = None

    def loss(self, outputs: Tensor, targets: Nested) -> Tensor:
        """Mean loss in float32; any axes between the first and the last count as samples."""
        outputs = outputs.float()
        if self.own_loss:
            return outputs.mean()
        assert isinstance(targets, Tensor)
        if self._loss == "mse":
            return F.mse_loss(outputs, targets)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def losses(self, outputs: Tensor, targets: Nested) -> Tensor:
        """The loss of each target."""
        outputs = outputs.float()
        if self.own_loss:
            return outputs
        assert isinstance(targets, Tensor)
        if self._loss == "mse":
            return F.mse_loss(outputs, targets, reduction="none").flatten()
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of params.yaml; fused on GPUs if it can be, which keeps ``fp16`` from waiting for them."""
        chosen = self._train.optimizer
        fused = {"fused": self._device.type == "cuda"} if chosen.name in _FUSED else {}
        optimizer = optimizer_for(model, chosen, grouped(model), **fused)
        self._initial_state = _copied(optimizer.state)
        return optimizer

    def backward(self, loss: Tensor) -> None:
        """Add the scaled loss's gradients to those of the parameters."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients if the params say so, and update the weights."""
        if self._train.clip_grad_norm is not None:
            self._scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._train.clip_grad_norm)
        self._scaler.step(optimizer)
        self._scaler.update()

    def mean_losses(self, losses: Tensor, all_reduce: AllReduce, ranks: int) -> list[float]:
        """The mean over ranks, whose parts of a batch are equal."""
        means: list[float] = (all_reduce(losses) / ranks).tolist()
        return means

    def state_dict(self) -> dict[str, Any]:
        """The gradient scale of ``fp16``."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a gradient scale."""
        self._scaler.load_state_dict(state)

    def reset(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the optimizer and the gradient scale.

        SGD's momentum starts as zeros, which gives the result of its own first step. Without them the fused optimizer
        fails at a parameter whose first gradient comes later than that of others, and leaves the allocated buffer
        unwritten if ``fp16`` skips the first step for an overflow.
        """
        self._scaler.load_state_dict(self._initial_scale)
        optimizer.state.clear()
        optimizer.state.update(_copied(self._initial_state))
        chosen = self._train.optimizer
        if chosen.name == "sgd" and chosen.momentum:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
