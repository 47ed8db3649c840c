"""``exact`` as the training loop sees it."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from samebits.errors import RefusedError
from samebits.host.torch_names import require_torch_names
from samebits.host.variables import SHARDS
from samebits.models.nested import unbound
from samebits.numerics.exact import ambient, elementary, integer_products
from samebits.numerics.exact.backward import run_backward
from samebits.numerics.exact.batch_norm import RunningStatistics
from samebits.numerics.exact.compiled import check as check_kernels
from samebits.numerics.exact.compiled import library
from samebits.numerics.exact.engine import Engine, below
from samebits.numerics.exact.forms import GradientsUnread
from samebits.numerics.exact.global_norm import JoinedBatch, alone
from samebits.numerics.exact.losses import SummedLoss, each_loss
from samebits.numerics.exact.module import ExactModule, Part
from samebits.numerics.exact.optimizers import ExactOptimizer, optimizer_of
from samebits.numerics.exact.parameters import narrowed, refused_parts, widen
from samebits.numerics.exact.recorders import CudaGraphs
from samebits.numerics.exact.replays import Replays, why_not_replayed
from samebits.numerics.exact.self_test import check
from samebits.numerics.exact.survey import Survey
from samebits.numerics.exact.together import UNTRIED, why_apart, why_apart_at_first
from samebits.numerics.exact.traces import Traces
from samebits.numerics.exact.windows import Windows
from samebits.numerics.interface import Numerics
from samebits.numerics.kernels import choose_kernels
from samebits.records.run import Arithmetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from samebits.models.nested import Nested
    from samebits.numerics.exact.forward_draws import RecordedDraws
    from samebits.numerics.exact.global_norm import Reduce
    from samebits.numerics.exact.recorders import Recorder
    from samebits.numerics.exact.self_test.check import Team
    from samebits.numerics.exact.survey import Refusals
    from samebits.numerics.interface import AllReduce, LossName, MicroBatch
    from samebits.params.schema import Train

_SHARDS_ASKED = 4


class ExactNumerics(Numerics):
    """One set of bits for any device, strategy and number of devices.

    A global batch has ``samples`` samples in ``shards`` shards, with targets of ``target_shape``.
    """

    name = "exact"
    reduction = "sum"

    def __init__(
        self,
        train: Train,
        device: torch.device,
        loss: LossName,
        target_shape: tuple[int, ...],
        *,
        seed: int,
        shards: int,
        samples: int,
        batch_norm: Literal["shard", "global"] = "shard",
    ) -> None:
        self._train, self._device = train, device
        self.seed, self.shards, self.samples = seed, shards, samples
        self.batch_norm = batch_norm
        self._all_reduce: Reduce | None = None
        self.take_data(loss, target_shape)
        self.replaced: dict[str, Tensor] = {}
        self.windows = Windows()
        self.running = RunningStatistics(shards)
        self.apart: str | None = why_apart_at_first()
        """Why shards run one by one and not in one pass; None if they do."""
        self._model: nn.Module | None = None
        self._replays: Replays | None = None
        self.is_replayed = False
        """Whether the last pass of a module was a replay."""
        self.recorded: RecordedDraws | None = None
        """Takes the keys of draws while passes are recorded."""

    def take_data(self, loss: LossName, target_shape: tuple[int, ...] = ()) -> None:
        """See ``Numerics.take_data``."""
        super().take_data(loss)
        self._targets = self.samples * math.prod(target_shape)

    def configure(self) -> None:
        """Choose kernels that the engine can see into, and the kit's own where they are right."""
        check_kernels.start(self._device)
        torch.set_deterministic_debug_mode("default")
        choose_kernels(fused=False)  # fused kernels hide their operations, and opt_einsum changes the order of products
        ambient.guard_process()
        # A later import, as by DDP, would find a stance that compiles functions of the model.
        from torch import _dynamo  # noqa: F401

        require_torch_names()  # whose names are there only now

    def require_sound(self, team: Team) -> None:
        """Run the self-test on GPUs; CPUs are known from the kit's own tests. Raises HostError: see ``check``."""
        if self._device.type == "cuda":
            torch.set_flush_denormal(False)  # as the engine does in each pass
            check.require_sound(team)
        integer_products.start(team.devices)

    @contextmanager
    def construction(self, refusals: Refusals | None = None) -> Iterator[None]:
        """Context in which a factory's computations are exact; ``portable_initialization`` draws random numbers.

        Raises RefusedError, or notes it in ``refusals``. Refused are also factories that leave a thread running or
        change PyTorch's switches.
        """
        engine = Engine(builds=True) if refusals is None else Survey(refusals, builds=True)
        with ambient.building(engine):
            yield

    def prepare(self, model: nn.Module) -> None:
        """Give the model float64 parameters, see ``widen``. Raises RefusedError: see ``refused_parts``."""
        for refused in refused_parts(model):
            raise refused
        self._widen(model)

    def _widen(self, model: nn.Module) -> None:
        self.replaced = widen(model)
        if not self._train.compile:
            torch.compiler.set_stance("force_eager")  # for functions that the model itself compiles

    def model_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state as float32, under the names that it was built with."""
        return narrowed(model)

    def module(self, model: nn.Module) -> nn.Module:
        """The model as a strategy wraps it, fed by whole shards."""
        self.take_loss(model, self._device)
        self._model = model
        return ExactModule(model, self)

    @property
    def graphs(self) -> bool:
        """See ``Numerics.graphs``."""
        return self._train.cuda_graphs and self._train.why_no_graphs(self._device.type, self.batch_norm) is None

    @property
    def captures(self) -> bool:
        """See ``Numerics.captures``. On a CPU passes are recorded without being asked for."""
        in_one_piece = self.batch_norm == "shard" and self._train.grad_accum_steps == 1
        return self.graphs or (self._device.type == "cpu" and in_one_piece)

    def capture(self, module: nn.Module, sample: MicroBatch, check: MicroBatch) -> None:  # noqa: ARG002
        """Record the passes as soon as their windows are agreed."""
        if self.graphs:
            self.replay(module, partial(CudaGraphs, self._device))
        else:
            self.replay(module, Traces, asked=False)

    def replay(self, module: nn.Module, recorder: Callable[[], Recorder], *, asked: bool = True) -> None:
        """Have the passes of this module recorded, by a new recorder each time, and replayed from then on.

        Unless it was asked for, only passes over all shards at once are, in which no model reads its data on the host.
        """
        assert isinstance(module, ExactModule)
        self._replays = module.replays = Replays(self, recorder, asked=asked)

    def own_passes(self) -> AbstractContextManager[None]:
        """See ``Numerics.own_passes``."""
        return self._replays.left_out() if self._replays and not self.graphs else nullcontext()

    def forward(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """The module's outputs for whole shards; (samples, ...)."""
        inputs, targets = batch.by_shard()
        needed = (targets,) if self.own_loss else ()
        outputs: Tensor = module(inputs, batch.shards, batch.step, *needed)
        return outputs.flatten(0, 1)

    @property
    def _terms(self) -> int:
        """The number of losses of a global batch."""
        return self.samples if self.own_loss else self._targets

    @property
    def _kind(self) -> str:
        return "own" if self.own_loss else self._loss

    def loss(self, outputs: Tensor, targets: Nested) -> Tensor:
        """The float64 sum of the losses over samples, in a window."""
        total: Tensor = SummedLoss.apply(outputs, targets, self._kind, self._terms, self.windows)  # type: ignore[no-untyped-call]
        return total

    def losses(self, outputs: Tensor, targets: Nested) -> Tensor:
        """The loss of each target (targets,), rounded to float32 once."""
        return each_loss(outputs, targets, self._kind)[0].flatten()

    def fingerprint(self, module: nn.Module, batch: MicroBatch, *, backwards: bool = False) -> dict[int, bytes]:
        """A digest of outputs, gradients and number of draws for each of a few shards.

        ``backwards`` also changes the number of threads where the first shard is, on one rank, since threads of several
        ranks would wait for each other's.
        """
        assert isinstance(module, ExactModule)
        batch, part, slopes_of = self._by_shard(batch, _SHARDS_ASKED)
        threads = torch.get_num_threads()
        if backwards and self._device.type == "cpu" and 0 in batch.shards:
            torch.set_num_threads(3 - min(threads, 2))
        try:
            return module.fingerprint(part, batch.shards, batch.step, slopes_of, backwards=backwards)
        finally:
            torch.set_num_threads(threads)

    def try_together(self, module: nn.Module, batch: MicroBatch, first: dict[int, bytes]) -> None:
        """From now on run several shards in one pass, if each then has the fingerprint that it has alone.

        Raises RefusedError: a shard has another one now, after steps of such passes.
        """
        if self.apart not in (None, UNTRIED):
            return
        assert isinstance(module, ExactModule)
        batch, part, slopes_of = self._by_shard(batch, _SHARDS_ASKED)
        expected, fingerprint = first, partial(module.fingerprint_together, part, batch.shards, batch.step, slopes_of)
        try:
            found = fingerprint()
            if self.batch_norm == "global":  # alone, shards are normalised by themselves
                expected = fingerprint(backwards=True)
        except Exception as error:  # noqa: BLE001 - alone, they have run
            self.apart = why_apart(error)
            return
        unlike = [shard for shard, digest in found.items() if expected[shard] != digest]
        if unlike and (self.apart is None or self.batch_norm == "global"):
            raise RefusedError(
                f"shard {unlike[0]} gives other bits in one pass than alone, or in another order",
                hint=f"set exact.batch_norm to shard, or the environment's {SHARDS} to apart",
            )
        self.apart = None
        self.windows.apart |= bool(unlike)

    def meet(self, all_reduce: Reduce) -> None:
        """See ``Numerics.meet``."""
        self._all_reduce = all_reduce

    def joined_batch(self, shards: range) -> JoinedBatch | None:
        """The batch with these shards of this rank, if BatchNorm is over it; before a training it has no others."""
        if self.batch_norm == "shard":
            return None
        return JoinedBatch(self._all_reduce, self.shards) if self._all_reduce else JoinedBatch(alone, len(shards))

    def survey(self, model: nn.Module, batch: MicroBatch, refusals: Refusals) -> None:
        """Note all refusals of a model that ``construction`` has built: its parts, and both passes over a shard."""
        for refused in refused_parts(model):
            refusals.note(refused)
        self._widen(model.float())
        module = self.module(model.to(self._device).train())
        assert isinstance(module, ExactModule)
        batch, part, slopes_of = self._by_shard(batch, 1)
        module.survey(refusals, unbound(part)[0], batch.step, slopes_of)

    def not_finite(self, module: nn.Module, batch: MicroBatch) -> list[str]:
        """See ``ExactModule.not_finite``."""
        assert isinstance(module, ExactModule)
        batch, part, slopes_of = self._by_shard(batch, len(batch.shards))
        return module.not_finite(unbound(part), batch.shards, batch.step, slopes_of)

    def _by_shard(self, batch: MicroBatch, most: int) -> tuple[MicroBatch, Part, Callable[[int, Tensor], Tensor]]:
        """The first ``most`` shards; their part, (shards, samples, ...); and the loss's gradients for one's outputs."""
        batch = batch.head(most * (batch.rows // len(batch.shards)))
        inputs, targets = batch.by_shard()

        def slopes_of(index: int, outputs: Tensor) -> Tensor:
            with below():
                own = targets if self.own_loss else targets[index]  # of one's own, outputs are losses
                return each_loss(outputs, own, self._kind)[1].view(outputs.shape)

        return batch, (inputs, targets if self.own_loss else None), slopes_of

    def optimizer(self, model: nn.Module) -> ExactOptimizer:
        """The optimizer that ``train.optimizer`` names, over the parameters that ``prepare`` made."""
        optimizer = optimizer_of(self._train, model, self._terms)
        optimizer.spare = self.windows.spare
        return optimizer

    def backward(self, loss: Tensor) -> None:
        """Add the loss's exact gradients to those of the parameters."""
        if self.is_replayed:  # no operation of the model's follows
            run_backward(loss)
            return
        engine = Engine(defer=self.windows.defer)
        with engine, GradientsUnread(engine):
            run_backward(loss)

    def accepts_grads(self, all_reduce_max: AllReduce) -> bool:
        """Whether the gradients are valid; if not, the step is to be run again. Every rank must call it.

        Raises:
            NotFiniteError: a magnitude is infinite or NaN.
        """
        self.replaced.clear()  # the first step has shown that forward reads no replaced parameter
        self.running.check(self.windows, self._device)
        fits = self.windows.settle(all_reduce_max, self._device)
        if self.windows.apart and self.apart is None:
            self.apart = "in one pass some have other bits than alone"
        if not fits:
            self.running.clear()
            return False
        assert self._model is not None
        self.running.settle(self._model, all_reduce_max, self._device)
        return True

    def step(self, optimizer: ExactOptimizer) -> None:
        """Update the weights, with clipped gradients if ``train.clip_grad_norm`` asks for it."""
        optimizer.step()

    def mean_losses(self, losses: Tensor, all_reduce: AllReduce, ranks: int) -> list[float]:  # noqa: ARG002
        """Mean losses of global batches from the sums of this rank's parts."""
        means: list[float] = all_reduce(losses).div_(elementary.divisor(losses, self._terms)).to(torch.float32).tolist()
        return means

    def state_dict(self) -> dict[str, Any]:
        """The windows, and how often steps were run again, as JSON."""
        return self.windows.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore windows that ``state_dict`` returned."""
        self.windows.go_on(state)
        self.running.clear()

    def arithmetic(self) -> Arithmetic:
        """Number of steps that were run again, and the share of numbers too small for a sum over the batch."""
        return Arithmetic(
            steps_made_again=self.windows.widened,
            below_window=self.windows.share_below(),
            compiled_kernels=library.chosen(self._device.type) is not None,
            integer_products=integer_products.are_used(self._device),
            shards_apart=self.apart,
            not_replayed=why_not_replayed(self._replays, self.apart),
        )

    def reset(self, optimizer: ExactOptimizer) -> None:
        """Reset the optimizer and the windows."""
        optimizer.reset()
        self.windows.clear()
        self.running.clear()
