"""Whatever stands in a file that others wrote, it is read or refused, in one line that a terminal can show."""

import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generated import TREES, changed, refusal
from samebits.records.card import read_card
from samebits.records.log import EndEvent, LossesEvent, line_of, parse_event
from samebits.records.provenance import Provenance
from samebits.records.run import Evaluation, RunRecord, Timing
from samebits.results.comparison import Comparison
from samples import card, comparison, evaluation, run_record, timing

WRITTEN = {
    "card": (read_card, card()),
    "run": (lambda file: RunRecord.read(file, made_by="train"), run_record("ddp")),
    "timing": (lambda file: Timing.read(file, made_by="train"), timing()),
    "evaluation": (lambda file: Evaluation.read(file, made_by="evaluate"), evaluation()),
    "comparison": (lambda file: Comparison.read(file, made_by="compare"), comparison()),
    "provenance": (lambda file: Provenance.read(file, made_by="train"), None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_read_or_refused(name, tmp_path):
    read, whole = WRITTEN[name]
    file = tmp_path / f"{name}.json"
    if hasattr(whole, "write"):
        whole.write(file)
    elif whole is not None:
        file.write_text(whole.model_dump_json())
    trees = TREES | changed(json.loads(file.read_text())) if whole is not None else TREES

    @given(trees.map(json.dumps) | st.text(max_size=40) | st.binary(max_size=40))
    @settings(max_examples=100)
    def look(content):
        file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        line = refusal(lambda: read(file))
        assert line == "" or (line.isprintable() and str(file) in line)

    look()


EVENTS = [
    EndEvent(time_ms=1, status="FINISHED"),
    LossesEvent(time_ms=1, first_step=1, losses=(1.0,), learning_rates=(0.5,)),
]
LINES = [{key: value for key, value in json.loads(line_of(event)).items() if key != "crc32"} for event in EVENTS]


def signed(tree):
    """A line with the checksum of what it says, so that this is looked at."""
    text = json.dumps(tree).encode()[:-1]
    return text + b',"crc32":"%08x"}\n' % zlib.crc32(text)


@given(st.one_of(*map(changed, LINES)).map(signed) | TREES.map(signed) | st.binary(max_size=40))
@settings(max_examples=300)
def test_a_line_of_a_log_is_an_event_or_refused(line):
    assert refusal(lambda: parse_event(line, Path("x.jsonl"))).isprintable()
