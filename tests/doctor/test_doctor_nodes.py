"""What the doctor says of machines that do not connect or measure; tests/system/nodes has such as do."""

import threading

from torch.distributed import HashStore

from samebits.doctor import pairs
from samebits.doctor.nodes import _joined, _of_pair
from samebits.doctor.pairs import NodePair, _measure, _unreachable
from samebits.host.cluster_environment import Nodes
from samebits.workers.rendezvous import Rendezvous
from samebits.workers.world import environment_of


def test_what_gloo_says_of_a_pair_is_its_problem(monkeypatch):
    """Each reaches the other's ports, and gloo is told of an interface that is not there."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    store = HashStore()
    other = threading.Thread(target=_unreachable, args=(store, 1))
    other.start()
    pair = _measure(store, 0, NodePair(first=0, second=1, backend="gloo"))
    other.join()
    assert "no-such-one" in pair.problem
    assert (pair.round_trip_seconds, pair.bytes_per_second) == (None, None)


def test_a_pair_is_told_by_the_medians_of_its_measurements(monkeypatch):
    monkeypatch.setattr(pairs, "_unreachable", lambda store, rank: "")
    monkeypatch.setattr(pairs.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(pairs, "_times", lambda device, rank: [*[0.002] * 99, 9.0, *[0.5] * 4, 9.0])
    finding = _of_pair(_measure(HashStore(), 0, NodePair(first=0, second=1, backend="gloo")), ["n0", "n1"])
    assert (finding.name, finding.status) == ("n0 - n1", "ok")
    assert finding.text == "gloo: a round trip takes 2 ms, an all-reduce of 16 MiB runs at 0.0336 GB/s"


def test_nodes_that_never_measure_are_a_finding(port, monkeypatch):
    """The third machine, while the first two have not measured."""
    monkeypatch.setattr(pairs, "PAIR_SECONDS", 0.1)
    nodes = [Nodes(count=3, rank=rank, master="localhost", port=port) for rank in range(3)]
    with Rendezvous(nodes[0], seconds=20) as meeting:
        environment = environment_of(nodes[2], meeting.address)
        (finding,) = _joined(nodes[2], ["n0", "n1", "n2"], environment, with_gpus=False)
    assert (finding.name, finding.status, finding.exit_code) == ("gloo", "failed", 3)
    assert finding.text == "nodes 0 and 1 have not measured for 0.3 s"
    assert finding.hint == "see what the other machines say"


def test_a_pair_with_a_problem_fails_with_a_hint():
    finding = _of_pair(NodePair(first=0, second=2, backend="gloo", problem="no such interface"), ["n0", "n1", "n2"])
    assert (finding.name, finding.status) == ("n0 - n2", "failed")
    assert finding.text == "gloo does not connect them: no such interface"
    assert "GLOO_SOCKET_IFNAME" in finding.hint
