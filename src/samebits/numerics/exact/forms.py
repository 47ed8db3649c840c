"""Functions that devices decompose in different ways, and that a pass asks nothing of: seen above ATen, by name."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from samebits.numerics.exact import alignments, drawn_forms, folded_products, of_shards, root_mean_square
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.operations.normalization import affine
from samebits.numerics.exact.parameters import Entry
from samebits.numerics.exact.recurrent import Recurrence
from samebits.numerics.exact.together import ANSWERS, answer, physical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from samebits.numerics.exact.batch_norm import ShardNorms
    from samebits.numerics.exact.engine import Engine

_CHANGES_LEAVES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_READS = {Tensor.tolist, Tensor.untyped_storage, Tensor.storage}  # by no operation that a recording could see
_TO_NUMPY = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_TRAINS = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_GRADIENT = {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]


class _Functions(TorchFunctionMode):
    """Sees PyTorch's functions before they become operations. Refusals go to the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def _refuse(self, why: str, hint: str) -> None:
        self._engine.refuse(self._engine.refusal(why, hint))


class OneForm(_Functions):
    """Mode for a forward pass that computes certain functions by the same operations on every device.

    ``norms`` computes those that join the samples of a batch. ``together`` is any tensor of all shards of one pass,
    which ``answers`` what the model asks of its data if all shards say the same.
    """

    def __init__(
        self, engine: Engine, norms: ShardNorms, *, together: Tensor | None = None, answers: bool = False
    ) -> None:
        super().__init__(engine)
        self._together, self._answers = together is not None, answers
        self._forms = FORMS | Recurrence(engine, together=self._together).forms()
        self._alone = FORMS | Recurrence(engine).forms() | dict.fromkeys((F.batch_norm, F.instance_norm), _no_norm)
        if together is not None:
            self._forms |= of_shards.FORMS | folded_products.FORMS | alignments.OF_SHARDS
            self._forms |= root_mean_square.OF_SHARDS | _empties(together) | {Tensor.__setitem__: _set_item}
        self._forms |= {F.batch_norm: norms.batch_norm, F.instance_norm: norms.instance_norm}

    @contextmanager
    def one_by_one(self) -> Iterator[Iterator[None]]:
        """Context within one pass where a shard is alone, which is another one at each step of the iterator.

        A rule for ``vmap`` runs without this mode, since it runs within an answer of it.
        """
        forms, self._forms = self._forms, self._alone
        try:
            with self:
                yield iter(()) if self._engine.draws is None else self._engine.draws.one_by_one()
        finally:
            self._forms = forms

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.data_ptr:
            self._refuse("forward asks where a tensor lies in memory", "compare tensors with `is`")
        if func in _TO_NUMPY:
            self._refuse("forward hands a tensor to NumPy, whose arithmetic differs between hosts", "use PyTorch's")
        if func in _READS and below.watch is not None:
            raise RuntimeError(f"forward reads numbers on the host ({func.__name__})")
        if func in _CHANGES_LEAVES and not args[0].is_leaf and isinstance(args[0].grad_fn, Entry._backward_cls):
            self._refuse("forward changes whether a parameter is trained (requires_grad)", "do so in the factory")
            return args[0]
        if self._together and func == _TRAINS:
            return func(physical(args[0]))
        if self._answers and (func in ANSWERS or func is Tensor.__contains__):
            return answer(func, *args)
        form, kwargs = self._forms.get(func), kwargs or {}
        if form is None:
            return func(*args, **kwargs)
        if "input" in kwargs:  # PyTorch's name for what forms get first
            args = (kwargs.pop("input"), *args)
        return form(*args, **kwargs)


def _no_norm(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("vmap: an autograd.Function normalises over the batch")


class GradientsUnread(_Functions):
    """Mode for a backward pass that refuses access to ``.grad``, which is the sum of the shards done so far."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _GRADIENT:
            why = "a parameter's gradient (.grad) is asked for or set before the pass has ended"
            self._refuse(why, "compute with the gradient that backward is given")
        return func(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of rows. PyTorch's chooses between several products by the layout of ``x``."""
    if x.dim() <= 2:
        return F.linear(x, weight, bias)
    y = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], *y.shape[1:])


def _attention(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
    """``F.multi_head_attention_forward`` of dense rows, for the sake of ``F.linear`` in it, which no mode sees."""
    dense = {id(x): x.contiguous() for x in (query, key, value)}  # which of them are one says what is projected
    query, key, value = (dense[id(x)] for x in (query, key, value))
    return F.multi_head_attention_forward(query, key, value, *more, **options)


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001 - of PyTorch's signature
) -> Tensor:
    """``F.layer_norm``, with its parameters apart."""
    return affine(torch.native_layer_norm(x, normalized_shape, None, None, eps)[0], weight, bias)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001 - of PyTorch's signature
) -> Tensor:
    """``F.group_norm``, with its parameters apart."""
    count = math.prod(x.shape[2:])
    y = torch.native_group_norm(x.contiguous(), None, None, x.shape[0], x.shape[1], count, num_groups, eps)[0]
    return affine(y, weight, bias, axes=x.dim() - 2)


def _grid_sample(
    x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """``F.grid_sample`` by PyTorch's decomposition, whose gradient is that of look-ups, which add on grids."""
    sampler = decomposition_table[torch.ops.aten.grid_sampler_2d.default] if x.dim() == 4 else torch.grid_sampler_3d
    between, beyond = (
        ("bilinear", "nearest", "bicubic").index(mode),
        ("zeros", "border", "reflection").index(padding_mode),
    )
    return sampler(x, grid, between, beyond, bool(align_corners))


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """``F.rrelu`` with a slope drawn for every number, unless it is in place."""
    if inplace:
        return F.rrelu(x, lower, upper, training, inplace)
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2)
    return x.where(x > 0, x * torch.empty_like(x).uniform_(lower, upper))


def _set_item(x: Tensor, key: Any, value: Any) -> None:
    """``x[key] = value``. With a mask and a number it is ``masked_fill_``, whose shape depends on no data."""
    if isinstance(key, Tensor) and key.dtype == torch.bool and isinstance(value, int | float) and key.dim() <= x.dim():
        x.masked_fill_(key.view(*key.shape, *(1,) * (x.dim() - key.dim())), value)
    else:
        x[key] = value


def _empties(like: Tensor) -> dict[Any, Callable[..., Tensor]]:
    """Memory that each of the shards of ``like`` fills by itself: ``vmap`` lets none write to that of all."""

    def version(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if kwargs.get("out") is not None or x.requires_grad or physical(x) is not x:
                return x
            return like.new_empty(x.shape, dtype=x.dtype, device=x.device)

        return made

    versions = {make: version(make) for make in (torch.empty, torch.empty_like, Tensor.new_empty)}
    return {**versions, Tensor.new: partial(_new, empty=versions[Tensor.new_empty])}


def _new(x: Tensor, *given: Any, empty: Callable[..., Tensor] = Tensor.new_empty) -> Tensor:
    """``Tensor.new``, by which ``torch.distributions`` makes the memory of draws: ``empty`` of sizes."""
    sizes = given and all(isinstance(one, int | torch.Size) for one in given)
    return empty(x, *given) if sizes else x.new(*given)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.bilinear`` by products. On a GPU, PyTorch's is a sum in an order of its own."""
    z = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return z if bias is None else z + bias


def _reduced_apart(losses_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss with its mean or sum apart. PyTorch's own divides elsewhere for several shards at once."""

    def version(
        x: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> Tensor:
        losses = losses_of(x, target, weight, pos_weight)
        if size_average is not None or reduce is not None:
            reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
        if reduction == "mean":
            return losses.mean()
        return losses.sum() if reduction == "sum" else losses

    return version


def _binary_cross_entropies(x: Tensor, target: Tensor, weight: Tensor | None, _: None) -> Tensor:
    return F.binary_cross_entropy(x, target, weight, reduction="none")


def _binary_cross_entropies_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None
) -> Tensor:
    """By logarithms of sigmoids."""
    if x.shape != target.shape:
        raise ValueError(f"Target size ({target.shape}) must be the same as input size ({x.shape})")
    likelihood = F.logsigmoid(x)
    if pos_weight is not None:
        likelihood = (target * (pos_weight - 1) + 1) * likelihood
    losses = (1 - target) * x - likelihood
    return losses if weight is None else losses * weight


FORMS: dict[Any, Callable[..., Any]] = {
    **alignments.FORMS,
    **drawn_forms.FORMS,
    **root_mean_square.FORMS,
    F.binary_cross_entropy: _reduced_apart(_binary_cross_entropies),
    F.binary_cross_entropy_with_logits: _reduced_apart(_binary_cross_entropies_with_logits),
    F.bilinear: _bilinear,
    F.linear: _linear,
    F.multi_head_attention_forward: _attention,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.grid_sample: _grid_sample,
    F.rrelu: _rrelu,
    Tensor.new: _new,
}
