"""The number of machines and this one's rank, from torchrun, Slurm, a container or options."""

import socket
import threading
from types import SimpleNamespace

import pytest

from samebits.errors import HostError, UserError
from samebits.host import addresses
from samebits.host.addresses import Address
from samebits.host.cluster_environment import Nodes, find_nodes

TORCHRUN = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n0", "PET_MASTER_PORT": "29501"}
AGENT = {
    "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "n0", "MASTER_PORT": "29502", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_JOB_ID": "40017", "SLURM_NNODES": "3",
}  # fmt: skip
START = {"SAMEBITS_START_SECONDS": "40"}


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ((), {}, Nodes()),
        ((), TORCHRUN, Nodes(count=2, rank=1, master="n0", port=29501)),
        ((), {**TORCHRUN, "PET_NNODES": "2:2", **STEP}, Nodes(count=2, rank=1, master="n0", port=29501)),
        ((), {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "gpu"}, Nodes(num_devices="auto")),
        ((), {**TORCHRUN, "PET_NPROC_PER_NODE": "4"}, Nodes(count=2, rank=1, master="n0", port=29501, num_devices="4")),
        ((), AGENT, Nodes(count=2, rank=1, master="n0", port=29502, served=True)),
        ((), STEP, Nodes(count=2, rank=1, master="n0", port=20017)),
        ((), {**STEP, "PET_MASTER_ADDR": "n9"}, Nodes(count=2, rank=1, master="n9", port=20017)),
        ((), {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, Nodes()),
        ((), {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, Nodes()),  # a batch script, outside of any step
        ((), {"SLURM_STEP_ID": "0"}, Nodes()),
        ((3, 2, "10.0.0.1"), TORCHRUN, Nodes(count=3, rank=2, master="10.0.0.1")),
        ((3, 2, "n0:65535"), {}, Nodes(count=3, rank=2, master="n0", port=65535)),
        ((3, 2, "[fd00::1]:29600"), {}, Nodes(count=3, rank=2, master="fd00::1", port=29600)),
        ((3, 2, "fd00::1"), {}, Nodes(count=3, rank=2, master="fd00::1")),
        ((1, 0, None), {}, Nodes()),
        ((), {**TORCHRUN, **START}, Nodes(count=2, rank=1, master="n0", port=29501, start_seconds=40)),
        ((), {**STEP, **START}, Nodes(count=2, rank=1, master="n0", port=20017, start_seconds=40)),
        ((3, 2, "fd00::1"), START, Nodes(count=3, rank=2, master="fd00::1", start_seconds=40)),
        ((), START, Nodes()),
    ],
)
def test_the_nodes_are_found(options, environ, expected):
    assert find_nodes(*options, environ=environ) == expected
    if expected.several and not expected.served:
        assert find_nodes(environ=expected.environ()) == expected


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ((2, None, None), {}, "--nodes, --node-rank and --master are given together or not at all"),
        ((2, 2, "n0"), {}, "--node-rank: got 2, accepts 0 to 1"),
        ((0, 0, "n0"), {}, "--nodes: got 0, accepts 1 or more"),
        ((2, 0, ":29500"), {}, "--master: got :29500, expected a host"),
        ((2, 0, "n0:0"), {}, "the port of --master: got 0, accepts 1 to 65535"),
        ((2, 0, "n0:65536"), {}, "the port of --master: got 65536, accepts 1 to 65535"),
        ((), {"PET_NNODES": "1:4"}, "PET_NNODES: got 1:4, accepts one number"),
        ((), {"PET_NNODES": "two"}, "PET_NNODES: got two, expected a number"),
        ((), {"PET_NNODES": "2"}, "PET_MASTER_ADDR is not set, and there are 2 machines"),
        ((), {**TORCHRUN, "PET_NODE_RANK": "7"}, "PET_NODE_RANK: got 7, accepts 0 to 1"),
        ((), {**AGENT, "LOCAL_WORLD_SIZE": "2"}, "torchrun started 2 processes on this machine"),
        ((), {**STEP, "SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks on 2 machines"),
        ((), {**TORCHRUN, "SAMEBITS_START_SECONDS": "soon"}, "SAMEBITS_START_SECONDS: got soon, expected a number"),
    ],
)
def test_what_cannot_be_is_refused(options, environ, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        find_nodes(*options, environ=environ)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("n0", "n0"),
        ("n[0-1]", "n0"),
        ("n[3,7-9],m1", "n3"),
        ("gpu-a[008-012]", "gpu-a008"),
        ("rack[1-2]n[01-18],login", "rack1n01"),
        ("login,n[0-3]", "login"),
        ("r[1]-x.example.org", "r1-x.example.org"),
    ],
)
def test_the_first_of_slurms_hosts(names, first):
    """tests/system/nodes compares with a real Slurm."""
    environ = {**STEP, "SLURM_STEP_NODELIST": names, "PET_MASTER_PORT": "20500"}
    assert (find_nodes(environ=environ).master, find_nodes(environ=environ).port) == (first, 20500)


@pytest.mark.parametrize(
    ("known", "ip"),
    [
        (["127.0.1.1", "10.9.9.9"], "10.9.9.9"),  # Debian's own line of /etc/hosts, and the cluster's
        (["fd00::1", "10.9.9.9"], "10.9.9.9"),
        (["127.0.0.1", "fd00::1"], "fd00::1"),
        (["::1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_a_name_with_several_addresses_is_the_one_that_others_reach(known, ip, monkeypatch):
    answers = [
        (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in known
    ]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: answers)
    assert addresses._resolve("n0", 0) == ip


def test_an_address_is_told_with_the_name_that_it_was_given_by():
    assert str(Address("n0", "10.0.0.1", 29500)) == "n0 (10.0.0.1:29500)"
    assert str(Address("fd00::1", "fd00::1", 29500)) == "[fd00::1]:29500"


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "::1"])
def test_the_loopback_interface_serves_where_it_was_meant(master, port):
    if master == "::1" and ("lo", master) not in addresses.interfaces():
        pytest.skip("this host's loopback interface has no address of IPv6")
    address = Address.of(Nodes(count=2, master=master, port=port))
    address.check_mine()
    assert address.interface() == "lo"
    assert ("lo", address.ip) in addresses.interfaces()


# -- names that come to be known ------------------------------------------------------------------------------------


def answer(ip):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0))]


@pytest.fixture
def name_server(monkeypatch):
    """Give one answer after the other, and the last one from then on: an address, or None for an unknown name."""

    def give(*answers, after=None):
        left, asked = list(answers), []

        def look_up(name, *_, **__):
            asked.append(name)
            if after:
                after.wait()
            ip = left.pop(0) if len(left) > 1 else left[0]
            if ip is None:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return answer(ip)

        monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
        return asked

    monkeypatch.setattr(addresses, "_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(addresses, "_SAY_SECONDS", 0.02)
    return give


def test_a_name_may_come_to_be_known_while_machines_start(name_server, capsys):
    asked = name_server(None, None, None, None, "10.0.0.7")
    assert Address.of(Nodes(count=2, master="n0.pods", start_seconds=40)) == Address("n0.pods", "10.0.0.7", 29500)
    assert asked == ["n0.pods"] * 5
    said = "waiting: n0.pods is no host that this machine knows: Name or service not known\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("start_seconds", "least"), [(0, 1), (1, 10)])
def test_a_name_that_stays_unknown_is_said(start_seconds, least, name_server, monkeypatch):
    asked, slept = name_server(None), []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(addresses, "time", clock)
    message = "n0.pods is no host that this machine knows: Name or service not known. hint: give its address"
    with pytest.raises(HostError, match=message):
        Address.of(Nodes(count=2, master="n0.pods", start_seconds=start_seconds))
    assert len(asked) == 1 if least == 1 else len(asked) >= least
    assert start_seconds <= clock.monotonic() < start_seconds + 5


def test_a_slow_name_server_is_asked_once_at_a_time(name_server, monkeypatch):
    """No thread is left when workers are forked."""
    monkeypatch.setattr(addresses, "_RESOLVE_SECONDS", 0.1)
    before = set(threading.enumerate())
    said, texts = threading.Event(), set()
    monkeypatch.setattr(addresses.Waiting, "say", lambda _, text: (texts.add(text), said.set()))
    asked = name_server("10.0.0.7", after=said)
    assert Address.of(Nodes(count=2, master="n0.pods", start_seconds=40)).ip == "10.0.0.7"
    assert asked == ["n0.pods"]
    assert set(threading.enumerate()) <= before
    assert texts == {"waiting: no name server answered for n0.pods within 0.1 s"}
