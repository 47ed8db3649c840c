"""The shape of the library: imports in one direction, who may name what, and DVC's view of what depends on what."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "samebits"
MODULES = sorted(SRC.rglob("*.py"))

# From the top down; a module imports from its own group or from a lower one.
GROUPS = [
    {"cli"},
    {"verify", "reproduce", "launch", "rendezvous", "tracking", "provenance", "report", "doctor", "container"},
    {
        "worker",
        "rank",
        "keeper",
        "resume",
        "stopping",
        "trainer",
        "measurement",
        "rounding",
        "compare",
        "verdict",
        "records",
        "progress",
        "runlog",
        "summary",
    },
    {"evaluation", "checkpoint", "strategies", "diagnosis", "timing", "memory"},
    {"data", "models", "metrics", "placement"},
    {"numerics", "params", "host"},
    {"errors", "files", "commands", "__init__"},
]


def name_of(file: Path) -> str:
    """``samebits.data.card`` for ``src/samebits/data/card.py``; a package for its ``__init__.py``."""
    parts = file.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in MODULES}


def imports(file: Path, *, for_types: bool) -> set[str]:
    """Modules of the package that a file imports anywhere; with ``for_types`` also under TYPE_CHECKING."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in FILES)
        if isinstance(node, ast.ImportFrom) and node.module in FILES:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names & set(FILES))
            if not names <= set(FILES):
                found.add(str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text()))
    return found


def group(module: str) -> int:
    room = module.split(".")[1] if "." in module else "__init__"
    return next(number for number, rooms in enumerate(GROUPS) if room in rooms)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module):
    upwards = [name for name in imports(FILES[module], for_types=True) if group(name) < group(module)]
    assert upwards == []


def test_imports_have_no_cycles():
    graph = {name: imports(file, for_types=False) for name, file in FILES.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(FILES)


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"\bpynvml\b", {"host.py"}),
        (r"\b(DataParallel|DistributedDataParallel)\b\(", {"strategies.py"}),
        (r"import .*\b(DataParallel|DistributedDataParallel)\b", {"strategies.py"}),
        (r"import .*\bmlflow\b|from mlflow", {"tracking"}),
        (r"use_deterministic_algorithms|fp32_precision|autocast\(", {"numerics"}),
        (r"import docker|from docker", {"container"}),
        (r"import dvc|from dvc", set()),
    ],
)
def test_who_may_name_what(pattern, home):
    assert {file.relative_to(SRC).parts[0] for file in MODULES if re.search(pattern, file.read_text())} == home


def test_no_module_is_too_long_to_read():
    assert {file.name: lines for file in MODULES if (lines := len(file.read_text().splitlines())) > 350} == {}


def imported_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        (
            "import samebits.compare, samebits.report.table, samebits.params, samebits.tracking.comparison",
            {"torch", "mlflow", "dvc", "docker"},
        ),
        ("import samebits.cli", {"torch", "mlflow", "dvc", "docker"}),
        ("import samebits.doctor.visit", {"torch", "mlflow", "dvc", "docker"}),
        ("import samebits.data.prepare, samebits.host, samebits.runlog", {"torch", "mlflow", "dvc", "docker"}),
        ("import samebits.launch, samebits.evaluation", {"mlflow", "dvc", "docker", "samebits.tracking"}),
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
        "import samebits.launch, samebits.evaluation\n"
        "assert [a for a, b in zip(state(), before) if a != b] == []\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what DVC is told ------------------------------------------------------------------------------------------

STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]


def closure(script: Path) -> set[Path]:
    """The script and every module of the package that it imports, directly or not, with their packages."""
    todo, seen = [script], {script}
    while todo:
        for module in imports(todo.pop(), for_types=False):
            for name in (module.rsplit(".", depth)[0] for depth in range(module.count(".") + 1)):
                file = FILES[name]
                if file not in seen:
                    seen.add(file)
                    todo.append(file)
    return seen


def declared(stage: str) -> set[Path]:
    files: set[Path] = set()
    for dependency in STAGES[stage]["deps"]:
        path = ROOT / dependency
        if path.is_dir() and path.is_relative_to(SRC):
            files |= set(path.rglob("*.py"))
        elif path.suffix == ".py":
            files.add(path)
    return files


@pytest.mark.parametrize("stage", ["prepare", "train", "evaluate"])
def test_a_stage_depends_on_every_module_that_can_change_its_result(stage):
    assert declared(stage) == closure(ROOT / "pipeline" / f"{stage}.py")


def test_the_closure_is_what_python_really_imports(tmp_path):
    """The static closure against ``sys.modules`` of the process that forks the workers."""
    modules = imported_after(
        f"import runpy, contextlib\nsys.argv = ['train', '--help']\n"
        f"with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):\n"
        f"    runpy.run_path({str(ROOT / 'pipeline/train.py')!r}, run_name='__main__')\n"
        f"import samebits.launch"
    )
    real = {FILES[name] for name in modules if name in FILES} | {ROOT / "pipeline/train.py"}
    assert real == closure(ROOT / "pipeline/train.py")


def test_tracking_and_reports_retrain_nothing():
    behind_the_boundary = {
        SRC / f"{name}.py" for name in ("provenance", "compare", "verdict", "records", "cli", "verify", "reproduce")
    }
    behind_the_boundary |= {
        file for room in ("tracking", "report", "doctor", "container") for file in (SRC / room).glob("*.py")
    }
    for stage in ("prepare", "train", "evaluate"):
        assert declared(stage) & behind_the_boundary == set()


def test_train_depends_on_every_key_that_reaches_a_worker():
    from samebits.params.schema import Params, Train

    keys = {name for name in Params.model_fields if name not in ("train", "tracking")}
    keys |= {
        f"train.{name}"
        for name in Train.model_fields
        if name not in ("strategies", "numerics", "checkpoint_every_steps")
    }
    assert set(STAGES["train"]["params"]) == keys
