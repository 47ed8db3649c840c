"""What a model keeps from its first forward pass under ``exact``: accepted if every host makes the same, else named."""

import re

import pytest
import torch
from torch import nn

from samebits.errors import RefusedError
from samebits.numerics.exact.engine import Engine
from samebits.training.diagnosis import require_same_again
from test_exact_models import classes, images, prepared, train
from test_together import trained


class Keeps(nn.Module):
    """A layer, and what a test keeps at its first pass."""

    def __init__(self, keep, **attributes):
        super().__init__()
        self.keep, self.body = keep, nn.Linear(192, 20)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.body(self.keep(self, x.flatten(1)))


def mask(net, x):
    if net.mask is None:
        net.mask = torch.linspace(0, 1, x.shape[1]).square()
    return x * net.mask


def by_length(net, x):
    if x.shape[1] not in net.tables:
        net.tables[x.shape[1]] = torch.arange(192.0) / 192, "a name"
    return x * net.tables[x.shape[1]][0]


def longer(net, x):
    if x.shape[1] > net.length:
        net.length, net.table, net.sizes = x.shape[1], torch.ones(x.shape[1]), x.shape[1:]
    return x * net.table + net.length


def listed(net, x):
    if not net.seen:
        net.seen.append(torch.full((192,), 0.5))
    return x * net.seen[0]


MADE = {
    "mask": lambda: Keeps(mask, mask=None),
    "tables by length": lambda: Keeps(by_length, tables={}),
    "a longer table": lambda: Keeps(longer, length=0, table=None),
    "a list": lambda: Keeps(listed, seen=[]),
    "a new attribute": lambda: Keeps(lambda net, x: x * vars(net).setdefault("scale", torch.tensor(2.0))),
}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_what_depends_on_no_sample_is_kept(name, at_once):
    numerics, module, batch = prepared(MADE[name]())
    require_same_again(numerics, module, batch)
    assert numerics.apart is None
    found, _ = trained(MADE[name], images, classes, at_once=at_once)
    made = MADE[name]()
    with torch.no_grad(), Engine():
        made(images())
    before = {key: value for key, value in vars(made).items() if key[0] != "_" and key != "keep"}

    def ready():
        model = MADE[name]()
        vars(model).update(before)
        return model

    assert trained(ready, images, classes, at_once=at_once)[0] == found


def of_samples(net, x):
    if net.scale is None:
        net.scale = x.std()
    return x / net.scale


def of_parameters(net, x):
    if net.scale is None:
        net.scale = net.body.weight.detach().abs().max()
    return x / net.scale


def in_place(net, x):
    if net.scale[0] == 0:
        net.scale.copy_(torch.ones(192))
    return x * net.scale


def drawn(net, x):
    if net.scale is None:
        net.scale = torch.rand(192)
    return x * net.scale


def trained_scale(net, x):
    if net.scale is None:
        net.scale = net.body.weight[0] * 2
    return x * net.scale


def counted(net, x):
    net.scale = (net.scale or 0) + 1
    return x * net.scale


def object_of(net, x):
    net.scale = net.scale or object()
    return x


@pytest.mark.parametrize("keep", [of_samples, of_parameters, in_place, drawn, trained_scale, counted, object_of])
def test_what_depends_on_more_is_named(keep):
    for check in (lambda model: require_same_again(*prepared(model)), lambda model: train(lambda: model)):
        model = Keeps(keep, scale=torch.zeros(192) if keep is in_place else None)
        with pytest.raises(RefusedError, match=re.escape("model.scale: written in forward")):
            check(model)


@pytest.mark.parametrize("keep", [of_samples, of_parameters, drawn, mask])
def test_a_rank_of_one_shard_compares_with_what_all_ranks_would_make(keep):
    model = Keeps(keep, scale=None, mask=None)
    numerics, module, batch = prepared(model)
    alone = batch.head(batch.rows // len(batch.shards))
    assert len(alone.shards) == 1
    if keep is mask:
        require_same_again(numerics, module, alone)
        assert model.mask is not None
    else:
        with pytest.raises(RefusedError, match=re.escape("model.scale: written in forward")):
            require_same_again(numerics, module, alone)


def test_a_model_that_takes_no_zeros_keeps_nothing():
    def keep(net, x):
        if not x.any():
            raise ValueError("all zeros")
        return mask(net, x)

    with pytest.raises(RefusedError, match=re.escape("model.mask: written in forward")):
        require_same_again(*prepared(Keeps(keep, mask=None)))


def test_what_only_some_passes_make_is_named():
    def some(net, x):
        if x[0, 0] > 0:
            net.scale = 2.0
        return x

    images_ = images()
    assert len({bool(x > 0) for x in images_.flatten(1)[:, 0]}) == 2
    with pytest.raises(RefusedError, match=re.escape("model.scale: written in forward")):
        train(lambda: Keeps(some, scale=1.0))


def test_a_number_that_the_first_pass_alone_draws_is_noticed():
    def once(net, x):
        if net.scale is None:
            torch.rand(3)
            net.scale = 2.0
        return x * net.scale

    with pytest.raises(RefusedError, match="the first pass gives other bits than the next ones"):
        require_same_again(*prepared(Keeps(once, scale=None)))
