"""Wrong files of parameters: wrong values, wrong YAML, or no file at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from faults.inputs_values import NUMBERS, SMALL, TEXTS, changed, damaged, not_a_file, places, value
from samebits.models import MODELS
from samebits.params import parse_params
from samebits.tasks import TASKS

if TYPE_CHECKING:
    import random

    from faults.inputs_bench import Bench

SMALL_RUN: dict[str, Any] = parse_params(
    {
        "data": {"num_samples": 256, "test_samples": 64, "kwargs": {"features": 16}},
        "model": {"kwargs": {"hidden": [16]}},
        "train": {
            "strategies": ["single", "dp"],  # dp has labels and reasons in the results
            "numerics": ["fast"],
            "num_devices": 1,
            "global_batch_size": 64,
            "epochs": 1,
            "repeats": 1,
            "timeout_s": 10,
        },
    }
).model_dump(mode="json")
"""Parameters of a training of four steps, with every key."""

_TASKS = (*TASKS, "file")
_MODELS = (*MODELS, "os:system", "no.such:factory", "subprocess:call")
_SOURCES = ("model.py", "model.py", "/", "..", ".")
_LONG = {
    "epochs",
    "num_samples",
    "test_samples",
    "layers",
    "blocks",
    "repeats",
    "width",
    "heads",
    "timeout_s",
    "hidden",
}
"""Keys of the amount of work: a large number is valid, and takes long."""

_LAUGHS = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
_TYPED = (
    "*nobody", "!!int abc", "!!float 'nan'", "!!timestamp 2001-99-99", "2001-12-14t21:59:43.10-05:00", "2001-01-01",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "!!binary x", "!!binary 'AAAA'", "!!set {a, b}",
    "!!omap [a: 1]", "!!pairs [a: 1]", "!!omap 3", "!!set 3", "!!python/object/apply:os.system [touch canary]",
    "!!python/name:os.system", "!unknown 3", "!<tag:yaml.org,2002:int> 1_000",
)  # fmt: skip
_SCALARS = (
    "0o17", "017", "0b1", "0xffffffffffffffffffffffff", "1_0", "1:30:00", ".nan", "-.INF", "+.inf", "~", "yes", "1.",
    ".", "._", "_", "0x", "0o", "-", "9" * 5000, "9" * 4300, "0x" + "f" * 5000, "0b" + "1" * 20000, "1" + "_" * 5000,
    "1e" + "9" * 400,
)  # fmt: skip
_YAML = (
    _LAUGHS,
    _LAUGHS + "seed: *a9\n",
    _LAUGHS + "model: {name: a.b:c, source: x.py, kwargs: {x: *a9}}\n",
    _LAUGHS + "*a9 : 1\n",
    "seed: &s [*s]\n",
    "seed: &s {a: *s}\n",
    "train: &t\n  optimizer: *t\n",
    "model: &m {name: a.b:c, source: x.py, kwargs: *m}\n",
    "? [seed, data]\n: 1\n",
    "? {a: b}\n: 1\n",
    "? seed\n",
    "&a seed: 1\n*a : 2\n",
    "<<: {seed: 1}\nseed: 2\n",
    "<<: [{seed: 1}, {seed: x}]\n",
    "<<: 3\n",
    "<<: &x {<<: *x}\n",
    *(f"seed: {value}\n" for value in _TYPED),
    "!!python/object/new:type {}\n",
    *(f"seed: {value}\n" for value in _SCALARS),
    "seed: 1\nseed: 2\n",
    "train: {epochs: 1, epochs: 2}\n",
    "---\nseed: 1\n---\nseed: 2\n",
    "...\n",
    "--- !!map\n",
    "---\n---\n",
    "%YAML 1.1\n---\nseed: 017\n",
    "%YAML 9.9\n---\nseed: 1\n",
    "%YAML x\n---\n",
    "%TAG ! tag:x,2000:\n---\nseed: !y 1\n",
    "%FOO\n",
    "\tseed: 1\n",
    "train:\n\tepochs: 1\n",
    "seed: '1\n",
    'seed: "\\x00\\e[31m"\n',
    '"\\e[31mseed": 1\n',
    '"seed\\nerror: x": 1\n',
    'seed: "\\ud800"\n',
    '"\\ud800": 1\n',
    'seed: "\\UFFFFFFFF"\n',
    'seed: "\\U00110000"\n',
    'seed: "\\q"\n',
    "seed: |\n  1\n 2\n",
    "seed: >9999999999\n  1\n",
    "seed: |0\n  1\n",
    "- seed\n",
    "seed\n",
    "'seed': 1: 2\n",
    "{seed: 1\n",
    "seed: 1}\n",
    "seed: [1, , 2]\n",
    "@seed: 1\n",
    "`: 1\n",
    "null: 1\n",
    "1.5: 1\n",
    "[]: 1\n",
    "true: 1\n",
    "2001-01-01: 1\n",
    "=: 1\n",
    "seed: =\n",
    "#" * 100_000 + "\n",
    "k: " * 1000 + "1\n",
    "- " * 3000 + "1\n",
    "? " * 3000 + "1\n",
    "[" * 3000 + "\n",
    "{a: " * 3000 + "\n",
    "".join(f"{' ' * i}a:\n" for i in range(1000)),
    "".join(f"key{i}: {i}\n" for i in range(3000)),
    "seed: " + "x" * 100_000 + "\n",
    "x" * 100_000 + ": 1\n",
    "\x85seed: 1\n",
    "\u2028seed: 1\n",
    "\ufeffseed: 1\n",
    "seed: 1\ufeff\n",
    "seed: \ufffe\n",
)


def spoil_params(rng: random.Random, bench: Bench, *, runs: bool) -> str:
    """Write a wrong ``params.yaml`` and describe it. If it ``runs`` and is valid by chance, it asks for little work."""
    path = bench.folder / "params.yaml"
    choice = rng.random()
    if choice < 0.05:
        return not_a_file(rng, path, bench.outside)
    if choice < 0.35:
        text = rng.choice(_YAML)
        if rng.random() < 0.3:
            text = path.read_text(encoding="utf-8") + text
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return f"YAML {text[-80:]!r}"
    if choice < 0.5:
        data = damaged(rng, path.read_bytes())
        path.write_bytes(data if len(data) < 10_000 else data[:10_000])
        return f"bytes {data[:60]!r}"
    tree, numbers = _variant(rng, bench), SMALL if runs else NUMBERS
    place = rng.choice([place for place in places(tree) if place] or [()])
    limited = not runs or not _LONG & {str(key) for key in place}
    new = value(rng, bench.outside, numbers) if limited else rng.choice((0, -1, 1.5, None, "1", 10**400, [], True))
    tree = changed(rng, tree, place, new)
    path.write_bytes(yaml_of(tree))
    return f"{'.'.join(map(str, place))} = {str(new)[:60]!r}"


def _variant(rng: random.Random, bench: Bench) -> dict[str, Any]:
    """Parameters with another task or model, which may not fit each other."""
    tree: dict[str, Any] = json.loads(json.dumps(SMALL_RUN))
    if rng.random() < 0.4:
        task = rng.choice(_TASKS)
        arrays = {"inputs": "x.npy", "targets": rng.choice(("y.npy", *TEXTS[:8]))}
        tree["data"] |= {"task": task, "kwargs": arrays if task == "file" else {}}
    if rng.random() < 0.4:
        name = rng.choice(_MODELS)
        source = rng.choice(_SOURCES) if ":" in name else None
        kwargs = {"args": ["touch", str(bench.canary)]} if name == "subprocess:call" else {}
        tree["model"] = {"name": name, "kwargs": kwargs, "source": source}
    return tree


def yaml_of(tree: Any) -> bytes:
    """A tree as YAML in flow style: JSON, except for numbers that are not finite."""
    text = json.dumps(tree)
    for name, yaml in (("-Infinity", "-.inf"), ("Infinity", ".inf"), ("NaN", ".nan")):
        text = text.replace(f": {name}", f": {yaml}").replace(f"[{name}", f"[{yaml}")
    return text.encode("utf-8", "surrogatepass")
