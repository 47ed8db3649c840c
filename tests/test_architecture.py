"""The shape of the library: imports in one direction, who may name what, and DVC's view of what depends on what."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path, PurePath

import pytest
from ruamel.yaml import YAML

import generate
from conftest import ROOT
from count_imports import count, files_of, imports, room

SRC = ROOT / "src" / "samebits"
FILES = files_of(SRC)
MODULES = list(FILES.values())

SHAPE = (ROOT / "CONTRIBUTING.md").read_text().partition("## The shape")[2]
ROWS = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", SHAPE, flags=re.MULTILINE)
MAY_IMPORT = {room: set(re.findall(r"`(\w+)`", rooms)) for room, rooms in [*ROWS, ("__init__", "`models` `stages`")]}
"""Which rooms each may import, by the table in CONTRIBUTING.md; users import from ``models`` and ``stages``."""
ANYBODY = set(re.findall(r"`(\w+)`", re.search(r"may import([^.]*)", SHAPE)[1]))
"""Rooms that every other one may import beside those, by the sentence above the table."""


def test_every_room_stands_in_the_table():
    assert {room(name) for name in FILES} == set(MAY_IMPORT)
    assert {name for name, _ in ROWS[-len(ANYBODY) :]} == ANYBODY
    assert f"any room but the last {len(ANYBODY)} may import" in SHAPE
    packages = {name for name in MAY_IMPORT if (SRC / name).is_dir()}
    assert (len(packages) <= 18, len(set(MAY_IMPORT) - packages) <= 8) == (True, True)


@pytest.mark.parametrize("module", FILES)
def test_imports_keep_to_the_table(module):
    here = room(module)
    allowed = {here, "__init__"} | MAY_IMPORT[here] | (set() if here in {*ANYBODY, "__init__"} else ANYBODY)
    assert sorted(name for name in imports(FILES[module], FILES, for_types=True) if room(name) not in allowed) == []


HIDES = r"import_module\(|__import__|[\"\']-m[\"\'], [\"\']samebits|[\"\'].*\b(from|import) samebits\b.*[\"\']"


def test_no_import_hides():
    """Not behind ``import_module``, nor in text that is run: but for what starts a process of its own."""
    hidden = {file.relative_to(SRC).as_posix() for file in MODULES
              if re.search(HIDES, file.read_text())}  # fmt: skip
    assert hidden == {
        "doctor/containers.py",  # the doctor inside a container
        "training/models/build.py",  # the user's own factory
        "__init__.py",  # what users import
        "here.py",  # a stage, or the doctor, in a process of its own or on another machine
        "stages/pipeline.py",  # the one stage that is asked for
        "tracking/sender.py",  # the sender's process
        "doctor/software.py",  # the compiler of kernels, which imports torch
        "doctor/store.py",  # MLflow's client in a process of its own
        "tracking/download.py",  # the same
    }


def test_imports_have_no_cycles():
    graph = {name: imports(file, FILES, for_types=False) for name, file in FILES.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(FILES)


def test_what_the_tool_counts(tmp_path):
    sources = {
        "__init__": "",
        "errors": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.records.card\n",
        "records/__init__": "",
        "records/card": "from house import errors\nfrom house.errors import one, other\n",
        "data/__init__": "import house.results.page\n",
        "results/__init__": "",
        "results/page": "def show():\n    from house.data import x\n    import house.records.card\n",
    }
    for name, source in sources.items():
        file = tmp_path / f"house/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    assert count(tmp_path / "house").splitlines() == [
        "modules: 7",
        "lines: 9",
        "packages: 3, 3 with those inside",
        "rooms: 5",
        "arrows: 4, 5 with imports for types",
        "imports between rooms: 4, 5 with imports for types",
        "floors: 3",
        "rooms that reach each other: data, results",
        "  3: data + results",
        "  2: records",
        "  1: __init__, errors",
    ]


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"\bpynvml\b", {"host"}),
        (r"\b(DataParallel|DistributedDataParallel)\b\(", {"strategies"}),
        (r"import .*\b(DataParallel|DistributedDataParallel)\b", {"strategies"}),
        (r"import .*\bmlflow\b|from mlflow", {"tracking"}),
        (r"use_deterministic_algorithms|fp32_precision|autocast\(", {"numerics"}),
        (r"import docker|from docker", {"engines"}),
        (r"import dvc|from dvc", set()),
        (r"\(TorchDispatchMode\)", {"numerics/dispatch.py"}),
        (r"strategy == \"ddp\"", set()),  # others may have ranks too: Placement.has_ranks
    ],
)
def test_who_may_name_what(pattern, home):
    naming = {file.relative_to(SRC).as_posix() for file in MODULES if re.search(pattern, file.read_text())}
    assert {name if name in home else name.split("/")[0] for name in naming} == home


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Modules whose files run code when they are read."""


SAFE_LOADS = {
    "np.load", "numpy.load",  # see below
    "YAML(typ='safe', pure=True).load", "setup.load", "self._checkpoints.load", "client.images.load",
}  # fmt: skip
"""Calls of something named so that read no pickle: YAML, safetensors, an image for the engine."""


def reads_pickles(tree: ast.AST) -> list[str]:
    """Calls and imports that may read a pickle, or run text as code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.partition(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
        call, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        if call in ("eval", "exec", "np.fromfile") or call.endswith(("read_pickle", "load_checkpoint", "load_model")):
            found.append(call)
        if call == "load" or (call.endswith(".load") and call not in SAFE_LOADS):
            found.append(call)
        if call in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False":
            found.append(call)
        if call.split(".")[-1] == "YAML" and keywords.get("typ") not in (None, "'safe'"):
            found.append(call)
    return found


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_no_module_reads_pickles_or_runs_text(file):
    assert reads_pickles(ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from joblib import load", "torch.load(path, weights_only=True)", "np.load(path)", "exec(text)",
     "from torch import load\nload(path)", "torch.jit.load(path)", "mlflow.pytorch.load_model(uri)",
     "np.load(path, allow_pickle=True)", "YAML(typ='unsafe')"],
)  # fmt: skip
def test_what_counts_as_reading_a_pickle(code):
    assert reads_pickles(ast.parse(code))


def test_no_module_is_too_long_to_read():
    assert {file.name: lines for file in MODULES if (lines := len(file.read_text().splitlines())) > 350} == {}


def imported_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "mlflow", "dvc", "docker"}


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("import samebits.results.page, samebits.results.verify", HEAVY),
        ("import samebits.tracking.sender, samebits.tracking.reproduce", HEAVY),
        ("import samebits.cli.commands", HEAVY),
        ("import samebits.doctor.checks", HEAVY),
        ("import samebits.data.prepare, samebits.stages.interface, samebits.records.log", HEAVY),
        # the one stage of an unchanged repository
        ("import samebits.stages.host", HEAVY),
        ("import samebits.workers.launch", {"mlflow", "dvc", "docker", "samebits.tracking"}),
        (
            "from samebits.numerics.dispatch import EagerDispatchMode\n"
            "import torch\n"
            "class Mode(EagerDispatchMode):\n"
            "    __torch_dispatch__ = lambda self, func, types, args=(), kwargs=None: func(*args, **kwargs or {})\n"
            "with Mode():\n"
            "    torch.ones(2)",
            {"torch._dynamo"},
        ),
    ],
)
def test_what_an_import_does_not_bring(statement, without):
    assert imported_after(statement) & without == set()


def test_importing_the_trainer_changes_nothing():
    code = (
        "import torch, os, random, torch._dynamo, torch.distributed.launcher.api\n"
        "def state():\n"
        "    return (torch.get_num_threads(), torch.initial_seed(), torch.are_deterministic_algorithms_enabled(),\n"
        "            torch.get_default_dtype(), dict(os.environ), random.getstate(), torch.cuda.is_initialized())\n"
        "before = state()\n"
        "import samebits.workers.launch\n"
        "assert [a for a, b in zip(state(), before) if a != b] == []\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what DVC is told ------------------------------------------------------------------------------------------

DVC = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())
STAGES = DVC["stages"]


def rooms_of(files: set[Path]) -> set[str]:
    return {file.relative_to(SRC).with_suffix("").parts[0] for file in files if file.is_relative_to(SRC)}


def declared(stage: str) -> set[str]:
    """The rooms whose code DVC follows, beside the stage's own module."""
    paths = [Path(path).relative_to("src/samebits") for path in STAGES[stage]["deps"] if path.startswith("src/")]
    assert [path for path in paths if len(path.parts) > 1] == [Path(f"stages/{stage}.py")]
    return {path.stem for path in paths if len(path.parts) == 1}


@pytest.mark.parametrize("path", generate.FILES)
def test_what_is_generated_is_not_stale(path):
    assert (ROOT / path).read_text() == generate.FILES[path](), "run `python tools/generate.py`"


def test_only_compare_depends_on_words():
    assert {stage for stage in STAGES if stage != "host" and declared(stage) & generate.WORDS} == {"compare"}


def test_no_script_shadows_a_standard_module():
    """The folder of a script comes first on the path of what it imports."""
    assert {file.stem for file in (ROOT / "pipeline").glob("*.py")} & sys.stdlib_module_names == set()


@pytest.mark.parametrize(("name", "plot"), [pair for plot in DVC["plots"] for pair in plot.items()])
def test_dvc_draws_what_stages_write_with_few_lines(name, plot):
    written = [template for stage in STAGES.values() for template in (*stage["outs"], *stage.get("metrics", ()))]
    outs = [Path(one.replace("${item.strategy}", "*").replace("${item.numerics}", "*")) for one in written]
    assert len(plot["y"]) <= 4, name
    for file in map(PurePath, plot["y"]):
        assert any(file.match(str(out)) or file.is_relative_to(out) for out in outs), file


def test_the_closure_is_what_python_really_imports(tmp_path):
    """The static closure against ``sys.modules`` of the process that forks the workers."""
    modules = imported_after(
        f"import runpy, contextlib\nsys.argv = ['train', '--help']\n"
        f"with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):\n"
        f"    runpy.run_path({str(ROOT / 'pipeline/train.py')!r}, run_name='__main__')\n"
        f"import samebits.workers.launch"
    )
    real = rooms_of({FILES[name] for name in modules if name in FILES})
    assert real - generate.AROUND_A_STAGE == declared("train")


@pytest.mark.parametrize("stage", ["prepare", "train", "evaluate"])
def test_wording_report_tracking_doctor_and_containers_retrain_nothing(stage):
    assert declared(stage) & {*generate.AROUND_A_STAGE, "cli", "doctor"} == set()


def test_a_checkpoint_depends_on_the_same_code_as_a_result():
    """Else one would go on from a stop of other code."""
    from samebits.training.checkpoints import _CODE

    without = {"files", "hashes", "host", "measuring", "records", "workers"}
    assert {name.removesuffix(".py") for name in _CODE} == declared("train") - without


CHILDREN = re.compile(r"""(?:\[(?:sys\.executable|"?python"?), |cmd: python )(?!"?-P|\*)""")


STARTING = [*sorted((ROOT / "src").rglob("*.py")), ROOT / "dvc.yaml", ROOT / "gpu/dvc.yaml"]


@pytest.mark.parametrize("file", STARTING, ids=lambda file: str(file.relative_to(ROOT)))
def test_python_is_started_without_the_folder_it_is_started_in(file):
    """Else a file of the user's that has a library's name is run in its place, as ``queue.py``."""
    assert not CHILDREN.findall(file.read_text()), "-P comes first"
