"""Recurrent networks under ``exact``: a layer's products with its input at once, and then step by step.

PyTorch's kernels differ between devices. Here the products are exact, a step's gates are computed in float64, and each
state is rounded to float32 once. A sequence of padded samples is one of packed samples that are all as long.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from samebits.numerics.exact import of_shards
from samebits.numerics.exact.cells import GRU, LSTM, RELU, TANH, Cell
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import bits_of_products, snap, snap_rows
from samebits.numerics.exact.integer_products import multiply
from samebits.numerics.exact.of_shards import UnderVmap, are_shared, first
from samebits.numerics.exact.operations.registry import bits_for
from samebits.numerics.exact.products import exact_matmul, products_of_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from samebits.numerics.exact.engine import Engine

_HINT = "give it float32, or set train.numerics: [fast]"


class _Steps(torch.autograd.Function):
    """The steps of one direction of a layer. Rows are ordered by step, and within a step by sample.

    ``sizes`` are the samples of each step, of which the first have more steps than the last. Shapes: x (rows, gates),
    states (samples, width), weight (gates, width), bias (gates), projection (shown, width); outputs (rows, shown), and
    the last states. With ``shards`` each row is followed by that of every other shard, and weight, bias and projection,
    which all share, have an axis of shards in front.
    """

    @staticmethod
    def forward(
        ctx: Any, cell: Cell, sizes: Sequence[int], back: bool, shards: int | None, x: Tensor, weight: Tensor,
        bias: Tensor | None, projection: Tensor | None, *states: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if shards is not None:
            sizes, weight = [samples * shards for samples in sizes], weight[0]
            bias, projection = (None if one is None else one[0] for one in (bias, projection))
        with below():
            steps = _slices(sizes, back=back)
            bits = bits_of_products(weight.shape[1])
            factor = snap_rows(weight, bits).mT
            if projection is not None:
                shown_bits = bits_of_products(projection.shape[1])
                shown_factor = snap_rows(projection, shown_bits).mT
            now, width = list(states), states[-1].shape[1]
            befores = [x.new_empty((x.shape[0], state.shape[1])) for state in states]
            outputs = x.new_empty((x.shape[0], states[0].shape[1]))
            wholes = None if projection is None else x.new_empty((x.shape[0], width))
            saved = [x.new_empty((x.shape[0], times * width)) for times in cell.kept]
            for rows, samples in steps:
                before = [kept[rows] for kept in befores]
                for kept, state in zip(before, now, strict=True):
                    kept.copy_(state[:samples])
                after = [(outputs if wholes is None else wholes)[rows], *map(torch.empty_like, before[1:])]
                product = multiply(snap_rows(before[0], bits), factor)
                cell.step(x[rows], product, bias, before, [*after, *(kept[rows] for kept in saved)])
                if wholes is not None:
                    outputs[rows] = exact_matmul(snap_rows(after[0], shown_bits), shown_factor)
                    after[0] = outputs[rows]
                now = _with_ended(after, now)
            ctx.cell, ctx.steps, ctx.bias, ctx.shards = cell, steps, bias is not None, shards
            ctx.save_for_backward(weight, projection, wholes, *befores, *saved)
            return outputs, *(one.clone() for one in now)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *last: Tensor) -> tuple[Tensor | None, ...]:
        cell: Cell = ctx.cell
        weight, projection, wholes, *others = ctx.saved_tensors
        befores, saved = others[: cell.states], others[cell.states :]
        of_gates = [grad.new_empty((grad.shape[0], weight.shape[0])) for _ in range(cell.inputs)]
        of_shown = grad.clone()
        with below():
            bits = bits_of_products(weight.shape[0])
            factor = snap(weight, 0, bits)
            if projection is not None:
                shown_bits = bits_of_products(projection.shape[0])
                shown_factor = snap(projection, 0, shown_bits)
            now = [one.to(torch.float64) for one in last]
            for rows, samples in reversed(ctx.steps):
                grads = [one[:samples] for one in now]
                grads[0] = grads[0].add(grad[rows])
                if projection is not None:
                    of_shown[rows] = grads[0]
                    grads[0] = exact_matmul(snap_rows(of_shown[rows], shown_bits), shown_factor)
                before, kept, gates = ([one[rows] for one in all_] for all_ in (befores, saved, of_gates))
                earlier = cell.slopes(grads, before, kept, gates)
                through = exact_matmul(snap_rows(of_gates[-1][rows], bits), factor)
                earlier[0] = through if earlier[0] is None else earlier[0].add_(through)
                now = _with_ended(earlier, now)  # type: ignore[arg-type]
            of_states = [one.to(torch.float32) for one in now]
        of_weight = _products(of_gates[-1], befores[0], ctx.shards)
        of_bias = _by_shard(of_gates[-1], ctx.shards).sum(-2) if ctx.bias else None
        of_projection = None if projection is None else _products(of_shown, wholes, ctx.shards)
        return None, None, None, None, of_gates[0], of_weight, of_bias, of_projection, *of_states


def _with_ended(states: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
    """The states after a step, with those of samples that had ended before it."""
    if len(states[0]) == len(before[0]):
        return [*states]
    return [torch.cat([new, old[len(new) :]]) for new, old in zip(states, before, strict=True)]


def _slices(sizes: Sequence[int], *, back: bool) -> list[tuple[slice, int]]:
    """The rows of each step, and their number, in the order in which steps are made."""
    steps, start = [], 0
    for samples in sizes:
        steps.append((slice(start, start + samples), samples))
        start += samples
    return steps[::-1] if back else steps


def _by_shard(rows: Tensor, shards: int | None) -> Tensor:
    """Rows, or with ``shards`` those of each, (shards, rows, width)."""
    return rows if shards is None else rows.view(-1, shards, rows.shape[1]).transpose(0, 1).contiguous()


def _products(left: Tensor, right: Tensor, shards: int | None) -> Tensor:
    """``left.mT @ right``, with ``shards`` of each alone."""
    one, other = _by_shard(left, shards), _by_shard(right, shards)
    if shards is None:
        return one.mT.mm(other)
    with below():
        return products_of_shards(one, other, bits_for(one.shape[1]))


class _StepsOfShards(UnderVmap):
    """``_Steps`` under ``torch.func.vmap``: the rows of all shards belong to one sequence."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _steps(*arguments)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], cell: Cell, sizes: Sequence[int], back: bool, _: None,
        *tensors: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], int]:  # fmt: skip
        """Outputs and last states with the axis of shards behind that of rows or samples, and its place."""
        shards = info.batch_size
        given = [None if x is None else first(x, dim, shards) for x, dim in zip(tensors, in_dims[4:], strict=True)]
        shared, rows = given[1:4], [one for one in (given[0], *given[4:]) if one is not None]
        if not all(one is None or are_shared(one) for one in shared):
            each = (
                _steps(cell, sizes, back, None, *(None if x is None else x[i] for x in given)) for i in range(shards)
            )
            return tuple(torch.stack(parts, 1) for parts in zip(*each, strict=True)), 1
        x, *states = (one.transpose(0, 1).flatten(0, 1) for one in rows)
        found = _steps(cell, sizes, back, shards, x, *shared, *states)
        return tuple(one.view(-1, shards, one.shape[1]) for one in found), 1


def _steps(*arguments: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _Steps.apply(*arguments)  # type: ignore[no-untyped-call]
    return results


class Recurrence:
    """PyTorch's functions of recurrent layers and cells, in a pass of ``engine``, which refuses what they cannot do.

    ``together``: several shards run in one pass.
    """

    def __init__(self, engine: Engine, *, together: bool = False) -> None:
        self._engine, self._together = engine, together

    def forms(self) -> dict[Any, Callable[..., Any]]:
        """The functions by those that they replace."""
        layers = {torch.lstm: LSTM, torch.gru: GRU, torch.rnn_tanh: TANH, torch.rnn_relu: RELU}
        cells = {torch.lstm_cell: LSTM, torch.gru_cell: GRU, torch.rnn_tanh_cell: TANH, torch.rnn_relu_cell: RELU}
        return {
            **{name: partial(self._layers, cell) for name, cell in layers.items()},
            **{name: partial(self._cell, cell) for name, cell in cells.items()},
        }

    def _layers(self, cell: Cell, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """``torch.lstm`` and others: (data, batch sizes, states, ...) of packed samples, or (input, states, ...)."""
        if packed := not isinstance(arguments[2], bool):
            sizes = [int(size) for size in arguments[0]]
            states, parameters, *settings = arguments[1:]
            rows = x
        else:
            states, parameters, *settings, batch_first = arguments
            x = x.transpose(0, 1) if batch_first else x
            sizes, rows = [x.shape[1]] * x.shape[0], x.flatten(0, 1)
        biases, layers, dropout, train, both_ways = settings
        if not sizes:
            raise self._engine.refusal("a sequence has no steps, expected at least one", "leave it out of the data")
        states = list(states) if cell.states > 1 else [states]
        ways = 2 if both_ways else 1
        each = len(parameters) // (layers * ways)
        last: list[list[Tensor]] = [[] for _ in states]
        for layer in range(layers):
            if layer and dropout:
                rows = F.dropout(rows, dropout, train)
            outputs = []
            for way in range(ways):
                number = layer * ways + way
                weights = parameters[number * each : (number + 1) * each]
                before = [one[number] for one in states]
                output, *after = self._steps(cell, sizes, rows, weights, before, biases=biases, back=way == 1)
                outputs.append(output)
                for kept, one in zip(last, after, strict=True):
                    kept.append(one)
            rows = torch.cat(outputs, 1) if both_ways else outputs[0]
        if not packed:
            rows = rows.view(*x.shape[:2], -1)
            rows = rows.transpose(0, 1) if batch_first else rows
        return rows, *map(torch.stack, last)

    def _cell(
        self, cell: Cell, x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """``torch.lstm_cell`` and others: one step, with PyTorch's names."""
        before = list(hx) if cell.states > 1 else [hx]
        given = [one for one in (w_ih, w_hh, b_ih, b_hh) if one is not None]
        _, *after = self._steps(cell, [x.shape[0]], x, given, before, biases=len(given) > 2, back=False)
        return tuple(after) if cell.states > 1 else after[0]

    def _steps(
        self, cell: Cell, sizes: Sequence[int], rows: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor], *,
        biases: bool, back: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        for tensor in (rows, *weights, *states):
            if tensor.dtype != torch.float32:
                raise self._engine.refusal(f"{tensor.dtype} has no exact version", _HINT)
        linear = of_shards.linear if self._together else F.linear
        x = linear(rows, weights[0], weights[2] if biases else None)
        bias, projection = weights[3] if biases else None, weights[-1] if len(weights) % 2 else None
        run = _StepsOfShards.apply if self._together else _Steps.apply
        results: tuple[Tensor, ...] = run(cell, sizes, back, None, x, weights[1], bias, projection, *states)  # type: ignore[no-untyped-call]
        return results


@contextmanager
def flat_weights_entered(model: nn.Module) -> Iterator[None]:
    """Let recurrent modules use the parameters that they have now; their list of them is another afterwards.

    They would make it anew in forward, and on a GPU move the parameters in memory for a kernel that nothing calls here.
    """
    lists = []
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            lists.append((module, module._flat_weights, module._flat_weight_refs))
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
            module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights if weight is not None]
    try:
        yield
    finally:
        for module, weights, references in lists:
            module._flat_weights, module._flat_weight_refs = weights, references
