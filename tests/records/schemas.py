"""The shape of every file that another version of samebits may read, each with the number that it is written with."""

import importlib
import itertools
import json

from pydantic import TypeAdapter

from conftest import ROOT
from count_imports import files_of
from samebits.files import Record
from samebits.records import log
from samebits.training import checkpoints

GOLDEN = ROOT / "tests/golden/schemas.txt"
_WORDS = ("description", "title", "default", "properties", "required", "$defs")
"""What says nothing of which files are read: texts, and the value of a key that a file leaves out."""


def shapes():
    """By the name of each kind of file: the number of its schema, and a line for each type that a key may hold.

    params.yaml is left out: its keys have a page of their own, and a run is read with those that it was made with.
    """
    for module in files_of(ROOT / "src/samebits"):
        importlib.import_module(module)
    found = {record.__name__: (record.SCHEMA, record.model_json_schema()) for record in _below(Record)}
    found["Event"] = log.SCHEMA, TypeAdapter(log.Event).json_schema()
    found["CheckpointRecord"] = checkpoints._FORMAT, checkpoints.CheckpointRecord.model_json_schema()
    return {name: (number, _lines(name, schema)) for name, (number, schema) in sorted(found.items())}


def text_of(shapes):
    """As the golden file has them."""
    return "".join("\n  ".join([f"{name} {number}", *lines]) + "\n" for name, (number, lines) in shapes.items())


def read(text):
    """What ``text_of`` wrote."""
    found, lines = {}, []
    for line in text.splitlines():
        if line.startswith("  "):
            lines.append(line.strip())
        else:
            lines, (name, number) = [], line.split()
            found[name] = (int(number), lines)
    return found


def faults(before, now):
    """What a reader of older files, or an older reader, would stumble over, though the number is the same."""
    for name, (number, lines) in before.items():
        if name not in now or now[name][0] != number:
            continue
        known = {line.partition(":")[0] for line in lines}
        parts = {key.partition(".")[0] for key in known}
        gone = [line for line in lines if line not in now[name][1]]
        new = [
            line
            for line in now[name][1]
            if (key := line.partition(":")[0]) not in known and key.partition(".")[0] in parts
        ]
        yield from (f"{name}: {line}: {what}" for what, those in (("gone", gone), ("new", new)) for line in those)


def _below(record):
    return [each for one in record.__subclasses__() for each in (one, *_below(one))]


def _lines(name, schema):
    """A line for each type that a key of the file, or of a part of it, may hold; with ``?`` it may be left out."""
    parts, todo, lines = schema.get("$defs", {}), {name: schema}, []
    seen = {*todo, "Params"}
    while todo:
        part, described = todo.popitem()
        required = described.get("required", ())
        for key, value in described.get("properties", {"": described}).items():
            for kind in _kinds(value):
                lines.append(f"{part}.{key}{'' if key in required else '?'}: {kind}")
        used = {ref.rpartition("/")[2] for ref in _references(described)} - seen
        todo |= {ref: parts[ref] for ref in used}
        seen |= used
    return sorted({*lines})


def _references(value):
    if isinstance(value, list):
        return [ref for each in value for ref in _references(each)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if "$ref" in value else []
    return own + [ref for key, each in value.items() if key != "$defs" for ref in _references(each)]


def _kinds(value):
    if ref := value.get("$ref"):
        return [ref.rpartition("/")[2]]
    if several := value.get("anyOf") or value.get("oneOf"):
        return [kind for each in several for kind in _kinds(each)]
    if "enum" in value:
        return [json.dumps(each) for each in value["enum"]]
    if "const" in value:
        return [json.dumps(value["const"])]
    if value.get("type") == "array":
        inner = [_kinds(each) for each in value.get("prefixItems", [value.get("items", {})])]
        return [f"[{', '.join(kinds)}]" for kinds in itertools.product(*inner)]
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), dict):
        return [f"{{{kind}}}" for kind in _kinds(value["additionalProperties"])]
    return [json.dumps({key: each for key, each in value.items() if key not in _WORDS}, sort_keys=True)]
