"""What a person sees of MLflow: its UI over a real server, in a real headless Chromium."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect
from ruamel.yaml import YAML

from chromium import NEEDS_CHROMIUM, shoot
from conftest import ROOT, small, wait_for
from patience import patient
from ports import free_port
from samebits.params import parse_params

pytestmark = NEEDS_CHROMIUM


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


@pytest.fixture
def page(chromium):
    context = chromium.new_context(viewport={"width": 1900, "height": 1000})
    context.set_default_timeout(60_000)
    # As someone who has closed MLflow's assistant before.
    for key, value in (("panelOpen_v1", "false"), ("fab.autoOpenedOnFirstLoad_v1", "true")):
        context.add_init_script(f"localStorage.setItem('mlflow.assistant.{key}', '{value}')")
    page = context.new_page()
    yield page
    context.close()


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
