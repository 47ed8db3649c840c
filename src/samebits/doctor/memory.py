"""``samebits doctor --memory``: memory of a step, and the largest batch by forecast and by trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.doctor.finding import Finding, failed, of_error, ok, skipped
from samebits.doctor.fitting import Case, search
from samebits.doctor.machine import size
from samebits.doctor.memory_trial import AT_ONCE
from samebits.doctor.model import SECONDS, data_to_try, with_train
from samebits.errors import SamebitsError, UserError
from samebits.files import scratch_folder
from samebits.params import load_params
from samebits.results.usage import say_memory
from samebits.strategies import STRATEGIES
from samebits.training.placement import this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from samebits.doctor.fitting import Bracket, Estimate

_HINT = "raise train.grad_accum_steps, lower train.global_batch_size, or use precision bf16"
_KEPT = f"MALLOC_MMAP_THRESHOLD_={AT_ONCE} MALLOC_TRIM_THRESHOLD_={AT_ONCE} make it give that back at once"


def memory_findings(params_file: Path, *, data_dir: Path, limit: int | None = None) -> Iterator[Finding]:
    """The largest batch for each strategy and numerics of ``params_file``, on devices with ``limit`` bytes each.

    Without a limit each device has the memory that is free now. Trials do without ``torch.compile``.
    """
    try:
        params = load_params(params_file)
    except UserError:
        yield skipped(f"{params_file} is wrong, as its line says", name="memory")
        return
    params = with_train(params, compile=False)
    with scratch_folder() as temporary:
        try:
            data_dir, finding = data_to_try(params, data_dir, temporary / "data")
            machine = this_machine()
        except SamebitsError as error:
            yield of_error(error, name="data")
            return
        yield finding
        for numerics in params.train.numerics:
            for strategy in params.train.strategies:
                case = Case(
                    params=params,
                    strategy=strategy,
                    numerics=numerics,
                    machine=machine,
                    data_dir=data_dir,
                    folder=temporary,
                    limit=limit,
                    seconds=SECONDS,
                )
                try:
                    yield from _findings_of(case)
                except SamebitsError as error:
                    error.message = f"{case.name}: {error.message}"
                    yield of_error(error, name="memory")


def _findings_of(case: Case) -> Iterator[Finding]:
    placement, wanted = case.placement, case.params.train.global_batch_size
    if placement.fallback:
        yield skipped(f"{case.name}: as single, because {placement.fallback.sentence()}", name="memory")
        return
    estimate = case.estimate()
    if estimate is None:
        room = "what is free" if case.limit is None else size(case.limit)
        text = f"{case.name}: not even a batch of {case.unit:,} fits in {room}"
        yield failed(text, "use a smaller model or a larger device", name="memory")
        return
    yield ok(f"{case.name}: {say_memory(estimate.step.memory, case.strategy)}", name="memory")
    limit = min(estimate.step.rooms) if placement.device_type == "cpu" else case.limit
    bracket = search(
        lambda samples: case.fits(samples, limit=limit, at_once=True), estimate.start, unit=case.unit, most=case.most
    )
    text = f"{case.name}: {_forecast(estimate, case)}; tried: {_tried(bracket, case)}"
    if placement.device_type == "cpu" and bracket.fitted:
        usual = search(
            lambda samples: case.fits(samples, limit=limit, at_once=False),
            bracket.fitted,
            unit=case.unit,
            most=bracket.fitted,
        )
        if usual.failed:
            text += f"; but {_tried(usual, case)} while the C library keeps freed memory as it likes: {_KEPT}"
            bracket = usual
    if bracket.fitted is None or bracket.fitted < wanted:
        yield failed(f"{text}; params.yaml asks for {wanted:,}", _HINT, name="memory")
    else:
        yield ok(text, name="memory")


def _forecast(estimate: Estimate, case: Case) -> str:
    """The forecast, and the memory that limits it."""
    rooms = estimate.step.rooms
    if estimate.start < case.most and estimate.forecast is None:
        return f"too near the end of {size(min(rooms))} for a forecast"
    if estimate.forecast is None or estimate.start == case.most:
        return f"forecast all {case.most:,} samples of the data set in {size(min(rooms))}"
    samples, number = estimate.forecast
    text = f"forecast a batch of {samples // case.unit * case.unit:,} in {size(rooms[number])}"
    if len(rooms) == 1:
        return text
    why = ", which also holds what dp gathers" if STRATEGIES[case.strategy].gathers and number == 0 else ""
    return f"{text} of device {number}{why}"


def _tried(bracket: Bracket, case: Case) -> str:
    """The result of the trials."""
    if bracket.fitted is None:
        return f"{bracket.failed:,} does not fit"
    if bracket.failed is None:
        return f"{bracket.fitted:,} fits" + (", and there are no more" if bracket.fitted == case.most else "")
    return f"{bracket.fitted:,} fits and {bracket.failed:,} does not"
