"""Counts the operations of a step and measures the peak speed of matrix products on its device."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import torch

from samebits.errors import first_line
from samebits.measuring.references import WARM_UP_SECONDS
from samebits.numerics.allocators import is_out_of_memory
from samebits.numerics.dispatch import EagerDispatchMode
from samebits.records.usage import Roof
from samebits.training.meters import synchronize

if TYPE_CHECKING:
    from samebits.params.schema import Train
    from samebits.training.loop import Trainable

COUNTING_SECONDS = 0.05  # for the counted passes, estimated from the time of a step
PRODUCT_SECONDS = 0.03  # for repeated products of one size
ROOF_SECONDS = 0.15  # for all sizes
_WARM_PRODUCTS = 100
_SIZES = {"cpu": (128, 256, 512, 768, 1024, 1536), "cuda": (1024, 2048, 4096, 8192)}
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ALSO_PRODUCTS = re.compile(
    r"rnn|lstm|gru|fft|linalg|cdist|trilinear|mkldnn|quantized|sparse|spmm|flash|attention|(^|_)(mv|addmv|dot|addr)$"
)
"""Names of operations that compute products but that the counter does not know."""


def measure_roof(trainable: Trainable, train: Train, samples: int, step_seconds: float) -> Roof | None:
    """The operations of a step of ``samples`` and the roof of its device, measured on rank 0 while the others wait.

    Every rank must call it, after all timed measurements. A failure becomes the ``problem`` of the result. None under
    ``exact``, whose products are not PyTorch's, and with one repeat.
    """
    if trainable.numerics.name == "exact" or train.repeats == 1:
        return None
    return trainable.worker.ranks.first_alone(lambda: _measure(trainable, train, samples, step_seconds))


def _measure(trainable: Trainable, train: Train, samples: int, step_seconds: float) -> Roof:
    roof = Roof()
    try:
        flops, uncounted = count_flops(trainable, samples, step_seconds)
        roof = Roof(flops_per_step=flops, uncounted=uncounted)
        best = multiply_fast(trainable.worker.device, _TYPES.get(train.precision, torch.float32))
    except Exception as error:  # noqa: BLE001 - the training is done: no error in the user's model may end it now
        return roof.model_copy(update={"problem": f"{type(error).__name__}: {first_line(str(error))}"})
    return roof.model_copy(update={"roof_flops": best})


class _Counter(EagerDispatchMode):
    """Counts by the formulas of PyTorch's FlopCounterMode, and notes products without a formula."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        from torch.utils import flop_counter  # late, because with CUDA it imports Triton

        aten = torch.ops.aten
        self._formulas = {
            **flop_counter.flop_registry,
            aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop,
        }
        self.flops = 0
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # PyTorch's
        """Run the operation and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", func)
        if formula := self._formulas.get(packet):
            self.flops += formula(*args, **kwargs, out_val=out)
        elif _multiplies(str(packet)):
            self.uncounted.add(str(packet).replace(".", "::", 1))
        return out


def _multiplies(packet: str) -> bool:
    """Whether an operation may multiply matrices: its name says so, or it is of an unknown library."""
    space, _, name = packet.partition(".")
    return space not in ("aten", "prim", "prims") or bool(_ALSO_PRODUCTS.search(name))


def count_flops(trainable: Trainable, samples: int, step_seconds: float) -> tuple[float, tuple[str, ...]]:
    """Multiplications and additions in a step of ``samples``, and the names of operations that were not counted.

    They are counted forward and backward on some rows of this rank's first micro-batch and scaled to the step. The
    model is called without a wrapper, and no gradient is left in it.
    """
    batch = trainable.batches.micro_batch(0, 0)
    rows = batch.rows
    seconds = step_seconds / trainable.batches.micro_batches
    batch = batch.head(max(2, min(rows, int(rows * COUNTING_SECONDS / max(seconds, 1e-9)))))
    numerics, model = trainable.numerics, trainable.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    with _Counter() as counter:
        loss = numerics.loss(numerics.forward(numerics.module(model), batch), batch.targets)
        torch.autograd.grad(loss, parameters, allow_unused=True)  # not backward, on which ddp has hooks
    return counter.flops * samples / batch.rows, tuple(sorted(counter.uncounted))


def multiply_fast(device: torch.device, dtype: torch.dtype) -> float:
    """The most multiplications and additions per second in products of square matrices, with the present switches.

    Sizes grow until a product takes long enough to be timed, or the time is over. The first product of a size is not
    timed, nor are those that raise the clocks of a GPU. Raises RuntimeError: not even the smallest size works.
    """
    best, began = 0.0, time.perf_counter() + WARM_UP_SECONDS[device.type]
    generator = torch.Generator(device).manual_seed(0)
    for size in _SIZES[device.type]:
        try:
            a, b = (torch.rand(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
            while time.perf_counter() < began:
                _seconds(a, b, device, _WARM_PRODUCTS)
            single = _seconds(a, b, device, 1)  # includes the cost of a first call, such as loading a library
            single = min(single, _seconds(a, b, device, 1))
            repeats = max(1, int(PRODUCT_SECONDS / max(single, 1e-6) / 2))
            seconds = min(_seconds(a, b, device, repeats) / repeats for _ in range(2))
        except RuntimeError as error:
            if best and is_out_of_memory(error):
                break
            raise
        best = max(best, 2 * size**3 / min(seconds, single))
        spent = time.perf_counter() - began
        if spent + 12 * seconds + PRODUCT_SECONDS > ROOF_SECONDS:
            break
    return best


def _seconds(a: torch.Tensor, b: torch.Tensor, device: torch.device, repeats: int) -> float:
    """Seconds of ``repeats`` products in a row, with the device synchronised at both ends."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    synchronize(device)
    return time.perf_counter() - began
