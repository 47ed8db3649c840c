"""What the other machines of a training count, passed to node 0 by the board."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING

from samebits.files import Part
from samebits.host import Counters, sample_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.workers.board import Board


class Sample(Part):
    """The counters of a node after ``number`` earlier samples."""

    number: int
    values: dict[str, float]


class SampleExchange:
    """One machine's end of it: node 0, whose own are its sender's, takes; the others give."""

    def __init__(self, board: Board, rank: int, count: int, gpus: Sequence[int]) -> None:
        self._board, self._rank, self._keys = board, rank, [f"sample/{node}" for node in range(count)]
        self._seconds = sample_seconds()
        self._due = time.monotonic() + self._seconds
        self._number = 0
        self._counters = Counters(gpus) if rank else None
        self._seen = [-1] * count
        self._new: queue.SimpleQueue[tuple[int, Sample]] = queue.SimpleQueue()

    def pass_on(self) -> None:
        """Give or take what is due; called again and again by the thread that has the board."""
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
        """Nodes and samples that are new since the last call, which may be another thread's."""
        taken = []
        while not self._new.empty():
            taken.append(self._new.get())
        return taken
