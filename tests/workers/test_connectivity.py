"""Machines that reach the store on node 0, but perhaps not each other. A real firewall is in tests/system/nodes."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from patience import patient
from samebits.errors import HostError
from samebits.host.cluster_environment import Nodes
from samebits.workers import connectivity
from samebits.workers.connectivity import knock, open_port, require_reach
from samebits.workers.rendezvous import Rendezvous

KNOCKING = threading.local()


@pytest.fixture
def machines(port):
    """What becomes of each of two machines that look whether they reach each other."""

    def meet(rank):
        return Rendezvous(Nodes(count=2, rank=rank, master="localhost", port=port), seconds=patient(60))

    def look(meeting):
        KNOCKING.rank = meeting.nodes.rank
        try:
            require_reach(meeting)
        except HostError as error:
            return error

    def run():
        with meet(0) as first, meet(1) as second, ThreadPoolExecutor(1) as pool:
            for here in (first, second):
                here.join()
            other = pool.submit(look, second)
            return [look(first), other.result()]

    return run


def test_machines_that_reach_each_other(machines):
    assert machines() == [None, None]


def test_all_machines_say_who_does_not_reach_whom(machines, monkeypatch):
    """Also the one that reaches the other."""
    monkeypatch.setattr(connectivity, "knock", lambda *place: "no way" if KNOCKING.rank == 1 else knock(*place))
    errors = machines()
    assert [(error.message, error.hint) for error in errors] == [("no way", connectivity.OPEN_PORTS)] * 2


def test_why_a_port_is_not_reached(monkeypatch):
    with open_port("127.0.0.1") as server:
        port = server.getsockname()[1]
        assert knock("127.0.0.1", "127.0.0.1", port) == ""
    assert knock("one", "127.0.0.1", port) == f"one does not reach port {port} of 127.0.0.1: connection refused"

    def silence(*place, timeout):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silence)
    assert knock("one", "two", 3) == "one does not reach port 3 of two: no answer"
