"""What one worker process does: prepare, warm up, train, measure, and (rank 0) record."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from samebits.files import settle
from samebits.host import HostFacts, host_facts
from samebits.measuring.prolonging import notes_of
from samebits.measuring.references import WARM_UP_STEPS, copy_of
from samebits.measuring.roofline import measure_roof
from samebits.measuring.slices import NOT_ENDED, why_no_speedup
from samebits.measuring.trace import write_trace
from samebits.records import log as events
from samebits.records.card import read_card
from samebits.records.run import FILES, TRACE, WEIGHTS, Node, RunRecord, Timing, run_name, write_run
from samebits.records.statistics import spread
from samebits.remarks import Resumed
from samebits.strategies import STRATEGIES
from samebits.training.checkpoints import FOLDER, Checkpoints, PeriodicCheckpointer, StopRequest, identity
from samebits.training.diagnosis import batch_norms_of
from samebits.training.loop import Tracker, train, warm_up
from samebits.training.memory import measure_memory
from samebits.training.meters import peak_gib, reset_peak
from samebits.training.placement import not_applied
from samebits.training.setup import Setup
from samebits.training.weights import save_weights, weights_digest
from samebits.training.worker import make_worker
from samebits.workers.measure import Measurements, has_twins, measure
from samebits.workers.rank import run_rank
from samebits.workers.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.measuring.slices import Slices
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.records.log import Event, RunLog
    from samebits.records.memory import Memory
    from samebits.records.run import Arithmetic
    from samebits.remarks import Note
    from samebits.strategies.placement import Placement
    from samebits.training.batches import Data
    from samebits.training.loop import Trainable, Training
    from samebits.workers.rank import Phase, Reporter


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One training, as the launcher hands it to its workers; ``key`` names the run in logs and in MLflow.

    Checkpoints are under ``checkpoints``, None for no checkpoints; ``steps`` ends the training early. ``nodes`` are the
    names of several machines and of their kernels.
    """

    params: Params
    numerics: NumericsName
    placement: Placement
    split: BatchSplit
    data_dir: Path
    out_dir: Path
    key: str
    nodes: tuple[tuple[str, str], ...] = ()
    log: RunLog | None = None
    checkpoints: Path | None = FOLDER
    steps: int | None = None
    trace: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a rank trains. ``untrained`` is a copy for the references that run on this rank, if there are any."""

    trainable: Trainable
    untrained: nn.Module | None
    data: Data
    host: HostFacts
    nodes: tuple[Node, ...]
    initial_sha256: str
    model_parameters: int
    checkpointer: PeriodicCheckpointer | None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished training, whose weights are saved; times and peaks are those of the slowest or largest rank."""

    training: Training
    peaks_gib: list[float]
    weights_sha256: str
    arithmetic: Arithmetic | None


class Progress(Tracker):
    """A tracker that says how far a training is, on a bar if it is ``shown``, and passes everything on to a log."""

    def __init__(
        self, name: str, total_steps: int, at: Callable[[Phase, int], None], log: RunLog | None, *, shown: bool
    ) -> None:
        tqdm.monitor_interval = 0  # no thread beside the training
        self._bar = tqdm(total=total_steps, desc=name, unit="step", disable=None if shown else True, leave=False)
        self._at, self._log = at, log

    def step(self, step: int) -> None:
        """Let the launcher see which step this is; it is named if the rank is lost."""
        self._at("training", step)

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Advance by the steps that are done."""
        if self._log:
            self._log.losses(first_step, losses, learning_rates)
        self._bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
        self._bar.update(len(losses))

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.close()


class TrainingRank:
    """One rank of a training."""

    def __init__(self, spec: TrainingSpec, stop: StopRequest, reporter: Reporter) -> None:
        self._spec, self._params, self._stop, self._at = spec, spec.params, stop, reporter.at
        self._at("preparing")
        self._card = read_card(spec.data_dir / "card.json", spec.params)
        self.worker = make_worker(spec.placement, spec.params.train)
        self._setup = Setup(spec.params, spec.numerics, self._card, split=spec.split, worker=self.worker)
        self.model: nn.Module | None = None
        self._notes: list[Note] = list(spec.placement.notes)
        self._sampler = Sampler(spec.placement, on=self.worker.rank == 0)
        self._memory: Memory | None = None

    def run(self) -> None:
        """Train and measure; rank 0 writes ``model.safetensors``, ``losses.csv``, ``timing.json``, ``run.json``."""
        prepared = self._prepare()

        def note_memory() -> None:
            self._memory = measure_memory(prepared.trainable, self._spec.split.samples)

        step_seconds = warm_up(prepared.trainable, WARM_UP_STEPS[self.worker.device.type], before_reset=note_memory)
        trained = self._train(prepared, step_seconds)
        first = self.worker.rank == 0
        if first:
            self._record(prepared, trained, Measurements(NOT_ENDED))  # so that nothing that comes after it can lose it
        self._at("measuring")
        measured = measure(
            prepared.trainable,
            trained.training.losses,
            untrained=prepared.untrained,
            data=prepared.data,
            setup=self._setup,
            placement=self._spec.placement,
            step_seconds=step_seconds,
            sampler=self._sampler,
        )
        self._sampler.roof = measure_roof(
            prepared.trainable, self._params.train, self._spec.split.samples, step_seconds
        )
        self._at("recording")
        if first:
            timing = self._record(prepared, trained, measured)
            settle(self._spec.out_dir, FILES)  # before the checkpoint goes, which it could be made from again
        if prepared.checkpointer:
            prepared.checkpointer.delete()
        if first:
            self._setup.watched.remember(self._params.model)
        try:
            if self._spec.trace:  # after the record, so that nothing is lost if it fails
                write_trace(prepared.trainable, self._spec.out_dir / TRACE, len(trained.training.losses))
        finally:
            if first:  # from then on the sender takes what files there are
                self._log_result(timing, trained.weights_sha256)

    def _prepare(self) -> Prepared:
        spec, setup = self._spec, self._setup
        setup.enter_process()
        host = host_facts()  # here, because where there are GPUs it starts CUDA
        nodes = self._nodes(host)
        self._log(events.SetupEvent(host=host, nodes=nodes, data=self._card, data_dir=str(spec.data_dir.resolve())))
        self._at("building")
        self.model = model = setup.build()
        self._at("preparing")
        first = self.worker.rank == 0
        untrained = copy_of(model) if has_twins(self._setup, spec.placement) else None
        initial_sha256 = weights_digest(model) if first else ""
        model_parameters = sum(p.numel() for p in model.parameters())  # before exact gives tied ones one each
        setup.place(model)
        data = setup.load(spec.data_dir)
        batches = setup.batches(data)
        wants_ranks = any(STRATEGIES[name].has_ranks for name in self._params.train.strategies)
        self._notes += setup.try_step(model, batches, spec.placement, wants_ranks=wants_ranks)
        return Prepared(
            trainable=setup.trainable(model, batches),
            untrained=untrained,
            data=data,
            host=host,
            nodes=nodes,
            initial_sha256=initial_sha256,
            model_parameters=model_parameters,
            checkpointer=self._checkpointer(host),
        )

    def _nodes(self, host: HostFacts) -> tuple[Node, ...]:
        """Every machine as its first rank sees it, if there are several."""
        counts = self._spec.placement.devices_by_node
        if not counts:
            return ()
        everyone = self.worker.ranks.gather(host)
        firsts = [everyone[sum(counts[:node])] for node in range(len(counts))]
        return tuple(
            Node(name=name, machine=machine, host=facts)
            for (name, machine), facts in zip(self._spec.nodes, firsts, strict=True)
        )

    def _checkpointer(self, host: HostFacts) -> PeriodicCheckpointer | None:
        spec = self._spec
        if spec.checkpoints is None:
            return None
        sources = self._setup.sources()
        name = identity(
            self._params,
            spec.numerics,
            spec.placement,
            card=self._card,
            host=host.fingerprint,
            versions={"torch": str(torch.__version__)},
            source=sources.digest if sources else None,
            folder=spec.out_dir,
        )
        place = f"{spec.placement.strategy}, {spec.placement.devices_used} devices, {host.fingerprint}"
        kept = Checkpoints(name, self.worker.rank, spec.checkpoints)
        return PeriodicCheckpointer(kept, self._params.train.checkpoint_every_steps, self._stop, place=place)

    def _train(self, prepared: Prepared, seconds_of_a_step: float) -> Trained:
        spec, worker, numerics = self._spec, self.worker, self._setup.numerics
        first, steps = worker.rank == 0, min(spec.steps or self._params.total_steps, self._params.total_steps)
        checkpointer, model = prepared.checkpointer, prepared.trainable.model
        reset_peak(worker)
        name = run_name(spec.placement.strategy, spec.numerics)
        progress = Progress(name, steps, self._at, spec.log if first else None, shown=first)
        with self._sampler.during("training"):
            training = train(
                prepared.trainable, steps, step_seconds=seconds_of_a_step, tracker=progress, checkpointer=checkpointer
            )
        progress.close()
        if training.resumed:
            self._notes.append(Resumed(steps=tuple(training.resumed), elsewhere=training.elsewhere))
        peaks = worker.ranks.all_gather(torch.tensor(peak_gib(worker), dtype=torch.float64, device=worker.device))
        weights_sha256 = worker.ranks.first_alone(
            lambda: save_weights(numerics.model_state_dict(model), spec.out_dir / WEIGHTS)
        )
        if checkpointer:
            checkpointer.training_done()
        (seconds,) = worker.ranks.max_over_ranks([training.seconds])
        step_seconds = worker.ranks.max_over_ranks(training.step_seconds)
        return Trained(
            training=replace(training, step_seconds=step_seconds, seconds=seconds),
            peaks_gib=peaks.flatten().tolist(),
            weights_sha256=weights_sha256 or "",
            arithmetic=numerics.arithmetic(),
        )

    def _record(self, prepared: Prepared, trained: Trained, measured: Measurements) -> Timing:
        slices, spec, params, device = measured.slices, self._spec, self._params, self.worker.device
        tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        record = RunRecord(
            run=spec.key,
            strategy=spec.placement.strategy,
            numerics=spec.numerics,
            placement=spec.placement,
            notes=(*self._notes, *notes_of(slices.repeats)),
            not_applied=not_applied(params.train, spec.placement, spec.numerics, tf32=tf32),
            speedup_unavailable=why_no_speedup(spec.placement, slices),
            first_unrepeated_step=slices.first_difference,
            rounding=measured.rounding,
            breakdown=measured.breakdown,
            arithmetic=trained.arithmetic,
            draws=self._setup.draws,
            batch_norms=batch_norms_of(prepared.trainable.model),
            same_draws=measured.same_draws,
            initial_sha256=prepared.initial_sha256,
            weights_sha256=trained.weights_sha256,
            model_parameters=prepared.model_parameters,
            host=prepared.host,
            nodes=prepared.nodes,
            data=self._card,
            params=params,
            measurement=slices.measurement(trained.training.step_seconds),
            usage=self._sampler.usage(trained.training, spec.split.samples),
            memory=self._memory,
        )
        timing = timing_of(trained, slices, samples=spec.split.samples)
        write_run(spec.out_dir, record, timing, trained.training.losses)
        return timing

    def _log_result(self, timing: Timing, weights_sha256: str) -> None:
        spec, out_dir = self._spec, str(self._spec.out_dir.resolve())
        self._log(events.ResultEvent(run=spec.key, timing=timing, out_dir=out_dir, weights_sha256=weights_sha256))
        if spec.log:
            spec.log.close()  # with what the disk had not taken

    def _log(self, event: Event) -> None:
        if self._spec.log and self.worker.rank == 0:
            self._spec.log.append(event)


def timing_of(trained: Trained, slices: Slices, *, samples: int) -> Timing:
    """The figures of timing.json, of steps of so many samples."""
    steps, seconds = trained.training.step_seconds, trained.training.seconds
    fast, middle, slow = (1e3 * np.percentile(steps, [5, 50, 95])).tolist()
    whole = len(steps) * samples / seconds
    speeds = [slices.steps * samples / sum(chunks) for chunks in slices.seconds.get("strategy", [])]
    return Timing(
        training_seconds=seconds,
        samples_per_sec=whole,
        samples_per_sec_spread=spread(speeds if trained.training.resumed and speeds else [whole, *speeds]),
        step_time_ms=middle,
        step_time_p5_ms=fast,
        step_time_p95_ms=slow,
        speedup=slices.speedup(),
        bound=slices.bound(),
        price=slices.price(),
        peak_memory_gib={
            f"device{i}": peak if math.isfinite(peak) else None for i, peak in enumerate(trained.peaks_gib)
        },
    )


def train_as_rank(spec: TrainingSpec, reporter: Reporter) -> None:
    """Train as one rank of a forked worker; what fails goes by the ``reporter`` to the launcher."""
    stop = StopRequest()
    run_rank(lambda: TrainingRank(spec, stop, reporter), spec.placement, reporter)
