from pathlib import Path

import pytest

from samebits.errors import UserError
from samebits.params import load_params, parse_params, require_every_key, with_num_devices

ROOT = Path(__file__).resolve().parent.parent


def test_defaults_are_the_file_in_the_repository() -> None:
    assert load_params(ROOT / "params.yaml") == parse_params({})


def test_objects_are_frozen_and_hashable() -> None:
    params = parse_params({})
    with pytest.raises(ValueError, match="frozen"):
        params.train.epochs = 3  # type: ignore[misc]
    assert hash(params) == hash(parse_params({}))


BAD = [
    ({"sed": 1}, "sed: unknown key, accepts seed, data, model, train, exact, tracking. hint: did you mean seed?"),
    ({"train": {"precison": "fp32"}}, "train.precison: unknown key"),
    ({"train": {"precision": "fp8"}}, "train.precision: got 'fp8', accepts 'fp32', 'tf32', 'bf16' or 'fp16'"),
    ({"train": {"epochs": "2"}}, "train.epochs: got '2', accepts an integer"),
    ({"train": {"epochs": 0}}, "train.epochs: got 0, accepts a number above 0"),
    ({"train": {"epochs": 1.5}}, "train.epochs: got 1.5, accepts an integer"),
    ({"train": {"compile": 1}}, "train.compile: got 1, accepts true or false"),
    ({"train": {"num_devices": 0}}, "train.num_devices: got 0, accepts 'auto' or an integer from 1"),
    ({"train": {"num_devices": True}}, "train.num_devices: got True, accepts 'auto' or an integer from 1"),
    ({"train": {"strategies": ["dp", "dp"]}}, "train.strategies: got ['dp', 'dp'], accepts a list without repeats"),
    ({"train": {"strategies": []}}, "accepts a list with at least one item"),
    ({"train": {"optimizer": {"lr": float("nan")}}}, "train.optimizer.lr: got nan, accepts a finite number"),
    ({"train": {"optimizer": {"momentum": 1}}}, "train.optimizer.momentum: got 1, accepts a number below 1"),
    ({"train": 3}, "train: got 3, accepts a mapping of keys"),
    ([], "the file: got [], accepts a mapping of keys"),
    ({"seed": -1}, "seed: got -1, accepts a number from 0"),
    ({"data": {"task": "audio"}}, "data.task: got 'audio', accepts vectors, regression, images, tokens or file"),
    ({"data": {"kwargs": {"feature": 3}}}, "data.kwargs.feature: unknown key, accepts features, classes"),
    ({"model": {"name": "resnet"}}, "model.name: got 'resnet', accepts mlp, wide_mlp, convnet, gpt or package"),
    ({"model": {"name": "a.b:c"}}, "model.source: got nothing"),
    ({"model": {"name": "mlp", "source": "x.py"}}, "model.source: got 'x.py', accepts null"),
    ({"model": {"kwargs": {"hidden": [1, "a"]}}}, "model.kwargs.hidden.1: got 'a', accepts an integer"),
    ({"model": {"name": "gpt"}}, "model.name: got 'gpt', accepts mlp, wide_mlp or your own"),
    ({"data": {"num_samples": 5}}, "train.global_batch_size: got 256, accepts at most data.num_samples = 5"),
    ({"train": {"grad_accum_steps": 3}}, "train.grad_accum_steps: got 3, accepts a divisor"),
    ({"train": {"num_devices": 3}}, "train.num_devices: got 3, accepts a divisor of the 256 samples"),
    (
        {"train": {"schedule": {"warmup_steps": 512}}},
        "train.schedule.warmup_steps: got 512, accepts fewer than the 512",
    ),
]


@pytest.mark.parametrize(("raw", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_named_in_one_line(raw: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_params(raw, origin="params.yaml")
    line = str(caught.value)
    assert line.startswith("params.yaml: ")
    assert message in line
    assert ". hint: " in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", 'params.yaml:2: found duplicate key "seed"'),
        ("seed: [1\n", "not valid YAML"),
        ("train: {epochs: 3, epochs: 4}", 'found duplicate key "epochs"'),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_params(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file\. hint: "):
        load_params(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (("seed",), "params.yaml: seed: missing, and DVC follows every key. hint: add `seed: 0`"),
        (("train", "schedule"), 'hint: add `schedule: {"name": "cosine", "warmup_steps": 0}`, which is the default'),
    ],
)
def test_dvc_needs_every_key(left_out: tuple[str, ...], message: str) -> None:
    raw = parse_params({}).model_dump(mode="json")
    require_every_key(parse_params(raw), "params.yaml")
    section = raw if len(left_out) == 1 else raw[left_out[0]]
    del section[left_out[-1]]
    with pytest.raises(UserError) as caught:
        require_every_key(parse_params(raw), "params.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(("value", "expected"), [(None, "auto"), ("4", 4), ("auto", "auto")])
def test_num_devices_of_the_command_line(value: str | None, expected: object) -> None:
    assert with_num_devices(parse_params({}), value, "fast").train.num_devices == expected


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_bad_num_devices_of_the_command_line(value: str) -> None:
    with pytest.raises(UserError, match=r"--num-devices: train\.num_devices: got"):
        with_num_devices(parse_params({}), value, "fast")
