import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DataParallel

from samebits.errors import UserError
from samebits.training.weights import load_weights, save_weights, weights_digest


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_what_is_saved_is_loaded(tmp_path):
    model, other = Tied(), Tied()
    digest = save_weights(model.state_dict(), tmp_path / "model.safetensors")
    assert load_weights(other, tmp_path / "model.safetensors") == []
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert other.head.weight is other.embedding.weight
    assert save_weights(other.state_dict(), tmp_path / "again.safetensors") == digest
    assert set(load_file(tmp_path / "model.safetensors")) == {"embedding.weight", "head.weight", "scale"}


def test_first_weights_have_a_digest_of_every_buffer():
    model = Tied()
    before = weights_digest(model)
    assert weights_digest(model) == before
    model.scratch.add_(1)
    assert weights_digest(model) != before


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_a_wrappers_prefix_is_taken_off_with_a_note(prefix, tmp_path):
    model = Tied()
    names = {prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}
    if prefix == "module.":
        assert names.keys() == DataParallel(model).state_dict().keys()
    save_file(names, tmp_path / "x.safetensors")
    other = Tied()
    notes = load_weights(other, tmp_path / "x.safetensors")
    assert len(notes) == prefix.count(".")
    assert "wrapped model" in notes[0]
    assert torch.equal(other.head.weight, model.head.weight)


def test_a_model_whose_own_names_begin_so_keeps_them(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    save_weights(model.state_dict(), tmp_path / "x.safetensors")
    assert load_weights(nn.ModuleDict({"module": nn.Linear(2, 2)}), tmp_path / "x.safetensors") == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"scale": torch.ones(2)}, "Missing key"),
        ({"embedding.weight": torch.ones(1, 1), "head.weight": torch.ones(5, 3), "scale": torch.ones(2)}, "size mism"),
        ({"module.embedding.weight": torch.ones(5, 3), "more": torch.ones(1)}, "Unexpected key"),
        (lambda path: path.write_bytes(b"PK\x03\x04 a pickle"), "not a safetensors file"),
        (os.mkfifo, r"x\.safetensors: not a safetensors file: expected a regular file\. hint: "),
    ],
)
def test_other_weights_are_refused(tensors, message, tmp_path):
    path = tmp_path / "x.safetensors"
    if callable(tensors):
        tensors(path)
    else:
        save_file(tensors, path)
    with pytest.raises(UserError, match=message) as caught:
        load_weights(Tied(), path)
    assert "\n" not in str(caught.value)
