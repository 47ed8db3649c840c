"""Every operation of PyTorch that ``exact`` knows: free ones pass as they are, the others have a version here.

An operation that is in neither ``FREE`` nor ``EXACT`` nor, for integers, in ``INTEGER``, is taken apart by
PyTorch's own decompositions, or refused.
"""

from samebits.numerics.exact.operations import contractions, indexing, normalization, pointwise, pooling, reductions
from samebits.numerics.exact.operations.registry import BATCH_NORM, EXACT, FREE, HINTS, INTEGER, REFUSED, REFUSED_IF

__all__ = ["BATCH_NORM", "EXACT", "FREE", "HINTS", "INTEGER", "REFUSED", "REFUSED_IF", "contractions",
           "indexing", "normalization", "pointwise", "pooling", "reductions"]  # fmt: skip
