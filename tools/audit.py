"""Look up the locked packages in the advisories of the package index, with pip-audit.

Exit code 1: a package has a known vulnerability. Exit code 3: the index gave no answer, as one without advisories.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PINNED = re.compile(
    r"^([\w.-]+)==([\w.!]+)", re.MULTILINE
)  # of torch's CPU build the public version, which the index knows


def look_up(pinned: list[str]) -> list[dict[str, Any]]:
    """Packages that the index knows, each with its ``vulns``."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as requirements:
        requirements.write("\n".join(pinned))
        requirements.flush()
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        done = subprocess.run(
            [*command, "--format", "json", "--requirement", requirements.name], capture_output=True, check=False
        )
    if not done.stdout:
        sys.stderr.buffer.write(done.stderr)
        sys.exit(3)
    return [package for package in json.loads(done.stdout)["dependencies"] if "vulns" in package]


def main() -> None:
    """Audit every package of every lock once."""
    locks: dict[str, set[str]] = defaultdict(set)
    versions: dict[str, list[str]] = defaultdict(list)
    for lock in sorted(ROOT.glob("requirements.*.lock")):
        for name, version in _PINNED.findall(lock.read_text(encoding="utf-8")):
            pin = f"{name}=={version}"
            locks[pin].add(lock.name)
            if pin not in versions[name]:
                versions[name].append(pin)
    rounds = zip_longest(*versions.values())  # pip-audit takes one version of a package at a time
    known = [package for pins in rounds for package in look_up([pin for pin in pins if pin])]
    vulnerable = [package for package in known if package["vulns"]]
    print(f"{len(known)} of {len(locks)} locked packages were looked up, {len(vulnerable)} of them are vulnerable")
    for package in vulnerable:
        pin = f"{package['name']}=={package['version']}"
        for vuln in package["vulns"]:
            mended = ", ".join(vuln["fix_versions"]) or "no version"
            print(f"  {pin}: {vuln['id']}, mended in {mended}; {', '.join(sorted(locks[pin]))}")
    sys.exit(1 if vulnerable else 0 if known else 3)


if __name__ == "__main__":
    main()
