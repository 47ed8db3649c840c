"""The built-in models by name, and a user's own. Nothing here imports torch before a model is built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator, Field, Tag

from samebits.models.convnet import CONVNET_SPEC
from samebits.models.gpt import GPT_SPEC
from samebits.models.mlp import MLP_SPEC
from samebits.section import Arguments, Section

if TYPE_CHECKING:
    from typing import TypeAlias

    from samebits.models.interface import BuiltinModel, ModelSpec

MODELS: dict[str, ModelSpec] = {name: spec for spec in (MLP_SPEC, CONVNET_SPEC, GPT_SPEC) for name in spec.names}
"""Built-in models by name, in the order in which messages list them; the first is the default."""

FACTORY = "package.module:factory"


class UserModel(Section):
    """A factory of the user's own; what it imports is found, and ``source`` adds a file or folder to it."""

    name: str
    """package.module:factory, importable from the repository's root."""
    kwargs: Arguments = Field({}, validate_default=True)
    """What the factory is called with; it also gets ``card=`` if it has such a parameter."""
    source: str | None = None
    """Null, or a file or folder that holds the factory, all of whose files retrain when they are edited."""


def _tag(value: object) -> str:
    """A built-in model's tag is its name."""
    default = next(iter(MODELS))
    name = str(value.get("name", default) if isinstance(value, dict) else getattr(value, "name", default))
    return FACTORY if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) else name


if TYPE_CHECKING:
    Model: TypeAlias = BuiltinModel | UserModel
else:
    _sections = [*((spec.section, name) for name, spec in MODELS.items()), (UserModel, FACTORY)]
    Model = Annotated[
        Union[tuple(Annotated[section, Tag(name)] for section, name in _sections)], Discriminator(_tag)  # noqa: UP007
    ]
