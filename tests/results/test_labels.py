"""Labels and notes that follow from the losses of runs beside each other."""

from pathlib import Path

import pytest

from samebits.records.run import Run
from samebits.remarks import BatchLoss, MixedSamples
from samebits.results.labels import labels_of
from samebits.results.remarks import all_notes
from samples import PARAMS, card, run_record, timing

BF16 = PARAMS.model_copy(update={"train": PARAMS.train.model_copy(update={"precision": "bf16"})})


def run(numerics, first, **record):
    return Run(Path(f"single-{numerics}"), run_record("single", numerics, **record), timing(), (first, 1.0))


@pytest.mark.parametrize(
    ("exact", "fast", "is_labelled"),
    [
        ({"first": 1.06}, {}, True),
        ({"first": 0.94}, {}, True),
        ({"first": 1.0009}, {}, False),
        ({"first": 1.06}, {"params": BF16}, False),
        ({"first": 1.06}, {"draws": ("Dropout in model.2",)}, False),
        ({"first": 1.06}, {"batch_norms": ("BatchNorm1d in model.1",)}, False),
        ({"first": 1.06, "notes": [MixedSamples(part="shard", difference=0.1)]}, {}, False),
        ({"first": 1.06}, {"notes": [BatchLoss(part="micro-batch", samples=4, batch=8)]}, False),
        ({"first": 1.06}, {"initial_sha256": "other"}, False),
    ],
)
def test_a_first_loss_that_rounding_does_not_explain(exact, fast, is_labelled):
    exact, fast = run("exact", **exact), run("fast", 1.0, **fast)
    found = [label.sentence() for label in labels_of(exact, exact, fast)]
    assert found == ["from the same weights and samples, the first loss is "
                     f"{exact.losses[0]}, and 1 in single-fast"] * is_labelled  # fmt: skip
    assert not [*labels_of(exact, exact, None)]
    assert not [*labels_of(fast, fast, fast)]


@pytest.mark.parametrize(
    ("first", "data", "own_loss", "is_noted"),
    [
        (11.0, {"num_classes": 3}, False, True),
        (10.9, {"num_classes": 3}, False, False),
        (11.0, {"num_classes": 3}, True, False),
        (11.0, {"num_classes": 3, "loss": "own"}, True, False),
        (11.0, {"num_classes": None, "loss": "mse"}, False, False),
    ],
)
def test_a_first_loss_that_is_far_above_equal_odds(first, data, own_loss, is_noted):
    of_it = run("fast", first, data=card().model_copy(update=data), own_loss=own_loss)
    notes = [note.sentence() for note in all_notes(of_it)]
    assert [note.partition(":")[0] for note in notes] == [
        "its first loss is 11, where equal odds for 3 classes cost 1.1"
    ] * is_noted
