"""The library in a script or a notebook."""

import html

import pytest

import samebits
from conftest import small
from samebits.errors import UserError
from samebits.stages.library import Comparison
from samples import comparison, run_files, run_record

MINE = """
from torch import nn
from samebits import Experiment

def make(card, width):
    layers = [nn.Linear(card.input_shape[0], width), nn.ReLU(), nn.Linear(width, card.num_classes)]
    return Experiment(nn.Sequential(*layers))
"""


@pytest.mark.slow
def test_a_script_trains_compares_and_asks_why(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    params = small(model={"name": "mine:make", "kwargs": {"width": 32}})
    params["train"] |= {"strategies": ["single", "ddp"], "numerics": ["fast", "exact"], "repeats": 3, "prolong_s": 0.0}
    found = samebits.run(params, "of-mine")
    assert [row.name for row in found.rows] == ["single-fast", "ddp-fast", "single-exact", "ddp-exact"]
    assert found.rows[-1].verdict.grade == "bitwise"
    assert "| ddp-exact |" in str(found)
    out, err = capsys.readouterr()
    assert out == ""
    assert "ddp-exact: " in err
    assert "speed-up" not in err
    assert samebits.compare("of-mine/runs/single-exact", tmp_path / "of-mine/runs/ddp-exact").grade == "bitwise"
    why = samebits.explain("of-mine/runs/ddp-fast")
    assert str(why).startswith("this run: ")
    assert why.parts.forward > 0
    with pytest.raises(UserError, match="of-mine/runs/single-exact: its steps were not divided into parts"):
        samebits.explain("of-mine/runs/single-exact")
    again = samebits.run(tmp_path / "of-mine/params.yaml", "again")
    assert [row.weights_sha256 for row in again.rows[2:]] == [row.weights_sha256 for row in found.rows[2:]]
    assert not (tmp_path / "mlflow.db").exists()


def test_what_a_stage_refuses_is_raised(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^params: seed: got 'x'"):
        samebits.run({"seed": "x"})
    assert not (tmp_path / "samebits-run").exists()
    with pytest.raises(UserError, match=r"model\.source: nowhere\.py: no such file or folder\. hint: correct the path"):
        samebits.run({"model": {"name": "mine:make", "source": "nowhere.py"}})
    assert "error: " in capsys.readouterr().err


def test_verdicts_of_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        run_files(tmp_path / name, run_record("ddp"))
    verdict = samebits.compare("a", tmp_path / "b")
    assert str(verdict).splitlines() == [
        "= bitwise",
        "  losses: bitwise, all 2 steps",
        "  weights: bitwise, all 1 tensors",
    ]
    with pytest.raises(UserError, match="c: no such folder, and not a run id"):
        samebits.compare("a", "c")


def test_a_notebook_shows_the_report():
    shown = Comparison(**dict(comparison()))._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    page = html.unescape(shown.partition('srcdoc="')[2].partition('" style')[0])
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "| single-fast |" in str(Comparison(**dict(comparison())))


def test_the_library_has_no_other_names():
    with pytest.raises(AttributeError, match="module 'samebits' has no attribute 'train'"):
        samebits.train  # noqa: B018
