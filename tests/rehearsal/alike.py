"""Operations that a GPU computes to the same bits as the CPU, with the types for which that is so, and why.

``exact`` may call no other: what stands neither here nor in ``NOT_ALIKE`` nobody has thought about.
"""

INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
HALVES = ("float16", "bfloat16")
FLOATS = ("float32", "float64")
COMPLEX = ("complex32", "complex64", "complex128")

_MOVED = "values are moved or made, and none is computed; where places repeat, the kit itself keeps them apart"
_COMPARED = "values are compared or counted, in whatever order"
_ROUNDED = "one operation, exact or correctly rounded (IEEE 754), in a kernel of its own"
_WHOLE = "integers, whose sums and products are the same in any order"
_GRID = "terms on a grid, whose sum is exact in any order"

_MOVES = """
    _chunk_cat _conj _local_scalar_dense _unsafe_index _unsafe_view alias alias_copy as_strided as_strided_copy
    as_strided_scatter block_diag cat channel_shuffle clone constant_pad_nd copy detach diag_embed diagonal
    diagonal_backward diagonal_copy diagonal_scatter embedding empty_like expand expand_copy fill flip full_like gather
    index index_copy index_fill index_put index_select lift_fresh masked_fill masked_scatter masked_select narrow_copy
    new_empty new_empty_strided new_full new_ones new_zeros ones_like permute permute_copy pixel_shuffle
    pixel_unshuffle reflection_pad1d repeat repeat_interleave replication_pad1d replication_pad2d resize resize_as roll
    rot90 scatter select select_backward select_scatter slice slice_backward slice_scatter split split_with_sizes
    split_with_sizes_copy squeeze squeeze_copy stack t t_copy take transpose transpose_copy tril triu unbind unbind_copy
    unfold unfold_copy unsafe_split unsqueeze unsqueeze_copy view view_as_complex view_as_real view_copy where zero
    zeros_like
"""
_COMPARISONS = """
    all amax amin aminmax any bucketize count_nonzero eq equal ge gt heaviside isin isinf isnan isneginf isposinf le
    logical_and logical_not logical_or logical_xor lt max maximum min minimum ne nonzero nonzero_static searchsorted
    signbit sort
"""
_ROUNDED_ONCE = """
    _to_copy abs add ceil clamp copysign div floor frac mul nan_to_num neg round rsub sgn sign sub threshold_backward
    trunc
"""
_INTEGER = """
    __lshift__ __rshift__ _unique2 _unsafe_masked_index _unsafe_masked_index_put_accumulate bincount bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor cumprod cumsum floor_divide fmax fmin fmod
    gcd lcm linalg_cross nansum pow prod remainder scatter_add sum threshold trace unique_consecutive
"""
_SUMS = ("bmm", "cumsum", "index_add", "mm", "scatter_add", "sum")

ALIKE: dict[tuple[str, str], str] = {
    **{(name, dtype): _MOVED for name in _MOVES.split() for dtype in (*INTEGERS, *HALVES, *FLOATS, *COMPLEX)},
    **{(name, dtype): _COMPARED for name in _COMPARISONS.split() for dtype in (*INTEGERS, *FLOATS)},
    **{(name, dtype): _ROUNDED for name in _ROUNDED_ONCE.split() for dtype in (*INTEGERS, *HALVES, *FLOATS)},
    **{(name, dtype): _WHOLE for name in _INTEGER.split() for dtype in INTEGERS},
    **{(name, "float64"): _GRID for name in _SUMS},
    ("sqrt", "float64"): _ROUNDED,
}
"""By operation and the type of its first tensor."""
