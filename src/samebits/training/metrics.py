"""Loss, accuracy and metrics of a model over samples, each of them once."""

from __future__ import annotations

import math
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samebits.errors import UserError, first_line, place_of
from samebits.models.experiment import metrics_of
from samebits.models.nested import mapped, rows_of
from samebits.numerics.interface import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

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
    metrics = metrics_of(model) if model is not None else {}
    own: dict[str, list[float]] = {name: [] for name in metrics}
    correct, count = torch.zeros((), dtype=torch.int64, device=device), 0
    classes = classes and numerics.own_loss is None
    was_training = module.training
    module.eval()
    with torch.no_grad(), _returned_by(model if metrics else None) as returned:
        for inputs, targets in batches:
            returned.clear()
            outputs = numerics.forward(module, MicroBatch(inputs, targets, step=0))
            losses += numerics.losses(outputs, targets).tolist()
            for made, given in _with_samples(returned, inputs if targets is None else targets):
                for name, metric in metrics.items():
                    own[name] += _values_of(name, metric, made, given)
            if classes:
                correct += (outputs.flatten(0, -2).argmax(dim=-1) == targets.flatten()).sum()
                count += targets.numel()
    module.train(was_training)
    means = {name: math.fsum(values) / len(values) for name, values in own.items()}
    return math.fsum(losses) / len(losses), means.pop("accuracy", correct.item() / count if classes else None), means


Returned = list[tuple[int, Any]]
"""Numbers of samples, and what a model returned for them."""


@contextmanager
def _returned_by(model: nn.Module | None) -> Iterator[Returned]:
    """A list of what the model returns in the block; ``exact`` calls it once for each shard."""
    returned: Returned = []

    def note(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
        returned.append((rows_of([*positional, named]), outputs))

    if model is None:
        yield returned
        return
    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield returned
    finally:
        handle.remove()


def _with_samples(returned: Returned, samples: Nested) -> Iterator[tuple[Any, Nested]]:
    """What the model returned, with the targets of the same samples, or the samples themselves."""
    first = 0
    for rows, outputs in returned:
        yield outputs, mapped(itemgetter(slice(first, first + rows)), samples)
        first += rows


def _values_of(name: str, metric: Loss, outputs: Any, targets: Any) -> list[float]:
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
    if not (numbers := values.double()).isfinite().all():
        raise UserError(f"metric {name}: it gives infinity or NaN", hint="see what it divides by")
    return numbers.tolist()
