"""Steps of recurrent layers, forward and back, in float64. States and what is kept of a step are float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.elementary import sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.numerics.exact.compiled.library import Kernels

    Rows = Sequence[Tensor]  # (samples, width or some of it), dense


class Cell(NamedTuple):
    """One step; float32 rows are written where they stay.

    ``step(x, product, bias, before, out)`` takes what the gates get from the layer's input, float32, and from its
    hidden state, float64, with the bias of that, and the states before. It writes the new states, the hidden one first,
    and what ``slopes`` needs, of which ``kept`` has the widths as multiples of a state's.

    ``slopes(grads, before, kept, out)`` takes the gradients of the states, float64, and writes those of ``inputs``,
    which are the gates of x and of the product, or both if they are the same. It returns the gradients of the states
    before, without what the hidden one gets by its product.
    """

    states: int
    inputs: int
    kept: tuple[int, ...]
    step: Callable[[Tensor, Tensor, Tensor | None, Rows, Rows], bool]
    slopes: Callable[[Rows, Rows, Rows, Rows], list[Tensor | None]]


def _hidden(product: Tensor, bias: Tensor | None) -> Tensor:
    """What gates get from the hidden state. A zero of a product may have either sign."""
    product = product.add(0.0)
    return product if bias is None else product.add_(bias)


def _write(out: Rows, *found: Tensor) -> bool:
    """Round what was found to where it stays. It is true, which tells ``compiled`` of an answer."""
    for kept, one in zip(out, found, strict=True):
        kept.copy_(one)
    return True


def _float64(rows: Rows) -> list[Tensor]:
    return [one.to(torch.float64) for one in rows]


def _by_kernel(name: str) -> Callable[..., bool | None]:
    def step(library: Kernels, x: Tensor, product: Tensor, bias: Tensor | None, before: Rows, out: Rows) -> bool | None:
        if not library.takes(x, bias, before[-1], *out) or not library.takes(product, dtype=torch.float64):
            return None
        library.call(name, x, product, bias, before[-1], *out, *before[-1].shape, threads())
        return True

    return step


def _slopes_by_kernel(name: str) -> Callable[..., list[Tensor | None] | None]:
    def slopes(library: Kernels, grads: Rows, before: Rows, kept: Rows, out: Rows) -> list[Tensor | None] | None:
        if not library.takes(*grads, dtype=torch.float64) or not library.takes(before[-1], *kept, *out):
            return None
        earlier = torch.empty_like(grads[-1])
        library.call(name, *grads, before[-1], *kept, *out, earlier, *before[-1].shape, threads())
        return [*([None] * (len(grads) - 1)), earlier]

    return slopes


@compiled(_by_kernel("lstm"))
def _lstm(x: Tensor, product: Tensor, bias: Tensor | None, before: Rows, out: Rows) -> bool:
    """Hochreiter and Schmidhuber 1997, with forget gates. One sigmoid is for all gates, see ``_tanh``."""
    gates = x.add(_hidden(product, bias))
    gates.chunk(4, 1)[2].mul_(2.0)
    gates = sigmoid(gates)
    entry, forget, candidate, shown = gates.chunk(4, 1)
    candidate.mul_(2.0).sub_(1.0)
    cell = _rounded(forget.mul(before[1]).add_(entry.mul(candidate)))
    now = _tanh(cell)
    return _write(out, shown.mul(now), cell, gates, now)


@compiled(_slopes_by_kernel("lstm_slopes"))
def _lstm_slopes(grads: Rows, before: Rows, kept: Rows, out: Rows) -> list[Tensor | None]:
    gates, now = _float64(kept)
    entry, forget, candidate, shown = gates.chunk(4, 1)
    cell = grads[1].add(grads[0].mul(shown).mul_(_slope_of_tanh(now)))
    slopes = torch.cat(
        [
            cell.mul(candidate).mul_(_slope_of_sigmoid(entry)),
            cell.mul(before[1]).mul_(_slope_of_sigmoid(forget)),
            cell.mul(entry).mul_(_slope_of_tanh(candidate)),
            grads[0].mul(now).mul_(_slope_of_sigmoid(shown)),
        ],
        1,
    )
    _write(out, slopes)
    return [None, cell.mul(forget)]


@compiled(_by_kernel("gru"))
def _gru(x: Tensor, product: Tensor, bias: Tensor | None, before: Rows, out: Rows) -> bool:
    """Cho et al. 2014, with the reset gate behind the product, as in PyTorch."""
    width, hidden = before[0].shape[1], _hidden(product, bias)
    gates = sigmoid(x[:, : 2 * width].add(hidden[:, : 2 * width]))
    reset, update = gates.chunk(2, 1)
    own = _rounded(hidden[:, 2 * width :])
    candidate = _tanh(x[:, 2 * width :].add(reset.mul(own)))
    state = before[0].sub(candidate).mul_(update).add_(candidate)
    return _write(out, state, gates, candidate, own)


@compiled(_slopes_by_kernel("gru_slopes"))
def _gru_slopes(grads: Rows, before: Rows, kept: Rows, out: Rows) -> list[Tensor | None]:
    gates, candidate, own = _float64(kept)
    reset, update = gates.chunk(2, 1)
    inner = grads[0].mul(update.neg().add_(1.0)).mul_(_slope_of_tanh(candidate))
    of_update = before[0].sub(candidate).mul_(grads[0]).mul_(_slope_of_sigmoid(update))
    of_reset = inner.mul(own).mul_(_slope_of_sigmoid(reset))
    slopes = torch.cat([of_reset, of_update, inner], 1)
    _write(out, slopes, torch.cat([of_reset, of_update, inner.mul(reset)], 1))
    return [grads[0].mul(update)]


def _simple(x: Tensor, product: Tensor, bias: Tensor | None, before: Rows, out: Rows) -> bool:  # noqa: ARG001
    state = _tanh(x.add(_hidden(product, bias)))
    return _write(out, state, state)


def _simple_slopes(grads: Rows, before: Rows, kept: Rows, out: Rows) -> list[Tensor | None]:  # noqa: ARG001
    _write(out, grads[0].mul(_slope_of_tanh(*_float64(kept))))
    return [None]


def _relu(x: Tensor, product: Tensor, bias: Tensor | None, before: Rows, out: Rows) -> bool:  # noqa: ARG001
    state = x.add(_hidden(product, bias))
    state = torch.where(state <= 0, 0.0, state)
    return _write(out, state, state)


def _relu_slopes(grads: Rows, before: Rows, kept: Rows, out: Rows) -> list[Tensor | None]:  # noqa: ARG001
    _write(out, torch.where(kept[0] <= 0, 0.0, grads[0]))
    return [None]


def _tanh(x: Tensor) -> Tensor:
    """Tanh to 2**-51, by half the steps of ``elementary.tanh``, which is as near for the smallest numbers."""
    return sigmoid(x.mul(2.0)).mul_(2.0).sub_(1.0)


def _slope_of_sigmoid(y: Tensor) -> Tensor:
    return y.neg().add_(1.0).mul_(y)


def _slope_of_tanh(y: Tensor) -> Tensor:
    return y.mul(y).neg_().add_(1.0)


def _rounded(x: Tensor) -> Tensor:
    """Float64 numbers that are float32 ones."""
    return x.to(torch.float32).to(torch.float64)


LSTM = Cell(2, 1, (4, 1), _lstm, _lstm_slopes)
GRU = Cell(1, 2, (2, 1, 1), _gru, _gru_slopes)
TANH = Cell(1, 1, (1,), _simple, _simple_slopes)
RELU = Cell(1, 1, (1,), _relu, _relu_slopes)
