"""Checkpoints, and trainings that are stopped and go on."""

import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from conftest import small, wait_for
from patience import patient
from samebits.errors import Interrupted
from samebits.hashes import sha256
from samebits.params import parse_params
from samebits.strategies.placement import Placement
from samebits.training import checkpoints
from samebits.training.checkpoints import CheckpointRecord, Checkpoints, PeriodicCheckpointer
from samebits.training.loop import Tracker
from samples import card
from slowed import slow_model, slowed
from trainables import train_from_start

TENSORS = {"model.0": torch.arange(3.0), "random.0.0": torch.zeros(4, dtype=torch.uint8)}
NOTHING_ELSE = CheckpointRecord(state={}, seconds=0.0, resumed=(), place="here", elsewhere=False)


def steps_of(folder):
    return sorted(int(path.name[:12]) for path in folder.glob("*/*.safetensors"))


@pytest.fixture
def kept(tmp_path):
    return Checkpoints("a", 0, tmp_path)


def save(kept, *steps):
    for step in steps:
        kept.save(step, TENSORS, NOTHING_ELSE)


def test_a_checkpoint_comes_back_as_it_was(kept):
    assert kept.steps() == []
    saved = CheckpointRecord(state={"numerics": {}}, seconds=0.1, resumed=(3,), place="here", elsewhere=False)
    kept.save(7, TENSORS, saved)
    assert kept.steps() == [7]
    tensors, record = kept.load(7)
    assert record == saved
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


def test_the_identity_is_that_of_data_sources_and_folder_too():
    """Of two data sets of the same params, as a user's own files may be, each has checkpoints of its own."""
    made = partial(
        checkpoints.identity,
        parse_params(small()),
        placement=Placement(strategy="single", device_type="cpu", rows_per_device=64),
        host="here",
    )
    usual = {"card": card(), "source": None, "folder": Path("runs/a")}
    other = {"card": card().model_copy(update={"sha256": "0" * 64}), "source": "0" * 64, "folder": Path("tried")}
    for numerics in ("exact", "fast"):
        assert made(numerics, **usual) == made(numerics, **{**usual, "folder": Path.cwd() / "runs/a"})
        names = [made(numerics, **usual), *(made(numerics, **{**usual, name: other[name]}) for name in other)]
        assert len({*names}) == 4


def test_a_disk_that_is_full_and_read_only_too_is_told_to_be_full(kept, monkeypatch):
    def refuse(number):
        def fails(*_, **__):
            raise OSError(number, os.strerror(number))

        return fails

    monkeypatch.setattr(checkpoints, "fsync", refuse(errno.ENOSPC))
    monkeypatch.setattr(os, "unlink", refuse(errno.EROFS))
    with pytest.raises(OSError, match="No space left on device"):
        save(kept, 1)


def test_the_newest_two_are_kept_and_none_after_the_end(kept, tmp_path):
    save(kept, 1, 2, 3)
    assert steps_of(tmp_path) == [2, 3]
    kept.save(2, {**TENSORS, "other": torch.zeros(1)}, NOTHING_ELSE)  # of a training that could not go on from them
    assert steps_of(tmp_path) == [2]
    kept.delete()
    assert steps_of(tmp_path) == []


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-3]), True),
        (lambda file: file.write_bytes(file.read_bytes()[:-3] + b"xyz"), True),
        (lambda file: file.unlink() or file.mkdir(), True),
        (lambda file: file.unlink() or os.mkfifo(file), True),
        (lambda file: file.unlink(), False),
        (lambda file: file.rename(file.with_name("notes.safetensors")), False),
        (lambda file: file.rename(file.with_name("unfinished")), False),
    ],
    ids=["cut", "changed", "a folder", "a pipe", "gone", "somebody's", "unfinished"],
)
def test_of_a_damaged_checkpoint_the_one_before_is_used(spoil, told, kept, tmp_path, capsys):
    save(kept, 1, 2)
    (file,) = (tmp_path / "a").glob(f"{2:012d}-*")
    spoil(file)
    assert kept.steps() == [1]
    said = f"{file}: not a checkpoint of this training, it is set aside: its bytes are not those that its name"
    assert capsys.readouterr().err.startswith(said) == told
    assert len(list(tmp_path.glob("a/*.refused"))) == told
    save(kept, 2)
    assert kept.steps() == [2, 1]


def test_a_checkpoint_that_the_disk_does_not_give_is_passed_over(kept, monkeypatch):
    def broken(path):
        if path.name.startswith(f"{2:012d}"):
            raise OSError(5, "Input/output error")
        return sha256(path)

    save(kept, 1, 2)
    monkeypatch.setattr(checkpoints, "sha256", broken)
    assert kept.steps() == [1]


@pytest.mark.parametrize(
    ("place", "spoil", "why"),
    [
        ("a", lambda path: path.write_text("somebody's"), "File exists"),
        ("a/lock", Path.mkdir, "Is a directory"),
        ("a/lock", lambda path: path.symlink_to(path.with_name("elsewhere")), "Too many levels"),
        ("a/lock", os.mkfifo, None),  # which does not hang
    ],
)
def test_where_no_checkpoints_can_be_kept_there_are_none(place, spoil, why, tmp_path, capsys):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    spoil(tmp_path / place)
    kept = Checkpoints("a", 0, tmp_path)
    save(kept, 1)
    assert kept.steps() == ([] if why else [1])
    said = capsys.readouterr().err
    assert said.startswith("the training goes on without checkpoints: " if why else "")
    assert (why or "") in said
    assert not (tmp_path / "a/elsewhere").exists()


def crafted(folder, step, tensors, record):
    """A checkpoint whose name says the right hash, whatever it holds."""
    metadata = {} if record is None else {"record": record}
    save_file(tensors, folder / "crafted", metadata=metadata)
    (folder / "crafted").rename(folder / f"{step:012d}-{sha256(folder / 'crafted')}.safetensors")


def after(steps, times=None, **tensors):
    times = torch.zeros(times or steps)
    return {"losses": torch.zeros(steps), "step_seconds": times, "digests": torch.zeros(0), **tensors}


RECORD = '{"state": {}, "seconds": 1.0, "resumed": [], "place": "here", "elsewhere": false}'


@pytest.mark.parametrize(
    ("step", "tensors", "record", "why"),
    [
        (6, TENSORS, None, "'record'"),
        (6, TENSORS, "[1]", "its record: the file: Input should be an object"),
        (6, TENSORS, "{", "its record: the file: Invalid JSON: EOF while parsing"),
        (6, TENSORS, '"abc"', "its record: the file: Input should be an object"),
        (6, after(6), '{"state": {}}', "its record: seconds: Field required"),
        (6, after(6), RECORD, "'model.0'"),
        (6, after(5), RECORD, "5 losses, 5 times and digests of 6 steps, and it is named by step 6 of 8"),
        (6, after(6, times=7), RECORD, "6 losses, 7 times and digests of 6 steps, and it is named by step 6 of 8"),
        (9, after(9), RECORD, "9 losses, 9 times and digests of 9 steps, and it is named by step 9 of 8"),
        (6, after(6), RECORD.replace("1.0", "Infinity"), "its record: seconds: Input should be a finite number"),
        (6, after(6, step_seconds=torch.full((6,), -1.0)), RECORD, "a time of it is no number of seconds"),
        (
            6,
            after(6, digests=torch.zeros(5, 2)),
            RECORD,
            "6 losses, 6 times and digests of 5 steps, and",
        ),
        (6, after(6), RECORD.replace("[]", '["x"]'), "its record: resumed.0: Input should be a valid integer"),
        (6, after(6, **{"model.0": torch.zeros(1)}), RECORD, "model.0 is torch.float32 (1,), another model's"),
    ],
)
def test_a_whole_checkpoint_of_something_else_is_set_aside_and_the_one_before_taken(
    step, tensors, record, why, tmp_path, trainable, capsys
):
    resumable = trainable().trainable
    expected = train_from_start(resumable).losses

    def trained():
        checkpoints = Checkpoints("a", 0, tmp_path)
        checkpointer = PeriodicCheckpointer(checkpoints, 4, SimpleNamespace(armed=False, signum=0), place="here")
        assert train_from_start(resumable, checkpointer=checkpointer).losses == expected
        os.close(checkpoints._lock)

    trained()
    assert steps_of(tmp_path) == [4]
    crafted(tmp_path / "a", step, tensors, record)
    trained()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{step:012d}-" in said
    assert f"not a checkpoint of this training, it is set aside: {why}" in said
    assert len(list(tmp_path.glob("a/*.refused"))) == 1


@pytest.mark.parametrize(("asked_at", "kept"), [(5, 5), (8, 8)])
def test_who_asks_to_stop_at_any_step_finds_a_checkpoint_of_it(asked_at, kept, tmp_path, trainable):
    """Also at the last one, behind which the files are still to be written and the measurement to be made."""
    resumable = trainable().trainable

    def trained(place="here", *, asked=False):
        stop, tracker = SimpleNamespace(armed=False, signum=0), Tracker()
        tracker.step = lambda step: setattr(stop, "signum", signal.SIGTERM * (asked and step == asked_at))
        checkpointer = PeriodicCheckpointer(Checkpoints("a", 0, tmp_path), 0, stop, place=place)
        try:
            training = train_from_start(resumable, step_seconds=9, tracker=tracker, checkpointer=checkpointer)
        finally:
            os.close(checkpointer._checkpoints._lock)
        assert stop.armed
        checkpointer.training_done()
        assert not stop.armed, "a request ends the measurement at once"
        return training

    expected = trained().losses
    with pytest.raises(Interrupted):
        trained(asked=True)
    assert steps_of(tmp_path) == [kept]
    for place in ("here", "elsewhere"):
        training = trained(place)
        assert (training.losses, training.resumed, training.elsewhere) == (expected, [kept], place == "elsewhere")


def test_a_state_comes_back_in_the_memory_format_of_its_parameter(trainable):
    """Fused optimizers refuse another one."""
    made = trainable().trainable
    first = next(p for p in made.model.parameters() if p.dim() == 2)
    first.data = first.data.t().contiguous().t()
    made.step(0, 0.1)
    tensors, record = made.state_dict()
    contiguous = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    made.load_state_dict(contiguous, record)
    (momentum,) = (value for value in made.optimizer.state[first].values() if isinstance(value, torch.Tensor))
    assert momentum.stride() == first.stride() == (1, first.shape[0])


def test_what_a_crafted_checkpoint_says_moves_no_cursor(kept, tmp_path, capsys):
    header = json.dumps({"losses": {"dtype": "\x1b[31m", "shape": [], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "crafted").write_bytes(len(header).to_bytes(8, "little") + header)
    file = tmp_path / "a" / f"{2:012d}-{sha256(tmp_path / 'crafted')}.safetensors"
    (tmp_path / "crafted").rename(file)
    assert kept.steps() == [2]
    with pytest.raises(SafetensorError) as caught:
        kept.load(2)
    kept.set_aside(2, caught.value)
    said = capsys.readouterr().err
    assert "unknown variant `\\x1b[31m`" in said
    assert said.rstrip("\n").isprintable()


def test_of_two_trainings_at_a_time_the_second_has_no_checkpoints(kept, tmp_path):
    second = Checkpoints("a", 0, tmp_path)
    save(kept, 1)
    save(second, 2)
    assert second.steps() == []
    assert steps_of(tmp_path) == [1]
    kept.delete()
    assert Checkpoints("a", 0, tmp_path).steps() == []


LONG = {
    "data": {"task": "vectors", "test_samples": 64, "kwargs": {"features": 128}},
    "train": {"global_batch_size": 32, "epochs": 2, "repeats": 1, "num_devices": 2, "oversubscribe": True,
              "optimizer": {"name": "adamw", "lr": 0.001}, "checkpoint_every_steps": 5},
}  # fmt: skip


def command(strategy, numerics, out):
    return ["train", "--strategy", strategy, "--numerics", numerics, "--no-tracking", "--out-dir", out]


def prepare(stage, shards=8, num_samples=16384, **train):
    data, train = {**LONG["data"], "num_samples": num_samples}, {**LONG["train"], **train}
    stage.write_params({"data": data, "model": slow_model(stage.folder), "train": train, "exact": {"shards": shards}})
    stage.well("prepare")


def stop(stage, strategy, numerics, signum):
    """Start a training and end it once it has written checkpoints."""
    name, *arguments = command(strategy, numerics, "stopped")
    arguments = [sys.executable, stage.script(name), *arguments]
    with slowed(stage.folder):
        process = subprocess.Popen(arguments, cwd=stage.folder, stderr=subprocess.PIPE)
        wait_for(lambda: len(steps_of(stage.folder / ".samebits/resume")) == 2)
        process.send_signal(signum)
        process.communicate(timeout=patient(120))
    return process.returncode


def train(stage, strategy, numerics, out):
    """Train in a warm process; the bits of its result."""
    stage.well(*command(strategy, numerics, out))
    return {name: (stage.folder / out / name).read_bytes() for name in ("model.safetensors", "losses.csv")}


@pytest.fixture(scope="module")
def uninterrupted():
    """What a training that nobody stops gives, by what it depends on; trained when it is first asked for."""
    known = {}

    def get(stage, strategy, numerics):
        key = (numerics, strategy if numerics == "fast" else None)
        if key not in known:
            known[key] = train(stage, strategy, numerics, "whole")
        return known[key]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numerics", "first", "then", "signum"),
    [
        ("exact", "single", "ddp", signal.SIGTERM),
        ("exact", "ddp", "single", signal.SIGINT),
        ("exact", "ddp", "ddp", signal.SIGKILL),
        ("fast", "single", "single", signal.SIGTERM),
        ("fast", "ddp", "ddp", signal.SIGTERM),
        ("fast", "ddp", "ddp", signal.SIGKILL),
    ],
)
def test_a_training_that_was_stopped_ends_with_the_same_bits(numerics, first, then, signum, stage, uninterrupted):
    prepare(stage)
    code = stop(stage, first, numerics, signum)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[signum]
    kept = steps_of(stage.folder / ".samebits/resume")
    assert kept
    assert not (stage.folder / "stopped/run.json").exists()
    found = train(stage, then, numerics, "stopped")
    record = json.loads((stage.folder / "stopped/run.json").read_text())
    assert record["notes"] == [{"kind": "resumed", "steps": [kept[-1]], "elsewhere": first != then}]
    assert steps_of(stage.folder / ".samebits/resume") == []
    assert found == uninterrupted(stage, then, numerics)


SLOW_DISK = """
import time
from samebits.training import checkpoints
from samebits.workers import worker
from torch import nn

def slowed(function):
    def slow(*arguments):
        time.sleep(20)
        return function(*arguments)
    return slow

checkpoints.Checkpoints.save = slowed(checkpoints.Checkpoints.save)
worker.save_weights = slowed(worker.save_weights)

def make():
    return nn.Linear(128, 10)
"""


@pytest.mark.slow
def test_a_disk_may_take_longer_than_a_collective(stage):
    model = stage.write_model(SLOW_DISK)
    stage.write_params(small(model=model, num_devices=2, oversubscribe=True, timeout_s=15, checkpoint_every_steps=6))
    stage.well("prepare")
    stage.well("train", "--strategy", "ddp", "--no-tracking")
    step_ms = json.loads((stage.folder / "runs/ddp-fast/run.json").read_text())["measurement"]["step_ms"]
    assert max(step_ms) < 20_000  # none has the writing in it


def test_a_run_into_another_folder_goes_on_from_no_stop_of_this_one(stage):
    prepare(stage, shards=1, num_samples=2048)
    assert stop(stage, "single", "exact", signal.SIGKILL) == -signal.SIGKILL
    for folder, notes in (("tried", 0), ("stopped", 1)):
        train(stage, "single", "exact", folder)
        found = json.loads((stage.folder / folder / "run.json").read_text())["notes"]
        assert [note["kind"] for note in found] == ["resumed"] * notes


def test_other_params_do_not_go_on_from_a_checkpoint(stage):
    prepare(stage, shards=1, num_samples=2048)  # one forward pass in a step, which is slow
    assert stop(stage, "single", "exact", signal.SIGKILL) == -signal.SIGKILL
    prepare(stage, shards=1, num_samples=2048, epochs=1, global_batch_size=64)
    train(stage, "single", "exact", "other")
    assert json.loads((stage.folder / "other/run.json").read_text())["notes"] == []
