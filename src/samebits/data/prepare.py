"""Write a dataset, drawn or the user's own: ``train.safetensors``, ``test.safetensors`` and ``card.json``."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from samebits.data.user import UserData, sources
from samebits.errors import HostError
from samebits.files import atomic, make_folder, write_json
from samebits.hashes import sha256
from samebits.portable.random import Stream
from samebits.records.card import DataSplit, signed_card
from samebits.tasks import TASKS, DatasetData, FileData
from samebits.tasks.teacher import CHUNK, Samples

if TYPE_CHECKING:
    from collections.abc import Iterable

    from samebits.params import Params
    from samebits.records.card import Card

_DVC_CACHE = Path(".dvc/cache")


def prepare(params: Params, folder: Path) -> Card:
    """Write the dataset that ``params`` describes to ``folder``, and return its card.

    ``params.seed`` and ``params.data`` determine every byte, and for a user's own data so do the files.

    Raises:
        UserError: the user's own data are not as ``params.data`` describes them.
        HostError: the disk has no room for them.
    """
    if isinstance(params.data, DatasetData):
        card = _write_counts(params, folder)
    elif isinstance(params.data, FileData):
        card = _write_user_data(params, params.data, folder)
    else:
        card = _write_drawn_data(params, folder)
    write_json(folder / "card.json", card.model_dump(mode="json"))
    return card


def _split(path: Path, count: int, *, floor: float | None = None, teacher_loss: float | None = None) -> DataSplit:
    return DataSplit(file=path.name, num_samples=count, sha256=sha256(path), floor=floor, teacher_loss=teacher_loss)


def _check_room(needed: int, folder: Path) -> None:
    make_folder(folder)
    free = shutil.disk_usage(folder).free
    if needed > free:
        text = f"{folder}: the data set would take {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free"
        raise HostError(text, hint="lower data.num_samples, or free some disk space")


def _write_drawn_data(params: Params, folder: Path) -> Card:
    """Write drawn data. ``math.fsum`` takes the means, because it rounds once in any order."""
    data, teacher = params.data, TASKS[params.data.task].teacher(params.seed, params.data.kwargs)
    one = teacher.draw(Stream(params.seed, data.task, "size"), 1)
    _check_room((data.num_samples + data.test_samples) * (one.inputs.nbytes + one.targets.nbytes), folder)
    splits = {}
    for name, count in (("train", data.num_samples), ("test", data.test_samples)):
        stream, starts = Stream(params.seed, data.task, name), range(0, count, CHUNK)
        parts = [teacher.draw(stream, min(CHUNK, count - start)) for start in starts]
        samples = Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        path = folder / f"{name}.safetensors"
        with atomic(path) as temporary:
            save_file({"inputs": samples.inputs, "targets": samples.targets}, temporary)
        floor, teacher_loss = (math.fsum(values) / count for values in (samples.floor, samples.teacher_loss))
        splits[name] = _split(path, count, floor=floor, teacher_loss=teacher_loss)
    return signed_card(
        task=params.data.task,
        made_from=params.data_identity,
        loss=teacher.loss,
        input_shape=samples.inputs.shape[1:],
        input_dtype=samples.inputs.dtype.name,
        input_scale=teacher.input_scale,
        input_offset=teacher.input_offset,
        target_shape=samples.targets.shape[1:],
        target_dtype=samples.targets.dtype.name,
        num_classes=teacher.num_classes,
        floor=splits["test"].floor,
        **splits,
    )


def _write_counts(params: Params, folder: Path) -> Card:
    """Files without samples: a dataset is opened by each training, and may give other samples in each epoch."""
    make_folder(folder)
    counts, splits = {"train": params.data.num_samples, "test": params.data.test_samples}, {}
    for name, count in counts.items():
        with atomic(folder / f"{name}.safetensors") as temporary:
            save_file({}, temporary, {"samples": str(count)})
        splits[name] = _split(folder / f"{name}.safetensors", count)
    return signed_card(
        task=params.data.task,
        made_from=params.data_identity,
        loss="own",
        input_shape=(),
        input_dtype="unknown",
        input_scale=1.0,
        input_offset=0.0,
        target_shape=(),
        target_dtype="unknown",
        num_classes=None,
        floor=None,
        **splits,
    )


def _close(files: Iterable[Path], folder: Path) -> None:
    """Close folders with copies to those who may not read the user's files, since DVC makes each copy readable."""
    modes = [file.stat().st_mode for file in files]
    closed = sum(all_of for read, all_of in ((0o040, 0o070), (0o004, 0o007)) if not all(mode & read for mode in modes))
    make_folder(folder)
    for one in (folder, _DVC_CACHE):
        if one.parent.is_dir():
            one.mkdir(exist_ok=True)
            if closed:
                one.chmod(one.stat().st_mode & ~closed)


def _write_user_data(params: Params, data: FileData, folder: Path) -> Card:
    arrays = UserData(data)
    _close([source.path for source in sources(data).values()], folder)
    arrays.write(folder)
    counts = {"train": data.num_samples, "test": data.test_samples}
    splits = {name: _split(folder / f"{name}.safetensors", count) for name, count in counts.items()}
    return signed_card(
        task=params.data.task,
        made_from=params.data_identity,
        loss="cross_entropy" if arrays.classification else "mse",
        input_shape=arrays.inputs.shape[1:],
        input_dtype=arrays.input_dtype,
        input_scale=data.kwargs.input_scale,
        input_offset=data.kwargs.input_offset,
        target_shape=arrays.target_shape,
        target_dtype="int64" if arrays.classification else "float32",
        num_classes=arrays.num_classes,
        floor=None,
        **splits,
    )
