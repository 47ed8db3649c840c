"""Two launchers on this host, as on two machines; what real machines add is tested in tests/system/nodes."""

import os
import subprocess
import sys

import pytest

from conftest import small
from patience import patient
from samebits.records.run import read_run


@pytest.fixture
def launchers(stage, port):
    """Runs a command once for each of two nodes, and gives their exit codes, stdouts and stderrs."""

    def run(*command):
        started = []
        for rank in (0, 1):
            environ = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "localhost",
                       "PET_MASTER_PORT": str(port), "SAMEBITS_START_SECONDS": "300"}  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, *command], cwd=stage.folder, env={**os.environ, **environ},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            started.append(process)
        said = [process.communicate(timeout=patient(300)) for process in started]
        return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]

    return run


def test_a_training_over_two_launchers_has_the_bits_of_one_process(stage, launchers):
    stage.write_params(small(numerics=["exact"], num_devices=1))
    stage.well("prepare")
    exact = ["--numerics", "exact", "--no-tracking"]
    stage.well("train", "--strategy", "single", *exact, "--out-dir", "alone")
    first, second = launchers(stage.script("train"), "--strategy", "ddp", *exact, "--out-dir", "out")
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert first[1].startswith("ddp-exact: ")
    assert second[1] == ""
    for name in ("model.safetensors", "losses.csv"):
        assert (stage.folder / "out" / name).read_bytes() == (stage.folder / "alone" / name).read_bytes()
    assert [len(read_run(stage.folder / out).record.nodes) for out in ("out", "alone")] == [2, 0]


MAKE_DATA = """
import click
from samebits.stages.train import make_data

@click.command()
@click.argument("folder")
@click.option("--params", "params_file", default="params.yaml")
def main(folder, params_file):
    make_data(folder)

main()
"""


def test_why_no_data_could_be_made_is_told_where_it_happened(stage, monkeypatch):
    """Beside the ending that a cluster's job reads, which is that of the training."""
    monkeypatch.chdir(stage.folder)
    monkeypatch.setenv("SAMEBITS_LAUNCH", "endings")
    monkeypatch.setenv("SAMEBITS_RUNTIME", "host")
    stage.write_params(small(numerics=["exact"]))
    (stage.folder / "taken").write_text("no folder")
    environ = {**os.environ, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost"}
    command = [sys.executable, "-c", MAKE_DATA, "taken"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert "error: taken: taken is in the way: File exists" in done.stderr
    assert "UserError: stage prepare failed on this machine. hint: see above" in done.stderr
    assert not (stage.folder / "endings/node1.json").exists()


@pytest.mark.usefixtures("repo")
def test_the_doctor_sees_both_and_what_is_between_them(stage, launchers):
    stage.write_params(small())
    command = ["-c", "from samebits.cli import main; main()", "doctor", "--nodes"]
    (code, stdout, stderr), (other, silent, _) = launchers(*command)
    assert (code, other, silent) == (0, 0, ""), stdout + stderr
    assert "which meet at localhost (127.0.0.1:" in stdout
    assert "gloo: a round trip takes " in stdout
