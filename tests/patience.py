"""Deadlines: generous, so that no test fails because a host is slow."""

import os

PATIENCE = float(os.environ.get("SAMEBITS_TEST_PATIENCE", "1"))
"""By which all of them are multiplied."""


def patient(seconds: float) -> float:
    """A deadline that no sound test reaches on this host; at least a minute is right."""
    return seconds * PATIENCE
