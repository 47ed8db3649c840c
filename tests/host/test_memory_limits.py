"""The memory that a host and its control groups leave to a process."""

import resource

import pytest

from samebits.host import data_bytes, memory, private_bytes, private_peak
from samebits.host.memory import memory_available, memory_limit

GIB, KIB = 2**30, 2**10
MEMINFO = f"MemTotal:       {8 * GIB // KIB} kB\nMemFree:  1 kB\nMemAvailable:   {5 * GIB // KIB} kB\n"
V2 = {"memory.max": 2 * GIB, "memory.current": GIB, "memory.stat": f"anon 5\ninactive_file {GIB // 4}\n"}
V1 = {
    "memory.limit_in_bytes": 3 * GIB,
    "memory.usage_in_bytes": GIB,
    "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
}
NO_LIMIT_V1 = {**V1, "memory.limit_in_bytes": 2**63 - 4096}


@pytest.mark.parametrize(
    ("cgroup", "files", "limit", "available"),
    [
        ("", {}, 8 * GIB, 5 * GIB),
        ("0::/job\n", {"job": V2}, 2 * GIB, 1.25 * GIB),
        ("0::/job\n", {"job": {**V2, "memory.max": "max"}}, 8 * GIB, 5 * GIB),
        ("0::/pod.slice:cri:job\n", {"pod.slice:cri:job": V2}, 2 * GIB, 1.25 * GIB),  # as containerd names it
        ("0::/job/step\n", {"job": V2, "job/step": {**V2, "memory.max": "max"}}, 2 * GIB, 1.25 * GIB),
        ("0::/job/step\n", {"job": V2, "job/step": {**V2, "memory.max": GIB}}, GIB, 0.25 * GIB),
        ("0::/what/the/host/says\n", {".": V2}, 2 * GIB, 1.25 * GIB),  # inside a container
        ("0::/job\n", {"job": {**V2, "memory.current": 3 * GIB}}, 2 * GIB, 0),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job": V1}, 3 * GIB, 2.5 * GIB),
        ("4:memory:/job\n", {"memory/job": NO_LIMIT_V1, "memory": NO_LIMIT_V1}, 8 * GIB, 5 * GIB),
        ("4:memory:/job\n", {"memory/job": NO_LIMIT_V1, "memory": V1}, 3 * GIB, 2.5 * GIB),
        ("4:cpu:/job\n", {"memory/job": V1}, 8 * GIB, 5 * GIB),
    ],
)
def test_the_lowest_limit_counts(cgroup, files, limit, available, kernel):
    roots = kernel(cgroup, files, meminfo=MEMINFO)
    assert (memory_limit(**roots), memory_available(**roots)) == (limit, available)


def test_a_kernel_that_tells_less_is_asked_otherwise(tmp_path, monkeypatch):
    """Kernels of sandboxes have fewer figures. Both ways give the same."""
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(memory, "PROC", tmp_path)
    page = resource.getpagesize()
    (tmp_path / "self/statm").write_text("900 300 100 10 0 200 0\n")
    (tmp_path / "self/status").write_text("Name:\tpython\nState:\tR (running)\n")
    assert (private_bytes(), data_bytes()) == (200 * page, 200 * page)
    assert private_peak() == 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - 100 * page
    (tmp_path / "self/status").write_text(
        "VmHWM:\t 1600 kB\nRssAnon:\t 800 kB\nRssFile:\t 300 kB\nRssShmem:\t 100 kB\nVmData:\t 810 kB\n"
    )
    assert (private_bytes(), private_peak(), data_bytes()) == (800 * 1024, 1200 * 1024, 810 * 1024)


def test_what_a_process_has_grows_as_it_takes_more():
    private, data = private_bytes(), data_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert len(held) == 64 << 20
    assert private_bytes() - private == pytest.approx(64 << 20, rel=0.1)
    assert data_bytes() - data == pytest.approx(64 << 20, rel=0.1)
