import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from conftest import MODEL_OF_TASK, small
from samebits.data.batches import Batches, equal_parts, load_split, model_inputs, shard_parts
from samebits.data.card import read_card
from samebits.data.prepare import prepare
from samebits.errors import UserError
from samebits.params import parse_params

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


def test_the_bytes_are_the_same_under_every_instruction_set(tmp_path):
    raws = json.dumps([small(task) for task in TASKS])
    found = []
    for setting in SETTINGS:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", HASHES, str(tmp_path), raws],
            env={**os.environ, **setting},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    assert len(set(found[0])) == len(TASKS)
    assert found == [found[0]] * len(SETTINGS)


def _batches(inputs, shard=0, shards=1, accum=1, resident=True):
    card = read_card_like()
    batches = Batches(
        (inputs, inputs[:, 0].long()), card, seed=0, global_batch_size=16,
        layout=equal_parts(16, accum=accum, rank=shard, ranks=shards), device=torch.device("cpu"),
    )  # fmt: skip
    if not resident:
        batches.resident = False
    return batches


def read_card_like():
    from samebits.data.card import Card, Split

    split = Split(file="x", num_samples=100, sha256="", floor=1.0, teacher_loss=1.0)
    return Card(
        task="vectors", loss="cross_entropy", input_shape=(1,), input_dtype="float32", input_scale=1, input_offset=0,
        target_shape=(), target_dtype="int64", num_classes=2, floor=1.0, sha256="", train=split, test=split,
    )  # fmt: skip


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("shards", "accum"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)])
def test_every_split_sees_the_same_global_batches(shards, accum, resident):
    inputs = torch.arange(100, dtype=torch.float32).unsqueeze(1)
    whole = _batches(inputs)
    parts = [_batches(inputs, shard, shards, accum, resident) for shard in range(shards)]
    for step in range(13):
        expected = whole.micro_batch(step, 0)[0].flatten().tolist()
        got = [x for i in range(accum) for part in parts for x in part.micro_batch(step, i)[0].flatten().tolist()]
        assert got == expected


@pytest.mark.parametrize("accum", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_shards_are_shared_out_whole_and_in_order(ranks, accum):
    parts = [part for rank in range(ranks) for part in shard_parts(32, 8, accum=accum, rank=rank, ranks=ranks)]
    assert [number for part in parts for number in part.shards] == list(range(8))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(32))
    assert all(part.stop - part.start == 4 * len(part.shards) for part in parts)
    for rank in range(ranks):
        own = shard_parts(32, 8, accum=accum, rank=rank, ranks=ranks)
        assert 8 // ranks <= sum(len(part.shards) for part in own) <= -(-8 // ranks)
        assert len(own) <= accum


def test_an_epoch_sees_each_sample_at_most_once_and_epochs_differ():
    inputs = torch.arange(100, dtype=torch.float32).unsqueeze(1)
    batches = _batches(inputs)
    epochs = [[x for s in range(6) for x in batches.micro_batch(e * 6 + s, 0)[0].flatten().tolist()] for e in (0, 1)]
    assert [len(set(epoch)) for epoch in epochs] == [96, 96]
    assert epochs[0] != epochs[1]


def test_pixels_become_exact_floats(data_dir):
    params = parse_params(small("images"))
    card = read_card(data_dir(params) / "card.json")
    stored, _ = load_split(data_dir(params), card, "test")
    fed = model_inputs(stored, card)
    assert fed.dtype == torch.float32
    assert torch.equal(fed * 64 + 128, stored.float())


def test_damaged_data_is_named(tmp_path, data_dir):
    params = parse_params(small())
    card = read_card(data_dir(params) / "card.json")
    with pytest.raises(UserError, match=r"train\.safetensors: no such file"):
        load_split(tmp_path, card, "train")
    (tmp_path / "card.json").write_text('{"task": "vectors"}')
    with pytest.raises(UserError, match=r"card\.json: loss: Field required"):
        read_card(tmp_path / "card.json")
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(UserError, match=r"card\.json: cannot be read"):
        read_card(tmp_path / "card.json")
    other = prepare(
        parse_params({**small(), "data": {"num_samples": 64, "test_samples": 8}, "train": {"global_batch_size": 8}}),
        tmp_path,
    )
    with pytest.raises(UserError, match="the card says"):
        load_split(tmp_path, card, "train")
    assert other.train.num_samples == 64
