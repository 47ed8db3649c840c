"""``dvc.lock``: DVC's record of every stage that it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field
from ruamel.yaml import YAML

from samebits.errors import UserError, reason
from samebits.files import Part, regular

LOCK = Path("dvc.lock")


class _LockedPart(Part):
    """The part of ``dvc.lock`` that is read here. DVC writes more keys."""

    model_config = ConfigDict(extra="ignore")


class LockedFile(_LockedPart):
    """A file or folder that a stage read or wrote."""

    path: str
    md5: str | None = None


class LockedStage(_LockedPart):
    """One run of a stage."""

    cmd: str | list[str]
    deps: tuple[LockedFile, ...] = ()
    outs: tuple[LockedFile, ...] = ()


class Lock(_LockedPart):
    """The whole file. DVC refuses a file without a schema, which it leaves if it is killed while it writes."""

    version: Literal["2.0"] = Field(alias="schema")
    stages: dict[str, LockedStage] = Field(default_factory=dict)

    def files(self, stage: str, made: Path = LOCK) -> dict[str, str]:
        """MD5 of each file that a stage read or wrote. Raises UserError: the lock, file ``made``, has no such stage."""
        entry = self.stages.get(stage)
        if entry is None:
            hint = f"add exact to train.numerics, run `dvc repro`, and commit {made}"
            raise UserError(f"{made}: no stage {stage}", hint=hint)
        return {file.path: file.md5 for file in (*entry.deps, *entry.outs) if file.md5 is not None}


def read_lock(folder: Path = Path()) -> Lock:
    """Read the lock beside the params in ``folder``. Raises UserError: the file is missing or damaged."""
    file = folder / LOCK
    mend = f"git checkout {file}, or remove it where git has none; `dvc repro` then goes on"
    try:
        # Python's parser, as for params.yaml: the one in C dies of deep nesting.
        raw = YAML(typ="safe", pure=True).load(regular(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"get it from who made the results; or make one by `dvc repro {folder / 'dvc.yaml'}`, and commit it"
        raise UserError(f"{file}: no such file", hint=hint) from None
    except Exception as error:  # noqa: BLE001 - ruamel's constructors raise what they come across, such as KeyError
        raise UserError(f"{file}: cannot be read: {reason(error)}", hint=mend) from None
    try:
        return Lock.parse(raw, file, made_by="dvc repro")
    except UserError as error:
        raise UserError(error.message, hint=mend) from None
