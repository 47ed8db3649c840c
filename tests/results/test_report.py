"""The page and its plots, from a comparison alone."""

import base64
import csv
import hashlib
import html
import re
import subprocess
import sys
from typing import get_args
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from page_states import STATES
from samebits.hashes import sha256
from samebits.records.provenance import GitState
from samebits.results.answers import headline, how_much_faster
from samebits.results.page.charts import charts_of
from samebits.results.page.render import parts_table, render
from samebits.results.page.write import write_report
from samebits.results.plots import _LOOKS, PLOTS, TOGETHER, step_times
from samebits.results.remarks import LABELS, SpokenRemark
from samebits.results.table import cells
from samebits.results.text import COLOURS, row_remarks
from samebits.strategies import StrategyName
from samples import comparison, explanation, memory, ratio, row, verdict


def test_every_strategy_has_its_colour_and_look():
    """A strategy without one would end the report after all trainings."""
    assert COLOURS.keys() == _LOOKS.keys() == set(get_args(StrategyName))


def strategy_row(strategy, devices, *, speedup, bound=None, grade=None, labels=(), numerics="fast"):
    return row(
        strategy,
        devices=devices,
        numerics=numerics,
        speedup=speedup and ratio(speedup, speedup - 0.1, speedup + 0.1),
        bound=bound and ratio(bound),
        scaling_efficiency=speedup and speedup / devices,
        slice_step_ms=bound and {"strategy": 40 / speedup, "single": 40.0, "share": 40 / bound},
        verdict=grade and verdict(grade, losses=0.01, weights=0.02),
        explanation=explanation(forward=4.0, backward=8.0) if numerics == "fast" else None,
        labels=labels,
        notes=[SpokenRemark(kind="resumed", text="a <b>note</b>")],
        speedup_unavailable=None if speedup else SpokenRemark(kind="no_memory", text="why not"),
    )


COMPARISON = comparison(
    strategy_row("single", 1, speedup=1.0),
    strategy_row("dp", 4, speedup=1.3, bound=3.6, grade="bitwise", labels=[SpokenRemark(kind="noisy", text="it was")]),
    strategy_row("ddp", 4, speedup=None, grade="within tolerance"),
    strategy_row("single", 1, speedup=1.0, numerics="exact"),
    strategy_row("dp", 4, speedup=1.2, numerics="exact"),
)
DRAWN = sorted({name if name in TOGETHER else f"{name}-{numerics}" for name in PLOTS for numerics in ("fast", "exact")})


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    write_report(COMPARISON, folder)
    return folder


def words(page):
    """The text of a page, as a reader without scripts has it."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", body)))


def test_the_page_says_what_the_table_does(report):
    page = (report / "index.html").read_text()
    text = words(page)
    for one in COMPARISON.rows:
        assert all(cell in text for cell in cells(one))
    for sentence in [headline(COMPARISON), LABELS["noisy"], "dp-fast: it was", "git checkout c0ffee", "ddp-hash"]:
        assert sentence in text
    assert "a &lt;b&gt;note&lt;/b&gt;" in page
    assert page.count("<figure>") == 6  # three for each numerics


@pytest.mark.parametrize("name", STATES)
def test_every_state_renders_with_its_answer_and_its_figures(name):
    text = words(render(STATES[name]))
    assert text.count(headline(STATES[name])) >= 1
    assert all(one.weights_sha256[:8] in text for one in STATES[name].rows)
    assert all(sentence[1:] in text for sentence in how_much_faster(STATES[name]).told)
    assert text.count("No speed-up is claimed.") == sum(one.speedup is None for one in STATES[name].rows)
    assert "None" not in text


def test_a_loss_without_advice_has_nothing_to_set():
    text = words(render(STATES["nothing found"]))
    assert "Nothing can be set for: slowing each other down (12% of a step), sending gradients (9.5% of a step)" in text
    assert "14 other causes were looked for and not found" in text
    assert "1 could not be judged" in text
    advised = words(render(STATES["faster"]))
    assert "Nothing can be set for: slowing each other down (12% of a step), waiting for the slowest" in advised


def test_where_nothing_is_found_the_largest_cause_is_told():
    compared = STATES["nothing found"]
    (ddp,) = [one for one in compared.rows if one.explanation and one.strategy == "ddp"]
    looked = [one.model_copy(update={"ms": 0.9}) if one.cause == "small_batch" else one
              for one in ddp.explanation.looked_for]  # fmt: skip
    told = ddp.explanation.model_copy(update={"looked_for": tuple(looked)})
    rows = [one.model_copy(update={"explanation": told}) if one is ddp else one for one in compared.rows]
    text = words(render(compared.model_copy(update={"rows": tuple(rows)})))
    assert "takes a tenth of a step. The largest: the batch is too small to share, 0.9 ms." in text


def test_a_step_of_single_is_the_one_of_the_slices_wherever_it_stands():
    names, lines = parts_table(STATES["faster"].rows)
    took = dict(lines)
    assert names == ["single-fast", "ddp-fast"]
    assert [ms for ms, _ in took["the whole step"]] == ["25.9 ms", "16.4 ms"]
    assert took["forward pass"][0][0] == "8.63 ms"  # a third of it


def test_a_page_without_a_commit_says_why():
    git = GitState(commit=None, dirty=False, problem="git is not installed")
    page = render(COMPARISON.model_copy(update={"git": git}))
    assert "The commit is not known: git is not installed." in page
    assert "git checkout" not in page


def test_the_page_needs_nothing_from_elsewhere_and_runs_its_own_script_alone(report):
    page = (report / "index.html").read_text()
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", page) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import", page) == []
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert html.unescape(policy) == allowed


def test_names_of_others_are_no_markup():
    label = SpokenRemark(kind="noisy", text="<script>alert(1)</script>")
    metrics = {"<i>": 1.0}
    page = render(comparison(row(labels=[label], metrics=metrics), model="</title><b>", task='"><script>'))
    assert page.count("<script>") == 1
    assert "<i>" not in re.sub(r"<i class", "", page)


def test_a_page_against_another_says_what_changed():
    assert "Since 2026-01-02, commit c0ffeec, same host: = ddp 1.54×" in words(
        render(STATES["faster"], STATES["faster"])
    )
    assert "Since" not in words(render(STATES["faster"]))


def test_plots_are_the_same_bytes_for_the_same_figures(report, tmp_path):
    write_report(COMPARISON, tmp_path)
    files = sorted(path.relative_to(report) for path in report.rglob("*") if path.is_file())
    for kind in (".svg", ".png"):
        assert [file.stem for file in files if file.suffix == kind] == [*DRAWN, "where-dark", "where"]
    assert {file: sha256(report / file) for file in files} == {file: sha256(tmp_path / file) for file in files}


def test_a_report_of_fewer_runs_leaves_none_of_an_earlier_one(tmp_path):
    write_report(COMPARISON, tmp_path)
    own = tmp_path / "plots/mine.svg"
    own.write_text("not the report's")
    write_report(comparison(*COMPARISON.rows[:2]), tmp_path)
    assert own.is_file()
    assert not list(tmp_path.rglob("*exact*"))
    assert [path.name for path in sorted(tmp_path.glob("curves/*"))] == ["dp-fast.csv", "single-fast.csv"]


@pytest.mark.parametrize("name", DRAWN)
def test_plots_name_what_they_show(name, report):
    svg = ElementTree.parse(report / "plots" / f"{name}.svg").getroot()
    shown = {"".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    if name == "breakdown":
        assert {"single-fast", "ddp-fast", "forward pass", "backward pass"} <= shown
        assert not {"single-exact", "optimizer"} & shown  # not divided, and no time
    elif name in TOGETHER:
        assert {row.name for row in COMPARISON.rows} <= shown
        assert {"devices", "bound", "fast: median and 95% interval", "exact: median and 95% interval"} <= shown
    else:
        assert {"single", "dp"} <= shown
        assert ("ddp" in shown) == name.endswith("fast")  # it was not trained in exact numerics
        assert ("floor" in shown) == name.startswith("loss")
    assert (report / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", sorted(PLOTS.keys() - set(TOGETHER)))
def test_a_plot_has_four_lines_at_most(name):
    axes = Figure().add_subplot()
    PLOTS[name](axes, [row for row in COMPARISON.rows if row.numerics == "fast"])
    assert len(axes.get_lines()) == (4 if name.startswith("loss") else 3)


@pytest.mark.parametrize(
    ("slowest", "labels"),
    [
        (9.0, ["2", "4", "6", "8"]),
        (50.0, ["1", "2", "5", "10", "20", "50"]),
        (20_000.0, ["1", "10", "100", "1000", "10000"]),
    ],
)
def test_step_times_have_ticks_that_can_be_read(slowest, labels):
    figure = Figure()
    axes = figure.add_subplot()
    step_times(axes, [row(step_ms_percentiles=[slowest ** (percent / 100) for percent in range(101)])])
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert [label.get_text() for tick, label in ticks if low <= tick <= high] == labels


def test_the_pages_step_times_reach_to_those_of_the_slowest_run():
    slow = row("ddp", devices=2, step_ms_percentiles=[10.0 + percent for percent in range(101)])
    for rows in ([row(), slow], [slow, row()]):
        assert charts_of(rows)[-1].x.high == pytest.approx(1.05 * 109)  # of 99 in 100 steps


def test_the_tables_of_the_plots(report):
    with (report / "speedups.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert rows == [
        {"run": "single-fast", "devices": "1", "speedup": "1.0", "bound": ""},
        {"run": "dp-fast", "devices": "4", "speedup": "1.3", "bound": "3.6"},
        {"run": "single-exact", "devices": "1", "speedup": "1.0", "bound": ""},
        {"run": "dp-exact", "devices": "4", "speedup": "1.2", "bound": ""},
    ]
    assert (report / "curves/dp-fast.csv").read_text().splitlines()[:2] == ["step,seconds,loss", "10,0.1,2.3"]
    assert len((report / "step_times/dp-fast.csv").read_text().splitlines()) == 102


def test_a_report_is_made_without_torch(tmp_path):
    COMPARISON.write(tmp_path / "comparison.json")
    code = (
        "import sys\nfrom pathlib import Path\nfrom samebits.results.comparison import Comparison\n"
        "from samebits.results.page.write import write_report\n"
        "write_report(Comparison.read(Path('comparison.json'), made_by=''), Path('out'))\n"
        "assert not {'torch', 'mlflow', 'dvc'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "out/index.html").exists()


MIB = 2**20
DEVICE = {"weights": 6 * MIB, "gradients": 3 * MIB, "optimizer": 12 * MIB, "activations": 100 * MIB,
          "baseline": 279 * MIB, "capacity": 800 * MIB}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "devices", "source", "expected"),
    [
        (
            "single",
            [DEVICE],
            "counted",
            "a step of 256 samples takes 400 MiB of 800 MiB: 6 MiB weights, 3 MiB gradients, 12 MiB optimizer state, "
            "100 MiB activations, and 279 MiB the process itself",
        ),
        ("ddp", [{**DEVICE, "buffers": MIB}, DEVICE], "counted", "401 MiB of 800 MiB in process 0, the largest: 6 MiB"),
        (
            "dp",
            [DEVICE, {**DEVICE, "optimizer": 0}],
            "allocator",
            "a step of 256 samples takes 400 MiB of 800 MiB on device 0, the fullest, which also holds what dp gathers:"
            " 6 MiB weights, 3 MiB gradients, 12 MiB optimizer state, 100 MiB activations, and 279 MiB data and "
            "workspaces",
        ),
        (
            "ddp",
            [DEVICE, {**DEVICE, "buffers": 2048 * MIB, "capacity": 3 * 2**30}],
            "allocator",
            "a step of 256 samples takes 2.39 GiB of 3 GiB on device 1, the fullest: 6 MiB weights, 2 GiB buffers, "
            "3 MiB gradients, 12 MiB optimizer state, 100 MiB activations, and 279 MiB data and workspaces",
        ),
        ("dp", [DEVICE, {**DEVICE, "capacity": 400 * MIB}], "allocator", "of 400 MiB on device 1, the fullest: 6 MiB"),
    ],
)  # fmt: skip
def test_what_memory_is_for(strategy, devices, source, expected):
    one = row(strategy, memory=memory(*devices, source=source))
    (said,) = row_remarks(one)
    assert said.startswith(f"{strategy}-fast: a step of 256")
    assert expected in said
    assert row_remarks(row(strategy)) == []
