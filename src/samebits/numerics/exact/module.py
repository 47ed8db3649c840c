"""The module that a strategy wraps under ``exact``: the user's model, fed shard by shard or all shards at once."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from samebits.errors import RefusedError, few
from samebits.models.nested import Nested, mapped, unbound
from samebits.numerics.dispatch import module_paths, storage_of
from samebits.numerics.exact.ambient import guarded
from samebits.numerics.exact.batch_norm import ShardNorms, counting_apart
from samebits.numerics.exact.engine import Draws, Engine, written_in_forward
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.kept import Kept, bits
from samebits.numerics.exact.parameters import Entry, tied_places
from samebits.numerics.exact.recurrent import flat_weights_entered
from samebits.numerics.exact.survey import NotFinite, Refusals, Survey
from samebits.numerics.exact.switches import switched, switches
from samebits.numerics.exact.whole import Scope, WeightCache, WholeBatch
from samebits.numerics.exact.windows import GRADIENTS_AT, GRADIENTS_OF, INPUTS_OF, LOSS
from samebits.numerics.interface import computed, logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from samebits.numerics.exact.numerics import ExactNumerics

    SlopesOf = Callable[[int, Tensor], Tensor]


Part = tuple[Nested, Nested]
"""Inputs of one shard, and its targets if the loss is computed with the model."""


class ExactModule(nn.Module):
    """The model between its float64 parameters and its output, as an exact function of each shard.

    Shapes: inputs and targets (shards, samples, ...), with the shards' numbers; outputs (shards, samples, ...). With a
    loss of the user's own, outputs are its values, (shards, samples), and it needs the targets.
    """

    def __init__(self, model: nn.Module, numerics: ExactNumerics) -> None:
        super().__init__()
        self.model = model
        self.module_paths = module_paths(model)
        self._ties = tied_places(model)
        self._numerics, self._own = numerics, numerics.own_loss
        self.loss = self._own.function if self._own else None  # a module moves with the others to a replica's device
        kinds = (INPUTS_OF, GRADIENTS_AT, GRADIENTS_OF)
        numerics.windows.expect([LOSS, *(f"{kind} {place}" for place in self._ties for kind in kinds)])
        self._recurs = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self._weights = WeightCache()
        self._kept: dict[bool, Kept] = {}
        self._changes_seen = numerics.running.changes

    def forward(self, inputs: Nested, shards: range, step: int, targets: Nested = None) -> Tensor:
        """Run the model on every shard as if it were alone."""
        if self._numerics.independent:
            return self._run_whole(inputs, shards, step)
        return self._run_each(unbound((inputs, targets)), shards, step)

    def _outputs(self, part: Part) -> Tensor:
        """The outputs for one shard, from copies, since forward may write to its input."""
        inputs, targets = mapped(Tensor.clone, part)
        return computed(self.model, self._own, self.loss, inputs, targets)

    def _run_whole(self, inputs: Tensor, shards: range, step: int) -> Tensor:
        batch = inputs.flatten(0, 1)
        places = {id(parameter): place for place, parameter in self._by_place()}
        windows, global_batch = self._numerics.windows, self._numerics.samples
        scope = Scope(windows=windows, global_batch=global_batch, samples=batch.shape[0], rounded=self._weights)
        with self._engine(step, shards), WholeBatch(scope, lambda p: places[id(p)]):
            outputs = logits_of(self.model(batch))
            return outputs.view(*inputs.shape[:2], *outputs.shape[1:])

    def _run_each(self, parts: Sequence[Part], shards: range, step: int) -> Tensor:
        values = self._values()
        versions = {place: value._version for place, value in values.items()}
        mode, kept = self.model.training, self._guarded(values)
        if getattr(self, "_is_replica", False):  # its modules live for one step
            self._kept = {}
        self._require_kept(mode)
        outputs = []
        for shard, part in zip(shards, parts, strict=True):
            engine = self._engine(step, [shard], kept)
            calls = self._numerics.running.start(shard) if torch.is_grad_enabled() else None
            with self._entered(values), engine, OneForm(engine, ShardNorms(self.model, engine, calls)), guarded(engine):
                outputs.append(self._outputs(part))
        for place, value in values.items():
            if value._version != versions[place]:
                raise written_in_forward(f"model.{place}")
        self._require_kept(mode)
        return torch.stack(outputs)

    def fingerprint(
        self, parts: Sequence[Part], shards: range, step: int, slopes_of: SlopesOf, *, backwards: bool
    ) -> dict[int, bytes]:
        """A digest of each shard's outputs, gradients and number of draws; ``backwards`` feeds the last shard first.

        ``slopes_of`` returns the loss's gradients for the outputs of the shard at an index.
        """
        fed = list(enumerate(zip(shards, parts, strict=True)))
        values, before = self._values(), Kept(self.model)
        found, kept = {}, self._guarded(values)
        for index, (shard, part) in reversed(fed) if backwards else fed:
            digest, draws = hashlib.blake2b(), Draws(self._numerics.seed, step, [shard])
            engine = Engine(draws, kept=kept)
            norms = ShardNorms(self.model, engine)
            with torch.enable_grad(), self._entered(values), engine, OneForm(engine, norms):
                held = switches()
                with guarded(engine):
                    outputs = self._outputs(part)
                if name := switched(held):  # checked before the backward pass, which may need its old value
                    raise written_in_forward(f"a switch of PyTorch's, {name}")
                grads = self._grads(outputs, slopes_of(index, outputs.detach()))
            for tensor in (outputs, *(grad for grad in grads if grad is not None)):
                digest.update(bits(tensor.cpu()))
            found[shard] = digest.digest() + bytes(str(draws.count), "ascii")
        for name in before.changes():
            raise written_in_forward(name)
        return found

    def survey(self, refusals: Refusals, part: Part, step: int, slopes_of: SlopesOf) -> None:
        """Note all refusals of the model's forward and backward pass over the first shard."""
        values, before = self._values(), switches()
        try:
            kept = Kept(self.model)
        except RefusedError as error:
            kept = None
            refusals.note(error)
        forward = Survey(refusals, Draws(self._numerics.seed, step, [0]), kept=self._guarded(values),
                         replaced=self._numerics.replaced)  # fmt: skip
        try:
            self._both_passes(values, forward, Survey(refusals), part, partial(slopes_of, 0))
        except RefusedError as error:  # raised at the end of a pass, past the surveying engine
            refusals.note(error)
        for name in kept.changes() if kept else ():
            refusals.note(written_in_forward(name))
        if switch := switched(before):
            refusals.note(written_in_forward(f"a switch of PyTorch's, {switch}"))

    def not_finite(self, parts: Sequence[Part], shards: range, step: int, slopes_of: SlopesOf) -> list[str]:
        """Operations that make infinity or NaN of a shard, each with its places; of the first such shard."""
        values = self._values()
        if gone := [f"model.{place}" for place, value in values.items() if not value.isfinite().all()]:
            return [f"{few(gone)}: infinite or NaN before this step"]
        for index, (shard, part) in enumerate(zip(shards, parts, strict=True)):
            found = Refusals()
            forward = NotFinite(found, Draws(self._numerics.seed, step, [shard]))
            self._both_passes(values, forward, NotFinite(found), part, partial(slopes_of, index))
            if found.count:
                return [text for text, _ in found.told()]
        return []

    def _both_passes(
        self,
        values: dict[str, Tensor],
        forward: Engine,
        backward: Engine,
        part: Part,
        slopes_of: Callable[[Tensor], Tensor],
    ) -> None:
        with torch.enable_grad(), self._entered(values):
            with forward, OneForm(forward, ShardNorms(self.model, forward)), guarded(forward):
                outputs = self._outputs(part)
            with backward:
                self._grads(outputs, slopes_of(outputs.detach()))

    def _grads(self, outputs: Tensor, slopes: Tensor) -> tuple[Tensor | None, ...]:
        entered = [tensor for _, tensor in self._by_place() if tensor.requires_grad]
        return torch.autograd.grad(outputs, entered, slopes, allow_unused=True)

    def _values(self) -> dict[str, Tensor]:
        """Float32 values of the parameters, as the model sees them."""
        return {place: parameter.detach().to(torch.float32) for place, parameter in self._by_place()}

    def _require_kept(self, mode: bool) -> None:
        """Refuse a model that has changed anything but its parameters since its first check in this mode."""
        running = self._numerics.running
        if self._changes_seen != running.changes:
            self._changes_seen = running.changes
            for kept in self._kept.values():
                kept.renew()
        if mode not in self._kept:
            self._kept[mode] = Kept(self.model)
        for name in self._kept[mode].changes():
            raise written_in_forward(name)

    def _engine(self, step: int, shards: Sequence[int], kept: Mapping[str, Tensor] = MappingProxyType({})) -> Engine:
        """The engine for a pass. Without gradients there is no end of a step that a refusal could be deferred to."""
        numerics, trains = self._numerics, torch.is_grad_enabled()
        return Engine(
            Draws(numerics.seed, step, shards),
            defer=numerics.windows.defer if trains else None,
            kept=kept,
            replaced=numerics.replaced if trains else {},
        )

    def _guarded(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Buffers and parameters. A write through ``.data`` does not count in their versions."""
        tensors = values | dict(self.model.named_buffers())
        return {f"model.{name}": tensor for name, tensor in tensors.items()}

    def _by_place(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter under its first name; a replica has tensors in place of parameters."""
        for place in self._ties:
            owner, name = self._owner(place)
            yield place, getattr(owner, name)

    def _owner(self, place: str) -> tuple[nn.Module, str]:
        path, _, name = place.rpartition(".")
        return self.model.get_submodule(path), name

    @contextmanager
    def _entered(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Give the model float32 parameters whose gradients reach the float64 ones.

        Whatever it does with its batch, a shard's gradient is then a function of that shard alone, which is rounded to
        a window on the way. So the float64 ones, ``DataParallel`` and ``DistributedDataParallel`` sum shards in any
        order.
        """
        originals = []
        windows, shards = self._numerics.windows, self._numerics.shards
        for place, parameter in list(self._by_place()):
            entered = Entry.apply(parameter, values[place], windows, shards, place)  # type: ignore[no-untyped-call]
            for owner, name in map(self._owner, self._ties[place]):
                holder: dict[str, Any] = owner._parameters if name in owner._parameters else owner.__dict__
                originals.append((place, holder, name, parameter))
                holder[name] = entered
        try:
            with counting_apart(self.model), flat_weights_entered(self.model) if self._recurs else nullcontext():
                yield
            for place, holder, name, _ in originals:
                now = holder.get(name)
                if now is None or storage_of(now) != storage_of(values[place]):  # it, or its ``.data``, was assigned
                    raise written_in_forward(f"model.{place}")
        finally:
            for _, holder, name, parameter in originals:
                holder[name] = parameter


def run_backward(loss: Tensor) -> None:
    """``loss.backward()`` within all entered modes; PyTorch's own leaves the function modes first."""
    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
                         accumulate_grad=True)  # fmt: skip
