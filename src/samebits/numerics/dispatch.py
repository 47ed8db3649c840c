"""A mode that sees each operation of PyTorch's dispatcher, for code that is never compiled."""

from __future__ import annotations

import sys
from traceback import walk_stack, walk_tb
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samebits.host.torch_names import require_torch_names

require_torch_names()  # here, because every training, trial and evaluation imports this


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's memory. Not its address, because a fake tensor has none."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A TorchDispatchMode without PyTorch's guard against being compiled.

    The guard costs time at each operation. At the first one it also imports the compiler, which takes each process a
    second or more.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_PASSES = ("forward", "fingerprint", "_vmapped", "survey", "not_finite")  # methods that run a model


class CallingModule(NamedTuple):
    """A module whose forward pass runs: its path from the model, empty if unknown, and its class."""

    path: str
    kind: str


def module_paths(model: nn.Module) -> dict[int, str]:
    """The path of each module by its id. ``calling_module`` reads it from the module that runs the model."""
    return {id(module): f"model.{path}" if path else "model" for path, module in model.named_modules()}


def calling_module(error: BaseException | None = None) -> CallingModule | None:
    """The innermost module whose forward pass makes this call, or raised ``error``; None if there is none."""
    inner: nn.Module | None = None
    frames = walk_stack(sys._getframe(1)) if error is None else reversed([*walk_tb(error.__traceback__)])
    for frame, _ in frames:
        module = frame.f_locals.get("self") if frame.f_code.co_name in _PASSES else None
        if isinstance(module, nn.Module):
            paths = getattr(module, "module_paths", None)
            if paths is not None:  # a module of this library around the model
                return None if inner is None else CallingModule(paths.get(id(inner), ""), type(inner).__name__)
            inner = module if inner is None else inner
    return None if inner is None else CallingModule("", type(inner).__name__)


def class_in_construction() -> str | None:
    """The class of the innermost module whose constructor runs; None if there is none."""
    for frame, _ in walk_stack(sys._getframe(1)):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(module, nn.Module) and "_parameters" in vars(module):
            return type(module).__name__
    return None
