"""What a model may return."""

from __future__ import annotations

from torch import Tensor

from samebits.errors import UserError


def tensor_of(outputs: object) -> Tensor:
    """The model's tensor, or the ``logits`` of its output object.

    Raises:
        UserError: it is neither.
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise UserError(
        f"the model returned {type(outputs).__name__}, expected a tensor or an object with a tensor .logits",
        hint="return the logits alone; DataParallel cannot gather other objects from its devices",
    )
