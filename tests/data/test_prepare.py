import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import MODEL_OF_TASK, ROOT, small
from samebits.data.prepare import prepare
from samebits.errors import UserError
from samebits.params import parse_params
from samebits.records import card as card_module
from samebits.records.card import read_card
from samebits.training.batches import load_data

TASKS = list(MODEL_OF_TASK)


@pytest.mark.parametrize("task", TASKS)
def test_files_are_what_the_card_says(task, data_dir):
    params = parse_params(small(task))
    folder = data_dir(params)
    card = read_card(folder / "card.json")
    for split in (card.train, card.test):
        tensors = load_file(folder / split.file)
        assert tensors["inputs"].shape == (split.num_samples, *card.input_shape)
        assert tensors["inputs"].dtype.name == card.input_dtype
        assert tensors["targets"].shape == (split.num_samples, *card.target_shape)
        assert tensors["targets"].dtype.name == card.target_dtype
    assert card.floor == card.test.floor > 0
    if card.num_classes:
        assert set(np.unique(tensors["targets"])) <= set(range(card.num_classes))


@pytest.mark.parametrize("task", TASKS)
def test_the_teacher_reaches_its_floor(task, tmp_path):
    raw = small(task)
    raw["data"] |= {"num_samples": 64, "test_samples": 4000}
    card = prepare(parse_params(raw), tmp_path)
    assert card.test.teacher_loss == pytest.approx(card.floor, rel=0.05)


def test_seed_changes_the_data(tmp_path):
    raw = small()
    assert prepare(parse_params(raw), tmp_path).sha256 != prepare(parse_params({**raw, "seed": 1}), tmp_path).sha256


HASHES = """
import json, sys
from pathlib import Path
from samebits.data.prepare import prepare
from samebits.params import parse_params
print(json.dumps([prepare(parse_params(raw), Path(sys.argv[1])).sha256 for raw in json.loads(sys.argv[2])]))
"""
OLD = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR AVX2 FMA3"
SETTINGS = [
    {},
    {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"},
    {"NPY_DISABLE_CPU_FEATURES": OLD, "OPENBLAS_CORETYPE": "Nehalem"},
    {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1"},
]


GOLDEN = json.loads((ROOT / "tests/golden/data.json").read_text())


def hashes_of_data(setting):
    """The hash of each task's data, prepared in a process with these environment variables."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", HASHES, folder, json.dumps([small(task) for task in TASKS])],
            env={**os.environ, **setting},
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(done.stdout)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_bytes_are_the_golden_ones_under_every_instruction_set(setting):
    assert len(set(GOLDEN.values())) == len(TASKS)
    assert dict(zip(TASKS, hashes_of_data(setting), strict=True)) == GOLDEN, "python tests/golden/make.py"


def test_damaged_data_is_named(tmp_path, data_dir):
    params = parse_params(small())
    card = read_card(data_dir(params) / "card.json")
    with pytest.raises(UserError, match=r"train\.safetensors: no such file"):
        load_data(tmp_path, card, "train")
    other = card.model_copy(update={"sha256": "0" * 64})
    other = other.model_copy(update={"fields_sha256": card_module._digest(other)})
    for text, message in (
        ('{"task": "vectors"}', "made_from: Field required"),
        ("{", "cannot be read"),
        (json.dumps({**card.model_dump(mode="json"), "num_classes": 11}), "not as it was written: another SHA-256"),
        (other.model_dump_json(), "not as it was written: another SHA-256"),
    ):
        (tmp_path / "card.json").write_text(text)
        with pytest.raises(UserError, match=rf"card\.json: {message}"):
            read_card(tmp_path / "card.json")
    raw = {**small(global_batch_size=8), "data": {"num_samples": 64, "test_samples": 8}}
    prepare(parse_params(raw), tmp_path)
    with pytest.raises(UserError, match=r"train\.safetensors: not the data of its card: another SHA-256"):
        load_data(tmp_path, card, "train")
