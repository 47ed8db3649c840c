"""Where launchers meet, while the machines of a training start one after the other."""

import multiprocessing
import re
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore, TCPStore

from conftest import wait_for
from samebits.errors import HostError, UserError
from samebits.host import addresses
from samebits.host.cluster_environment import Nodes
from samebits.workers import rendezvous
from samebits.workers.board import PeerError, Report
from samebits.workers.rendezvous import Rendezvous

NOBODY = "192.0.2.1"  # an address that no machine has


@pytest.fixture
def stale(monkeypatch):
    """A name server that knows so often only where node 0 was before."""
    real = socket.getaddrinfo

    def know(times):
        left = [NOBODY] * times

        def look_up(name, *arguments, **options):
            ip = (left.pop() if left else "127.0.0.1") if name == "localhost" else name
            return real(ip, *arguments, **options)

        monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)

    for name, seconds in {"_AGAIN_SECONDS": 0.05, "_TRY_SECONDS": 0.2}.items():
        monkeypatch.setattr(rendezvous, name, seconds)
    return know


@pytest.fixture
def meet(port):
    """The rendezvous of one of two machines."""

    def come(rank, *, seconds=200, **options):
        return Rendezvous(Nodes(count=2, rank=rank, master="localhost", port=port, **options), seconds=seconds)

    return come


@pytest.fixture
def pair(meet):
    with meet(0) as first, meet(1) as second:
        yield first, second


def join(*machines):
    for here in machines:
        here.join()


def shared(first, second):
    """What each of two machines hears of the other's facts."""
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(first.share, "facts", "a")
        return second.share("facts", "b"), told.result()


def test_a_name_is_looked_up_again_while_machines_start(stale, meet, port):
    """As after a Job whose pods had the same names: name servers still speak of those."""
    stale(3)
    with meet(0, start_seconds=400, seconds=1) as first:
        assert str(first.address) == f"localhost (127.0.0.1:{port})"
        stale(3)
        with meet(1, start_seconds=400, seconds=1) as second:
            assert second.address == first.address


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, r"localhost \(192\.0\.2\.1:\d+\) is no address of this machine"), (1, r"node 0 at localhost \(192\.0\.2\.1:")],
)
def test_an_address_is_taken_at_its_word_where_machines_have_started(rank, message, stale, meet):
    stale(1)
    with pytest.raises(HostError, match=message):
        meet(rank, seconds=0.5)


def test_whoever_waits_hears_that_node_0_is_gone(pair, port):
    first, second = pair
    first.close()
    with pytest.raises(PeerError) as caught:
        second.join()
    assert caught.value.message == f"node 0: it has left localhost (127.0.0.1:{port})"
    assert (caught.value.hint, caught.value.exit_code) == ("see what it says", 4)


def test_whoever_comes_while_node_0_ends_hears_why(meet):
    """Also if another node was the cause."""
    told = Report.of(UserError("of node 7", hint=""), 7)
    for error, said in (
        (UserError("a key is missing", hint=""), "a key is missing"),
        (PeerError(told, "x"), "of node 7"),
    ):
        first = meet(0)
        first.join()
        with ThreadPoolExecutor(1) as pool:
            ends = pool.submit(first.__exit__, type(error), error, None)
            with meet(1) as second:
                second.join()
                wait_for(second.reports)
                assert [report.message for report in second.reports()] == [said]
            ends.result()


def test_whoever_comes_later_is_sent_away_and_those_that_train_hear_nothing(pair, meet, port):
    """As the same command started again: its node 0 finds the port in use, and its node 1 finds this store."""
    first, second = pair
    join(first, second)
    shared(first, second)
    first.close_door()
    with pytest.raises(UserError) as caught, meet(1) as late:
        late.join()
    assert caught.value.message == f"a training is under way at localhost (127.0.0.1:{port})"
    assert first.reports() == second.reports() == []


def test_once_a_thread_has_the_store_the_end_does_not_ask_it(meet):
    """A call of it may never come back where the link is down."""
    with meet(0) as first:
        second = meet(1)
        second.hand_over()
        second.__exit__(UserError, UserError("a signal", hint=""), None)
        assert first.reports() == []
        first.__exit__(UserError, UserError("another", hint=""), None)


def test_two_of_one_number_are_told_to_all_before_they_have_met(pair, meet, port):
    first, second = pair
    join(first, second)
    with pytest.raises(UserError) as caught, meet(1) as same:
        same.join()
    assert caught.value.message == f"a node 1 has come to localhost (127.0.0.1:{port}) already"
    assert [report.message for report in first.reports()] == [caught.value.message]


def test_a_signal_while_the_store_starts_leaves_no_process(meet, monkeypatch):
    """One that multiprocessing waited for, at the end of this process, and that ignores its signal."""

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.connection.Connection, "recv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        meet(0)
    assert multiprocessing.active_children() == []


class Talks(socketserver.BaseRequestHandler):
    """Says something else than a store would, and hangs up."""

    def handle(self):
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("talks", "slack", "why"),
    [(True, 30, "Ping failed, .*|Broken pipe|Connection reset by peer"), (False, 0.1, "no store has answered for 1 s")],
)
@pytest.mark.attack("a stranger on the network")
def test_something_else_that_listens_there_is_no_node_0(talks, slack, why, meet, port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SLACK_SECONDS", slack)
    threads = set(threading.enumerate())
    with socketserver.TCPServer(("127.0.0.1", port), Talks) as other:
        if talks:
            threading.Thread(target=other.serve_forever, args=[0.01]).start()
        with pytest.raises(HostError) as caught:
            meet(1, seconds=1)
        if talks:
            other.shutdown()
    wait_for(lambda: set(threading.enumerate()) <= threads)  # in a process that forks
    where = re.escape(f"localhost (127.0.0.1:{port})")
    assert re.fullmatch(f"what listens at {where} is no node 0: ({why})", caught.value.message)
    assert caught.value.hint == "give another port on all machines"


@pytest.mark.attack("a stranger on the network")
def test_node_0_listens_at_its_own_address_alone(meet, port):
    with meet(0), socket.create_server(("127.0.0.2", port)):
        pass


def store_at(port):
    return PrefixStore("samebits/0/", TCPStore("127.0.0.1", port, is_master=False))


@pytest.mark.parametrize(
    "attack",
    [
        lambda store: store.add("joined/1", 1),
        lambda store: store.set("joined/1", "me"),
        lambda store: store.set("met", ""),
        lambda store: store.set("facts/1", '"false"'),
        lambda store: [store.set(f"reports/1/{node}", "[[1, {}]]") for node in range(2)],
        lambda store: store.add("reports", 7),
        lambda store: store.set("busy", "x"),
    ],
)
@pytest.mark.attack("a stranger on the network")
def test_what_a_stranger_writes_is_not_heard(attack, meet, port, monkeypatch):
    """Somebody on the network who does not know the machines' secret."""
    monkeypatch.setenv("SAMEBITS_SECRET", "of the machines")
    with meet(0) as first, meet(1) as second:
        attack(store_at(port))
        join(first, second)
        assert shared(first, second) == (["a", "b"], ["a", "b"])
        assert first.reports() == second.reports() == []


@pytest.mark.attack("a stranger on the network")
def test_machines_with_other_secrets_do_not_meet(meet, monkeypatch):
    monkeypatch.setenv("SAMEBITS_SECRET", "one")
    with meet(0, seconds=0.5) as first:
        monkeypatch.setenv("SAMEBITS_SECRET", "another")
        with meet(1) as second:
            join(first, second)
            with pytest.raises(HostError, match=r"node 1 of 2 came to .* with another SAMEBITS_SECRET") as caught:
                first.share("facts", "a")
    assert caught.value.hint == "give all machines the same one"


@pytest.mark.parametrize("copied", [["facts/1"], ["joined/1", "facts/1"], ["joined/0", "joined/1", "facts/1"]])
@pytest.mark.attack("a stranger on the network")
def test_what_was_signed_in_another_training_of_the_same_secret_is_not_heard(copied, meet, port, monkeypatch):
    monkeypatch.setenv("SAMEBITS_SECRET", "of both")
    with meet(0) as first, meet(1) as second:
        join(first, second)
        shared(first, second)
        said = {key: store_at(port).get(key) for key in copied}
    with meet(0, seconds=1) as first, meet(1) as second:
        join(first, second)
        for key, text in said.items():
            store_at(port).set(key, text)
        with pytest.raises(HostError, match=r"node 1 of 2 came to .* with another SAMEBITS_SECRET"):
            first.share("facts", "a")


@pytest.mark.attack("a stranger on the network")
def test_no_failure_of_another_training_of_the_same_secret_is_believed(meet, port, monkeypatch):
    """Nor that one is under way."""
    monkeypatch.setenv("SAMEBITS_SECRET", "of both")
    keys = [f"reports/{node}/{told}" for node in range(2) for told in range(2)]
    with meet(0) as first, meet(1) as second:
        join(first, second)
        shared(first, second)
        first.close_door()
        for here in (first, second):
            here.report(Report.of(UserError(f"of {here.nodes.rank}", hint=""), here.nodes.rank))
        said = {key: store_at(port).get(key) for key in [*keys, "met"]}
    with meet(0) as first, meet(1) as second:
        store_at(port).add("reports", 4)
        for key, text in said.items():
            store_at(port).set(key, text)
        join(first, second)
        assert shared(first, second) == (["a", "b"], ["a", "b"])
        assert first.reports() == second.reports() == []
        second.report(Report.of(UserError("of today", hint=""), 1))
        assert [told.message for told in first.reports()] == ["of today"]


@pytest.mark.timeout(150)  # less than the 200 s that it would wait once more
@pytest.mark.attack("a stranger on the network")
def test_nobody_is_waited_for_because_another_training_was_busy(meet, port, monkeypatch, capsys):
    monkeypatch.setenv("SAMEBITS_SECRET", "of both")
    monkeypatch.setattr(rendezvous, "_BUSY_SECONDS", 0.01)
    monkeypatch.setattr(addresses, "_SAY_SECONDS", 0.0)
    with meet(0) as first, meet(1) as second:
        join(first, second)
        with second.busy():
            wait_for(second._beat)
        busy = store_at(port).get("busy")
    with meet(0, seconds=200) as first:
        first.join()
        store_at(port).set("busy", busy)
        store_at(port).set("joined/1", "x")
        first._deadline = time.monotonic() + 0.5
        with pytest.raises(HostError, match=r"node 1 of 2 came to .* with another SAMEBITS_SECRET"):
            first.share("facts", "a")
    assert "what came for node 1 of 2 is not signed with this SAMEBITS_SECRET" in capsys.readouterr().err


def test_who_starts_late_is_waited_for_as_long_as_starts_take(meet):
    """And not for train.timeout_s alone."""
    late = pytest.raises(HostError, match=r"node 1 of 2 did not come to localhost \(.*\) within 2 s")
    with meet(0, start_seconds=2, seconds=0.1) as first, late:
        first.join()
        first.share("facts", 1)


@pytest.mark.timeout(150)  # less than the 200 s that it would wait once more for work that is over
def test_a_node_that_is_at_work_is_waited_for(pair, monkeypatch):
    """As one that makes its data: also when the time in which it was to come is over."""
    monkeypatch.setattr(rendezvous, "_BUSY_SECONDS", 0.01)
    first, second = pair
    join(first, second)
    first._deadline = 0.0
    with ThreadPoolExecutor(1) as pool:
        with second.busy():
            wait_for(second._beat)
            told = pool.submit(first.share, "facts", "a")
            wait_for(lambda: first._heard)
        assert (second.share("facts", "b"), told.result()) == (["a", "b"], ["a", "b"])
    first._deadline = 0.0
    with pytest.raises(HostError, match="node 1 of 2 did not come"):
        first.share("more", "a")
