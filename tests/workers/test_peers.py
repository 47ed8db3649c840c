"""When the launcher of one machine says that another is lost, by a clock that the test moves."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from conftest import wait_for
from patience import patient
from samebits.errors import CollectiveError, WorkerError
from samebits.host.cluster_environment import Nodes
from samebits.workers import peers
from samebits.workers.board import PeerError
from samebits.workers.peers import PeerMonitor
from samebits.workers.rendezvous import Rendezvous

NAMES = ("one", "two", "three")
TIMEOUT_S = 10
LOST_SECONDS = 0.2  # not as many as in earnest, since each look takes some real time
BEAT_SECONDS = 0.01
TICK = 0.9  # less than what counts as a stop of the process


class Clock:
    """Stands until it is moved; sleeping moves it."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    monkeypatch.setattr(peers, "BEAT_SECONDS", BEAT_SECONDS)
    return clock


@pytest.fixture
def team(clock, port):
    """Launchers of three machines that have heard of each other; node 0's looks at nothing by itself."""
    meetings, launchers = [], []
    try:
        for rank in range(3):
            nodes = Nodes(count=3, rank=rank, master="localhost", port=port)
            meetings.append(Rendezvous(nodes, seconds=patient(60)))
            meetings[-1].join()
        with ThreadPoolExecutor(len(NAMES)) as pool:
            list(pool.map(lambda meeting: meeting.share("facts", 0), meetings))
        for meeting in meetings:
            launchers.append(PeerMonitor(meeting, NAMES, timeout_s=TIMEOUT_S))
            launchers[-1].watch()
        for launcher in launchers:
            wait_for(lambda launcher=launcher: all(node.beat not in ("", "0") for node in launcher._nodes))
        yield launchers
    finally:
        for launcher in launchers:
            stop(launcher)
        for meeting in reversed(meetings):
            meeting.close()


def stop(launcher):
    """As a machine that stands still does: it says nothing any more."""
    launcher._stop.set()
    launcher._thread.join()


def tick(launcher, clock, seconds=TICK):
    """Let the clock go on, and the launcher's thread hear what there is."""
    clock.now += seconds
    launcher._tick()
    answered = launcher._answered
    wait_for(lambda: launcher._answered != answered or not launcher._thread.is_alive())


def test_a_machine_that_is_not_heard_of_is_lost_as_soon_as_its_time_is_over(team, clock):
    first, second, _ = team
    stop(second)
    tick(first, clock)
    heard = first._nodes[1].heard

    def look_again():
        for _ in itertools.count():
            tick(first, clock)
            first.check()

    with pytest.raises(PeerError, match=rf"node 1 \(two\): not heard of for {TIMEOUT_S} s: it is down or") as lost:
        look_again()
    assert lost.value.exit_code == 4
    assert TIMEOUT_S < first._clock - heard <= TIMEOUT_S + 2 * TICK


def test_nobody_is_lost_while_all_are_heard_of(team, clock):
    first, *_ = team
    for _ in range(4 * TIMEOUT_S):
        tick(first, clock)
        wait_for(lambda: min(node.heard for node in first._nodes) >= first._clock - TICK)
        first.check()


def test_time_in_which_the_launcher_itself_was_stopped_does_not_count(team, clock):
    """Ctrl-Z stops it with its workers, and nothing of the others is heard meanwhile."""
    first, second, _ = team
    stop(second)
    clock.now += 1000 * TIMEOUT_S
    first.check()


@pytest.mark.parametrize(
    ("error", "lost"), [(CollectiveError("waited", hint=""), True), (WorkerError("mine", hint=""), False)]
)
def test_who_only_waited_names_the_machine_that_was_lost_meanwhile(error, lost, team, clock, monkeypatch):
    first, second, _ = team
    stop(second)
    monkeypatch.setattr(peers, "LOST_SECONDS", LOST_SECONDS)
    monkeypatch.setattr(clock, "sleep", lambda seconds: tick(first, clock, BEAT_SECONDS))
    begun = clock.now
    cause = first.cause(error)
    if lost:
        assert cause.message.startswith(f"node 1 (two): not heard of for {LOST_SECONDS:g} s")
        assert clock.now - begun <= LOST_SECONDS + 4 * BEAT_SECONDS
    else:
        assert (cause.message, clock.now) == ("node 0 (one): mine", begun)


def test_a_failure_elsewhere_is_everybodys(team, clock):
    first, second, third = team
    second.cause(WorkerError("out of luck", hint=""))
    for launcher in (first, third):
        wait_for(lambda launcher=launcher: launcher._reports)
        with pytest.raises(PeerError) as failed:
            launcher.check()
        assert failed.value.message == "node 1 (two): out of luck"
    assert first.cause(CollectiveError("waited", hint="")).message == "node 1 (two): out of luck"


def test_workers_that_cannot_be_forked_are_everybodys_failure(team, clock, port):
    """Then nobody has listened yet, and the launcher would leave without a word."""
    first, second, _ = team
    stop(second)
    forking = PeerMonitor(second._rendezvous, NAMES, timeout_s=TIMEOUT_S)
    cause = forking.cause(WorkerError("no process left", hint="raise ulimit -u"))
    forking.leave()
    assert cause.message == "node 1 (two): no process left"
    wait_for(lambda: first._reports)
    with pytest.raises(PeerError, match=r"node 1 \(two\): no process left"):
        first.check()
    assert not forking._thread.is_alive()


def test_a_store_that_closes_takes_node_0_along(team):
    first, second, _ = team
    first._rendezvous.close()
    wait_for(lambda: second._gone)
    with pytest.raises(PeerError, match=r"node 0 \(one\): it is gone, and its store with it"):
        second.check()


def test_samples_come_from_all_machines_but_this_one(team, clock):
    first, *_ = team
    taken = []
    first.on_sample(lambda name, sample: taken.append((name, sample)))
    first._samples = SimpleNamespace(take=lambda: [(1, "counted")], pass_on=lambda: None)
    first.check()
    assert taken == [("two", "counted")]
