"""What a stage is called in the kit's own repository and in a user's."""

import pytest

from samebits import here


@pytest.fixture(params=["kit", "own"])
def kit(request, tmp_path, monkeypatch):
    """Whether the working directory is the kit's own repository."""
    (tmp_path / ("src/samebits" if request.param == "kit" else "src/mine")).mkdir(parents=True)
    (tmp_path / "pipeline").mkdir()  # a user may have such a folder too
    monkeypatch.chdir(tmp_path)
    return request.param == "kit"


def test_commands_are_those_of_the_repository(kit):
    told = [here.stage_command("train", "--strategy", "ddp"), here.repro_command(), here.torch_command("gpu"),
            here.install_command(TORCH="cpu"), here.of_kit("docs/index.md")]  # fmt: skip
    assert told == (
        ["python pipeline/train.py --strategy ddp", "make repro", "make repro TORCH=gpu", "make .venv TORCH=cpu",
         "docs/index.md"]
        if kit
        else ["samebits stage train --strategy ddp", "dvc repro", "install PyTorch's build for CUDA",
              "install samebits again, with what it needs", "docs/index.md of samebits's repository"]
    )  # fmt: skip


def test_the_stage_is_found_in_what_runs_it(kit, tmp_path):
    call = here.call_of("host")
    assert call == (["pipeline/host.py"] if kit else ["-m", "samebits.cli", "stage", "host"])
    assert here.call_of("host", tmp_path / "src") == ["-m", "samebits.cli", "stage", "host"]
    assert here.stage_in([*call, "--folder", "stage"]) == "host"
    assert here.stage_in(["-m", "samebits.cli", "--debug", "stage", "train"]) == "train"
