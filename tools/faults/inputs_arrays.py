"""A user's own arrays that are damaged, dangerous or unlike the parameters."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from faults.inputs_params import SMALL_RUN, yaml_of
from faults.inputs_values import TEXTS, damaged, not_a_file, paths

if TYPE_CHECKING:
    import random

    from faults.inputs_bench import Bench

ROWS = 320
_TYPES = ("<f2", ">f8", "<f8", "<c8", "<i1", ">u8", "?", "<M8[s]", "<m8[D]", "<U4", "S3", "V5", "<f4,<i4", "<g", "O")
_VALUES = (float("nan"), float("inf"), 1e39, -1.0, 2.0**62, 2.0**31, 255.0, 256.0)
_SHAPES = (
    (), (0,), (ROWS,), (0, 8), (ROWS, 0), (ROWS, 0, 5), (ROWS + 1, 8), (1, 8), (ROWS, *(1,) * 31), (ROWS, 1),
)  # fmt: skip
_OTHER_SHAPES = (
    "1099511627776, 8", "4611686018427387904, 4611686018427387904", "-320, 8", "-1,", "320.0, 8", "True, 8",
    "320L, 8L", "1," * 70, "9" * 5000 + ",", "0, 4611686018427387904",
)  # fmt: skip
_OTHER_TYPES = (
    "'|O'", "'V9999999999'", "'|V0'", "'<U0'", "[('a', '<f4'), ('a', '<f4')]", "[]", "None", "('<f4', (-1,))",
)  # fmt: skip
_HEADERS = (
    *(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}" for shape in _OTHER_SHAPES),
    *(f"{{'descr': {descr}, 'fortran_order': False, 'shape': (320, 8), }}" for descr in _OTHER_TYPES),
    *(f"{{'descr': '<f4', 'fortran_order': {order}, 'shape': (320, 8), }}" for order in ("'x'", "True")),
    "{'descr': [('\\x1b[31m', '<f4', (2, 2))], 'fortran_order': False, 'shape': (320, 2), }",
    "{'shape': (320, 8)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (320, 8), 'x': 1}",
    "[]", "", "{", "\0" * 50, "{[]: 1}", "{1: 2, 'a': 3}", "(" * 5000, "-" * 9000, "[" * 150 + "]" * 150,
    "1+" * 4000 + "1",
    "{" * 3000, "'\\N{x}'", "'\\x1b[31m'", "x" * 20000, "__import__('os').system('touch canary')", "\ud800",
)  # fmt: skip


def spoil_arrays(rng: random.Random, bench: Bench) -> str:
    """Write arrays and parameters of a ``file`` task. One of them is wrong; return a description of it."""
    x = np.linspace(-1, 1, ROWS * 8, dtype=np.float32).reshape(ROWS, 8)
    y = np.arange(ROWS) % 5
    split = (np.arange(ROWS) >= 256).astype(np.int64)
    for name, array in (("x", x), ("y", y), ("s", split)):
        np.save(bench.folder / f"{name}.npy", array)
    (bench.folder / "x.safetensors").write_bytes(save({"t": x, "y": y}))
    kwargs: dict[str, Any] = {"inputs": "x.npy", "targets": "y.npy", "split": rng.choice((None, "s.npy"))}
    what = rng.choice((_npy_header, _npy_values, _npy_bytes, _npy_pickle, _archive, _tensors, _reference, _settings))(
        rng, bench, kwargs
    )
    params = {**SMALL_RUN, "data": {"task": "file", "num_samples": 256, "test_samples": 64, "kwargs": kwargs}}
    (bench.folder / "params.yaml").write_bytes(yaml_of(params))
    return what


def _name(rng: random.Random) -> str:
    return rng.choice(("x.npy", "y.npy", "s.npy"))


def _npy_header(rng: random.Random, bench: Bench, _kwargs: dict[str, Any]) -> str:
    name, header = rng.choice(("x.npy", "y.npy")), rng.choice(_HEADERS)
    version, raw = rng.choice(((1, 0), (2, 0), (3, 0), (3, 0), (9, 9))), header.encode("utf-8", "surrogatepass")
    length = struct.pack("<H" if version[0] == 1 else "<I", rng.choice((len(raw), len(raw), len(raw), 60000)))
    data = b"\x93NUMPY" + bytes(version) + length + raw + bytes(rng.choice((0, 100, ROWS * 8 * 4)))
    (bench.folder / name).write_bytes(data)
    return f"{name}: header {header[:80]!r}, version {version}"


def _npy_values(rng: random.Random, bench: Bench, kwargs: dict[str, Any]) -> str:
    name = _name(rng)
    kwargs["split"] = rng.choice((kwargs["split"], "s.npy"))
    array = np.load(bench.folder / name)
    if rng.random() < 0.4:
        kind = rng.choice(_TYPES)
        array = np.zeros(array.shape, kind)
        what = f"type {kind}"
    elif rng.random() < 0.5:
        shape = rng.choice(_SHAPES)
        array = np.zeros(shape, rng.choice((array.dtype, np.uint8)))
        what = f"shape {shape}"
    else:
        new, row = rng.choice(_VALUES), rng.randrange(ROWS)
        array = array.astype(rng.choice((np.float32, np.float64, np.int64)))
        with np.errstate(all="ignore"):
            array[row] = np.float64(new).astype(array.dtype)
        what = f"{new} in row {row} of {array.dtype}"
    np.save(bench.folder / name, array, allow_pickle=True)
    return f"{name}: {what}"


def _npy_bytes(rng: random.Random, bench: Bench, kwargs: dict[str, Any]) -> str:
    name = rng.choice(("x.npy", "y.npy", "x.safetensors"))
    if name.endswith("safetensors"):
        kwargs["inputs"] = "x.safetensors:t"
    path = bench.folder / name
    data = path.read_bytes()
    head = rng.randrange(200)  # about the end of the header
    path.write_bytes(rng.choice((damaged(rng, data), damaged(rng, data[:head]) + data[head:], data[:head])))
    return f"{name}: damaged within {head} bytes"


def _npy_pickle(rng: random.Random, bench: Bench, kwargs: dict[str, Any]) -> str:
    name, how = _name(rng), rng.choice(("object array", "pickle", "archive of object arrays", "torch.save"))
    kwargs["split"] = "s.npy"
    path, array = bench.folder / name, np.array([[bench.pickle_of()]] * 4, dtype=object)
    match how:
        case "object array":
            np.save(path, array, allow_pickle=True)
        case "pickle":
            path.write_bytes(bench.pickle())
        case "archive of object arrays":
            stream = io.BytesIO()
            np.savez(stream, arr_0=array)
            path.write_bytes(stream.getvalue())
        case _:
            import torch

            torch.save([bench.pickle_of()], path)
    return f"{name}: {how} with code"


def _archive(rng: random.Random, bench: Bench, _kwargs: dict[str, Any]) -> str:
    name, how = rng.choice(("x.npy", "y.npy")), rng.choice(("arrays", "bomb", "empty", "cut", "names"))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        match how:
            case "arrays" | "cut":
                archive.writestr("arr_0.npy", (bench.folder / name).read_bytes())
            case "bomb":
                archive.writestr("arr_0.npy", bytes(20_000_000))
            case "names":
                archive.writestr("../../outside/passwd", "x")
    data = stream.getvalue()
    (bench.folder / name).write_bytes(data[: rng.randrange(4, len(data))] if how == "cut" else data)
    return f"{name}: a zip file, {how}"


def _tensors(rng: random.Random, bench: Bench, kwargs: dict[str, Any]) -> str:
    key = rng.choice(("inputs", "targets"))
    name = rng.choice(("t", "t", *TEXTS))
    entry: dict[str, Any] = {"dtype": "F32", "shape": [ROWS, 8], "data_offsets": [0, ROWS * 32]}
    entry |= rng.choice(
        (
            {}, {"shape": []}, {"shape": [0, 8], "data_offsets": [0, 0]}, {"shape": [2**40, 8]}, {"shape": [-1, 8]},
            {"dtype": "F16", "shape": [ROWS, 16]}, {"dtype": "BF16", "shape": [ROWS, 16]}, {"dtype": "U64",
            "shape": [ROWS, 4]},
            {"dtype": "F8_E4M3", "shape": [ROWS, 32]}, {"dtype": "F8_E5M2", "shape": [ROWS, 32]}, {"dtype": "X"},
            {"dtype": "BOOL", "shape": [ROWS, 32]}, {"dtype": "C64", "shape": [ROWS, 4]}, {"dtype": None},
            {"dtype": "F4", "shape": [ROWS, 64]}, {"data_offsets": [0, 10**18]}, {"data_offsets": [8, 0]},
            {"data_offsets": [0]},
            {"shape": [ROWS, 8.0]}, {"shape": [2**63, 2**63]}, {"shape": [ROWS, 8, *[1] * 70]}, {"extra": 1},
        )
    )  # fmt: skip
    header: Any = {name: entry}
    header = rng.choice((header, header, header, {}, [], {"__metadata__": {"a": 1}}, {"__metadata__": {}}, 3))
    text = json.dumps(header).encode()
    text = rng.choice((text, text, text, text[:-1], b"[" * 100_000, text + b" " * 1000))
    length = rng.choice((len(text), len(text), len(text), 2**63, 2**40, 0, len(text) + 1))
    body = bytes(ROWS * 32 if name in header else 0) if isinstance(header, dict) else b""
    (bench.folder / "x.safetensors").write_bytes(length.to_bytes(8, "little") + text + body)
    kwargs[key] = f"x.safetensors:{rng.choice((name, name, 't', ''))}"
    return f"x.safetensors: {text[:120]!r}, length {length}, as {kwargs[key][:40]!r}"


def _reference(rng: random.Random, bench: Bench, kwargs: dict[str, Any]) -> str:
    key = rng.choice(("inputs", "targets", "split"))
    if rng.random() < 0.4:
        name = rng.choice(("x.npy", "y.npy"))
        return f"{name}: {not_a_file(rng, bench.folder / name, bench.outside)}"
    end = rng.choice(("", ".npy", ".safetensors:t", ":t"))
    kwargs[key] = rng.choice((*paths(bench.outside), *TEXTS, "/dev/zero", "/proc/self/mem", "data")) + end
    return f"data.kwargs.{key} = {kwargs[key][:80]!r}"


def _settings(rng: random.Random, _bench: Bench, kwargs: dict[str, Any]) -> str:
    key, new = rng.choice((
        ("classes", 1), ("classes", 4), ("classes", 2**40), ("classes", 10**400), ("inputs", "y.npy"), ("targets",
        "x.npy"),
        ("split", "x.npy"), ("split", "y.npy"), ("input_scale", 1e308), ("input_offset", -1e308), ("input_scale",
        5e-324),
        ("targets", "s.npy"), ("split", ""),
    ))  # fmt: skip
    kwargs[key] = new
    return f"data.kwargs.{key} = {str(new)[:60]}"
