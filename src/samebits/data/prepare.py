"""Write a data set, drawn or the user's own: ``train.safetensors``, ``test.safetensors`` and ``card.json``."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from samebits.data.card import Card
from samebits.data.teachers import (
    CHUNK,
    ImagesTeacher,
    RegressionTeacher,
    Samples,
    Teacher,
    TokensTeacher,
    VectorsTeacher,
)
from samebits.data.user import UserData
from samebits.files import atomic, sha256, write_json
from samebits.numerics.random import Stream
from samebits.params import data as data_sections

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.params import Params


def make_teacher(params: Params) -> Teacher:
    """The teacher of the task that ``params.data`` names."""
    data, seed = params.data, params.seed
    match data:
        case data_sections.VectorsData():
            return VectorsTeacher(seed, data.kwargs)
        case data_sections.RegressionData():
            return RegressionTeacher(seed, data.kwargs)
        case data_sections.ImagesData():
            return ImagesTeacher(seed, data.kwargs)
        case data_sections.TokensData():
            return TokensTeacher(seed, data.kwargs)
        case data_sections.FileData():
            raise AssertionError("a user's own data has no teacher")


def _draw_split(teacher: Teacher, stream: Stream, count: int) -> Samples:
    parts = [teacher.draw(stream, min(CHUNK, count - start)) for start in range(0, count, CHUNK)]
    return Samples(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.floor for part in parts]),
        np.concatenate([part.teacher_loss for part in parts]),
    )


def prepare(params: Params, folder: Path) -> Card:
    """Write the data set that ``params`` describes to ``folder`` and return its card.

    Every byte is a function of ``params.seed`` and ``params.data``, and for a user's own data of its files.

    Raises:
        UserError: the user's own data is not what ``params.data`` says.
    """
    match params.data:
        case data_sections.FileData() as data:
            fields = _write_user_data(data, folder)
        case _:
            fields = _write_drawn_data(params, folder)
    hashes = [fields[split]["sha256"] for split in ("train", "test")]
    card = Card.model_validate(
        {"task": params.data.task, "sha256": hashlib.sha256("".join(hashes).encode()).hexdigest(), **fields}
    )
    write_json(folder / "card.json", card.model_dump(mode="json"))
    return card


def _split(path: Path, count: int, floor: float | None, teacher_loss: float | None) -> dict[str, Any]:
    losses = {"floor": floor, "teacher_loss": teacher_loss}
    return {"file": path.name, "num_samples": count, "sha256": sha256(path), **losses}


def _write_drawn_data(params: Params, folder: Path) -> dict[str, Any]:
    """Means are taken with ``math.fsum``, which rounds once whatever the order."""
    data, teacher = params.data, make_teacher(params)
    splits = {}
    for name, count in (("train", data.num_samples), ("test", data.test_samples)):
        samples = _draw_split(teacher, Stream(params.seed, data.task, name), count)
        path = folder / f"{name}.safetensors"
        with atomic(path) as temporary:
            save_file({"inputs": samples.inputs, "targets": samples.targets}, temporary)
        means = [math.fsum(values) / count for values in (samples.floor, samples.teacher_loss)]
        splits[name] = _split(path, count, *means)
    return {
        "loss": teacher.loss,
        "input_shape": samples.inputs.shape[1:],
        "input_dtype": samples.inputs.dtype.name,
        "input_scale": teacher.input_scale,
        "input_offset": teacher.input_offset,
        "target_shape": samples.targets.shape[1:],
        "target_dtype": samples.targets.dtype.name,
        "num_classes": teacher.num_classes,
        "floor": splits["test"]["floor"],
        **splits,
    }


def _write_user_data(data: data_sections.FileData, folder: Path) -> dict[str, Any]:
    own = UserData(data)
    own.write(folder)
    counts = {"train": data.num_samples, "test": data.test_samples}
    splits = {name: _split(folder / f"{name}.safetensors", count, None, None) for name, count in counts.items()}
    return {
        "loss": "cross_entropy" if own.classification else "mse",
        "input_shape": own.inputs.shape[1:],
        "input_dtype": own.input_dtype,
        "input_scale": data.kwargs.input_scale,
        "input_offset": data.kwargs.input_offset,
        "target_shape": own.target_shape,
        "target_dtype": "int64" if own.classification else "float32",
        "num_classes": own.num_classes,
        "floor": None,
        **splits,
    }
