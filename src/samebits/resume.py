"""Checkpoints of a training that has not ended, so that the same stage goes on where it was stopped.

They are kept outside DVC's outs, in ``.samebits/resume/<identity>/<step>``, and deleted when the training is complete.
A checkpoint is a directory that was renamed into place as a whole: a file of tensors, a record in JSON, and, written
last, a manifest with their SHA-256. All ranks of a training read the same directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from samebits.files import fsync, sha256, sha256_tree

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.data.card import Card
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.placement import Placement

FOLDER = Path(".samebits/resume")
KEPT = 2  # the newest, and the one before in case that is damaged
_FORMAT = 1
_TENSORS, _RECORD, _MANIFEST = "state.safetensors", "state.json", "manifest.json"
_CODE = ("data", "models", "numerics", "params", "strategies.py", "trainer.py", "resume.py")
_RESULT_OF = {"global_batch_size", "epochs", "optimizer", "schedule", "clip_grad_norm"}
_FAST_RESULT_OF = _RESULT_OF | {"grad_accum_steps", "precision", "compile", "ddp"}


def identity(
    params: Params, numerics: NumericsName, placement: Placement, card: Card, host: str, versions: dict[str, str]
) -> str:
    """A digest of everything that the result of a training is a function of.

    Under ``exact`` that is neither strategy nor devices nor host; under ``fast`` it is all of them.
    """
    own = Path(__file__).parent
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "code": {name: sha256_tree(own / name) for name in _CODE},
        "versions": versions,
        "source": sha256_tree(Path(params.model.source)) if params.model.source else None,
        "seed": params.seed,
        "data": card.sha256,
        "model": params.model.model_dump(mode="json"),
        "numerics": numerics,
    }
    if numerics == "exact":
        facts |= {"train": params.train.model_dump(mode="json", include=_RESULT_OF), "shards": params.exact.shards}
    else:
        facts |= {"train": params.train.model_dump(mode="json", include=_FAST_RESULT_OF), "host": host}
        facts |= {"placement": placement.as_dict()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class Checkpoints:
    """The checkpoints of one identity; ``rank`` 0 alone writes.

    Two trainings of one identity at a time do not share them: the second has none.
    """

    def __init__(self, name: str, rank: int, folder: Path = FOLDER) -> None:
        self._folder = folder / name
        self._writes = rank == 0
        self._lock = -1
        if self._writes:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._writes = False

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, for rank 0; None if there is none."""
        if not self._writes:
            return None
        for path in sorted(self._whole(), reverse=True):
            if _is_whole(path):
                return int(path.name)
        return None

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and record of a checkpoint."""
        path = self._path(step)
        return load_file(path / _TENSORS), json.loads((path / _RECORD).read_text(encoding="utf-8"))

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Write a checkpoint of the state after ``step`` steps, and delete all but the newest two.

        Raises:
            OSError: it cannot be written; the ones before are still there.
        """
        if not self._writes:
            return
        path = self._path(step)
        temporary = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            copied = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
            save_file(copied, temporary / _TENSORS)
            (temporary / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            manifest = {}
            for name in (_TENSORS, _RECORD):
                fsync(temporary / name)
                manifest[name] = sha256(temporary / name)
            (temporary / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            fsync(temporary / _MANIFEST)
            fsync(temporary)
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
            fsync(self._folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in sorted(self._whole())[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def delete(self) -> None:
        """Delete all of them, and let another training of this identity have some."""
        if self._writes:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:012d}"

    def _whole(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.name.isdecimal()]


def _is_whole(path: Path) -> bool:
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(sha256(path / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False
