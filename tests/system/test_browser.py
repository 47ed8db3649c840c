"""What a person sees: MLflow's UI over a real server, and the report, in a real headless Chromium."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright
from ruamel.yaml import YAML

from conftest import ROOT, small, wait_for
from patience import patient
from ports import free_port
from samebits.params import parse_params
from samebits.records.provenance import GitState
from samebits.results.page import write_report
from samebits.results.remarks import SpokenRemark
from samples import comparison, ratio, row, verdict

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("SAMEBITS_SCREENSHOTS")  # `make screenshots` sets it

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """A folder in which the pipeline's stages ran once, and MLflow has their runs."""
    folder = tmp_path_factory.mktemp("experiment")
    environ = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    raw = small(epochs=4, num_devices=2, repeats=2, oversubscribe=True, strategies=["single", "dp", "ddp"])
    YAML().dump(parse_params(raw).model_dump(mode="json"), folder / "params.yaml")

    def run(stage, *arguments):
        command = [sys.executable, str(ROOT / "pipeline" / f"{stage}.py"), *arguments]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=patient(300))
        assert done.returncode == 0, done.stderr

    run("host")
    run("prepare")
    for strategy in ("single", "dp", "ddp"):
        run("train", "--strategy", strategy)
    run("evaluate")
    run("compare")
    return folder


@pytest.fixture(scope="module")
def address(experiment):
    """``samebits ui`` over that folder, and the address that it prints."""
    log = experiment / "ui.log"
    with log.open("wb") as output:
        command = [Path(sys.executable).with_name("samebits"), "ui", "--port", str(free_port())]
        process = subprocess.Popen(command, cwd=experiment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: "Ready: " in log.read_text(), seconds=120)
        printed = re.search(r"Ready: (http://\S+)", log.read_text())
        assert printed
        yield printed[1]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    context = chromium.new_context(viewport={"width": 1900, "height": 1000})
    context.set_default_timeout(60_000)
    expect.set_options(timeout=patient(60_000))
    # As someone who has closed MLflow's assistant before.
    for key, value in (("panelOpen_v1", "false"), ("fab.autoOpenedOnFirstLoad_v1", "true")):
        context.add_init_script(f"localStorage.setItem('mlflow.assistant.{key}', '{value}')")
    page = context.new_page()
    yield page
    context.close()


def shoot(page, name, **options):
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", **options)


LOSSES = dict.fromkeys(("single-fast x1", "dp-fast x1", "ddp-fast x2"), 32)
CURVES = """within => {
    const data = document.querySelector(within + ' .js-plotly-plot')?.data ?? [];
    const curves = Object.fromEntries(data.map(curve => [curve.name, curve.y.length]));
    return Object.keys(curves).length == 3 && curves;
}"""


SCROLL_DOWN = """element => {
    while (element.scrollHeight <= element.clientHeight + 1) element = element.parentElement;
    element.scrollTop += element.clientHeight / 2;
}"""


def scroll_to(page, text):
    """Scroll the list of metrics down until a text is drawn; what is out of view is not."""
    for _ in range(20):
        if page.get_by_text(text, exact=True).is_visible():
            return
        page.locator("a[title='Plot chart']").last.evaluate(SCROLL_DOWN)
    raise AssertionError(f"there is no {text}")


def curves_of(page, within):
    """Names and lengths of a plot's curves, from the plotting library, once it has three."""
    return page.wait_for_function(CURVES, arg=within, timeout=patient(60_000)).json_value()


def test_the_view_lists_the_trainings_with_their_figures(page, address):
    page.goto(address)
    expect(page.get_by_role("link", name="ddp-fast x2")).to_be_visible()
    for name in ("single-fast x1", "dp-fast x1"):
        expect(page.get_by_role("link", name=name)).to_be_visible()
    headers = [page.get_by_test_id(f"sort-header-{name}") for name in ("speedup", "bound", "training_seconds")]
    places = [header.bounding_box()["x"] for header in headers]
    assert places == sorted(places)
    shoot(page, "mlflow-runs")


def test_choosing_the_runs_and_pressing_compare(page, address):
    page.goto(address)
    expect(page.get_by_role("link", name="ddp-fast x2")).to_be_visible()
    boxes = page.locator(".ag-row .ag-selection-checkbox input")
    for index in range(3):
        boxes.nth(index).click()
    page.get_by_text("Compare", exact=True).click()
    expect(page.get_by_text("Comparing 3 Runs from 1 Experiment")).to_be_visible()
    text = page.inner_text("body")
    assert all(name in text for name in ("single-fast x1", "dp-fast x1", "ddp-fast x2"))
    assert re.search(r"train\.optimizer\.lr\s+0\.5\s+0\.5\s+0\.5", text)
    expect(page.get_by_text("eval_loss", exact=True)).to_be_visible()
    shoot(page, "mlflow-compare")
    for metric in ("speedup", "training_seconds"):
        scroll_to(page, metric)
    page.reload()
    page.locator("a[title='Plot chart']", has_text=re.compile("^loss$")).click()
    expect(page.locator(".js-plotly-plot")).to_be_visible()
    assert curves_of(page, "body") == LOSSES
    shoot(page, "mlflow-loss")


def test_the_charts_show_losses_and_speed_ups_first(page, address):
    page.goto(f"{address}&compareRunsMode=CHART")
    section = page.get_by_test_id("experiment-view-compare-runs-section-header").first
    expect(section).to_contain_text("Comparison")
    cards = page.get_by_test_id("experiment-view-compare-runs-card")
    expect(cards.first).to_contain_text("loss")
    expect(cards.nth(1)).to_contain_text("speedup")
    expect(cards.first.locator(".js-plotly-plot")).to_be_visible()
    assert curves_of(page, "[data-testid=experiment-view-compare-runs-card]") == LOSSES
    shoot(page, "mlflow-charts")


# -- the report -----------------------------------------------------------------------------------------------

LONG = "a_name_without_a_place_to_break_it_such_as_a_path_of_a_model_or_a_driver_of_a_graphics_card_" * 2


def long_row(strategy, numerics, slower):
    """A row with figures of the greatest length."""
    differences = {"losses": 0.01, "weights": 0.02, "steps": 100_000, "tensor": LONG}
    alike = verdict("within tolerance", against=f"single-{numerics}", **differences)
    return row(
        strategy,
        devices=1 if strategy == "single" else 8,
        numerics=numerics,
        training_seconds=98_765.43 * slower,
        speedup=ratio(1.0) if strategy == "single" else ratio(6.91, 6.42, 17.03),
        bound=None if strategy == "single" else ratio(17.05, 6.97, 17.31),
        scaling_efficiency=1.0 if strategy == "single" else 0.86,
        above_floor=12.3456,
        accuracy=1.0,
        verdict=None if strategy == "single" else alike,
        weights_sha256="5a" * 32,
        data_sha256="a5" * 32,
        labels=[SpokenRemark(kind="noisy", text=LONG)],
        notes=[SpokenRemark(kind="resumed", text="a note of ordinary words, and of many of them " * 3)],
        curve={"step": [k * 1000 for k in range(1, 101)], "seconds": [k * 987.6 * slower for k in range(1, 101)],
               "loss": [1.9 + 0.4 / k for k in range(1, 101)]},
        step_ms_percentiles=[slower * 1.1**percent for percent in range(101)],  # four decades
    )  # fmt: skip


@pytest.fixture(scope="module")
def long_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    rows = [long_row(strategy, numerics, slower) for numerics, slower in (("fast", 1.0), ("exact", 30.0))
            for strategy in ("single", "dp", "ddp")]  # fmt: skip
    git = GitState(commit="c0ffee" * 7, dirty=True)
    write_report(comparison(*rows, steps=100_000, host_fingerprint="f0" * 32, git=git), folder)
    return folder / "index.html"


CUT = """() => [...document.querySelectorAll('main, main *:not(svg *), svg text')].filter(element => {
    const box = element.getBoundingClientRect();
    return box.left < 0 || box.right > document.documentElement.clientWidth + 0.5 || !box.width
        || !(element instanceof SVGElement) && element.scrollWidth > element.clientWidth && element.clientWidth;
}).map(element => `${element.tagName}: ${element.textContent.trim().slice(0, 60)}`)"""

OVERLAPPING = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    return texts.flatMap(([one, a], index) => texts.slice(index + 1).filter(([_, b]) =>
        a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom
    ).map(([other]) => `${one} | ${other}`));
})"""


def check_that_it_fits(page, report, width):
    """Nothing is cut or scrolls sideways, no text lies on another, and none is too small to read."""
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"file://{report}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    assert page.evaluate(OVERLAPPING) == []
    texts = page.locator("svg text").evaluate_all("all => all.map(text => text.getBoundingClientRect().height)")
    assert min(texts) > 10


@pytest.mark.parametrize("width", [390, 1200])
def test_the_report_fits_its_screen(width, page, experiment):
    check_that_it_fits(page, experiment / "reports/index.html", width)
    expect(page.locator("figure svg")).to_have_count(5)
    shoot(page, f"report-{width}", full_page=True)


@pytest.mark.parametrize("width", [390, 800, 1100, 1280])
def test_a_report_of_long_figures_fits_its_screen(width, page, long_report):
    check_that_it_fits(page, long_report, width)
    expect(page.locator("figure svg")).to_have_count(7)
    shoot(page, f"report-long-{width}", full_page=True)


def test_the_report_prints(page, experiment):
    page.goto(f"file://{experiment}/reports/index.html")
    page.emulate_media(media="print")
    pages = page.pdf(format="A4").count(b"/Type /Page\n")
    assert 1 <= pages <= 4
