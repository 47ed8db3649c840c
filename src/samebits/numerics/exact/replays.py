"""The passes of training steps, recorded once as CUDA graphs and then replayed, each by one launch.

A recording reads batch, weights and windows from the device's memory, so it serves every step, also one that is run
again. What the host decides in a pass has to stay as it was: which samples are here, and which shards run in one pass.
Otherwise the passes are recorded anew. Python does not run in a replay: what a model may not do has been refused in the
steps before.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from samebits.errors import HostError, RefusedError, first_line
from samebits.models.nested import leaves_of, mapped
from samebits.numerics.allocators import is_out_of_memory
from samebits.numerics.exact.backward import gradients
from samebits.numerics.exact.compiled.library import chosen
from samebits.numerics.exact.engine import Engine, below
from samebits.numerics.exact.forms import GradientsUnread
from samebits.numerics.exact.forward_draws import RecordedDraws
from samebits.numerics.exact.kept import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.models.nested import Nested
    from samebits.numerics.exact.module import ExactModule
    from samebits.numerics.exact.numerics import ExactNumerics

    Made = list[Tensor | None]

_CHECKED = 2  # steps after a recording: also one with other weights than it was made with


class StoppedError(Exception):
    """A pass cannot be replayed as it was recorded, and has to be run by the model itself."""


class Recorder(Protocol):
    """Records what a function does on a device, so that it can be done again."""

    def record(self, run: Callable[[], Made]) -> tuple[Made, Callable[[], object]]:
        """What ``run`` returned, and a function that gives these tensors the values of another run.

        That function may raise StoppedError, and what it was to fill is then undefined.
        """


class CudaGraphs:
    """Recordings of both passes, which share a pool of memory, and the stream on which a backward pass follows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], Made]) -> tuple[Made, Callable[[], object]]:
        """See ``Recorder``. Nothing is computed before the first replay."""
        graph = torch.cuda.CUDAGraph()
        library = chosen(self._device.type)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                if library:
                    library.forget_places()  # a replay has to fill its own with zeros
                made = run()
        finally:
            if library:
                library.forget_places()
        return made, graph.replay


class Replays:
    """The recorded passes of one training, if its model can be recorded; ``why_not`` says why it was not."""

    why_not: str | None = None
    _unchecked = 0

    def __init__(self, numerics: ExactNumerics, recorder: Callable[[], Recorder], *, asked: bool) -> None:
        self._numerics, self._recorder, self._asked = numerics, recorder, asked
        self._passes: _Passes | None = None

    def outputs(self, module: ExactModule, inputs: Nested, shards: range, step: int, targets: Nested) -> Tensor:
        """The module's outputs, by a replay where there is a recording or can be one."""
        windows, given = self._numerics.windows, (inputs, targets)
        run = partial(module.run, shards=shards, step=step)
        if self._passes is not None and self._passes.stopped:
            self.why_not = f"a backward pass has stopped: {self._passes.stopped}"
        if self.why_not or not windows.are_settled or (self._numerics.apart and not self._asked):
            return run(inputs, targets=targets)
        shapes = [x.shape for _, x in leaves_of(given)]
        key = shards, self._numerics.apart, windows.apart, torch.get_num_threads(), shapes
        if self._passes is None or self._passes.key != key:
            self._passes = None  # its memory is free for the next one
            self._passes = self._recorded(module, run, given, key)
        if self._passes is not None:
            module.require_kept(module.model.training)
            try:
                if self._are_same(self._passes, module, run, given, step):
                    return self._passes(given, step)
            except StoppedError:  # the model's own pass goes on, or says why not
                pass
        return run(inputs, targets=targets)

    def _recorded(
        self, module: ExactModule, run: Callable[..., Tensor], given: tuple[Nested, Nested], key: Any
    ) -> _Passes | None:
        plain = _Plain(self._numerics, module, run)
        try:
            plain.both(given)  # so that all windows are in memory
            passes = _Passes(key, plain, given, self._recorder())
        except (RuntimeError, HostError) as error:  # whatever CUDA says of a capture
            if is_out_of_memory(error):
                raise
            self.why_not = f"the model cannot be captured: {first_line(str(error))}"
            plain.forget()  # what has no values, since nothing was computed
            return None
        self._unchecked = _CHECKED
        return passes

    def _are_same(
        self, passes: _Passes, module: ExactModule, run: Callable[..., Tensor], given: tuple[Nested, Nested], step: int
    ) -> bool:
        """Whether a replay gives the bits of Python's passes, as the first ones are to show.

        Raises RefusedError: it does not, and was asked for.
        """
        if self._unchecked:
            self._unchecked -= 1
            plain = _Plain(self._numerics, module, run)
            if _bits_of(passes.both(given, step)) != _bits_of(plain.both(given)):
                self.why_not = "a captured pass gave other bits than the model itself"
        if self.why_not and self._asked:
            raise RefusedError(self.why_not, hint="set train.cuda_graphs: false")
        return self.why_not is None


def _bits_of(made: Made) -> list[bytes | memoryview | None]:
    return [None if one is None else bits(one.cpu()) for one in made]


class _Noted(NamedTuple):
    """What a pass has told, beside its results: of windows, refusals and running statistics."""

    sizes: dict[str, list[Tensor]]
    refusals: list[tuple[Any, Tensor]]
    calls: dict[int, list[Any]]

    def tensors(self) -> Made:
        found = [size for sizes in self.sizes.values() for size in sizes]
        found += [flag for _, flag in self.refusals]
        return [*found, *(call.found for calls in self.calls.values() for call in calls)]


class _Plain:
    """Both passes as Python runs them, the second over what the first has kept.

    They run with parameters that have the memory of the module's own: those are known to PyTorch's graph of another
    stream, from before, and a recording may not wait for that.
    """

    def __init__(self, numerics: ExactNumerics, module: ExactModule, run: Callable[..., Tensor]) -> None:
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
        """Outputs, and what is noted."""
        with self._with_others():
            self._outputs = self._run(given[0], targets=given[1])
        return [self._outputs.detach(), *self._take().tensors()]

    def backward(self, slopes: Tensor) -> Made:
        """Gradients of the trained parameters, and what is noted."""
        outputs, self._outputs = self._outputs, None
        assert outputs is not None
        engine = Engine(defer=self._numerics.windows.defer)
        with engine, GradientsUnread(engine):
            grads = gradients(outputs, {str(i): self._own[p] for i, p in enumerate(self.trained)}, slopes)
        return [*grads, *self._take().tensors()]

    def both(self, given: tuple[Nested, Nested]) -> Made:
        """Outputs, and gradients for slopes of one."""
        with torch.enable_grad():
            outputs, *_ = self.forward(given)
            assert outputs is not None
            return [outputs, *self.backward(torch.ones_like(outputs))[: len(self.trained)]]

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
        self._given = mapped(Tensor.clone, given)
        with plain.recording(), torch.enable_grad():
            (outputs, *_), self._forward = recorder.record(partial(plain.forward, self._given))
            self._told = [plain.noted]
            assert outputs is not None
            self._outputs, self._slopes = outputs, torch.zeros_like(outputs)
            made, self._backward = recorder.record(partial(plain.backward, self._slopes))
            self._told.append(plain.noted)
        self._grads = made[: len(plain.trained)]

    def __call__(self, given: tuple[Nested, Nested], step: int) -> Tensor:
        """The outputs, whose gradients reach the parameters by the other recording."""
        outputs: Tensor = _Played.apply(self, given, step, *self._plain.trained)  # type: ignore[no-untyped-call]
        return outputs

    def both(self, given: tuple[Nested, Nested], step: int) -> Made:
        """See ``_Plain.both``."""
        outputs = self.forward(given, step).clone()
        return [outputs, *self.backward(torch.ones_like(outputs))]

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
