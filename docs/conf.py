"""Sphinx: the Markdown of this folder as pages, by ``make docs``. Nothing is fetched."""

import re
from typing import Any

project = "samebits"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "samebits"
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 3

_PART = re.compile(r"^## (.+)\n((?:.*\n)+?)(?=^## |\Z)", re.MULTILINE)
_PAGE = re.compile(r"^- \[[^\]]+\]\((\S+)\.md\)", re.MULTILINE)


def _contents(app: object, docname: str, source: list[str]) -> None:  # noqa: ARG001 - as Sphinx calls it
    """The sidebar is what the index lists, so that the index stays plain Markdown."""
    if docname == "index":
        for title, body in _PART.findall(source[0]):
            pages = "\n".join(_PAGE.findall(body))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app: Any) -> dict[str, bool]:
    """Register what this file adds to Sphinx."""
    app.connect("source-read", _contents)
    return {"parallel_read_safe": True}
