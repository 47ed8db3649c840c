"""Plantings for ``explain.py``: each makes steps slow by one known cause, at three severities.

A planting changes the params, the model, or the host around the training. Following the advice removes what the
advice names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from samebits.training.batches import Batches
from samebits.training.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.strategies import StrategyName

SOURCE = "planted_model.py"


# -- around a training -----------------------------------------------------------------------------------------


@contextmanager
def slow_input(seconds: float) -> Iterator[None]:
    """Let each micro-batch come from a slow input."""
    ready = Batches.micro_batch

    def micro_batch(self: Batches, step: int, index: int) -> Any:
        time.sleep(seconds)
        return ready(self, step, index)

    Batches.micro_batch = micro_batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        Batches.micro_batch = ready  # type: ignore[method-assign]


@contextmanager
def always_sync() -> Iterator[None]:
    """Let an all-reduce of all gradients follow every micro-batch."""
    no_sync = Worker.no_sync
    Worker.no_sync = lambda self, module: nullcontext()  # type: ignore[method-assign]  # noqa: ARG005
    try:
        yield
    finally:
        Worker.no_sync = no_sync  # type: ignore[method-assign]


@contextmanager
def slow_loopback(rate: str) -> Iterator[None]:
    """Limit the loopback between ranks to a rate, in the benchmark's own network namespace."""
    tc, usual = ["tc", "qdisc"], "65536"
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)  # a packet must fit into the bucket
    subprocess.run(
        [*tc, "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "32k", "latency", "400ms"], check=True
    )
    try:
        yield
    finally:
        subprocess.run([*tc, "del", "dev", "lo", "root"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "mtu", usual], check=True)


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep so many processes busy. Their parents have ended, so that none is a child of this process."""
    starts = (
        "import subprocess as s, sys; print(s.Popen([sys.executable, '-c', 'while True: pass'], stdout=s.DEVNULL).pid)"
    )
    spinning = [int(subprocess.check_output([sys.executable, "-c", starts])) for _ in range(count)]
    try:
        yield
    finally:
        for pid in spinning:
            os.kill(pid, signal.SIGKILL)


# -- the table -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A training: strategy, changes of the params and of ``planted_model.Net``, and its surroundings."""

    strategy: StrategyName = "ddp"
    batch: int = 512
    train: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Planting:
    """A cause, its cases by severity, and how to follow the advice. None: change the params that it names."""

    cause: str
    cases: tuple[Case, ...]
    follow: Callable[[Case], Case] | None = None


def _without(**changes: Any) -> Callable[[Case], Case]:
    """The same training without the planting in the model and around it."""

    def follow(case: Case) -> Case:
        return replace(case, model={**case.model, **changes}, around=nullcontext)

    return follow


PLANTINGS: dict[str, Planting] = {
    "tiny model": Planting(
        "launch_bound",
        tuple(Case("single", batch=batch, model={"hidden": 16, "layers": 12}) for batch in (64, 32, 16)),
    ),
    "batch too small": Planting(
        "small_batch",
        tuple(Case(batch=batch, model={"hidden": 32, "layers": 40}) for batch in (512, 256, 128)),
    ),
    "many parameters": Planting(
        "communication",
        tuple(Case(batch=64, model={"hidden": hidden, "layers": 3}) for hidden in (768, 1024, 1536)),
    ),
    "slow link": Planting(
        "slow_link",
        tuple(Case(batch=1024, around=partial(slow_loopback, rate)) for rate in ("200mbit", "100mbit", "50mbit")),
    ),
    "all-reduce of each micro-batch": Planting(
        "reduced_often",
        tuple(
            Case(batch=128 * k, train={"grad_accum_steps": k}, model={"hidden": 512}, around=always_sync)
            for k in (2, 4, 8)
        ),
        follow=_without(),
    ),
    "buffers": Planting(
        "buffers", tuple(Case(batch=4096, model={"buffer_floats": floats}) for floats in (2**22, 2**23, 2**24))
    ),
    "slow forward of a rank": Planting(
        "straggler",
        tuple(Case(batch=2048, model={"slow_forward": times}) for times in (40, 80, 160)),
        follow=_without(slow_forward=0),
    ),
    "slow backward of a rank": Planting(
        "straggler",
        tuple(Case(batch=2048, model={"slow_backward": times}) for times in (40, 80, 160)),
        follow=_without(slow_backward=0),
    ),
    "slow input": Planting(
        "data",
        tuple(Case(batch=2048, around=partial(slow_input, s)) for s in (0.006, 0.012, 0.024)),
        follow=_without(),
    ),
    "reads of the device": Planting(
        "device_reads",
        tuple(Case("single", batch=512, model={"reads": reads}) for reads in (1000, 2000, 4000)),
        follow=_without(reads=0),
    ),
    "busy host": Planting(
        "busy_host",
        tuple(Case(batch=1024, around=partial(busy_cores, count)) for count in (1, 2, 4)),
        follow=_without(),
    ),
    "too many threads": Planting(
        "own_threads",
        tuple(Case(batch=2048, model={"threads": threads}) for threads in (2, 4, 8)),
        follow=_without(threads=0),
    ),
    "optimizer": Planting(
        "optimizer",
        tuple(
            Case("single", batch=batch, train={"optimizer": {"name": "adamw", "lr": 0.001, "momentum": 0.0,
                                                            "weight_decay": 0.0}}, model={"hidden": 1024})
            for batch in (32, 16, 8)
        ),
    ),
}  # fmt: skip
"""Plantings by name. One more, a batch that grew, is in ``explain.py``, because it needs two trainings."""

SOUND: dict[str, Case] = {
    "one device": Case("single", batch=2048, model={"hidden": 512}),
    "two devices": Case("ddp", batch=8192, model={"hidden": 512}),
    "deep": Case("ddp", batch=8192, model={"hidden": 256, "layers": 6}),
}
"""Trainings without a planting."""
