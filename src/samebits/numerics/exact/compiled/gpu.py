"""The kernels of ``gpu.cu``: compiled by NVRTC for each kind of GPU, and launched by the driver."""

from __future__ import annotations

import ctypes
import hashlib
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock, local
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from samebits.errors import HostError, first_line
from samebits.files import atomic, own_folder
from samebits.numerics.exact.compiled.build import PARTS
from samebits.numerics.exact.compiled.library import OF_NUMBERS, SUFFIXES, Kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = Path(__file__).with_name("gpu.cu")
OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Of NVRTC. ``--fmad=false`` forbids the one change that it makes by itself; the others are the usual ones."""
BLOCK, WIDE, SHARED = 256, 32, 48 << 10
"""Threads of a block, columns that it has at a time, and bytes that the threads of a block of any GPU can share."""
WIDEST, _ROW_BLOCKS = 1 << 18, 256
"""Numbers of the widest row that has a kernel, and blocks with room in memory: of the widest rows, 1 GiB in all."""
_HINT = "set the environment's SAMEBITS_KERNELS to python, which gives the same bits more slowly"
_MOST_BLOCKS = 1 << 16
_PLACES = 1 << 12
_NO_CONTEXT = 201
_LOCK = Lock()
_BYTES = 8  # of a float64 number


class Launch(NamedTuple):
    """How a kernel is launched: blocks, bytes that the threads of each share, and arguments behind the usual ones."""

    blocks: int
    shared: int = 0
    more: tuple[int | Tensor | None, ...] = ()


def _of_each(number: int) -> Callable[..., Launch]:
    """A thread for each of as many numbers as an argument says, or for some of them."""
    return lambda *given: Launch(-(-given[number] // BLOCK))


def _of_rows(number: int) -> Callable[..., Launch]:
    """Blocks for as many rows as an argument says, each with room for two of them; the next one is their width."""

    def launch(x: Tensor, *more: Any) -> Launch:
        rows, width = more[number - 1 : number + 1]
        if 2 * width * _BYTES <= SHARED:
            return Launch(rows, 2 * width * _BYTES, (None,))
        blocks = min(rows, _ROW_BLOCKS)
        return Launch(blocks, more=(x.new_empty(blocks * 2 * width, dtype=torch.float64),))

    return launch


def _of_sums(x: Tensor, y: Tensor, outer: int, count: int, inner: int, *_: Any) -> Launch:  # noqa: ARG001
    """A block for as many columns as it has room for, with half of their numbers."""
    wide = max(1, min(inner, WIDE, SHARED // _BYTES // max(count // 2, 1)))
    return Launch(outer * -(-inner // wide), count // 2 * wide * _BYTES, (wide,))


_OF_ROWS = {
    "softmax": 3, "softmax_backward": 3, "log_softmax": 3, "log_softmax_backward": 3, "cross_entropy": 4,
    "rms_norm": 3, "rms_norm_backward": 3, "layer_norm": 6, "layer_norm_backward": 6,
}  # fmt: skip
"""Functions of rows, and which argument says how many."""
_GATHERED = ("sgd", "adamw")
"""Functions of one parameter each, whose calls may wait for each other."""
LAUNCHES: dict[str, Callable[..., Launch]] = {
    "relu": _of_each(2),
    "sum_float": _of_sums,
    "sum_double": _of_sums,
    "snap_groups": lambda x, y, outer, groups, *_: Launch(groups),  # noqa: ARG005
    "snap_rows": lambda x, y, rows, *_: Launch(rows),  # noqa: ARG005
    "snap_columns": lambda x, y, outer, count, width, *_: Launch(outer * -(-width // WIDE)),  # noqa: ARG005
    "snap_to": _of_each(3),
    "snap_sum": _of_each(4),
    "bernoulli": lambda y, draws, *_: Launch(-(-draws.shards * -(-draws.each // 4) // BLOCK)),  # noqa: ARG005
    "finish": _of_each(2),
    "lstm_slopes": lambda *given: Launch(given[7]),
    **dict.fromkeys(("lstm", "gru", "gru_slopes"), lambda *given: Launch(given[8])),
    "digits": lambda x, digits, signs, tops, rows, *_: Launch(rows),  # noqa: ARG005
    "joined": lambda products, signs, tops, others, y, *_: Launch(-(-y.numel() // BLOCK)),  # noqa: ARG005
    "folded": lambda rows, y, *_: Launch(-(-y.numel() // BLOCK)),  # noqa: ARG005
    **dict.fromkeys(("max_pool", "max_pool_backward"), lambda y, *_: Launch(-(-y.numel() // BLOCK))),
    **{name: _of_rows(number) for name, number in _OF_ROWS.items()},
    **dict.fromkeys(_GATHERED, lambda all_: Launch(-(-max(one.n for one in all_.of) // BLOCK))),
}
"""By name; a function of each number has none here."""
_TOGETHER = 32  # parameters of a launch, as in gpu.cu
_ELSEWHERE = {"sin", "cos"}  # only for numbers that are near, which the host would have to wait to know


@cache
def _of_numbers() -> frozenset[str]:
    names = {function.__name__ for function in OF_NUMBERS} - _ELSEWHERE
    return frozenset(name + suffix for name in names for suffix in SUFFIXES.values())


class _Update(ctypes.Structure):
    """Of one parameter: addresses of weights, sums of gradients and states, how many there are, and three numbers."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("p", "sums", "first", "second")),
        ("n", ctypes.c_int64),
        ("numbers", ctypes.c_double * 3),
    )


class _Updates(ctypes.Structure):
    """Of several parameters, whose gradients are sums of so many terms and have a scale."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("terms", ctypes.c_double),
        ("scale", ctypes.c_void_p),
        ("of", _Update * _TOGETHER),
    )


class GpuLibrary(Kernels):
    """The functions of ``gpu.cu``, on every GPU of this process."""

    device = "cuda"
    is_host = False

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._modules: dict[int, ctypes.c_void_p] = {}
        self._zeros: dict[tuple[torch.device, int], Tensor] = {}
        self._local = local()

    def has(self, name: str, kept: int = 0) -> bool:
        """See ``Kernels.has``."""
        most = 2 * WIDEST if name in _OF_ROWS else SHARED // _BYTES
        return (name in LAUNCHES or name in _of_numbers()) and kept <= most

    def answer(self, name: str, *arguments: Any) -> bool:
        """See ``Kernels.answer``; a kernel that is launched answers."""
        self.call(name, *arguments)
        return True

    def call(self, name: str, *arguments: Any) -> None:
        """See ``Kernels.call``. Raises HostError: it cannot be launched."""
        if name in _GATHERED:
            waiting = getattr(self._local, "waiting", None)
            if waiting is None:
                self._together([(name, *arguments)])
            else:
                waiting.append((name, *arguments))
            return
        launch, x = LAUNCHES.get(name, _of_each(2))(*arguments), arguments[0]
        assert isinstance(x, Tensor)
        self.launch(name, launch, *arguments, *launch.more, device=x.device)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See ``Kernels.gathered``."""
        self._local.waiting = []
        try:
            yield
            self._together(self._local.waiting)
        finally:
            self._local.waiting = None

    def _together(self, calls: list[tuple[Any, ...]]) -> None:
        """Launch calls of one function on one device, for as many parameters at once as a launch takes."""
        for first in range(0, len(calls), _TOGETHER):
            part = calls[first : first + _TOGETHER]
            (name, x, *_), *_ = part
            given = _updates(part)
            self.launch(name, LAUNCHES[name](given), given, device=x.device)

    def place(self, like: Tensor) -> Tensor:
        """See ``Kernels.place``. It holds zero, and is one of many that were filled at once."""
        key = like.device, self.stream(like.device)
        with _LOCK:  # replicas of dp may share a GPU
            zeros = self._zeros.get(key)
            if zeros is None or len(zeros) == 0:
                zeros = torch.zeros(_PLACES, device=like.device)
            self._zeros[key] = zeros[1:]
        return zeros[0]

    def number(self, value: Tensor | float, like: Tensor) -> Tensor:
        """See ``Kernels.number``."""
        if isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=torch.float64, device=like.device)

    def forget_places(self) -> None:
        """See ``Kernels.forget_places``."""
        with _LOCK:
            self._zeros.clear()

    def launch(self, name: str, launch: Launch, *arguments: Any, device: torch.device) -> None:
        """Launch a kernel."""
        with torch.cuda.device(device):
            function = self._function(device.index, name)
            given = [_as_c(argument) for argument in arguments]
            addresses = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
            blocks = max(1, min(launch.blocks, _MOST_BLOCKS))
            stream = ctypes.c_void_p(self.stream(device))
            sizes = blocks, 1, 1, BLOCK, 1, 1, launch.shared
            code = self._ask("cuLaunchKernel", function, *sizes, stream, addresses, None)
        _require(code == 0, f"the driver cannot launch {name}: error {code}")

    def stream(self, device: torch.device) -> int:
        """The current stream of a device."""
        return torch.cuda.current_stream(device).cuda_stream

    def _ask(self, name: str, *arguments: Any) -> int:
        """What a function of the driver answers for the current device."""
        code: int = getattr(self._driver, name)(*arguments)
        if code == _NO_CONTEXT:  # in a thread that has not called the runtime yet, which brings the driver one
            torch.cuda.current_stream().query()
            code = getattr(self._driver, name)(*arguments)
        return code

    def _function(self, device: int, name: str) -> ctypes.c_void_p:
        function = self._functions.get((device, name))
        if function is None:
            if device not in self._modules:
                self._modules[device] = self._load(device)
            function = ctypes.c_void_p()
            code = self._ask("cuModuleGetFunction", ctypes.byref(function), self._modules[device], name.encode())
            _require(code == 0, f"gpu.cu has no {name}: error {code}")
            self._functions[device, name] = function
        return function

    def _load(self, device: int) -> ctypes.c_void_p:
        capability = "".join(map(str, torch.cuda.get_device_capability(device)))
        module, code = ctypes.c_void_p(), -1
        for anew in (False, True):  # a file may be damaged
            code = self._ask("cuModuleLoadData", ctypes.byref(module), compiled_for(capability, anew=anew))
            if code == 0:
                break
        _require(code == 0, f"the driver cannot load the kernels of exact: error {code}")
        return module


def _updates(calls: list[tuple[Any, ...]]) -> _Updates:
    terms, scale = calls[0][6:8]
    together = _Updates(count=len(calls), terms=terms, scale=None if scale is None else scale.data_ptr())
    for one, (_, *tensors) in zip(together.of, calls, strict=False):
        one.p, one.sums, one.first, one.second = (None if t is None else t.data_ptr() for t in tensors[:4])
        one.n = tensors[4]
        one.numbers[:] = tensors[7:10]
    return together


def _as_c(argument: Any) -> Any:
    if isinstance(argument, (ctypes.Structure, ctypes.Array)):  # by value
        return argument
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise HostError(why, hint=_HINT)


def compiled_for(capability: str, *, anew: bool = False) -> bytes:
    """Machine code for GPUs of a compute capability, such as "80", from this user's cache, or made ``anew``.

    Raises HostError: there is no NVRTC, or it fails.
    """
    nvrtc = _nvrtc()
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc.nvrtcVersion(*map(ctypes.byref, version))
    made_by = str((OPTIONS, *(part.value for part in version))).encode()
    name = hashlib.sha256(b"".join([made_by, *(file.read_bytes() for file in (SOURCE, *PARTS))])).hexdigest()[:16]
    target = own_folder() / f"kernels-{name}-sm_{capability}.cubin"
    if anew or not target.exists():
        with atomic(target) as made:
            made.write_bytes(translated(f"sm_{capability}", "CUBIN"))
    return target.read_bytes()


def translated(architecture: str, kind: str) -> bytes:
    """``gpu.cu`` as ``PTX`` or ``CUBIN`` for an architecture. Raises HostError."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={architecture}", f"-I{SOURCE.parent}")]
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), 0, None, None)
    try:
        if code := nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(max(size.value, 1))
            nvrtc.nvrtcGetProgramLog(program, log)
            said = first_line(log.value.decode(errors="replace")) or f"error {code}"
            raise HostError(f"NVRTC cannot compile the kernels of exact: {said}", hint=_HINT)
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        result = ctypes.create_string_buffer(max(size.value, 1))
        getattr(nvrtc, f"nvrtcGet{kind}")(program, result)
        return result.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVIDIA's compiler at run time, which PyTorch's builds for CUDA bring. Raises HostError: it is not there."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for found in (name, *map(str, sorted(packages.glob(f"*/lib/{name}")))):
        try:
            return ctypes.CDLL(found)
        except OSError:
            continue
    raise HostError(f"{name} is not there, which compiles the kernels of exact for GPUs", hint=_HINT)
