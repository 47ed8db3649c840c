"""The kernels for GPUs give the bits of Python's functions. Here they run on a CPU, thread by thread."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from samebits.errors import HostError
from samebits.numerics.exact.compiled import build, check, gpu
from samebits.numerics.exact.compiled.library import OF_NUMBERS, SUFFIXES, Library, mapped, using
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.grid import snap, snap_rows, snapped_sum
from samebits.numerics.exact.operations import normalization
from samebits.numerics.exact.optimizers import SGD, AdamW
from samebits.numerics.exact.self_test.numbers import digest, floats, usual_floats
from samebits.numerics.exact.sums import fixed_order_sum

CPU = torch.device("cpu")
_COUNT = 3000


class OnCpu(gpu.GpuLibrary):
    """Kernels of ``gpu.cu`` whose threads run one after the other on a CPU."""

    device = "cpu"

    def __init__(self, folder: Path, *flags: str) -> None:
        library = folder / "gpu_on_cpu.so"
        command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-ffp-contract=off", *flags]
        subprocess.run(
            [*command, f"-I{gpu.SOURCE.parent}", "-o", str(library), str(Path(__file__).with_name("gpu_on_cpu.cpp"))],
            check=True,
        )
        self._kernels = ctypes.CDLL(str(library))
        self._zeros = {}
        self._local = threading.local()
        self.launched: set[str] = set()

    def stream(self, device: torch.device) -> int:
        assert device == CPU
        return 0

    def launch(self, name: str, launch: gpu.Launch, *arguments: Any, device: torch.device) -> None:
        assert device == CPU
        self.launched.add(name)
        assert launch.shared <= gpu.SHARED
        *others, last = arguments
        if isinstance(last, ctypes.Structure | ctypes.Array):  # which a kernel gets by value
            name, arguments = f"{name}_at", (*others, ctypes.addressof(last))
        numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else a or 0 for a in arguments if type(a) is not float]
        doubles = [a for a in arguments if type(a) is float]
        given = (ctypes.c_int64 * 12)(*numbers), (ctypes.c_double * 5)(*doubles)
        blocks = min(launch.blocks, 3)  # each of which takes more than one share
        self._kernels.run(getattr(self._kernels, name), blocks, gpu.BLOCK, *given)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    return OnCpu(tmp_path_factory.mktemp("kernels"))


def test_every_kernel_gives_the_bits_of_pythons_functions(on_cpu: OnCpu) -> None:
    assert check.differing(on_cpu) == []
    numbers = floats(_COUNT, 1, CPU)
    for function in OF_NUMBERS:  # of float32 numbers, which the check gives to none
        with using(on_cpu):
            found = mapped(function, numbers)
        with using(None):
            expected = function(numbers.to(torch.float64)).to(torch.float32)
        assert (found is None) == (function.__name__ in ("sin", "cos"))
        assert found is None or digest([found]) == digest([expected])
    functions = set(re.findall(r"^(?:MAP|TABLE)\((\w+),", _source(), re.M)) - {"sin", "cos"}
    assert on_cpu.launched == {*gpu.LAUNCHES, *(name + suffix for name in functions for suffix in SUFFIXES.values())}


@pytest.mark.parametrize("width", [1, 2, 31, 257, gpu.SHARED // 16, gpu.SHARED // 16 + 1, 5000, gpu.WIDEST + 1])
def test_rows_of_any_width_with_any_numbers(on_cpu: OnCpu, width: int) -> None:
    x, grad = (floats(5 * width, salt, CPU).view(5, width) for salt in (2, 3))
    on_cpu.launched.clear()

    def results() -> str:
        softmax = normalization.softmax(x, -1, False)
        norm = normalization.layer_norm(grad, [width], x[0], x[1], 1e-5)
        back = normalization.softmax_backward(grad, softmax, -1, torch.float32)
        return digest([softmax, *norm, back, snap_rows(x, 20), snap(x, 0, 20), fixed_order_sum(x, (1,))])

    with using(on_cpu):
        found = results()
    with using(None):
        assert results() == found
    assert ("softmax" in on_cpu.launched) == (width <= gpu.WIDEST)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 40), (2, 37, 1), (2, 800, 33), (1, 13000, 2), (4, 2, 70)])
def test_sums_of_any_number_of_terms(on_cpu: OnCpu, shape: tuple[int, ...]) -> None:
    x = floats(torch.Size(shape).numel(), 4, CPU).view(shape)
    on_cpu.launched.clear()
    with using(on_cpu):
        found = fixed_order_sum(x, (1,)), *snapped_sum(x, 3 * 2.0**40)
    with using(None):
        assert digest(found) == digest([fixed_order_sum(x, (1,)), *snapped_sum(x, 3 * 2.0**40)])
    assert ("sum_float" in on_cpu.launched) == (shape[1] // 2 <= gpu.SHARED // 8)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0 - 2.0**-53, 1.0])
@pytest.mark.parametrize(("shards", "each"), [(1, 1), (1, 1000), (5, 8), (8, 333), (129, 2)])
def test_draws_of_any_number_of_shards(on_cpu: OnCpu, shards: int, each: int, p: float) -> None:
    def results() -> str:
        draws = Draws(3, 5, range(shards))
        return digest(draws.bernoulli(torch.empty(shards, each), p) for _ in range(2))

    on_cpu.launched.clear()
    with using(on_cpu):
        found = results()
    assert ("bernoulli" in on_cpu.launched) == (shards < 129)  # more keys than a launch has
    for other in (None, Library(build.library())):
        with using(other):
            assert results() == found


def test_draws_of_parts_that_are_not_equal(on_cpu: OnCpu) -> None:
    """The last shard has fewer rows, though the numbers could be shared equally."""

    def results() -> str:
        return digest([Draws(3, 5, range(2)).bernoulli(torch.empty(3, 8))])

    with using(None):
        expected = results()
    for library in (on_cpu, Library(build.library())):
        with using(library):
            assert results() == expected


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(("make", "settings"), [(SGD, {"momentum": 0.9}), (SGD, {"momentum": 0.0}), (AdamW, {})])
def test_updates_of_many_parameters_at_once(
    on_cpu: OnCpu, make: type[SGD] | type[AdamW], settings: dict[str, Any], clip: float | None
) -> None:
    def results() -> str:
        sizes = [1 + 7 * (i % 45) for i in range(70)]  # more than one launch has
        parameters = [nn.Parameter(usual_floats(size, i, CPU).double()) for i, size in enumerate(sizes)]
        optimizer = make(parameters, lr=0.01, terms=48, clip=clip, weight_decay=0.1, **settings)
        for step in range(2):
            for i, p in enumerate(parameters):
                p.grad = None if i == 5 else usual_floats(p.numel(), 100 * step + i, CPU).double()
            optimizer.step()
        return digest([*(p.detach() for p in parameters), *(t for p in parameters for t in _tensors(optimizer, p))])

    with using(on_cpu):
        found = results()
    with using(None):
        assert results() == found


def _tensors(optimizer: SGD | AdamW, p: nn.Parameter) -> list[torch.Tensor]:
    return [value for value in optimizer.state.get(p, {}).values() if isinstance(value, torch.Tensor)]


class Driven(gpu.GpuLibrary):
    """Kernels whose driver is a stand-in, which loads this machine code and no other."""

    def __init__(self, taken: bytes) -> None:
        self._driver: Any = SimpleNamespace(cuModuleLoadData=lambda _, code: 0 if code == taken else 200)


def test_machine_code_is_made_once_and_anew_where_its_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def translated(architecture: str, kind: str) -> bytes:
        made.append(f"{architecture} {kind}")
        return b"code"

    monkeypatch.setattr(gpu, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda *_: None))
    monkeypatch.setattr(gpu, "own_folder", lambda: tmp_path)
    monkeypatch.setattr(gpu, "translated", translated)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    for _ in range(2):
        Driven(b"code")._load(0)
    (file,) = tmp_path.iterdir()
    assert (made, file.read_bytes()) == (["sm_80 CUBIN"], b"code")
    file.write_bytes(b"damaged")
    Driven(b"code")._load(0)
    assert (made, file.read_bytes()) == (["sm_80 CUBIN"] * 2, b"code")
    with pytest.raises(HostError, match="the driver cannot load the kernels of exact: error 200"):
        Driven(b"of another GPU")._load(0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for an instruction of x86-64")
def test_a_compiler_that_joins_products_and_sums_is_found_out(tmp_path: Path) -> None:
    joined = OnCpu(tmp_path, "-O2", "-march=x86-64-v3", "-ffp-contract=fast")
    assert {"exp", "log", "optimizers"} <= set(check.differing(joined))


def _source() -> str:
    return "".join(part.read_text() for part in (gpu.SOURCE, *build.PARTS))
