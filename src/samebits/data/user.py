"""The ``file`` task: a user's own arrays, which are read in pieces, checked, split and written for trainings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open

from samebits.errors import UserError, reason
from samebits.files import atomic, regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from samebits.tasks import FileData

ROWS = 4096  # read at a time
_TRAIN, _TEST = 0, 1
_NAMES = {"float32": "F32", "int64": "I64", "uint8": "U8"}
_READ_BY_NUMPY = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """An array on disk. ``read(start, stop)`` gives its rows, and ``key`` is its key in params.yaml."""

    key: str
    path: Path
    shape: tuple[int, ...]
    read: Callable[[int, int], NDArray[Any]]


def open_source(key: str, reference: str) -> Source:
    """Open ``file.npy`` or ``file.safetensors:tensor``. Raises UserError: it does not exist or cannot be read."""
    name, _, tensor = reference.partition(":")
    path = Path(name)
    try:
        regular(path)
        if path.suffix == ".npy":
            array = np.lib.format.open_memmap(path, mode="r")  # np.load would also open a zip, or a pickle
            return Source(key=key, path=path, shape=array.shape, read=lambda start, stop: np.asarray(array[start:stop]))
        if path.suffix == ".safetensors":
            return _open_safetensors(key, path, tensor)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{key}: {path}: no such file", hint="give the path from the repository's root") from None
    except Exception as error:  # noqa: BLE001 - NumPy evaluates the header, which may raise anything
        hint = "write it again with numpy.save"
        raise UserError(f"{key}: {path}: cannot be read: {reason(error)}", hint=hint) from None
    hint = "save it with numpy.save, or with safetensors and give file.safetensors:name"
    raise UserError(f"{key}: {path}: neither .npy nor .safetensors", hint=hint)


def _open_safetensors(key: str, path: Path, tensor: str) -> Source:
    file = safe_open(path, framework="numpy")
    names = sorted(file.keys())  # type: ignore[no-untyped-call]
    if not names:
        raise UserError(f"{key}: {path}: holds no tensor", hint="save the arrays into it")
    if tensor not in names:
        got = repr(tensor) if tensor else "no name of a tensor"
        raise UserError(f"{key}: {path}: got {got}, accepts {', '.join(names)}", hint=f"write {path}:{names[0]}")
    piece = file.get_slice(tensor)  # type: ignore[no-untyped-call]
    if (kind := piece.get_dtype()) not in _READ_BY_NUMPY:
        raise UserError(f"{key}: {path}: {tensor} holds {kind}, expected numbers of NumPy's", hint="save it as float32")
    shape = tuple(piece.get_shape())
    rows = shape[0] if shape else 0
    return Source(key=key, path=path, shape=shape, read=lambda start, stop: np.asarray(piece[start : min(stop, rows)]))


def normalised(source: Source, start: int, rows: NDArray[Any], *, integers: bool) -> NDArray[Any]:
    """Rows in their stored form: float32, 64-bit integers, or (without ``integers``) unchanged bytes.

    Raises:
        UserError: a value is not finite or too large, or the type is not numeric. ``start`` numbers the first row.
    """
    kind = rows.dtype.kind
    if kind == "u" and rows.dtype.itemsize == 1 and not integers:
        return rows
    if kind in "iub":
        if rows.dtype == np.uint64 and rows.size and rows.max() > np.iinfo(np.int64).max:
            row = start + int(np.argmax((rows > np.iinfo(np.int64).max).reshape(len(rows), -1).any(axis=1)))
            hint = "save smaller integers, or float32"
            raise UserError(f"{source.key}: {source.path}: row {row} holds an integer beyond 2**63 - 1", hint=hint)
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


def write_split(
    path: Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str], pieces: Iterable[dict[str, NDArray[Any]]]
) -> None:
    """Write ``inputs`` and ``targets`` into a safetensors file piece by piece, so that they need not fit in memory.

    The pieces must fill the shapes exactly.
    """
    # The widest type comes first, so that every tensor is aligned.
    order = sorted(shapes, key=lambda name: (-np.dtype(dtypes[name]).itemsize, name))
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for name in order:
        size = int(np.prod(shapes[name], dtype=np.int64)) * np.dtype(dtypes[name]).itemsize
        entry = {"dtype": _NAMES[dtypes[name]], "shape": list(shapes[name])}
        header[name] = {**entry, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with atomic(path) as temporary:
        with temporary.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.flush()
            os.posix_fallocate(stream.fileno(), 0, start + offset)  # else a full disk would be a SIGBUS
        regions = {}
        for name in order:
            kind, begin = np.dtype(dtypes[name]).newbyteorder("<"), start + header[name]["data_offsets"][0]
            regions[name] = np.memmap(temporary, kind, mode="r+", offset=begin, shape=shapes[name])
        row = 0
        for piece in pieces:
            count = len(piece[order[0]])
            for name, values in piece.items():
                regions[name][row : row + count] = values
            row += count
        assert row == shapes[order[0]][0]
        for region in regions.values():
            region.flush()


class UserData:
    """A user's inputs and targets, with the rows for training and for testing.

    Integer targets are classes, others are values to predict. Rows keep their order.

    Raises:
        UserError: the files are not as ``data.kwargs`` needs them.
    """

    def __init__(self, data: FileData) -> None:
        self._data, kwargs = data, data.kwargs
        self.inputs = open_source("data.kwargs.inputs", kwargs.inputs)
        self.targets = open_source("data.kwargs.targets", kwargs.targets)
        rows = self.inputs.shape[0] if self.inputs.shape else 0
        if not rows or len(self.inputs.shape) < 2:
            hint = "the first axis counts samples"
            raise UserError(f"data.kwargs.inputs: shape is {self.inputs.shape}, expected (samples, ...)", hint=hint)
        if self.targets.shape[:1] != (rows,):
            got = self.targets.shape[0] if self.targets.shape else 0
            raise UserError(f"data.kwargs.targets: {got} rows for {rows} of inputs", hint="give one target per sample")
        for source in (self.inputs, self.targets):
            if 0 in source.shape:
                hint = "each sample has to have a value"
                raise UserError(f"{source.key}: shape is {source.shape}, which holds no values", hint=hint)
        self._chosen = self._choose(rows)
        first_input, first_target = self.inputs.read(0, 1), self.targets.read(0, 1)
        self.input_dtype = normalised(self.inputs, 0, first_input[:0], integers=False).dtype.name
        self.classification = normalised(self.targets, 0, first_target[:0], integers=True).dtype.name == "int64"
        if not self.classification and kwargs.classes is not None:
            hint = "store classes as integers"
            raise UserError("data.kwargs.classes: given, and the targets are not integers", hint=hint)
        target_shape = self.targets.shape[1:]
        self.target_shape = target_shape if self.classification or target_shape else (1,)
        self.num_classes: int | None = None

    def _choose(self, rows: int) -> NDArray[np.int8]:
        """For each row: 0 for training, 1 for testing, -1 for neither."""
        data, kwargs = self._data, self._data.kwargs
        wanted = {_TRAIN: data.num_samples, _TEST: data.test_samples}
        if kwargs.split is None:
            marks = np.full(rows, -1, np.int8)
            marks[: wanted[_TRAIN]] = _TRAIN
            marks[wanted[_TRAIN] : wanted[_TRAIN] + wanted[_TEST]] = _TEST
        else:
            source = open_source("data.kwargs.split", kwargs.split)
            values = source.read(0, rows) if source.shape == (rows,) else np.zeros(0)
            if values.shape != (rows,) or values.dtype.kind not in "iub" or not np.isin(values, (0, 1)).all():
                hint = "0 marks a row for training, 1 one for testing"
                raise UserError(f"data.kwargs.split: expected {rows} zeros and ones", hint=hint)
            marks = values.astype(np.int8)
            for mark, count in wanted.items():
                marks[np.flatnonzero(marks == mark)[count:]] = -1
        for mark, key in ((_TRAIN, "data.num_samples"), (_TEST, "data.test_samples")):
            count = int((marks == mark).sum())
            if count < wanted[mark]:
                raise UserError(f"{key}: got {wanted[mark]}, the files have {count} such rows", hint="lower it")
        return marks

    def write(self, folder: Path) -> None:
        """Write ``train.safetensors`` and ``test.safetensors``, and count the classes.

        Raises:
            UserError: a value is not finite, or a target is no class.
        """
        for name, mark, count in (("train", _TRAIN, self._data.num_samples), ("test", _TEST, self._data.test_samples)):
            shapes = {"inputs": (count, *self.inputs.shape[1:]), "targets": (count, *self.target_shape)}
            dtypes = {"inputs": self.input_dtype, "targets": "int64" if self.classification else "float32"}
            write_split(folder / f"{name}.safetensors", shapes, dtypes, self._rows(mark))

    def _rows(self, mark: int) -> Iterator[dict[str, NDArray[Any]]]:
        for start in range(0, self.inputs.shape[0], ROWS):
            chosen = self._chosen[start : start + ROWS] == mark
            if not chosen.any():
                continue
            inputs = normalised(self.inputs, start, self.inputs.read(start, start + ROWS), integers=False)
            targets = normalised(self.targets, start, self.targets.read(start, start + ROWS), integers=True)
            if self.classification:
                self._check_classes(start, targets)
            yield {"inputs": inputs[chosen], "targets": targets.reshape(-1, *self.target_shape)[chosen]}

    def _check_classes(self, start: int, targets: NDArray[Any]) -> None:
        limit = self._data.kwargs.classes
        rows = targets.reshape(len(targets), -1)
        wrong = (rows < 0).any(axis=1) | (rows >= (limit if limit is not None else 2**31)).any(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            upto = f"to {limit - 1}" if limit is not None else "on"
            got = f"{self.targets.path}: row {start + row} is {rows[row].tolist()}"
            raise UserError(f"data.kwargs.targets: {got}, expected classes from 0 {upto}", hint="count classes from 0")
        self.num_classes = limit or max(self.num_classes or 0, int(rows.max()) + 1)


def sources(data: FileData) -> dict[str, Source]:
    """The arrays that a ``file`` task reads, by their keys in ``data.kwargs``."""
    references = data.kwargs.model_dump(include={"inputs", "targets", "split"}, exclude_none=True)
    return {key: open_source(f"data.kwargs.{key}", reference) for key, reference in references.items()}
