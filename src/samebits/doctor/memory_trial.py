"""One rank of ``doctor --memory``: two steps of a batch within a memory limit, measured on request."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from samebits.files import Part, write_json
from samebits.host import data_bytes, memory_available, private_bytes, private_peak
from samebits.numerics.allocators import is_out_of_memory
from samebits.records.card import read_card
from samebits.records.memory import Memory
from samebits.training.memory import measure_memory
from samebits.training.meters import reset_peak
from samebits.training.setup import Setup
from samebits.training.worker import make_worker

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.doctor.fitting import Case
    from samebits.params import Params
    from samebits.strategies.placement import Placement

STEP_MEMORY, FULL = "step_memory.json", "full"
STEPS = 2  # the second one begins with the optimizer's state
AT_ONCE = 65536
"""Smallest block, in bytes, that the C library gives back to the system when it is freed, if ``at_once`` is set."""
_UNTOUCHED = 256 * 2**20  # that a process may reserve and never touch: stacks of threads, space for compiled kernels
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # GNU's <malloc.h>


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One batch to try for a ``case``; ``params`` has its size, and ``out`` is an empty folder.

    ``limit`` is the most that a process may use on a device, in bytes and with the process's own memory; None for all
    that is free now. With ``at_once`` the C library gives freed memory back at once; with ``measured`` the trial leaves
    a file with the memory of a step.
    """

    case: Case
    params: Params
    placement: Placement
    split: BatchSplit
    out: Path
    limit: int | None
    at_once: bool
    measured: bool


class StepMemory(Part):
    """Memory of a step by its parts; by device, the peak of the whole process and its limit (``rooms``), in bytes."""

    memory: Memory
    peaks: tuple[int, ...]
    rooms: tuple[int, ...]


class MemoryTrialRank:
    """One rank of an attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.worker = make_worker(attempt.placement, attempt.params.train)
        self.model: nn.Module | None = None

    def run(self) -> None:
        """Train, and leave a file if memory ran out, or the measurement."""
        try:
            self._train()
        except Exception as error:
            if is_out_of_memory(error):
                self._report_full()
            raise

    def _report_full(self) -> None:
        (self._attempt.out / FULL).touch()

    def _train(self) -> None:
        attempt, worker = self._attempt, self.worker
        card = read_card(attempt.case.data_dir / "card.json")
        setup = Setup(attempt.params, attempt.case.numerics, card, split=attempt.split, worker=worker)
        setup.enter_process()
        samples = attempt.split.samples
        data = setup.load(attempt.case.data_dir, at_least=samples)
        rooms = self._gpu_rooms() if worker.cuda_devices else [self._limit_memory()]
        reset_peak(worker)
        self.model = setup.build()
        trainable = setup.trainable(setup.place(self.model), setup.batches(data))
        trainable.reset()
        trainable.require_same_again(0)
        rate = attempt.params.train.optimizer.lr
        trainable.mean_losses(torch.stack([trainable.step(step, rate) for step in range(STEPS)]))  # waits for them
        peaks = [torch.cuda.max_memory_reserved(index) for index in worker.cuda_devices] or [private_peak()]
        if peaks[0] > rooms[0] and not worker.cuda_devices:  # on a GPU the allocator itself raises
            self._report_full()
        if attempt.measured:
            self._write_measurement(measure_memory(trainable, samples), peaks, rooms)

    def _write_measurement(self, memory: Memory | None, peaks: list[int], rooms: list[int]) -> None:
        """Write the measurement with the figures of all ranks."""
        figures = torch.tensor([peaks, rooms], device=self.worker.device)
        everyone = self.worker.ranks.all_gather(figures).transpose(0, 1).flatten(1)  # (2, devices)
        assert memory is not None, "nothing is compiled here"
        if self.worker.rank == 0:
            step = StepMemory(memory=memory, peaks=tuple(everyone[0].tolist()), rooms=tuple(everyone[1].tolist()))
            write_json(self._attempt.out / STEP_MEMORY, step.model_dump(mode="json"))

    def _gpu_rooms(self) -> list[int]:
        """Bytes that this worker may use of each of its GPUs; a limit is set in the allocator."""
        limit, indices = self._attempt.limit, self.worker.cuda_devices
        if limit is None:
            sharing = -(-self._workers // torch.cuda.device_count())
            free = (torch.cuda.mem_get_info(index)[0] for index in indices)
            taken = (torch.cuda.memory_reserved(index) for index in indices)
            return [more // sharing + held for more, held in zip(free, taken, strict=True)]
        totals = [torch.cuda.get_device_properties(index).total_memory for index in indices]
        for index, total in zip(indices, totals, strict=True):
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)
        return [min(limit, total) for total in totals]

    def _limit_memory(self) -> int:
        """Limit this process's memory on a CPU, and return the limit in bytes.

        The kernel refuses further allocations, so that an attempt fails as if memory had run out, and no other process
        is in danger. Memory that is reserved without being touched is allowed on top.
        """
        used, limit = private_bytes(), self._attempt.limit
        room = used + max(0, memory_available() // self._workers - _UNTOUCHED) if limit is None else limit
        if self._attempt.at_once:
            with suppress(AttributeError, OSError):  # the C library is not GNU's
                library = ctypes.CDLL(None)
                library.mallopt(_M_MMAP_THRESHOLD, AT_ONCE)
                library.mallopt(_M_TRIM_THRESHOLD, AT_ONCE)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        allowed = data_bytes() + max(0, room - used) + _UNTOUCHED
        if hard == resource.RLIM_INFINITY or allowed < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
        return room

    @property
    def _workers(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
