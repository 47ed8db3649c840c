"""What the launcher of one machine knows of the others' while their workers train: who is there, failed, or is done.

A thread does the talking once the workers are forked, since a store behind a link that is down does not return. The
launcher only looks at what the thread has heard.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from samebits.errors import CollectiveError, Interrupted, SamebitsError, WithHint, WorkerError
from samebits.workers.board import PeerError, Report, SampleExchange, root_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.workers.board import Sample
    from samebits.workers.rendezvous import Rendezvous

BEAT_SECONDS = 0.5
LOST_SECONDS = 3.0  # without a beat, once a collective has failed: then somebody must be the cause
LEAVE_SECONDS = 10.0  # that node 0 waits for the others to have heard what it told last
_POLL_SECONDS = 0.05
_AWAKE_SECONDS = 1.0  # the longest time between two looks that counts: Ctrl-Z stops the launcher too
State = Literal["training", "done", "left"]
_HINT = "run the same command again on every machine; it goes on from a checkpoint"


class Peers:
    """The launchers of the other machines; this class is for a training on one machine, where there are none.

    Every failure is then its own cause, workers here have had each signal already, and the sender samples the machine.
    """

    def watch(self) -> None:
        """Begin to listen; from here on nothing may be forked."""

    def check(self) -> None:
        """Raise what ended the training elsewhere, or that a machine is lost."""

    def cause(self, error: SamebitsError) -> WithHint:
        """Tell the others of a failure; return the one that came first on any machine."""
        return error

    def interrupted(self, signum: int) -> None:
        """Tell the others that a signal ended the training here."""

    def finish(self) -> None:
        """Return when all are done. Raises what ``check`` does."""

    def leave(self) -> None:
        """Let go of the others, when they have heard all that was told."""

    def on_sample(self, take: Callable[[str, Sample], object]) -> None:
        """Have ``check`` call ``take`` with the name of another machine and what it counts."""


class PeerMonitor(Peers):
    """The launchers of the other nodes after the rendezvous; ``names`` are those of all nodes.

    Each node's key in the store counts up, and says behind the number how far the node is. ``gpus`` are this one's in
    use.
    """

    def __init__(
        self, rendezvous: Rendezvous, names: Sequence[str], *, timeout_s: float, gpus: Sequence[int] = ()
    ) -> None:
        self._rendezvous, self._names, self._timeout_s = rendezvous, names, timeout_s
        self._rank = rendezvous.nodes.rank
        self._outbox: queue.SimpleQueue[Report | State] = queue.SimpleQueue()
        self._reports: list[Report] = []
        self._samples = SampleExchange(rendezvous.board, self._rank, len(names), gpus)
        self._take: Callable[[str, Sample], object] = lambda *_: None
        self._gone = False
        self._clock, self._looked = 0.0, time.monotonic()  # the clock stands while this process is stopped
        self._answered = 0.0  # when the store did
        self._nodes = [_Node() for _ in names]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True, name="peers")

    def watch(self) -> None:
        """Start the thread that talks with the store; from here on nothing may be forked."""
        self._looked = time.monotonic()
        self._rendezvous.hand_over()
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the training elsewhere, or that a machine is lost."""
        self._tick()
        for node, sample in self._samples.take():
            self._take(self._names[node], sample)
        if report := root_cause(self._reports) or self._lost(self._timeout_s):
            raise self._error(report)

    def on_sample(self, take: Callable[[str, Sample], object]) -> None:
        """Call it with those that ``check`` finds."""
        self._take = take

    def cause(self, error: SamebitsError) -> WithHint:
        """The failure that came first; whoever waited in vain for another is the last to know why."""
        told = error.report if isinstance(error, PeerError) else Report.of(error, self._rank)
        told = told.model_copy(update={"waited": told.waited or _waited(error)})
        deadline = time.monotonic() + LOST_SECONDS + 4 * BEAT_SECONDS
        while told.waited and time.monotonic() < deadline:
            self._tick()
            told = root_cause([told, *self._reports]) or told
            if told.waited:
                told = self._lost(LOST_SECONDS) or told
            time.sleep(_POLL_SECONDS)
        if told not in self._reports:
            self._outbox.put(told)
        return self._error(told, error.traceback)

    def interrupted(self, signum: int) -> None:
        """Tell the others that a signal ended the training here."""
        self._outbox.put(Report.of(Interrupted(signum), self._rank))

    def finish(self) -> None:
        """Return when all are done."""
        self._outbox.put("done")
        while not all(node.state in ("done", "left") for node in self._nodes):
            self.check()
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Let go of the others; node 0, whose store it is, waits until they have."""
        self._outbox.put("left")
        if self._thread.ident is None:  # the workers could not be forked, of which the others have to hear
            self.watch()
        awaited = self._nodes if self._rank == 0 else [self._nodes[self._rank]]
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._tick()
            if all(node.state == "left" or self._clock - node.heard > LOST_SECONDS for node in awaited):
                break
            time.sleep(_POLL_SECONDS)
        self._stop.set()
        self._thread.join(4 * BEAT_SECONDS)  # a thread that comes back to an interpreter that is going aborts it
        self._rendezvous.close()

    def _tick(self) -> None:
        now = time.monotonic()
        self._clock += min(now - self._looked, _AWAKE_SECONDS)
        self._looked = now

    def _lost(self, seconds: float) -> Report | None:
        """That a node was not heard of for so long."""
        text = f"not heard of for {seconds:g} s: it is down or stopped, or its network is"
        if self._gone:
            return _loss(0, "it is gone, and its store with it")
        if self._clock - self._answered > seconds:
            return _loss(0, text if self._rank == 0 else f"{text}, or that of node {self._rank}")
        for rank, node in enumerate(self._nodes):
            if rank != self._rank and node.state != "left" and self._clock - node.heard > seconds:
                return _loss(rank, text)
        return None

    def _error(self, report: Report, traceback: str | None = None) -> WithHint:
        error = report.error(self._names[report.node])
        error.traceback = traceback
        return error

    def _talk(self) -> None:
        """Tell and hear, until this node leaves or the store is gone."""
        number, state, board = 0, "training", self._rendezvous.board
        keys = [f"beat/{rank}" for rank in range(len(self._names))]
        try:
            while not self._stop.is_set():
                number += 1
                while not self._outbox.empty():
                    told = self._outbox.get()
                    if isinstance(told, Report):
                        self._rendezvous.report(told)
                    else:
                        state = told
                board.set(keys[self._rank], f"{number} {state}")
                self._reports = self._rendezvous.reports()
                for node, beat in zip(self._nodes, board.get_all(keys), strict=True):
                    node.hear(beat, self._clock)
                self._answered = self._clock
                self._samples.pass_on()
                self._stop.wait(BEAT_SECONDS if state == "training" else BEAT_SECONDS / 10)
        except RuntimeError:  # PyTorch's, of a connection that has closed
            self._gone = True


@dataclass
class _Node:
    """What was heard of a node last, and when it was something new."""

    beat: str = ""
    state: State = "training"
    heard: float = 0.0

    def hear(self, beat: str | None, now: float) -> None:
        """Take note of what its key holds."""
        if beat is not None and beat != self.beat:
            self.beat, self.heard = beat, now
            self.state = cast("State", beat.partition(" ")[2] or "training")


def _loss(node: int, text: str) -> Report:
    return Report(node=node, message=text, hint=_HINT, exit_code=WorkerError.exit_code, waited=False)


def _waited(error: SamebitsError) -> bool:
    """Whether an error only says that somebody did not answer; SIGABRT is NCCL's way to say it."""
    return isinstance(error, CollectiveError) or getattr(error, "signum", None) == signal.SIGABRT
