"""Passes that are replayed give the bits of passes that Python runs, here on a CPU."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import exact_probe
import test_exact_models as models
from conftest import ROOT
from samebits.errors import RefusedError
from samebits.numerics.exact import replays, traces
from samebits.numerics.exact.compiled import check
from samebits.numerics.exact.forward_draws import RecordedDraws
from samebits.numerics.exact.kept import bits
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.exact.operations.contractions import grouped_mm
from samebits.numerics.exact.recorders import StoppedError
from samebits.numerics.exact.traces import Traces
from trainables import make_trainable, train_from_start

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels():
    """Without them masks of dropout are drawn on the host."""
    assert check.start() is None


class WithoutClone(TorchDispatchMode):
    """Refuses an operation, as CUDA does to some while it captures."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class Counted(Traces):
    """Counts recordings and replays."""

    recorded = replayed = stopped = 0

    def record(self, run):
        made, replay = super().record(run)
        self.recorded += 1

        def counted():
            try:
                replay()
            except StoppedError:
                self.stopped += 1
                raise
            self.replayed += 1

        return made, counted


class Replayed(ExactNumerics):
    """Records the passes of its module."""

    asked = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.recorder = Counted()

    def module(self, model):
        module = super().module(model)
        self.replay(module, lambda: self.recorder, asked=self.asked)
        return module


def batch_norm():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(32, models.TOKENS))  # fmt: skip


MODELS = {**models.MODELS, "batch norm": (batch_norm, models.images, models.classes)}


def trained(kind, name, *, together=True, steps=12):
    """Hash of the weights with the losses, and the numerics."""
    factory, inputs, targets = MODELS[name]
    x, y = inputs(), targets()
    split = {"shards": models.SHARDS, "samples": models.SAMPLES}
    numerics = kind(models.TRAIN, CPU, "cross_entropy", tuple(y.shape[1:]), seed=0, **split)
    if together:
        numerics.apart = None
    found = exact_probe.run(numerics, factory, x, y, shards=models.SHARDS, splits=1, steps=steps)
    return found, numerics


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ["decoder", "rotary", "residual net", "batch norm"])
def test_replays_have_the_bits_of_passes(name, together):
    """With dropout, running statistics, tied weights, in one pass and shard by shard."""
    expected, _ = trained(ExactNumerics, name, together=together)
    found, numerics = trained(Replayed, name, together=together)
    assert found == expected
    recorder = numerics.recorder
    assert (numerics.arithmetic().not_replayed, recorder.recorded) == (None, 2)
    assert recorder.replayed >= 2 * 10


def in_one_pass(data_dir, **settings):
    """A training whose passes Python runs."""
    trainable = make_trainable(data_dir, "exact", **settings).trainable
    trainable.numerics.apart = trainable._unwrapped.replays = None
    return trainable


def test_a_training_is_replayed(data_dir):
    """From the start, and again after a reset, with dropout, momentum and clipped gradients."""
    plain, other = (in_one_pass(data_dir) for _ in range(2))
    recorder = Counted()
    other.numerics.replay(other._unwrapped, lambda: recorder)
    expected = train_from_start(plain)
    for _ in range(2):
        assert train_from_start(other).losses == expected.losses
        assert weights_of(other) == weights_of(plain)
    assert (recorder.recorded, recorder.replayed >= 2 * 12) == (2, True)


def weights_of(trainable):
    return [bits(p) for p in trainable.model.parameters()]


def test_a_training_on_a_cpu_is_replayed_unless_its_shards_run_one_by_one(data_dir):
    for apart, replayed in ((None, True), ("a test says so", False)):
        plain = in_one_pass(data_dir)
        trainable = make_trainable(data_dir, "exact").trainable
        plain.numerics.apart = trainable.numerics.apart = apart
        assert train_from_start(trainable).losses == train_from_start(plain).losses
        assert weights_of(trainable) == weights_of(plain)
        assert (trainable._unwrapped.replays._passes is not None) == replayed
        told = trainable.numerics.arithmetic().not_replayed
        assert told == (None if replayed else "shards run one by one: a test says so")


def test_a_training_without_replays_says_so(data_dir):
    numerics = make_trainable(data_dir, "exact", grad_accum_steps=2).trainable.numerics
    assert "only whole batches on a CPU are" in numerics.arithmetic().not_replayed
    trainable = make_trainable(data_dir, "exact").trainable
    trainable.numerics.apart = None
    assert trainable.numerics.arithmetic().not_replayed == "the training ended before"


def test_passes_of_one_micro_batch_without_communication_are_recorded():
    """A replay would overwrite gradients that are added to, and does not communicate."""
    for accumulated, over, device, captures in [
        (1, "shard", CPU, True),
        (2, "shard", CPU, False),
        (1, "global", CPU, False),
        (1, "shard", torch.device("cuda"), False),  # where it is to be asked for
    ]:
        train = models.TRAIN.model_copy(update={"grad_accum_steps": accumulated})
        split = {"shards": models.SHARDS, "samples": models.SAMPLES, "batch_norm": over}
        assert ExactNumerics(train, device, "cross_entropy", (), seed=0, **split).captures == captures


def test_a_step_that_does_not_fit_its_windows_is_replayed_with_wider_ones(data_dir):
    """And windows that are too wide are narrowed, step by step."""
    found = []
    for is_replayed in (False, True):
        trainable = in_one_pass(data_dir)
        windows = trainable.numerics.windows
        if is_replayed:
            recorder = Counted()
            trainable.numerics.replay(trainable._unwrapped, lambda recorder=recorder: recorder)

        def settle(*args, windows=windows, settle=windows.settle):
            fits = settle(*args)
            if fits and windows._steps in (2, 4):
                for place in windows.tops:
                    windows.tops[place] += -6 if windows._steps == 2 else 9
            return fits

        windows.settle = settle
        result = train_from_start(trainable)
        found.append((result.losses, weights_of(trainable), windows.widened, windows.tops))
    assert found[0] == found[1]
    assert found[0][2] == 1
    assert recorder.recorded == 2


def test_passes_of_other_shards_are_recorded_anew():
    """As where a shard has turned out to have other bits in one pass than alone."""
    split = {"shards": models.SHARDS, "samples": models.SAMPLES}
    numerics = Replayed(models.TRAIN, CPU, "cross_entropy", (), seed=0, **split)
    numerics.apart = None
    settle = numerics.windows.settle

    def apart_from_the_fifth(*args):
        fits = settle(*args)
        if fits and numerics.windows._steps == 5:
            numerics.apart = "a test says so"
        return fits

    numerics.windows.settle = apart_from_the_fifth
    found = exact_probe.run(numerics, models.ResidualNet, models.images(), models.classes(), shards=models.SHARDS,
                            splits=1, steps=12)  # fmt: skip
    assert found == trained(ExactNumerics, "residual net", together=False)[0]
    assert numerics.recorder.recorded == 4


def test_a_pass_that_reads_a_number_is_not_recorded():
    expected, _ = trained(ExactNumerics, "recurrent", steps=4)
    found, numerics = trained(Replayed, "recurrent", steps=4)
    assert found == expected
    why = "the model cannot be captured: what aten::_pack_padded_sequence does depends on the numbers of a step"
    assert (numerics.arithmetic().not_replayed, numerics.recorder.recorded) == (why, 0)


def test_a_pass_that_draws_on_the_host_is_not_recorded(monkeypatch):
    noisy = functools.partial(models.Does, lambda net, x: x + torch.randn_like(x))
    monkeypatch.setitem(MODELS, "noisy", (noisy, models.images, models.classes))
    expected, _ = trained(ExactNumerics, "noisy", steps=4)
    found, numerics = trained(Replayed, "noisy", steps=4)
    assert found == expected
    why = "the model cannot be captured: forward draws random numbers on the host"
    assert numerics.arithmetic().not_replayed == why


def test_shards_stay_in_one_pass_after_a_capture_has_failed(data_dir):
    trainable = in_one_pass(data_dir)

    class Fails(Counted):
        def record(self, run):
            with WithoutClone():
                return super().record(run)

    trainable.numerics.replay(trainable._unwrapped, Fails)
    train_from_start(trainable, 2)
    arithmetic = trainable.numerics.arithmetic()
    assert "operation not permitted" in arithmetic.not_replayed
    assert arithmetic.shards_apart is None


@pytest.mark.parametrize("right", [0, 1])
def test_a_recording_with_other_bits_is_refused(right, monkeypatch):
    """In its first step, where keys are whatever was in memory, or in the second, where they are those of the first."""
    renew = RecordedDraws.renew
    monkeypatch.setattr(RecordedDraws, "renew", lambda self, step: renew(self, step) if step <= right else None)
    with pytest.raises(RefusedError, match="exact: a captured pass gave other bits than the model itself"):
        trained(Replayed, "decoder", steps=3)


@pytest.mark.parametrize("right", [0, 1])
def test_a_recording_with_other_bits_is_left_where_nobody_asked_for_it(right, monkeypatch):
    renew = RecordedDraws.renew
    monkeypatch.setattr(RecordedDraws, "renew", lambda self, step: renew(self, step) if step <= right else None)
    expected, _ = trained(ExactNumerics, "decoder", steps=5)
    found, numerics = trained(Unasked, "decoder", steps=5)
    assert found == expected
    assert numerics.arithmetic().not_replayed == "a captured pass gave other bits than the model itself"


class Unasked(Replayed):
    """Records as it does by itself."""

    asked = False


class Waves(nn.Module):
    """Takes the sine of numbers that a parameter makes large, for which a kernel does not answer."""

    def __init__(self, at):
        super().__init__()
        self.large, self.end, self.at = nn.Parameter(torch.zeros(())), nn.Linear(192, models.TOKENS), at

    def forward(self, x):
        x = x.flatten(1)
        return self.end(x + torch.sin(self.large) if self.at == "forward" else x + Grows.apply(self.large))


class Grows(torch.autograd.Function):
    """The identity, whose gradient is another sine of large numbers after some steps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sin(x)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_kernel_that_answers_otherwise_in_a_replay_stops_it(at, monkeypatch):
    """The model itself runs the pass; if it is the second one, the step is run again."""
    monkeypatch.setitem(MODELS, "waves", (lambda: Waves(at), models.images, models.classes))
    step = ExactNumerics.step

    def grow(self, optimizer):
        step(self, optimizer)
        self.steps = getattr(self, "steps", 0) + 1
        with torch.no_grad():
            self._model.large.fill_(2.0**40 if self.steps in (5, 7) else 0.5)

    monkeypatch.setattr(ExactNumerics, "step", grow)
    expected, _ = trained(ExactNumerics, "waves", steps=10)
    found, numerics = trained(Replayed, "waves", steps=10)
    assert found == expected
    assert (numerics.recorder.recorded, numerics.recorder.stopped) == (2, 2 if at == "forward" else 1)
    stopped = "a backward pass has stopped: a kernel, all_near_float, answers otherwise than in its recording"
    assert numerics.arithmetic().not_replayed == (None if at == "forward" else stopped)


def test_a_replay_tells_of_an_index_as_the_model_does():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.end = nn.Embedding(models.TOKENS, 4), nn.Linear(4, models.TOKENS)

        def forward(self, x):
            return self.end(self.table(x))

    said = []
    for kind in (ExactNumerics, Replayed):
        split = {"shards": models.SHARDS, "samples": models.SAMPLES}
        numerics = kind(models.TRAIN, CPU, "cross_entropy", (models.LENGTH,), seed=0, **split)
        numerics.apart, step, x = None, kind.step, models.tokens()

        def then_too_large(optimizer, numerics=numerics, step=step, x=x):
            step(numerics, optimizer)
            numerics.steps = getattr(numerics, "steps", 0) + 1
            if numerics.steps == 6:
                x[-1, -1] = models.TOKENS

        numerics.step = then_too_large
        with pytest.raises(Exception, match="index") as error:
            exact_probe.run(numerics, Looks, x, models.tokens(), shards=models.SHARDS, splits=1, steps=12)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]
    assert numerics.recorder.replayed > 6


def test_a_model_that_needs_much_memory_is_not_recorded(monkeypatch):
    expected, _ = trained(ExactNumerics, "decoder", steps=4)
    monkeypatch.setattr(traces, "_MOST", 1 << 20)
    found, numerics = trained(Replayed, "decoder", steps=4)
    assert found == expected
    assert numerics.arithmetic().not_replayed == "the model cannot be captured: a recording takes more than 1 MiB"


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda x: grouped_mm(x, torch.ones(2, 3, 3), torch.tensor([1, 2], dtype=torch.int32)), r"\.item\(\)"),
        (lambda x: x.add(1.0).resize_(20, 3), "resize_"),
        (lambda x: x[x > 0.0], "index"),
        (lambda x: x.unique(), "_unique2"),
    ],
)
def test_what_depends_on_the_numbers_of_a_step_is_not_recorded(run, why):
    x = torch.rand(2, 3)
    with pytest.raises(RuntimeError, match=f"what (aten::)?{why}.* does depends on the numbers of a step"):
        Traces().record(lambda: [run(x)])


def test_no_operation_reads_numbers_as_a_recording_cannot_see():
    """``tolist`` of a CPU's tensor and what hands it to NumPy are no operations of PyTorch's."""
    folder = ROOT / "src/samebits/numerics/exact"
    reads = {
        path.relative_to(folder).as_posix(): re.findall(r"\.tolist\(\)|\.numpy\(\)", path.read_text())
        for path in folder.rglob("*.py")
    }
    outside = {"numerics.py", "windows.py", "batch_norm.py", "kept.py", "self_test/numbers.py"}  # of passes
    assert {path for path, found in reads.items() if found} <= outside
    assert len(reads["batch_norm.py"]) == 1  # which asks other ranks, and is not recorded


class Counts(nn.Module):
    """Changes what it computes when BatchNorm has counted eight batches."""

    def __init__(self):
        super().__init__()
        self.norm, self.end = nn.BatchNorm2d(3), nn.Linear(192, models.TOKENS)

    def forward(self, x):
        y = self.end(self.norm(x).flatten(1))
        return y * 2 if self.norm.num_batches_tracked.tolist() >= 8 else y


def test_a_model_that_reads_a_buffer_is_not_recorded(monkeypatch):
    monkeypatch.setitem(MODELS, "counts", (Counts, models.images, models.classes))
    expected, _ = trained(ExactNumerics, "counts")
    found, numerics = trained(Unasked, "counts")
    assert found == expected
    why = "the model cannot be captured: forward reads numbers on the host (tolist)"
    assert numerics.arithmetic().not_replayed == why


class Doubles(nn.Module):
    """Changes what it computes once its outputs are large, as each shard says alike."""

    def __init__(self):
        super().__init__()
        self.end = nn.Linear(192, models.TOKENS)

    def forward(self, x):
        y = self.end(x.flatten(1))
        return y * 2 if (self.end.bias.abs().max() + 0 * y.sum() > 0.095).item() else y


def test_a_model_that_asks_for_a_number_is_not_recorded(monkeypatch):
    monkeypatch.setitem(MODELS, "grows", (Doubles, models.images, models.classes))
    expected, _ = trained(ExactNumerics, "grows")
    found, numerics = trained(Unasked, "grows")
    assert (found, numerics.apart) == (expected, None)
    assert "depends on the numbers of a step" in numerics.arithmetic().not_replayed


def test_a_parameter_with_other_memory_is_recorded_anew(monkeypatch):
    step = ExactNumerics.step

    def exchange(self, optimizer):
        step(self, optimizer)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 6:
            weight = next(self._model.parameters())
            weight.data = weight.data * 0.5

    monkeypatch.setattr(ExactNumerics, "step", exchange)
    expected, _ = trained(ExactNumerics, "batch norm")
    found, numerics = trained(Replayed, "batch norm")
    assert found == expected
    assert numerics.recorder.recorded == 4


@pytest.mark.parametrize(
    ("most", "name", "why"),
    [
        (
            "_MOST_STOPS",
            "waves",
            "replays have stopped 1 times, now because a kernel, all_near_float, answers",
        ),
        ("_MOST_RECORDINGS", "batch norm", "its passes are of more than 1 kinds"),
    ],
)
def test_a_training_gives_replays_up(most, name, why, monkeypatch):
    """When they stop again and again, or each serves few steps."""
    step = ExactNumerics.step

    def change(self, optimizer):
        step(self, optimizer)
        self.steps = getattr(self, "steps", 0) + 1
        weight = next(self._model.parameters())
        if name == "waves":
            with torch.no_grad():
                weight.fill_(2.0**40 if self.steps == 6 else 0.5)
        elif self.steps == 6:
            weight.data = weight.data * 0.5

    monkeypatch.setitem(MODELS, "waves", (lambda: Waves("forward"), models.images, models.classes))
    monkeypatch.setattr(ExactNumerics, "step", change)
    monkeypatch.setattr(replays, most, 1)
    expected, _ = trained(ExactNumerics, name)
    found, numerics = trained(Replayed, name)
    assert found == expected
    assert why in numerics.arithmetic().not_replayed
    assert (numerics.recorder.recorded, numerics.recorder.replayed > 6) == (2, True)


def test_a_write_to_memory_from_before_a_pass_is_not_recorded():
    """Which a replay would begin with what the last one left."""
    kept = torch.zeros(3)
    with pytest.raises(RuntimeError, match="writes to memory from before the pass"):
        Traces().record(lambda: [kept.add_(1.0)])


def test_what_a_pass_has_told_before_its_capture_failed_does_not_count(data_dir):
    """On a GPU it would be memory that nothing has written."""
    plain, other = (in_one_pass(data_dir) for _ in range(2))

    class Fails(Counted):
        def record(self, run):
            made, replay = super().record(run)
            if self.recorded == 2:  # the backward pass
                windows = other.numerics.windows
                windows.give({place: [torch.tensor(1e30)] for place in windows.tops}, [])
                raise RuntimeError("it cannot")
            return made, replay

    other.numerics.replay(other._unwrapped, Fails)
    assert train_from_start(other).losses == train_from_start(plain).losses
    assert weights_of(other) == weights_of(plain)
    assert other.numerics.arithmetic().not_replayed == "the model cannot be captured: it cannot"
    assert other.numerics.windows.widened == plain.numerics.windows.widened
