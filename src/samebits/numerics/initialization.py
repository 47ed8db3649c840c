"""Draw a model's first weights from portable random numbers, whatever code builds the model.

A dispatch mode sees every ATen call below a factory. Calls that draw random numbers are answered from
``portable.random``. A random operation without a portable version is refused by name, never let through.
"""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

import numpy as np
import torch

from samebits.errors import UserError
from samebits.numerics.dispatch import EagerDispatchMode
from samebits.numerics.exact.elementary import erf, log
from samebits.portable import elementary
from samebits.portable.random import MOST, RepeatedStream, Stream, derive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

aten = torch.ops.aten
_SLICE = 1 << 22  # numbers drawn at a time, which bounds memory


class _PortableDraws(EagerDispatchMode):
    """Answers random calls from ``stream``, each where the previous one ended, until the code calls ``manual_seed``."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream, self._seed = stream, torch.default_generator.initial_seed()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_draw(func):
            own = generator_of(kwargs)
            if own is None and torch.default_generator.initial_seed() != self._seed:
                own = torch.default_generator
            stream = self._stream if own is None else _stream_of(own)
            return answer(func, args, kwargs, lambda tensor, fill: fill(stream, tensor))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UserError(
                f"model.name: the factory calls {func.name()}, whose draws differ between hosts",
                hint="initialise with torch.nn.init's uniform, normal, trunc_normal, kaiming or xavier functions",
            )
        return func(*args, **kwargs)


def generator_of(kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a random call names; None for PyTorch's default one."""
    named: torch.Generator | None = kwargs.get("generator")
    return None if named is None or named._cdata == torch.default_generator._cdata else named  # type: ignore[attr-defined]


def _stream_of(generator: torch.Generator) -> Stream:
    """A stream that depends on a generator's state, which advances by a few draws.

    A CPU generator draws integers by a Mersenne Twister, the same on every host.
    """
    if generator.device.type != "cpu":
        raise UserError(
            f"model.name: the factory draws from a generator on {generator.device}, expected one on the CPU",
            hint="use torch.Generator() without a device",
        )
    with torch._C._DisableTorchDispatch():
        return Stream(0, "a generator", *torch.randint(2**31, (4,), generator=generator).tolist())


def _fill(stream: Stream, tensor: Tensor, draw: Callable[[int], NDArray[np.generic]]) -> Tensor:
    """Put draws into ``tensor`` in row-major order of its shape, whatever its layout."""
    count = tensor.numel()
    values = np.empty(min(count, stream.period or count), dtype=np.float64)
    for start in range(0, len(values), _SLICE):
        stop = min(len(values), start + _SLICE)
        values[start:stop] = draw(stop - start)
    drawn = torch.from_numpy(values)
    if len(values) < count:
        drawn = drawn.to(tensor.dtype).repeat(-(-count // len(values)))[:count]
    drawn = drawn.view(tensor.shape)
    if tensor.is_cuda:  # a copy from pinned memory does not block
        drawn = drawn.to(tensor.dtype).pin_memory()
    return tensor.copy_(drawn, non_blocking=True)


_NUMPY: dict[torch.dtype, str] = {torch.float16: "f2", torch.float32: "f4", torch.float64: "f8"}


def _uniform(stream: Stream, tensor: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Draws from ``low`` to below ``high``: a draw that rounds to ``high`` becomes the number below it."""
    kind = _NUMPY.get(tensor.dtype)
    most = high if kind is None or low >= high else float(np.nextafter(np.array(high, kind), np.array(low, kind)))
    return _fill(stream, tensor, lambda n: np.minimum(np.add(np.multiply(stream.uniform(n), high - low), low), most))


def _normal(stream: Stream, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _fill(stream, tensor, lambda n: np.add(np.multiply(stream.normal(n), std), mean))


def bernoulli(stream: Stream, tensor: Tensor, p: float = 0.5) -> Tensor:
    """Fill with ones, with probability ``p``, and zeros."""
    return _fill(stream, tensor, lambda n: stream.uniform(n) < p)


def _exponential(stream: Stream, tensor: Tensor, rate: float = 1.0) -> Tensor:
    """Draws of the exponential distribution, by the logarithm of uniform ones."""

    def draw(count: int) -> NDArray[np.generic]:
        uniform = torch.from_numpy(np.maximum(stream.uniform(count), 2.0**-53))
        drawn: NDArray[np.float64] = log(uniform).neg_().numpy()
        return np.divide(drawn, rate)

    return _fill(stream, tensor, draw)


def _erfinv(_: Stream, tensor: Tensor) -> Tensor:
    """erfinv(x) = quantile((1 + x) / 2) / sqrt 2. Factories make normal draws by it, and its kernels differ."""
    x = tensor.detach().to("cpu", torch.float64).reshape(-1).numpy()
    p = np.clip(np.multiply(np.add(x, 1.0), 0.5), 2.0**-53, 1.0 - 2.0**-53)
    values = np.multiply(elementary.normal_quantile(p), float(np.sqrt(0.5)))
    return tensor.copy_(torch.from_numpy(values).view(tensor.shape))


def _erf(x: SupportsFloat | SupportsIndex) -> float:
    return erf(torch.tensor([float(x)], dtype=torch.float64)).item()


def _randint(stream: Stream, tensor: Tensor, *args: Any) -> Tensor:
    bounds = [value for value in args if isinstance(value, int)]
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    if high - low > MOST:
        raise UserError(f"torch.randint: got a range of {high - low:,}, accepts at most 2**31", hint="make it smaller")
    return _fill(stream, tensor, lambda n: stream.below(high - low, n) + low)


DRAWS: dict[Any, Callable[..., Tensor]] = {
    aten.uniform_: _uniform,
    aten.normal_: _normal,
    aten.bernoulli_: bernoulli,
    aten.bernoulli.p: lambda stream, tensor, _, p: bernoulli(stream, tensor, p),
    aten.exponential_: _exponential,
    aten.erfinv_: _erfinv,  # turns uniform draws into normal ones
    aten.rand: lambda stream, tensor, *_: _uniform(stream, tensor),
    aten.randn: lambda stream, tensor, *_: _normal(stream, tensor),
    aten.rand_like: lambda stream, tensor, *_: _uniform(stream, tensor),
    aten.randn_like: lambda stream, tensor, *_: _normal(stream, tensor),
    aten.normal.float_float: lambda stream, tensor, mean, std, *_: _normal(stream, tensor, mean, std),
    aten.randint: _randint,
    aten.randint_like: lambda stream, tensor, _, *bounds: _randint(stream, tensor, *bounds),
    aten.randperm: lambda stream, tensor, n: tensor.copy_(torch.from_numpy(stream.permutation(n))),
}
"""Functions that fill a tensor with draws from a stream: the argument of an in-place operation, or a new tensor."""


def is_draw(func: Any) -> bool:
    """Whether ``answer`` knows a random operation."""
    return func in DRAWS or func.overloadpacket in DRAWS


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], filled: Callable[..., Tensor]) -> Tensor:
    """Result of a random operation; ``filled(tensor, fill)`` calls ``fill(stream, part)`` on all parts of a tensor."""
    generator = {"generator": None} if "generator" in kwargs else {}
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    fill = DRAWS.get(func) or DRAWS[func.overloadpacket]
    if func.overloadpacket.__name__.endswith("_"):
        return filled(args[0], lambda stream, part: fill(stream, part, *args[1:], **kwargs))
    if all(one.name != "device" for one in func._schema.arguments):
        return filled(torch.empty_like(args[0]), lambda stream, part: fill(stream, part, *args))
    like = args[0].device if isinstance(args[0], torch.Tensor) else None
    with torch._C._DisableTorchDispatch():  # on meta it draws nothing, which another mode would not know
        shaped = func(*args, **{**kwargs, **generator, "device": "meta"})
    tensor = torch.empty_like(shaped, device=kwargs.get("device") or like or "cpu")
    return filled(tensor, lambda stream, part: fill(stream, part, *args))


@contextmanager
def portable_initialization(seed: int, *, rough: bool = False) -> Iterator[None]:
    """Answer PyTorch's random calls within the block from a stream fixed by ``seed``.

    A ``rough`` stream repeats itself. After ``torch.manual_seed`` draws follow from its seed alone, as in PyTorch. The
    states of PyTorch's and NumPy's default generators and of Python's ``random`` are seeded, and restored afterwards.

    Raises:
        UserError: the block calls a random operation that has no portable version.
    """
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - a factory may use it
    c_library = math.erf
    key = derive(seed, "initial weights")
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002
    math.erf = _erf  # trunc_normal_ calls the C library's, which differs between hosts
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key % 2**63)
            with _PortableDraws((RepeatedStream if rough else Stream)(seed, "initial weights")):
                yield
    finally:
        math.erf = c_library
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
