"""Faults of data, factories, disks and folders: what a stage says, how it ends, and that nothing old counts as new."""

import json
import re
import subprocess

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from conftest import needs_root, small
from samebits.files import write_json
from samebits.hashes import sha256
from samebits.measuring.references import WARM_UP_STEPS
from samebits.records.card import card_for, read_card
from samebits.records.run import read_run

RUN_FILES = {"model.safetensors", "losses.csv", "timing.json", "run.json"}
FACTORY = """import os, sys, time
from torch import nn

def make():
    {body}
    return nn.Linear(128, 10)
"""


def train(stage, *arguments, strategy="single"):
    return stage("train", "--strategy", strategy, "--no-tracking", *arguments)


def tracked(stage):
    return stage("train", "--strategy", "single", MLFLOW_TRACKING_URI=f"sqlite:///{stage.folder}/mlflow.db")


def failed(done, code):
    """The error's one line; nothing else is on stderr but what it was said to go on without."""
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert last.startswith("error: ")
    return last


def went_on(done):
    """What a stage said that ended well."""
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def prepared(stage, **changes):
    stage.write_params(small(**changes))
    stage.well("prepare")


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flipped])
@pytest.mark.parametrize("split", ["train", "test"])
def test_data_that_is_not_its_cards_is_refused_by_every_stage_that_reads_it(split, damage, stage):
    prepared(stage)
    if split == "test":
        went_on(train(stage, "--no-checkpoints"))
    damage(stage.folder / f"data/{split}.safetensors")
    done = train(stage) if split == "train" else stage("evaluate", "runs/single-fast")
    assert f"data/{split}.safetensors: not the data of its card: another SHA-256. hint: " in failed(done, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "targets": t["targets"] + 1}, "targets are not classes from 0 to 9"),
        (lambda t: {**t, "targets": t["targets"] - 1}, "targets are not classes from 0 to 9"),
        (lambda t: {**t, "inputs": t["inputs"].astype(np.float64)}, "inputs are float64 (512, 128), the card says flo"),
        (lambda t: {"inputs": t["inputs"]}, "cannot be read: 'targets'"),
    ],
)
def test_data_whose_card_was_written_for_it_is_checked_all_the_same(change, message, stage):
    prepared(stage)
    path = stage.folder / "data/train.safetensors"
    save_file(change(load_file(path)), path)
    card = card_for(path, read_card(path.with_name("card.json")))
    write_json(path.with_name("card.json"), card.model_dump(mode="json"))
    assert f"data/train.safetensors: {message}" in failed(train(stage), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "the data were made with seed = 0, and params say 1"),
        ({"data": {**small()["data"], "num_samples": 4096}}, "data.num_samples = 512, and params say 4096"),
        ({"data": {**small()["data"], "kwargs": {"features": 64}}}, "data.kwargs.features = 128, and params say 64"),
        (small("regression"), "the data were made with data.kwargs.classes = 10, and params say None"),
    ],
)
def test_data_of_other_params_are_not_trained_on(changes, message, stage):
    prepared(stage)
    stage.write_params({**small(), **changes})
    line = failed(train(stage), 2)
    assert line.startswith("error: data/card.json: ")
    assert message in line


def test_a_card_leads_to_no_other_folder(stage):
    prepared(stage)
    card = json.loads((stage.folder / "data/card.json").read_text())
    card["train"]["file"] = "../../etc/passwd"
    (stage.folder / "data/card.json").write_text(json.dumps(card))
    assert "data/card.json: train.file: " in failed(train(stage), 2)


TIMES = {"single": 1, "ddp": 15}
"""Limits that are reached; of ddp it also bounds how ranks meet."""
ENDS = [
    ("sys.exit(0)", 2, "model.name: mine:make raised SystemExit: 0. hint: see mine.py:5"),
    ("os._exit(0)", 4, "ended with exit code 0 while it built the model. hint: nothing in the model or its factory"),
    ("os._exit(3)", 4, "ended with exit code 3 while it built the model. hint: "),
    ("raise BaseException('a\\nb')", 2, "model.name: mine:make raised BaseException: a. hint: see mine.py:5"),
    ("raise ValueError('a\\nb')", 2, "model.name: mine:make raised ValueError: a. hint: see mine.py:5"),
    ("raise KeyboardInterrupt", 2, "model.name: mine:make raised KeyboardInterrupt: no message. hint: see mine"),
    ("raise ValueError", 2, "model.name: mine:make raised ValueError: no message. hint: see mine.py:5"),
    ("raise ValueError('a' * 10**6)", 2, "model.name: mine:make raised ValueError: aaa"),
    ("time.sleep(3600)", 2, "the model's factory was not done within train.timeout_s, {limit} s. hint: "),
]


@pytest.mark.parametrize(
    ("strategy", "body", "code", "message"),
    [
        pytest.param(strategy, *end, marks=pytest.mark.slow if strategy == "ddp" and "sleep" in end[0] else ())
        for strategy in TIMES
        for end in ENDS
    ],
)
def test_a_factory_that_ends_the_process_or_never_ends_is_a_failure(body, code, message, strategy, stage):
    """The run before this one is gone by then, and its result is not shown as this one's."""
    settings = {"num_devices": 2, "oversubscribe": True} if strategy == "ddp" else {}
    settings["model"] = stage.write_model(FACTORY.format(body="pass"))
    prepared(stage, **settings)
    if strategy == "single":
        went_on(train(stage))
    if "sleep" in body:
        stage.write_params(small(**settings, timeout_s=TIMES[strategy]))
    stage.write_model(FACTORY.format(body=body))
    done = train(stage, strategy=strategy)
    line = failed(done, code)
    assert message.format(limit=TIMES[strategy]) in line
    assert (len(line) < 1500, done.stdout) == (True, "")
    assert not RUN_FILES & {path.name for path in stage.folder.glob("runs/*/*")}


def test_a_factory_that_never_ends_in_evaluation_is_a_failure(stage):
    model = stage.write_model(FACTORY.format(body="time.sleep(3600 * os.path.exists('hang'))"))
    settings = {"model": model, "strategies": ["single"]}
    prepared(stage, **settings)
    went_on(train(stage))
    (stage.folder / "hang").touch()
    stage.write_params(small(**settings, timeout_s=1))
    assert "the model's factory was not done within train.timeout_s, 1 s. hint: " in failed(stage("evaluate"), 2)


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of so many KiB on a folder, filled or read-only if wanted."""
    mounted = []

    def mount(name, kib=64, *, read_only=False):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # as of root in most containers
            pytest.skip("this process may not mount a file system")
        mounted.append(folder)
        if read_only:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        return folder

    yield mount
    ended = [subprocess.run(["umount", "--lazy", folder]).returncode for folder in mounted]  # a sender may work there
    assert not any(ended)


@needs_root
def test_prepare_on_a_full_disk(stage, disk):
    disk("data", 64)
    stage.write_params(small())
    line = failed(stage("prepare"), 3)
    assert line.startswith("error: data: the data set would take 0.0 GiB, and 0.0 GiB are free. hint: lower")
    assert list((stage.folder / "data").iterdir()) == []


@needs_root
def test_a_users_own_data_on_a_full_disk(stage, disk):
    """Which are written through memory, where a missing page would end the process without a word."""
    np.save(stage.folder / "x.npy", np.zeros((1000, 64), np.float32))
    np.save(stage.folder / "y.npy", np.zeros(1000, np.int64))
    disk("data", 64)
    files = {"inputs": "x.npy", "targets": "y.npy"}
    stage.write_params({"data": {"task": "file", "num_samples": 800, "test_samples": 200, "kwargs": files},
                        "model": {"name": "mlp"}, "train": small()["train"]})  # fmt: skip
    line = failed(stage("prepare"), 3)
    assert line.startswith("error: data/train.safetensors: no space left on the device. hint: ")
    assert list((stage.folder / "data").iterdir()) == []


@pytest.mark.parametrize("num_samples", [10**14, 10**11])
def test_data_that_fits_no_disk_is_refused_at_once(num_samples, stage):
    stage.write_params({**small(), "data": {"task": "vectors", "num_samples": num_samples, "test_samples": 8}})
    assert "data: the data set would take " in failed(stage("prepare"), 3)


@needs_root
def test_weights_on_a_full_disk(stage, disk):
    prepared(stage)
    disk("runs", 64)
    line = failed(train(stage), 3)
    assert line.startswith("error: runs/single-fast/model.safetensors: no space left on the device. hint: ")
    assert list((stage.folder / "runs/single-fast").iterdir()) == []


@needs_root
@pytest.mark.parametrize("read_only", [False, True])
def test_a_full_or_read_only_state_folder_stops_no_training(read_only, stage, disk):
    """Neither the checkpoints nor the local log, and tracking less than anything."""
    prepared(stage, checkpoint_every_steps=2)
    went_on(train(stage, "--no-checkpoints", "--out-dir", "reference"))
    disk(".samebits", 8, read_only=read_only)
    said = "goes on without checkpoints: " if read_only else "no checkpoint could be written, the training goes on: "
    assert said in went_on(tracked(stage))
    files = [stage.folder / folder / "model.safetensors" for folder in ("reference", "runs/single-fast")]
    assert files[0].read_bytes() == files[1].read_bytes()
    if not read_only:
        assert list(stage.folder.glob(".samebits/resume/*/*")) == []


@needs_root
def test_a_result_on_a_read_only_disk(stage, disk):
    prepared(stage)
    disk("closed", read_only=True)
    line = failed(train(stage, "--out-dir", "closed/out"), 3)
    assert line.startswith("error: closed/out: cannot be written: Read-only file system. hint: ")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file", "file: file is in the way: File exists. hint: name another folder"),
        ("file/deeper", "file/deeper: file/deeper is in the way: Not a directory. hint: "),
        ("a" * 5000, f"{'a' * 80}...: File name too long. hint: "),
    ],
)
def test_a_result_where_no_folder_can_be(out, message, stage):
    prepared(stage)
    (stage.folder / "file").write_text("somebody's")
    assert message in failed(train(stage, "--out-dir", out), 2)
    assert (stage.folder / "file").read_text() == "somebody's"


@pytest.mark.parametrize("name", [".samebits", ".samebits/resume", ".samebits/runs"])
def test_a_file_in_place_of_a_state_folder_stops_no_training(name, stage):
    prepared(stage, checkpoint_every_steps=2)
    (stage.folder / name).parent.mkdir(exist_ok=True)
    (stage.folder / name).write_text("somebody's")
    said = went_on(tracked(stage))
    assert ("the training goes on without checkpoints: " in said) == (name != ".samebits/runs")
    assert ("the training goes on untracked: " in said) == (name != ".samebits/resume")
    assert {path.name for path in (stage.folder / "runs/single-fast").iterdir()} == RUN_FILES


SHORT_OF_MEMORY = """import torch
from torch import nn

class Net(nn.Linear):
    calls = 0

    def forward(self, x):
        Net.calls += 1
        if Net.calls > {calls}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(x)

def make():
    return Net(128, 10)
"""
CALLS = 1 + WARM_UP_STEPS["cpu"] + 1 + 8  # the trial step, the warm-up, one whose memory is watched, and the training


@pytest.mark.parametrize(("strategy", "calls", "code"), [("single", CALLS, 0), ("ddp", CALLS + 3, 3)])
def test_a_training_that_ended_keeps_its_record_whatever_befalls_its_measurement(strategy, calls, code, stage):
    """Alone a process goes on without the measurement; among ranks that wait for it, it cannot.

    Three more passes before the training look whether a model mixes samples that go to several devices.
    """
    prepared(stage, model=stage.write_model(SHORT_OF_MEMORY.format(calls=calls)), repeats=2)
    done = train(stage, strategy=strategy)
    assert done.returncode == code, done.stderr
    run = read_run(stage.folder / f"runs/{strategy}-fast")
    assert len(run.losses) == 8
    assert sha256(run.folder / "model.safetensors") == run.record.weights_sha256
    assert run.record.measurement.chunk_seconds == {}
    if code:
        assert failed(done, code).startswith("error: out of memory on ")
        assert run.record.speedup_unavailable.kind == "not_ended"


@pytest.mark.parametrize(("more", "measured"), [(8, (True, False, False)), (16, (True, True, False))])
def test_what_was_measured_before_memory_ran_out_is_kept(more, measured, stage):
    """Slices of 8 steps, then as many of the twin that shows rounding, then the parts of a step."""
    prepared(stage, model=stage.write_model(SHORT_OF_MEMORY.format(calls=CALLS + more)), repeats=2)
    went_on(train(stage))
    record = read_run(stage.folder / "runs/single-fast").record
    kept = (record.measurement.chunk_seconds != {}, record.rounding is not None, record.breakdown is not None)
    assert kept == measured


def test_a_training_that_runs_out_of_memory_leaves_no_record(stage):
    prepared(stage, model=stage.write_model(SHORT_OF_MEMORY.format(calls=CALLS - 1)))
    assert failed(train(stage), 3).startswith("error: out of memory on ")
    assert not (stage.folder / "runs/single-fast/run.json").exists()


def test_a_gpu_on_which_cuda_does_not_start_ends_in_one_line(stage, gpu_host):
    """NVML shows four GPUs, and this torch starts on none of them."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    prepared(stage)
    gpu_host("A")
    done = stage.fresh("train", "--strategy", "ddp", "--no-tracking")
    assert re.match("error: CUDA does not start on cuda:[0-3]: Torch not compiled with CUDA", failed(done, 3))
    assert done.stderr.count("\n") == 1
