"""Workers that fail, hang or are killed, and signals to the launcher."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from conftest import small, wait_for
from patience import patient
from samebits.errors import Interrupted
from samebits.params import parse_params
from samebits.records.log import LOGS
from samebits.records.provenance import provenance_of
from samebits.strategies.placement import Devices
from samebits.workers.launch import _experiment_of_dvc, run_training

# Runs FUNCTION in two workers, as pipeline/train.py runs ``work``.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from samebits.errors import CollectiveError, HostError, UserError, WorkerError, exit_on_error
from samebits.workers.processes import launch

def fail(error, reporter):
    reporter.failure(error)
    raise SystemExit(error.exit_code)

def one(rank, ends, *at):
    # One worker ends, or is stopped, while the other works.
    def work(reporter):
        if at:
            reporter.at(*at)
        if os.environ["RANK"] == rank:
            ends(reporter)
        time.sleep(600)
    return work

def to_itself(signum):
    return lambda _: os.kill(os.getpid(), signum)

def note(name):
    Path(name).touch()

def until(name, state=""):
    # Another worker has noted that, and is in a state.
    while not Path(name).exists():
        time.sleep(0.01)
    while state and state not in Path(f"/proc/{Path(name).read_text()}/stat").read_text().split():
        time.sleep(0.01)

first_killed = one("0", to_itself(signal.SIGKILL))
killed_at_a_step = one("1", to_itself(signal.SIGKILL), "training", 13)
stopped = one("1", to_itself(signal.SIGSTOP), "measuring")
second_leaves = one("1", lambda _: os._exit(7))
leaves_in_silence = one("1", lambda _: os._exit(0))
user_error = one("1", lambda reporter: fail(UserError("the thing is wrong", hint="mend it"), reporter))

def root_cause(reporter):
    if os.environ["RANK"] == "1":
        reporter.failure(HostError("no memory", hint="take less"))
        note("failed")
        raise SystemExit(3)
    until("failed")
    fail(WorkerError("waited in vain for another", hint="see the other"), reporter)

def waited_for(reporter):
    reporter.at("training", 13 - int(os.environ["RANK"]))
    if os.environ["RANK"] == "1":
        note("there")
        time.sleep(600)
    until("there")
    fail(CollectiveError("a rank waited in vain", hint="see the other"), reporter)

def refused_by_one(reporter):
    if os.environ["RANK"] == "0":
        reporter.failure(CollectiveError("another rank has refused the step", hint="see what it says"))
        note("told")
        time.sleep(600)
    until("told")
    fail(UserError("the step is wrong", hint="mend it"), reporter)

def waited_for_a_stopped_one(reporter):
    if os.environ["RANK"] == "1":
        Path("new").write_text(str(os.getpid()))
        os.rename("new", "there")
        os.kill(os.getpid(), signal.SIGSTOP)
    until("there", "T")
    fail(CollectiveError("a rank waited in vain", hint="see the other"), reporter)

def builds_for_ever(reporter):
    reporter.at("building")
    while True:
        pass

def deaf(reporter):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    note_pid(reporter)

def first_is_slow(reporter):
    import torch
    from samebits.training.collectives import GroupCollectives
    ranks = GroupCollectives(torch.device("cpu"), "gloo", timeout_s=15)
    ranks.join()
    for number in (1, 2):
        made = ranks.first_alone(lambda: time.sleep(17) or f"work {number}")
        ranks.barrier()
    Path(f"made{ranks.rank}").write_text(str(made))
    ranks.close()
    reporter.done()

def well(reporter):
    Path(f"of{os.environ['RANK']}").write_text(os.environ["WORLD_SIZE"])

def note_pid(reporter):
    Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)

with exit_on_error(debug=len(sys.argv) > 2):
    launch(globals()[sys.argv[1]], 2, timeout_s=3)
"""


@pytest.fixture
def script(stage):
    path = stage.folder / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def run(script, stage):
    return partial(stage.run_script, script)


def test_each_worker_has_its_rank(run, stage):
    assert run("well").returncode == 0
    assert [(stage.folder / f"of{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


@pytest.mark.slow
def test_ranks_wait_for_the_first_for_longer_than_a_collective_may_take(run, stage):
    done = run("first_is_slow")
    assert done.returncode == 0, done.stderr
    assert [(stage.folder / f"made{rank}").read_text() for rank in (0, 1)] == ["work 2", "None"]


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("first_killed", 4, "the worker of rank 0 was ended by SIGKILL while it worked. "
         "hint: the kernel may have been out of memory"),
        ("second_leaves", 4, "the worker of rank 1 ended with exit code 7 while it worked. hint: "),
        ("user_error", 2, "the thing is wrong. hint: mend it"),
        ("root_cause", 3, "no memory. hint: take less"),
        ("leaves_in_silence", 4, "the worker of rank 1 ended with exit code 0 while it worked. "
         "hint: nothing in the model"),
        ("killed_at_a_step", 4, "the worker of rank 1 was ended by SIGKILL at step 13. hint: "),
        ("stopped", 4, "the worker of rank 1 was stopped, as by SIGSTOP or SIGTTOU in the timed slices. hint: "),
        ("waited_for", 4, "the worker of rank 1 did not answer the others at step 12: a rank waited in vain. hint: "),
        ("refused_by_one", 2, "the step is wrong. hint: mend it"),
        ("waited_for_a_stopped_one", 4, "the worker of rank 1 was stopped, as by SIGSTOP or SIGTTOU while it worked. "
         "hint: "),
        ("builds_for_ever", 2, "the model's factory was not done within train.timeout_s, 3 s. hint: "),
    ],
)  # fmt: skip
def test_the_first_failure_ends_all_and_is_named(function, code, message, run):
    done = run(function)  # which ends long before a worker would that is left to itself
    assert done.returncode == code
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("function", "line"), [("waited_for", "in waited_for"), ("builds_for_ever", "in builds_for_ever")]
)
def test_debug_shows_where_each_rank_hangs(function, line, run):
    _, _, of_rank_1 = run(function, "--debug").stderr.partition("rank1:\n")
    assert line in of_rank_1


def start(stage, *command):
    command = [sys.executable, *map(str, command)]
    return subprocess.Popen(command, cwd=stage.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def launched(script, stage):
    """Start a launcher whose two workers note who they are, and return it with their process numbers."""

    def begin(function):
        process = start(stage, script, function)
        files = [stage.folder / f"pid{rank}" for rank in (0, 1)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        return process, [int(file.read_text()) for file in files]

    return begin


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # ended before it was opened, or while it was read
        return False


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_launcher_ends_its_workers(signum, code, launched):
    process, workers = launched("note_pid")
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=patient(120))
    assert process.returncode == code
    wait_for(lambda: not any(map(is_running, workers)))
    if signum != signal.SIGKILL:
        name = "Ctrl-C" if signum == signal.SIGINT else signum.name
        assert stderr == f"error: stopped by {name}. hint: run the same command again\n"


def has_pending(pid, signum):
    """Whether a signal has come to a process that has blocked it."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> (signum - 1) & 1)


def test_a_second_signal_ends_at_once_what_the_first_one_does_not(launched):
    process, workers = launched("deaf")
    process.terminate()
    wait_for(lambda: all(has_pending(pid, signal.SIGTERM) for pid in workers))
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=patient(120))
    assert process.returncode == 143
    wait_for(lambda: not any(map(is_running, workers)))


def interrupted(*_, **__):
    raise Interrupted(signal.SIGTERM)


@pytest.fixture
def stopped_training(tmp_path, monkeypatch):
    """A training that is stopped before its workers begin; returns its logs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("samebits.workers.launch.launch", interrupted)

    def run(start_sender=lambda log: None):
        params, out = parse_params(small(numerics=["exact"])), tmp_path / "out"
        with pytest.raises(Interrupted):
            run_training(params, "single", "exact", data_dir=tmp_path, out_dir=out, start_sender=start_sender)
        return next(LOGS.glob("*.jsonl"), None)

    return run


def test_a_training_that_was_stopped_says_so_in_its_log(stopped_training):
    """What is delivered of it is tested in tracking."""
    log = stopped_training()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "end"]
    assert events[-1]["status"] == "KILLED"


def test_a_run_whose_sender_cannot_be_started_keeps_its_log(stopped_training, capsys):
    def refuse(log):
        raise OSError(errno.EAGAIN, "no more processes")

    log = stopped_training(refuse)
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["start", "end"]
    said = capsys.readouterr().err
    assert said.startswith("nobody delivers the training now, `samebits track sync` will: [Errno 11] no more processes")


def test_a_signal_while_the_log_begins_ends_the_training(stopped_training, monkeypatch):
    """Whatever the log's own trouble is, the training goes on without; a signal is none."""
    monkeypatch.setattr("samebits.workers.launch.note_provenance", interrupted)
    monkeypatch.setattr("samebits.workers.launch.launch", lambda *_, **__: pytest.fail("it went on"))
    stopped_training()


def test_what_a_run_is_made_from_is_noted_before_it_begins(stopped_training, tmp_path):
    """Whoever edits a file while it trains, or delivers it early, finds it noted."""
    file = tmp_path / "model.py"
    file.write_text("A = 1\n")
    for command in ("init", "add model.py", "commit --message all"):
        name = ["-c", "user.name=A", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *command.split()], cwd=tmp_path, check=True, capture_output=True)
    file.write_text("A = 2\n")
    noted = []

    def edit(log):
        noted.append(provenance_of(log).exists())
        file.write_text("A = 3\n")

    log = stopped_training(edit)
    assert noted == [True]
    changed = [line for line in log.with_suffix(".patch").read_text().splitlines() if line.startswith("+A")]
    assert changed == ["+A = 2"]


@pytest.mark.parametrize(
    ("signum", "timeout_s", "what"),
    [
        (signal.SIGKILL, 600, "was ended by SIGKILL"),
        pytest.param(signal.SIGSTOP, 20, "was stopped, as by SIGSTOP or SIGTTOU", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_ends_a_real_training(signum, timeout_s, what, stage, data_dir):
    """With the other rank waiting in a collective for the one that is gone."""
    raw = small(epochs=100_000, repeats=1, timeout_s=timeout_s, checkpoint_every_steps=20)
    data = data_dir(stage.write_params(raw))
    process = start(stage, stage.script("train"), "--strategy", "ddp", "--no-tracking", "--data-dir", data)

    def workers():
        tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found = tasks.read_text().split() if tasks.exists() else []
        return found if len(found) == 2 else None

    last = int(wait_for(workers)[1])
    wait_for(lambda: list((stage.folder / ".samebits/resume").glob("*/0*")))
    os.kill(last, signum)
    _, stderr = process.communicate(timeout=patient(120))
    assert process.returncode == 4
    assert re.match(rf"error: the worker of rank 1 {what} at step [1-9]\d*\. hint: ", stderr), stderr
    assert not (stage.folder / "runs/ddp-fast/run.json").exists()
    wait_for(lambda: not is_running(last))


PARENT = """
import sys
import torch

def touched(*_, **__):
    raise AssertionError("CUDA is touched in the process that forks")

for name in ("is_available", "device_count", "current_device", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, touched)

from pathlib import Path
from samebits.params import parse_params
from samebits.workers import launch
launch.launch = lambda function, ranks, **_: print(len(ranks.here))
params = parse_params({"train": {"numerics": ["fast", "exact"]}})
for numerics in params.train.numerics:
    placement = launch.run_training(params, "ddp", numerics, data_dir=Path(), out_dir=Path("out"))
    assert (placement.device_type, placement.num_devices) == ("cuda", int(sys.argv[1]))
import os
print(os.getpid())
"""


def test_devices_that_are_left_over_are_said_before_the_training(monkeypatch, tmp_path, capsys):
    said = []
    monkeypatch.setattr("samebits.workers.world.this_machine", lambda: Devices(gpus=16, cores=16))
    monkeypatch.setattr("samebits.workers.launch.launch", lambda *_, **__: said.append(capsys.readouterr().err))
    for shards in (8, 16):
        params = parse_params({"exact": {"shards": shards}})
        run_training(params, "ddp", "exact", data_dir=tmp_path, out_dir=tmp_path / "out")
    assert said == ["note: 8 of 16 devices, at most one for each of the 8 shards of exact.shards\n", ""]


@pytest.mark.parametrize(
    ("name", "devices", "count"), [("A", None, "4"), ("E", "MIG-00000001-0000-5000-8000-000000000000", "1")]
)
def test_the_process_that_forks_counts_gpus_and_leaves_cuda_alone(name, devices, count, gpu_host, tmp_path):
    """As long as torch is not asked either: given a slice's UUID, it would start CUDA to count one device."""
    calls = gpu_host(name, devices=devices)
    done = subprocess.run([sys.executable, "-c", PARENT, count], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [count, count]
    process, lines = done.stdout.split()[-1], [line.split() for line in calls.read_text().splitlines()]
    assert {"nvmlDeviceGetHandleByIndex"} <= {function for pid, function in lines if pid == process}
    assert [function for _, function in lines if function == "nvmlSystemGetCudaDriverVersion"] == []


def test_a_training_of_a_dvc_experiment_knows_its_name(monkeypatch):
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    assert _experiment_of_dvc() == {}
    monkeypatch.setenv("DVC_EXP_NAME", "rate-2")
    assert _experiment_of_dvc() == {"dvc_experiment": "rate-2"}
