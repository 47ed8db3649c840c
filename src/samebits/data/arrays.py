"""A user's own arrays, read in pieces from ``.npy`` or ``.safetensors`` files, and written as one split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from samebits.errors import UserError
from samebits.files import atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

_NAMES = {"float32": "F32", "int64": "I64", "uint8": "U8"}


@dataclass(frozen=True)
class Source:
    """An array on disk: its rows are read when they are asked for; ``key`` is the params' name for it."""

    key: str
    path: Path
    shape: tuple[int, ...]
    read: Callable[[int, int], NDArray[Any]]


def open_source(key: str, reference: str) -> Source:
    """Open ``file.npy``, or ``file.safetensors:tensor``.

    Raises:
        UserError: there is no such file or tensor, or it is not such a file.
    """
    name, _, tensor = reference.partition(":")
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{key}: {path}: no such file", hint="give the path from the repository's root")
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            return Source(key, path, array.shape, lambda start, stop: np.asarray(array[start:stop]))
        if path.suffix == ".safetensors":
            return _open_safetensors(key, path, tensor)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{key}: {path}: cannot be read: {error}", hint="write it again with numpy.save") from None
    hint = "save it with numpy.save, or with safetensors and give file.safetensors:name"
    raise UserError(f"{key}: {path}: neither .npy nor .safetensors", hint=hint)


def _open_safetensors(key: str, path: Path, tensor: str) -> Source:
    file = safe_open(path, framework="numpy")
    names = sorted(file.keys())  # type: ignore[no-untyped-call]
    if tensor not in names:
        got = repr(tensor) if tensor else "no name of a tensor"
        raise UserError(f"{key}: {path}: got {got}, accepts {', '.join(names)}", hint=f"write {path}:{names[0]}")
    piece = file.get_slice(tensor)  # type: ignore[no-untyped-call]
    rows = (*piece.get_shape(), 0)[0]
    return Source(key, path, tuple(piece.get_shape()), lambda start, stop: np.asarray(piece[start : min(stop, rows)]))


def normalised(source: Source, start: int, rows: NDArray[Any], *, integers: bool) -> NDArray[Any]:
    """Rows as they are stored: float32, 64-bit integers, or (without ``integers``) bytes as they are.

    Raises:
        UserError: a value is not finite, or the type is not a number's; ``start`` is the first row's number.
    """
    kind = rows.dtype.kind
    if kind == "u" and rows.dtype.itemsize == 1 and not integers:
        return rows
    if kind in "iub":
        return rows.astype("<i8")
    if kind != "f":
        raise UserError(f"{source.key}: {source.path} holds {rows.dtype}, expected numbers", hint="convert it")
    with np.errstate(over="ignore"):
        converted = rows.astype("<f4")
    finite = np.isfinite(converted).all(axis=tuple(range(1, converted.ndim)))
    if not finite.all():
        row = start + int(np.argmin(finite))
        hint = "clean the data; float32 reaches to 3.4e38"
        raise UserError(f"{source.key}: {source.path}: row {row} holds a value that is not finite", hint=hint)
    return converted


class SplitWriter:
    """Writes ``inputs`` and ``targets`` row by row into a safetensors file, without holding them in memory."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self._path, self._shapes, self._dtypes = path, shapes, dtypes

    def write(self, pieces: Iterable[dict[str, NDArray[Any]]]) -> None:
        """Write pieces that fill the shapes exactly."""
        # The widest type first, so that every tensor is aligned.
        order = sorted(self._shapes, key=lambda name: (-np.dtype(self._dtypes[name]).itemsize, name))
        header: dict[str, dict[str, Any]] = {}
        offset = 0
        for name in order:
            size = int(np.prod(self._shapes[name], dtype=np.int64)) * np.dtype(self._dtypes[name]).itemsize
            entry = {"dtype": _NAMES[self._dtypes[name]], "shape": list(self._shapes[name])}
            header[name] = {**entry, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with atomic(self._path) as temporary:
            with temporary.open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                stream.truncate(8 + len(text) + offset)
            regions = {
                name: np.memmap(
                    temporary,
                    dtype=np.dtype(self._dtypes[name]).newbyteorder("<"),
                    mode="r+",
                    offset=8 + len(text) + int(header[name]["data_offsets"][0]),
                    shape=self._shapes[name],
                )
                for name in order
            }
            row = 0
            for piece in pieces:
                count = len(piece[order[0]])
                for name, values in piece.items():
                    regions[name][row : row + count] = values
                row += count
            assert row == self._shapes[order[0]][0]
            for region in regions.values():
                region.flush()
