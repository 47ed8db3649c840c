"""The page of measured hosts, and what the README says of GPUs."""

import json

import pytest

import hosts_page
from conftest import ROOT

CPU = {"model": "CPU", "cores": 2}


def host(*gpus, **steps):
    facts = {
        "cpu": CPU,
        "gpus": [{"name": name} for name in gpus],
        "driver": "580.1" if gpus else None,
        "torch": "2.13.0",
    }
    return {"steps": {"host": {"facts": facts}, **steps}}


def rows(price, **speedups):
    def ratio(median):
        return None if median is None else {"median": median, "low": median - 0.1, "high": median + 0.1}

    found = {f"{name}-fast": {"speedup": ratio(speedup), "price": None} for name, speedup in speedups.items()}
    return {**found, "single-exact": {"price": ratio(price)}}


@pytest.fixture
def row(tmp_path):
    """The cells of the row of one host."""

    def cells(told):
        (tmp_path / "name.json").write_text(json.dumps(told))
        last = hosts_page.hosts_page(tmp_path).splitlines()[-1]
        return [cell.strip() for cell in last.strip("|").split("|")]

    return cells


def test_each_file_has_a_row():
    page = (ROOT / "docs/reference/hosts.md").read_text()
    assert page.count("\n| `") == len(list(hosts_page.HOSTS.glob("*.json"))) > 0


def test_a_host_with_several_gpus(row):
    repro = {"rows": rows(6.0, dp=0.2, ddp=0.7), "same_bits": {"single-exact": True, "ddp-exact": True}}
    speed = {"rows": rows(1.4, dp=2.4, ddp=3.4), "trained": "wide_mlp at batch 32768"}
    assert row(host("A100", "A100", repro=repro, speed=speed)) == [
        "`name`", "2x A100", "580.1", "2.13.0", "equal", "2.40x (2.30–2.50)", "3.40x (3.30–3.50)", "1.40x (1.30–1.50)",
        "wide_mlp at batch 32768",
    ]  # fmt: skip
    assert row(host("A100", repro=repro, speed={"problem": "no time is left"}))[5] == "0.20x (0.10–0.30)"


def test_a_busy_host_is_said(row):
    found = rows(6.0, ddp=0.9)
    found["ddp-fast"]["labels"] = [{"kind": "noisy"}, {"kind": "disturbed"}]
    assert row(host(repro={"rows": found}))[6:8] == ["0.90x (0.80–1.00), disturbed", "6.00x (5.90–6.10)"]


def test_other_bits_are_said(row):
    known = hosts_page._EARLIER
    assert row(host(repro={"same_bits": {"single-exact": True, "dp-exact": False}}))[4] == "**differ**"
    assert row(host(repro={"weights_sha256": {"single-exact": known + "0", "single-fast": "1"}}))[4] == "equal"
    assert row(host(repro={"weights_sha256": {"single-exact": "0" * 64}}))[4] == "**differ**"
    assert row(host())[1:] == ["CPU, 2 cores", "–", "2.13.0", "–", "–", "–", "–", "–"]


def test_the_readme_says_what_is_not_measured():
    """That there was no GPU, or none with others beside it, for as long as it is so."""
    measured = [hosts_page.devices_of(told) for told in hosts_page.hosts().values()]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert ("No GPU has been measured yet" in text) == (not any(measured))
    assert ("No host with several GPUs is measured yet" in text) == (not any(len(gpus) > 1 for gpus in measured))
