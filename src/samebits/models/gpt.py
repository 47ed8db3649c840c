"""``gpt``: a small decoder with tied token embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from samebits.models.interface import BuiltinModel, ModelSpec
from samebits.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from samebits.models.interface import Contradiction, DataShape


class GPTKwargs(Section):
    """Depth, heads, width and dropout of ``gpt``."""

    layers: PositiveInt = 2
    """Decoder blocks."""
    heads: PositiveInt = 2
    """Attention heads; they divide the width."""
    width: PositiveInt = 64
    """Width of the residual stream."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability of dropout."""


class GPTModel(BuiltinModel):
    """The small decoder."""

    name: Literal["gpt"]
    """Which model."""
    kwargs: GPTKwargs = GPTKwargs()
    """Arguments of the model."""


def _fits(data: DataShape) -> bool:
    return data.input_dtype == "int64" and len(data.input_shape) == 1 and data.target_shape == data.input_shape


def _build(model: GPTModel, data: DataShape) -> nn.Module:
    from samebits.models.modules.gpt import GPT

    assert data.num_classes
    return GPT(data.num_classes, data.input_shape[0], **model.kwargs.model_dump())


def _contradictions(model: GPTModel) -> Iterator[Contradiction]:
    if model.kwargs.width % model.kwargs.heads:
        accepts = f"a divisor of model.kwargs.width = {model.kwargs.width}"
        yield "model.kwargs.heads", model.kwargs.heads, accepts, "change one of them"


GPT_SPEC = ModelSpec(
    section=GPTModel,
    tasks=("tokens",),
    needs="a class for each token",
    fits=_fits,
    build=_build,
    contradictions=_contradictions,
)
