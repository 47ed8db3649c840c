"""The change from one run to another: a slower training, or a step with more samples."""

import re
from pathlib import Path

import pytest

from samebits.params import parse_params
from samebits.records.run import Run
from samebits.results.explanation.against import change, say_change
from samples import run_record, timing


def run(samples, step_ms):
    params = parse_params({"train": {"global_batch_size": samples}})
    return Run(Path("runs"), run_record("ddp", params=params), timing(step_time_ms=step_ms), [2.0])


@pytest.mark.parametrize(
    ("samples", "step_ms", "ratios", "batch_grew", "said"),
    [
        (512, 20.0, (1, 2.0, 0.5), False, r"2.00 times as long \(20 ms in place of 10 ms\), for as many samples: 0.50"),
        (512, 5.0, (1, 0.5, 2.0), False, r"0.50 times as long \(5 ms in place of 10 ms\), for as many samples: 2.00"),
        (512, 10.5, (1, 1.05, 1 / 1.05), False, "for as many samples: 0.95"),
        (1024, 20.0, (2, 2.0, 1.0), True, "2 times the samples: 1.00 times .*; the batch grew, not a"),
        (1024, 22.0, (2, 2.2, 2 / 2.2), True, "2 times the samples: 0.91 times .*; the batch grew"),
        (1024, 25.0, (2, 2.5, 0.8), False, "2 times the samples: 0.80 times .*; compare samples per second"),
        (1024, 9.0, (2, 0.9, 2 / 0.9), False, "2 times the samples: 2.22 times .*; compare samples per second"),
        (256, 5.0, (0.5, 0.5, 1.0), False, "0.5 times the samples: 1.00 times .*; compare samples per second"),
    ],
)
def test_a_longer_step_is_no_slower_training_where_it_has_more_samples(samples, step_ms, ratios, batch_grew, said):
    before, after = run(512, 10.0), run(samples, step_ms)
    found = change(after, before)
    assert (found.samples, found.step, found.samples_per_second) == pytest.approx(ratios)
    assert found.batch_grew is batch_grew
    text = say_change(found, after, before)
    assert text.startswith("Against ddp-fast, a step takes ")
    assert re.search(said, text), text
