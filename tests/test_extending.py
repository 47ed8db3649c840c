"""What it costs to add one of each thing: toys are added to a copy of the tree as a person would, and then used.

The number of files that a person touches is what CONTRIBUTING.md promises. What is generated is not counted.
"""

import os
import subprocess
import sys

import pytest

from conftest import ROOT

MOST = {"a strategy": 2}
"""Files to touch, with those beside the code left out: a word in CHANGELOG.md, and a page of the documentation."""


class Tree:
    """A copy of the sources, and the files of it that were touched."""

    def __init__(self, folder):
        self.folder, self.touched = folder, set()
        names = [
            "src",
            "pipeline",
            "tools",
            "params.yaml",
            "dvc.yaml",
            "pyproject.toml",
            ".gitignore",
            "docs",
            "Makefile",
        ]
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", *names],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():  # else it was removed, and git does not know yet
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes((ROOT / name).read_bytes())

    def write(self, name, text):
        """Make a file that was not there."""
        assert not (self.folder / name).exists()
        (self.folder / name).write_text(text)
        self.touched.add(name)

    def change(self, name, before, after):
        """Put a text in the place of one that stands there once."""
        text = (self.folder / name).read_text()
        assert text.count(before) == 1, before
        (self.folder / name).write_text(text.replace(before, after))
        self.touched.add(name)

    def run(self, script):
        """What a script prints that uses this tree."""
        environ = {**os.environ, "PYTHONPATH": str(self.folder / "src")}
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], cwd=self.folder, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


STRATEGY = '''"""``toy``: what ``single`` does, under another name."""

from __future__ import annotations

from dataclasses import replace

from samebits.strategies.single import SINGLE

TOY = replace(SINGLE, name="toy")
'''

TRAINS = """
from pathlib import Path
from samebits.data.prepare import prepare
from samebits.files import write_json
from samebits.host import host_facts
from samebits.params import parse_params
from samebits.records.provenance import git_state
from samebits.results.comparison import compare
from samebits.results.page import write_report
from samebits.workers.launch import evaluate_in_worker, run_training

params = parse_params({raw})
prepare(params, Path("data"))
write_json(Path("host.json"), host_facts().model_dump(mode="json"))
for strategy in params.train.strategies:
    out = Path(f"runs/{{strategy}}-fast")
    run_training(params, strategy, "fast", data_dir=Path("data"), out_dir=out, checkpoints=None)
    file = Path(f"reports/evaluation/{{strategy}}-fast.json")
    evaluate_in_worker(params, data_dir=Path("data"), run_dir=out, file=file)
write_report(compare(params, git_state()), Path("reports"))
print(Path("reports/comparison.md").read_text())
"""

HELP = """
import runpy, sys
sys.argv = ["train", "--help"]
runpy.run_path("pipeline/train.py", run_name="__main__")
"""

SMALL = {
    "data": {"num_samples": 256, "test_samples": 64},
    "train": {"global_batch_size": 64, "numerics": ["fast"], "repeats": 2},
}


def small(**train):
    return {**SMALL, "train": {**SMALL["train"], **train}}


def test_a_strategy(tree):
    tree.write("src/samebits/strategies/toy.py", STRATEGY)
    tree.change(
        "src/samebits/strategies/__init__.py",
        "from samebits.strategies.single import SINGLE\n",
        "from samebits.strategies.single import SINGLE\nfrom samebits.strategies.toy import TOY\n",
    )
    tree.change("src/samebits/strategies/__init__.py", "(SINGLE, DP, DDP)", "(SINGLE, DP, DDP, TOY)")
    assert "| toy-fast |" in tree.run(TRAINS.format(raw=small(strategies=["single", "toy"])))
    assert "[single|dp|ddp|toy]" in tree.run(HELP)
    assert len(tree.touched) <= MOST["a strategy"]
