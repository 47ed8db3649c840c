"""What every part of params.yaml is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of params.yaml that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
