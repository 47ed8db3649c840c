"""``nn.DataParallel`` as the strategy ``dp`` uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DataParallel

from samebits.batch_split import chunk
from samebits.models.nested import leaves_of, refilled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Replicas(DataParallel[nn.Module]):
    """PyTorch's wrapper, which also raises a replica's own error and divides ranges like tensors of their length.

    ``notes`` is called with its phases beside the forward pass of the replicas.
    """

    notes: Callable[[Any], None] = staticmethod(lambda _: None)  # a plain function would become a method

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[int | torch.device]
    ) -> Any:
        """Divide the arguments between the devices; ranges stay on the host.

        PyTorch gets the tensors alone, since it would give each device the whole of a dataclass.
        """
        self.notes("scatter")
        leaves, count = tuple(leaf for _, leaf in leaves_of(inputs)), len(device_ids)
        parts, kwargs_of_parts = super().scatter(leaves, kwargs, device_ids)

        parts = tuple(
            refilled(inputs, (chunk(value, index, count) if isinstance(value, range) else value for value in part))
            for index, part in enumerate(parts)
        )
        return parts, kwargs_of_parts

    def replicate(self, module: nn.Module, device_ids: Sequence[int | torch.device]) -> list[nn.Module]:
        """Copy the module to every device."""
        self.notes("replicate")
        return super().replicate(module, device_ids)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Bring the outputs to one device, where the forward pass continues."""
        self.notes("gather")
        gathered = super().gather(outputs, output_device)
        self.notes("forward")
        return gathered

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas. PyTorch replaces an exception of theirs by a new one that lacks the hint and the place."""
        self.notes("forward")
        guarded = [_Replica(replica) for replica in replicas]
        try:
            return super().parallel_apply(guarded, inputs, kwargs)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - it is raised again
            raise next((replica.error for replica in guarded if replica.error), error) from None


class _Replica:
    """A replica of a module, and the exception that it raised."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.error: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._module(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise
