"""The page and its plots, from a comparison alone."""

import csv
import json
import re
import subprocess
import sys
from typing import get_args
from xml.etree import ElementTree

import pytest

from samebits.files import sha256
from samebits.placement import LabelKind
from samebits.report.page import write_report
from samebits.report.plots import PLOTS
from samebits.report.text import LABELS, answers, remarks


def row(strategy, devices, *, speedup, bound=None, grade=None, labels=()):
    spread = {"median": speedup, "low": speedup - 0.1, "high": speedup + 0.1} if speedup else None
    losses = {"grade": grade, "largest_relative": 0.01, "largest_at": 3, "tolerance": 0.1}
    sentences = ["losses: so", "weights: so"]
    verdict = grade and {"against": "single-fast", "grade": grade, "sentences": sentences, "losses": losses,
                         "weights": {"largest_relative": 0.02}}  # fmt: skip
    return {
        "run": f"key-{strategy}", "strategy": strategy, "numerics": "fast", "devices_used": devices,
        "device_type": "cuda", "training_seconds": 4.0, "eval_loss": 2.0, "above_floor": 0.05, "floor": 1.9,
        "accuracy": 0.25, "scaling_efficiency": speedup and speedup / devices, "speedup": spread,
        "bound": bound and {"median": bound, "low": bound, "high": bound}, "verdict": verdict, "labels": list(labels),
        "price": None, "slice_step_ms": bound and {"own": 40 / speedup, "single": 40.0, "share": 40 / bound},
        "notes": ["a <b>note</b>"], "not_applied": {}, "speedup_unavailable": None if speedup else "why not",
        "weights_sha256": f"{strategy}-hash", "data_sha256": "data-hash",
        "curve": {"step": [10, 20, 30], "seconds": [0.1, 0.2, 0.3], "loss": [2.3, 2.1, 2.0]},
        "step_ms_percentiles": [1.0 + i / 100 for i in range(101)],
    }  # fmt: skip


COMPARISON = {
    "task": "vectors", "model": "mlp", "global_batch_size": 256, "steps": 30, "host_fingerprint": "f00",
    "git": {"commit": "c0ffee", "dirty": True},
    "host": {"gpus": [{"name": "GPU"}] * 4, "cpu": {"model": "CPU", "cores": 8}, "torch": "2.13.0"},
    "rows": [
        row("single", 1, speedup=1.0),
        row("dp", 4, speedup=1.3, bound=3.6, grade="bitwise", labels=[{"kind": "noisy", "text": "it was"}]),
        row("ddp", 4, speedup=None, grade="within tolerance"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    write_report(COMPARISON, folder)
    return folder


def test_the_page_says_what_the_table_does(report):
    page = (report / "index.html").read_text()
    text = re.sub(r"\s+", " ", page)
    for sentence in [*answers(COMPARISON), LABELS["noisy"], "git checkout c0ffee", "ddp-hash", "data-hash"]:
        assert sentence in text
    assert len([remark for remark in remarks(COMPARISON) if "noisy: it was" in remark]) == 1
    assert "a &lt;b&gt;note&lt;/b&gt;" in page
    assert page.count("<svg") == len(PLOTS)


def test_the_page_needs_nothing_from_elsewhere(report):
    page = (report / "index.html").read_text()
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", page) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import", page) == []
    assert "<script" not in page


def test_plots_are_the_same_bytes_for_the_same_figures(report, tmp_path):
    write_report(COMPARISON, tmp_path)
    files = sorted(path.relative_to(report) for path in report.rglob("*") if path.is_file())
    assert {str(file) for file in files} > {f"plots/{name}.{kind}" for name in PLOTS for kind in ("svg", "png")}
    assert {file: sha256(report / file) for file in files} == {file: sha256(tmp_path / file) for file in files}


@pytest.mark.parametrize("name", PLOTS)
def test_plots_name_what_they_show(name, report):
    svg = ElementTree.parse(report / "plots" / f"{name}.svg").getroot()
    shown = {"".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"single-fast", "dp-fast"} <= shown
    assert ("ddp-fast" in shown) == (name != "speedups")  # it has none
    assert ("dp-fast: bound" in shown) == (name == "speedups")
    assert (report / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_of_the_plots(report):
    with (report / "speedups.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert rows == [
        {"run": "single-fast", "devices": "1", "speedup": "1.0", "bound": ""},
        {"run": "dp-fast", "devices": "4", "speedup": "1.3", "bound": "3.6"},
    ]
    assert (report / "curves/dp-fast.csv").read_text().splitlines()[:2] == ["step,seconds,loss", "10,0.1,2.3"]
    assert len((report / "step_times/dp-fast.csv").read_text().splitlines()) == 102


def test_every_label_is_explained():
    assert {*get_args(LabelKind), "noisy", "not_repeatable", "different_start"} == set(LABELS)


def test_a_report_is_made_without_torch(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(COMPARISON))
    code = (
        "import json, sys\nfrom pathlib import Path\nfrom samebits.report.page import write_report\n"
        "write_report(json.loads(Path('comparison.json').read_text()), Path('out'))\n"
        "assert not {'torch', 'mlflow', 'dvc'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "out/index.html").exists()
