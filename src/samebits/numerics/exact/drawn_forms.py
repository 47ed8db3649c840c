"""Random functions by draws of uniform, normal and exponential numbers: those of tensors, and permutations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samebits.numerics.exact.together import physical

if TYPE_CHECKING:
    from collections.abc import Callable


def _require(valid: Tensor, name: str, expected: str) -> None:
    """Raise RuntimeError, as PyTorch does, for parameters that are none."""
    if not bool(physical(valid).all()):
        raise RuntimeError(f"{name}: expected {expected}")


def _multinomial(
    weights: Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """``torch.multinomial`` by exponential draws: the largest share of a weight wins.

    Raises RuntimeError as PyTorch's: a weight is negative or not finite, or all of a row are zero.
    """
    if generator is not None:
        return torch.multinomial(weights, num_samples, replacement, generator=generator)
    weights = weights.detach()
    valid = ((weights >= 0) & weights.isfinite()).all(-1) & (weights > 0).any(-1)
    _require(valid, "multinomial", "weights that are finite, not negative, and not all zero")
    if replacement:
        weights = weights.unsqueeze(-2).expand(*weights.shape[:-1], num_samples, weights.shape[-1])
    shares = weights.div(torch.empty_like(weights).exponential_())
    return shares.argmax(-1) if replacement else shares.topk(num_samples, -1).indices


def _ones(p: Tensor, like: Tensor) -> Tensor:
    """Whether a uniform number is below a probability, for each number of ``like``."""
    p = p.detach()
    _require((p >= 0) & (p <= 1), "bernoulli", "probabilities between 0 and 1")
    return torch.rand_like(like) < p


def _bernoulli(input: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:  # noqa: A002 - PyTorch's name
    if args or kwargs or generator is not None:
        return torch.bernoulli(input, *args, generator=generator, **kwargs)
    return _ones(input, input).to(input.dtype)


def _bernoulli_in_place(x: Tensor, p: Tensor | float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    if generator is not None or not isinstance(p, Tensor):
        return x.bernoulli_(p, generator=generator)
    return x.copy_(_ones(p, x))


def _normal(
    mean: Tensor | float, std: Tensor | float = 1.0, *args: Any, generator: torch.Generator | None = None, **kwargs: Any
) -> Tensor:
    given = [one for one in (mean, std) if isinstance(one, Tensor)]
    if not given or args or kwargs or generator is not None:
        return torch.normal(mean, std, *args, generator=generator, **kwargs)
    _require(torch.as_tensor(std) >= 0, "normal", "standard deviations from 0 on")
    with torch.no_grad():
        shape = torch.broadcast_shapes(*(one.shape for one in given))  # type: ignore[no-untyped-call]
        return torch.randn(shape, dtype=given[0].dtype, device=given[0].device) * std + mean


def _randperm(n: int, **kwargs: Any) -> Tensor:
    """``torch.randperm`` by the order of uniform numbers, which shards draw in one pass."""
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return torch.randperm(n, **kwargs)
    drawn = torch.rand(n, dtype=torch.float64, device=kwargs.get("device"))
    return drawn.argsort(stable=True).to(kwargs.get("dtype") or torch.int64)


FORMS: dict[Any, Callable[..., Any]] = {
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_in_place,
    torch.normal: _normal,
    torch.randperm: _randperm,
}
