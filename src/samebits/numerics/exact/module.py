"""What a strategy wraps under ``exact``: the user's model, fed shard by shard or with all shards at once."""

from __future__ import annotations

import pickle
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.errors import UserError
from samebits.numerics.exact.above import OneForm
from samebits.numerics.exact.draws import Draws
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.loop import enter
from samebits.numerics.exact.whole import Scope, WeightCache, WholeBatch
from samebits.numerics.exact.windows import GRADIENTS_AT, GRADIENTS_OF, INPUTS_OF, LOSS
from samebits.numerics.outputs import tensor_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.numerics.exact.windows import Windows


class ExactModule(nn.Module):
    """The model between its float64 parameters and its output, as an exact function of each shard.

    Shapes: inputs (shards, samples, ...), the shards' numbers (shards,), the step as a number; outputs
    (shards, samples, ...). ``independent``: the model is known to treat each sample by itself.
    """

    def __init__(
        self, model: nn.Module, *, windows: Windows, shards: int, global_batch: int, seed: int, independent: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.module_paths = {id(module): f"model.{path}" if path else "model" for path, module in model.named_modules()}
        self._places = parameter_places(model)
        self._windows, self._shards, self._global_batch, self._seed = windows, shards, global_batch, seed
        self._independent = independent
        names = [place for place, _, _ in self._owners()]
        windows.expect(
            [LOSS, *(f"{what} {name}" for name in names for what in (INPUTS_OF, GRADIENTS_AT, GRADIENTS_OF))]
        )
        self._rounded = WeightCache()

    def forward(self, inputs: Tensor, numbers: Tensor, step: int) -> Tensor:
        """Run every shard."""
        run = self._run_whole if self._independent else self._run_each
        return run(inputs, numbers.tolist(), step)

    def _run_whole(self, inputs: Tensor, numbers: list[int], step: int) -> Tensor:
        batch = inputs.flatten(0, 1)
        places = {id(parameter): place for place, parameter in self._by_place()}
        scope = Scope(self._windows, self._global_batch, batch.shape[0], self._rounded)
        with Engine(Draws(self._seed, step, numbers)), WholeBatch(scope, lambda p: places[id(p)]):
            outputs = tensor_of(self.model(batch))
            return outputs.view(*inputs.shape[:2], *outputs.shape[1:])

    def _run_each(self, inputs: Tensor, numbers: list[int], step: int) -> Tensor:
        values = {place: parameter.detach().to(torch.float32) for place, parameter in self._by_place()}
        before = self._written(values)
        outputs = []
        for number, shard in zip(numbers, inputs.unbind(0), strict=True):
            with self._entered(values), Engine(Draws(self._seed, step, [number])), OneForm():
                outputs.append(tensor_of(self.model(shard)))
        after = self._written(values)
        for name in before | after:
            if before.get(name) != after.get(name):
                raise written_in_forward(name)
        return torch.stack(outputs)

    def _written(self, values: dict[str, Tensor]) -> dict[str, object]:
        """What forward must leave as it is: buffers, parameters, and generators that count their draws."""
        found: dict[str, object] = {f"model.{name}": (id(t), t._version) for name, t in self.model.named_buffers()}
        found |= {f"model.{place}": value._version for place, value in values.items()}
        found["Python's random numbers"] = random.getstate()
        found["NumPy's random numbers"] = pickle.dumps(np.random.get_state())  # noqa: NPY002
        return found

    def _by_place(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter under each of its names; a replica has tensors in their place."""
        for place, owner, name in self._owners():
            yield place, getattr(owner, name)

    def _owners(self) -> Iterator[tuple[str, nn.Module, str]]:
        for path, name in self._places:
            yield f"{path}.{name}" if path else name, self.model.get_submodule(path), name

    @contextmanager
    def _entered(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Let the model see float32 parameters, whose gradients reach the float64 ones."""
        originals = []
        for place, owner, name in self._owners():
            parameter = getattr(owner, name)
            entered = enter(parameter, values[place], self._windows, self._shards, place)
            holder: dict[str, Any] = owner._parameters if name in owner._parameters else owner.__dict__
            originals.append((holder, name, parameter))
            holder[name] = entered
        try:
            yield
        finally:
            for holder, name, parameter in originals:
                holder[name] = parameter


def parameter_places(model: nn.Module) -> list[tuple[str, str]]:
    """Path of the owner and name of each parameter, a tied one under each of its names."""
    return [
        (path, name)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def widen(model: nn.Module) -> tuple[list[list[nn.Parameter]], dict[str, Tensor]]:
    """Give a model float64 parameters with the same values, each of its own; those that were one come in one group.

    The second value is the parameters that were replaced, by place: nothing may use them any more.

    A tied parameter is several here, because its uses are summed over samples on grids that differ; the optimizer
    sums them.

    Raises:
        UserError: a parameter is not float32.
    """
    groups: dict[int, list[nn.Parameter]] = {}
    replaced: dict[str, Tensor] = {}
    for path, name in parameter_places(model):
        owner = model.get_submodule(path)
        parameter = owner._parameters[name]
        assert parameter is not None
        place = f"{path}.{name}" if path else name
        if parameter.dtype != torch.float32:
            raise UserError(f"exact: {place} is {parameter.dtype}, expected float32", hint="build the model in float32")
        wide = nn.Parameter(parameter.detach().to(torch.float64), requires_grad=parameter.requires_grad)
        groups.setdefault(id(parameter), []).append(wide)
        owner._parameters[name], replaced[place] = wide, parameter
    return list(groups.values()), replaced


def written_in_forward(name: str) -> UserError:
    """The refusal of a model that keeps state from one shard to the next."""
    return UserError(
        f"exact: {name}: written in forward, so its value depends on how shards are shared out",
        hint="keep such state out of the model, or train with numerics fast alone",
    )


def require_plain(model: nn.Module) -> None:
    """Refuse modules whose code the engine cannot see into, or which run in other kernels on other devices.

    Raises:
        UserError: there is one.
    """
    for path, module in model.named_modules():
        place = f"model.{path}" if path else "model"
        if type(module).__module__ == "torch._dynamo.eval_frame" or module._compiled_call_impl is not None:
            why, hint = "a compiler may fuse what must be rounded apart", "leave torch.compile to train.compile"
        elif isinstance(module, torch.jit.ScriptModule):
            why, hint = "TorchScript may fuse what must be rounded apart", "use the module itself"
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
            why = "recurrent modules run in other kernels on a GPU"
            hint = "write the cell with nn.Linear, or train with numerics fast alone"
        else:
            continue
        raise UserError(f"exact: {place} ({type(module).__name__}): {why}", hint=hint)


def narrowed(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model that was widened, as float32, by the model's own names."""
    wide = {f"{path}.{name}" if path else name for path, name in parameter_places(model)}
    return {name: t.to(torch.float32) if name in wide else t for name, t in model.state_dict().items()}
