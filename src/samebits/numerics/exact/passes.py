"""A model under ``exact``, fed shard by shard or all shards at once."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samebits.models.nested import Nested, mapped, unbound
from samebits.numerics.allocators import is_out_of_memory
from samebits.numerics.dispatch import module_paths, storage_of
from samebits.numerics.exact import together
from samebits.numerics.exact.ambient import guarded
from samebits.numerics.exact.batch_norm import Call, ShardNorms, counting_apart
from samebits.numerics.exact.caches import Attributes, settle
from samebits.numerics.exact.engine import Engine, written_in_forward
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.functions import taken_apart
from samebits.numerics.exact.kept import Kept, made_anew
from samebits.numerics.exact.parameters import Entry, tied_places
from samebits.numerics.exact.recurrent import flat_weights_entered
from samebits.numerics.exact.switches import switched, switches
from samebits.numerics.exact.windows import GRADIENTS_OF, LOSS
from samebits.numerics.interface import computed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from samebits.numerics.exact.global_norm import JoinedBatch
    from samebits.numerics.exact.numerics import ExactNumerics
    from samebits.numerics.exact.replays import Replays


_REPLICAS = "dp has no communication within a pass"
Part = tuple[Nested, Nested]
"""Inputs of one shard, and its targets if the loss is computed with the model."""


class Sharded(nn.Module):
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
        numerics.windows.expect([LOSS, *(f"{GRADIENTS_OF} {place}" for place in self._ties)])
        self._recurs = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self._makes_weights = any(map(made_anew, model.modules()))
        self._kept: dict[bool, Kept] = {}
        self._settled = set[bool]()
        self._changes_seen = numerics.running.changes
        self.replays: Replays | None = None

    def forward(self, inputs: Nested, shards: range, step: int, targets: Nested = None) -> Tensor:
        """Run the model on every shard as if it were alone, or replay such a pass."""
        self._numerics.is_replayed = False
        if self.replays and self.training and torch.is_grad_enabled():
            return self.replays.outputs(self, inputs, shards, step, targets)
        return self.run(inputs, shards, step, targets)

    def run(self, inputs: Nested, shards: range, step: int, targets: Nested = None) -> Tensor:
        """``forward`` by the model itself."""
        part, values = (inputs, targets), self._values()
        versions = {place: value._version for place, value in values.items()}
        mode = self.model.training
        at_once = self._numerics.apart is None
        if getattr(self, "_is_replica", False):  # its modules live for one step
            self._kept = {}
            if at_once and self._numerics.batch_norm == "global":
                self._numerics.apart, at_once = _REPLICAS, False
        is_first = mode not in self._kept and self._numerics.recorded is None
        attributes = Attributes(self.model) if is_first and mode not in self._settled else None
        self.require_kept(mode)
        outputs = self._run_together(part, shards, step, values) if at_once else None
        if outputs is None:
            outputs = self._run_each(unbound(part), shards, step, values)
        for place, value in values.items():
            if value._version != versions[place]:
                raise written_in_forward(f"model.{place}")
        if attributes is not None and any(self._kept[mode].changes()):
            self._settled.add(mode)
            self.settle(attributes, self._kept.pop(mode), unbound(part), shards, step)
            return self.run(inputs, shards, step, targets)
        self.require_kept(mode)
        return outputs

    def settle(self, attributes: Attributes, kept: Kept, parts: Sequence[Part], shards: range, step: int) -> None:
        """Let the model keep what its first pass has made. Raises RefusedError: see ``caches``."""
        values, beyond = self._values(), self._numerics.shards
        others = {place: value * 0.75 for place, value in values.items()}
        zeros = mapped(torch.zeros_like, parts[0])  # which all ranks have: what they keep is alike
        fed = [(zeros, beyond, values), (parts[-1], shards[-1], values), (parts[0], shards[0], others)]
        settle(attributes, kept, [partial(self._alone, one, shard, step, given) for one, shard, given in fed])

    def _alone(self, part: Part, shard: int, step: int, values: dict[str, Tensor]) -> Tensor:
        """The outputs for one shard, of which nothing is noted."""
        engine = Engine(Draws(self._numerics.seed, step, [shard]), kept=self._guarded(values))
        held = switches()
        outputs = self._one(part, values, engine, ShardNorms(self.model, engine))
        if name := switched(held):
            raise written_in_forward(f"a switch of PyTorch's, {name}")
        return outputs

    def _one(self, part: Part, values: dict[str, Tensor], engine: Engine, norms: ShardNorms) -> Tensor:
        """The outputs for one shard, by an engine of its own."""
        with self._entered(self._entries(values), values), engine, OneForm(engine, norms), guarded(engine):
            return self._outputs(part)

    def _outputs(self, part: Part) -> Tensor:
        """The outputs for one shard, from copies, since forward may write to its input."""
        inputs, targets = mapped(Tensor.clone, part)
        outputs = computed(self.model, self._own, self.loss, inputs, targets)
        for module in self.model.modules() if self._makes_weights else ():
            for name in made_anew(module):  # else who reads it before the module is called has that of another pass
                vars(module).pop(name, None)
        return outputs

    def _run_each(self, parts: Sequence[Part], shards: range, step: int, values: dict[str, Tensor]) -> Tensor:
        outputs, kept, apart = [], self._guarded(values), None
        if self._numerics.batch_norm == "global" and torch.is_grad_enabled():
            apart = f"shards run one by one: {self._numerics.apart}"
        for shard, part in zip(shards, parts, strict=True):
            engine = self._engine(step, [shard], kept)
            calls = self._numerics.running.start(shard) if torch.is_grad_enabled() else None
            outputs.append(self._one(part, values, engine, ShardNorms(self.model, engine, calls, apart)))
        return torch.stack(outputs)

    def _run_together(self, part: Part, shards: range, step: int, values: dict[str, Tensor]) -> Tensor | None:
        """``_run_each`` in passes over several shards; None if the model cannot run so."""
        batch, order, outputs = self._numerics.joined_batch(shards), list[int](), list[Tensor]()
        kept = self._guarded(values)

        def run(here: Sequence[int]) -> tuple[list[Call], together.Pass]:
            engine, calls = self._engine(step, here, kept), list[Call]()
            entered, rows = self._entries(values, here=len(here)), [shards.index(shard) for shard in here]
            with engine, guarded(engine):
                return calls, self._vmapped(
                    mapped(partial(together.rows_of, rows), part), entered, engine, calls, batch
                )

        for some in together.passes(shards, values, whole=batch is not None):
            try:
                for here, (calls, found) in together.divided(some, run):
                    order += here
                    outputs.append(found.outputs)
                    if torch.is_grad_enabled():
                        self._numerics.running.note(here, calls, found.noted)
            except Exception as error:  # alone, a shard raises it again if it is the model's own
                strange = batch is not None and not together.stands_in_the_way(error)  # as ranks that are gone
                if strange or is_out_of_memory(error) or self._numerics.recorded:
                    raise
                self._numerics.apart = together.why_apart(error)
                return None
        joined = torch.cat(outputs)
        return joined if order == list(shards) else torch.stack([joined[order.index(shard)] for shard in shards])

    def _vmapped(
        self,
        part: Part,
        entered: dict[str, Tensor],
        engine: Engine,
        calls: list[Call] | None = None,
        batch: JoinedBatch | None = None,
    ) -> together.Pass:
        def compute(parameters: dict[str, Tensor], part: Part) -> Tensor:
            norms, any_one = ShardNorms(self.model, engine, calls, batch), next(iter(parameters.values()))
            form = OneForm(engine, norms, together=any_one, answers=batch is None)
            with self._entered(parameters), form, taken_apart(form):
                return self._outputs(part)

        return together.run(compute, entered, part, lambda: (call.found for call in calls or ()))

    def _values(self) -> dict[str, Tensor]:
        """Float32 values of the parameters, as the model sees them."""
        values = self._numerics.windows.spare.values
        return {place: values(place, parameter.detach()) for place, parameter in self._by_place()}

    def require_kept(self, mode: bool, *, drawn: bool = True) -> None:
        """Refuse a model that has changed anything but its parameters since its first check in this mode.

        A pass that is recorded is checked before its first replay, and not by operations of the recording. No Python
        runs in a replay that could have ``drawn`` random numbers.
        """
        if self._numerics.recorded is not None:
            return
        running = self._numerics.running
        if self._changes_seen != running.changes:
            self._changes_seen = running.changes
            for kept in self._kept.values():
                kept.renew()
        if mode not in self._kept:
            self._kept[mode] = Kept(self.model)
        for name in self._kept[mode].changes(drawn=drawn):
            raise written_in_forward(name)

    def _engine(self, step: int, shards: Sequence[int], kept: Mapping[str, Tensor] = MappingProxyType({})) -> Engine:
        """The engine for a pass. Without gradients there is no end of a step that a refusal could be deferred to."""
        numerics, trains = self._numerics, torch.is_grad_enabled()
        return Engine(
            Draws(numerics.seed, step, shards, recorded=numerics.recorded),
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

    def _entries(self, values: dict[str, Tensor], here: int | None = None) -> dict[str, Tensor]:
        """Float32 parameters whose gradients reach the float64 ones; with ``here`` once for each of so many shards.

        Whatever a model does with its batch, a shard's gradient is then a function of that shard alone, which is
        rounded to a window on the way. So the float64 ones, ``DataParallel`` and ``DistributedDataParallel`` sum shards
        in any order.
        """
        windows, shards = self._numerics.windows, self._numerics.shards
        return {
            place: Entry.apply(parameter, values[place], windows, shards, place, here)  # type: ignore[no-untyped-call]
            for place, parameter in self._by_place()
        }

    @contextmanager
    def _entered(self, entered: dict[str, Tensor], values: dict[str, Tensor] | None = None) -> Iterator[None]:
        """Give the model these parameters, which must keep the memory of ``values``, if they are given."""
        originals = []
        for place, parameter in list(self._by_place()):
            for owner, name in map(self._owner, self._ties[place]):
                holder: dict[str, Any] = owner._parameters if name in owner._parameters else owner.__dict__
                originals.append((place, holder, name, parameter))
                holder[name] = entered[place]
        try:
            with counting_apart(self.model), flat_weights_entered(self.model) if self._recurs else nullcontext():
                yield
            for place, holder, name, _ in originals:
                now = holder.get(name)
                same = now is entered[place] if values is None else _shares(now, values[place])
                if not same:  # it, or its ``.data``, was assigned
                    raise written_in_forward(f"model.{place}")
        finally:
            for _, holder, name, parameter in originals:
                holder[name] = parameter


def _shares(now: Tensor | None, value: Tensor) -> bool:
    return now is not None and storage_of(now) == storage_of(value)
