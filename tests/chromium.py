"""A real headless Chromium for tests, and pictures of what it shows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from patience import patient

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("SAMEBITS_SCREENSHOTS")  # `make screenshots` sets it
NEEDS_CHROMIUM = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=patient(60_000))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def shoot(page, name, **options):
    """Take a picture of a page for the docs, where one is asked for."""
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", **options)
