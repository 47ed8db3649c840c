"""What a training leaves that ``exact`` refused: a reason in the place of weights, losses and times."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from safetensors.numpy import save

from samebits.errors import UserError
from samebits.files import Record, atomic, read_json, write_json, write_text
from samebits.params import Params
from samebits.params.schema import NumericsName
from samebits.records.run import LOSSES, RECORD, TIMING, WEIGHTS, Timing, run_name
from samebits.strategies import StrategyName

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.errors import RefusedError


class Refusal(Record):
    """``run.json`` of a training that ``exact`` refused: what of the model, in words and in few words, and the hint."""

    refused: str
    what: str
    hint: str
    strategy: StrategyName
    numerics: NumericsName
    params: Params

    @property
    def name(self) -> str:
        """As in ``runs/NAME``."""
        return run_name(self.strategy, self.numerics)


def read_refusal(folder: Path) -> Refusal | None:
    """Why a folder holds no training, if it was refused; None where it was not, or where nobody can tell."""
    with suppress(UserError):  # whoever reads a training says what is wrong
        raw = read_json(folder / RECORD, made_by="nothing")
        if isinstance(raw, dict) and "refused" in raw:
            return Refusal.read(folder / RECORD, made_by="python pipeline/train.py")
    return None


def refusal_of(error: RefusedError, params: Params, strategy: StrategyName, numerics: NumericsName) -> Refusal:
    """The record of what an error says."""
    text = error.message.removeprefix(f"{numerics}: ")
    return Refusal(refused=text, what=error.what, hint=error.hint, strategy=strategy, numerics=numerics, params=params)


def write_refusal(folder: Path, refusal: Refusal) -> None:
    """Write a run's files without a training in them: DVC wants all of them."""
    with atomic(folder / WEIGHTS) as unfinished:
        unfinished.write_bytes(save({}))
    write_text(folder / LOSSES, "step,loss\n")
    write_json(folder / TIMING, {"schema": Timing.SCHEMA, "refused": refusal.what})
    refusal.write(folder / RECORD)
