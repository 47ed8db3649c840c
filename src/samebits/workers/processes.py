"""The worker processes of one launch: forked, watched, and ended together.

Workers are forked after all heavy modules are imported: that takes no time, where a fresh interpreter takes seconds.
It is safe while this process has one thread and has neither computed with torch nor used CUDA. Workers get the
environment variables that torchrun gives its workers.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import CollectiveError, HostError, Interrupted, SamebitsError, UserError, WorkerError, signal_name
from samebits.files import scratch_folder
from samebits.host import cuda_has_started
from samebits.host.devices import VISIBLE
from samebits.host.variables import KERNELS
from samebits.numerics.environment import prepare_environment
from samebits.training.checkpoints import GRACE_SECONDS
from samebits.training.collectives import INIT_METHOD
from samebits.workers.parent import end_with_parent
from samebits.workers.peers import Peers
from samebits.workers.rank import STACK_SIGNAL, Reports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.context import ForkProcess

    from samebits.workers.rank import Reporter

POLL_SECONDS = 0.25  # between two looks at the workers; their end is noticed at once
END_SECONDS = 2.0  # from the failure of one worker until the others are killed
_SIGNALS = {signal.SIGINT, signal.SIGTERM}  # ask a worker to stop
SIGNAL_SECONDS = 1.0
STACK_SECONDS = 10.0  # for workers to write their stacks; a worker that is scheduled does it at once
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # The dump of a rank that waited too long may end other ranks before it, and then the wrong one is named.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_OFFERED = {*_LOOPBACK, *_DEFAULTS}  # the user's values are kept


@dataclass(frozen=True)
class Ranks:
    """The ranks of this machine, ``here``, among the ``world_size`` ranks of a training.

    ``environment`` says where their process group meets; without it, the launch makes a place of its own.
    """

    here: range
    world_size: int
    environment: Mapping[str, str] | None = None


def launch(
    function: Callable[[Reporter], object],
    workers: int | Ranks,
    *,
    timeout_s: float = math.inf,
    peers: Peers | None = None,
) -> None:
    """Run ``function(reporter)`` in forked workers. The first failure ends all workers, also on other machines.

    A worker also fails if it is stopped, or builds its model, for longer than ``timeout_s``.

    Raises:
        HostError: CUDA has started in this process, so that its forks could not use the GPUs.
        SamebitsError: the error that a worker reported, or how the worker ended.
        Interrupted: a signal ended the launch, after it was passed to the workers.
    """
    peers = peers or Peers()
    ranks = Ranks(range(workers), workers) if isinstance(workers, int) else workers
    prepare_environment()
    if os.environ.get(VISIBLE) != "" and cuda_has_started():
        text = "CUDA has started in the process that forks the workers, which then cannot use it"
        hint = "a package that Python imports at its start may do so: see `python -X importtime -c pass`"
        raise HostError(text, hint=hint)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # the collector skips imported objects, in the workers and at the end
    with scratch_folder() as folder:
        crew = _WorkerPool(function, ranks, folder, peers)
        try:
            crew.start()
            peers.watch()
            crew.watch(timeout_s)
            peers.finish()
        except (Interrupted, KeyboardInterrupt) as error:
            signum = error.signum if isinstance(error, Interrupted) else int(signal.SIGINT)
            peers.interrupted(signum)
            crew.end(signal.SIGTERM if signum == signal.SIGHUP else signum, 1.5 * GRACE_SECONDS)
            raise Interrupted(signum) from None
        except SamebitsError as error:
            raise peers.cause(error) from None
        finally:
            crew.end(signal.SIGTERM, END_SECONDS)
            peers.leave()


def import_compiler() -> None:
    """Import what makes an optimizer of PyTorch, and a guard of ``exact``, wait for seconds in each fork of its own."""
    import torch._dynamo  # noqa: F401


class _WorkerPool:
    """The workers of one launch. Messages number the ranks over all machines, the code over this machine."""

    def __init__(self, function: Callable[[Reporter], object], ranks: Ranks, folder: Path, peers: Peers) -> None:
        workers = len(ranks.here)
        self._reports, self._peers, self._first = Reports(folder, workers), peers, ranks.here.start
        context = multiprocessing.get_context("fork")
        self._processes = [
            context.Process(target=_enter, args=(function, self._reports.of(rank), _environment(rank, ranks, folder)))
            for rank in range(workers)
        ]
        self._polls_stopped, self._polls_building = [0] * workers, [0] * workers

    def start(self) -> None:
        """Fork the workers; signals wait until the workers have their own handlers."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for process in self._processes:
                process.start()
        except OSError as error:
            hint = "free memory, or raise the limit of processes: see `ulimit -u` and the container's limit of pids"
            raise HostError(f"a worker cannot be started: {error.strerror}", hint=hint) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def watch(self, timeout_s: float) -> None:
        """Return when all workers are done. Raises SamebitsError: the first failure."""
        running = dict(enumerate(self._processes))
        while running:
            ended = wait([process.sentinel for process in running.values()], timeout=POLL_SECONDS)
            self._peers.check()
            for rank, process in list(running.items()):
                if process.sentinel in ended:
                    process.join()
                    assert process.exitcode is not None
                    if process.exitcode or not self._reports.done(rank):
                        raise self._failure(rank, process.exitcode)
                    del running[rank]
                elif not ended:
                    self._look_at(rank, process, timeout_s)

    def end(self, signum: int, seconds: float) -> None:
        """Send a signal to the running workers and kill those that run on, at once if a second signal arrives."""
        try:
            for process in self._running():
                assert process.pid
                os.kill(process.pid, signum)
            deadline = time.monotonic() + seconds
            while (running := self._running()) and time.monotonic() < deadline:
                wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
        finally:
            for process in self._running():
                process.kill()
                process.join()

    def _running(self) -> list[ForkProcess]:
        return [process for process in self._processes if process.pid and process.exitcode is None]

    def _look_at(self, rank: int, process: ForkProcess, timeout_s: float) -> None:
        """Raise if a worker hangs. This counts polls instead of seconds, because Ctrl-Z stops the launcher too."""
        self._polls_stopped[rank] = self._polls_stopped[rank] + 1 if _is_stopped(process) else 0
        self._polls_building[rank] += self._reports.position(rank).phase == "building"
        if self._polls_stopped[rank] * POLL_SECONDS > timeout_s:
            raise self._stopped(rank)
        if self._polls_building[rank] * POLL_SECONDS > timeout_s:
            text = f"the model's factory was not done within train.timeout_s, {timeout_s:g} s"
            raise self._with_stacks(UserError(text, hint="raise it, or see with --debug where the factory is"))

    def _failure(self, rank: int, exitcode: int) -> SamebitsError:
        """The root cause: a worker that a signal ended or that the others waited for, else the first error."""
        if -exitcode in _SIGNALS or exitcode - 128 in _SIGNALS:
            self._wait_for_signal()
            hint = "run the same command again; it goes on from a checkpoint"
            return CollectiveError(f"the worker of rank {self._rank(rank)} was asked to stop", hint=hint)
        failed = self._reports.failed()
        first = min(failed.values(), key=lambda error: isinstance(error, CollectiveError), default=None)
        if isinstance(first, CollectiveError) and exitcode >= 0:  # it waited for a worker that is gone
            gone = {r: code for r, process in enumerate(self._processes) if (code := process.exitcode or 0) < 0}
            if killed := [r for r, code in gone.items() if code != -signal.SIGABRT and -code not in _SIGNALS]:
                return self._failure(killed[0], gone[killed[0]])
        waited = exitcode == -signal.SIGABRT or isinstance(first, CollectiveError)  # NCCL ends a rank by SIGABRT
        silent = [r for r, process in enumerate(self._processes) if process.exitcode is None and r not in failed]
        if waited and (stopped := [r for r in silent if _is_stopped(self._processes[r])]):
            return self._stopped(stopped[0])
        behind = min(silent, key=lambda r: self._reports.position(r).step, default=rank)
        # NCCL ends the rank that waits; it is ahead of the rank that does not answer.
        here, there = self._reports.position(rank).step, self._reports.position(behind).step
        by_nccl = exitcode == -signal.SIGABRT and there < here
        if exitcode < 0 and not by_nccl:
            return WorkerSignalledError(self._rank(rank), -exitcode, self._where(rank))
        if first is None and not by_nccl:
            hint = "run with --debug" if exitcode else "nothing in the model or its factory may end the process"
            text = f"the worker of rank {self._rank(rank)} ended with exit code {exitcode}{self._where(rank)}"
            return WorkerError(text, hint=hint)
        if waited and silent:
            where, said = self._where(behind), first.message if first else "NCCL ended a rank that waited too long"
            text = f"the worker of rank {self._rank(behind)} did not answer the others{where}: {said}"
            hint = "see with --debug where it is; raise train.timeout_s if a step may take that long"
            return self._with_stacks(WorkerError(text, hint=hint))
        assert first is not None
        return first

    def _stopped(self, rank: int) -> WorkerError:
        text = f"the worker of rank {self._rank(rank)} was stopped, as by SIGSTOP or SIGTTOU{self._where(rank)}"
        return WorkerError(text, hint="run the same command again; it goes on from a checkpoint")

    def _wait_for_signal(self) -> None:
        """Wait for the signal that a worker has received: it will reach this process, or did reach another machine."""
        deadline = time.monotonic() + SIGNAL_SECONDS
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._peers.check()

    def _rank(self, rank: int) -> int:
        return self._first + rank

    def _where(self, rank: int) -> str:
        return self._reports.position(rank).text

    def _with_stacks(self, error: SamebitsError) -> SamebitsError:
        """Add the stacks of all threads of all workers to an error, for --debug."""
        for process in self._running():
            assert process.pid
            os.kill(process.pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and any(
            not self._reports.has_stack(rank)
            for rank, process in enumerate(self._processes)
            if process.exitcode is None and not _is_stopped(process)
        ):
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)  # the last worker finishes writing
        error.traceback = self._reports.stacks()
        return error


def _is_stopped(process: ForkProcess) -> bool:
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state == "T"


def _environment(rank: int, ranks: Ranks, folder: Path) -> dict[str, str]:
    """The environment variables that torchrun gives a worker.

    On one machine the process group meets at a file and uses the loopback interface. PyTorch's TCP store would look up
    a name for ``::ffff:127.0.0.1`` at every connection, which takes 5 seconds if a name server does not answer.
    """
    variables = ranks.environment or {INIT_METHOD: f"file://{folder}/process-group", **_LOOPBACK}
    return {
        "RANK": str(ranks.here[rank]),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(len(ranks.here)),
        "WORLD_SIZE": str(ranks.world_size),
        **{
            name: value
            for name, value in {**_DEFAULTS, **variables}.items()
            if name not in _OFFERED or not os.environ.get(name)
        },
    }


def _enter(function: Callable[[Reporter], object], reporter: Reporter, environment: dict[str, str]) -> None:
    """Run ``function`` in a worker.

    The signal handlers that the fork inherits from the launcher are reset. Unless ``StopRequest`` delays it, a worker
    ends at once on a signal, also inside a collective. If its launcher is killed, the kernel sends it SIGINT.
    """
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal signals all; the launcher sends SIGTERM
    end_with_parent(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ.update(environment)
    gc.enable()
    reporter.show_stacks()
    reporter.at("working")
    try:
        function(reporter)
    finally:
        # A DataLoader's handler would raise for its processes as they end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reporter.done()


class WorkerSignalledError(WorkerError):
    """A signal ended a worker."""

    def __init__(self, rank: int, signum: int, where: str = "") -> None:
        name = signal_name(signum)
        hint = _SIGNAL_HINTS.get(name, "run with --debug")
        super().__init__(f"the worker of rank {rank} was ended by {name}{where}", hint=hint)
        self.signum = signum


_MORE_SHARED_MEMORY = "give the container more with --shm-size or --ipc=host"
_SIGNAL_HINTS = {
    "SIGKILL": "the kernel may have been out of memory: see dmesg",
    "SIGABRT": "NCCL ends a rank like this that waited longer than train.timeout_s for another; see NCCL_DEBUG=INFO",
    "SIGBUS": f"shared memory may be full: {_MORE_SHARED_MEMORY}",
    "SIGSEGV": f"native code crashed: in exact {KERNELS}=python does without the kit's; on GPUs NCCL may lack shared "
    f"memory: {_MORE_SHARED_MEMORY}, or set NCCL_CUMEM_HOST_ENABLE=0",
}
