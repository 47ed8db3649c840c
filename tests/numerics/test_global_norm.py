"""BatchNorm over the whole batch: ``exact.batch_norm: global``."""

import pytest
import torch
from torch import nn

import exact_probe
from samebits.errors import RefusedError, UserError
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.numerics.interface import MicroBatch
from samebits.params import parse_params
from samebits.training.diagnosis import require_same_again
from test_exact_models import CPU, SAMPLES, SHARDS, STEPS, TRAIN, Norms, classes, images


def over_batch(shards=SHARDS):
    targets = tuple(classes().shape[1:])
    split = {"shards": shards, "samples": SAMPLES, "batch_norm": "global"}
    numerics = ExactNumerics(TRAIN, CPU, "cross_entropy", targets, seed=0, **split)
    numerics.apart = None
    return numerics


class Lines(nn.Module):
    """BatchNorm over samples, over positions and without parameters, one of them with a mean of all batches."""

    def __init__(self, asks=False):
        super().__init__()
        self.asks = asks
        self.images, self.lines = nn.BatchNorm2d(3), nn.BatchNorm1d(12, affine=False, momentum=None)
        self.body, self.plain = nn.Linear(192, 12), nn.BatchNorm1d(12, track_running_stats=False)
        self.head = nn.Linear(12, 20)

    def forward(self, x):
        x = self.body(self.images(x).flatten(1))
        if self.asks and x.sum() > 1e9:
            x = x + 1
        return self.head(self.plain(self.lines(x).relu()))


class OfTable(nn.Module):
    """BatchNorm of numbers that are no sample's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(-2.0, 2.0, 5 * 192).view(5, 192).exp())
        self.norm, self.head = nn.BatchNorm1d(192), nn.Linear(192, 20)

    def forward(self, x):
        return self.head(x.flatten(1) + self.norm(self.table)[0])


def prepared(shards=SHARDS):
    """Numerics, the module of a model in them, and a batch."""
    numerics, model = over_batch(shards), Lines()
    numerics.prepare(model)
    return numerics, numerics.module(model), MicroBatch(images(), classes(), 0, range(shards))


def trained(numerics, model, **how):
    how = {"shards": SHARDS, "splits": 1, "steps": STEPS} | how
    return exact_probe.run(numerics, model, images(), classes(), **how)


@pytest.mark.parametrize("model", [Lines, Norms, OfTable])
def test_it_learns_what_fast_learns_from_the_whole_batch(model):
    fast = trained(FastNumerics(TRAIN, CPU, "cross_entropy"), model)
    assert trained(over_batch(), model)[1] == pytest.approx(fast[1], rel=1e-4)


def test_the_number_of_shards_changes_rounding_alone():
    assert trained(over_batch(2), Lines, shards=2)[1] == pytest.approx(trained(over_batch(), Lines)[1], rel=1e-5)


def test_a_model_whose_shards_run_one_by_one_is_refused():
    with pytest.raises(RefusedError) as error:
        trained(over_batch(), lambda: Lines(asks=True))
    assert str(error.value).startswith(
        "exact: model.images (BatchNorm2d): exact.batch_norm is global, and shards run one by one: "
        "model (Lines): an `if` depends on its data"
    )


def test_a_shard_of_one_value_for_each_channel_is_part_of_a_batch():
    numerics, module, batch = prepared(shards=SAMPLES)
    require_same_again(numerics, module, batch)
    losses = trained(over_batch(SAMPLES), Lines, shards=SAMPLES)[1]
    assert losses == pytest.approx(trained(over_batch(), Lines)[1], rel=1e-5)


def test_an_evaluation_normalises_by_shard_what_has_no_running_statistics():
    numerics, module, batch = prepared()
    numerics.apart = "they have not been tried in one pass"  # as in the process of an evaluation
    module.eval()
    with torch.no_grad():
        assert numerics.forward(module, batch).isfinite().all()


def test_errors_of_communication_are_not_taken_for_the_models():
    numerics, module, batch = prepared()

    def broken(values, *, maximum=False):
        raise RuntimeError("Connection closed by peer")

    numerics.meet(broken)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        numerics.forward(module, batch)


def test_replicas_of_dp_are_refused():
    numerics, module, batch = prepared()
    module._is_replica = True
    with pytest.raises(RefusedError, match="dp has no communication within a pass"):
        numerics.forward(module, batch)


def test_the_trial_before_a_training_feeds_the_shards_in_both_orders():
    numerics, module, batch = prepared()
    require_same_again(numerics, module, batch)
    assert numerics.apart is None
    assert not numerics.windows.apart


def test_gradient_accumulation_contradicts_it():
    raw = {"train": {"numerics": ["exact"], "grad_accum_steps": 2}, "exact": {"batch_norm": "global"}}
    with pytest.raises(UserError, match=r"train\.grad_accum_steps: got 2, accepts 1 with exact\.batch_norm: global"):
        parse_params(raw)
    parse_params(raw | {"exact": {"batch_norm": "shard"}})
