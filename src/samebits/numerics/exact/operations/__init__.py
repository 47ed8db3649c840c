"""Every operation of PyTorch that ``exact`` knows: free ones pass unchanged, the others have an exact version here.

An operation outside ``FREE``, ``EXACT`` and, for integers, ``INTEGER`` is decomposed by PyTorch's own rules, or
refused.
"""

from samebits.numerics.exact.operations import (
    bags,
    complex_numbers,
    contractions,
    convolutions,
    distances,
    doubles,
    factorization,
    fourier,
    indexing,
    normalization,
    padding,
    pointwise,
    pooling,
    reductions,
    resampling,
    selection,
)
from samebits.numerics.exact.operations.registry import EXACT, FREE, HINTS, INTEGER, REFUSED, REFUSED_IF

__all__ = ["EXACT", "FREE", "HINTS", "INTEGER", "REFUSED", "REFUSED_IF", "bags", "complex_numbers", "contractions",
           "convolutions", "distances", "doubles", "factorization", "fourier", "indexing", "normalization",
           "padding", "pointwise", "pooling", "reductions", "resampling", "selection"]  # fmt: skip
