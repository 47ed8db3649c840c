"""The split of a batch: the same rows in the same order, whoever shares them."""

import pytest
import torch

from samebits.batch_split import BatchSplit, Rows, chunk, leading

WHOLE = BatchSplit(samples=32, shards=8, grad_accum_steps=1)
SAMPLES = BatchSplit(samples=32, shards=None, grad_accum_steps=1)


def test_samples_are_shared_out_equally():
    split = BatchSplit(samples=16, shards=None, grad_accum_steps=2, ranks=2)
    assert split.micro_batches(0) == (Rows(0, 4), Rows(8, 12))
    assert split.micro_batches(1) == (Rows(4, 8), Rows(12, 16))


@pytest.mark.parametrize("accum", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_shards_are_shared_out_whole_and_in_order(ranks, accum):
    split = BatchSplit(samples=32, shards=8, grad_accum_steps=accum, ranks=ranks)
    parts = [part for rank in range(ranks) for part in split.micro_batches(rank)]
    assert [number for part in parts for number in part.shards] == list(range(8))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(32))
    assert all(part.stop - part.start == 4 * len(part.shards) for part in parts)
    assert split.rows_per_device == max(part.stop - part.start for part in parts)
    for rank in range(ranks):
        mine = split.micro_batches(rank)
        assert 8 // ranks <= sum(len(part.shards) for part in mine) <= -(-8 // ranks)
        assert len(mine) <= accum


@pytest.mark.parametrize(
    ("split", "even"),
    [
        (SAMPLES.over(ranks=4), True),
        (SAMPLES.over(ranks=3), False),
        (SAMPLES.over(ranks=64), False),
        (WHOLE.over(ranks=3), True),
        (WHOLE.over(ranks=9), False),
    ],
)
def test_which_splits_there_are(split, even):
    assert split.even == even
    if not even:
        with pytest.raises(AssertionError, match="cannot be shared out"):
            split.micro_batches()


@pytest.mark.parametrize(
    ("split", "share"),
    [
        (SAMPLES.over(ranks=4), BatchSplit(samples=8, shards=None, grad_accum_steps=1)),
        (SAMPLES.over(devices=4), BatchSplit(samples=8, shards=None, grad_accum_steps=1)),
        (WHOLE.over(ranks=3), BatchSplit(samples=12, shards=3, grad_accum_steps=1)),
        (WHOLE.over(devices=4), BatchSplit(samples=8, shards=2, grad_accum_steps=1)),
        # Two micro-batches of three shards each, of which the first of two devices gets two.
        (
            BatchSplit(samples=24, shards=6, grad_accum_steps=2, devices=2),
            BatchSplit(samples=16, shards=4, grad_accum_steps=2),
        ),
    ],
)
def test_the_share_of_a_device_is_a_batch(split, share):
    assert split.share() == share


def test_an_evaluation_fits_where_the_training_did():
    assert WHOLE.rows_of_evaluation == 4
    assert BatchSplit(samples=32, shards=None, grad_accum_steps=4).rows_of_evaluation == 8


@pytest.mark.parametrize(("length", "count"), [(8, 2), (7, 3), (5, 4), (9, 4), (1, 3)])
def test_a_range_is_cut_as_a_tensor_is(length, count):
    parts = [chunk(range(3, 3 + length), index, count) for index in range(count)]
    expected = [part.tolist() for part in torch.arange(3, 3 + length).chunk(count)]
    assert [list(part) for part in parts if part] == expected


@pytest.mark.parametrize(
    ("rows", "shards", "most", "expected"),
    [
        (32, range(1), 5, (5, range(1))),
        (32, range(1), 40, (32, range(1))),
        (32, range(4, 8), 17, (16, range(4, 6))),  # shards of 8 samples stay whole
        (32, range(4, 8), 3, (8, range(4, 5))),
        (32, range(4, 8), 99, (32, range(4, 8))),
    ],
)
def test_the_first_samples_are_whole_shards(rows, shards, most, expected):
    assert leading(rows, shards, most) == expected


def test_an_incomplete_batch_is_left_out():
    assert [WHOLE.batches_of(samples) for samples in (31, 32, 100)] == [0, 1, 3]
