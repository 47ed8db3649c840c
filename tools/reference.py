"""Write docs/reference/params.md from the schema: ``python tools/reference.py``. A test compares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import TypeAdapter

from samebits.params import data, schema

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "params.md"
HEAD = """# params.yaml

Every key, what it accepts and its default, generated from `src/samebits/params/schema.py` by `python
tools/reference.py`. Anything else in the file is refused before anything runs, with exit code 2 and one line.
"""
UNIONS = {
    "data": (data.VectorsData, data.RegressionData, data.ImagesData, data.TokensData, data.FileData),
    "model": (schema.MLPModel, schema.ConvNetModel, schema.GPTModel, schema.UserModel),
}


def accepts(node: dict[str, Any]) -> str:
    """A JSON schema's condition in words."""
    if "anyOf" in node:
        return " or ".join(accepts(part) for part in node["anyOf"])
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    kind = node.get("type", "anything")
    if kind == "array":
        return f"list of {accepts(node['items'])}"
    words = {"integer": "integer", "number": "number", "boolean": "`true`, `false`", "string": "text", "null": "`null`"}
    bounds = [
        f"{sign} {node[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in node and node[key] < 2**62
    ]
    multiple = [f"multiple of {node['multipleOf']}"] if "multipleOf" in node else []
    return ", ".join([words.get(kind, "mapping"), *bounds, *multiple])


def row(section: type[schema.Section], name: str, prefix: str = "") -> str:
    """The row of one key."""
    field = section.model_fields[name]
    node = TypeAdapter(section).json_schema()["properties"][name]
    accepted = "`auto` or integer, ≥ 1" if name == "num_devices" else accepts(node)
    default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
    text = (field.description or "").replace("``", "`")
    return f"| `{prefix}{name}` | {accepted} | {default} | {text} |"


def rows(section: type[schema.Section], prefix: str) -> Iterator[str]:
    """The rows of a section's keys and of those in its sections."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, schema.Section):
            yield from rows(inner, f"{prefix}{name}.")
        else:
            yield row(section, name, prefix)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, field in schema.Params.model_fields.items():
        if name in UNIONS:
            for section in UNIONS[name]:
                key = "task" if name == "data" else "name"
                names = get_args(section.model_fields[key].annotation) or ("package.module:factory",)
                parts.append(table(f"`{name}` with `{key}: {' | '.join(names)}`", list(rows(section, f"{name}."))))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, schema.Section):
            parts.append(table(f"`{name}`", list(rows(field.annotation, f"{name}."))))
        else:
            parts.append(table(f"`{name}`", [row(schema.Params, name)]))
    return "\n".join(parts)


def table(title: str, body: list[str]) -> str:
    """A heading and its rows."""
    return "\n".join([f"## {title}", "", "| key | accepts | default | |", "| --- | --- | --- | --- |", *body, ""])


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
