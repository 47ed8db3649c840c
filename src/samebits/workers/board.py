"""Signed messages between the launchers of all nodes: values, failure reports and samples of counters."""

from __future__ import annotations

import hashlib
import hmac
import queue
import time
from typing import TYPE_CHECKING, Self

from samebits.errors import CollectiveError, Interrupted, SamebitsError, WithHint
from samebits.files import Part
from samebits.host import Counters, sample_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

_DIGITS = 32  # of a signature, HMAC with SHA-256


class Board:
    """A key-value store whose texts are signed with a shared secret. It treats a stranger's text as missing.

    Whoever reaches the store can still remove or overwrite a text.
    """

    def __init__(self, store: Store, secret: str) -> None:
        self._store, self._secret = store, secret.encode()

    def within(self, launch: str) -> Board:
        """A board for the texts of one launch. Texts of other launches with the same secret count as a stranger's."""
        return Board(self._store, f"{self._secret.hex()}\n{launch}")

    def set(self, key: str, text: str) -> None:
        """Write a text; it replaces the one under the key."""
        self._store.set(key, self._signed(key, text))

    def get(self, key: str) -> str | None:
        """The text under a key; None if nobody has signed one."""
        return self._read(key, self._store.get(key)) if self.has(key) else None

    def has(self, key: str) -> bool:
        """Whether the key has any text, even a stranger's."""
        return bool(self._store.check([key]))

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """The texts under several keys in one request; every key must have been set."""
        return [self._read(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def claim(self, key: str, text: str) -> bool:
        """Write a text unless the key has another one; return whether the key has this text now."""
        stands = self._store.compare_set(key, "", self._signed(key, text))
        if (known := self._read(key, stands)) is None:
            self.set(key, text)
        return known in (None, text)

    def number(self, key: str) -> int:
        """Count up the number under a key and return it; a stranger may have counted too."""
        return self._store.add(key, 1)

    def _signed(self, key: str, text: str) -> str:
        mac = hmac.new(self._secret, f"{key}\n{text}".encode(), hashlib.sha256)
        return mac.hexdigest()[:_DIGITS] + text

    def _read(self, key: str, value: bytes) -> str | None:
        text = value.decode(errors="replace")[_DIGITS:]
        return text if hmac.compare_digest(self._signed(key, text).encode(), value) else None


class Report(Part):
    """How a node failed. ``waited``: it only waited for another node."""

    node: int
    message: str
    hint: str
    exit_code: int
    waited: bool

    @classmethod
    def of(cls, error: WithHint, node: int) -> Self:
        """The report of an error on ``node``."""
        waited = isinstance(error, CollectiveError)
        return cls(node=node, message=error.message, hint=error.hint, exit_code=error.exit_code, waited=waited)

    def error(self, name: str = "") -> WithHint:
        """The error that this machine raises for it; ``name`` is the node's."""
        if self.exit_code > 128:
            return Interrupted(self.exit_code - 128)
        return PeerError(self, f"node {self.node} ({name})" if name else f"node {self.node}")


class PeerError(SamebitsError):
    """The failure of a node, raised on all machines."""

    def __init__(self, report: Report, where: str) -> None:
        super().__init__(f"{where}: {report.message}", hint=report.hint)
        self.report, self.exit_code = report, report.exit_code


def root_cause(reports: Sequence[Report]) -> Report | None:
    """The first report of a node that did not only wait for another; else the first of all."""
    return next((report for report in reports if not report.waited), reports[0] if reports else None)


class Sample(Part):
    """The counters of a node after ``number`` earlier samples."""

    number: int
    values: dict[str, float]


class SampleExchange:
    """Samples of all machines but node 0, sent over the board to node 0.

    Node 0 receives. It sends none, because its sender process reads its counters.
    """

    def __init__(self, board: Board, rank: int, count: int, gpus: Sequence[int]) -> None:
        self._board, self._rank, self._keys = board, rank, [f"sample/{node}" for node in range(count)]
        self._seconds = sample_seconds()
        self._due = time.monotonic() + self._seconds
        self._number = 0
        self._counters = Counters(gpus) if rank else None
        self._seen = [-1] * count
        self._new: queue.SimpleQueue[tuple[int, Sample]] = queue.SimpleQueue()

    def pass_on(self) -> None:
        """Send or receive a sample if one is due; the thread that uses the board calls this repeatedly."""
        if time.monotonic() < self._due:
            return
        self._due += self._seconds
        if self._counters:
            sample = Sample(number=self._number, values=self._counters.sample())
            self._number += 1
            self._board.set(self._keys[self._rank], sample.model_dump_json())
            return
        for node, key in enumerate(self._keys):
            if text := self._board.get(key):
                sample = Sample.model_validate_json(text)
                if sample.number > self._seen[node]:
                    self._seen[node] = sample.number
                    self._new.put((node, sample))

    def take(self) -> list[tuple[int, Sample]]:
        """Nodes and their samples since the last call; another thread than that of ``pass_on`` may call it."""
        taken = []
        while not self._new.empty():
            taken.append(self._new.get())
        return taken
