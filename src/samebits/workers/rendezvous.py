"""The rendezvous of the launchers before workers are forked: a key-value store in a process on node 0."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # documented, unlisted

from samebits.errors import HostError, Interrupted, UserError, WithHint, WorkerError, few, first_line
from samebits.host.addresses import Address, Waiting
from samebits.host.variables import SECRET
from samebits.workers.board import Board, PeerError, Report, root_cause
from samebits.workers.parent import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from types import TracebackType

    from samebits.host.cluster_environment import Nodes

Shared = TypeVar("Shared")
"""A JSON value that each node gives to all others."""

_POLL_SECONDS = 0.05
_BUSY_SECONDS = 1.0
_LINGER_SECONDS = 1.0
_TRY_SECONDS = 4.0  # after 3, the kernel knows whether any machine has the address
_SLACK_SECONDS = 5.0  # for PyTorch to notice that its own limit has passed
_AGAIN_SECONDS = 1.0  # between two look-ups of a name
_STALE_SECONDS = 60.0  # for which name servers may give an old address


class Rendezvous:
    """A key-value store that the launchers of all nodes share. Node 0 hosts it and closes it last.

    It is a context manager: a node whose block ends with an error reports the error to the others.
    """

    def __init__(self, nodes: Nodes, *, seconds: float) -> None:
        """Connect to node 0, within ``seconds`` or the time that machines may take to start, whichever is longer.

        Raises what ``Address.of`` raises, and HostError: node 0 cannot listen, or does not answer in time.
        """
        self._token = secrets.token_hex(8)
        self._tokens: list[str] = []  # of all nodes, as soon as all have come
        self._board: Board | None = None
        self.nodes, self.address = nodes, Address.of(nodes)
        self._seconds = max(seconds, nodes.start_seconds)
        self._deadline = time.monotonic() + self._seconds
        self._looked = time.monotonic()
        self._heard: str | None = None  # the last beat of busy nodes
        self._server, self._is_stranger, self._handed_over = None, False, False
        self._own: list[tuple[int, Any]] = []  # failures that this node has told, with their numbers
        if nodes.rank == 0 and not nodes.served:
            self._check_mine()
            self._server = _serve(self.address)
        try:
            self._wait_for_answer()
            self._door = Board(self._connect(), os.environ.get(SECRET, ""))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, WithHint | KeyboardInterrupt):
            own = error if isinstance(error, WithHint) else Interrupted(signal.SIGINT)
            told = error.report if isinstance(error, PeerError) else Report.of(own, self.nodes.rank)
            silent = self._is_stranger or self._handed_over or (isinstance(error, PeerError) and not self._server)
            until = time.monotonic() + (_LINGER_SECONDS if self._server else 0)
            with suppress(RuntimeError):
                if not silent:
                    self.report(told)
                while time.monotonic() < until:  # the others read more often; some may still come
                    time.sleep(_POLL_SECONDS)
                    self._tell()
        self.close()

    def join(self) -> None:
        """Register this node, before anything is shared.

        Raises:
            UserError: another process has registered as this node, or the training has begun without it.
            SamebitsError: node 0 failed.
        """
        nodes = self.nodes
        with self._while_node_0_is_there():
            if not self._door.claim(f"joined/{nodes.rank}", self._token):
                tokens = [token for node in range(nodes.count) if (token := self._token_of(node))]
                if self._door.within("".join(tokens)).get("met") is not None:
                    self._is_stranger = True  # its failure does not concern the nodes that train
                    hint = "wait for its end, or give each training a port of its own"
                    raise UserError(f"a training is under way at {self.address}", hint=hint)
                hint = "give each machine a number, and each training a port and SAMEBITS_SECRET of its own"
                raise UserError(f"a node {nodes.rank} has come to {self.address} already", hint=hint)
            self._door.set(f"beat/{nodes.rank}", "0")

    def close_door(self) -> None:
        """Refuse nodes that register from now on; every node must have shared something."""
        self.board.set("met", "")

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Make the others wait for this node until the block ends."""
        ended = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # node 0 is gone; the next ``share`` says so
                while not ended.wait(_BUSY_SECONDS):
                    if beats := self._beats():
                        beats.set("busy", secrets.token_hex(8))

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()  # workers can then be forked

    def _beat(self) -> str | None:
        """The last beat of a busy node; None if no node was busy."""
        return beats.get("busy") if (beats := self._beats()) else None

    def _beats(self) -> Board | None:
        """The board of this launch's beats, as far as its node 0 has joined: beats of another would let it wait on."""
        token = self._token if self.nodes.rank == 0 else self._token_of(0)
        return self._door.within(token) if token else None

    def _token_of(self, node: int) -> str | None:
        """The random text of a node's launch; None if it has not come. Somebody may have put an earlier one there."""
        return self._door.get(f"joined/{node}")

    def share(self, name: str, value: Shared) -> list[Shared]:
        """Give a value under a name and return those of all nodes, in their order.

        Raises:
            HostError: a node has not come in time.
            SamebitsError: another node failed meanwhile.
        """
        with self._while_node_0_is_there():
            if self._board is None:
                self._tokens = self._gather(self._door, "joined")
                self._tokens[self.nodes.rank] = self._token  # not the store's text: no other launch has this token
                self._board = self._door.within("".join(self._tokens))
            self._board.set(f"{name}/{self.nodes.rank}", json.dumps(value))
            return [json.loads(text) for text in self._gather(self._board, name)]

    @contextmanager
    def _while_node_0_is_there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # PyTorch's, of a connection that has closed
            ended = WorkerError(f"it has left {self.address}", hint="see what it says")
            raise Report.of(ended, 0).error() from None

    @property
    def board(self) -> Board:
        """The board that only the nodes of this launch can write to; it exists once all have come."""
        assert self._board
        return self._board

    def _gather(self, board: Board, name: str) -> list[str]:
        """Wait for the text of each node under a name and return all texts."""
        nodes, waiting, strange = self.nodes, Waiting(), Waiting()
        told: dict[int, str | None] = dict.fromkeys(range(nodes.count))

        def unsigned() -> bool:
            return any(board.has(f"{name}/{k}") for k in missing)

        while True:
            told |= {k: board.get(f"{name}/{k}") for k, text in told.items() if text is None}
            missing = [k for k, text in told.items() if text is None]
            if not missing:
                break
            if report := root_cause(self.reports()):
                raise report.error()
            if self._heard != (beat := self._beat()):
                self._heard, self._deadline = beat, time.monotonic() + self._seconds
            text = f"node{'s' if len(missing) > 1 else ''} {few(list(map(str, missing)))} of {nodes.count}"
            if time.monotonic() > self._deadline:
                if unsigned():
                    hint = "give all machines the same one"
                    raise HostError(f"{text} came to {self.address} with another SAMEBITS_SECRET", hint=hint)
                hint = f"start the same command there with its number, {missing[0]}, and this SAMEBITS_SECRET, if any"
                raise HostError(f"{text} did not come to {self.address} within {self._seconds:g} s", hint=hint)
            waiting.say(f"waiting at {self.address} for {text}")
            if strange.due and unsigned():  # the store is not asked again and again
                strange.say(f"what came for {text} is not signed with this SAMEBITS_SECRET, or for another training")
            time.sleep(_POLL_SECONDS)
        self._heard, self._deadline = self._beat(), time.monotonic() + self._seconds  # for what comes next
        return [text for text in told.values() if text is not None]

    def hand_over(self) -> None:
        """Leave the store to another thread, which reports failures from now on: a call may not return."""
        self._handed_over = True

    def report(self, report: Report) -> None:
        """Report a failure to all nodes that have come; reports are numbered in their order."""
        self._own.append((self._door.number("reports"), report.model_dump(mode="json")))
        self._tell()

    def _tell(self) -> None:
        """Write this node's reports, signed for each node that has come: those of another launch must not be heard."""
        for node, token in enumerate(self._tokens or map(self._token_of, range(self.nodes.count))):
            known = self._token if node == self.nodes.rank else token
            if known:
                self._door.within(known).set(f"reports/{self.nodes.rank}/{node}", json.dumps(self._own))

    def reports(self) -> list[Report]:
        """All failures so far, in the order of their reports."""
        if not self._door.has("reports"):  # cheap, because this is called ten times a second
            return []
        to_this = self._door.within(self._token)
        texts = [to_this.get(f"reports/{node}/{self.nodes.rank}") for node in range(self.nodes.count)]
        told = [one for text in texts if text for one in json.loads(text)]
        return [Report.model_validate(report) for _, report in sorted(told, key=itemgetter(0))]

    def close(self) -> None:
        """End the store, if this node hosts it."""
        if self._server is not None:
            self._server.kill()
            self._server.join()
            self._server = None

    def _check_mine(self) -> None:
        """As ``Address.check_mine``, but wait for a while if the name may still belong to another machine."""
        deadline, waiting = time.monotonic() + min(self.nodes.start_seconds, _STALE_SECONDS), Waiting()
        while True:
            try:
                self.address.check_mine()
            except HostError as error:
                if time.monotonic() >= deadline:
                    raise
                waiting.say(f"waiting: {error}")
            else:
                return
            time.sleep(_POLL_SECONDS)
            self._look_again()

    def _look_again(self) -> None:
        """Look node 0's name up again while machines start: name servers may still give an old address."""
        if self.nodes.start_seconds and time.monotonic() > self._looked + _AGAIN_SECONDS:
            with suppress(HostError):
                self.address = Address.of(replace(self.nodes, start_seconds=0))
            self._looked = time.monotonic()

    def _wait_for_answer(self) -> None:
        """Wait until a process listens at node 0's address. PyTorch would wait too, without saying why."""
        waiting = Waiting()
        problem = hint = ""
        while True:
            limit = max(0.1, min(_TRY_SECONDS, self._deadline - time.monotonic()))
            try:
                socket.create_connection((self.address.ip, self.address.port), timeout=limit).close()
            except ConnectionRefusedError:
                problem, hint = "nothing listens there", "start node 0, with the same port"
            except TimeoutError:
                if limit == _TRY_SECONDS or not problem:
                    problem, hint = "no answer", "is it node 0's address, and does a firewall let the port through?"
            except OSError as error:
                problem, hint = str(error.strerror).lower(), "is it node 0's address, in a network of this machine?"
            else:
                return
            if time.monotonic() > self._deadline:
                raise HostError(f"node 0 at {self.address}: {problem}, for {self._seconds:g} s", hint=hint)
            waiting.say(f"waiting for node 0 at {self.address}: {problem}. hint: {hint}")
            time.sleep(_POLL_SECONDS)
            self._look_again()

    def _connect(self) -> Store:
        """Connect to the store, in a thread: PyTorch waits for ever for a listener that does not answer.

        If there is a store, the thread has ended, so that workers can be forked.
        """
        seconds = max(1.0, self._deadline - time.monotonic())
        limit = datetime.timedelta(seconds=seconds)
        answers: list[Store | str] = []

        def ask() -> None:
            try:
                answers.append(TCPStore(self.address.ip, self.address.port, is_master=False, timeout=limit))
            except RuntimeError as error:
                answers.append(first_line(str(error)))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds + _SLACK_SECONDS)
        answer = answers[0] if answers else f"no store has answered for {seconds:.0f} s"
        if isinstance(answer, str):
            text = f"what listens at {self.address} is no node 0: {answer}"
            raise HostError(text, hint="give another port on all machines")
        return PrefixStore(f"samebits/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/", answer)


def _serve(address: Address) -> multiprocessing.context.ForkProcess:
    """Start the store in a process of its own: the store has a thread, and a process with threads must not fork."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_keep_store, args=(address, there), daemon=True)
    process.start()
    there.close()
    problem = "its process ended"
    try:
        with suppress(EOFError):
            problem = here.recv()
    except BaseException:  # a signal, which the process ignores: multiprocessing would wait for it at exit
        process.kill()
        process.join()
        raise
    if problem:
        process.join()
        raise HostError(f"node 0 cannot listen at {address}: {problem}", hint="give another port on all machines")
    return process


def _keep_store(address: Address, ready: Connection) -> None:
    end_with_parent(signal.SIGKILL)  # the store ends with its launcher, not before
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    try:
        listener = address.listen()  # at this address only: PyTorch would listen at all of this machine
        store = TCPStore(address.ip, address.port, is_master=True, wait_for_workers=False,
                         master_listen_fd=listener.detach())  # fmt: skip
    except (OSError, RuntimeError) as error:
        ready.send(first_line(str(error)))
        return
    ready.send("")
    while store:
        signal.pause()
