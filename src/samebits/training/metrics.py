"""Loss, accuracy and metrics of a model over samples, each of them once."""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samebits.errors import UserError, first_line, place_of
from samebits.models.experiment import metrics_of
from samebits.models.nested import mapped, rows_of
from samebits.numerics.interface import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from samebits.models.experiment import Loss
    from samebits.models.nested import Nested
    from samebits.numerics.interface import Numerics
    from samebits.training.batches import Pair


def evaluate(
    module: nn.Module,
    numerics: Numerics,
    batches: Iterable[Pair],
    *,
    classes: bool,
    device: torch.device,
    model: nn.Module | None = None,
) -> tuple[float, float | None, dict[str, float]]:
    """Mean loss over all batches, accuracy if there are ``classes`` and the loss is the kit's, and the user's metrics.

    The last batch may be short; it is never padded. Sums are exact and are rounded once. ``model`` is the one inside of
    ``module`` that carries the metrics. They run outside of its numerics, on what it returned.

    Raises UserError: a metric does not give a number for each sample.
    """
    losses: list[float] = []
    metrics = Metrics(model, device) if model is not None and metrics_of(model) else None
    correct, count = torch.zeros((), dtype=torch.int64, device=device), 0
    classes = classes and numerics.own_loss is None
    was_training = module.training
    module.eval()
    with torch.no_grad(), metrics.listening() if metrics else nullcontext():
        for inputs, targets in batches:
            if metrics:
                module = numerics.module(metrics.model)  # a new one, to which what a metric has changed is not new
            outputs = numerics.forward(module, MicroBatch(inputs, targets, step=0))
            losses += numerics.losses(outputs, targets).tolist()
            if metrics:
                metrics.measure(inputs if targets is None else targets)
            if classes:
                correct += (outputs.flatten(0, -2).argmax(dim=-1) == targets.flatten()).sum()
                count += targets.numel()
    module.train(was_training)
    means = metrics.means() if metrics else {}
    return math.fsum(losses) / len(losses), means.pop("accuracy", correct.item() / count if classes else None), means


class Metrics:
    """The metrics that a model carries, and their values for samples.

    A hook hears what the model returns; ``exact`` calls it once for each shard.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self._functions = {
            name: function.to(device) if isinstance(function, nn.Module) else function
            for name, function in metrics_of(model).items()
        }
        self._values: dict[str, list[float]] = {name: [] for name in self._functions}
        self._returned: list[tuple[int, Any]] = []
        self._depth = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which the model is called."""
        handles = [
            self.model.register_forward_pre_hook(self._begin),
            self.model.register_forward_hook(self._end, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: Any) -> None:
        self._depth += 1

    def _end(self, _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
        self._depth -= 1
        if not self._depth:  # a model may call itself
            self._returned.append((rows_of([*positional, named]), outputs))

    def measure(self, samples: Nested) -> None:
        """Take the values of a batch, whose targets or whose samples these are.

        Raises UserError: the model was called more than once for a sample, or a metric gives no number for each.
        """
        returned, self._returned = self._returned, []
        if sum(rows for rows, _ in returned) != rows_of(samples):
            what = "metrics: the model is called more than once for a sample, so its outputs are not those of a batch"
            raise UserError(what, hint="call it once in the loss, or compute metrics from runs/*/model.safetensors")
        first = 0
        for rows, outputs in returned:
            given = mapped(itemgetter(slice(first, first + rows)), samples)
            for name, function in self._functions.items():
                self._values[name] += _values_of(name, function, mapped(_as_float, outputs), given)
            first += rows

    def means(self) -> dict[str, float]:
        """The mean of each, but of those that are infinite or NaN for some sample, which are named on stderr."""
        finite = {name: values for name, values in self._values.items() if all(map(math.isfinite, values))}
        found = {name: math.fsum(values) / len(values) for name, values in finite.items()}
        for name in self._values.keys() - found.keys():
            sys.stderr.write(f"metric {name}: left out, as it is infinite or NaN for some samples\n")
        return found


def _as_float(value: Any) -> Any:
    """A tensor of half the precision as float32, which a metric's own constants are of."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _values_of(name: str, metric: Loss, outputs: Any, targets: Nested) -> list[float]:
    samples = rows_of(targets)
    try:
        values = metric(outputs, targets)
    except Exception as error:
        what = f"metric {name}: {type(error).__name__}: {first_line(str(error))}"
        raise UserError(what, hint=f"see {place_of(error) or 'that function'}") from error
    if not isinstance(values, Tensor) or values.shape != (samples,):
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        what = f"metric {name}: it gives {got}, expected a tensor of a number for each of {samples} samples"
        raise UserError(what, hint="leave out its mean")
    numbers: list[float] = values.double().tolist()
    return numbers
