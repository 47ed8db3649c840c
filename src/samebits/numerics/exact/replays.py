"""The passes of training steps, recorded once and then replayed: on a GPU as CUDA graphs, each by one launch.

A recording reads batch, weights and windows from the device's memory, so it serves every step, also one that is run
again. What the host decides in a pass has to stay as it was: which samples are here, and which shards run in one pass.
Otherwise the passes are recorded anew. Python does not run in a replay: what a model may not do has been refused in the
steps before.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from samebits.errors import HostError, RefusedError, first_line
from samebits.models.nested import leaves_of, mapped
from samebits.numerics.allocators import is_out_of_memory
from samebits.numerics.exact.backward import gradients
from samebits.numerics.exact.engine import Engine, below
from samebits.numerics.exact.forms import GradientsUnread
from samebits.numerics.exact.forward_draws import RecordedDraws
from samebits.numerics.exact.kept import bits
from samebits.numerics.exact.recorders import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.models.nested import Nested
    from samebits.numerics.exact.numerics import ExactNumerics
    from samebits.numerics.exact.passes import Sharded
    from samebits.numerics.exact.recorders import Made, Recorder

_CHECKED = 3  # replays: the recording's own step, and two with other weights and samples
_MOST_STOPS, _MOST_RECORDINGS = 3, 8  # after which a training goes on without replays


class Replays:
    """The recorded passes of one training, if its model can be recorded; ``why_not`` says why it was not.

    Unless they were ``asked`` for, only passes over all shards at once are replayed, and what stands in the way of a
    replay leaves the model's own passes as they are.
    """

    why_not: str | None = None
    is_used = False
    """Whether a pass was replayed."""

    def __init__(self, numerics: ExactNumerics, recorder: Callable[[], Recorder], *, asked: bool) -> None:
        self._numerics, self._recorder, self._asked = numerics, recorder, asked
        self._passes: _Passes | None = None
        self._unchecked = self._stops = self._recordings = 0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which the model's own passes run, without the memory of a recording."""
        before, self.why_not, self._passes = self.why_not, "own passes are wanted", None
        try:
            yield
        finally:
            self.why_not = before

    def outputs(self, module: Sharded, inputs: Nested, shards: range, step: int, targets: Nested) -> Tensor:
        """The module's outputs, by a replay where there is a recording or can be one."""
        given, run = (inputs, targets), partial(module.run, shards=shards, step=step)
        try:
            if passes := self._passes_over(given, module, run, shards):
                module.require_kept(module.model.training, drawn=False)
                self._check(passes, module, run, given, step)
                outputs = passes(given, step)
                self._numerics.is_replayed = self.is_used = True
                return outputs
        except StoppedError as error:
            self._stops += 1
            if self._stops == _MOST_STOPS:
                self.why_not = self.why_not or f"replays have stopped {self._stops} times, now because {error}"
        return run(inputs, targets=targets)  # which goes on, or says what is wrong

    def _passes_over(
        self, given: tuple[Nested, Nested], module: Sharded, run: Callable[..., Tensor], shards: range
    ) -> _Passes | None:
        """Recorded passes that serve this step; None if there are none."""
        windows, apart = self._numerics.windows, self._numerics.apart
        if self._passes is not None and self._passes.stopped:
            self.why_not = f"a backward pass has stopped: {self._passes.stopped}"
        if self.why_not or not windows.are_settled or (apart and not self._asked):
            return None
        leaves = [(name, x.shape, x.dtype) for name, x in leaves_of(given)]
        key = shards, apart, windows.apart, torch.get_num_threads(), module.model.training, leaves
        if self._passes is None or self._passes.key != key or self._passes.has_moved():
            self._passes = None  # its memory is free for the next one
            if self._recordings == _MOST_RECORDINGS:
                self.why_not = f"its passes are of more than {_MOST_RECORDINGS} kinds"
                return None
            self._recordings += 1
            plain = _Plain(self._numerics, module, run)
            with self._tried(plain):
                plain.both(given)  # so that a GPU's windows are in memory
                self._passes = _Passes(key, plain, given, self._recorder())
            self._unchecked = _CHECKED
        return self._passes

    def _check(
        self, passes: _Passes, module: Sharded, run: Callable[..., Tensor], given: tuple[Nested, Nested], step: int
    ) -> None:
        """Compare the first replays with Python's passes.

        Raises:
            RefusedError: bits differ in a replay that was asked for.
            StoppedError: they differ in another.
        """
        if not self._unchecked:
            return
        plain = _Plain(self._numerics, module, run)
        with self._tried(plain):
            are_same = _bits_of(passes.both(given, step)) == _bits_of(plain.both(given))
        self._unchecked -= 1
        if not are_same:
            self.why_not = "a captured pass gave other bits than the model itself"
            if self._asked:
                raise RefusedError(self.why_not, hint="set train.cuda_graphs: false")
            raise StoppedError(self.why_not)

    @contextmanager
    def _tried(self, plain: _Plain) -> Iterator[None]:
        """Context whose errors say that the model cannot be captured; those that CUDA has for it where it was asked."""
        try:
            yield
        except StoppedError:
            plain.forget()
            raise
        except Exception as error:
            expected = isinstance(error, (RuntimeError, HostError)) and not is_out_of_memory(error)
            if self._asked and not expected:
                raise
            self.why_not = f"the model cannot be captured: {first_line(str(error))}"
            plain.forget()  # what may have no values
            raise StoppedError(self.why_not) from error


def why_not_replayed(replays: Replays | None, apart: str | None) -> str | None:
    """Why no pass was replayed, whose shards ran ``apart`` for a reason; None if one was."""
    if replays is None:
        return "only whole batches on a CPU are, without exact.batch_norm: global; and on a GPU with train.cuda_graphs"
    if replays.is_used or replays.why_not:
        return replays.why_not
    return f"shards run one by one: {apart}" if apart else "the training ended before"


def _bits_of(made: Made) -> list[bytes | memoryview | None]:
    return [None if one is None else bits(one.cpu()) for one in made]


class _Noted(NamedTuple):
    """What a pass has told, beside its results: of windows, refusals and running statistics."""

    sizes: dict[str, list[Tensor]]
    refusals: list[tuple[Any, Tensor]]
    calls: dict[int, list[Any]]

    def numbers(self) -> Made:
        """What windows and statistics are settled by."""
        found = [size for sizes in self.sizes.values() for size in sizes]
        return [*found, *(call.found for calls in self.calls.values() for call in calls)]


class _Plain:
    """Both passes as Python runs them, the second over what the first has kept.

    They run with parameters that have the memory of the module's own: those are known to PyTorch's graph of another
    stream, from before, and a recording may not wait for that.
    """

    def __init__(self, numerics: ExactNumerics, module: Sharded, run: Callable[..., Tensor]) -> None:
        self._numerics, self._module, self._run = numerics, module, run
        self._own = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
        self.trained = [p for p in self._own if p.requires_grad]
        self.noted = _Noted({}, [], {})
        self._draws = RecordedDraws(numerics.seed)
        self._outputs: Tensor | None = None

    def _take(self) -> _Noted:
        calls = self._numerics.running.taken()
        self.noted = _Noted(*self._numerics.windows.taken(), calls)
        return self.noted

    def places(self) -> list[tuple[dict[str, Any], str, Tensor | None]]:
        """Holder, name and memory of each parameter and buffer."""
        return [
            (holder, name, None if tensor is None else tensor.detach())
            for part in self._module.modules()
            for holder in (part._parameters, part._buffers)
            for name, tensor in holder.items()
        ]

    def forget(self) -> None:
        """Forget what passes have told in this step."""
        with suppress(RuntimeError):
            self._take()

    def run_again(self) -> None:
        """Have the step run again, whatever its passes tell."""
        self._numerics.windows.run_again()

    def give(self, noted: _Noted) -> None:
        """Let the step be settled by what a recorded pass has told."""
        self._numerics.windows.give(noted.sizes, noted.refusals)
        self._numerics.running.give(noted.calls)

    @contextmanager
    def _with_others(self) -> Iterator[None]:
        """Context with the other parameters in place of the module's own."""
        places = [
            (part._parameters, name, p) for part in self._module.modules() for name, p in part._parameters.items()
        ]
        try:
            for holder, name, p in places:
                holder[name] = None if p is None else self._own[p]
            yield
        finally:
            for holder, name, p in places:
                holder[name] = p

    def forward(self, given: tuple[Nested, Nested]) -> Made:
        """Outputs alone."""
        with self._with_others():
            self._outputs = self._run(given[0], targets=given[1])
        self._take()
        return [self._outputs.detach()]

    def backward(self, slopes: Tensor) -> Made:
        """Gradients of the trained parameters."""
        outputs, self._outputs = self._outputs, None
        assert outputs is not None
        engine = Engine(defer=self._numerics.windows.defer)
        with engine, GradientsUnread(engine):
            grads = gradients(outputs, {str(i): self._own[p] for i, p in enumerate(self.trained)}, slopes)
        self._take()
        return [*grads]

    def both(self, given: tuple[Nested, Nested]) -> Made:
        """Outputs, gradients for slopes of one, and what is noted."""
        with torch.enable_grad():
            (outputs,) = self.forward(given)
            told = self.noted.numbers()
            assert outputs is not None
            return [outputs, *told, *self.backward(torch.ones_like(outputs)), *self.noted.numbers()]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context for passes that are recorded, which read windows and keys from the device's memory alone."""
        self._numerics.recorded = self._draws
        try:
            with self._numerics.windows.recording():
                yield
        finally:
            self._numerics.recorded = None

    def renew(self, step: int) -> None:
        """Write the windows and keys of this step into the device's memory."""
        self._numerics.windows.renew()
        self._draws.renew(step)


class _Passes:
    """Recordings of both passes over a batch of one shape."""

    stopped: str | None = None
    """Why a backward pass has stopped, so that its step has to be run again."""

    def __init__(self, key: Any, plain: _Plain, given: tuple[Nested, Nested], recorder: Recorder) -> None:
        self.key, self._plain = key, plain
        self._places = plain.places()
        self._given = mapped(Tensor.clone, given)
        with plain.recording(), torch.enable_grad():
            (outputs,), self._forward = recorder.record(partial(plain.forward, self._given))
            self._told = [plain.noted]
            assert outputs is not None
            self._outputs, self._slopes = outputs, torch.zeros_like(outputs)
            self._grads, self._backward = recorder.record(partial(plain.backward, self._slopes))
            self._told.append(plain.noted)

    def has_moved(self) -> bool:
        """Whether a parameter or a buffer has other memory than when it was recorded."""
        return any(
            tensor is not None and ((now := holder.get(name)) is None or now.data_ptr() != tensor.data_ptr())
            for holder, name, tensor in self._places
        )

    def __call__(self, given: tuple[Nested, Nested], step: int) -> Tensor:
        """The outputs, whose gradients reach the parameters by the other recording."""
        outputs: Tensor = _Played.apply(self, given, step, *self._plain.trained)  # type: ignore[no-untyped-call]
        return outputs

    def both(self, given: tuple[Nested, Nested], step: int) -> Made:
        """See ``_Plain.both``."""
        outputs = self.forward(given, step)
        self.backward(torch.ones_like(outputs))
        forward, backward = self._told
        return [outputs, *forward.numbers(), *self._grads, *backward.numbers()]

    def forward(self, given: tuple[Nested, Nested], step: int) -> Tensor:
        """Replay the forward pass over a batch."""
        with below():
            self._plain.renew(step)
            for (_, kept), (_, new) in zip(leaves_of(self._given), leaves_of(given), strict=True):
                kept.copy_(new)
        self._forward()
        return self._outputs

    def backward(self, slopes: Tensor) -> Made:
        """Replay the backward pass."""
        with below():
            self._slopes.copy_(slopes)
        self._backward()
        return self._grads

    def settled(self, slopes: Tensor) -> Made:
        """``backward``, and what both passes tell is noted; if it stops, that the step is to be run again."""
        try:
            self.backward(slopes)
        except StoppedError as error:
            self.stopped = str(error)
            self._plain.run_again()
        else:
            for noted in self._told:
                self._plain.give(noted)
        return self._grads


class _Played(torch.autograd.Function):
    """Both passes by replays."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, given: tuple[Nested, Nested], step: int, *_: Tensor) -> Tensor:
        ctx.passes = passes
        return passes.forward(given, step).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the recording's own memory, which the optimizer reads before the next replay."""
        grads = ctx.passes.settled(slopes)
        return None, None, None, *(None if grad is None else grad.detach() for grad in grads)
