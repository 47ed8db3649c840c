"""Replacements for good input: values, bytes, and paths that are no regular file."""

from __future__ import annotations

import copy
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from pathlib import Path

TEXTS = (
    "", " ", "x" * 5000, "a\nb", "a\0b", "\x1b[31mred\x1b[0m", "\x07\x08\x7f\x9b", "\u202eevil", "\ud800",
    "\U0001f600" * 1000,
    "NaN", "1e3", "auto", "0x10", "null", "~root", "$(touch canary)", "{{7*7}}", "<script>alert(1)</script>", "%s%n%x",
    "[bold red]x[/bold]", "-", "--help", ":", "a:b", "a.b:c", "os:system", "..", "/", "/dev/null", "file:///etc/passwd",
    "a\r\nerror: no", "\u2028error: no", "\ufeff",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 3, 2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**13, 10**30, 10**400,
    0.5, -0.0, 5e-324, 1e-300, 1e308, -1e308, 1.5, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
SMALL = (0, 1, -1, 3, 0.5, -0.0, 1.5, float("nan"), float("inf"))
"""Numbers that cannot make a training long."""


def paths(outside: Path) -> tuple[str, ...]:
    """Paths out of the working folder, and other bad ones."""
    near = f"../{outside.name}"
    return (
        "../../etc/passwd", "/etc/passwd", str(outside), f"{outside}/passwd", f"{near}/passwd", f"{near}/array.npy",
        f"{near}/card.json", f"{near}/new", f"{outside}/new/deep.json", f"runs/../{near}/passwd",
        "../" * 40 + "etc/passwd",
        "x/" * 2000, "a" * 300, f"/{'b' * 5000}", "data/\0/card.json", "data\n/x", "pipe", "loop", "dangling",
    )  # fmt: skip


def value(rng: random.Random, outside: Path, numbers: tuple[float, ...] = NUMBERS) -> Any:
    """A random value of any type."""
    match rng.randrange(9):
        case 0 | 1:
            return rng.choice(numbers)
        case 2 | 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice(paths(outside))
        case 5:
            return rng.choice((None, True, False, [], {}, [[]], [None], {"": ""}, {"a": {"a": {}}}))
        case 6:
            return nested(rng.choice((10, 100, 400)), mapping=rng.random() < 0.5)
        case 7:
            return [value(rng, outside, numbers) for _ in range(rng.randrange(1, 4))]
        case _:
            return {rng.choice(TEXTS): value(rng, outside, numbers)}


def nested(depth: int, *, mapping: bool) -> Any:
    """A list in a list and so on, or a mapping in a mapping."""
    inner: Any = 1
    for _ in range(depth):
        inner = {"a": inner} if mapping else [inner]
    return inner


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values of a tree and to the tree itself."""
    keys = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    return [path, *(place for key, child in keys for place in places(child, (*path, key)))]


def changed(rng: random.Random, tree: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy of a tree with a value replaced, removed, or added beside a place."""
    if not place:
        return new
    tree = copy.deepcopy(tree)
    parent = tree
    for key in place[:-1]:
        parent = parent[key]
    key = place[-1]
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice((*TEXTS[2:8], f"{key} ", f"{key}s", str(key).upper()))] = new
        case 2 if isinstance(parent, list):
            parent.extend([new] * rng.choice((1, 1000)))
        case _:
            parent[key] = new
    return tree


def json_of(rng: random.Random, text: str, outside: Path) -> bytes:
    """JSON with one or two wrong values, or a damaged text."""
    if rng.random() < 0.7:
        tree = json.loads(text)
        for _ in range(rng.choice((1, 1, 2))):
            tree = changed(rng, tree, rng.choice(places(tree)), value(rng, outside))
        return json.dumps(tree).encode()
    return damaged(rng, text.encode())


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes that are cut, flipped, encoded differently, or replaced."""
    size = max(len(data), 1)
    match rng.randrange(12):
        case 0:
            return data[: rng.randrange(size)]
        case 1:
            return b""
        case 2:
            position = rng.randrange(size)
            return (
                data[:position]
                + bytes([data[position] ^ 1 << rng.randrange(8)] if data else b"")
                + data[position + 1 :]
            )
        case 3:
            return rng.randbytes(rng.choice((1, 100, 5000)))
        case 4:
            return b"\xef\xbb\xbf" + data
        case 5:
            return data.decode("utf-8", "replace").encode("utf-16")
        case 6:
            return rng.choice((b"[", b'{"a":')) * 100_000
        case 7:
            return rng.choice(
                (b"9" * 5000, b"-" + b"9" * 5000, b"1e99999", b"NaN", b"null", b"[]", b'""', b"0", b"true")
            )
        case 8:
            return data.replace(b":", rng.choice((b": \0", b": \x1b[31m", b": \xff", b"=")), rng.choice((1, 3)))
        case 9:
            return data + data
        case 10:
            return b"\0" * size
        case _:
            start = rng.randrange(size)
            return data[:start] + data[start + rng.randrange(1, 50) :]


def not_a_file(rng: random.Random, path: Path, outside: Path) -> str:
    """Replace a file by something that is none, and describe it."""
    path.unlink(missing_ok=True)
    kind = rng.choice(("nothing", "folder", "pipe", "dangling link", "loop", "link outside", "link to a device"))
    match kind:
        case "folder":
            path.mkdir(parents=True)
        case "pipe":
            os.mkfifo(path)
        case "dangling link":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "link outside":
            path.symlink_to(outside / "passwd")
        case "link to a device":
            path.symlink_to("/dev/null")
    return kind


def spoil_json(rng: random.Random, path: Path, outside: Path) -> str:
    """Damage a JSON file and describe it."""
    if rng.random() < 0.15:
        return f"{path.name}: {not_a_file(rng, path, outside)}"
    data = json_of(rng, path.read_text(encoding="utf-8"), outside)
    path.write_bytes(data)
    return f"{path.name}: {len(data)} bytes, {data[:60]!r}"
