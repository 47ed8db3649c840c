"""``samebits scale`` as a user calls it."""

import json

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from conftest import ROOT, small
from samebits.cli.commands import main


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with the stages' scripts and parameters of a small training."""
    for name in ("pipeline", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    YAML().dump(small(num_devices=2, oversubscribe=True), tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--devices", "2;4"), 2, "--devices: got '2;4', expected numbers from 1"),
        (("--devices", "1"), 2, "--devices: got 1 alone"),
        (("--devices", "3"), 2, "--devices: got 3, expected a divisor of the 64 samples"),
        (("--devices", "2", "--project", "128"), 2, "--project: got 128 devices for 64 samples"),
        (("--devices", "2", "--network", "fast"), 2, "--network: got 'fast', expected a bandwidth"),
        (("--params", "other.yaml"), 2, "other.yaml: no such file"),
    ],
)
def test_mistakes_are_said_before_anything_runs(arguments, code, message, repository):
    done = CliRunner().invoke(main, ["scale", *arguments])
    assert done.exit_code == code
    assert done.stderr.startswith(f"error: {message}")
    assert " hint: " in done.stderr
    assert not (repository / ".samebits").exists()


@pytest.mark.slow
def test_a_small_model_on_two_workers(repository):
    arguments = ["--devices", "1,2", "--project", "4,8", "--network", "1Gb/s,50us", "--steps", "8", "--json"]
    done = CliRunner().invoke(main, ["scale", *arguments])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    written = json.loads((repository / "reports/scaling.json").read_text())
    assert {"schema": 1, **found} == written
    shown = {(one["scaling"], one["devices"]) for one in found["measured"]}
    assert {("strong", 2), ("weak", 2)} <= shown
    if found["fit"]:  # this host has two cores
        devices = [one["devices"] for one in found["projections"]]
        assert {*devices} <= {4, 8}
        assert len(devices) == 4 or any("projected" in note for note in found["notes"])  # of a noisy host fewer
        assert {one["kind"] for one in found["projections"]} <= {"projection"}
        assert all(one["seconds"] > 0 for one in found["points"])
    assert (repository / "reports/plots/scaling.png").exists()
    assert not (repository / "runs").exists()
    assert list((repository / ".samebits").iterdir()) == []
    assert "1 of 3: 2 devices with 32 samples each, median step " in done.stderr
