"""Passes that are replayed give the bits of passes that Python runs, with a stand-in for CUDA graphs on a CPU."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import exact_probe
import test_exact_models as models
from samebits.errors import RefusedError
from samebits.numerics.exact.compiled import check
from samebits.numerics.exact.forward_draws import RecordedDraws
from samebits.numerics.exact.kept import bits
from samebits.numerics.exact.numerics import ExactNumerics
from trainables import make_trainable, train_from_start

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels():
    """Without them masks of dropout are drawn on the host."""
    assert check.start() is None


READS = torch.ops.aten._local_scalar_dense.default


class Without(TorchDispatchMode):
    """Refuses an operation, as CUDA does to read a number while it captures."""

    def __init__(self, refused=READS):
        super().__init__()
        self.refused = refused

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class RunAgain:
    """Runs a recorded function once more, with all that the host had decided, and writes into what it made before.

    Windows are read from memory alone, as by a graph.
    """

    def __init__(self, numerics):
        self.numerics, self.recorded, self.replayed = numerics, 0, 0

    @contextmanager
    def context(self, recorded):
        """What a graph has of its recording."""
        self.numerics.recorded = recorded
        with self.numerics.windows.recording(), Without():
            yield
        self.numerics.recorded = None

    def record(self, run):
        recorded = self.numerics.recorded
        with Without():
            made = run()
        self.recorded += 1

        def replay():
            windows, running = self.numerics.windows, self.numerics.running
            before, calls = windows.taken(), running.taken()
            with _disable_current_modes(), self.context(recorded), torch.enable_grad():
                again = run()
            windows.give(*before)
            running.give(calls)
            with torch.no_grad():
                for kept, new in zip(made, again, strict=True):
                    assert (kept is None) == (new is None)
                    if kept is not None:
                        kept.copy_(new)
            self.replayed += 1

        return made, replay


class Replayed(ExactNumerics):
    """Records the passes of its module."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.recorder = RunAgain(self)

    def module(self, model):
        module = super().module(model)
        self.replay(module, lambda: self.recorder)
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


def in_one_pass(data_dir):
    trainable = make_trainable(data_dir, "exact").trainable
    trainable.numerics.apart = None
    return trainable


def test_a_training_is_replayed(data_dir):
    """From the start, and again after a reset, with dropout, momentum and clipped gradients."""
    plain, other = (in_one_pass(data_dir) for _ in range(2))
    recorder = RunAgain(other.numerics)
    other.numerics.replay(other._unwrapped, lambda: recorder)
    expected = train_from_start(plain)
    for _ in range(2):
        assert train_from_start(other).losses == expected.losses
        assert weights_of(other) == weights_of(plain)
    assert (recorder.recorded, recorder.replayed >= 2 * 12) == (2, True)


def weights_of(trainable):
    return [bits(p) for p in trainable.model.parameters()]


def test_a_step_that_does_not_fit_its_windows_is_replayed_with_wider_ones(data_dir):
    """And windows that are too wide are narrowed, step by step."""
    found = []
    for replays in (False, True):
        trainable = in_one_pass(data_dir)
        windows = trainable.numerics.windows
        if replays:
            recorder = RunAgain(trainable.numerics)
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
    why = "the model cannot be captured: operation not permitted when stream is capturing"
    assert (numerics.arithmetic().not_replayed, numerics.recorder.recorded) == (why, 0)


def test_shards_stay_in_one_pass_after_a_capture_has_failed(data_dir):
    trainable = in_one_pass(data_dir)

    class Fails(RunAgain):
        def record(self, run):
            with Without(torch.ops.aten.clone.default):
                return super().record(run)

    trainable.numerics.replay(trainable._unwrapped, lambda: Fails(trainable.numerics))
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


def test_what_a_pass_has_told_before_its_capture_failed_does_not_count(data_dir):
    """On a GPU it would be memory that nothing has written."""
    plain, other = (make_trainable(data_dir, "exact").trainable for _ in range(2))

    class Fails(RunAgain):
        def record(self, run):
            made, replay = super().record(run)
            if self.recorded == 2:  # the backward pass
                for one in made:
                    one.fill_(1e30)
                self.numerics.windows.give(dict.fromkeys(self.numerics.windows.tops, made[-1:]), [])
                raise RuntimeError("it cannot")
            return made, replay

    other.numerics.replay(other._unwrapped, lambda: Fails(other.numerics))
    assert train_from_start(other).losses == train_from_start(plain).losses
    assert weights_of(other) == weights_of(plain)
    assert other.numerics.arithmetic().not_replayed == "the model cannot be captured: it cannot"
    assert other.numerics.windows.widened == plain.numerics.windows.widened
