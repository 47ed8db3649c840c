"""The campaign's own tools."""

import json

import pytest

from faults.inputs_records import _signed
from samebits.records.log import EndEvent, LossesEvent, line_of, parse_event


@pytest.mark.parametrize(
    "event",
    [
        EndEvent(time_ms=3, status="FINISHED"),
        LossesEvent(time_ms=1, first_step=1, losses=[0.1, 1e-7], learning_rates=[0.5, 0.25]),
    ],
)
def test_a_line_that_was_changed_and_signed_is_read_again(event, tmp_path):
    """Else a campaign that changes what a line says would test the checksum alone."""
    tree = json.loads(line_of(event))
    changed = _signed(json.dumps(tree | {"time_ms": 7}).encode())
    assert parse_event(changed + b"\n", tmp_path) == event.model_copy(update={"time_ms": 7})
    assert parse_event(_signed(line_of(event)) + b"\n", tmp_path) == event


@pytest.mark.parametrize("line", [b"[" * 100_000, b"{", b"\xff", b""])
def test_a_line_that_is_no_json_is_signed_as_it_is(line):
    assert _signed(line).startswith(line[:-1] + b',"crc32":"')
