"""Write golden files again, after a change that is meant to change bits.

python tests/golden/make.py [models] [data] [operations] [schemas] [self-test]   (by default all: a minute or two)
python tests/golden/make.py operations NAME ...            (these lines alone; some have other inputs on each host)
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path[:0] = [*(str(HERE.parent / name) for name in (".", "numerics", "records")), str(HERE.parents[1] / "tools")]

import schemas  # noqa: E402
import torch  # noqa: E402

import operations_probe  # noqa: E402 - found by the line above
from conftest import MODEL_OF_TASK, small  # noqa: E402
from exact_probe import MODELS, OTHERS, train  # noqa: E402
from samebits.data.prepare import prepare  # noqa: E402
from samebits.numerics.exact.self_test import digests  # noqa: E402
from samebits.numerics.exact.self_test.cases import CASES  # noqa: E402
from samebits.numerics.exact.self_test.numbers import digest  # noqa: E402
from samebits.params import parse_params  # noqa: E402


def models():
    """Hashes of trained weights by model and optimizer."""
    trained = [(model, optimizer) for model in MODELS for optimizer in ("sgd", "adamw")]
    trained += [("mlp", optimizer) for optimizer in OTHERS]
    return {f"{model} {optimizer}": train(model, optimizer)[0] for model, optimizer in trained}


def data():
    """Hashes of prepared data by task."""
    with TemporaryDirectory() as folder:
        return {task: prepare(parse_params(small(task)), Path(folder)).sha256 for task in MODEL_OF_TASK}


def operations(*only):
    """A line for each operation of PyTorch's test database: its name, and hashes of its inputs and results."""
    lines = (HERE / "operations.txt").read_text().splitlines() if only else []
    hashes = {name: rest for name, _, rest in (line.partition(" ") for line in lines)}
    found = operations_probe.golden(operations_probe.probe_in({}, *only))
    if unknown := [name for name in only if not any(f"{one}.".startswith(f"{name}.") for one in found)]:
        raise SystemExit(f"PyTorch's database has no {', '.join(unknown)}")
    hashes |= {name: " ".join(pair) for name, pair in found.items()}
    return "".join(f"{name} {rest}\n" for name, rest in sorted(hashes.items()))


def self_test():
    """The library's table of what each case of the self-test of ``exact`` gives on a CPU."""
    lines = [f'    "{name}": "{digest(case.run(torch.device("cpu")))}",\n' for name, case in CASES.items()]
    return f'"""{digests.__doc__}"""\n\nDIGESTS: dict[str, str] = {{\n{"".join(lines)}}}\n'


def as_json(hashes):
    return json.dumps(hashes, indent=2) + "\n"


FILES = {
    "models": ("exact.json", lambda: as_json(models())),
    "data": ("data.json", lambda: as_json(data())),
    "operations": ("operations.txt", operations),
    "schemas": ("schemas.txt", lambda: schemas.text_of(schemas.shapes())),
    "self-test": (digests.__file__, self_test),
}

if __name__ == "__main__":
    parts = [part for part in sys.argv[1:] if part in FILES]
    names = [name for name in sys.argv[1:] if name not in FILES]
    if names and parts != ["operations"]:
        raise SystemExit(f"{names[0]}: give {', '.join(FILES)}; only after operations may other names stand")
    for part in parts or FILES:
        file, text = FILES[part]
        (HERE / file).write_text(text(*names))
