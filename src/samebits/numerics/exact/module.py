"""The module that a strategy wraps under ``exact``, with its trials: shards run in several ways and are compared."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samebits.errors import RefusedError, few
from samebits.models.nested import mapped, unbound
from samebits.numerics.exact import together
from samebits.numerics.exact.ambient import guarded
from samebits.numerics.exact.backward import digest_of, gradients
from samebits.numerics.exact.batch_norm import ShardNorms
from samebits.numerics.exact.caches import Attributes
from samebits.numerics.exact.engine import Engine, written_in_forward
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.global_norm import JoinedBatch, alone
from samebits.numerics.exact.kept import Kept
from samebits.numerics.exact.passes import Part, Sharded
from samebits.numerics.exact.survey import NotFinite, Refusals, Survey
from samebits.numerics.exact.switches import switched, switches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    SlopesOf = Callable[[int, Tensor], Tensor]

__all__ = ["ExactModule", "Part"]


class ExactModule(Sharded):
    """The module with its trials, which try some shards before a training, and look into a pass that went wrong."""

    def fingerprint(
        self, part: Part, shards: range, step: int, slopes_of: SlopesOf, *, backwards: bool
    ) -> dict[int, bytes]:
        """A digest of each shard's outputs, gradients and number of draws; ``backwards`` feeds the last shard first.

        ``slopes_of`` returns the loss's gradients for the outputs of the shard at an index.

        Raises:
            RefusedError: the model writes to what it keeps, and that is not all that its first pass makes, see
                ``caches``.
        """
        attributes, before = Attributes(self.model), Kept(self.model)
        found = self._digests(part, shards, step, slopes_of, backwards=backwards)
        if not any(before.changes()):
            return found
        with torch.enable_grad():
            self.settle(attributes, before, unbound(part), shards, step)
        before = Kept(self.model)
        if found != self._digests(part, shards, step, slopes_of, backwards=backwards):
            raise RefusedError(
                "the first pass gives other bits than the next ones",
                hint="see what the model keeps from its first pass, as a random number, or set train.numerics: [fast]",
            )
        for name in before.changes():
            raise written_in_forward(name)
        return found

    def _digests(
        self, part: Part, shards: range, step: int, slopes_of: SlopesOf, *, backwards: bool
    ) -> dict[int, bytes]:
        fed = list(enumerate(zip(shards, unbound(part), strict=True)))
        values, found = self._values(), dict[int, bytes]()
        kept = self._guarded(values)
        for index, (shard, one) in reversed(fed) if backwards else fed:
            draws, entered = Draws(self._numerics.seed, step, [shard]), self._entries(values)
            engine = Engine(draws, kept=kept)
            norms = self._norms(engine)
            with torch.enable_grad(), self._entered(entered, values), engine, OneForm(engine, norms):
                held = switches()
                with guarded(engine):
                    outputs = self._outputs(one)
                if name := switched(held):  # checked before the backward pass, which may need its old value
                    raise written_in_forward(f"a switch of PyTorch's, {name}")
                grads = gradients(outputs, entered, slopes_of(index, outputs.detach()))
            found[shard] = digest_of(outputs, grads, draws)
        return found

    def fingerprint_together(
        self, part: Part, shards: range, step: int, slopes_of: SlopesOf, *, backwards: bool = False
    ) -> dict[int, bytes]:
        """``fingerprint`` of one pass over all these shards. Raises whatever stands in the way of such a pass."""
        values, trained = self._values(), {place: one.requires_grad for place, one in self._by_place()}
        fed = [*enumerate(together.tried(shards, values))][:: -1 if backwards else 1]

        def run(fed: Sequence[tuple[int, int]]) -> dict[int, bytes]:
            entered = {
                place: value.expand(len(fed), *value.shape).requires_grad_(trained[place])
                for place, value in values.items()
            }
            draws = Draws(self._numerics.seed, step, [shard for _, shard in fed])
            engine = Engine(draws, kept=self._guarded(values))
            batch = JoinedBatch(alone, len(fed)) if self._numerics.batch_norm == "global" else None
            with torch.enable_grad(), engine, guarded(engine):
                rows = mapped(partial(together.rows_of, [index for index, _ in fed]), part)
                outputs = self._vmapped(rows, entered, engine, batch=batch).outputs
                slopes = [slopes_of(index, one) for (index, _), one in zip(fed, outputs.detach(), strict=True)]
                grads = gradients(outputs, entered, torch.stack(slopes))
            return {
                shard: digest_of(outputs[place], [None if grad is None else grad[place] for grad in grads], draws)
                for place, (_, shard) in enumerate(fed)
            }

        return {shard: digest for _, found in together.divided(fed, run) for shard, digest in found.items()}

    def survey(self, refusals: Refusals, part: Part, step: int, slopes_of: SlopesOf) -> None:
        """Note all refusals of the model's forward and backward pass over the first shard."""
        values, before, attributes = self._values(), switches(), Attributes(self.model)
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
        if kept and (names := list(kept.changes())):
            try:
                with torch.enable_grad():
                    self.settle(attributes, kept, [part], range(1), step)
            except RefusedError:
                for name in names:
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
        entered = self._entries(values)
        with torch.enable_grad(), self._entered(entered, values):
            with forward, OneForm(forward, self._norms(forward)), guarded(forward):
                outputs = self._outputs(part)
            with backward:
                gradients(outputs, entered, slopes_of(outputs.detach()))

    def _norms(self, engine: Engine) -> ShardNorms:
        """Norms of a shard in a trial, where the batch that BatchNorm is over has no other."""
        over = JoinedBatch(alone, 1, at_once=False) if self._numerics.batch_norm == "global" else None
        return ShardNorms(self.model, engine, batch=over)
