"""Read params.yaml, and report what is wrong with it in one line."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from samebits.errors import UserError, first_line
from samebits.files import write_text
from samebits.here import of_kit
from samebits.models import MODELS
from samebits.params.schema import NumericsName, Params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.models.interface import Contradiction


def load_params(path: Path | str) -> Params:
    """Read and check a params file.

    Raises:
        UserError: the file cannot be read, or a key is unknown, repeated, of the wrong type, out of range or
            in contradiction with another; the message gives the key's full path.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: expected a file", hint="name one with --params")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint="name one with --params, or run in the repository") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}", hint="check the file") from None
    try:
        raw = read_yaml(text)
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
    except RecursionError:
        raise UserError(f"{path}: nested too deeply", hint="check its brackets") from None
    except Exception as error:  # noqa: BLE001 - ruamel's constructors raise anything, such as KeyError
        raise UserError(f"{path}: a value cannot be read: {first_line(str(error))}", hint="check the file") from None
    return parse_params({} if raw is None else raw, origin=str(path))


def read_yaml(text: str) -> Any:
    """The values of a YAML text. Raises the exceptions of ruamel and of ``_refuse_unwritable``."""
    values = YAML(typ="safe", pure=True).load(text)  # not the parser in C, which crashes on deep nesting
    _refuse_unwritable(values)
    return values


_MOST_VALUES = 100_000
_DEEPEST = 64  # levels; a record that holds params has a few more, and pydantic writes at most 255


def _refuse_unwritable(raw: object) -> None:
    """Refuse values that YAML can express and a message, record or command line cannot.

    These are integers of thousands of digits in another base, surrogate halves, aliases of themselves, and aliases of
    aliases, with which a few lines can stand for billions of values. Each alias counts as the values it stands for.

    Raises:
        ValueError: there is such a value, or there are too many values.
        RecursionError: they are nested too deeply.
    """
    counter = itertools.count(1)

    def visit(value: object, above: frozenset[int]) -> None:
        if next(counter) > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} of them, each alias counted as what it stands for")
        if len(above) > _DEEPEST:
            raise RecursionError
        if isinstance(value, str | int):
            str(value).encode()
        elif isinstance(value, dict | list | tuple | set):
            if id(value) in above:
                raise ValueError("an alias stands inside of what it stands for")
            below = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            for child in below:
                visit(child, above | {id(value)})

    visit(raw, frozenset())


def write_params(params: Params, path: Path) -> None:
    """Write a params.yaml with every key, in the place of a link and not where it leads."""
    text = io.StringIO()
    YAML().dump(params.model_dump(mode="json"), text)
    write_text(path, text.getvalue())


def parse_params(raw: object, *, origin: str = "params") -> Params:
    """Check a mapping that was read from YAML. Messages name ``origin`` before the key."""
    try:
        params = Params.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, origin) from None
    for key, got, accepts, hint in _contradictions(params):
        raise UserError(f"{origin}: {key}: got {got}, accepts {accepts}", hint=hint)
    return params


def with_num_devices(params: Params, value: str | None, numerics: NumericsName) -> Params:
    """Params of one training. A ``value`` from the command line replaces ``train.num_devices``.

    Raises:
        UserError: ``value`` is no number of devices, or ``params`` do not allow these numerics.
    """
    raw = params.model_dump(mode="json")
    raw["train"]["numerics"] = [numerics]
    origin = f"numerics {numerics}"
    if value is not None:
        # 100 digits are more than any count has, and Python refuses to read thousands.
        raw["train"]["num_devices"] = int(value) if value.isdecimal() and len(value) < 100 else value
        origin = f"--num-devices {value}"
    train = parse_params(raw, origin=origin).train
    return params.model_copy(update={"train": train.model_copy(update={"numerics": params.train.numerics})})


def require_repository() -> None:
    """Raise UserError without a params.yaml here, since the local store would be made in the wrong folder."""
    if not Path("params.yaml").exists() and "MLFLOW_TRACKING_URI" not in os.environ:
        raise UserError(
            f"{Path.cwd()} has no params.yaml", hint="run this at the root of the repository, or `samebits init` there"
        )


def require_every_key(params: Params, origin: str) -> None:
    """Raise UserError for the first key that the file leaves out, because DVC only follows written keys."""
    for prefix, section in (("", params), ("train.", params.train), ("exact.", params.exact)):
        for name in type(section).model_fields:
            if name not in section.model_fields_set:
                value = section.model_dump(mode="json")[name]
                hint = f"add `{name}: {json.dumps(value)}`, which is the default"
                raise UserError(f"{origin}: {prefix}{name}: missing, and DVC follows every key", hint=hint)


def _contradictions(params: Params) -> Iterator[Contradiction]:
    """Settings that are valid alone and contradict each other. ``place`` finds those that depend on the host."""
    data, model, train, shards = params.data, params.model, params.train, params.exact.shards
    batch, accum = train.global_batch_size, train.grad_accum_steps
    if batch % accum:
        accepts = f"a divisor of train.global_batch_size = {batch}"
        yield "train.grad_accum_steps", accum, accepts, "change one of them"
    if batch > data.num_samples:
        accepts = f"at most data.num_samples = {data.num_samples}"
        yield "train.global_batch_size", batch, accepts, "lower the batch or raise data.num_samples"
    if "exact" in train.numerics and batch % shards:
        accepts = f"a divisor of train.global_batch_size = {batch}"
        nearest = max(n for n in range(1, shards + 1) if batch % n == 0)
        yield "exact.shards", shards, accepts, f"set it to {nearest}, or train.numerics to [fast]"
    if "exact" in train.numerics and params.exact.batch_norm == "global" and accum > 1:
        accepts = "1 with exact.batch_norm: global, which needs the batch in one pass"
        yield "train.grad_accum_steps", accum, accepts, "set one of them to its default"
    if train.schedule.warmup_steps >= max(params.total_steps, 1):
        accepts = f"fewer than the {params.total_steps} steps of the training"
        yield "train.schedule.warmup_steps", train.schedule.warmup_steps, accepts, "lower it, or train longer"
    spec = MODELS.get(model.name)
    if spec and data.task == "dataset":
        yield "model.name", repr(model.name), "a factory of your own for data.task dataset", "see samebits.Experiment"
    elif spec and data.is_drawn and data.task not in spec.tasks:
        fitting = [name for name, one in MODELS.items() if data.task in one.tasks]
        accepts = f"{', '.join(fitting)} or your own factory for data.task {data.task}"
        yield "model.name", repr(model.name), accepts, f"set model.name to {fitting[0]}"
    if spec:
        yield from spec.contradictions(model)


_DISCRIMINATORS = {"data": "task", "model": "name"}


def _explain(error: ValidationError, origin: str) -> UserError:
    """Pydantic's first finding in one line: the key's path, the value, and what the key accepts."""
    findings = error.errors(include_url=False)
    first, context = findings[0], findings[0].get("ctx", {})
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    section, *path = [str(part) for part in first["loc"]] or [""]
    if section in _DISCRIMINATORS:
        path = path[1:]  # the first is the union's member that pydantic chose, not a key of the file
    key, got, accepts = ".".join([section, *path]), repr(first["input"]), first["msg"]
    match first["type"]:
        case "unknown_key":
            key = f"{key}.{context['key']}".lstrip(".")
            hint = f"did you mean {context['near'][0]}?" if context["near"] else "remove it"
            return UserError(f"{origin}: {key}: unknown key, accepts {context['accepts']}{more}", hint=hint)
        case "union_tag_invalid":
            key = f"{section}.{_DISCRIMINATORS[section]}"
            got, accepts = repr(context["tag"]), f"Input should be one of {context['expected_tags']}"
        case "missing":
            got = "nothing"
            if key in ("data.kwargs", "data.kwargs.inputs", "data.kwargs.targets"):
                hint = "name your arrays: kwargs: {inputs: mydata/inputs.npy, targets: mydata/targets.npy}"
                return UserError(f"{origin}: {key}: got nothing{more}", hint=hint)
    got = got if len(got) <= 60 else got[:57] + "..."
    hint = f"{of_kit('docs/reference/params.md')} has every key and what it accepts"
    if first["type"] == "unrecordable":
        hint = "write it as text, in quotes, and convert that in your own code"
    if key == "model.source":
        hint = "leave it null: what your factory imports is found by itself"
    return UserError(f"{origin}: {key or 'the file'}: got {got}: {accepts}{more}", hint=hint)
