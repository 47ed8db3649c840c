"""What is said of containers, by an engine's answers; tests/system/container has a real one."""

import json
import os

import pytest

from conftest import needs_root
from samebits.doctor import containers
from samebits.engines.stage import INSIDE, Place
from samebits.host.variables import RUNTIME

SEEN = "GPU 0: NVIDIA L4 (UUID: GPU-0)\nGPU 1: NVIDIA L4 (UUID: GPU-1)\n"
FAILED, GPUS, MLFLOW = ("inside", "failed"), ("inside", "ok", "2 GPUs"), ("inside: mlflow", "ok", "answers")
ANSWERS = json.dumps([{"name": "mlflow", "status": "ok", "text": "answers"}])


@pytest.mark.parametrize(
    ("listing", "answers", "expected"),
    [
        ((0, SEEN), (0, f"a warning\n{ANSWERS}\n"), [GPUS, MLFLOW]),
        ((0, SEEN.splitlines()[0]), (0, ANSWERS), [(*FAILED, "1 of 2 GPUs are seen in the image"), MLFLOW]),
        ((127, "exec: none\nmore"), (0, ANSWERS), [(*FAILED, "nvidia-smi ended with 127: exec: none"), MLFLOW]),
        ((0, SEEN), (1, "no torch"), [GPUS, (*FAILED, "python ended with 1: no torch")]),
    ],
)
def test_what_a_container_sees(listing, answers, expected, monkeypatch):
    asked = {"nvidia-smi": listing, "python": answers}
    monkeypatch.setattr(containers, "gpu_request", lambda client: object())
    monkeypatch.setattr(containers, "command_for", lambda place, command: command)
    monkeypatch.setattr(containers, "output", lambda client, image, command: asked[command[0]])
    found = containers.inside(Place(None, None, 2))
    assert [(one.name, one.status, one.text) for one in found] == expected
    assert all(one.hint for one in found if one.status == "failed")


def test_gpus_that_the_engine_does_not_give_are_not_looked_for(monkeypatch):
    monkeypatch.setattr(containers, "gpu_request", lambda client: None)
    (found,) = containers.inside(Place(None, None, 2))
    assert (found.status, found.text) == ("skipped", "the engine gives containers no GPU")


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({INSIDE: "1"}, ["this is the image"]),
        ({RUNTIME: "host"}, [f"stages run here, as {RUNTIME} says", "what runs have made is yours"]),
    ],
)
def test_where_no_container_is_started_none_is_looked_at(environ, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [one.text for one in containers.containers(0, environ)] == texts


@needs_root
@pytest.mark.parametrize(("given", "said"), [(["runs"], "runs does not"), (["data", "runs"], "data and 1 more do not")])
def test_files_of_somebody_else_are_told(given, said, tmp_path):
    for name in ("data", "runs"):
        (tmp_path / name).mkdir()
    for name in given:
        os.chown(tmp_path / name, 4321, 4321)
    (found,) = containers.owner(tmp_path)
    assert (found.status, found.text) == ("warning", f"{tmp_path}/{said} belong to you")
    assert found.hint.startswith("sudo chown -R 0 . ; ")


@needs_root
@pytest.mark.parametrize(("owner", "status"), [(4321, "ok"), (0, "warning")])
def test_root_looks_at_a_folder_for_its_owner(owner, status, tmp_path):
    (tmp_path / "runs").mkdir()
    os.chown(tmp_path, 4321, 4321)
    os.chown(tmp_path / "runs", owner, owner)
    (found,) = containers.owner(tmp_path)
    assert (found.status, "chown -R 4321 ." in (found.hint or "")) == (status, status == "warning")
