"""Digests of a training's batches."""

import pytest
from pydantic import ValidationError

from samebits.records.batches import BatchDigests, groups_of


@pytest.mark.parametrize(
    ("samples", "steps", "groups"),
    [(64, 10, 64), (4096, 64, 4096), (4096, 128, 2048), (64, 2**19, 1), (2**20, 1, 2**18)],
)
def test_the_number_of_digests_is_bounded(samples, steps, groups):
    assert groups_of(samples, steps) == groups


@pytest.mark.parametrize(
    ("samples", "other", "found"),
    [
        (4, [[1, 2, 3, 4], [5, 6, 7, 8]], None),
        (4, [[1, 2, 3, 4], [5, 6, 0, 0]], (2, 3, 3)),
        (4, [[1, 0, 3, 4], [0, 6, 7, 8]], (1, 2, 2)),
        (4, [[1, 2, 3, 4]], None),
        (10, [[1, 2, 0, 4], [5, 6, 7, 8]], (1, 6, 8)),
        (10, [[1, 2, 3, 0], [5, 6, 7, 8]], (1, 9, 10)),
    ],
)
def test_the_first_sample_that_differs_is_found(samples, other, found):
    mine = BatchDigests.of([[1, 2, 3, 4], [5, 6, 7, 8]], samples)
    assert mine.first_difference(BatchDigests.of(other, samples)) == found
    assert BatchDigests.model_validate_json(mine.model_dump_json()) == mine


def test_data_in_memory_have_none():
    assert BatchDigests.of([], 4) is None


@pytest.mark.parametrize("digests", ["", "no base64", "AAAA", "AAAAAAAAAAA="])
@pytest.mark.attack("a malicious server")
def test_digests_that_are_none_are_refused_with_the_record(digests):
    with pytest.raises(ValidationError, match=r"digests of|base64"):
        BatchDigests(samples=4, groups=3, digests=digests)
