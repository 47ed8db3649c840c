"""What the machines of a training must have in common."""

from pathlib import Path

import pytest

from conftest import small
from samebits.errors import HostError, UserError
from samebits.host.software import TorchBuild
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.workers import consistency
from samebits.workers.consistency import NodeFacts, node_facts, require_equal


def facts(name, *, gpus=0, torch="2.13.0", **chosen):
    values = {"commit": "a" * 40, "params seed": 0, **chosen}
    here = {"name": name, "machine": name, "gpus": gpus, "uuids": (), "cores": 2, "num_devices": "auto"}
    return NodeFacts(**here, chosen=values, installed={"torch": torch})


def test_machines_that_have_the_same_agree():
    require_equal([facts("n0"), facts("n1"), facts("n2")])


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        ([facts("a"), facts("b", commit="b")], UserError, r"commit: node 0 \(a\) has a{40}, node 1 \(b\) has b"),
        ([facts("a"), facts("b"), facts("c", torch="2.9")], HostError, r"\(a\) has 2.13.0, node 2 \(c\) has 2.9"),
        ([facts("a"), facts("b", more=1)], UserError, r"more: node 0 \(a\) has None, node 1 \(b\) has 1"),
        ([facts("a", gpus=2), facts("b")], HostError, r"node 1 \(b\) has no GPU, node 0 \(a\) has some"),
    ],
)
def test_the_first_difference_is_named(nodes, error, message):
    with pytest.raises(error, match=message):
        require_equal(nodes)


def test_the_number_of_devices_alone_may_differ(data_dir):
    def made(**train):
        params = parse_params({"train": train})
        return node_facts(params, {"strategy": "ddp"}, data_dir(params))

    first, second, other = made(num_devices=2), made(num_devices=1), made(timeout_s=7)
    assert (first.num_devices, second.num_devices) == (2, 1)
    require_equal([first, second])
    with pytest.raises(UserError, match=r"params train\.timeout_s: node 0 \(.*\) has 120, node 1 \(.*\) has 7"):
        require_equal([first, other])


@pytest.fixture
def described(tmp_path, data_dir, monkeypatch):
    """The facts of a machine whose model is a file of the user's, with something else than usual."""
    monkeypatch.chdir(tmp_path)

    def describe(*, seed=0, steps=None, model="def make(): ...", torch="2.13.0+cpu", cuda=None, **environ):
        Path("mine.py").write_text(model)
        for name in ("SAMEBITS_IMAGE", "SAMEBITS_IMAGE_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(consistency, "torch_build", lambda: TorchBuild(version=torch, cuda=cuda))
        data = data_dir(parse_params({**small(), "seed": seed}))
        params = parse_params(small(model={"name": "mine:make", "source": "mine.py"}))
        monkeypatch.setattr(consistency, "read_card", lambda path, _: read_card(path))
        return node_facts(params, {"steps": steps}, data)

    return describe


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"seed": 1}, UserError, "data"),
        ({"steps": 7}, UserError, "--steps"),
        ({"model": "def make(): 1"}, UserError, "model: mine.py"),
        ({"torch": "2.12.0+cpu"}, HostError, "torch"),
        ({"cuda": "13.0"}, HostError, "CUDA"),
        ({"SAMEBITS_IMAGE": "kit.sif"}, HostError, "image"),
    ],
)
def test_each_thing_that_must_be_equal_is_told(change, error, name, described):
    with pytest.raises(error, match=rf"^{name}: node 0 "):
        require_equal([described(), described(**change)])


def test_other_code_is_other_code(described, monkeypatch):
    first = described()
    monkeypatch.setattr(consistency, "sha256_tree", lambda path: "0" * 64)
    with pytest.raises(UserError, match=r"^samebits: node 0 "):
        require_equal([first, described()])
