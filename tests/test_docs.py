"""The documentation against the code."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


REFERENCE = runpy.run_path(str(ROOT / "tools/reference.py"))


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_the_reference_is_what_the_code_says(name):
    written = (ROOT / "docs/reference" / name).read_text()
    assert written == REFERENCE["PAGES"][name](), "run `python tools/reference.py`"


def test_the_page_of_the_benchmarks_is_what_their_results_say():
    made = runpy.run_path(str(ROOT / "tools/benchmark_page.py"))
    assert made["TARGET"].read_text() == made["page"](), "run `python tools/benchmark_page.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for target in re.findall(r"\bmake ([a-z-]+)\b(?=[`\s]*(?:$|`|#|TORCH))", text, flags=re.MULTILINE):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for script in re.findall(r"python ((?:pipeline|tools|benchmarks)/\w+\.py)", text):
        assert (ROOT / script).exists()


def test_the_tree_of_the_readme_exists():
    tree = (ROOT / "README.md").read_text().split("## What is where")[1].split("```")[1]
    for line in tree.strip().splitlines():
        folder = ROOT / "src/samebits" if line.startswith("  ") else ROOT
        assert (folder / line.split()[0]).exists(), line
