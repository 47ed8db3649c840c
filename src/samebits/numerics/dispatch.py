"""A mode that sees each operation of PyTorch's dispatcher, for code that is never compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """What tells the memory of one tensor from that of another; not its address, which a fake tensor has none of."""
    return int(tensor.untyped_storage()._cdata)


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A TorchDispatchMode without PyTorch's guard against being compiled.

    The guard costs time at each operation, and imports the compiler at the first one, which takes each process a
    second or more.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
