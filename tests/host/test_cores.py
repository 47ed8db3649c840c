"""CPU time of the training and of others, from a made-up /proc and from the real one."""

import os
import subprocess
import sys

import pytest

from samebits.host import Cores, CoreShares
from samebits.host.cores import CoreTimes

TICKS = os.sysconf("SC_CLK_TCK")


def columns(**seconds):
    """One line of /proc/stat after its name."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    return " ".join(str(int(seconds.get(name, 0) * TICKS)) for name in names)


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A host of three cores, of which this process may use two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(os, "nice", lambda _: 0)

    class Proc:
        root = tmp_path / "proc"
        cgroups = tmp_path / "cgroup"

        def cpus(self, **cores):
            lines = [
                f"cpu {columns(user=999)}",
                *(f"{name} {columns(**used)}" for name, used in cores.items()),
                "ctxt 7",
            ]
            (self.root / "stat").write_text("\n".join(lines))

        def process(self, pid, parent, *, user=0, system=0, children=0, nice=0, name="a (b) c"):
            (self.root / str(pid)).mkdir(exist_ok=True)
            times = " ".join(str(int(seconds * TICKS)) for seconds in (user, system, children, 0))
            text = f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 0 0 0 0 0 {times} 20 {nice} 1 0 0"
            (self.root / str(pid) / "stat").write_text(text)

        def cores(self, pid=10):
            return Cores(pid, proc=self.root, cgroups=self.cgroups)

    proc = Proc()
    (proc.root / "self").mkdir(parents=True)
    proc.cpus(cpu0={}, cpu1={}, cpu2={})
    proc.process(1, 0, user=50)
    proc.process(10, 1)
    proc.process(11, 10)
    proc.process(12, 11)
    proc.process(13, 1, user=70)
    return proc


def test_the_family_of_a_process(proc):
    assert proc.cores().processes() == {10, 11, 12}
    assert proc.cores(99).processes() == set()


def test_busy_cores_and_own_time(proc):
    proc.cpus(
        cpu0={"user": 4, "system": 1, "idle": 9, "iowait": 9, "irq": 9, "softirq": 9},
        cpu1={"user": 100},
        cpu2={"user": 2, "steal": 3, "nice": 40},
    )
    proc.process(10, 1, user=1, children=2)
    proc.process(12, 11, user=0.5, system=0.25)
    proc.process(11, 10, user=30, nice=10)  # such as a sender, which gives way
    times = proc.cores().read()
    assert (times.cores, times.busy, times.training) == (2, 10.0, 3.75)


def test_where_the_training_is_nice_itself_what_is_nice_counts(proc, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda _: 5)
    proc.cpus(cpu0={"nice": 4}, cpu2={"user": 1})
    proc.process(11, 10, user=3, nice=5)
    times = proc.cores().read()
    assert (times.busy, times.training) == (5.0, 3.0)


@pytest.mark.parametrize(
    "spoil", [lambda root: (root / "stat").unlink(), lambda root: (root / "stat").write_text("cpu0 x")]
)
def test_a_kernel_that_hides_its_clocks(spoil, proc):
    spoil(proc.root)
    assert proc.cores().read() is None


@pytest.mark.parametrize(
    ("group", "file", "text", "seconds"),
    [
        ("0::/a/b", "a/b/cpu.stat", "nr_periods 3\nnr_throttled 1\nthrottled_usec 2500000", 2.5),
        ("0::/a/b", "cpu.stat", "throttled_usec 500000", 0.5),
        ("0::/", "cpu.stat", "usage_usec 7", None),
        ("0::/", "other", "", None),
        ("7:memory:/x\n4:cpu,cpuacct:/a\n0::/", "cpu,cpuacct/a/cpu.stat", "throttled_time 1500000000", 1.5),
        ("4:cpu:/a", "cpu/cpu.stat", "throttled_time 1500000000", 1.5),
        ("4:cpu:/a", "cpu/cpu.stat", "one line", None),
    ],
)
def test_time_that_a_limit_took(group, file, text, seconds, proc):
    (proc.root / "self/cgroup").write_text(group)
    path = proc.cgroups / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert proc.cores().read().throttled == seconds


def test_a_limit_that_cannot_be_read_any_more_is_none(proc):
    (proc.root / "self/cgroup").write_text("0::/")
    file = proc.cgroups / "cpu.stat"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("throttled_usec 500000")
    cores = proc.cores()
    assert cores.read().throttled == 0.5
    file.write_text("throttled_usec")
    assert cores.read().throttled is None
    file.unlink()
    assert cores.read().throttled is None


def test_without_control_groups(proc):
    assert proc.cores().read().throttled is None


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (CoreTimes(12.0, 2, 13.0, 6.0, 1.5), CoreShares(cores=2, training=0.5, others=1.0, throttled=0.25)),
        (CoreTimes(12.0, 2, 14.0, 9.0, 2.0), CoreShares(cores=2, training=2.0, others=0.0, throttled=0.25)),
        (CoreTimes(12.0, 2, 10.0, 5.5, None), CoreShares(cores=2, training=0.25, others=0.0, throttled=None)),
        (CoreTimes(10.25, 2, 10.5, 5.25, 1.0), CoreShares(cores=2, training=1.0, others=1.0, throttled=0.0)),
        (CoreTimes(10.1, 2, 11.0, 6.0, 1.0), None),
    ],
)
def test_shares_of_an_interval(after, expected):
    assert CoreShares.between(CoreTimes(10.0, 2, 10.0, 5.0, 1.0), after) == expected


SPINNING = """
import time
print(flush=True)
input()
began = time.process_time()
while time.process_time() < began + 0.3:
    pass
print(time.process_time() - began, flush=True)
input()
"""


def test_the_real_clocks_count_a_process():
    """The process is a new one, because this one may have children of other tests."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SPINNING], **pipes) as spinning:
        cores = Cores(spinning.pid)
        assert spinning.pid in cores.processes()
        spinning.stdout.readline()
        before = cores.read()
        print(file=spinning.stdin, flush=True)
        spent = float(spinning.stdout.readline())
        after = cores.read()
        print(file=spinning.stdin, flush=True)
    took = after.training - before.training  # in ticks of a hundredth of a second, of its own time alone
    assert -0.03 < took - spent < 0.1
    assert after.busy >= before.busy
