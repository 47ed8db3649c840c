"""Compare the exact bits of the last pipeline with those in git: ``dvc.lock`` against the commit's ``dvc.lock``.

It compares what is promised on every host: the data, and weights and losses of the exact runs. Nothing is trained.
Exit code 1: there is a difference, which is named.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from samebits.results.lock import LOCK, Lock, read_lock

_EXACT = ("/model.safetensors", "/losses.csv")


def committed() -> Lock:
    """The lock in the current commit."""
    text = subprocess.run(["git", "show", f"HEAD:{LOCK}"], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, LOCK).write_text(text)
        return read_lock(Path(folder))


def exact_bits(lock: Lock) -> dict[str, str]:
    """MD5 of each file that has the same bits on every host."""
    exact = [stage for stage in lock.stages if stage.startswith("train@") and stage.endswith("-exact")]
    bits = {path: md5 for stage in exact for path, md5 in lock.files(stage).items() if path.endswith(_EXACT)}
    return bits | {path: md5 for path, md5 in lock.files("prepare").items() if path.startswith("data/")}


def main() -> int:
    """Compare the two locks."""
    expected, made = exact_bits(committed()), exact_bits(read_lock())
    different = sorted(path for path in expected.keys() | made.keys() if expected.get(path) != made.get(path))
    for path in different:
        print(f"DIFFERENT: {path}: {made.get(path)}, and in git {expected.get(path)}")
    if not different:
        print(f"bitwise: {len(made)} files of data and exact runs are those of {LOCK} in git")
    return bool(different) or not made


if __name__ == "__main__":
    sys.exit(main())
