"""Factories of users' models, and what is said of those that do not work."""

import itertools
import re
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from torch import nn

from samebits.errors import UserError
from samebits.params import parse_params
from samebits.training.models.build import build_model
from samebits.training.models.sources import search_path
from samples import card

_NUMBERS = itertools.count()
PLAIN = "from torch import nn\ndef make(width=4, *, depth=1):\n    return nn.Linear(width, depth)\n"
WITH_CARD = "from torch import nn\ndef make(card):\n    return nn.Linear(card.input_shape[0], 1)\n"
FAILING = "def make():\n    1 / 0\n"
REFUSING = "from samebits.errors import UserError\ndef make():\n    raise UserError('own words', hint='own hint')\n"
LAZY = "from torch import nn\ndef make():\n    return nn.LazyLinear(3)\n"
EXTRA = (
    "from torch import nn\nclass Net(nn.Linear):\n    def get_extra_state(self):\n        return {'epoch': 1}\n"
    "def make():\n    return Net(2, 2)\n"
)
MISTAKES = [
    (FAILING, {}, "model.name: NAME:make raised ZeroDivisionError: division by zero. hint: see NAME.py:2"),
    (REFUSING, {}, "own words. hint: own hint"),
    ("def make(:\n", {}, "model.name: NAME:make cannot be imported: FOLDER/NAME.py:1: invalid syntax. hint: correct"),
    ("import nowhere\n", {}, "model.name: NAME:make cannot be imported: No module named 'nowhere'. hint: write"),
    ("made = 1\n", {}, "model.name: NAME:make cannot be imported: module 'NAME' has no attribute 'make'. hint: "),
    (PLAIN, {"wdith": 1}, "model.kwargs.wdith: unknown key, NAME:make takes width, depth. hint: did you mean width?"),
    (PLAIN, {"x": 1}, "model.kwargs.x: unknown key, NAME:make takes width, depth. hint: remove it"),
    ("def make(width):\n    pass\n", {}, "model.kwargs: NAME:make: missing a required argument: 'width'. hint: give"),
    (LAZY, {}, "model.name: NAME:make returned a model whose weight has no shape yet. hint: run one sample"),
    (EXTRA, {}, "model.name: NAME:make returned a model whose state_dict holds _extra_state, which is no tensor. hint"),
    ("def make():\n    return 3\n", {}, "model.name: NAME:make returned int, expected a torch.nn.Module. hint: "),
]


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def build(code, kwargs=None, **changes):
        build.name = f"factory{next(_NUMBERS)}"
        (tmp_path / f"{build.name}.py").write_text(code)
        model = {"name": f"{build.name}:make", "source": f"{build.name}.py", "kwargs": kwargs or {}, **changes}
        return build_model(parse_params({"model": model}).model, card(), seed=0)

    return build


def test_a_factory_gets_its_kwargs_and_the_card_if_it_asks_for_it(build):
    assert build(PLAIN, {"width": 3, "depth": 2}).weight.shape == (2, 3)
    assert build(WITH_CARD).in_features == 128
    anything = "from torch import nn\ndef make(**options):\n    return nn.Identity()\n"
    assert isinstance(build(anything, {"a": 1}), nn.Identity)


@pytest.mark.parametrize(("code", "kwargs", "message"), MISTAKES, ids=[message[:60] for *_, message in MISTAKES])
def test_what_is_wrong_with_a_factory_is_said(code, kwargs, message, build, tmp_path):
    with pytest.raises(UserError) as caught:
        build(code, kwargs)
    said = str(caught.value).replace(str(tmp_path), "FOLDER")
    assert re.sub(rf"\b{build.name}\b", "NAME", said).startswith(message)


def test_ctrl_c_in_a_factory_is_no_mistake_of_it(build):
    with pytest.raises(KeyboardInterrupt):
        build("def make():\n    raise KeyboardInterrupt\n")


@pytest.mark.parametrize("name", ["subprocess:call", "os.path:join"])
def test_a_module_of_pythons_makes_no_model(name, build):
    """Whatever source it is said to come from: params may be somebody else's."""
    with pytest.raises(UserError, match=rf"model\.name: {name}: a module of Python's makes no model"):
        build(PLAIN, {"args": ["touch", "canary"]}, name=name, source="/")


def test_the_working_directory_comes_after_pythons_modules_and_before_installed_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("queue", "mlflow"):
        (tmp_path / f"{name}.py").touch()
    found = {name: Path(PathFinder.find_spec(name, search_path()).origin) for name in ("queue", "mlflow")}
    assert {name: file.parent == tmp_path for name, file in found.items()} == {"queue": False, "mlflow": True}


def test_the_source_must_hold_the_factory(build, tmp_path):
    (tmp_path / "other.py").touch()
    with pytest.raises(UserError, match=r"model\.source: other\.py does not hold .*\.py\. hint: remove mo"):
        build(PLAIN, source="other.py")
    with pytest.raises(UserError, match=r"model\.source: nowhere\.py: no such file or folder\. hint: "):
        build(PLAIN, source="nowhere.py")
