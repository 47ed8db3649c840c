"""Every attempt to break the promise of ``exact``: refused by name, or the same bits; the rest is listed here."""

import pytest

import attempts
from attempts_probe import DOCS, outcomes, table, written

KINDS = {name: kind for kind, name, _ in attempts.ATTEMPTS}
NOT_SEEN = {
    "hash_of_none", "config_show", "node_prehook", "set_of_functions", "frames_of_callers",
    "frames_of_threads", "descriptor_late", "regex_scanner_late", "process_built", "process_of_log_record",
}  # fmt: skip
"""Attempts that give other bits; docs/concepts/exact.md says of what kind they are."""
NOT_TORCH = {"load_state_dict", "pop_dispatch_mode", "pop_function_mode"}
"""Attempts that PyTorch itself answers with an error."""
TOO_STRICT = {
    "debatable_constant_in_closure", "debatable_p_from_weights", "orthogonal",
    "checkpoint_dropout", "fixed_seed_generator", "double_precision", "computing_gradient_hook", "coroutine",
}  # fmt: skip
"""Honest models that are refused all the same, by name."""


@pytest.mark.slow
@pytest.mark.timeout(3600)  # each attempt trains in several environments
def test_every_attempt_is_refused_or_gives_the_same_bits():
    found = outcomes([*KINDS])
    by = {outcome: {name for name, one in found.items() if one[0] == outcome} for outcome, _ in found.values()}
    assert by["differs"] == NOT_SEEN
    assert by["crash"] == NOT_TORCH
    assert {name for name in by["refused"] if KINDS[name] == "k"} == TOO_STRICT
    assert DOCS.read_text() == written(table(KINDS, found)), "python tests/numerics/attempts_probe.py --write"


def test_there_are_enough_of_each_kind():
    counts = [[*KINDS.values()].count(kind) for kind in "abcdefghijk"]
    assert (len(KINDS), min(counts)) == (len(attempts.ATTEMPTS), 10)
