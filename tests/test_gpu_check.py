"""The command for the first host with a GPU, on one without."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, wait_for
from samebits.errors import HostError, UserError
from samebits.results.lock import Lock

sys.path.append(str(ROOT / "tools"))
import gpu_check
import recorded_commands


def run(*arguments, **options):
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_it_says_that_there_is_no_gpu(tmp_path):
    done = run("--out", str(tmp_path / "out.json"))
    assert done.returncode == 3
    assert done.stderr.startswith("error: no GPU that torch can use: ")
    assert not (tmp_path / "out.json").exists()


def test_a_gpu_that_cannot_be_used_is_what_the_file_tells(tmp_path, gpu_host):
    gpu_host("A", "gpu 2", "fails all GPU_IS_LOST")
    done = run("--only", "host", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 1, done.stderr
    step = json.loads((tmp_path / "out.json").read_text())["steps"]["host"]
    assert step["exit_code"] == 1
    assert any("GPU 2 cannot be read: GPU is lost" in line for line in step["said"])


def test_each_step_leaves_what_it_found(tmp_path):
    done = run("--without-gpu", "--only", "host", "--only", "tests", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["steps"]["host"]["facts"]["cpu"]["cores"] >= 1
    tests = found["steps"]["tests"]
    assert tests["tried"] == sum(tests["skipped"].values()) > 50
    assert all("needs" in why for why in tests["skipped"])
    assert tests["failed"] == {}
    assert str(Path.home()) not in json.dumps(found)


def test_a_failed_steps_output_names_no_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    check = gpu_check.Check(tmp_path)
    printed = f"{tmp_path}/me/x http://me:secret@host"
    code = f"import sys; print('{printed}'); print('\\x1b[31mred', file=sys.stderr); sys.exit(7)"
    check.run("step", sys.executable, "-c", code, minutes=1)
    assert check.steps["step"]["exit_code"] == 7
    assert check.steps["step"]["said"][-1] == "red"
    assert check.steps["step"]["said"][0] == "~/x http://me:***@host"
    communicate, began = subprocess.Popen.communicate, tmp_path / "began"

    def out_of_time(process, timeout=None):
        if timeout is None:
            return communicate(process)
        wait_for(began.exists)
        raise subprocess.TimeoutExpired("hangs", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", out_of_time)
    check.run("hangs", "sh", "-c", f"echo here; touch {began}; exec sleep 3600", minutes=1)
    assert (check.steps["hangs"]["exit_code"], check.steps["hangs"]["said"]) == (124, ["here"])


@pytest.mark.parametrize("kind", ["failure", "error"])
def test_failures_are_read_from_pytests_report(kind):
    case = gpu_check.ET.fromstring(f'<testcase name="x"><{kind} message="m">one\nE  two</{kind}></testcase>')
    assert gpu_check._why(case) == ["one", "E  two"]
    assert gpu_check._why(gpu_check.ET.fromstring("<testcase><skipped/></testcase>")) == []


def test_a_step_out_of_time_can_still_report():
    """As pytest does at Ctrl-C."""
    code = "import time\ntry: print('here', flush=True), time.sleep(3600)\nexcept KeyboardInterrupt: print('reported')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "here\n"
        recorded_commands.end_group(process)
        assert process.stdout.read() == "reported\n"
    assert process.returncode == 0


def test_no_command_begins_when_the_time_is_over(tmp_path):
    saved = []
    check = gpu_check.Check(tmp_path, minutes=1, save=lambda: saved.append(json.dumps(check.steps)))
    check.run("step", sys.executable, "-c", "pass", minutes=5)
    assert ['"exit_code": 0' in text for text in saved] == [True]
    check._end = 0.0
    with pytest.raises(HostError, match=r"no time is left\. hint: call it again with --add --only step"):
        check.run("step", sys.executable, "-c", "pass", minutes=5)


def test_a_file_of_another_commit_is_not_added_to(tmp_path):
    out = tmp_path / "gpu-check.json"
    assert gpu_check.known_steps(out, "a") == {}
    out.write_text(json.dumps({"commit": "a", "steps": {"host": {"exit_code": 0}}}))
    assert gpu_check.known_steps(out, "a") == {"host": {"exit_code": 0}}
    with pytest.raises(UserError, match=r"is of commit a, this is b\. hint: leave --add away"):
        gpu_check.known_steps(out, "b")


def test_a_second_call_adds_its_step(tmp_path):
    out = tmp_path / "gpu-check.json"
    commit = gpu_check.git_state().commit
    out.write_text(json.dumps({"commit": commit, "steps": {"tests": {"exit_code": 1}, "host": {"exit_code": 1}}}))
    done = run("--without-gpu", "--only", "host", "--add", "--out", str(out))
    assert done.returncode == 1, done.stderr
    steps = json.loads(out.read_text())["steps"]
    assert (steps["tests"], steps["host"]["exit_code"]) == ({"exit_code": 1}, 0)
    assert done.stdout == f"{out}: 1 of 2 steps went well\n"


def test_speed_is_measured_with_the_parameters_for_gpus(tmp_path, monkeypatch):
    params = tmp_path / "gpu.yaml"
    params.write_text("train: {strategies: [ddp], numerics: [exact]}\n")
    monkeypatch.setattr(gpu_check, "GPU_PARAMS", params)
    check, calls = gpu_check.Check(tmp_path), []
    monkeypatch.setattr(check, "run", lambda name, *command, minutes, cwd: calls.append((name, cwd.name, *command[1:])))
    gpu_check.speed(check)
    assert (tmp_path / "speed/params.yaml").read_text() == params.read_text()
    assert {call[:2] for call in calls} == {("speed", "speed")}
    assert [Path(call[2]).stem for call in calls] == ["host", "prepare", "train", "evaluate", "compare"]
    assert calls[2][3:] == ("--strategy", "ddp", "--numerics", "exact", "--no-tracking")


def test_the_bits_of_exact_runs_are_compared_with_the_lock(tmp_path):
    def stage(run, content):
        md5 = hashlib.md5(content).hexdigest()
        return {"cmd": "train", "outs": [{"path": f"runs/{run}/{name}", "md5": md5} for name in gpu_check.BITS]}

    stages = {run: stage(run, b"bits") for run in ("single-fast", "single-exact", "dp-exact", "ddp-exact")}
    for run, content in (("single-fast", b"others"), ("single-exact", b"bits"), ("dp-exact", b"others")):
        (tmp_path / "runs" / run).mkdir(parents=True)
        for name in gpu_check.BITS:
            (tmp_path / "runs" / run / name).write_bytes(b"bits" if name == gpu_check.BITS[0] else content)
    lock = Lock.parse({"schema": "2.0", "stages": stages}, Path("dvc.lock"), made_by="dvc repro")
    assert gpu_check.same_bits(tmp_path, lock) == {"single-exact": True, "dp-exact": False}


@pytest.mark.slow
def test_the_steps_on_a_host_without_a_gpu(tmp_path):
    """All but what exact costs, which is a benchmark's to measure."""
    only = [word for name in ("doctor", "verify", "repro") for word in ("--only", name)]
    done = run("--without-gpu", *only, "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert {finding["status"] for finding in steps["doctor"]["findings"]} <= {"ok", "warning", "skipped"}
    assert len([line for line in steps["verify"]["said"] if "bitwise" in line]) >= 3
    assert steps["repro"]["same_bits"] == {f"{strategy}-exact": True for strategy in ("single", "dp", "ddp")}
    rows, weights = steps["repro"]["rows"], steps["repro"]["weights_sha256"]
    assert rows.keys() == weights.keys() == {f"{s}-{n}" for s in ("single", "dp", "ddp") for n in ("fast", "exact")}
    assert len({weights[name] for name in weights if name.endswith("exact")}) == 1
