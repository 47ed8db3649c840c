"""Reading params.yaml, and saying in one line what is wrong with it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from samebits.errors import UserError
from samebits.params.schema import UNIONS, GPTModel, NumericsName, Params
from samebits.params.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterator


def load_params(path: Path | str) -> Params:
    """Read and check a params file.

    Raises:
        UserError: the file cannot be read, or a key is unknown, repeated, of the wrong type, out of range or
            in contradiction with another; the message gives the key's full path.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as stream:
            raw = YAML(typ="safe").load(stream)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint="name one with --params, or run in the repository") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}", hint="check the file") from None
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        problem = str(error.problem).splitlines()[0]
        raise UserError(f"{path}:{line}: {problem}, each key is accepted once", hint="remove one of them") from None
    except YAMLError as error:
        first, *rest = str(error).split("\n")
        where = next((text.strip() for text in rest if "line " in text), "")
        raise UserError(
            f"{path}: not valid YAML: {first} {where}".rstrip(), hint="check indentation and quotes"
        ) from None
    return parse_params({} if raw is None else raw, origin=str(path))


def parse_params(raw: object, *, origin: str = "params") -> Params:
    """Check a mapping as read from YAML; ``origin`` stands before the key in messages."""
    try:
        params = Params.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, origin) from None
    for key, got, accepts, hint in _contradictions(params):
        raise UserError(f"{origin}: {key}: got {got}, accepts {accepts}", hint=hint)
    return params


def with_num_devices(params: Params, value: str | None, numerics: NumericsName) -> Params:
    """``params`` with ``train.num_devices`` replaced by a command line's value, checked for one of the numerics."""
    if value is None:
        return params
    raw = params.model_dump(mode="json")
    raw["train"]["num_devices"] = int(value) if value.isdecimal() else value
    raw["train"]["numerics"] = [numerics]
    found = parse_params(raw, origin="--num-devices")
    train = found.train.model_copy(update={"numerics": params.train.numerics})
    return found.model_copy(update={"train": train})


def require_every_key(params: Params, origin: str) -> None:
    """Refuse a file that leaves keys to their defaults: DVC can only follow what is written.

    Raises:
        UserError: names the first such key; the hint gives its default.
    """
    for prefix, section in (("", params), ("train.", params.train), ("exact.", params.exact)):
        for name in type(section).model_fields:
            if name not in section.model_fields_set:
                value = section.model_dump(mode="json")[name]
                hint = f"add `{name}: {json.dumps(value)}`, which is the default"
                raise UserError(f"{origin}: {prefix}{name}: missing, and DVC follows every key", hint=hint)


_BATCH_HINT = "change train.global_batch_size or train.num_devices"


Contradiction = tuple[str, object, str, str]
"""A key, what it is, what it accepts, and a hint."""


def _contradictions(params: Params) -> Iterator[Contradiction]:
    """Settings that are each right and cannot be together."""
    data, model, train = params.data, params.model, params.train
    batch, accum = train.global_batch_size, train.grad_accum_steps
    if batch % accum:
        yield "train.grad_accum_steps", accum, f"a divisor of train.global_batch_size = {batch}", _BATCH_HINT
    if batch > data.num_samples:
        accepts = f"at most data.num_samples = {data.num_samples}"
        yield "train.global_batch_size", batch, accepts, "lower the batch or raise data.num_samples"
    if "exact" in train.numerics:
        yield from _exact_contradictions(params)
    splits = train.num_devices != "auto" and "ddp" in train.strategies and "fast" in train.numerics
    if splits and (batch // accum) % int(train.num_devices):
        accepts = f"a divisor of the {batch // accum} samples that ddp shares out"
        yield "train.num_devices", train.num_devices, accepts, _BATCH_HINT
    if train.schedule.warmup_steps >= max(params.total_steps, 1):
        accepts = f"fewer than the {params.total_steps} steps of the training"
        yield "train.schedule.warmup_steps", train.schedule.warmup_steps, accepts, "lower it, or train longer"
    tasks = {
        "mlp": "vectors regression images",
        "wide_mlp": "vectors regression images",
        "convnet": "images",
        "gpt": "tokens",
    }
    if data.task != "file" and data.task not in tasks.get(model.name, data.task):
        fitting = ", ".join(name for name, fits in tasks.items() if data.task in fits)
        accepts = f"{fitting} or your own factory for data.task {data.task}"
        yield "model.name", repr(model.name), accepts, f"set model.name to {fitting.split(', ')[0]}"
    if isinstance(model, GPTModel) and model.kwargs.width % model.kwargs.heads:
        accepts = f"a divisor of model.kwargs.width = {model.kwargs.width}"
        yield "model.kwargs.heads", model.kwargs.heads, accepts, "change one of them"


def _exact_contradictions(params: Params) -> Iterator[Contradiction]:
    batch, devices, shards = params.train.global_batch_size, params.train.num_devices, params.exact.shards
    if batch % shards:
        accepts = f"a divisor of train.global_batch_size = {batch}"
        near = max(n for n in range(1, shards + 1) if batch % n == 0)
        yield "exact.shards", shards, accepts, f"set it to {near}, or train.numerics to [fast]"
    if devices != "auto" and devices > shards:
        accepts = f"at most exact.shards = {shards}, because a device takes whole shards"
        yield "train.num_devices", devices, accepts, "raise exact.shards, or train with numerics [fast]"


_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "tuple_type": "a list",
    "none_required": "null, for a built-in model",
    "missing": "a value (the key is missing)",
    "string_pattern_mismatch": "package.module:factory",
    "string_too_short": "a text that is not empty",
    "too_short": "a list with at least one item",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number from {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number up to {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
}
_TAGGED = {
    "model.name": "mlp, wide_mlp, convnet, gpt or package.module:factory",
    "data.task": "vectors, regression, images, tokens or file",
}


def _explain(error: ValidationError, origin: str) -> UserError:
    """Put pydantic's first finding into one line: the key's path, what it got, what it accepts."""
    findings = error.errors(include_url=False)
    first = findings[0]
    loc = [str(part) for part in first["loc"]]
    if len(loc) > 1 and loc[1] in UNIONS.get(loc[0], ()):
        del loc[1]  # the member of the union that pydantic chose is not a key of the file
    key = ".".join(loc)
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    kind, context = first["type"], first.get("ctx", {})
    if kind == "extra_forbidden":
        siblings = _siblings(loc[:-1], first["loc"])
        near = difflib.get_close_matches(loc[-1], siblings, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        return UserError(f"{origin}: {key}: unknown key, accepts {', '.join(siblings)}{more}", hint=hint)
    if kind == "value_error":
        accepts = str(context["error"])
    elif kind == "union_tag_invalid":
        key, tagged = ("model.name", "name") if loc == ["model"] else ("data.task", "task")
        accepts = _TAGGED[key]
        first["input"] = first["input"].get(tagged) if isinstance(first["input"], dict) else first["input"]
    else:
        accepts = _EXPECTED.get(kind, first["msg"]).format(**context)
    if key == "model.source" and kind == "string_type":
        accepts = "the path of the factory's file or folder"
    got = "nothing" if kind == "missing" else repr(first["input"])
    got = got if len(got) <= 60 else got[:57] + "..."
    hint = (
        "name the file or folder of your factory, so that an edit retrains"
        if key == "model.source"
        else f"correct {key or 'the file'}"
    )
    return UserError(f"{origin}: {key or 'the file'}: got {got}, accepts {accepts}{more}", hint=hint)


def _siblings(path: list[str], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that a section accepts."""
    section: type[Section] = Params
    for depth, name in enumerate(path):
        union = UNIONS.get(name) if depth == 0 else None
        annotation = union[str(loc[depth + 1])] if union else section.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, Section)
        section = annotation
    return list(section.model_fields)
