"""A user's own arrays as the ``file`` task."""

import hashlib
import json
import os
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from samebits.data.prepare import prepare
from samebits.data.user import ROWS
from samebits.errors import UserError
from samebits.hashes import sha256, sha256_remembered
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.training.batches import load_data, model_inputs
from samebits.training.models.build import build_model

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(50, 3)).astype(np.float32)
Y = RANDOM.integers(0, 4, size=50)


def params(samples=30, tests=20, model=None, **kwargs):
    files = {"inputs": "x.npy", "targets": "y.npy", **kwargs}
    data = {"task": "file", "num_samples": samples, "test_samples": tests, "kwargs": files}
    return parse_params(
        {"data": data, "train": {"global_batch_size": 10, "numerics": ["fast"]}, "model": model or {"name": "mlp"}}
    )


def splits(folder, card):
    return [load_data(folder / "data", card, split) for split in ("train", "test")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("y.npy", Y)
    return tmp_path


def test_the_first_rows_train_and_those_after_them_test(folder):
    card = prepare(params(), folder / "data")
    train, test = splits(folder, card)
    assert torch.equal(train[0], torch.from_numpy(X[:30]))
    assert torch.equal(test[1], torch.from_numpy(Y[30:]))
    assert (card.loss, card.num_classes, card.output_shape) == ("cross_entropy", 4, (4,))
    assert (card.floor, card.input_dtype) == (None, "float32")
    assert read_card(folder / "data/card.json") == card


@pytest.mark.parametrize(
    ("x", "y", "folders"), [(0o644, 0o644, 0o755), (0o600, 0o644, 0o700), (0o644, 0o640, 0o750), (0o640, 0o604, 0o700)]
)
@pytest.mark.attack("another user of the host")
def test_copies_are_as_private_as_the_files(x, y, folders, folder):
    (folder / "x.npy").chmod(x)
    (folder / "y.npy").chmod(y)
    (folder / ".dvc").mkdir()
    for copies in (folder / "data", folder / ".dvc/cache"):
        copies.mkdir()
        copies.chmod(0o755)
    prepare(params(), folder / "data")
    assert [(folder / name).stat().st_mode & 0o777 for name in ("data", ".dvc/cache")] == [folders, folders]


def test_what_is_loaded_is_the_file_that_was_hashed(folder, monkeypatch):
    """Whatever takes its place meanwhile."""
    card = prepare(params(), folder / "data")
    real, file = hashlib.file_digest, folder / "data/train.safetensors"

    def replaced_after(stream, name):
        digest = real(stream, name)
        save_file({"inputs": X[20:], "targets": Y[20:]}, folder / "other")
        (folder / "other").rename(file)
        return digest

    monkeypatch.setattr(hashlib, "file_digest", replaced_after)
    assert torch.equal(load_data(folder / "data", card, "train")[0], torch.from_numpy(X[:30]))
    monkeypatch.undo()
    with pytest.raises(UserError, match="not the data of its card"):
        load_data(folder / "data", card, "train")


def test_a_split_chooses_the_rows(folder):
    split = RANDOM.permutation([0] * 30 + [1] * 20)
    np.save("split.npy", split)
    card = prepare(params(samples=25, tests=15, split="split.npy"), folder / "data")
    train, test = splits(folder, card)
    assert np.array_equal(train[0], X[split == 0][:25])
    assert np.array_equal(test[0], X[split == 1][:15])


def test_many_rows_are_read_in_pieces(folder):
    rows = 2 * ROWS + 17
    x = RANDOM.integers(0, 255, size=(rows, 2), dtype=np.uint8)
    save_file({"images": x, "labels": np.arange(rows) % 7}, folder / "all.safetensors")
    kwargs = {"inputs": "all.safetensors:images", "targets": "all.safetensors:labels", "input_scale": 0.5}
    card = prepare(params(samples=rows - 10, tests=10, **kwargs), folder / "data")
    inputs, targets = load_data(folder / "data", card, "train")
    assert np.array_equal(inputs, x[:-10])
    assert np.array_equal(targets, (np.arange(rows) % 7)[:-10])
    assert torch.equal(model_inputs(inputs, card), inputs.float() * 0.5)


@pytest.mark.parametrize(
    ("x", "y", "stored", "loss"),
    [
        (X.astype(np.float64), Y.astype(np.int8), ("float32", "int64"), "cross_entropy"),
        (X.astype(np.float16), X[:, 0], ("float32", "float32"), "mse"),
        (Y[:, None].astype(np.int32), np.stack([Y, Y], 1), ("int64", "int64"), "cross_entropy"),
        (X > 0, X, ("int64", "float32"), "mse"),
        (np.asfortranarray(X), Y.astype(">i8"), ("float32", "int64"), "cross_entropy"),
    ],
)
def test_types_are_stored_as_trainings_read_them(x, y, stored, loss, folder):
    np.save("x.npy", x)
    np.save("y.npy", y)
    card = prepare(params(), folder / "data")
    assert ((card.input_dtype, card.target_dtype), card.loss) == (stored, loss)
    tensors = load_file(folder / "data/train.safetensors")
    assert np.allclose(tensors["inputs"], x[:30].astype(np.float64))
    assert np.allclose(tensors["targets"].reshape(30, -1), y[:30].reshape(30, -1))


def test_the_bytes_are_a_function_of_the_files(folder):
    first = prepare(params(), folder / "one")
    assert prepare(params(), folder / "two").sha256 == first.sha256
    np.save("x.npy", X + 1)
    assert prepare(params(), folder / "three").sha256 != first.sha256


def save_header(path, header):
    """A .npy of 50 rows with such a header."""
    text = header.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + X.tobytes())


def save_tensor(path, kind, bits):
    """A safetensors file with a tensor ``x`` of 50 rows, whose type no NumPy may have; without one for no bits."""
    size = 50 * 4 * bits // 8
    header = json.dumps({"x": {"dtype": kind, "shape": [50, 4], "data_offsets": [0, size]}} if bits else {}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


NAN, INFINITE = X.copy(), X.astype(np.float64)
NAN[7, 1] = np.nan
INFINITE[40, 0] = 1e39
WIDE = np.ones(X.shape, dtype=np.uint64)
WIDE[9, 0] = 2**63
MISTAKES = [
    ({}, {"inputs": "z.npy"}, "data.kwargs.inputs: z.npy: no such file. hint: give the path from"),
    ({}, {"inputs": "all.safetensors"}, "got no name of a tensor, accepts images, labels. hint: write all.safetens"),
    ({}, {"inputs": "all.safetensors:x"}, "data.kwargs.inputs: all.safetensors: got 'x', accepts images, labels"),
    ({}, {"inputs": "notes.txt"}, "data.kwargs.inputs: notes.txt: neither .npy nor .safetensors"),
    ({}, {"inputs": "broken.npy"}, "data.kwargs.inputs: broken.npy: cannot be read: EOF: reading magic"),
    ({}, {"inputs": "empty.npy"}, "data.kwargs.inputs: empty.npy: cannot be read: EOF: reading magic string"),
    ({}, {"inputs": "pipe.npy"}, "data.kwargs.inputs: pipe.npy: cannot be read: expected a regular file. hint: "),
    ({}, {"inputs": "objects.npy"}, "data.kwargs.inputs: objects.npy: cannot be read: "),
    ({}, {"inputs": "zip.npy"}, "data.kwargs.inputs: zip.npy: cannot be read: the magic string is not correct"),
    ({}, {"inputs": "torch.npy"}, "data.kwargs.inputs: torch.npy: cannot be read: the magic string is not correct"),
    ({}, {"inputs": "cut.npy"}, "data.kwargs.inputs: cut.npy: cannot be read: "),
    ({}, {"inputs": "keys.npy"}, "data.kwargs.inputs: keys.npy: cannot be read: "),
    ({}, {"inputs": "x" * 5000}, "xxx: cannot be read: File name too long. hint: "),
    ({}, {"inputs": "x\0.npy"}, r"data.kwargs.inputs: x\x00.npy: cannot be read: embedded null"),
    ({}, {"inputs": "none.safetensors:x"}, "data.kwargs.inputs: none.safetensors: holds no tensor. hint: "),
    ({}, {"inputs": "BF16.safetensors:x"}, "inputs: BF16.safetensors: x holds BF16, expected numbers of NumPy's. hint"),
    ({}, {"inputs": "F8_E4M3.safetensors:x"}, "F8_E4M3.safetensors: x holds F8_E4M3, expected numbers of NumPy's"),
    ({}, {"inputs": "F4.safetensors:x"}, "F4.safetensors: x holds F4, expected numbers of NumPy's"),
    ({}, {"split": "scalar.npy"}, "data.kwargs.split: expected 50 zeros and ones"),
    ({"x": WIDE}, {}, "data.kwargs.inputs: x.npy: row 9 holds an integer beyond 2**63 - 1"),
    ({"x": NAN}, {}, "data.kwargs.inputs: x.npy: row 7 holds a value that is not finite"),
    ({"x": INFINITE}, {}, "data.kwargs.inputs: x.npy: row 40 holds a value that is not finite"),
    ({"x": X.astype(complex)}, {}, "data.kwargs.inputs: x.npy holds complex128, expected numbers"),
    ({"x": X[:, 0]}, {}, "data.kwargs.inputs: shape is (50,), expected (samples, ...)"),
    ({"x": X[:, :0]}, {}, "data.kwargs.inputs: shape is (50, 0), which holds no values. hint: each sample has to"),
    ({"y": np.zeros((50, 0), np.int64)}, {}, "data.kwargs.targets: shape is (50, 0), which holds no values"),
    ({"y": Y[:49]}, {}, "data.kwargs.targets: 49 rows for 50 of inputs"),
    ({"y": Y - 1}, {}, "expected classes from 0 on. hint: count classes from 0"),
    ({}, {"classes": 3}, "expected classes from 0 to 2"),
    ({"y": X[:, 0]}, {"classes": 3}, "data.kwargs.classes: given, and the targets are not integers"),
    ({}, {"samples": 40}, "data.test_samples: got 20, the files have 10 such rows. hint: lower it"),
    ({}, {"samples": 60}, "data.num_samples: got 60, the files have 50 such rows"),
    ({}, {"split": "y.npy"}, "data.kwargs.split: expected 50 zeros and ones"),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "settings", "message"), MISTAKES, ids=[case[2][:40] for case in MISTAKES])
def test_mistakes(arrays, settings, message, folder):
    (folder / "notes.txt").write_text("no")
    (folder / "broken.npy").write_text("no")
    (folder / "empty.npy").touch()
    os.mkfifo(folder / "pipe.npy")
    with zipfile.ZipFile(folder / "zip.npy", "w") as archive:
        archive.writestr("x.npy", b"")
    torch.save({"x": torch.from_numpy(X)}, folder / "torch.npy")
    save_header(folder / "cut.npy", "{'descr': '<f4', 'fortran_order': False, 'shape': (50, 3)")
    save_header(folder / "keys.npy", "{1: 2, 'descr': '<f4', 'fortran_order': False, 'shape': (50, 3)}")
    np.save("scalar.npy", np.int64(1))
    for kind, bits in {"none": 0, "BF16": 16, "F8_E4M3": 8, "F4": 4}.items():
        save_tensor(folder / f"{kind}.safetensors", kind, bits)
    np.save("objects.npy", np.array([{}], dtype=object))
    save_file({"images": X, "labels": Y}, folder / "all.safetensors")
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    with pytest.raises(UserError) as caught:
        prepare(params(**settings), folder / "data")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "x", "y"),
    [
        ("mlp", Y[:, None], Y),
        ("convnet", X, Y),
        ("gpt", X, Y),
        ("mlp", X, np.stack([Y, Y], 1)),
    ],
)
def test_a_model_that_does_not_fit_is_refused(model, x, y, folder):
    np.save("x.npy", x)
    np.save("y.npy", y)
    settings = params(model={"name": model})
    card = prepare(settings, folder / "data")
    with pytest.raises(UserError, match=rf"model\.name: {model} needs "):
        build_model(settings.model, card, 0)


def test_a_training_on_own_data(folder, stage):
    raw = params(model={"name": "mlp"}).model_dump(mode="json")
    raw["train"] |= {"strategies": ["single"], "repeats": 1}
    stage.write_params(raw)
    for command in ("host", "prepare", "train --strategy single --no-tracking", "evaluate", "compare --no-tracking"):
        done = stage(*command.split())
        assert done.returncode == 0, done.stderr
        assert command != "prepare" or done.stdout == "file: 30 + 20 samples, 4 classes\n"
    assert set(json.loads((folder / "files.json").read_text())) == {"inputs", "targets", "samebits"}
    row = json.loads((folder / "reports/comparison.json").read_text())["rows"][0]
    assert (row["floor"], row["above_floor"]) == (None, None)
    assert row["accuracy"] >= 0


def test_a_large_file_is_hashed_once(folder, monkeypatch):
    memory = folder / "hashes.json"
    first = sha256_remembered(folder / "x.npy", memory)
    with monkeypatch.context() as patch:
        patch.setattr("samebits.hashes.sha256", lambda path: pytest.fail("read again"))
        assert sha256_remembered(folder / "x.npy", memory) == first
    np.save("x.npy", X + 1)
    assert sha256_remembered(folder / "x.npy", memory) != first


def test_a_hash_that_cannot_be_stored_is_computed_again(folder):
    (folder / "closed").write_text("somebody's")
    assert sha256_remembered(folder / "x.npy", folder / "closed/hashes.json") == sha256(folder / "x.npy")


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"NAME": 3}', '{"NAME": [SIZE, TIME, 7]}', "\xff", '{"x": NaN}', None]
)
def test_damaged_hashes_are_discarded(damage, folder):
    memory, path = folder / "hashes.json", folder / "x.npy"
    if damage is None:
        os.mkfifo(memory)
    else:
        known = damage.replace("NAME", str(path.resolve())).replace("SIZE", str(path.stat().st_size))
        memory.write_text(known.replace("TIME", str(path.stat().st_mtime_ns)), encoding="latin-1")
    assert sha256_remembered(path, memory) == sha256(path)
    assert json.loads(memory.read_text())[str(path.resolve())][2] == sha256(path)
