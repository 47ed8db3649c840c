"""Backward passes within the modes of ``exact``, and a digest of what passes give."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import _engine_run_backward

from samebits.errors import RefusedError
from samebits.numerics.exact.engine import ONCE, RUNS_AGAIN
from samebits.numerics.exact.kept import bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from samebits.numerics.exact.forward_draws import Draws


def run_backward(loss: Tensor) -> None:
    """``loss.backward()`` within all entered modes; PyTorch's own leaves the function modes first."""
    with _once():
        _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
                             accumulate_grad=True)  # fmt: skip


def gradients(outputs: Tensor, entered: dict[str, Tensor], slopes: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the entered parameters that are trained."""
    trained = [tensor for tensor in entered.values() if tensor.requires_grad]
    with _once():
        return torch.autograd.grad(outputs, trained, slopes, allow_unused=True)


@contextmanager
def _once() -> Iterator[None]:
    """Refuse a forward pass that PyTorch has run again, and has found to be another than before."""
    try:
        yield
    except RuntimeError as error:
        if "torch.utils.checkpoint" not in str(error):
            raise
        raise RefusedError(RUNS_AGAIN, hint=ONCE, at="in the backward pass") from error


def digest_of(outputs: Tensor, grads: Iterable[Tensor | None], draws: Draws) -> bytes:
    """A digest of a shard's outputs and gradients, and its number of draws."""
    digest = hashlib.blake2b()
    for tensor in (outputs, *(grad for grad in grads if grad is not None)):
        digest.update(bits(tensor.cpu()))
    return digest.digest() + bytes(str(draws.count), "ascii")
