"""Feeding: every split sees the same global batches in the same order."""

import pytest
import torch

from conftest import small
from samebits.batch_split import BatchSplit
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.training import batches as feeding
from samebits.training.batches import Batches, load_data, model_inputs
from samples import card


def make_batches(inputs, rank=0, ranks=1, accum=1, resident=True, epochs=1):
    split = BatchSplit(samples=16, shards=None, grad_accum_steps=accum, ranks=ranks)
    data = (inputs, inputs[:, 0].long())
    batches = Batches(data, card(input_shape=(1,)), split, rank=rank, seed=0, device=torch.device("cpu"), epochs=epochs)
    if not resident:
        batches.resident = False
    return batches


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("ranks", "accum"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)])
def test_every_split_sees_the_same_globalmake_batches(ranks, accum, resident):
    inputs = torch.arange(100, dtype=torch.float32).unsqueeze(1)
    whole = make_batches(inputs)
    parts = [make_batches(inputs, rank, ranks, accum, resident) for rank in range(ranks)]
    for step in range(13):
        expected = whole.micro_batch(step, 0).inputs.flatten().tolist()
        got = [x for i in range(accum) for part in parts for x in part.micro_batch(step, i).inputs.flatten().tolist()]
        assert got == expected


def test_an_epoch_sees_each_sample_at_most_once_and_epochs_differ():
    inputs = torch.arange(100, dtype=torch.float32).unsqueeze(1)
    batches = make_batches(inputs)
    epochs = [
        [x for s in range(6) for x in batches.micro_batch(e * 6 + s, 0).inputs.flatten().tolist()] for e in (0, 1)
    ]
    assert [len(set(epoch)) for epoch in epochs] == [96, 96]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("room", "drawn"), [(2**24, 3), (2 * 8 * 100, 2), (1, 0)])
def test_orders_are_drawn_before_the_steps_that_are_timed(room, drawn, monkeypatch):
    """As many as there is room for; they are the same as those that are drawn when it is their turn."""
    inputs = torch.arange(100, dtype=torch.float32).unsqueeze(1)
    monkeypatch.setattr(feeding, "_DRAWN_BYTES", room)
    feeding.first_orders.cache_clear()
    expected = [make_batches(inputs).micro_batch(step, 0).inputs.flatten().tolist() for step in range(18)]
    batches, late = make_batches(inputs, epochs=3), []
    original = feeding.order_of
    monkeypatch.setattr(feeding, "order_of", lambda *which: late.append(which[1]) or original(*which))
    assert [batches.micro_batch(step, 0).inputs.flatten().tolist() for step in range(18)] == expected
    assert late == list(range(drawn, 3))
    feeding.first_orders.cache_clear()


def test_pixels_become_exact_floats(data_dir):
    params = parse_params(small("images"))
    card = read_card(data_dir(params) / "card.json")
    stored, _ = load_data(data_dir(params), card, "test")
    fed = model_inputs(stored, card)
    assert fed.dtype == torch.float32
    assert torch.equal(fed * 64 + 128, stored.float())
