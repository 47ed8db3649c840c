import itertools
import os
from datetime import date
from pathlib import Path
from typing import get_args

import pytest
from pydantic import Tag

from conftest import ROOT
from samebits.errors import UserError
from samebits.models import FACTORY, MODELS, Model
from samebits.params import (
    Params,
    keys_affecting,
    load_params,
    parse_params,
    require_every_key,
    values_affecting,
    with_num_devices,
)
from samebits.section import differences, effects_of


def test_defaults_are_the_file_in_the_repository() -> None:
    assert load_params(ROOT / "params.yaml") == parse_params({})


def test_objects_are_frozen_and_hashable() -> None:
    params = parse_params({})
    with pytest.raises(ValueError, match="frozen"):
        params.train.epochs = 3  # type: ignore[misc]
    assert hash(params) == hash(parse_params({}))


BAD = [
    ({"train": {"lr": 0.1}}, "hint: did you mean optimizer.lr?"),
    ({"sed": 1}, "sed: unknown key, accepts seed, data, model, train, exact, tracking. hint: did you mean seed?"),
    ({"train": {"precison": "fp32"}}, "train.precison: unknown key, accepts strategies, numerics, num_devices, "),
    ({"train": {1: 2}}, "train.1: unknown key, accepts strategies, numerics, num_devices, "),
    ({"train": {"precision": "fp8"}}, "train.precision: got 'fp8': Input should be 'fp32', 'tf32', 'bf16' or 'fp16'"),
    ({"train": {"epochs": "2"}}, "train.epochs: got '2': Input should be a valid integer. hint: docs/reference/params"),
    ({"train": {"epochs": 0}}, "train.epochs: got 0: Input should be greater than 0"),
    ({"train": {"epochs": 0, "repeats": 0}}, "train.epochs: got 0: Input should be greater than 0 (and 1 more)"),
    ({"train": {"epochs": 1.5}}, "train.epochs: got 1.5: Input should be a valid integer"),
    ({"train": {"compile": 1}}, "train.compile: got 1: Input should be a valid boolean"),
    ({"train": {"num_devices": 0}}, "train.num_devices: got 0: Input should be 'auto' or an integer from 1"),
    ({"train": {"num_devices": True}}, "train.num_devices: got True: Input should be 'auto' or an integer from 1"),
    ({"train": {"strategies": ["dp", "dp"]}}, "train.strategies: got ['dp', 'dp']: List should have at least one item"),
    ({"train": {"strategies": []}}, "train.strategies: got []: List should have at least one item, and none twice"),
    ({"train": {"strategies": "ddp"}}, "train.strategies: got 'ddp': Input should be a valid list"),
    ({"train": {"strategies": ["dpp"]}}, "train.strategies.0: got 'dpp': Input should be 'single', 'dp' or 'ddp'"),
    ({"train": {"optimizer": {"lr": float("nan")}}}, "train.optimizer.lr: got nan: Input should be a finite number"),
    ({"train": {"optimizer": {"momentum": 1}}}, "train.optimizer.momentum: got 1: Input should be less than 1"),
    ({"train": 3}, "train: got 3: Input should be a valid dictionary"),
    ([], "the file: got []: Input should be a valid dictionary"),
    ({"seed": -1}, "seed: got -1: Input should be greater than or equal to 0"),
    ({"data": 3}, "data: got 3: Input should be a valid dictionary"),
    ({"data": {"task": "audio"}}, "data.task: got 'audio': Input should be one of 'vectors', 'regression', 'images', "),
    (
        {"model": {"name": "m:f", "kwargs": {"since": date(2026, 1, 1)}}},
        "model.kwargs: got {'since': datetime.date(2026, 1, 1)}: since is date, which records do not keep. hint: ",
    ),
    ({"model": {"name": "m:f", "kwargs": {"a": {"b": [1.0, float("nan")]}}}}, "a.b is nan, which records do not keep"),
    ({"train": {"schedule": {"kwargs": {"at": {10: 0.5}}}}}, "the key 10 of at is int, which records do not keep"),
    ({"data": {"kwargs": {"feature": 3}}}, "data.kwargs.feature: unknown key, accepts features, classes. hint: did"),
    (
        {"data": {"kwargs": {"nothing": 3}}, "train": {"epochs": 0}},
        "data.kwargs.nothing: unknown key, accepts features, classes (and 1 more). hint: remove it",
    ),
    ({"model": 3}, "model: got 3: Input should be a valid dictionary"),
    ({"data": {"task": "file"}}, "data.kwargs: got nothing. hint: name your arrays: kwargs: {inputs: "),
    ({"data": {"task": "file", "kwargs": {"inputs": "x.npy"}}}, "data.kwargs.targets: got nothing. hint: name your"),
    (
        {"model": {"name": "resnet"}},
        f"model.name: got 'resnet': Input should be one of {', '.join(map(repr, MODELS))}, 'package.module:",
    ),
    ({"model": {"name": "a/b:c", "source": "x"}}, "model.name: got 'a/b:c': Input should be one of 'mlp', "),
    ({"model": {"name": "a.b:c", "source": 3}}, "model.source: got 3: Input should be a valid string. hint: leave it"),
    ({"model": {"name": "mlp", "source": "x.py"}}, "model.source: got 'x.py': Input should be None. hint: leave it"),
    ({"model": {"kwargs": {"hidden": [1, "a"]}}}, "model.kwargs.hidden.1: got 'a': Input should be a valid integer"),
    ({"model": {"kwargs": {"hidden": ["1"]}}}, "model.kwargs.hidden.0: got '1': Input should be a valid integer"),
    ({"model": {"name": "gpt"}}, "model.name: got 'gpt', accepts mlp, wide_mlp or your own"),
    ({"data": {"num_samples": 5}}, "train.global_batch_size: got 4096, accepts at most data.num_samples = 5"),
    ({"train": {"grad_accum_steps": 3}}, "train.grad_accum_steps: got 3, accepts a divisor"),
    ({"exact": {"shards": 7}}, "exact.shards: got 7, accepts a divisor of train.global_batch_size = 4096. hint: set i"),
    ({"train": {"schedule": {"warmup_steps": 20}}}, "train.schedule.warmup_steps: got 20, accepts fewer than the 20"),
    (
        {"data": {"task": "tokens"}, "model": {"name": "gpt", "kwargs": {"heads": 3}}},
        "model.kwargs.heads: got 3, accepts a divisor of model.kwargs.width = 64",
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


LAUGHS = "a: &a [1]\n" + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file. hint: "),
        (b"seed: \xff\n", "params.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("seed: 1\nseed: 2\n", 'params.yaml:2: found duplicate key "seed"'),
        ("seed: [1\n", "not valid YAML"),
        ("train: {epochs: 3, epochs: 4}", 'found duplicate key "epochs"'),
        ("seed: 2001-99-99\n", "params.yaml: a value cannot be read: month must be in 1..12. hint: "),
        ('seed: !!int "abc"\n', "params.yaml: a value cannot be read: "),
        ("seed: " + "9" * 5000, "params.yaml: a value cannot be read: Exceeds the limit"),
        ("[" * 100_000, "params.yaml: nested too deeply. hint: check its brackets"),
        ("{" * 100_000, "params.yaml: nested too deeply. hint: check its brackets"),
        ("{a: " * 300 + "1" + "}" * 300, "params.yaml: nested too deeply. hint: check its brackets"),
        ("seed: &a [*a]\n", "params.yaml: a value cannot be read: an alias stands inside of what it stands for"),
        ("seed: !!python/object/apply:os.system [exit]\n", "not valid YAML: could not determine a constructor"),
        ("\x00", "not valid YAML"),
        ("seed: !!binary x\n", "params.yaml: "),
        ('seed: !!int ""\n', "params.yaml: a value cannot be read: "),
        ("seed: !!bool x\n", "params.yaml: a value cannot be read: "),
        ("seed: 0x" + "f" * 5000, "params.yaml: a value cannot be read: Exceeds the limit"),
        ("train: {epochs: 0b" + "1" * 20_000 + "}", "params.yaml: a value cannot be read: Exceeds the limit"),
        ('"\\ud800": 1\n', "params.yaml: a value cannot be read: 'utf-8' codec can't encode character '\\ud800'"),
        ('model: {source: "\\ud800"}\n', "params.yaml: a value cannot be read: 'utf-8' codec can't encode character"),
        (LAUGHS + "seed: *i\n", "params.yaml: a value cannot be read: more than 100000 of them, each alias counted"),
        (LAUGHS + "model: {name: *i}\n", "params.yaml: a value cannot be read: more than 100000 of them"),
        ("model: &m {name: a.b:c, source: x.py, kwargs: *m}\n", "params.yaml: a value cannot be read: an alias"),
        ('"\\e[31m": 1\n', r"params.yaml: \x1b[31m: unknown key, accepts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_yaml(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    file = tmp_path / "params.yaml"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError) as caught:
        load_params(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_params_are_read_from_a_regular_file_only(make, tmp_path: Path) -> None:
    make(tmp_path / "params.yaml")
    with pytest.raises(UserError, match=r"params\.yaml: expected a file\. hint: "):
        load_params(tmp_path / "params.yaml")


def test_every_builtin_model_and_task_is_known_by_its_name() -> None:
    """The tag by which a section is chosen is not a key that a message may name, nor one that a file must have."""
    for raw in ({"name": "wide_mlp"}, {"kwargs": {"hidden": [3]}}, {"name": "a.b:c", "source": "a"}):
        params = parse_params({"model": raw})
        assert parse_params({"model": params.model_dump(mode="json")["model"]}).model == params.model
    assert parse_params({"data": {"num_samples": 5000}}).data.task == "vectors"
    builtin = {tag.tag for section in get_args(get_args(Model)[0]) for tag in get_args(section) if isinstance(tag, Tag)}
    assert builtin - {FACTORY} == set(MODELS)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (("seed",), "params.yaml: seed: missing, and DVC follows every key. hint: add `seed: 0`"),
        (
            ("train", "schedule"),
            'hint: add `schedule: {"name": "cosine", "warmup_steps": 0, "kwargs": {}}`, which is the default',
        ),
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
    params = parse_params({})
    found = with_num_devices(params, value, "fast")
    assert found.train.num_devices == expected
    assert found.train.numerics == params.train.numerics


@pytest.mark.parametrize("value", ["0", "-1", "x", "9" * 5000], ids=lambda value: value[:4])
def test_bad_num_devices_of_the_command_line(value: str) -> None:
    message = rf"--num-devices {value[:9]}.*: train\.num_devices: got .{{1,99}}: Input should be .* an integer from 1"
    with pytest.raises(UserError, match=message):
        with_num_devices(parse_params({}), value, "fast")


def test_numerics_that_the_file_does_not_name_are_checked() -> None:
    params = parse_params({"train": {"numerics": ["fast"], "global_batch_size": 20}})
    assert with_num_devices(params, None, "fast") == params
    with pytest.raises(UserError, match=r"numerics exact: exact\.shards: got 8, accepts a divisor of .* = 20"):
        with_num_devices(params, None, "exact")


TRAINING = {"train.global_batch_size", "train.epochs", "train.optimizer", "train.schedule", "train.clip_grad_norm"}
FAST = {"train.grad_accum_steps", "train.precision", "train.compile", "train.cuda_graphs", "train.ddp"}
DEVICES = {"train.num_devices", "train.oversubscribe"}


@pytest.mark.parametrize(
    ("effects", "keys"),
    [
        (["exact"], {"seed", "data", "model", "exact", *TRAINING}),
        (["fast"], {"seed", "data", "model", *TRAINING, *FAST}),
        (["devices"], DEVICES),
        (["own_devices"], {"train.num_devices"}),
        (["runs"], {"train.strategies", "train.numerics"}),
        (["evaluation"], {"seed", "model", "train.precision", "exact"}),
        (["tracking"], {"tracking"}),
        (
            ["exact", "fast", "time", "devices"],
            {
                "seed",
                "data",
                "model",
                "exact",
                *TRAINING,
                *FAST,
                *DEVICES,
                "train.repeats",
                "train.prolong_s",
                "train.loader",
            },
        ),
    ],
)
def test_what_a_key_changes(effects, keys):
    """A key that nothing here names, as train.timeout_s, trains nothing again."""
    assert {*keys_affecting(*effects)} == keys


def test_keys_that_change_nothing_that_is_kept():
    unused = {key for key, effects in effects_of(Params) if not effects}
    assert unused == {"train.checkpoint_every_steps", "train.timeout_s"}


def test_the_values_of_keys_by_their_dotted_names():
    params = parse_params({})
    runs = values_affecting(params, "runs")
    assert runs == {"train.strategies": ["single", "dp", "ddp"], "train.numerics": ["fast", "exact"]}
    assert "train.optimizer.lr" in values_affecting(params, "exact")
    assert "exact.shards" in values_affecting(params, "evaluation", numerics="exact")
    fast = values_affecting(params, "evaluation", numerics="fast")
    assert ("exact.shards" in fast, "train.precision" in fast) == (False, True)


def test_an_empty_mapping_is_no_difference_by_itself():
    """Such as kwargs of a task that has none: what differs is the task."""
    one, other = {"task": "dataset", "kwargs": {}}, {"task": "vectors", "kwargs": {"features": 8}}
    assert differences(one, other) == {"kwargs.features": (None, 8), "task": ("dataset", "vectors")}
    assert differences({"kwargs": {}}, {}) == {}


@pytest.mark.parametrize(
    ("data", "counts"),
    [({}, True), ({"task": "file", "kwargs": {"inputs": "x.npy", "targets": "y.npy"}}, False),
     ({"task": "dataset"}, False)],
)  # fmt: skip
def test_the_seed_determines_only_data_that_the_kit_draws(data, counts):
    one, other = (
        parse_params({"seed": seed, "data": data, "model": {"name": "mine:make"}}).data_identity for seed in (1, 2)
    )
    assert (one != other) == counts
