"""Watches the launchers of the other machines during a training: which are alive, which failed, which are done.

Once the workers are forked, a thread talks to the store, because a call over a broken link does not return. The
launcher only reads what the thread has received.
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
LOST_SECONDS = 3.0  # without a beat, after a collective has failed: some machine must be the cause
LEAVE_SECONDS = 10.0  # for which node 0 waits until the others have received its last message
_POLL_SECONDS = 0.05
_AWAKE_SECONDS = 1.0  # longest time between two ticks that counts: Ctrl-Z stops the launcher too
State = Literal["training", "done", "left"]
_HINT = "run the same command again on every machine; it goes on from a checkpoint"


class Peers:
    """The launchers of the other machines. This class is for a training on one machine: its methods do nothing.

    There, a failure is its own cause, the workers have received each signal already, and the sender reads the counters.
    """

    def watch(self) -> None:
        """Start to listen; nothing may be forked from here on."""

    def check(self) -> None:
        """Raise if another machine failed or is lost."""

    def cause(self, error: SamebitsError) -> WithHint:
        """Tell the others of a failure; return the one that came first on any machine."""
        return error

    def interrupted(self, signum: int) -> None:
        """Tell the others that a signal ended the training here."""

    def finish(self) -> None:
        """Return when all machines are done. Raises what ``check`` raises."""

    def leave(self) -> None:
        """Leave, once the other machines have received every message."""

    def on_sample(self, take: Callable[[str, Sample], object]) -> None:
        """Have ``check`` call ``take`` with the name of another machine and each of its samples."""


class PeerMonitor(Peers):
    """The launchers of several nodes after their rendezvous; ``names`` are the names of all nodes.

    Each node has a key in the store with its beat: a number that counts up, and the node's state. ``gpus`` are the GPUs
    that this node uses.
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
        self._clock, self._looked = 0.0, time.monotonic()  # the clock pauses while this process is stopped
        self._answered = 0.0  # when the store answered last, by that clock
        self._nodes = [_Node() for _ in names]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True, name="peers")

    def watch(self) -> None:
        """Start the thread that talks to the store; nothing may be forked from here on."""
        self._looked = time.monotonic()
        self._rendezvous.hand_over()
        self._thread.start()

    def check(self) -> None:
        """Raise if another machine failed or is lost."""
        self._tick()
        for node, sample in self._samples.take():
            self._take(self._names[node], sample)
        if report := root_cause(self._reports) or self._lost(self._timeout_s):
            raise self._error(report)

    def on_sample(self, take: Callable[[str, Sample], object]) -> None:
        """Have ``check`` call ``take`` with each new sample."""
        self._take = take

    def cause(self, error: SamebitsError) -> WithHint:
        """The failure that came first. A node that waited in vain for another learns the cause last."""
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
        """Return when all machines are done."""
        self._outbox.put("done")
        while not all(node.state in ("done", "left") for node in self._nodes):
            self.check()
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Leave; node 0, which hosts the store, waits until the others have left."""
        self._outbox.put("left")
        if self._thread.ident is None:  # the workers could not be forked, and the others must be told
            self.watch()
        awaited = self._nodes if self._rank == 0 else [self._nodes[self._rank]]
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._tick()
            if all(node.state == "left" or self._clock - node.heard > LOST_SECONDS for node in awaited):
                break
            time.sleep(_POLL_SECONDS)
        self._stop.set()
        self._thread.join(4 * BEAT_SECONDS)  # a thread that returns to Python during its shutdown aborts the process
        self._rendezvous.close()

    def _tick(self) -> None:
        now = time.monotonic()
        self._clock += min(now - self._looked, _AWAKE_SECONDS)
        self._looked = now

    def _lost(self, seconds: float) -> Report | None:
        """A report of a node that has sent nothing new for so long, if there is one."""
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
        """Send and receive until this node leaves or the store is gone."""
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
    """The last beat of a node, its state, and when the beat changed."""

    beat: str = ""
    state: State = "training"
    heard: float = 0.0

    def hear(self, beat: str | None, now: float) -> None:
        """Update from the text of its key."""
        if beat is not None and beat != self.beat:
            self.beat, self.heard = beat, now
            self.state = cast("State", beat.partition(" ")[2] or "training")


def _loss(node: int, text: str) -> Report:
    return Report(node=node, message=text, hint=_HINT, exit_code=WorkerError.exit_code, waited=False)


def _waited(error: SamebitsError) -> bool:
    """Whether an error only says that another rank did not answer; NCCL says so by SIGABRT."""
    return isinstance(error, CollectiveError) or getattr(error, "signum", None) == signal.SIGABRT
