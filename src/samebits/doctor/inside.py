"""Checks that run inside a container, as ``python -m samebits.doctor.inside GPUS TRACKING_URI``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from samebits.doctor import machine, store

if __name__ == "__main__":
    gpus, uri = sys.argv[1:]
    findings = [*machine.shared_memory(int(gpus)), *store.store(uri)]
    print(json.dumps([asdict(finding) for finding in findings]))  # noqa: T201 - the doctor outside reads it
