"""Draw a data set and write it: ``train.safetensors``, ``test.safetensors`` and ``card.json``."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from samebits.data.card import Card, Split
from samebits.data.teachers import (
    CHUNK,
    ImagesTeacher,
    RegressionTeacher,
    Samples,
    Teacher,
    TokensTeacher,
    VectorsTeacher,
)
from samebits.files import atomic, sha256, write_json
from samebits.numerics.random import Stream
from samebits.params import schema

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.params import Params


def make_teacher(params: Params) -> Teacher:
    """The teacher of the task that ``params.data`` names."""
    data, seed = params.data, params.seed
    match data:
        case schema.VectorsData():
            return VectorsTeacher(seed, data.kwargs)
        case schema.RegressionData():
            return RegressionTeacher(seed, data.kwargs)
        case schema.ImagesData():
            return ImagesTeacher(seed, data.kwargs)
        case schema.TokensData():
            return TokensTeacher(seed, data.kwargs)


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

    Every byte is a function of ``params.seed`` and ``params.data``; means are taken with ``math.fsum``,
    which rounds once whatever the order.
    """
    data, teacher = params.data, make_teacher(params)
    splits = {}
    for name, count in (("train", data.num_samples), ("test", data.test_samples)):
        samples = _draw_split(teacher, Stream(params.seed, data.task, name), count)
        path = folder / f"{name}.safetensors"
        with atomic(path) as temporary:
            save_file({"inputs": samples.inputs, "targets": samples.targets}, temporary)
        splits[name] = Split(
            file=path.name,
            num_samples=count,
            sha256=sha256(path),
            floor=math.fsum(samples.floor) / count,
            teacher_loss=math.fsum(samples.teacher_loss) / count,
        )
    card = Card.model_validate(
        {
            "task": data.task,
            "loss": teacher.loss,
            "input_shape": samples.inputs.shape[1:],
            "input_dtype": samples.inputs.dtype.name,
            "input_scale": teacher.input_scale,
            "input_offset": teacher.input_offset,
            "target_shape": samples.targets.shape[1:],
            "target_dtype": samples.targets.dtype.name,
            "num_classes": teacher.num_classes,
            "floor": splits["test"].floor,
            "sha256": hashlib.sha256(f"{splits['train'].sha256}{splits['test'].sha256}".encode()).hexdigest(),
            "train": splits["train"],
            "test": splits["test"],
        }
    )
    write_json(folder / "card.json", card.model_dump(mode="json"))
    return card
