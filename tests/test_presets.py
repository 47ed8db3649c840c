"""The experiments beside each other: the default one at the root, and the one for hosts with GPUs in ``gpu``."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

import cost_model
import generate
from conftest import ROOT
from samebits.engines.stage import named_paths
from samebits.errors import UserError
from samebits.params import load_params, require_every_key
from samebits.records.run import read_losses
from samebits.results import verify
from samebits.stages.pipeline import stages

GPU = load_params(ROOT / "gpu/params.yaml")


def read(name):
    return YAML(typ="safe").load((ROOT / name).read_text())


# -- the pipeline -------------------------------------------------------------------------------------------------


def test_both_experiments_have_the_same_stages():
    ours, theirs = read("dvc.yaml"), read("gpu/dvc.yaml")
    assert [str(folder / "dvc.yaml") for folder in generate.EXPERIMENTS] == ["dvc.yaml", "gpu/dvc.yaml"]
    assert list(ours["stages"]) == list(theirs["stages"]) == list(stages())
    assert [ours[key] for key in ("metrics", "plots")] == [theirs[key] for key in ("metrics", "plots")]
    for name, command in stages().items():
        mine, other = ours["stages"][name], theirs["stages"][name]
        assert other["wdir"] == ".."
        assert other["cmd"].replace(" --folder gpu", "", 1) == mine["cmd"]
        assert other.get("matrix") == mine.get("matrix")
        for key in ("outs", "metrics"):
            assert other.get(key, []) == [f"gpu/{path}" for path in mine.get(key, [])]
        if mine.get("params"):
            assert other["params"] == [{"gpu/params.yaml": mine["params"]}]
        read_there = {f"gpu/{path}" for path in command.spec.reads}
        assert {*other.get("deps", ())} - read_there == {*mine.get("deps", ())} - {*command.spec.reads}
        assert read_there <= {*other.get("deps", read_there)}


def test_no_file_belongs_to_both():
    outs = [
        {path for stage in read(name)["stages"].values() for path in (*stage["outs"], *stage.get("metrics", ()))}
        for name in ("dvc.yaml", "gpu/dvc.yaml")
    ]
    assert not outs[0] & outs[1]
    assert all(path.startswith("gpu/") for path in outs[1])


def test_the_gpu_params_are_the_same_training_at_another_size():
    """What a reader of one table may take for granted in the other: strategies, numerics and how it is timed."""
    default = load_params(ROOT / "params.yaml")
    require_every_key(GPU, "gpu/params.yaml")
    size = {"data": {"num_samples"}, "model": True, "train": {"global_batch_size", "epochs", "optimizer"},
            "tracking": True}  # fmt: skip
    assert GPU.model_dump(exclude=size) == default.model_dump(exclude=size)
    assert GPU.tracking != default.tracking  # two kinds of runs under one name would be compared
    assert GPU.data.num_samples % GPU.train.global_batch_size == 0


# -- its folder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", stages())
def test_each_stage_works_in_the_folder_that_it_is_given(name):
    arguments = ["--strategy", "single"] if name == "train" else []
    here, there = (
        stages()[name].make_context(name, [*arguments, *folder]).params for folder in ([], ["--folder", "x/gpu"])
    )
    assert (here.pop("folder"), there.pop("folder")) == (".", "x/gpu")
    differ = {key: (value, there[key]) for key, value in here.items() if value != there[key]}
    paths = {key for key in here if key.endswith(("_file", "_dir")) and here[key] is not None}
    assert differ == {key: (here[key], f"x/gpu/{here[key]}") for key in paths}
    given = stages()[name].make_context(name, [*arguments, "--params", "p.yaml", "--folder", "gpu"]).params
    assert given["params_file"] == "p.yaml"


def test_the_gpu_experiment_learns_in_its_own_folder(stage):
    """At a hundredth of its size: as many steps, with as many samples for each."""
    raw = GPU.model_dump(mode="json")
    raw["data"] |= {"num_samples": GPU.data.num_samples // 128, "test_samples": 256}
    raw["model"]["kwargs"] |= {"hidden": [64, 64]}
    raw["train"] |= {
        "global_batch_size": GPU.train.global_batch_size // 128, "strategies": ["single"], "numerics": ["exact"],
        "repeats": 1, "prolong_s": 0.0,
    }  # fmt: skip
    folder = stage.folder / "gpu"
    folder.mkdir()
    YAML().dump(raw, folder / "params.yaml")
    for name, *options in (
        ["host"], ["prepare"], ["train", "--strategy", "single", "--numerics", "exact", "--no-tracking"], ["evaluate"],
        ["compare", "--no-tracking"],
    ):  # fmt: skip
        stage.well(name, "--folder", "gpu", *options)
    made = {file.relative_to(stage.folder).parts[0] for file in stage.folder.rglob("*") if file.is_file()}
    assert made - {".samebits"} == {"gpu"}
    written = {file.partition("/")[0] for command in stages().values() for file in command.spec.files}
    assert written | {"params.yaml"} == {file.name for file in folder.iterdir()}
    losses = read_losses(folder / "runs/single-exact/losses.csv")
    assert len(losses) == GPU.total_steps
    assert sum(losses[-5:]) / 5 < 0.98 * losses[0], losses


def test_a_container_sees_the_arrays_that_the_folders_params_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, name in ((Path(), "mine.npy"), (Path("gpu"), "larger.npy")):
        folder.mkdir(exist_ok=True)
        data = {"task": "file", "num_samples": 64, "test_samples": 8, "kwargs": {"inputs": name, "targets": name}}
        YAML().dump({"data": data, "train": {"global_batch_size": 64}}, folder / "params.yaml")
    assert named_paths(["pipeline/host.py"])["data.kwargs.inputs"] == Path("mine.npy")
    found = named_paths(["pipeline/host.py", "--folder", "gpu"])
    assert (found["data.kwargs.inputs"], found["--folder"]) == (Path("larger.npy"), Path("gpu"))


def test_verify_names_the_lock_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^gpu/dvc\.lock: no such file\. hint: .*make one by `dvc repro gpu/dvc.yaml`"):
        list(verify.verify(GPU, ["single"], tmp_path, folder=Path("gpu")))
    Path("gpu").mkdir()
    shutil.copy(ROOT / "tests/golden/data.json", "gpu/dvc.lock")
    with pytest.raises(UserError, match=r"^gpu/dvc\.lock: .* hint: git checkout gpu/dvc\.lock"):
        list(verify.verify(GPU, ["single"], tmp_path, folder=Path("gpu")))


# -- which of them a host takes -----------------------------------------------------------------------------------


def folder_of_this_host(**environ):
    """What ``tools/preset.py`` prints and says, and whether it has imported torch, with which CUDA could start."""
    code = (
        "import runpy, sys\n"
        f"runpy.run_path({str(ROOT / 'tools/preset.py')!r}, run_name='__main__')\n"
        "assert 'torch' not in sys.modules\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )


@pytest.mark.parametrize(
    ("host", "cuda", "devices", "preset", "folder", "said"),
    [
        ("A", "13.0", None, None, "gpu/", "gpu/params.yaml, for the 4 GPUs here; PRESET=default takes params.yaml\n"),
        ("B", "13.0", None, "", "gpu/", "gpu/params.yaml, for the 1 GPU here; PRESET=default takes params.yaml\n"),
        ("C", "13.0", "2,3", None, "gpu/", "gpu/params.yaml, for the 2 GPUs here"),
        ("A", "13.0", "", None, "", ""),
        ("A", None, None, None, "", ""),
        ("A", "13.0", None, "default", "", ""),
        ("A", None, None, "gpu", "gpu/", ""),
    ],
)
def test_the_preset_is_that_of_the_gpus_that_torch_has(host, cuda, devices, preset, folder, said, gpu_host):
    gpu_host(host, devices=devices, cuda=cuda)
    done = folder_of_this_host(**({} if preset is None else {"PRESET": preset}))
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert done.stderr.startswith(said)
    assert bool(done.stderr) == bool(said)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"model": {"name": "mine:make"}}, "model"),
        ({"data": {"task": "file", "num_samples": 64, "test_samples": 8, "kwargs": {"inputs": "x", "targets": "y"}}},
         "data"),
    ],
)  # fmt: skip
def test_what_is_ones_own_is_trained_on_gpus_too(changes, own, gpu_host, tmp_path, monkeypatch):
    gpu_host("A")
    monkeypatch.chdir(tmp_path)
    YAML().dump(changes | {"train": {"global_batch_size": 64}}, Path("params.yaml"))
    done = folder_of_this_host()
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert done.stderr == f"params.yaml, for the {own} of your own in it; PRESET=gpu takes gpu/params.yaml\n"
    assert folder_of_this_host(PRESET="gpu").stdout == "gpu/\n"


def test_a_host_without_gpus_takes_the_default_without_a_word():
    done = folder_of_this_host(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_an_unknown_preset_is_named(gpu_host, tmp_path):
    gpu_host("A")
    calls = tmp_path / "calls"
    done = folder_of_this_host(PRESET="big", STAND_IN_NVML_LOG=str(calls))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: PRESET: got 'big', accepts default or gpu. hint: unset PRESET\n"
    assert not calls.exists()


@pytest.fixture
def commands(program, tmp_path, monkeypatch):
    """A folder with the scripts alone, in which samebits says what it was called with."""
    for name in ("tools/repro.sh", "tools/preset.py", "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    program("samebits", 'echo samebits "$@"')
    program("python", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))

    def run(*command, **environ):
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, **environ}
        )

    return run


@pytest.mark.parametrize(("preset", "folder"), [("default", ""), ("gpu", "gpu/")])
def test_the_pipeline_is_the_presets(preset, folder, commands):
    done = commands("sh", "tools/repro.sh", PRESET=preset)
    assert done.stdout == f"samebits repro --folder {folder or '.'}\n", done.stderr
    make = ["make", "--silent", "TORCH=cpu", "--assume-old=.venv/.installed-cpu", f"PRESET={preset}"]
    done = commands(*make, "verify")
    assert done.stdout == f"samebits verify --folder {folder}\n", done.stderr


def test_what_ends_before_the_pipeline_ends_the_commands(commands, program):
    for command in (["sh", "tools/repro.sh"], ["make", "TORCH=cpu", "--assume-old=.venv/.installed-cpu", "verify"]):
        done = commands(*command, PRESET="big")
        assert done.returncode == 2
        assert "error: PRESET: got 'big'" in done.stderr
        assert "verify" not in done.stdout
        assert "repro" not in done.stdout
    program("samebits", "exit 7")
    done = commands("sh", "tools/repro.sh", PRESET="default")
    assert (done.returncode, done.stdout) == (7, "")


def test_compose_runs_the_preset_of_its_service():
    """The overlay for CPUs takes the GPUs away, so that the same command takes the default there."""
    yaml = YAML(typ="safe")
    yaml.constructor.add_constructor("!reset", lambda loader, node: "reset")
    service, overlay = (
        yaml.load((ROOT / name).read_text())["services"]["experiment"]
        for name in ("docker-compose.yml", "docker-compose.cpu.yml")
    )
    assert service["command"] == ["sh", "tools/repro.sh"]
    assert f'"0 {" ".join(service["command"])}"' in str(service["entrypoint"])
    assert service["environment"]["PRESET"] is None  # the caller's
    assert not {"command", "entrypoint"} & overlay.keys()
    assert (overlay["deploy"], overlay["environment"]["NVIDIA_VISIBLE_DEVICES"]) == ("reset", "void")


# -- what is predicted of them ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def works():
    """The work of a step of each experiment, counted once."""
    return {name: cost_model.work_of(load_params(ROOT / name)) for name in cost_model.EXPERIMENTS}


def test_the_work_of_a_step_is_that_of_its_products_and_weights(works):
    for name, work in works.items():
        params = load_params(ROOT / name)
        hidden = params.model.kwargs.hidden or (384, 256)
        widths = [params.data.kwargs.features, *hidden, params.data.kwargs.classes]
        products = sum(a * b for a, b in itertools.pairwise(widths))
        # The first layer's inputs need no gradient.
        assert work.flop == params.train.global_batch_size * (6 * products - 2 * widths[0] * widths[1])
        assert work.gradients == 4 * (products + sum(widths[1:]))
        assert work.inputs == 4 * params.train.global_batch_size * widths[0]
        assert work.row_bytes > work.flop / 1e3
        assert 0 < work.forward_launches < work.launches < 80


def test_the_experiment_for_gpus_gains_there_and_the_default_one_does_not(works):
    (a100,) = (gpu for gpu in cost_model.GPUS if gpu.name.startswith("A100"))
    large, small = works["gpu/params.yaml"], works["params.yaml"]
    assert min(cost_model.speedups_of(cost_model.ddp_ms, large, a100)) >= 0.9 * cost_model.DEVICES
    assert max(cost_model.speedups_of(cost_model.ddp_ms, small, a100)) < 1
    assert min(cost_model.single_ms(large, a100, rate) for rate in a100.tflops) * GPU.total_steps >= 2000
    assert cost_model.single_ms(large, a100, a100.tflops[1], cost_model.DEVICES) * 1e3 > 40 * large.launches
    for gpu in cost_model.GPUS:
        ddp, dp = (cost_model.speedups_of(step, large, gpu) for step in (cost_model.ddp_ms, cost_model.dp_ms))
        assert all(1 < less < more < cost_model.DEVICES for less, more in zip(dp, ddp, strict=True))


def test_the_page_has_the_tables_of_the_tool(works, monkeypatch):
    by_params = {load_params(ROOT / name).model_dump_json(): work for name, work in works.items()}
    monkeypatch.setattr(cost_model, "work_of", lambda params: by_params[params.model_dump_json()])
    written = cost_model.PAGE.read_text()
    assert written == cost_model.filled(written), "run `python tools/cost_model.py`"


def test_products_copies_and_steps_are_timed_in_turns(works, monkeypatch):
    """Each operation takes a second here: the products of three layers, and of their gradients but for the inputs'."""
    seconds = itertools.count()
    monkeypatch.setattr(cost_model, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(cost_model, "TURNS", 2)
    monkeypatch.setattr(cost_model, "COPIED", 8)
    assert [*cost_model.turns(load_params(ROOT / "params.yaml"))] == [cost_model.Turn(8, 1 / 64, 1)] * 2


def test_a_step_is_predicted_from_the_rates_of_its_own_turn(works, monkeypatch):
    work = works["params.yaml"]
    moved, issued = work.row_bytes + work.fixed_bytes, work.launches * cost_model.LAUNCH_US / 1e6
    found = [cost_model.Turn(0.04, 0.01 / moved, 0.05 + issued), cost_model.Turn(0.08, 0.02 / moved, 0.08 + issued),
             cost_model.Turn(0.02, 0.02 / moved, 0.05 + issued)]  # fmt: skip
    monkeypatch.setattr(cost_model, "work_of", lambda params: work)
    monkeypatch.setattr(cost_model, "turns", lambda params: found)
    (line,) = cost_model.prediction_here(load_params(ROOT / "params.yaml"))
    assert line.startswith(f"predicted {60 + 1e3 * issued:.2f} ms a step (products 40.00 at ")
    assert re.search(r"measured 50\.\d\d: \+0% \(-20% to \+2\d% in 3 turns\)$", line)
