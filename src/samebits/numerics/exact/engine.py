"""Guard below PyTorch: each operation of a pass is exact, replaced by an exact version, or refused by name."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import _disable_current_modes

from samebits.errors import RefusedError, UserError
from samebits.here import of_kit
from samebits.numerics.dispatch import EagerDispatchMode, calling_module, class_in_construction, storage_of, tensors_in
from samebits.numerics.draws import draws
from samebits.numerics.exact.elementary import divisor
from samebits.numerics.exact.operations import EXACT, FREE, HINTS, INTEGER, REFUSED, REFUSED_IF
from samebits.numerics.initialization import answer, generator_of, is_draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from samebits.numerics.exact.forward_draws import Draws

    Defer = Callable[[UserError, Tensor], None]

aten = torch.ops.aten
COLLECTIVES = {"c10d", "_c10d_functional"}  # allowed in a backward pass, where they sum numbers on grids
NO_ARITHMETIC = {"profiler", "prim"}
_NO_HALVES = "leave out torch.autocast, .half() and .bfloat16(), or set train.numerics: [fast]"
_HINT = f"replace it by operations of {of_kit('docs/concepts/exact.md')}, or set train.numerics: [fast]"


class below:  # noqa: N801 - a context, used as a function
    """Context for code that is exact by itself, which no mode looks at."""

    __slots__ = ("_dispatch", "_functions")
    watch: EagerDispatchMode | None = None
    """The mode that looks at it all the same, while passes are recorded."""

    @staticmethod
    @contextmanager
    def watched_by(mode: EagerDispatchMode) -> Iterator[None]:
        """Context in which ``watch`` is that mode."""
        below.watch = mode
        try:
            yield
        finally:
            below.watch = None

    def __enter__(self) -> None:
        self._dispatch: Any = torch._C._DisableTorchDispatch() if below.watch is None else _alone(below.watch)
        self._functions: Any = torch._C.DisableTorchFunction()
        self._dispatch.__enter__()
        self._functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        self._dispatch.__exit__(*error)


@contextmanager
def _alone(mode: EagerDispatchMode) -> Iterator[None]:
    with _disable_current_modes(), mode:
        yield


class Engine(EagerDispatchMode):
    """Mode for forward and backward passes, entered in every thread that runs one.

    ``draws`` answers random operations of a forward pass; without it they are refused. ``builds`` says that a factory
    runs, and neither pass. ``defer`` takes each refusal that only values on a GPU decide, with the truth value that
    decides it; without it the engine waits for the GPU at once. ``kept`` holds tensors by name that nothing may write
    to. ``replaced`` holds parameters by name that nothing may read, since others are trained in their place.
    """

    supports_higher_order_operators = True
    """True, so that these operators come here and are refused by name."""

    def __init__(
        self,
        draws: Draws | None = None,
        *,
        builds: bool = False,
        defer: Defer | None = None,
        kept: Mapping[str, Tensor] = MappingProxyType({}),
        replaced: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.draws, self._builds, self._defer = draws, builds, defer
        self._kept = {storage_of(tensor): name for name, tensor in kept.items()}
        self._replaced = {storage_of(tensor): name for name, tensor in replaced.items()}

    def __enter__(self) -> Self:
        require_subnormal_numbers()
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            name, why = func.name(), "control flow as an operation is not looked into; use Python's own"  # type: ignore[no-untyped-call]
            raise self.refusal(f"{name}: {why}", _HINT)
        packet = func.overloadpacket
        if self._replaced:
            self._check_read((args, kwargs))
        for place in places_written(func):
            self._check_written(kwargs.get(place) if isinstance(place, str) else args[place], func)
        version = EXACT.get(packet)
        if version is None:
            if packet in FREE or func.is_view or func.namespace in NO_ARITHMETIC:
                result = func(*args, **kwargs)
                return result.zero_() if packet in UNWRITTEN else result
            if func.namespace in COLLECTIVES:
                if self.draws is not None:
                    raise self._refusal(func, "in forward its result depends on what other ranks have")
                return func(*args, **kwargs)
            if packet in _DROPOUT or is_draw(func):
                return self._draw(func, args, kwargs)
            base = _functional(func)
            if base in FREE:
                return func(*args, **kwargs)
            version, packet = EXACT.get(base), base
        if version is None:
            return self._otherwise(func, args, kwargs)
        out = kwargs.pop("out", None)
        try:
            result = version(*args, **kwargs)
        except TypeError as error:  # NotExactError, or arguments that no version knows
            raise self._refusal(func, str(error)) from None
        if packet in REFUSED_IF:
            why, check = REFUSED_IF[packet]
            self._refuse_if(check(result, *args, **kwargs), func, why)
        target = out if out is not None else args[0] if func.overloadpacket.__name__.endswith("_") else None
        if target is None:
            return result
        if func.overloadpacket is not aten.copy_ and (
            target.shape != result.shape or not torch.can_cast(result.dtype, target.dtype)
        ):
            what = f"{result.dtype} of shape {tuple(result.shape)}"
            raise self._refusal(func, f"{what} does not fit into {target.dtype} of shape {tuple(target.shape)}")
        return target.copy_(result)

    def _check_read(self, tensors: object) -> None:
        for tensor in tensors_in(tensors):
            if name := self._replaced.get(storage_of(tensor)):
                raise RefusedError(
                    "forward uses it from beside the model, where it is not trained",
                    hint="read the parameter from its module in forward, as in self.layer.weight",
                    at=name,
                )

    def _check_written(self, tensors: object, func: Any) -> None:
        """Refuse a write to a kept tensor, or several writes to one element, which kernels do in any order."""
        for tensor in tensors_in(tensors):
            if name := self._kept.get(storage_of(tensor)):
                raise written_in_forward(name)
            if _overlaps_itself(tensor):
                raise self._refusal(func, "elements of what it writes to share memory, and which stays is not fixed")

    def _otherwise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run operations on integers that give integers, and those that PyTorch can decompose; refuse the rest."""
        if draws(func, args, kwargs):
            raise self._refusal(func, "its draws differ between devices")
        if why := REFUSED.get(func.overloadpacket):
            raise self._refusal(func, why)
        if func.overloadpacket in INTEGER and not _has_floats((args, kwargs)):
            result = func(*args, **kwargs)
            if not _has_floats(result):
                return result
        if self._builds and not _has_tensors(func):  # a library that is imported now asks its own how it was built
            return func(*args, **kwargs)
        decomposition = decomposition_table.get(func)
        with self:
            result = decomposition(*args, **kwargs) if decomposition else func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise self._refusal(func, "it has no exact version")
        return result

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a random operation or dropout."""
        if func.overloadpacket is aten.native_dropout_backward:
            grad, noise, scale = args
            return grad.mul(noise) if noise.is_floating_point() else grad.mul(noise).mul(scale)
        if self.draws is None:
            hint = "draw in forward, and keep what is drawn for the backward pass"
            raise self._refusal(func, "random numbers are drawn in the forward pass alone", hint)
        if generator_of(kwargs) is not None:
            why = "draws from a generator of the model's own follow from how often it has drawn"
            raise self._refusal(func, why, "leave generator= out: draws follow from seed, step and shard")
        if func.overloadpacket is aten.native_dropout:
            x, p, train = args
            if train is False:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            noise = self.draws.bernoulli(torch.empty_like(x), 1.0 - p)
            noise.div_(divisor(x, 1.0 - p))
            return x.mul(noise), noise
        if func in (aten.bernoulli_.float, aten.bernoulli.p):  # the second is the first under vmap
            to, *p = args
            to = torch.empty_like(to) if func is aten.bernoulli.p else to
            return self.draws.bernoulli(to, *p, **{name: value for name, value in kwargs.items() if name == "p"})
        try:
            return answer(func, args, kwargs, self.draws.fill)
        except TypeError:
            raise self._refusal(func, "with these arguments its draws have no portable form") from None

    def _refuse_if(self, wrong: Tensor | None, func: Any, why: str) -> None:
        if wrong is None:
            return
        if self._defer is not None and (wrong.is_cuda or below.watch is not None):
            self._defer(self._refusal(func, why), wrong)
        elif bool(wrong):
            raise self._refusal(func, why)

    def refuse(self, error: RefusedError) -> None:
        """Raise a refusal; a surveying engine notes it instead."""
        raise error

    def refusal(self, why: str, hint: str) -> RefusedError:
        """A refusal that names the module whose forward or constructor runs, or else the phase of the training."""
        if module := calling_module():
            return RefusedError(why, hint=hint, at=module.path, kind=module.kind)
        built = class_in_construction()
        place = "the model's construction" if self._builds else "the backward pass" if self.draws is None else "forward"
        return RefusedError(why, hint=hint, at=f"in {place}" if built is None else f"in the construction of {built}")

    def _refusal(self, func: Any, why: str, hint: str | None = None) -> RefusedError:
        if self.draws is None and not self._builds and calling_module() is not None:
            return self.refusal(RUNS_AGAIN, ONCE)
        hint = hint or HINTS.get(func.overloadpacket, _NO_HALVES if "float16" in why else _HINT)
        return self.refusal(f"{func.name().removeprefix('aten::')}: {why}", hint)


RUNS_AGAIN = "forward runs again in the backward pass, as activation checkpointing has it"
ONCE = "switch checkpointing off, or set train.numerics: [fast]"
"""What to do about it."""
_GRAIN = 2**15  # the fewest elements that PyTorch gives to each thread


def require_subnormal_numbers() -> None:
    """Keep subnormal numbers in this thread. Raises RefusedError: another flushes them to zero."""
    torch.set_flush_denormal(False)  # a library compiled for speed may have switched it on in this thread
    if (threads := torch.get_num_threads()) > 1 and _any_flushes(threads):
        raise RefusedError(
            "a thread of OpenMP takes the smallest numbers for zero, as a library has set it",
            hint="leave torch.set_flush_denormal and compilers' fast-math alone, or torch.set_num_threads at 1",
        )


def _any_flushes(threads: int) -> bool:
    """Whether any of the threads that share an operation flushes subnormal numbers to zero."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return not torch.full((_GRAIN * threads,), 2.0**-140).mul_(torch.ones(())).all()


def written_in_forward(name: str) -> RefusedError:
    """Refusal of a model that keeps state from one shard to the next."""
    return RefusedError(
        "written in forward, so its value depends on how shards are shared out",
        hint="keep such state out of the model, draw with PyTorch, or set train.numerics: [fast]",
        at=name,
    )


@cache
def places_written(func: Any) -> tuple[int | str, ...]:
    """The arguments that an operation writes to: positions, or names of keyword-only ones."""
    arguments = enumerate(func._schema.arguments)
    written = [(i, one) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return tuple(one.name if one.kwarg_only else i for i, one in written)


@cache
def _has_tensors(func: Any) -> bool:
    """Whether an operation takes or returns tensors."""
    return any("Tensor" in str(one.type) for one in (*func._schema.arguments, *func._schema.returns))


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may share memory; those of a dense tensor and of its slices do not."""
    if x.is_contiguous():
        return False
    end = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False


UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided, aten.new_empty,
              aten.new_empty_strided}  # fmt: skip
"""Their results hold whatever was in memory before; under the engine they hold zeros."""
_DROPOUT = {aten.native_dropout, aten.native_dropout_backward}


def _functional(func: Any) -> Any:
    """The operation that returns a new tensor, for one that writes in place; None if there is none."""
    name = func.overloadpacket.__name__
    return getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None


def _has_floats(value: Any) -> bool:
    return any(t.is_floating_point() or t.is_complex() for t in tensors_in(value))
