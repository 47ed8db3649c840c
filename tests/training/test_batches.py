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

INPUTS = torch.arange(100, dtype=torch.float32).unsqueeze(1)


def make_batches(rank=0, ranks=1, accum=1, epochs=1):
    split = BatchSplit(samples=16, shards=None, grad_accum_steps=accum, ranks=ranks)
    data = (INPUTS, INPUTS[:, 0].long())
    return Batches(data, card(input_shape=(1,)), split, rank=rank, seed=0, device=torch.device("cpu"), epochs=epochs)


def samples_of(batches, steps, part=0):
    return [sample for step in steps for sample in batches.micro_batch(step, part).inputs.flatten().tolist()]


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("ranks", "accum"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)])
def test_every_split_sees_the_same_global_batches(ranks, accum, resident):
    whole = make_batches()
    parts = [make_batches(rank, ranks, accum) for rank in range(ranks)]
    for part in parts:
        part.resident &= resident
    for step in range(13):
        found = [sample for i in range(accum) for part in parts for sample in samples_of(part, [step], i)]
        assert found == samples_of(whole, [step])


def test_an_epoch_sees_each_sample_at_most_once_and_epochs_differ():
    batches = make_batches()
    epochs = [samples_of(batches, range(6)), samples_of(batches, range(6, 12))]
    assert [len(set(epoch)) for epoch in epochs] == [96, 96]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("room", "drawn"), [(2**24, 3), (2 * 8 * 100, 2), (1, 0)])
def test_orders_are_drawn_before_the_steps_that_are_timed(room, drawn, monkeypatch):
    """As many as there is room for; they are the same as those that are drawn when it is their turn."""
    monkeypatch.setattr(feeding, "_DRAWN_BYTES", room)
    feeding.first_orders.cache_clear()
    expected = samples_of(make_batches(), range(18))
    batches, late = make_batches(epochs=3), []
    original = feeding.order_of
    monkeypatch.setattr(feeding, "order_of", lambda *which: late.append(which[1]) or original(*which))
    assert samples_of(batches, range(18)) == expected
    assert late == list(range(drawn, 3))
    feeding.first_orders.cache_clear()


def test_pixels_become_exact_floats(data_dir):
    params = parse_params(small("images"))
    card = read_card(data_dir(params) / "card.json")
    stored, _ = load_data(data_dir(params), card, "test")
    fed = model_inputs(stored, card)
    assert fed.dtype == torch.float32
    assert torch.equal(fed * 64 + 128, stored.float())
