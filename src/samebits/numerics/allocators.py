"""Out-of-memory errors of PyTorch's allocator, the host's, and those of CUDA and its libraries."""

from __future__ import annotations

import re

import torch

_NO_MEMORY = re.compile(
    r"can't allocate memory|bad_alloc|CUDA (driver )?error: out of memory|[Cc]uda failure (\d+ )?'out of memory'"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)"
    r"|CU(SPARSE|FFT)_(STATUS_INSUFFICIENT_RESOURCES|ALLOC_FAILED)"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate"  # nearly always because its workspace does not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocator has run out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(_NO_MEMORY.search(str(error)))
