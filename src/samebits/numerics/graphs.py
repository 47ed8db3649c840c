"""CUDA graphs of a module's forward and backward passes, each of which then costs the host one launch.

Loss, communication and optimizer stay outside. The module is captured before ``DistributedDataParallel`` wraps it, as
PyTorch's notes on CUDA semantics require for partial captures ("Usage with DistributedDataParallel").
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.errors import SamebitsError, UserError, few, first_line, place_of
from samebits.numerics.allocators import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

_WARM_UP_PASSES = 3  # PyTorch's default; the 11 that it asks for under DDP are for a capture of DDP's own passes
_TURN_OFF = "or set train.cuda_graphs: false"


def capture(module: nn.Module, sample: Sequence[Tensor], check: Sequence[Tensor]) -> None:
    """Make a module replay graphs of its training passes from now on, for arguments of the shapes of ``sample``.

    A replay over ``check`` must give the bits of the module's own passes. Parameters and buffers must stay where they
    are in memory. The caller restores buffers and random streams.

    Raises:
        UserError: forward or backward cannot be captured, or the graph gives other results.
        torch.OutOfMemoryError: the graphs do not fit.
    """
    module.train()
    start = _State(module)
    expected = _passes(module, check)
    start.require_graph_safe(module)
    try:
        torch.cuda.make_graphed_callables(
            module,
            tuple(tensor.clone() for tensor in sample),
            num_warmup_iters=_WARM_UP_PASSES,
            allow_unused_input=True,
        )
    except Exception as error:
        raise _explained(error) from error
    # The graphs keep nodes alive that were made on the stream of the capture. So the backward pass waits once for
    # another stream, and PyTorch would warn of it.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    start.restore()
    if not _same_bits(expected, _passes(module, check)):
        raise UserError(
            "train.cuda_graphs: a captured pass gave other numbers than the model itself",
            hint=f"let forward depend on its input, parameters and buffers alone, {_TURN_OFF}",
        )


def written_in_forward(names: Iterable[str]) -> UserError:
    """Error for a model whose forward writes state, which a graph would write only once, at its capture."""
    return UserError(
        f"train.cuda_graphs: {few(list(names))}: written in forward, which a CUDA graph does not run again",
        hint=f"keep such state out of the model, {_TURN_OFF}",
    )


class _State:
    """Buffers and random streams before a pass. Those of the device are restored; those of the host must not move."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        device = next(module.parameters()).device
        on_gpu = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        self._random = self._generator.get_state()
        self._counts_torch = on_gpu
        self._host = self._host_draws()

    def _host_draws(self) -> list[object]:
        """States of the host's random generators, which a graph does not advance."""
        torchs = [torch.default_generator.get_state().numpy().tobytes()] if self._counts_torch else []
        return [random.getstate(), repr(np.random.get_state()), *torchs]  # noqa: NPY002 - the one that a model may use

    def require_graph_safe(self, module: nn.Module) -> None:
        """Raise UserError if the passes since then drew random numbers on the host or replaced buffers."""
        if self._host_draws() != self._host:
            raise UserError(
                "train.cuda_graphs: forward draws random numbers on the host, which a CUDA graph would repeat for ever",
                hint=f"draw them on the input's device, {_TURN_OFF}",
            )
        kept = {id(buffer) for buffer, _ in self._buffers}
        if replaced := [name for name, buffer in module.named_buffers() if id(buffer) not in kept]:
            raise written_in_forward(replaced)

    def restore(self) -> None:
        """Restore buffers and the device's random stream."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._generator.set_state(self._random)


def _passes(module: nn.Module, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of a forward pass and gradients of their sum."""
    outputs = module(*arguments)
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad(outputs, parameters, torch.ones_like(outputs), allow_unused=True)
    return [tensor.detach().clone() for tensor in (outputs, *grads) if tensor is not None]


def _same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().flatten().view(torch.uint8)

    return len(a) == len(b) and all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def _explained(error: Exception) -> Exception:
    """The error of a capture in plain words, from its first cause: ending a broken capture raises another error."""
    cause = error
    while isinstance(cause.__context__, Exception):
        cause = cause.__context__
    if isinstance(cause, SamebitsError) or is_out_of_memory(cause):
        return cause
    where = f"{place}: " if (place := place_of(cause)) else ""
    return UserError(
        f"train.cuda_graphs: {where}the model cannot be captured: {first_line(str(cause))}",
        hint=f"take .item(), .cpu(), print and branches on a tensor's values out of forward, {_TURN_OFF}",
    )
