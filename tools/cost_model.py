"""Predict a step of ``single``, and the speed-up of dp and ddp, on GPUs that are not here, from a step's work.

\b
    python tools/cost_model.py gpu/params.yaml
    python tools/cost_model.py params.yaml --here

With --here the rates are those that this CPU reaches, for products of a step's own and for copies, and the prediction
stands beside the time of whole steps: what the model leaves out shows there. All three are timed in turns, since the
speed of a host may change.
docs/concepts/gpu-experiment.md has the formulas and the first table; run without arguments, this writes that table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import click

from hosts_page import devices_of, hosts
from pages import between, row
from samebits.data.prepare import prepare
from samebits.doctor.machine import slower_in_exact
from samebits.errors import exit_on_error
from samebits.files import scratch_folder
from samebits.params import load_params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from samebits.params import Params

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/concepts/gpu-experiment.md"
EXPERIMENTS = ("params.yaml", "gpu/params.yaml")

LAUNCH_US = 6.0
"""Time in which Python and PyTorch issue one operation."""
DEVICES = 4
ROWS = 64  # of the batches in which a step's work is counted
TURNS, COPIED = 9, 1 << 24  # of a check; float32 numbers of a copy, which are more than caches hold


@dataclass(frozen=True)
class Device:
    """A GPU by what it reaches, not by its peaks: ``tflops`` of float32 products from the lower to the higher figure.

    ``memory`` is its memory's rate in GB/s, ``link`` that of a copy to another one. An all-reduce of gradients takes
    ``latency_us`` and their bytes over ``reduce`` GB/s.
    """

    name: str
    capability: str
    tflops: tuple[float, float]
    memory: float
    link: float
    reduce: float
    latency_us: float


GPUS = (
    Device("A100, NVLink", "8.0", (13, 18), 1300, 200, 180, 30),
    Device("H100, NVLink", "9.0", (40, 52), 2700, 350, 330, 30),
    Device("L4, PCIe", "8.9", (9, 14), 240, 12, 8, 60),
    Device("T4, PCIe", "7.5", (3.5, 5), 240, 6, 4, 60),
    Device("RTX 4090, PCIe", "8.9", (45, 60), 850, 12, 8, 60),
)


@dataclass(frozen=True)
class Work:
    """The work of a step: multiplications and additions, bytes that operations read and write, and operations.

    ``fixed_bytes`` do not depend on the batch, as the optimizer's. ``inputs`` and ``outputs`` are bytes of a batch.
    """

    flop: float
    row_bytes: float
    fixed_bytes: float
    launches: int
    forward_launches: int
    gradients: int
    inputs: int
    outputs: int


class Step:
    """Steps of ``params`` in fast numerics on this CPU; ``forward`` and ``update`` are called after the passes."""

    def __init__(self, params: Params) -> None:
        from samebits.training.models.build import build_model

        few = params.data.model_copy(update={"num_samples": ROWS, "test_samples": 1})
        train = params.train.model_copy(update={"global_batch_size": ROWS, "grad_accum_steps": 1})
        with scratch_folder() as folder:
            self._card = prepare(params.model_copy(update={"data": few, "train": train}), folder)
        self.model = build_model(params.model, self._card, params.seed, rough=True)

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        import torch

        card = self._card
        kinds: dict[str, torch.dtype] = {"int64": torch.int64}
        inputs = torch.zeros(rows, *card.input_shape, dtype=kinds.get(card.input_dtype, torch.float32))
        return inputs, torch.zeros(rows, *card.target_shape, dtype=kinds.get(card.target_dtype, torch.float32))

    def run(
        self,
        inputs: Tensor,
        targets: Tensor,
        forward: Callable[[], object] = lambda: None,
        update: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Make one; the outputs."""
        from torch.nn import functional

        outputs: Tensor = self.model(inputs)
        forward()
        if self._card.loss == "mse":
            loss = functional.mse_loss(outputs, targets)
        else:
            loss = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        update()
        self.model.zero_grad()
        return outputs


def work_of(params: Params) -> Work:
    """The work of a step of ``params`` in fast numerics, counted in two small batches on this CPU."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from samebits.numerics.dispatch import EagerDispatchMode

    class Counter(EagerDispatchMode):
        """Counts operations, and the bytes that they read and write, but for views of another's."""

        def __init__(self) -> None:
            super().__init__()
            self.launches = self.bytes = self.forward = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # PyTorch's
            out = func(*args, **kwargs or {})
            self.launches += 1
            if not func.is_view:
                flat = torch.utils._pytree.tree_leaves((args, kwargs, out))
                self.bytes += sum(one.nbytes for one in flat if isinstance(one, torch.Tensor))
            return out

        def has_forward(self) -> None:
            self.forward = self.launches

    step = Step(params)
    counters, flop = [], 0
    for rows in (ROWS // 2, ROWS):
        batch = step.batch(rows)
        with FlopCounterMode(display=False) as flops, Counter() as counter:
            outputs = step.run(*batch, counter.has_forward)
        counters.append(counter)
        flop = flops.get_total_flops()
    half, whole = counters
    per_row = (whole.bytes - half.bytes) / (ROWS // 2)
    gradients = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
    samples = params.train.global_batch_size
    # Momentum: weights and buffers are read and written, gradients read; adamw has a second buffer.
    moved = whole.bytes + gradients * (7 if params.train.optimizer.name == "adamw" else 5)
    return Work(
        flop=flop / ROWS * samples,
        row_bytes=per_row * samples,
        fixed_bytes=moved - per_row * ROWS,
        launches=half.launches + 3,  # two of the batch's rows, and the fused optimizer
        forward_launches=half.forward,
        gradients=gradients,
        inputs=batch[0].nbytes // ROWS * samples,
        outputs=outputs.nbytes // ROWS * samples,
    )


class Turn(NamedTuple):
    """Seconds of a step's products alone, of a byte that is copied, and of a whole step."""

    products: float
    byte: float
    step: float


def turns(params: Params) -> Iterator[Turn]:
    """Time each on this CPU, one after the other; the first turn, in which memory is new, is left out."""
    import torch
    from torch.utils.flop_counter import flop_registry

    from samebits.numerics.dispatch import EagerDispatchMode

    class Clock(EagerDispatchMode):
        """Adds up the seconds of operations that have a number of FLOP."""

        seconds = 0.0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # PyTorch's
            began = time.perf_counter()
            out = func(*args, **kwargs or {})
            if func.overloadpacket in flop_registry:
                self.seconds += time.perf_counter() - began
            return out

    step = Step(params)
    batch, numbers = step.batch(params.train.global_batch_size), torch.ones(2, COPIED)
    optimizer = torch.optim.SGD(step.model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    for number in range(TURNS + 1):
        with Clock() as clock:
            step.run(*batch)
        started = time.perf_counter()
        numbers[0].copy_(numbers[1])
        copied = time.perf_counter()
        step.run(*batch, update=optimizer.step)
        if number:
            yield Turn(clock.seconds, (copied - started) / numbers.nbytes, time.perf_counter() - copied)


def single_ms(work: Work, device: Device, tflops: float, devices: int = 1) -> float:
    """A step with one device's share of the batch: of what the device computes and what is issued, the longer one."""
    computing = work.flop / devices / tflops / 1e9 + (work.row_bytes / devices + work.fixed_bytes) / device.memory / 1e6
    return max(computing, work.launches * LAUNCH_US / 1e3)


def ddp_ms(work: Work, device: Device, tflops: float, devices: int = DEVICES) -> float:
    """The same, and then an all-reduce of the gradients, of which nothing is hidden."""
    return single_ms(work, device, tflops, devices) + work.gradients / device.reduce / 1e6 + device.latency_us / 1e3


def dp_ms(work: Work, device: Device, tflops: float, devices: int = DEVICES) -> float:
    """A step of dp: one process issues every replica's forward pass, and weights and gradients cross the link."""
    sent = 2 * work.gradients + (work.inputs + work.outputs) * (devices - 1) / devices
    issued = devices * work.forward_launches * LAUNCH_US / 1e3
    return max(single_ms(work, device, tflops, devices), issued) + sent / device.link / 1e6


def speedups_of(step: Callable[[Work, Device, float], float], work: Work, device: Device) -> list[float]:
    """Speed-up over ``single`` at the lower and at the higher rate of products."""
    return [single_ms(work, device, rate) / step(work, device, rate) for rate in device.tflops]


def span(values: Iterable[float]) -> str:
    """The smallest and the largest value with three digits, or one where they look the same."""
    low, high = (f"{value:#.3g}".rstrip(".") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table(params: Params) -> Iterator[str]:
    """The rows of the page's table for these params."""
    work = work_of(params)
    yield (
        f"A step: {work.flop / 1e9:,.1f} GFLOP, {(work.row_bytes + work.fixed_bytes) / 1e6:,.0f} MB of memory, "
        f"{work.launches} operations, {work.gradients / 1e6:.2f} MB of gradients; {params.total_steps} steps."
    )
    yield ""
    trainings = ("training in `fast`, s", "in `exact`, s")
    yield row("device", "TFLOP/s", "step of `single`, ms", *trainings, f"`ddp` on {DEVICES}", f"`dp` on {DEVICES}")
    yield row("---", *["---:"] * 6)
    for gpu in GPUS:
        ones = [single_ms(work, gpu, rate) for rate in gpu.tflops]
        seconds = [one * params.total_steps / 1e3 for one in ones]
        low, high = slower_in_exact(gpu.capability)
        exact = " to ".join(f"{float(f'{one:.2g}'):g}" for one in (low * min(seconds), high * max(seconds)))
        ratios = [speedups_of(step, work, gpu) for step in (ddp_ms, dp_ms)]
        speedups = (f"{span(ratio)}x" for ratio in ratios)
        rates = " to ".join(f"{rate:g}" for rate in gpu.tflops)
        yield row(gpu.name, rates, span(ones), span(seconds), exact, *speedups)


def assumptions() -> Iterator[str]:
    """The rates of the devices."""
    yield f"An operation is issued in i = {LAUNCH_US:g} us."
    yield ""
    yield row("device", "R, TFLOP/s", "M, GB/s", "A, GB/s", "l, us", "L, GB/s")
    yield row("---", *["---:"] * 5)
    for gpu in GPUS:
        rates = " to ".join(f"{rate:g}" for rate in gpu.tflops)
        yield row(gpu.name, rates, *(f"{figure:g}" for figure in (gpu.memory, gpu.reduce, gpu.latency_us, gpu.link)))


def prediction_here(params: Params) -> Iterator[str]:
    """A step on this CPU as the rates that it reaches predict it, and as it was measured."""
    work = work_of(params)
    parts = [(t.products, t.byte * (work.row_bytes + work.fixed_bytes), work.launches * LAUNCH_US / 1e6, t.step)
             for t in turns(params)]  # fmt: skip
    errors = sorted(sum(part[:3]) / part[3] - 1 for part in parts)
    products, moving, issuing, whole = (1e3 * median(values) for values in zip(*parts, strict=True))
    yield (
        f"predicted {products + moving + issuing:.2f} ms a step (products {products:.2f} at "
        f"{work.flop / products / 1e6:.1f} GFLOP/s, memory {moving:.2f}, operations {issuing:.2f}), "
        f"measured {whole:.2f}: {median(errors):+.0%} ({errors[0]:+.0%} to {errors[-1]:+.0%} in {len(errors)} turns)"
    )


def measured() -> Iterator[str]:
    """What hosts with GPUs have measured of the default experiment, by their ``gpu-check.json`` in benchmarks/hosts."""
    yield row("host", "torch", "product, TFLOP/s", "copy, GB/s", "step of `single`, ms")
    yield row("---", "---", *["---:"] * 3)
    for name, check in hosts().items():
        ran = check["steps"].get("repro", {}).get("rows", {}).get("single-fast")
        if ran and ran["explanation"] and devices_of(check):
            copied = ran["explanation"]["bounds"]["copy_gb_per_s"]
            figures = (f"{ran['roof_tflops']:.1f}", f"{copied:,.0f}", f"{ran['step_time_ms']:.2f}")
            yield row(f"`{name}`", check["versions"]["torch"], *figures)


def filled(text: str) -> str:
    """The page with the tables of both experiments, and with what was measured."""
    for name in EXPERIMENTS:
        told = "\n".join(table(load_params(ROOT / name)))
        text = between(f"<!-- {name} -->\n", f"<!-- /{name} -->", f"\n{told}\n\n", text)
    for name, rows in (("assumptions", assumptions()), ("measured", measured())):
        told = "\n".join(rows)
        text = between(f"<!-- {name} -->\n", f"<!-- /{name} -->", f"\n{told}\n\n", text)
    return text


@click.command(help=__doc__)
@click.argument("params_file", required=False, type=click.Path(path_type=Path))
@click.option("--here", is_flag=True, help="Predict a step on this CPU, and time it.")
def main(params_file: Path | None, here: bool) -> None:  # noqa: D103 - click
    with exit_on_error():
        if params_file is None:
            PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            params = load_params(params_file)
            click.echo("\n".join(prediction_here(params) if here else table(params)))


if __name__ == "__main__":
    main()
