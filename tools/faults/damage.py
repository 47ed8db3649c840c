"""Files that a stage reads, with every byte flipped in turn and cut to every length."""

from __future__ import annotations

import copy
import io
import operator
import shutil
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from faults.area import Area, Case
from faults.disk import POWER_LOSS, arm, read_trace
from faults.mlflow_store import events_of
from faults.subject import PARAMS, Sandbox, check_end, expect
from faults.writes import SINGLE, without_sender
from samebits.errors import UserError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

BATCH = 500  # harms that one process tries
SAMPLES = 40  # harms of each file that a whole stage meets
_TRAIN = ("--strategy", "single", "--numerics", "exact")
_STEPS_KEPT = [8, 4]  # steps of the checkpoints that the interrupted training leaves


def tiny_params() -> dict[str, Any]:
    """Parameters of a training of 16 steps with files as short as possible."""
    params = copy.deepcopy(PARAMS)
    params["data"] |= {"num_samples": 64, "test_samples": 16, "kwargs": {"features": 8}}
    params["model"]["kwargs"]["hidden"] = [8]
    params["train"] |= {"global_batch_size": 16, "epochs": 4}
    return params


@dataclass(frozen=True)
class Subject:
    """A file to damage: ``path`` in ``folder``.

    ``reader`` takes a folder and returns a function that reads the file as the kit does. The undamaged file reads as
    ``value``. What a damaged file reads as has to pass ``harmless``, which compares it with ``value``.
    """

    name: str
    folder: Path
    path: str
    reader: Callable[[Path], Callable[[], Any]]
    value: Any
    harmless: Callable[[Any, Any], bool] = operator.eq

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return (self.folder / self.path).stat().st_size


@dataclass(frozen=True)
class Harm:
    """One flipped bit of one byte, or with ``bit`` None a file cut off at that byte."""

    byte: int
    bit: int | None

    def of(self, content: bytes) -> bytes:
        """The contents with this harm."""
        if self.bit is None:
            return content[: self.byte]
        return content[: self.byte] + bytes([content[self.byte] ^ 1 << self.bit]) + content[self.byte + 1 :]

    def __str__(self) -> str:
        """For a message."""
        return f"cut to {self.byte} bytes" if self.bit is None else f"bit {self.bit} of byte {self.byte}"


class Damage(Area):
    """Every harm of each file, read in batches, and a sample of them given to the stage that reads the file."""

    NAME = "damage"
    UNIT = "damaged files"
    IN_AN_HOUR = 2000
    total: int

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self._params = tiny_params()
        self._whole = self._train()
        self._stopped = self._interrupt()
        self._subjects = self._make_subjects()
        # Files that hold times vary in length. They come last, so that earlier numbers stay the same.
        self._batches = [(subject, start) for subject in self._subjects for start in range(0, 2 * subject.size, BATCH)]
        self._samples = [subject for subject in self._subjects if subject.name != "log" for _ in range(SAMPLES)]
        self.total = sum(2 * subject.size for subject in self._subjects) + len(self._samples)

    def order(self) -> Iterator[int]:
        """Numbers of cases. ``total`` counts harms, of which a case has many."""
        numbers = list(range(len(self._batches) + len(self._samples)))
        self.random(-1).shuffle(numbers)
        yield from numbers

    def case(self, number: int) -> Case:
        """A batch of harms to one file, or one harm that a stage meets."""
        choices = self.random(number)
        if number < len(self._samples):
            subject = self._samples[number]
            harm = _harm(int(choices.random() * 2 * subject.size), subject.size, choices)
            what = f"train.py with a damaged {subject.name} file: {harm}"
            return Case(what, partial(self._through_stage, number, subject, harm))
        subject, start = self._batches[number - len(self._samples)]
        stop = min(start + BATCH, 2 * subject.size)
        harms = [_harm(index, subject.size, choices) for index in range(start, stop)]
        what = f"{subject.name} file: {harms[0]} to {harms[-1]}"
        return Case(what, partial(self._read_batch, number, subject, harms), faults=len(harms))

    # -- the undamaged files -------------------------------------------------------------------------------------

    def _train(self) -> Sandbox:
        sandbox = Sandbox(self.folder / "whole", self._params)
        check_end(sandbox("prepare"), {0})
        check_end(sandbox("train", *_TRAIN, armed=partial(_armed, sandbox)), {0})
        return sandbox

    def _interrupt(self) -> Sandbox:
        """A training that was killed once its second checkpoint was on the disk."""
        operations = read_trace(self._whole.folder.parent / "trace")
        renamed = [one for one in operations if one.kind == "rename" and one.path.name == "unfinished"][1]
        synced = next(one for one in operations if one.kind == "fsync" and one.number > renamed.number)
        sandbox = Sandbox(self.folder / "stopped", self._params)
        shutil.copytree(self._whole.folder / "data", sandbox.folder / "data")
        sandbox("train", *_TRAIN, armed=partial(_armed, sandbox, synced.number + 1)).kill_tree()
        shutil.rmtree(sandbox.folder / ".samebits" / "runs")
        return sandbox

    def _make_subjects(self) -> list[Subject]:
        data, resume = self._whole.folder / "data", self._stopped.folder / ".samebits" / "resume"
        runs = self._whole.folder / ".samebits" / "runs"
        (checkpoints,), (log,) = resume.iterdir(), runs.glob("*.jsonl")
        files = sorted((path.name for path in checkpoints.glob("*.safetensors")), reverse=True)
        steps = [int(name.partition("-")[0]) for name in files]
        expect(steps == _STEPS_KEPT, "an interrupted training leaves other checkpoints", steps)
        return [
            Subject("data", data, "train.safetensors", partial(_tensors, "train"), _tensors("train", data)()),
            Subject("test data", data, "test.safetensors", partial(_tensors, "test"), _tensors("test", data)()),
            Subject("card", data, "card.json", _card, _card(data)()),
            Subject("checkpoint", checkpoints, files[0], _steps, _STEPS_KEPT[1:]),
            Subject("log", runs, log.name, _events, _events(runs)(), _is_beginning),
        ]

    # -- cases -----------------------------------------------------------------------------------------------------

    def _read_batch(self, number: int, subject: Subject, harms: list[Harm]) -> None:
        sandbox = Sandbox(self.folder / str(number), self._params)
        there = sandbox.folder / "there"
        shutil.copytree(subject.folder, there)

        def work() -> None:
            path, read = there / subject.path, subject.reader(there)
            content = path.read_bytes()
            for harm in harms:
                path.write_bytes(harm.of(content))
                if wrong := _wrong(subject, read, path):
                    click.echo(f"{harm}: {wrong}")

        child = sandbox(work)  # in a process of its own: reading may crash it, or hang
        expect(child.code == 0, "reading ended the process", child.printed()[-2000:])
        told = child.printed().splitlines()
        expect(not told, f"{len(told)} of {len(harms)} did not hold", "\n    ".join(told[:5]))
        shutil.rmtree(sandbox.folder.parent)

    def _through_stage(self, number: int, subject: Subject, harm: Harm) -> None:
        sandbox = Sandbox(self.folder / str(number), self._params)
        shutil.copytree(self._stopped.folder, sandbox.folder, dirs_exist_ok=True)
        origin = self._stopped if subject.name == "checkpoint" else self._whole
        path = sandbox.folder / subject.folder.relative_to(origin.folder) / subject.path
        path.write_bytes(harm.of(path.read_bytes()))
        child = sandbox("train", *_TRAIN, armed=without_sender)
        check_end(child, {0} if subject.name == "checkpoint" else {0, 2})
        if child.code == 2:
            errors = child.errors()
            expect(len(errors) == 1 and subject.path in errors[0], "not one error that names the file", child.err())
        else:
            after = f"continued after step {_STEPS_KEPT[subject.name == 'checkpoint']};"
            expect(after in child.printed(), f"not {after}", child.printed())
            for name in ("model.safetensors", "losses.csv"):
                run, whole = ((box.folder / SINGLE.out / name).read_bytes() for box in (sandbox, self._whole))
                expect(run == whole, "wrong bits", name)
        left = [path for path in sandbox.leftovers() if not path.endswith(".refused")]
        expect(not left, "left over", left)
        shutil.rmtree(sandbox.folder.parent)


def _armed(sandbox: Sandbox, number: int = -1) -> None:
    without_sender()
    arm(sandbox.folder, sandbox.folder.parent / "trace", number, POWER_LOSS)


def _harm(index: int, size: int, choices: random.Random) -> Harm:
    """The harm with this number, first those of bytes, then those of lengths."""
    return Harm(index, choices.randrange(8)) if index < size else Harm(index - size, None)


def _wrong(subject: Subject, read: Callable[[], Any], path: Path) -> str | None:
    """What is wrong with how a damaged file reads. None if nothing is."""
    try:
        value = read()
    except UserError as error:
        return None if str(path) in str(error) else f"an error that does not name the file: {error}"
    except Exception as error:  # noqa: BLE001 - each would be a traceback for the user
        return f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    return None if subject.harmless(value, subject.value) else f"it was read as {str(value)[:200]}"


def _steps(folder: Path) -> Callable[[], list[int]]:
    """Reader of the steps that a training can resume from. It checks that each damaged checkpoint is named."""
    from samebits.training.checkpoints import Checkpoints

    checkpoints = Checkpoints(folder.name, 0, folder.parent)

    def read() -> list[int]:
        with redirect_stderr(io.StringIO()) as said:
            steps = checkpoints.steps()
        lines = said.getvalue().splitlines()
        named = [line for line in lines if line.startswith(str(folder)) and "it is set aside: " in line]
        expect(len(lines) == len(named) == len(_STEPS_KEPT) - len(steps), "not each damaged checkpoint is named", lines)
        return steps

    return read


def _card(folder: Path) -> Callable[[], Any]:
    from samebits.records.card import read_card

    return lambda: read_card(folder / "card.json")


def _tensors(split: Literal["train", "test"], folder: Path) -> Callable[[], list[Any]]:
    from samebits.training.batches import load_data

    card = _card(folder)()
    return lambda: [tensor.tolist() for tensor in load_data(folder, card, split)]


def _events(folder: Path) -> Callable[[], list[Any]]:
    """Reader of a log's events, up to the last line feed as the sender reads them."""
    (log,) = folder.glob("*.jsonl")
    return lambda: list(events_of(log))


def _is_beginning(value: list[Any], undamaged: list[Any]) -> bool:
    """Whether a log only ends early, as that of a killed writer does."""
    return value == undamaged[: len(value)]
