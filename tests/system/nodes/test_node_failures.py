"""Machines that die, hang, are cut off, differ, or do not find each other: one clear line, in time, nothing left."""

import json
import os
import re
import shutil
import signal
import sys
from functools import partial

import pytest
from node_fixtures import all_end, checkout, git, needs_machines, network  # noqa: F401 - two fixtures

from conftest import small, wait_for
from slowed import slow_model, slowed

pytestmark = needs_machines

TIMEOUT_S = 15  # how soon a training ends after it is measured by benchmarks/nodes.py


@pytest.fixture
def long(checkout):
    """A checkout whose training goes on until it is stopped, with checkpoints."""
    checkout.prepare(
        small(numerics=["exact"], epochs=20_000, timeout_s=TIMEOUT_S, checkpoint_every_steps=20, repeats=1)
    )
    return checkout


def new_checkpoints(checkout, known):
    return {file.name for file in checkout.checkpoints()} - known


def training(checkout, nodes, *arguments):
    """A training that is under way on these machines, with one worker on each."""
    processes = checkout.train_on(nodes, "--num-devices", 1, "--no-tracking", *arguments)
    wait_for(lambda: checkout.checkpoints() or any(process.popen.poll() is not None for process in processes))
    assert [process.popen.poll() for process in processes] == [None] * len(nodes), processes[0].wait()
    return processes


FAULTS = {
    "power off": lambda nodes, _: nodes[1].kill(),
    "launcher killed": lambda _, processes: processes[1].signal(signal.SIGKILL),
    "first launcher killed": lambda _, processes: processes[0].signal(signal.SIGKILL),
    "worker killed": lambda _, processes: os.kill(processes[1].children()[-1], signal.SIGKILL),
    "worker stopped": lambda _, processes: os.kill(processes[1].children()[-1], signal.SIGSTOP),
    "frozen": lambda nodes, _: nodes[1].freeze(),
    "first frozen": lambda nodes, _: nodes[0].freeze(),
    "cut off": lambda nodes, _: nodes[1].link("down"),
    "first cut off": lambda nodes, _: nodes[0].link("down"),
}
"""Faults of one of two machines, or of a process on it."""

UNHEARD = r"node 1 \(n1\): not heard of for \d+ s: it is down or stopped, or its network is"
WORKER = r"node 1 \(n1\): the worker of rank 1"
FIRST_SILENT = r"node 0 \(n0\): not heard of for \d+ s: it is down or stopped, or its network is, or that of node 1"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("power off", {0: UNHEARD}),
        ("launcher killed", {0: UNHEARD}),
        ("first launcher killed", {1: r"node 0 \(n0\): it is gone, and its store with it"}),
        ("worker killed", dict.fromkeys((0, 1), rf"{WORKER} was ended by SIGKILL at step \d+")),
        ("worker stopped", dict.fromkeys((0, 1), rf"{WORKER} was stopped, as by SIGSTOP .* at step")),
        ("frozen", {0: UNHEARD}),
        ("first frozen", {1: FIRST_SILENT}),
        ("cut off", {0: UNHEARD, 1: FIRST_SILENT}),
        ("first cut off", {0: UNHEARD, 1: FIRST_SILENT}),
    ],
)
def test_a_fault_on_one_machine_ends_the_training_on_the_others(fault, told, long, network):
    nodes = network(2)
    processes = training(long, nodes)
    FAULTS[fault](nodes, processes)
    for rank, message in told.items():
        _, stderr = processes[rank].ends(4)
        assert re.search(rf"^error: {message}.*\. hint: ", stderr, re.MULTILINE), stderr
        assert "Traceback" not in stderr
        wait_for(nodes[rank].is_idle)
    for node in nodes:  # also where the launcher was killed, and on one that comes back
        node.thaw()
        wait_for(node.is_idle)


def test_all_that_are_left_name_the_machine_that_is_lost(long, network):
    """So do those that hear of it from node 0, whose store ends with its launcher."""
    nodes = network(3)
    processes = training(long, nodes)
    nodes[2].kill()
    for process in processes[:2]:
        _, stderr = process.ends(4)
        assert re.match(r"error: node 2 \(n2\): not heard of for \d+ s: ", stderr), stderr


@pytest.mark.parametrize("fault", ["power off", "frozen", "cut off"])
def test_the_same_command_goes_on_where_a_machine_was_lost(fault, checkout, network):
    checkout.prepare(
        small(numerics=["exact"], epochs=60, timeout_s=TIMEOUT_S, checkpoint_every_steps=10, repeats=1,
              model=slow_model(checkout.folder))
    )  # fmt: skip
    alone = checkout.train_alone()
    nodes = network(2)
    with slowed(checkout.folder):
        processes = training(checkout, nodes, "--out-dir", "out")
        FAULTS[fault](nodes, processes)
        processes[0].ends(4)
    nodes[1].link("up")
    nodes[1].thaw()
    wait_for(nodes[1].is_idle)
    all_end(checkout.train_on(nodes, "--num-devices", 1, "--no-tracking", "--out-dir", "out"))
    record = json.loads((checkout.folder / "out/run.json").read_text())
    assert [note["kind"] for note in record["notes"]] == ["resumed"]
    assert checkout.weights("out") == alone
    assert checkout.checkpoints() == []


def test_a_training_that_was_stopped_goes_on_with_fewer_machines(checkout, network, tmp_path):
    """On three, then on two of which the first is another one with a copy of the checkpoints, then on one alone."""
    model = slow_model(checkout.folder)
    checkout.prepare(small(numerics=["exact"], epochs=120, checkpoint_every_steps=10, repeats=1, model=model))
    alone = checkout.train_alone()
    nodes = network(3)
    for signum, rank, team in ((signal.SIGINT, 2, nodes), (signal.SIGTERM, 0, nodes[1:])):
        known = {file.name for file in checkout.checkpoints()}
        with slowed(checkout.folder):
            processes = checkout.train_on(team, "--num-devices", 1, "--no-tracking", "--out-dir", "out")
            wait_for(partial(new_checkpoints, checkout, known))
            processes[rank].signal(signum)
            all_end(processes, 128 + signum)
        moved = tmp_path / "copied" / str(rank)
        shutil.copytree(checkout.folder / ".samebits/resume", moved)
        shutil.rmtree(checkout.folder / ".samebits/resume")
        shutil.copytree(moved, checkout.folder / ".samebits/resume")
    assert checkout.train_alone("out") == alone
    assert len(json.loads((checkout.folder / "out/run.json").read_text())["notes"]) == 1


# -- what must be the same --------------------------------------------------------------------------------------


def other_params(folder):
    params = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(params.replace("epochs: 20000", "epochs: 3"))
    return {}


def other_code(folder):
    file = folder / "src/samebits/training/loop.py"
    file.write_text(file.read_text() + "# other\n")
    return {"PYTHONPATH": str(folder / "src")}


def other_commit(folder):
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "x")
    return {}


def other_patch(folder):
    (folder / "notes.py").write_text("not = 'committed'")
    return {}


def other_image(folder):
    return {"SAMEBITS_IMAGE_ID": "sha256:other"}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (other_params, 2, r"params train\.epochs: node 0 \(n0\) has 20000, node 1 \(n1\) has 3\."),
        (other_code, 2, r"changes on top of the commit: node 0 \(n0\) has None, node 1 \(n1\) has \w{12}\."),
        (other_patch, 2, r"changes on top of the commit: node 0 \(n0\) has None, node 1 \(n1\) has \w{12}\."),
        (other_commit, 2, r"commit: node 0 \(n0\) has \w{40}, node 1 \(n1\) has \w{40}\."),
        (other_image, 3, r"image: node 0 \(n0\) has None, node 1 \(n1\) has sha256:other\."),
    ],
)
def test_machines_that_differ_say_in_what(change, code, message, long, network, tmp_path):
    long.commit()
    nodes = network(2)
    other = tmp_path / "disk of n1"
    shutil.copytree(long.folder, other)
    environ = change(other)
    nodes[1].disks[long.folder] = other
    for _, _, stderr in all_end(long.train_on(nodes, "--num-devices", 1, environs=[{}, environ]), code):
        assert re.search(rf"^error: {message} hint: ", stderr, re.MULTILINE), stderr
    assert not (long.folder / "runs").exists()


def test_machines_with_unequal_numbers_of_devices_are_refused_in_fast(long, network):
    nodes = network(2)
    started = [
        long.train(
            node, "--nodes", 2, "--node-rank", rank, "--master", "n0", "--num-devices", rank + 1, numerics="fast"
        )
        for rank, node in enumerate(nodes)
    ]
    for process in started:
        _, stderr = process.ends(2)
        assert "error: fast needs as many devices on each machine, and they have: n0 1, n1 2. hint: " in stderr


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_strategy_of_one_machine_is_refused_on_several(strategy, long, network):
    for process in long.train_on(network(2), strategy=strategy):
        _, stderr = process.ends(2)
        assert f"{strategy} uses one machine, and 2 were started" in stderr


# -- where they do not find each other ----------------------------------------------------------------------------


def listener(machine, port, cwd):
    """Something else that listens at a port."""
    script = f"import socket, time; s = socket.create_server(('', {port})); print('up', flush=True); time.sleep(3600)"
    process = machine.start(sys.executable, "-c", script, cwd=cwd)
    assert process.popen.stdout.readline() == "up\n"
    return process


@pytest.fixture
def unhurried(long):
    """A checkout whose trainings wait for others longer than any test."""
    params = long.folder / "params.yaml"
    params.write_text(params.read_text().replace(f"timeout_s: {TIMEOUT_S}", "timeout_s: 36000"))
    return long


def said_alone(code, long, node, *options):
    """Train on one node, which waits for others for train.timeout_s, and check the exit code; its stderr."""
    environ = {"SAMEBITS_START_SECONDS": "0"}
    return long.train(node, *options, "--num-devices", 1, "--no-tracking", environ=environ).ends(code)[1]


def test_a_name_of_the_loopback_interface_is_refused_at_once(unhurried, network):
    (node,) = network(1)
    stderr = said_alone(2, unhurried, node, "--nodes", 2, "--node-rank", 0, "--master", "n0-itself")
    assert "error: n0-itself is 127.0.1.1 on this machine, where no other one reaches it. hint: " in stderr


def test_an_address_that_is_not_node_0s_is_refused_at_once(unhurried, network):
    nodes = network(2)
    stderr = said_alone(3, unhurried, nodes[0], "--nodes", 2, "--node-rank", 0, "--master", "n1")
    assert "error: n1 (10.77.0.11:29500) is no address of this machine, which is node 0" in stderr
    assert "hint: it has 10.77.0.10 (eth0)" in stderr


def test_a_port_in_use_is_said_at_once(unhurried, network):
    (node,) = network(1)
    listener(node, 29500, unhurried.folder)
    stderr = said_alone(3, unhurried, node, "--nodes", 2, "--node-rank", 0, "--master", "n0")
    assert "error: port 29500 is in use on this machine, node 0. hint: " in stderr


def test_a_name_server_that_does_not_answer_is_said(unhurried, network):
    nodes = network(2)
    (nodes[1].folder / "resolv.conf").write_text("nameserver 10.77.0.10\n")  # where nothing answers
    nodes[0].drop("-p", "udp", "--dport", "53")
    stderr = said_alone(3, unhurried, nodes[1], "--nodes", 2, "--node-rank", 1, "--master", "elsewhere")
    assert "error: no name server answered for elsewhere within 5 s. hint: give its address" in stderr


def test_a_name_that_is_not_known_is_said(long, network):
    (node,) = network(1)
    stderr = said_alone(3, long, node, "--nodes", 2, "--node-rank", 1, "--master", "elsewhere")
    assert "error: elsewhere is no host that this machine knows: " in stderr


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("nobody", "nothing listens there"),
        ("firewall", "no answer"),
        ("no machine", "no route to host"),
        ("no network", "network is unreachable"),
    ],
)
def test_a_node_0_that_is_not_found_is_said_soon_and_in_the_end(fault, problem, long, network):
    nodes = network(2)
    master = {"no machine": "10.77.0.99", "no network": "192.0.2.1"}.get(fault, "n0")
    if fault == "firewall":
        nodes[0].drop("-p", "tcp", "--dport", "29500")
    stderr = said_alone(3, long, nodes[1], "--nodes", 2, "--node-rank", 1, "--master", master)
    place = f"{master} (10.77.0.10:29500)" if master == "n0" else f"{master}:29500"
    assert re.search(rf"^waiting for node 0 at {re.escape(place)}: {problem}\. hint: ", stderr, re.MULTILINE), stderr
    assert re.search(
        rf"^error: node 0 at {re.escape(place)}: {problem}, for {TIMEOUT_S} s\. hint: ", stderr, re.MULTILINE
    )


def test_a_firewall_at_the_workers_ports_is_said_before_a_worker_starts(unhurried, network):
    """Node 0's port is open, so that all come together; gloo would wait, and not say for what."""
    nodes = network(3)
    nodes[2].drop("-p", "tcp", "--source", nodes[1].address, "--syn")
    for process in unhurried.train_on(nodes, "--num-devices", 1, "--no-tracking"):
        _, stderr = process.ends(3)
        line = r"^error: 10\.77\.0\.11 does not reach port \d+ of 10\.77\.0\.12: no answer\. hint: open all ports among"
        assert re.search(line, stderr, re.MULTILINE), stderr


def test_a_machine_that_does_not_come_is_named(long, network):
    nodes = network(2)
    stderr = said_alone(3, long, nodes[0], "--nodes", 3, "--node-rank", 0, "--master", "n0")
    assert "waiting at n0 (10.77.0.10:29500) for nodes 1, 2 of 3\n" in stderr
    assert f"error: nodes 1, 2 of 3 did not come to n0 (10.77.0.10:29500) within {TIMEOUT_S} s. hint: " in stderr


def test_two_machines_of_one_number_are_refused(long, network):
    nodes = network(3)
    ranks = [0, 1, 1]
    started = [
        long.train(node, "--nodes", 3, "--node-rank", rank, "--master", "n0", "--no-tracking")
        for node, rank in zip(nodes, ranks, strict=True)
    ]
    ended = all_end(started, 2)
    assert all("a node 1 has come to n0 (10.77.0.10:29500) already" in stderr for _, _, stderr in ended), ended
