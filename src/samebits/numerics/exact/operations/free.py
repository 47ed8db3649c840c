"""Operations that give the same bits on every device as they are.

They move, choose or compare values, work on integers, or make one correctly rounded operation of IEEE 754 in a kernel
of its own. Where such a kernel may give either sign of zero, or a scalar is turned into its reciprocal, the operation
is not here but in ``pointwise``.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_MOVES = """
    _reshape_alias _unsafe_index _unsafe_view alias as_strided block_diag broadcast_tensors cat
    channel_shuffle chunk clone concat constant_pad_nd contiguous detach diag_embed diagonal
    diagonal_backward embedding empty empty_like empty_permuted empty_strided expand eye fill flatten flip full
    full_like gather hsplit index index_select is_same_size lift lift_fresh lift_fresh_copy masked_fill
    masked_select movedim narrow new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like
    permute pixel_shuffle pixel_unshuffle repeat repeat_interleave reshape resize_ roll rot90 scalar_tensor select
    select_backward select_scatter set_ slice slice_backward slice_scatter split split_with_sizes squeeze stack
    swapaxes t take take_along_dim tensor_split tile transpose tril tril_indices triu triu_indices unbind unflatten
    unfold unsqueeze view view_as vsplit where zero zeros zeros_like
"""
_CHOICES = """
    _local_scalar_dense all any argwhere bitwise_and bitwise_not bitwise_or bitwise_xor bucketize count_nonzero eq
    equal ge gt heaviside is_nonzero isfinite isin isinf isnan isneginf isposinf item le logical_and logical_not
    logical_or logical_xor lt nan_to_num ne searchsorted sign signbit threshold_backward
"""
_ARITHMETIC = """
    ceil copysign floor frac neg positive round trunc
"""
_INTEGERS = """
    _chunk_cat _unique2 _unsafe_masked_index _unsafe_masked_index_put_accumulate alias_copy as_strided_copy
    as_strided_scatter bincount bitwise_left_shift bitwise_right_shift diagonal_copy diagonal_scatter expand_copy
    floor_divide fmax fmin fmod gcd im2col index_fill lcm linalg_cross masked_scatter nansum narrow_copy
    nonzero_static permute_copy reflection_pad1d reflection_pad2d reflection_pad3d remainder replication_pad1d
    replication_pad2d replication_pad3d resize_as_ split_with_sizes_copy squeeze_copy t_copy threshold trace
    transpose_copy unbind_copy unfold_copy unique_consecutive unique_dim unsafe_split unsqueeze_copy view_copy
"""


_SEVERAL_STEPS = """
    _addmm_activation _fused_rms_norm _fused_rms_norm_backward
"""


def _packets(names: str) -> set[Any]:
    return {getattr(aten, name) for name in names.split() if hasattr(aten, name)}


FREE = _packets(_MOVES + _CHOICES + _ARITHMETIC)
OTHER_FORMS = _packets(_SEVERAL_STEPS)
"""Have a decomposition, but other devices or arguments take another."""

INTEGER = _packets(_INTEGERS)
"""Exact as they are if arguments and results are integers; of equal elements they do not choose one."""
