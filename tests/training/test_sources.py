"""What a user's model is made of: an edit of any of it trains again."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import small
from samebits.params import parse_params
from samebits.training.models.sources import Watched, find_sources, recalled

FILES = {
    "mine/__init__.py": "",
    "mine/two.py": (
        "import importlib, json, sys\n"
        "from pathlib import Path\n"
        "import torch\n"
        "import numpy as np\n"
        "from . import sibling\n"
        "from .deep import leaf\n"
        "import spaces.inner.part\n"
        "sys.path.insert(0, 'lib')\n"
        "import helper\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        from mine.lazy import act\n"
        "        plugin = importlib.import_module('plug' + 'in')\n"
        "        return plugin.act(act(super().forward(x)))\n"
        "    def later(self):\n"
        "        from mine import seldom\n"
        "def make(card):\n"
        "    sizes = json.loads(Path('mine/sizes.json').read_text())\n"
        "    np.load(sys.argv[0] if False else 'tables/t.npy')\n"
        "    return Net(card.input_shape[0], sizes['classes'])\n"
    ),
    "mine/sibling.py": "import editable_one\n",
    "mine/deep/__init__.py": "from .. import cousin\n",
    "mine/deep/leaf.py": "",
    "mine/cousin.py": "",
    "spaces/inner/part.py": "",
    "lib/helper.py": "",
    "mine/lazy.py": "def act(x):\n    return x\n",
    "mine/seldom.py": "",
    "plugin.py": "import of_plugin\ndef act(x):\n    return x\n",
    "of_plugin.py": "",
    "mine/sizes.json": json.dumps({"classes": 10}),
    "unused.py": "",
}
MODEL = {"name": "mine.two:make"}


@pytest.fixture
def project(stage, tmp_path_factory, monkeypatch):
    """A model of many files, one of them in a package that is installed in editable form."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "editable_one.py").write_text("WIDTH = 3\n")
    for name, text in FILES.items():
        file = stage.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (stage.folder / "tables").mkdir()
    command = [sys.executable, "-c", "import numpy; numpy.save('tables/t.npy', [1.0])"]
    subprocess.run(command, cwd=stage.folder, check=True)
    stage.write_params(COMPLETE)
    monkeypatch.chdir(stage.folder)
    monkeypatch.syspath_prepend(str(elsewhere))
    return stage.folder, elsewhere


COMPLETE = parse_params(small(model=MODEL)).model_dump(mode="json")
EVERY = {*FILES, "tables/t.npy", "editable_one"} - {"unused.py"}


def write_model(stage, source):
    """A model without a ``source`` of its own, and all of the params that it stands in."""
    model = {"name": stage.write_model(source)["name"]}
    return stage.write_params(parse_params(small(model=model)).model_dump(mode="json"))


def sources(stage):
    """What ``host`` says on stderr, and the files that it has found."""
    done = stage.well("host")
    return done.stderr, set(json.loads((stage.folder / "source.json").read_text())["files"])


def test_every_way_to_import_and_to_open_is_found_and_hashed(project, stage):
    folder, elsewhere = project
    done = stage.fresh("host", PYTHONPATH=str(elsewhere))
    assert done.returncode == 0, done.stderr
    before = json.loads((folder / "source.json").read_text())
    assert set(before["files"]) == EVERY
    assert set(before["packages"]) == {"torch", "numpy"}
    for name in EVERY:
        file = elsewhere / "editable_one.py" if name == "editable_one" else folder / name
        kept = file.read_bytes()
        file.write_bytes(kept + b" ")
        sources = find_sources(parse_params(COMPLETE).model, recalled(parse_params(COMPLETE).model))
        file.write_bytes(kept)
        assert sources.digest != before["sha256"], name
        assert [one for one in EVERY if sources.files[one] != before["files"][one]] == [name]
    (folder / "unused.py").write_text("1\n")
    assert stage.fresh("host", PYTHONPATH=str(elsewhere)).returncode == 0
    assert json.loads((folder / "source.json").read_text()) == before


def test_what_is_read_from_elsewhere_is_named_as_not_watched(stage, tmp_path_factory):
    table = tmp_path_factory.mktemp("far") / "table.txt"
    table.write_text("1")
    write_model(
        stage, f"import torch\ndef make():\n    open({str(table)!r}).read()\n    return torch.nn.Linear(128, 10)\n"
    )
    assert f"mine:make reads {table}, which nobody watches: an edit of it trains nothing" in sources(stage)[0]


def test_a_model_that_cannot_be_run_is_said_and_what_its_text_names_is_watched(stage):
    write_model(stage, "import other\ndef make():\n    raise ValueError('no')\n")
    (stage.folder / "other.py").write_text("")
    said, files = sources(stage)
    assert "mine:make could not be run to see what else it reads: model.name: mine:make raised ValueErr" in said
    assert files == {"mine.py", "other.py"}


def test_what_is_first_read_while_training_is_said_and_watched_from_then_on(stage, data_dir):
    params = write_model(
        stage,
        "import importlib, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Net.calls += 1\n"
        "        if Net.calls > 3:\n"
        "            importlib.import_module('la' + 'ter')\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    return Net(128, 10)\n",
    )
    (stage.folder / "later.py").write_text("")
    assert "later.py" not in sources(stage)[1]
    done = stage.train(data_dir(params), "single")
    assert "later.py: first read in this training; an edit of it trains again from now on" in done.stderr
    assert "later.py" in sources(stage)[1]


def test_source_adds_files_that_nothing_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/net.py").write_text("")
    (tmp_path / "mine/notes.txt").write_text("")
    model = parse_params(small(model={"name": "mine.net:make", "source": "mine"})).model
    assert set(find_sources(model).files) == {"mine/net.py", "mine/notes.txt"}
    assert find_sources(parse_params(small()).model) is None


def test_files_that_are_written_are_no_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watched = Watched()
    (tmp_path / "read.txt").write_text("1")
    with watched.opening():
        Path("made.txt").write_text("2")
        Path("read.txt").read_text()
    Path("made.txt").read_text()
    assert set(watched.files()) == {"read.txt"}


def test_the_version_of_a_package_is_that_of_the_distribution_that_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import ruamel.yaml, yaml, numpy, nowhere, jinja2, dvc_task\n")
    found = find_sources(parse_params(small(model={"name": "mine:make"})).model)
    assert found.packages == {name: version(name) for name in ("Jinja2", "PyYAML", "dvc-task", "numpy", "ruamel.yaml")}
