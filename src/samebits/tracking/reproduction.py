"""A run that was made again, in MLflow: linked to the original, with the verdict on both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.provenance import git_state
from samebits.tracking.recorder import record_all, set_tags
from samebits.tracking.restore import events
from samebits.tracking.store import NOTE_TAG, connect, tracking_uri
from samebits.verdict import sentences

if TYPE_CHECKING:
    from samebits.records import Run
    from samebits.verdict import Comparison

REPRODUCES_TAG = "samebits.reproduces"
"""Tag of a run that was made again, with the id of the original."""


def log_reproduction(original: str, again: Run, comparison: Comparison, as_json: str) -> str:
    """Record ``again`` with its verdict and return its run id; the original gets a tag with the verdict."""
    client = connect(tracking_uri())
    tags = {REPRODUCES_TAG: original, "git_commit": git_state()["commit"], "verdict": comparison["grade"]}
    run_id = record_all(client, events(again, tags))
    described = "\n\n".join([f"Run {original} made again: **{comparison['grade']}**.", *sentences(comparison)])
    set_tags(client, run_id, {NOTE_TAG: described})
    client.log_text(run_id, as_json, "verdict.json")
    set_tags(client, original, {"samebits.reproduced": f"{comparison['grade']} by {run_id}"})
    return run_id
