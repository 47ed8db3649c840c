"""``mlp`` and ``wide_mlp``: the first is small enough to be bound by overhead, the second by arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from samebits.models.interface import BuiltinModel, ModelSpec
from samebits.section import Section, as_tuple

if TYPE_CHECKING:
    from torch import nn

    from samebits.models.interface import DataShape

_HIDDEN = {"mlp": (384, 256), "wide_mlp": (4096, 4096)}


class MLPKwargs(Section):
    """Hidden widths and dropout of ``mlp`` and ``wide_mlp``; None takes the model's own widths."""

    hidden: Annotated[tuple[PositiveInt, ...], BeforeValidator(as_tuple)] | None = None
    """Hidden widths; null takes the model's own, [384, 256] for mlp and [4096, 4096] for wide_mlp."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability of dropping a hidden unit."""


class MLPModel(BuiltinModel):
    """The two perceptrons."""

    name: Literal["mlp", "wide_mlp"] = "mlp"
    """Which model."""
    kwargs: MLPKwargs = MLPKwargs()
    """Arguments of the model."""


def _fits(data: DataShape) -> bool:
    return data.input_dtype != "int64" and len(data.output_shape) == 1


def _build(model: MLPModel, data: DataShape) -> nn.Module:
    from samebits.models.modules.mlp import MLP

    hidden = _HIDDEN[model.name] if model.kwargs.hidden is None else model.kwargs.hidden
    return MLP(data.input_shape, data.output_shape[-1], hidden, dropout=model.kwargs.dropout)


MLP_SPEC = ModelSpec(
    section=MLPModel,
    tasks=("vectors", "regression", "images"),
    needs="numbers in, one target per sample",
    fits=_fits,
    build=_build,
)
