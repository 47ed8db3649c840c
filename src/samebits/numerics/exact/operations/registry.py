"""Registry of operations: those that give the same bits on every device, and exact versions of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from samebits.numerics.exact.compiled.library import mapped
from samebits.numerics.exact.grid import bits_of_products, blocks
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Version = Callable[..., Any]

aten = torch.ops.aten
V = TypeVar("V", bound="Version")

EXACT: dict[Any, Version] = {}
"""Exact versions by operation (an ``OpOverloadPacket`` of ``torch.ops.aten``)."""
_FEWEST_BITS = 16  # of a factor whose products are summed, at most 2^21


class NotExactError(TypeError):
    """An operation has no exact version for these arguments; the message says why."""


def exact(*packets: Any) -> Callable[[V], V]:
    """Enter a function as the exact version of operations, for all of their overloads."""

    def enter(version: V) -> V:
        EXACT.update(dict.fromkeys(packets, version))
        return version

    return enter


REFUSED_IF: dict[Any, tuple[str, Version]] = {}
"""By operation, why the result of an exact version may be invalid, and the check of its values; see ``refused_if``."""


def refused_if(why: str, *packets: Any) -> Callable[[V], V]:
    """Enter a check that takes a result and its operation's arguments and says whether to refuse it for ``why``.

    The check returns one truth value as a tensor, which is read from a GPU only at the end of the step, or None if the
    result is always valid.
    """

    def enter(check: V) -> V:
        REFUSED_IF.update(dict.fromkeys(packets, (why, check)))
        return check

    return enter


def check_float32(x: Tensor) -> None:
    """Raise NotExactError for a tensor of any type but float32; the message names the type."""
    if x.dtype != torch.float32:
        raise NotExactError(f"{x.dtype} has no exact version; use float32")


def bits_for(terms: int) -> int:
    """Bits of both factors of so many products that are summed. Raises NotExactError: they would be too few."""
    bits = bits_of_products(terms)
    if bits < _FEWEST_BITS:
        raise NotExactError(
            f"sums of {terms:,} products would keep fewer than {_FEWEST_BITS} bits of a factor; "
            "more exact.shards, or smaller samples, make shorter sums"
        )
    return bits


def wide(x: Tensor) -> Tensor:
    """A float64 copy of a float32 tensor. Raises NotExactError for any other type."""
    check_float32(x)
    return x.to(torch.float64)


def summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The float64 sums of a float32 tensor over ``dims``. Raises NotExactError for any other type."""
    check_float32(x)
    return fixed_order_sum(x, dims)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of float64 numbers to float32 ones, block by block, and round once."""
    check_float32(x)
    source = x.contiguous()
    if (result := mapped(function, source)) is not None:
        return result
    out = torch.empty_like(source)
    flat, target = source.view(-1), out.view(-1)
    for part in blocks(flat.numel(), 1, x.device):
        target[part] = function(flat[part].to(torch.float64))
    return out


# -- operations whose kernels are exact --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Operations whose kernels give the same bits on a CPU and a GPU for tensors of these types, and the reason.

    Names in ``free`` pass as they are, whatever the type. Names in ``integers`` pass if arguments and results are
    integers; of equal elements these operations do not choose one. Names in ``inner`` are kernels that exact versions
    and PyTorch's decompositions call: what such a kernel leaves open, the caller settles.
    """

    why: str
    types: tuple[torch.dtype, ...]
    free: str = ""
    integers: str = ""
    inner: str = ""


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_ROUNDED = "one operation, exact or correctly rounded (IEEE 754), in a kernel of its own"

ALIKE = (
    Alike(
        why="values are moved or made, and none is computed; where places repeat, the exact version keeps them apart",
        types=(*_INTEGERS, *_HALVES, *_FLOATS, *_COMPLEX),
        free="""
            _local_scalar_dense _pack_padded_sequence _reshape_alias _unsafe_index _unsafe_view alias as_strided
            block_diag broadcast_tensors cat channel_shuffle chunk clone concat constant_pad_nd contiguous detach
            diag_embed diagonal diagonal_backward embedding empty empty_like empty_permuted empty_strided expand eye
            fill flatten flip full full_like gather hsplit im2col index index_select is_same_size item lift lift_fresh
            lift_fresh_copy masked_fill masked_scatter masked_scatter_backward masked_select movedim narrow new_empty
            new_empty_strided new_full new_ones new_zeros ones ones_like permute pixel_shuffle pixel_unshuffle
            reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
            replication_pad2d replication_pad3d reshape resize_ roll rot90 scalar_tensor select select_backward
            select_scatter set_ slice slice_backward slice_scatter split split_with_sizes squeeze stack swapaxes t take
            take_along_dim tensor_split tile transpose tril tril_indices triu triu_indices unbind unflatten unfold
            unsqueeze view view_as vsplit where zero zeros zeros_like
        """,
        integers="""
            _chunk_cat alias_copy as_strided_copy as_strided_scatter diagonal_copy diagonal_scatter expand_copy
            index_fill narrow_copy permute_copy resize_as_ split_with_sizes_copy squeeze_copy t_copy transpose_copy
            unbind_copy unfold_copy unsafe_split unsqueeze_copy view_copy
        """,
        inner="_conj copy index_copy index_put resize resize_as scatter view_as_complex view_as_real",
    ),
    Alike(
        why="values are compared or counted, in whatever order",
        types=(*_INTEGERS, *_FLOATS),
        free="""
            _is_all_true _is_any_true all any argwhere bucketize count_nonzero eq equal ge gt heaviside is_nonzero
            isfinite isin isinf isnan isneginf isposinf le logical_and logical_not logical_or logical_xor lt ne nonzero
            searchsorted signbit
        """,
        integers="nonzero_static",
        inner="amax amin aminmax cummax cummin max maximum min minimum sort",
    ),
    Alike(
        why=_ROUNDED,
        types=(*_INTEGERS, *_HALVES, *_FLOATS),
        free="ceil copysign floor frac nan_to_num neg positive round sign threshold_backward trunc",
        inner="_to_copy abs add clamp div mul rsub sgn sub",
    ),
    Alike(why=_ROUNDED, types=(torch.float64,), inner="fmod sqrt"),
    Alike(why="the largest of several numbers, in any order", types=(torch.float64,), inner="scatter_reduce"),
    Alike(
        why="integers, whose sums and products are the same in any order",
        types=_INTEGERS,
        free="bitwise_and bitwise_not bitwise_or bitwise_xor",
        integers="""
            _unique2 _unsafe_masked_index _unsafe_masked_index_put_accumulate bincount bitwise_left_shift
            bitwise_right_shift floor_divide fmax fmin fmod gcd lcm linalg_cross nansum remainder threshold trace
            unique_consecutive unique_dim
        """,
        inner="__lshift__ __rshift__ cumprod cumsum index_add pow prod scatter_add scatter_reduce sum",
    ),
    Alike(
        why="terms on a grid, whose sum is exact in any order",
        types=(torch.float64,),
        inner="bmm cumsum index_add mm scatter_add sum",
    ),
)
"""Kernels that a pass under ``exact`` may reach; no other is known to be the same on a GPU.

An operation whose kernel may give either sign of zero, or turns a scalar into its reciprocal, is not free: it has an
exact version in ``pointwise``.
"""


def _packets(names: str) -> set[Any]:
    return {getattr(aten, name) for name in names.split() if hasattr(aten, name)}


FREE = _packets(" ".join(group.free for group in ALIKE))
"""Operations that pass as they are, whatever the type."""
INTEGER = _packets(" ".join(group.integers for group in ALIKE))
"""Operations that are exact if arguments and results are integers."""

_BATCH_NORMS = _packets(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
    "cudnn_batch_norm batch_norm"
)
REFUSED = {
    **dict.fromkeys(
        _packets("_addmm_activation _fused_rms_norm _fused_rms_norm_backward") | _BATCH_NORMS,
        "devices compute it in different steps",
    ),
    aten.renorm: "its gradient is computed in float64 on a CPU, and in float32 on a GPU",
}
"""Operations that PyTorch decomposes in different ways for some devices or splits, each with the reason."""

_ALGEBRA = _packets("_linalg_check_errors linalg_inv_ex _linalg_det _linalg_slogdet _linalg_solve_ex linalg_lstsq")
_SPARSE = _packets(
    "_to_sparse _to_sparse_csr _convert_indices_from_coo_to_csr _sparse_coo_tensor_with_dims_and_tensors"
)
HINTS = {
    **dict.fromkeys(_BATCH_NORMS, "call torch.nn.functional.batch_norm, or set train.numerics: [fast]"),
    **dict.fromkeys(_ALGEBRA, "use torch.linalg.qr and torch.linalg.solve_triangular, or set train.numerics: [fast]"),
    aten.linalg_cholesky_ex: "use torch.linalg.qr, or give MultivariateNormal its scale_tril; or set train.numerics: "
    "[fast]",
    **dict.fromkeys(
        _packets("_sample_dirichlet _standard_gamma poisson binomial cauchy cauchy_ log_normal_ geometric_"),
        "make it of uniform, normal or exponential draws, as Kumaraswamy draws in the place of Beta, "
        "or set train.numerics: [fast]",
    ),
    **dict.fromkeys(
        _SPARSE, "keep the places as integers and sum by index_add or scatter_add, or set train.numerics: [fast]"
    ),
    **dict.fromkeys(
        _packets("_unique2 unique_consecutive unique_dim"), "give it integers, or set train.numerics: [fast]"
    ),
    aten.renorm: "scale it by its norm: x * (limit / (x.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1)",
}
"""Hints for refused operations that a known option avoids."""
