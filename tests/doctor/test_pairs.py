"""Two machines that do not connect, as far as one machine shows it."""

import threading

from torch.distributed import HashStore

from samebits.doctor.pairs import NodePair, _measure, _unreachable


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
