"""The documentation against the code."""

import ast
import json
import re
import runpy
import shutil
import subprocess

import pytest

from conftest import ROOT
from samebits.errors import RefusedError
from samebits.models import MODELS
from samebits.numerics.exact.operations import EXACT
from samebits.results import table
from samebits.results.remarks import LABELS
from samples import comparison, run_files, run_record

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_is_short():
    """A picture and two commands after at most 120 words, and all of it in less than 120 lines."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    before = text.partition("```console")[0]
    assert len(re.sub(r"<[^>]+>", "", before).split()) <= 120
    assert before.count("<picture>") == 1


def test_the_rehearsal_counts_the_trainings_and_exact_versions_that_there_are():
    """The rehearsal itself takes a minute; what it has to reach is known before."""
    probe = runpy.run_path(str(ROOT / "tests/rehearsal/steps_probe.py"))
    page = (ROOT / "docs/concepts/rehearsal.md").read_text()
    assert f"- {len(probe['CASES'])} trainings" in page
    assert f"All {len(EXACT)} exact versions" in page
    assert MODELS.keys() <= {model["name"] for model, _ in probe["MODELS"].values()}


def test_the_page_of_the_benchmarks_is_what_their_results_say():
    made = runpy.run_path(str(ROOT / "tools/benchmark_page.py"))
    shown, expected = made["TARGET"].read_text(), made["page"]()
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, cwd=ROOT, capture_output=True, text=True).stdout.strip() != "false":
        shown, expected = (re.sub(r"(?m)^(Measured at `\w+`).*", r"\1", text) for text in (shown, expected))
    assert shown == expected, "run `python tools/benchmark_page.py`"
    text = made["QUOTING"].read_text()
    assert made["quoted"](text) == text, "run `python tools/benchmark_page.py`"


def test_the_page_of_promises_has_the_figures_of_the_last_campaigns():
    made = runpy.run_path(str(ROOT / "tools/faults/page.py"))
    results = ROOT / "benchmarks/results/amd-epyc-2-cores"
    campaigns = [json.loads((results / name).read_text()) for name in ("faults.json", "faults-writes.json")]
    assert made["quoted"](made["PAGE"].read_text()) == made["tables"](campaigns), "run `python tools/faults/page.py`"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler that is called cc")
def test_the_doctors_lines_on_gpu_hosts_are_what_it_says():
    made = runpy.run_path(str(ROOT / "tools/gpu_hosts.py"))
    written = made["GUIDE"].read_text()
    assert written == made["filled"](written), "run `python tools/gpu_hosts.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_commands_and_modules_of_a_page_are_there(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for target in re.findall(r"\bmake ([a-z-]+)\b(?=[`\s]*(?:$|`|#|TORCH))", text, flags=re.MULTILINE):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for script in re.findall(r"python ((?:pipeline|tools|benchmarks)/\w+\.py)", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"`((?:[a-z_-]+/)+[a-z_]+\.py)`", text):
        assert (ROOT / module).exists() or (ROOT / "src/samebits" / module).exists(), module


def test_what_is_where_exists():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## What is where")[1].split("```")[1]
    for line in tree.strip().splitlines():
        assert (ROOT / line.split()[0]).exists(), line


def test_clean_removes_what_the_readme_says():
    table = (ROOT / "README.md").read_text().partition("| file or folder |")[2].partition("\n\n")[0]
    written = {name.rstrip("/") for row in table.splitlines()[2:] for name in re.findall("`(.+?)`", row.split("|")[1])}
    recipe = re.search(r"^clean:.*\n\trm -rf (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    made = re.search(r"^MADE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert written - {"mlflow.db", "mlartifacts"} <= {*recipe.replace("$(MADE)", made).split()}
    assert not {"mlflow.db", "mlartifacts"} & {*recipe.split()}


def test_a_run_is_quoted_where_the_pages_have_room_for_it(tmp_path, monkeypatch):
    quoting = runpy.run_path(str(ROOT / "tools/quote_run.py"))
    pages = {name: tmp_path / quoting[name].name for name in ("README", "TABLE", "GUIDE")}
    for name, page in pages.items():
        page.write_text(quoting[name].read_text())
    for folder in ("runs/ddp-fast", "tried"):
        run_files(tmp_path / folder, run_record("ddp"))
    comparison().write(tmp_path / "comparison.json")
    monkeypatch.chdir(tmp_path)
    quoting["main"].__globals__.update(pages, IMAGES=tmp_path / "images", EXAMPLE=tmp_path / "example")
    quoting["main"]("comparison.json", "tried")
    readme, table, guide = (page.read_text() for page in pages.values())
    assert "| single-hash |\n<!-- /result -->" in table
    assert "![" not in readme  # nothing was parallel, so that there is no picture
    assert "<!-- answers -->\n```text\n──────" in guide
    assert "How much faster?        –       single-fast alone; there is nothing to compare it with" in guide
    assert "--no-tracking\nddp-fast: " in guide
    assert "/tmp/try\n= bitwise\n  losses: bitwise, all 2 steps\n" in guide
    assert [len(page.read_text().split("```")) for page in pages.values()] == [
        len(quoting[name].read_text().split("```")) for name in pages
    ]


def said(folder):
    """Every text in the sources, with an ellipsis where a value stands."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


TEXTS = [text for folder in ("src/samebits", "pipeline") for text in said(ROOT / folder)]
HEADINGS = re.findall(r"^### `(.+)`$", (ROOT / "docs/guides/troubleshooting.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("heading", HEADINGS)
def test_each_message_of_the_troubleshooting_guide_is_one_of_the_programs(heading):
    message = heading.removeprefix(RefusedError("", hint="", at="...").message + " ")  # in one text with no other
    pattern = re.compile(".*".join(re.escape(part) for part in re.split(r"\.\.\.(?!\.)", message)), re.DOTALL)
    assert any(pattern.search(text) for text in TEXTS)


def test_the_limits_name_keys_that_there_are():
    text, reference = (ROOT / "docs" / page for page in ("guides/what-fits.md", "reference/params.md"))
    named = set(re.findall(r"`((?:data|model|train|exact)\.[a-z_.]+)\b", text.read_text()))
    known = set(re.findall(r"`((?:data|model|train|exact)\.[a-z_.]+)`", reference.read_text()))
    assert len(named) > 15
    assert not [key for key in named if not any(f"{one}.".startswith(f"{key}.") for one in known)]


def test_the_report_guide_knows_the_labels_and_columns():
    report = (ROOT / "docs/guides/reading-the-report.md").read_text()
    names = [*(kind.replace("_", " ") for kind in LABELS), *table.HEADINGS]
    assert [name for name in names if f"| {name} |" not in report] == []


def test_every_page_is_reached_from_the_index():
    folder, reached, waiting = ROOT / "docs", set(), [ROOT / "docs/index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#:]+\.md)[)#]", page.read_text())
            waiting += [(page.parent / link).resolve() for link in links]
    assert reached == set(folder.rglob("*.md"))


PICTURES = runpy.run_path(str(ROOT / "tools/pictures.py"))


@pytest.mark.parametrize("name", PICTURES["PICTURES"])
def test_the_pictures_are_what_their_script_draws(name):
    assert (PICTURES["IMAGES"] / f"{name}.svg").read_text() == PICTURES["draw"](name), "run `python tools/pictures.py`"


def test_the_example_of_the_page_is_what_its_model_gives():
    written = PICTURES["PAGE"].read_text()
    assert written == PICTURES["page"](written), "run `python tools/pictures.py`"
    host, dp, ddp = PICTURES["PCIE"], PICTURES["dp_phases"], PICTURES["ddp_phases"]
    for text, value in {
        "One device takes {:.0f} ms": host.single,
        "{:.1f} ms are 1.28 times": sum(dp(host, 4).values()),
        "takes {:.1f} ms, 2.44x": sum(ddp(host, 4).values()),
        "{:.1f} ms go to sending": dp(host, 4)["replicate"] + dp(host, 4)["reduce"],
        "model gives {:.2f}x for dp": PICTURES["speedup"](dp(PICTURES["NVLINK"], 4), PICTURES["NVLINK"]),
        "and {:.2f}x for ddp": PICTURES["speedup"](ddp(PICTURES["NVLINK"], 4), PICTURES["NVLINK"]),
    }.items():
        assert text.format(value) in " ".join(written.split())
