"""The largest global batch that fits: forecast from small batches, then tried, each in new workers."""

from __future__ import annotations

import math
import signal
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samebits.doctor.memory_trial import FULL, STEP_MEMORY, Attempt, MemoryTrialRank, StepMemory
from samebits.doctor.model import with_train
from samebits.errors import HostError, SamebitsError
from samebits.files import read_json
from samebits.records.run import run_name
from samebits.training.placement import place
from samebits.workers.processes import WorkerSignalledError, import_compiler, launch
from samebits.workers.rank import run_trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.batch_split import BatchSplit
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.strategies import StrategyName
    from samebits.strategies.placement import Devices, Placement

PRECISION = 1 / 50
"""Relative precision of the largest batch."""
_STRIDE = 4  # ratio of two measured batches, until one has half the forecast
_NEAR = 2.5  # largest ratio of a forecast to the largest measured batch
_APART = 1.5  # smallest ratio of two batches for a stable line through them
_ENDED_FOR_MEMORY = {signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV}


class Forecast(NamedTuple):
    """The largest global batch that is expected to fit, in samples, and the device that limits it."""

    samples: int
    device: int


class Bracket(NamedTuple):
    """The largest batch that ``fitted``, and the smallest that ``failed``; None if no batch did."""

    fitted: int | None
    failed: int | None


@dataclass(frozen=True)
class Estimate:
    """Measurements of small batches: memory of the largest of them (``step``), and a ``forecast``.

    The forecast is None if memory does not grow with the batch, or if two batches cannot be measured. ``start`` is the
    first batch to try.
    """

    step: StepMemory
    forecast: Forecast | None
    start: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training whose largest batch is searched, on the devices of ``machine`` that ``params`` gives it."""

    params: Params
    strategy: StrategyName
    numerics: NumericsName
    machine: Devices
    data_dir: Path
    folder: Path
    limit: int | None
    seconds: int

    @property
    def name(self) -> str:
        """The name of such a run."""
        return run_name(self.strategy, self.numerics)

    @property
    def placement(self) -> Placement:
        """Placement of the training of ``params``. Raises HostError and UserError: see ``place``."""
        return self._placed()[0]

    def _placed(self) -> tuple[Placement, BatchSplit]:
        return place(self.strategy, self.params, self.numerics, self.machine)

    @property
    def unit(self) -> int:
        """Unit of batches: its multiples can be split as the batch of ``params`` is."""
        return self._placed()[1].multiple

    @property
    def most(self) -> int:
        """The largest batch for which the data set has enough samples."""
        return self._placed()[1].rounded_down(self.params.data.num_samples)

    def estimate(self) -> Estimate | None:
        """Measure small batches, then larger ones up to half the forecast; None if not even the smallest fits.

        Raises:
            SamebitsError: a training fails for another reason than memory.
        """
        unit, most, rounded_down = self.unit, self.most, self._placed()[1].rounded_down
        small = rounded_down(min(self.params.train.global_batch_size // 4, most // 2))
        first = self._measure(small)
        while first is None and small > unit:
            small = rounded_down(small // 4)
            first = self._measure(small)
        measured, large, estimate = [first], 2 * small, None
        while first is not None and large <= most:
            second = self._measure(large)
            if second is None:
                break
            before = next(one for one in reversed(measured) if one and _APART * one.memory.samples <= large)
            forecast = largest_batch(before, second)
            estimate = Estimate(second, forecast, min(forecast.samples if forecast else most, most))
            if large == most or (forecast and forecast.samples <= _NEAR * large):
                break
            half = rounded_down(forecast.samples // 2) if forecast else most
            measured.append(second)
            large = min(_STRIDE * large, max(half, large + unit), most)
        if estimate is None and first is not None:
            estimate = Estimate(first, None, small if large <= most else most)
        return estimate

    def fits(self, samples: int, *, limit: int | None, at_once: bool) -> bool:
        """Whether memory suffices for two steps of a batch. Raises SamebitsError: they fail for another reason."""
        return self._try(samples, limit=limit, at_once=at_once, measured=False) is not None

    def _measure(self, samples: int) -> StepMemory | None:
        out = self._try(samples, limit=self.limit, at_once=True, measured=True)
        if out is None:
            return None
        file = out / STEP_MEMORY
        return StepMemory.parse(read_json(file, made_by="this command"), file, made_by="this command")

    def _try(self, samples: int, *, limit: int | None, at_once: bool, measured: bool) -> Path | None:
        """Try a batch, and return the folder of its files; None if memory did not suffice."""
        devices = self.placement.num_devices
        params = with_train(self.params, global_batch_size=samples, num_devices=devices)
        placement, split = place(self.strategy, params, self.numerics, self.machine)
        out = Path(tempfile.mkdtemp(dir=self.folder))
        attempt = Attempt(
            case=self,
            params=params,
            placement=placement,
            split=split,
            out=out,
            limit=limit,
            at_once=at_once,
            measured=measured,
        )
        try:
            trial = partial(run_trial, partial(MemoryTrialRank, attempt), placement, seconds=self.seconds)
            import_compiler()
            launch(trial, placement.world_size)
            return None if (out / FULL).exists() else out
        except SamebitsError as error:
            if (out / FULL).exists():
                return None
            if isinstance(error, WorkerSignalledError):
                if error.signum in _ENDED_FOR_MEMORY and not measured:
                    return None
                if error.signum == signal.SIGALRM:
                    text = f"two steps of {samples:,} samples took longer than {self.seconds} s"
                    raise HostError(text, hint="try it where more is free, or with a faster device") from None
            raise


def largest_batch(small: StepMemory, large: StepMemory) -> Forecast | None:
    """Extend the line of each device until the first of them is full; None if memory grows on none of them.

    The memory of a step is linear in its rows. Each device has its own line because under ``dp`` the first one also
    holds the whole batch, all outputs and the sum of the gradients. A peak is the largest of several lines (forward,
    backward, optimizer), so that it may bend upwards: a forecast far beyond ``large`` may be too high.
    """
    more_samples = large.memory.samples - small.memory.samples
    assert more_samples > 0, "two different batches are needed"
    forecasts = []
    for number, (a, b, room) in enumerate(zip(small.peaks, large.peaks, large.rooms, strict=True)):
        bytes_per_sample = (b - a) / more_samples
        if bytes_per_sample > 0:
            more = (room - b) / bytes_per_sample
            forecasts.append(Forecast(max(0, int(large.memory.samples + more)), number))
    return min(forecasts, default=None)


def search(fits: Callable[[int], bool], first: int, *, unit: int, most: int, precision: float = PRECISION) -> Bracket:
    """Try ``first``, then larger or smaller batches in growing strides, and then bisect.

    Batches are multiples of ``unit`` up to ``most``. The two results are at most ``precision`` apart, or one unit.
    """

    def rounded(samples: float) -> int:
        return min(most, max(unit, math.floor(samples / unit) * unit))

    batch = rounded(first)
    fitted: int | None = None
    failed: int | None = None
    stride = max(unit, rounded(batch * precision))
    while True:
        if fits(batch):
            fitted = batch
        else:
            failed = batch
        if failed is None:
            if batch == most:
                break
            batch = rounded(batch + stride)
        elif fitted is None:
            if batch == unit:
                break
            batch = rounded(batch - stride)
        elif failed - fitted <= max(unit, fitted * precision):
            break
        else:
            batch = rounded((fitted + failed) / 2)
        stride *= 2
    return Bracket(fitted, failed)
