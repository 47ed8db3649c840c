"""Steps of recurrent layers, forward and back, in float64; each state is rounded to float32 once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.elementary import sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.numerics.exact.compiled.library import Kernels

    States = list[Tensor]  # float64, (samples, width), the hidden one first


class Cell(NamedTuple):
    """One step: ``step`` returns the new states and what ``slopes`` needs, which goes back from their gradients.

    ``step`` takes what the gates get from the layer's input and from its hidden state, and the states before.
    ``slopes`` returns the gradients of both, one if they are the same, and those of the states before, without what
    the hidden one gets by its product.
    """

    states: int
    inputs: int
    step: Callable[[Tensor, Tensor, States], tuple[States, States]]
    slopes: Callable[[States, States, States], tuple[States, list[Tensor | None]]]


def _empty(like: Tensor, widths: str) -> States:
    """Float64 tensors (samples, each of these multiples of a state's width)."""
    return [like.new_empty((like.shape[0], int(width) * like.shape[1])) for width in widths]


def _compiled_lstm(library: Kernels, x: Tensor, hidden: Tensor, before: States) -> tuple[States, States] | None:
    if not library.takes(x) or not library.takes(hidden, before[1], dtype=torch.float64):
        return None
    out = _empty(before[1], "4111")
    library.call("lstm", x, hidden, before[1], *out, *before[1].shape, threads())
    return out[2:], out[:2]


@compiled(_compiled_lstm)
def _lstm(x: Tensor, hidden: Tensor, before: States) -> tuple[States, States]:
    """Hochreiter and Schmidhuber 1997, with forget gates. One sigmoid is for all gates, see ``_tanh``."""
    gates = x.add(hidden)
    gates.chunk(4, 1)[2].mul_(2.0)
    gates = sigmoid(gates)
    entry, forget, candidate, out = gates.chunk(4, 1)
    candidate.mul_(2.0).sub_(1.0)
    cell = _rounded(forget.mul(before[1]).add_(entry.mul(candidate)))
    shown = _tanh(cell)
    return [out.mul(shown), cell], [gates, shown]


def _compiled_lstm_slopes(
    library: Kernels, grads: States, before: States, saved: States
) -> tuple[States, list[Tensor | None]] | None:
    if not library.takes(*grads, before[1], *saved, dtype=torch.float64):
        return None
    slopes, earlier = _empty(before[1], "41")
    library.call("lstm_slopes", *grads, before[1], *saved, slopes, earlier, *before[1].shape, threads())
    return [slopes], [None, earlier]


@compiled(_compiled_lstm_slopes)
def _lstm_slopes(grads: States, before: States, saved: States) -> tuple[States, list[Tensor | None]]:
    gates, shown = saved
    entry, forget, candidate, out = gates.chunk(4, 1)
    cell = grads[1].add(grads[0].mul(out).mul_(_slope_of_tanh(shown)))
    slopes = torch.cat(
        [
            cell.mul(candidate).mul_(_slope_of_sigmoid(entry)),
            cell.mul(before[1]).mul_(_slope_of_sigmoid(forget)),
            cell.mul(entry).mul_(_slope_of_tanh(candidate)),
            grads[0].mul(shown).mul_(_slope_of_sigmoid(out)),
        ],
        1,
    )
    return [slopes], [None, cell.mul(forget)]


def _compiled_gru(library: Kernels, x: Tensor, hidden: Tensor, before: States) -> tuple[States, States] | None:
    if not library.takes(x) or not library.takes(hidden, *before, dtype=torch.float64):
        return None
    out = _empty(before[0], "2111")
    library.call("gru", x, hidden, *before, *out, *before[0].shape, threads())
    return out[3:], out[:3]


@compiled(_compiled_gru)
def _gru(x: Tensor, hidden: Tensor, before: States) -> tuple[States, States]:
    """Cho et al. 2014, with the reset gate behind the product, as in PyTorch."""
    width = before[0].shape[1]
    gates = sigmoid(x[:, : 2 * width].add(hidden[:, : 2 * width]))
    reset, update = gates.chunk(2, 1)
    own = _rounded(hidden[:, 2 * width :])
    candidate = _tanh(x[:, 2 * width :].add(reset.mul(own)))
    state = before[0].sub(candidate).mul_(update).add_(candidate)
    return [state], [gates, candidate, own]


def _compiled_gru_slopes(
    library: Kernels, grads: States, before: States, saved: States
) -> tuple[States, list[Tensor | None]] | None:
    if not library.takes(*grads, *before, *saved, dtype=torch.float64):
        return None
    of_x, of_hidden, earlier = _empty(before[0], "331")
    library.call("gru_slopes", *grads, *before, *saved, of_x, of_hidden, earlier, *before[0].shape, threads())
    return [of_x, of_hidden], [earlier]


@compiled(_compiled_gru_slopes)
def _gru_slopes(grads: States, before: States, saved: States) -> tuple[States, list[Tensor | None]]:
    gates, candidate, own = saved
    reset, update = gates.chunk(2, 1)
    inner = grads[0].mul(update.neg().add_(1.0)).mul_(_slope_of_tanh(candidate))
    of_update = before[0].sub(candidate).mul_(grads[0]).mul_(_slope_of_sigmoid(update))
    of_reset = inner.mul(own).mul_(_slope_of_sigmoid(reset))
    slopes = torch.cat([of_reset, of_update, inner], 1)
    return [slopes, torch.cat([of_reset, of_update, inner.mul(reset)], 1)], [grads[0].mul(update)]


def _simple(x: Tensor, hidden: Tensor, before: States) -> tuple[States, States]:  # noqa: ARG001
    state = _tanh(x.add(hidden))
    return [state], [state]


def _simple_slopes(grads: States, before: States, saved: States) -> tuple[States, list[Tensor | None]]:  # noqa: ARG001
    return [grads[0].mul(_slope_of_tanh(saved[0]))], [None]


def _relu(x: Tensor, hidden: Tensor, before: States) -> tuple[States, States]:  # noqa: ARG001
    state = x.add(hidden)
    state = torch.where(state <= 0, 0.0, state)
    return [state], [state]


def _relu_slopes(grads: States, before: States, saved: States) -> tuple[States, list[Tensor | None]]:  # noqa: ARG001
    return [torch.where(saved[0] <= 0, 0.0, grads[0])], [None]


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


LSTM = Cell(2, 1, _lstm, _lstm_slopes)
GRU = Cell(1, 2, _gru, _gru_slopes)
TANH = Cell(1, 1, _simple, _simple_slopes)
RELU = Cell(1, 1, _relu, _relu_slopes)
