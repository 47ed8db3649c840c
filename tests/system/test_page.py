"""The report's page in every state, on screens of four widths, in two themes, without scripts and on paper."""

import os
import re
from pathlib import Path

import pytest

from chromium import NEEDS_CHROMIUM, shoot
from conftest import ROOT
from page_states import STATES, of_cpus, run
from samebits.records.provenance import GitState
from samebits.results.answers import headline
from samebits.results.page.render import render
from samebits.results.remarks import SpokenRemark
from samples import ratio, verdict

pytestmark = NEEDS_CHROMIUM
AXE = os.environ.get("SAMEBITS_AXE")  # `.ci/with browser` brings it
WIDTHS = (1440, 1100, 390, 320)
THEMES = ("light", "dark")
LONG = "a_name_without_a_place_to_break_it_such_as_a_path_of_a_model_or_a_driver_of_a_graphics_card_" * 2


def long_run(strategy, numerics, slower):
    """A run with figures of the greatest length."""
    devices = 1 if strategy == "single" else 8
    differences = {"losses": 0.01, "weights": 0.02, "steps": 100_000, "tensor": LONG}
    return run(
        strategy,
        devices,
        numerics=numerics,
        training_seconds=98_765.43 * slower,
        speedup=ratio(6.91, 6.42, 17.03) if devices > 1 else None,
        bound=ratio(17.05, 6.97, 17.31) if devices > 1 else None,
        slices={"strategy": 99_000.0, "single": 680_000.0, "share": 40_000.0, "together": 80_000.0, "devices": 8},
        above_floor=12.3456,
        accuracy=1.0,
        verdict=verdict("within tolerance", against=f"single-{numerics}", **differences) if devices > 1 else None,
        labels=[SpokenRemark(kind="noisy", text=LONG)],
        notes=[SpokenRemark(kind="resumed", text="a note of ordinary words, and of many of them " * 3)],
        curve={"step": [k * 1000 for k in range(1, 101)], "seconds": [k * 987.6 * slower for k in range(1, 101)],
               "loss": [1.9 + 0.4 / k for k in range(1, 101)]},
        step_ms_percentiles=[slower * 1.1**percent for percent in range(101)],  # four decades
    )  # fmt: skip


EVERYTHING_LONG = of_cpus(
    *(long_run(strategy, numerics, slower) for numerics, slower in (("fast", 1.0), ("exact", 30.0))
      for strategy in ("single", "dp", "ddp")),
    steps=100_000, model=LONG, git=GitState(commit="c0ffee" * 7, dirty=True),
)  # fmt: skip
SHOWN = {**STATES, "everything long": EVERYTHING_LONG}


@pytest.fixture(scope="module", params=SHOWN)
def report(request, tmp_path_factory):
    """The page of a state, and its comparison."""
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(render(SHOWN[request.param], STATES["slower"]))
    return request.param, file, SHOWN[request.param]


@pytest.fixture
def visit(chromium):
    """Open a page on a screen. Whatever it asks the network for, and whatever its console says, fails the test."""
    contexts = []

    def at(file, width=1440, height=900, theme="light", *, scripts=True):
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, java_script_enabled=scripts,
            bypass_csp=False,
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.on(
            "request", lambda asked: said.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None
        )
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"file://{file}")
        return page

    said = []
    yield at
    for context in contexts:
        context.close()
    assert said == []


CUT = """() => [...document.querySelectorAll('main, main *:not(svg *)')].filter(element => {
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    if (!box.width || element.closest('.away') || style.position === 'absolute' || element.tagName === 'I')
        return false;
    return box.left < -0.5 || box.right > document.documentElement.clientWidth + 0.5
        || element.scrollWidth > element.clientWidth + 1 && element.clientWidth && style.display !== 'inline'
        && !element.closest('.charts');  // ticks stand in its margins
}).map(element => `${element.tagName} ${element.className}: ${element.textContent.trim().slice(0, 60)}`)"""

SMALL = """() => [...document.querySelectorAll('main *')].filter(element =>
    [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())
    && parseFloat(getComputedStyle(element).fontSize) < 11
).map(element => element.textContent.trim().slice(0, 60))"""

OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true; })"

STRUCTURE = """() => {
    const problems = [], levels = [...document.querySelectorAll('h1, h2, h3')].map(one => +one.tagName[1]);
    if (levels[0] !== 1 || levels.filter(level => level === 1).length !== 1) problems.push('no single h1');
    levels.forEach((level, at) => { if (at && level > levels[at - 1] + 1) problems.push(`skipped to h${level}`); });
    const ids = [...document.querySelectorAll('[id]')].map(one => one.id);
    ids.filter((id, index) => ids.indexOf(id) !== index).forEach(id => problems.push(`twice: ${id}`));
    for (const link of document.querySelectorAll('a[href^="#"]'))
        if (!ids.includes(link.getAttribute('href').slice(1))) problems.push(`dead: ${link.getAttribute('href')}`);
    for (const one of document.querySelectorAll('button, input'))
        if (!(one.textContent.trim() || one.ariaLabel || one.labels?.length)) problems.push('unnamed');
    return problems;
}"""


def test_it_fits_every_screen(report, visit):
    """Nothing is cut or scrolls sideways, closed or open, and no text is too small to read."""
    _, file, _ = report
    for width in WIDTHS:
        page = visit(file, width)
        for _ in range(2):
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CUT) == [], width
            page.evaluate(OPEN)
        assert page.evaluate(SMALL) == []
        assert page.evaluate(STRUCTURE) == []


@pytest.mark.skipif(AXE is None, reason="needs axe-core: `.ci/with browser` brings it")
def test_a_checker_of_accessibility_finds_nothing(report, visit, chromium):
    """Names, roles, order and contrast, by axe-core, which the page's own policy would keep out."""
    _, file, _ = report
    for theme in THEMES:
        context = chromium.new_context(color_scheme=theme, bypass_csp=True, viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.goto(f"file://{file}")
        page.evaluate(OPEN)
        page.add_script_tag(content=Path(AXE).read_text())
        found = page.evaluate("axe.run().then(result => result.violations)")
        told = [f"{one['id']}: {node['html'][:150]}" for one in found for node in one["nodes"]]
        context.close()
        assert told == [], theme


COLOURS = """() => {
    const behind = element => {
        for (; element; element = element.parentElement) {
            const colour = getComputedStyle(element).backgroundColor;
            if (!colour.endsWith(', 0)') && colour !== 'transparent') return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const drawn = [...document.querySelectorAll('.got .bar, .key, .whisker, .chip path, polyline')];
    return drawn.map(one => {
        const style = getComputedStyle(one);
        const colour = {path: style.fill, polyline: style.stroke}[one.tagName] ?? style.backgroundColor;
        return [`${one.tagName}.${one.getAttribute('class')}`, colour, behind(one.parentElement)];
    }).concat([...document.querySelectorAll('.lost .bar, .gained .bar, .ideal .bar')].map(one =>
        [one.parentElement.className, getComputedStyle(one).borderTopColor, behind(one.parentElement)]));
}"""


def luminance(colour):
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["faster", "GPUs"])
def test_what_is_drawn_stands_out(name, theme, visit, tmp_path):
    """With a contrast of 3, as WCAG 1.4.11 asks of graphics."""
    file = tmp_path / "index.html"
    file.write_text(render(STATES[name]))
    drawn = visit(file, theme=theme).evaluate(COLOURS)
    assert len(drawn) > 20
    for what, colour, behind in drawn:
        light, dark = sorted((luminance(colour), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, (what, colour, behind)


def bottom(page, selector):
    box = page.locator(selector).bounding_box()
    return box["y"] + box["height"]


def test_the_answers_are_on_the_first_screen(report, visit):
    name, file, _ = report
    if name == "everything long":
        return
    page = visit(file)
    assert max(bottom(page, f".cards section:nth-child({number}) .figure") for number in (1, 2, 3)) < 900
    if page.locator(".got").count() > 1:
        assert bottom(page, ".falls >> nth=0 >> .got >> nth=0") < 900
    page = visit(file, 390, 844)
    assert max(bottom(page, f".cards section:nth-child({number}) .figure") for number in (1, 2, 3)) < 844


SEEN_BEFORE = """selector => {
    const until = document.querySelector(selector), range = document.createRange();
    range.setStart(document.querySelector('main'), 0);
    range.setEndBefore(until);
    const words = range.cloneContents();
    words.querySelectorAll('.script, details > :not(summary)').forEach(one => one.remove());
    return words.textContent.split(/\\s+/).filter(Boolean).length;
}"""
VISIBLE = """() => {
    const main = document.querySelector('main').cloneNode(true);
    main.querySelectorAll('details:not([open]) > :not(summary)').forEach(one => one.remove());
    return main.textContent.split(/\\s+/).filter(Boolean).length;
}"""


def test_it_is_short(report, visit):
    """Words before the first bar, before the waterfall and in sight, and the size of the file."""
    name, file, _ = report
    if name == "everything long":
        assert file.stat().st_size < 150_000
        return
    page = visit(file)
    before = page.evaluate(SEEN_BEFORE, ".small") if page.locator(".small").count() else 0
    assert before <= 90
    assert page.evaluate(SEEN_BEFORE, ".falls") <= 190
    assert page.evaluate(VISIBLE) <= 700
    assert file.stat().st_size < 100_000


def test_it_says_the_same_without_scripts(report, visit):
    _, file, comparison = report
    quiet, lively = visit(file, scripts=False), visit(file)
    text = "() => document.querySelector('main').innerText"
    shown = [re.sub(r"\s+", " ", page.locator("main").inner_text()) for page in (quiet, lively)]
    assert headline(comparison) in shown[0].replace("\xa0", " ")
    lively.evaluate("document.documentElement.classList.remove('js')")
    assert re.sub(r"\s+", " ", lively.evaluate(text)) == shown[0]


def test_on_paper_all_of_it_is_there(report, visit):
    _, file, _ = report
    page = visit(file, theme="dark")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(21, 26, 33)"  # ink on white
    assert not page.locator("button:visible:not(.chip)").count()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 0
    assert 1 <= page.pdf(format="A4").count(b"/Type /Page\n") <= 6


def test_bars_stand_where_their_figures_say(visit, tmp_path):
    file = tmp_path / "index.html"
    file.write_text(render(STATES["faster"]))
    page = visit(file)
    table = page.locator(".falls >> nth=0")
    box = table.locator("td.axis >> nth=0").bounding_box()
    scale = box["width"] / (1.05 * 2.29)

    def ends(row):
        bar = table.locator(f"{row} .bar").first.bounding_box()
        return [(bar["x"] - box["x"]) / scale, (bar["x"] + bar["width"] - box["x"]) / scale]

    assert ends(".ideal") == pytest.approx([0, 2], abs=0.02)
    assert ends(".gained") == pytest.approx([2, 2.08], abs=0.02)
    assert ends(".got") == pytest.approx([0, 1.54], abs=0.02)
    whisker = table.locator(".whisker").first.bounding_box()
    assert (whisker["x"] - box["x"]) / scale == pytest.approx(1.25, abs=0.02)


def test_what_can_be_clicked(visit, tmp_path, chromium):
    """Copy, the theme, all columns, another host's hash, and values under the pointer."""
    file = tmp_path / "index.html"
    file.write_text(render(STATES["faster"]))
    page = visit(file)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy summary").click()
    page.get_by_text("copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("**ddp on 2 CPU devices: 1.54×")
    page.locator(".chip >> nth=0").click()
    own = STATES["faster"].rows[3].weights_sha256
    page.wait_for_function("own => navigator.clipboard.readText().then(text => text === own)", arg=own)
    page.get_by_role("button", name="Dark or light").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    page.get_by_label("Another host's hash").fill(own[:12].upper())
    assert page.get_by_text("= the same bits").is_visible()
    page.get_by_label("Another host's hash").fill("0" * 12)
    assert page.get_by_text("≠ other bits").is_visible()
    page.evaluate(OPEN)
    hidden = page.locator(".rows .more >> nth=0")
    assert not hidden.is_visible()
    page.get_by_label("all 13 columns").check()
    assert hidden.is_visible()
    page.locator(".plot >> nth=0").hover()
    assert re.search(r"single at \d+: \d\.\d+; dp at", page.locator(".plot + .xname output >> nth=0").inner_text())


@pytest.mark.parametrize(("name", "width", "theme"), [
    ("faster", 1440, "light"), ("slower", 1440, "dark"), ("GPUs", 1440, "light"), ("diverged", 1100, "light"),
    ("no difference", 390, "light"), ("one run", 1100, "dark"),
])  # fmt: skip
def test_pictures_of_six_states(name, width, theme, visit, tmp_path):
    """They are looked at by people: `make screenshots` writes them."""
    file = tmp_path / "index.html"
    file.write_text(render(STATES[name]))
    page = visit(file, width, theme=theme)
    assert page.locator("h1").inner_text() == headline(STATES[name])
    shoot(page, f"page-{name.replace(' ', '-')}", full_page=True)


def test_the_example_of_the_docs_is_a_page_of_a_real_run(visit):
    page = visit(ROOT / "docs/example/index.html")
    assert re.match(r"\w+ on 2 CPU devices: \d\.\d\d× the speed of one", page.locator("h1").inner_text())
    shoot(page, "page")
