"""What it costs to add one of each thing: toys are added to a copy of the tree as a person would, and then used.

The number of files that a person touches is what CONTRIBUTING.md promises. What is generated is not counted.
"""

import os
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from conftest import copy_sources

MOST = {"strategy": 3, "model": 3, "task": 2, "operation": 2, "stage": 4, "label": 2, "key": 1, "cause": 1}
"""Files to touch, with where a label is found; CHANGELOG.md and pages of the documentation come beside them."""


class Tree:
    """A copy of the sources, and the files of it that were touched."""

    def __init__(self, folder):
        self.folder, self.touched = folder, set()
        copy_sources(folder)

    def write(self, name, text):
        """Make a file that was not there."""
        assert not (self.folder / name).exists()
        (self.folder / name).write_text(text)
        self.touched.add(name)

    def change(self, name, before, after):
        """Put a text in the place of one that stands there once."""
        text = (self.folder / name).read_text()
        assert text.count(before) == 1, before
        (self.folder / name).write_text(text.replace(before, after))
        self.touched.add(name)

    def run(self, *command):
        """What Python prints that uses this tree; ``-c`` is a script's."""
        environ, full = {**os.environ, "PYTHONPATH": str(self.folder / "src")}, [sys.executable, "-P", *command]
        done = subprocess.run(full, cwd=self.folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def generate(self):
        """Run the generator, as CONTRIBUTING.md says."""
        self.run("tools/generate.py")


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


STRATEGY = '''"""``toy``: what ``single`` does, under another name."""

from dataclasses import replace

from samebits.strategies.single import SINGLE

TOY = replace(SINGLE, name="toy")
'''

MODULE = '''"""One linear layer."""

from torch import nn


class Toy(nn.Linear):
    """Inputs (batch, features) to logits (batch, classes)."""
'''

MODEL = '''"""``toy``: one linear layer."""

from typing import Literal

from samebits.models.interface import BuiltinModel, ModelSpec
from samebits.section import Section


class ToyKwargs(Section):
    """Arguments of ``toy``."""

    bias: bool = True
    """Whether there is one."""


class ToyModel(BuiltinModel):
    """One linear layer."""

    name: Literal["toy"]
    """Which model."""
    kwargs: ToyKwargs = ToyKwargs()
    """Arguments of the model."""


def _build(model, data):
    from samebits.models.modules.toy import Toy

    return Toy(*data.input_shape, *data.output_shape, **model.kwargs.model_dump())


TOY = ModelSpec(section=ToyModel, tasks=("toy",), needs="vectors", fits=lambda _: True, build=_build)
'''

TASK = '''"""``toy``: the sign of the first number."""

from typing import Literal

from samebits.section import Section
from samebits.tasks.interface import DataSection, TaskSpec


class ToyKwargs(Section):
    """Widths of the ``toy`` task."""

    features: int = 3
    """Width of an input."""


class ToyData(DataSection):
    """The sign of the first number."""

    task: Literal["toy"]
    """Which synthetic task."""
    kwargs: ToyKwargs = ToyKwargs()
    """Widths of the task."""


def _teacher(seed, kwargs):
    import numpy as np

    from samebits.tasks.teacher import Samples, Teacher, bell

    def draw(stream, count):
        inputs = (bell(stream, count, kwargs.features) / 128).astype(np.float32)
        targets = (inputs[:, 0] > 0).astype(np.int64)
        return Samples(inputs=inputs, targets=targets, floor=np.ones(count), teacher_loss=np.ones(count))

    return Teacher(draw=draw, num_classes=2)


TOY = TaskSpec(section=ToyData, teacher=_teacher)
'''

STAGE = '''"""Stage toy: count the runs."""

from pathlib import Path

from samebits.params import Params
from samebits.stages.interface import StageSpec, stage


@stage(StageSpec(about="count the runs", reads=("runs",), writes=("toy.txt",), params=("seed",)))
def main(params: Params) -> None:
    Path("toy.txt").write_text(str(len(list(Path("runs").iterdir()))))
'''

LABEL = '''class Toy(LabelOf):
    """A label that nobody needs."""

    MEANS: ClassVar[str] = "It was there."
    SAYS: ClassVar[str] = "{count} times"

    kind: Literal["toy"] = "toy"
    count: int


'''

TRAINS = """
from pathlib import Path
from samebits.data.prepare import prepare
from samebits.files import write_json
from samebits.host import host_facts
from samebits.params import parse_params
from samebits.records.provenance import git_state
from samebits.results.comparison import compare
from samebits.results.page.write import write_report
from samebits.workers.launch import evaluate_in_worker, run_training

params = parse_params({raw})
prepare(params, Path("data"))
write_json(Path("host.json"), host_facts().model_dump(mode="json"))
for strategy in params.train.strategies:
    out = Path(f"runs/{{strategy}}-fast")
    run_training(params, strategy, "fast", data_dir=Path("data"), out_dir=out, checkpoints=None)
    file = Path(f"reports/evaluation/{{strategy}}-fast.json")
    evaluate_in_worker(params, data_dir=Path("data"), run_dir=out, file=file)
write_report(compare(params, git_state()), Path("reports"))
print(Path("reports/comparison.md").read_text())
"""

OPERATION = '''

@exact(aten.fmax)
def fmax(x: Tensor, other: Tensor) -> Tensor:
    """The larger of two numbers, or the one that is a number."""
    return torch.where(other.isnan() | (x > other), x, other)
'''

COMPUTES = """
import torch
from samebits.errors import RefusedError
from samebits.numerics.exact.engine import Engine

x, y = torch.tensor([3.0, 5.0]), torch.tensor([4.0, 12.0])
try:
    with Engine():
        print(torch.fmax(x, y).tolist())
except RefusedError as error:
    print(error.why)
"""

EXPLAINS = """
from samebits.results.explanation.explain import ExplainedCause
from samebits.results.explanation.words import advice_of, cause_of

nothing = dict(rank=None, phase=None, evidence=(), change={}, gain=None)
found = ExplainedCause(cause="toy", lost_ms=5.0, share=0.5, remedy="free_cores", **nothing)
print(cause_of(found), advice_of(found), sep="\\n")
"""

SMALL = {
    "data": {"num_samples": 256, "test_samples": 64},
    "train": {"global_batch_size": 64, "numerics": ["fast"], "repeats": 2},
}


def small(data=None, **train):
    return {**SMALL, "data": {**SMALL["data"], **(data or {})}, "train": {**SMALL["train"], **train}}


def list_beside(tree, package, neighbour, name):
    """Import ``TOY`` behind a neighbour of the same kind, and list it as the last."""
    init = f"src/samebits/{package}/__init__.py"
    line = f"from samebits.{package}.{neighbour} import {name}\n"
    tree.change(init, line, f"{line}from samebits.{package}.toy import TOY\n")
    lines = (tree.folder / init).read_text().splitlines()
    (listed,) = [one for one in lines if one.startswith(f"{package.upper()}: dict")]
    tree.change(init, listed, listed.replace(")", ", TOY)", 1))


def test_a_strategy(tree):
    tree.write("src/samebits/strategies/toy.py", STRATEGY)
    list_beside(tree, "strategies", "single", "SINGLE")
    assert "| toy-fast |" in tree.run("-c", TRAINS.format(raw=small(strategies=["single", "toy"])))
    assert "[single|dp|ddp|toy]" in tree.run("pipeline/train.py", "--help")
    assert len(tree.touched) <= MOST["strategy"]


def test_a_task_and_a_model_of_it(tree):
    tree.write("src/samebits/tasks/toy.py", TASK)
    list_beside(tree, "tasks", "vectors", "VECTORS")
    assert len(tree.touched) <= MOST["task"]
    tree.touched.clear()
    tree.write("src/samebits/models/modules/toy.py", MODULE)
    tree.write("src/samebits/models/toy.py", MODEL)
    list_beside(tree, "models", "mlp", "MLP_SPEC")
    assert len(tree.touched) <= MOST["model"]
    tree.generate()
    page = (tree.folder / "docs/reference/params.md").read_text()
    assert "`data` with `task: toy`" in page
    assert "`model` with `name: toy`" in page
    raw = small({"task": "toy"}, strategies=["single"]) | {"model": {"name": "toy", "kwargs": {"bias": False}}}
    assert "| single-fast |" in tree.run("-c", TRAINS.format(raw=raw))


def test_a_stage_and_a_key(tree):
    tree.write("src/samebits/stages/toy.py", STAGE)
    tree.change("src/samebits/stages/pipeline.py", '"evaluate", "compare")', '"evaluate", "compare", "toy")')
    assert len(tree.touched) <= MOST["stage"]
    tree.touched.clear()
    line = "    epochs: Annotated[PositiveInt, _TRAINING] = 2\n"
    tree.change("src/samebits/params/schema.py", line, f'    toy: Annotated[int, _FAST] = 7\n    """A toy."""\n{line}')
    assert len(tree.touched) <= MOST["key"]
    tree.generate()
    stages = YAML(typ="safe").load(tree.folder / "dvc.yaml")["stages"]
    assert (stages["toy"]["outs"], stages["toy"]["params"]) == (["toy.txt"], ["seed"])
    assert {"src/samebits/stages/toy.py", "src/samebits/params"} <= {*stages["toy"]["deps"]}
    assert "train.toy" in stages["train"]["params"]
    assert "train.toy" not in stages["evaluate"]["params"]
    assert "/toy.txt\n" in (tree.folder / ".gitignore").read_text()
    assert "toy.txt" in (tree.folder / "Makefile").read_text()
    assert "`train.toy` | int" in (tree.folder / "docs/reference/params.md").read_text()
    assert "## samebits stage toy" in (tree.folder / "docs/reference/cli.md").read_text()
    assert "Stage toy: count the runs." in tree.run("pipeline/toy.py", "--help")


def test_a_label(tree):
    line = "class AnyOrder(LabelOf):\n"
    tree.change("src/samebits/remarks.py", line, LABEL + line)
    assert len(tree.touched) < MOST["label"]
    script = "from samebits.remarks import Toy\nfrom samebits.results.remarks import LABELS, in_words\n"
    printed = tree.run("-c", f"{script}print(in_words(Toy(count=3)), LABELS['toy'])")
    assert printed == "kind='toy' text='3 times' It was there.\n"


def test_a_cause(tree):
    file = "src/samebits/results/explanation/causes.py"
    cause = '    "toy": CauseSpec("A toy takes this time", without("free_cores")),\n'
    tree.change(file, "CAUSES = {\n", f"CAUSES = {{\n{cause}")
    tree.change(file, "_FINDERS: tuple[", '_TOY = _own_phase("toy", "host", "Python")\n_FINDERS: tuple[')
    tree.change(file, "    _communication,\n    _straggler,", "    _TOY,\n    _communication,\n    _straggler,")
    assert len(tree.touched) <= MOST["cause"]
    assert tree.run("-c", EXPLAINS).splitlines() == [
        "A toy takes this time: 5 ms, 50% of a step.",
        "Next: stop what else runs on this host, or train elsewhere.",
    ]


def test_an_exact_operation(tree):
    assert "fmax: it has no exact version" in tree.run("-c", COMPUTES)
    file = "src/samebits/numerics/exact/operations/pointwise.py"
    text = (tree.folder / file).read_text()
    tree.change(file, text[-200:], text[-200:] + OPERATION)
    assert len(tree.touched) <= MOST["operation"]
    assert tree.run("-c", COMPUTES) == "[4.0, 12.0]\n"
