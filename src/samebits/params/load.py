"""Reading params.yaml, and saying in one line what is wrong with it."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from samebits.batch_split import divides
from samebits.errors import UserError, first_line
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
    except Exception as error:  # noqa: BLE001 - ruamel's constructors raise what they come across, such as KeyError
        raise UserError(f"{path}: a value cannot be read: {first_line(str(error))}", hint="check the file") from None
    return parse_params({} if raw is None else raw, origin=str(path))


def read_yaml(text: str) -> Any:
    """The values of a text in YAML. Raises what ruamel does, and what ``_refuse_what_cannot_be_told`` does."""
    values = YAML(typ="safe", pure=True).load(text)  # Python's parser: the one in C dies of deep nesting
    _refuse_what_cannot_be_told(values)
    return values


_MOST_VALUES = 100_000
_DEEPEST = 64  # levels, of which a record that holds params has a few more, and can write no more than 255


def _refuse_what_cannot_be_told(raw: object) -> None:
    """Raise ValueError for values that YAML can write and no message, record or command line can.

    They are integers of thousands of digits in another base, halves of a character, aliases of themselves, and aliases
    of aliases: each counts here as what it stands for, which a few lines can make billions of.
    RecursionError says that they are nested too deeply.
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
    """Parameters of one training: ``train.num_devices`` is a command line's ``value`` unless that is None.

    Raises:
        UserError: ``value`` is no number of devices, or ``params`` are not ones of these numerics.
    """
    raw = params.model_dump(mode="json")
    raw["train"]["numerics"] = [numerics]
    origin = f"numerics {numerics}"
    if value is not None:
        # Longer than any count: Python reads no number of thousands of digits.
        raw["train"]["num_devices"] = int(value) if value.isdecimal() and len(value) < 100 else value
        origin = f"--num-devices {value}"
    train = parse_params(raw, origin=origin).train
    return params.model_copy(update={"train": train.model_copy(update={"numerics": params.train.numerics})})


def require_repository() -> None:
    """Raise UserError where there is no params.yaml: the local store would be made in the wrong folder."""
    if not Path("params.yaml").exists() and "MLFLOW_TRACKING_URI" not in os.environ:
        raise UserError(f"{Path.cwd()} has no params.yaml", hint="run this at the root of the repository")


def require_every_key(params: Params, origin: str) -> None:
    """Raise UserError for the first key that is left to its default: DVC can only follow what is written."""
    for prefix, section in (("", params), ("train.", params.train), ("exact.", params.exact)):
        for name in type(section).model_fields:
            if name not in section.model_fields_set:
                value = section.model_dump(mode="json")[name]
                hint = f"add `{name}: {json.dumps(value)}`, which is the default"
                raise UserError(f"{origin}: {prefix}{name}: missing, and DVC follows every key", hint=hint)


def _contradictions(params: Params) -> Iterator[Contradiction]:
    """Settings that are each right and cannot be together; those that the host decides are ``place``'s to find."""
    data, model, train, shards = params.data, params.model, params.train, params.exact.shards
    batch, accum = train.global_batch_size, train.grad_accum_steps
    if not divides(accum, batch):
        accepts = f"a divisor of train.global_batch_size = {batch}"
        yield "train.grad_accum_steps", accum, accepts, "change one of them"
    if batch > data.num_samples:
        accepts = f"at most data.num_samples = {data.num_samples}"
        yield "train.global_batch_size", batch, accepts, "lower the batch or raise data.num_samples"
    if "exact" in train.numerics and not divides(shards, batch):
        accepts = f"a divisor of train.global_batch_size = {batch}"
        nearest = max(n for n in range(1, shards + 1) if divides(n, batch))
        yield "exact.shards", shards, accepts, f"set it to {nearest}, or train.numerics to [fast]"
    if train.schedule.warmup_steps >= max(params.total_steps, 1):
        accepts = f"fewer than the {params.total_steps} steps of the training"
        yield "train.schedule.warmup_steps", train.schedule.warmup_steps, accepts, "lower it, or train longer"
    spec = MODELS.get(model.name)
    if spec and data.task != "file" and data.task not in spec.tasks:
        fitting = [name for name, one in MODELS.items() if data.task in one.tasks]
        accepts = f"{', '.join(fitting)} or your own factory for data.task {data.task}"
        yield "model.name", repr(model.name), accepts, f"set model.name to {fitting[0]}"
    if spec:
        yield from spec.contradictions(model)


_DISCRIMINATORS = {"data": "task", "model": "name"}
_HINTS = {
    "model.source": "leave it null: what your factory imports is found by itself",
}


def _explain(error: ValidationError, origin: str) -> UserError:
    """Put pydantic's first finding into one line: the key's path, what it got, what it accepts."""
    findings = error.errors(include_url=False)
    first, context = findings[0], findings[0].get("ctx", {})
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    section, *path = [str(part) for part in first["loc"]] or [""]
    if section in _DISCRIMINATORS:
        path = path[1:]  # the first is the member of the union that pydantic chose, not a key of the file
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
    hint = _HINTS.get(key, "docs/reference/params.md has every key and what it accepts")
    return UserError(f"{origin}: {key or 'the file'}: got {got}: {accepts}{more}", hint=hint)
