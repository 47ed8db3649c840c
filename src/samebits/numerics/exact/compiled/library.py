"""Compiled forms of exact functions, which answer in place of Python's on a CPU, bit for bit alike.

A function that has one is wrapped by ``compiled``. Without the library, or for tensors that the kernel does not take,
it runs as it is written in Python, which stays the reference.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

Argument = Tensor | float | ctypes.c_double | ctypes.Structure | ctypes.Array[Any] | None
"""Of a kernel. A CPU's gets the address of a structure, and a GPU's the structure."""
V = TypeVar("V", bound="Callable[..., Any]")

SUFFIXES = {torch.float32: "_float", torch.float64: "_double"}
"""Endings of the names of kernels that take numbers of either type."""


class Kernels:
    """Compiled functions for tensors of one type of device."""

    device = "cpu"
    is_host = True
    """Whether functions run at once, on this host's memory."""

    def call(self, name: str, *arguments: Argument) -> None:
        """Call a function with numbers, addresses of dense tensors, and structures."""
        raise NotImplementedError

    def answer(self, name: str, *arguments: Argument) -> bool:
        """Call a function that may do nothing, and whether it has answered."""
        raise NotImplementedError

    def has(self, name: str, kept: int = 0) -> bool:
        """Whether there is such a function, and room for so many float64 numbers that it keeps."""
        raise NotImplementedError

    def place(self, like: Tensor) -> Tensor:
        """A float32 number on the device of a tensor, for the largest of some."""
        return torch.empty((), device=like.device)

    def number(self, value: Tensor | float, like: Tensor) -> Argument:  # noqa: ARG002 - of other devices
        """A float64 number as functions take it that passes replay: on a GPU in its memory."""
        return float(value)

    def forget_places(self) -> None:
        """Have places made anew that hold zero."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which updates of parameters may wait for each other."""
        return nullcontext()

    def takes(self, *tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
        """Whether all tensors lie densely in the device's memory, have that type, and are not empty."""
        return all(
            t is None
            or (type(t) in _KINDS and t.dtype == dtype and t.device.type == self.device and t.is_contiguous()
                and t.numel() > 0)
            for t in tensors
        )  # fmt: skip


class Library(Kernels):
    """The functions of a compiled ``kernels.c``."""

    def __init__(self, path: Path) -> None:
        self._loaded = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        if team := _openmp():
            self.call("use_threads", *team)

    def has(self, name: str, kept: int = 0) -> bool:  # noqa: ARG002 - which is the host's memory
        """See ``Kernels.has``."""
        return hasattr(self._loaded, name)

    def call(self, name: str, *arguments: Argument) -> None:
        """See ``Kernels.call``."""
        self._function(name, arguments)(*map(_as_number, arguments))

    def answer(self, name: str, *arguments: Argument) -> bool:
        """See ``Kernels.answer``."""
        return bool(self._function(name, arguments)(*map(_as_number, arguments)))

    def prepared(self, name: str, *arguments: Argument) -> Callable[[], int]:
        """A call to be made later, as long as the memory of its arguments is kept."""
        call: Callable[[], int] = functools.partial(self._function(name, arguments), *map(_as_number, arguments))
        return call

    def _function(self, name: str, arguments: Sequence[Argument]) -> Any:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._loaded, name)
            function.argtypes = [
                ctypes.c_double if isinstance(a, (float, ctypes.c_double)) else ctypes.c_int64 for a in arguments
            ]
        return function


def _as_number(argument: Argument) -> float | ctypes.c_double:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return ctypes.addressof(argument) if isinstance(argument, (ctypes.Structure, ctypes.Array)) else argument or 0


def sizes(*numbers: int) -> ctypes.Array[Any]:
    """Whole numbers as an argument of a kernel."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _openmp() -> list[int]:
    """Addresses of the functions of PyTorch's own OpenMP, by which kernels share its threads; none if it has others."""
    loaded = ctypes.CDLL(None)
    try:
        return [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in _OPENMP]
    except AttributeError:
        return []


_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_chosen: dict[str, Kernels] = {}
OF_NUMBERS: dict[Callable[[Tensor], Tensor], Callable[[Any, Tensor], Tensor | None]] = {}
"""The functions of numbers that have a compiled form, each with its kernel."""


def use(library: Kernels) -> None:
    """Let a library answer from now on for tensors of its type of device, in all threads."""
    _chosen[library.device] = library


def unused(device: str) -> None:
    """Let Python's functions answer for tensors of such a device."""
    _chosen.pop(device, None)


def chosen(device: str = "cpu") -> Kernels | None:
    """The library that answers now for tensors of such a device."""
    return _chosen.get(device)


def gathered(like: Tensor) -> AbstractContextManager[None]:
    """See ``Kernels.gathered``; of the library for the device of a tensor, if there is one."""
    library = chosen(like.device.type)
    return library.gathered() if library else nullcontext()


@contextmanager
def using(library: Kernels | None) -> Iterator[None]:
    """Context with another library alone, or with Python's functions."""
    before = _chosen.copy()
    _chosen.clear()
    if library is not None:
        use(library)
    try:
        yield
    finally:
        _chosen.clear()
        _chosen.update(before)


def _answer(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a kernel returns; None if there is no library for the device of the first tensor."""
    if not _chosen:
        return None
    with _unwatched():
        library = _chosen.get(_device_of(args) if "cuda" in _chosen else "cpu")
        return None if library is None else kernel(library, *args, **kwargs)


def _device_of(args: tuple[Any, ...]) -> str:
    """The type of device of the first tensor, alone or in a list."""
    firsts = (one[0] if isinstance(one, (list, tuple)) and one else one for one in args)
    return next("cuda" if one.is_cuda else "cpu" for one in firsts if isinstance(one, Tensor))


def compiled(kernel: Callable[..., Any]) -> Callable[[V], V]:
    """Let ``kernel`` answer in place of a function: for the library and the arguments, or with None if it cannot."""

    def replace(plain: V) -> V:
        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            result = _answer(kernel, *args, **kwargs)
            return plain(*args, **kwargs) if result is None else result

        return function  # type: ignore[return-value]

    return replace


def of_numbers(
    table: Callable[[torch.device], Tensor] | None = None, near: str | None = None
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Let the kernels of a function's name answer for each number.

    ``table`` makes the tensor that they look into; ``near`` names kernels that say whether the numbers are for them.
    """

    def replace(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        name = plain.__name__

        def kernel(library: Kernels, x: Tensor) -> Tensor | None:
            suffix = SUFFIXES.get(x.dtype)
            if suffix is None or not library.has(name + suffix) or not library.takes(x, dtype=x.dtype):
                return None
            if near is not None and not library.answer(near + suffix, x, x.numel()):
                return None
            out = torch.empty_like(x)
            library.call(name + suffix, x, out, x.numel(), threads(), table(x.device) if table else None)
            return out

        function = compiled(kernel)(plain)
        OF_NUMBERS[function] = kernel
        return function

    return replace


def mapped(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    """``function`` of float32 numbers, computed in float64 and rounded once, if it has a kernel that takes them."""
    kernel = OF_NUMBERS.get(function)
    return None if kernel is None else _answer(kernel, x)


_KINDS = (Tensor, nn.Parameter)
_unwatched = torch._C.DisableTorchFunction
"""Context in which no mode sees that a kernel asks where tensors lie, which models may not."""
threads = torch.get_num_threads
