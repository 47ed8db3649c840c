"""The ``file`` task: a user's own arrays, checked and split, in the form that trainings read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from samebits.data.arrays import Source, SplitWriter, normalised, open_source
from samebits.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from samebits.params.data import FileData

ROWS = 4096  # read at a time
_TRAIN, _TEST = 0, 1


class UserData:
    """Inputs, targets and which rows are for training and for testing.

    Integer targets are classes, others are values to predict. The order of rows is kept.

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
            values = source.read(0, rows)
            if values.shape != (rows,) or values.dtype.kind not in "iub" or not np.isin(values, (0, 1)).all():
                hint = "0 marks a row for training, 1 one for testing"
                raise UserError(f"data.kwargs.split: expected {rows} zeros and ones", hint=hint)
            marks = values.astype(np.int8)
            for mark, count in wanted.items():
                marks[np.flatnonzero(marks == mark)[count:]] = -1
        for mark, key in ((_TRAIN, "data.num_samples"), (_TEST, "data.test_samples")):
            found = int((marks == mark).sum())
            if found < wanted[mark]:
                raise UserError(f"{key}: got {wanted[mark]}, the files have {found} such rows", hint="lower it")
        return marks

    def write(self, folder: Path) -> None:
        """Write both splits and learn the number of classes."""
        for name, mark, count in (
            ("train", _TRAIN, self._data.num_samples),
            ("test", _TEST, self._data.test_samples),
        ):
            shapes = {"inputs": (count, *self.inputs.shape[1:]), "targets": (count, *self.target_shape)}
            dtypes = {"inputs": self.input_dtype, "targets": "int64" if self.classification else "float32"}
            SplitWriter(folder / f"{name}.safetensors", shapes, dtypes).write(self._rows(mark))

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
    """The files that a ``file`` task reads, by their keys."""
    references = {"inputs": data.kwargs.inputs, "targets": data.kwargs.targets, "split": data.kwargs.split}
    return {
        key: open_source(f"data.kwargs.{key}", reference)
        for key, reference in references.items()
        if reference is not None
    }
