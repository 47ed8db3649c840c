"""``convnet``: a small residual net with GroupNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from samebits.models.interface import BuiltinModel, ModelSpec
from samebits.section import Section

if TYPE_CHECKING:
    from torch import nn

    from samebits.models.interface import DataShape


class ConvNetKwargs(Section):
    """Channels of the first stage and residual blocks in each of the three stages."""

    width: int = Field(16, ge=4, multiple_of=4)
    """Channels of the first stage; doubled in the second and again in the third."""
    blocks: PositiveInt = 1
    """Residual blocks in each of the three stages."""


class ConvNetModel(BuiltinModel):
    """The small residual net."""

    name: Literal["convnet"]
    """Which model."""
    kwargs: ConvNetKwargs = ConvNetKwargs()
    """Arguments of the model."""


def _fits(data: DataShape) -> bool:
    one_class = len(data.output_shape) == 1 and data.num_classes is not None
    return data.input_dtype != "int64" and len(data.input_shape) == 3 and one_class


def _build(model: ConvNetModel, data: DataShape) -> nn.Module:
    from samebits.models.modules.convnet import ConvNet

    assert data.num_classes
    return ConvNet(data.input_shape, data.num_classes, **model.kwargs.model_dump())


CONVNET_SPEC = ModelSpec(
    section=ConvNetModel,
    tasks=("images",),
    needs="images of shape (channels, height, width), one class per sample",
    fits=_fits,
    build=_build,
)
