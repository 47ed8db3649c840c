"""Wrong command lines, and image archives that hold no image."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.inputs_bench import RUN, VERDICT, Attempt
from faults.inputs_values import TEXTS, damaged, not_a_file, paths, spoil_json

if TYPE_CHECKING:
    import random

    from faults.inputs_bench import Bench

_NUMBERS = (
    "-1",
    "0",
    "1e3",
    "9" * 30,
    "9" * 5000,
    "",
    " ",
    "x",
    "1\n",
    "auto",
    "\u0661",
    "\u00b2",
    "nan",
    "0x1",
    "+1",
    "1_0",
    "--",
)
_TRAIN = ("train", "--strategy", "single", "--no-tracking")


def argument(rng: random.Random, bench: Bench) -> str:
    """A hostile text that fits into a command line."""
    text = rng.choice((*paths(bench.outside), *TEXTS)).replace("\0", "\x01")
    return text.encode("utf-8", "replace").decode() or "x" if rng.random() < 0.9 else "bytes-\udcff\udcfe"


def commands(rng: random.Random, bench: Bench) -> Attempt:
    """Run a wrong command line."""
    text, number = argument(rng, bench), rng.choice(_NUMBERS)
    stage = rng.random() < 0.4
    line: tuple[str, ...]
    if stage:
        line = rng.choice((
            (*_TRAIN, "--steps", "2", "--num-devices", number), (*_TRAIN, "--steps",
            number if len(number) < 20 and number != "+1" else "-1"),
            (*_TRAIN, "--steps", "2", "--out-dir", _writable(text, bench)), (*_TRAIN, "--steps", "2", "--data-dir",
            text),
            ("train", "--strategy", text), ("train", "--strategy", "ddp", "--num-devices", number, "--steps", "2",
            "--no-tracking"),
            ("prepare", "--params", text), ("prepare", "--out-dir", _writable(text, bench)), ("host", "--params", text),
            ("evaluate", text), ("evaluate", "--data-dir", text), ("evaluate", "--out-dir", _writable(text, bench)),
            ("compare", "--no-tracking", "--out-dir", _writable(text, bench)), ("prepare", text), ("train",),
            (*_TRAIN, "--numerics", text), ("host", f"--{text[:50]}"),
        ))  # fmt: skip
        return Attempt(f"{' '.join(line)[:120]!r}", partial(bench, *line), {0, 2, 3})
    line = rng.choice((
        ("compare", text, RUN), ("compare", RUN, text), ("compare", "a" * 32, RUN), ("compare", RUN), (text,),
        ("--debug", text),
        ("reproduce", text), ("reproduce", "b" * 32), ("reproduce", "b" * 32, "--num-devices", number), ("report",
        text),
        ("report", "--out-dir", _writable(text, bench)), ("verify", "--params", text), ("verify", "--num-devices",
        number),
        ("verify", "--strategy", text), ("ui", "--port", "x"), ("doctor", "--params", text), ("doctor", text),
        ("track", text),
        ("container", text), ("container", "load", text), ("container", "save", text), ("container", "info", "--lock",
        text),
        ("compare", RUN, RUN, "--require", text), ("track", "sync", text),
    ))  # fmt: skip
    environ = (
        {"MLFLOW_TRACKING_URI": _address(rng, bench)}
        if line[0] in ("reproduce", "track") and rng.random() < 0.5
        else {}
    )
    shown = f"{' '.join(line)[:120]!r} {environ or ''}"
    return Attempt(shown, partial(bench, "samebits", *line, environ=environ), VERDICT)


def _address(rng: random.Random, bench: Bench) -> str:
    """An address of no store. It leads to no other host."""
    return rng.choice(("sqlite:///nowhere/x.db", "x://y", "http://[", "file:./x", "sqlite:////dev/null", "databricks",
    "\x1b[31m",
                       f"sqlite:///{bench.folder}/params.yaml", "http://127.0.0.1:x",
                       "postgresql://127.0.0.1:1/x"))  # fmt: skip


def _writable(text: str, bench: Bench) -> str:
    """A folder to write to. It never leads to a real folder of this host, where writing would be allowed."""
    return (
        text if len(text) > 250 or ("/" not in text and ".." not in text) else f"{bench.folder}/params.yaml/{text[:20]}"
    )


def archives(rng: random.Random, bench: Bench) -> Attempt:
    """Load an image from an archive without one. Without an engine, loading ends where it is asked."""
    file, record = bench.folder / "image.tar", bench.folder / "image.tar.json"
    data = _archive(rng, bench)
    file.write_bytes(data)
    facts: dict[str, object] = {"name": "samebits:cpu-0", "id": "sha256:0", "digest": None, "base": None, "layers": [],
             "sha256": hashlib.sha256(data).hexdigest()}  # fmt: skip
    record.write_text(json.dumps(facts), encoding="utf-8")
    if rng.random() < 0.3:
        command = partial(bench, "samebits", "container", "load", file.name)
        return Attempt(f"an archive of {len(data)} bytes", command, {0, 2, 3})
    record.write_text(json.dumps({**facts, "sha256": "0" * 64}), encoding="utf-8")  # so that no engine is asked
    what = spoil_json(rng, record, bench.outside) if rng.random() < 0.8 else not_a_file(rng, file, bench.outside)
    return Attempt(f"archive: {what}", partial(bench, partial(_load, file.name)), {2, 3}, (file.name,))


def _load(name: str) -> None:
    import docker

    from samebits.engines.image import load_image

    load_image(docker.DockerClient(base_url="unix://nowhere.sock", version="1.44"), Path(name))


def _archive(rng: random.Random, bench: Bench) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member: Any = tarfile.TarInfo(
            rng.choice((*(path for path in paths(bench.outside) if "\0" not in path), "manifest.json"))
        )
        member.type = rng.choice(
            (
                tarfile.REGTYPE,
                tarfile.SYMTYPE,
                tarfile.LNKTYPE,
                tarfile.CHRTYPE,
                tarfile.FIFOTYPE,
                tarfile.GNUTYPE_SPARSE,
            )
        )
        member.linkname = "../outside/passwd"
        member.size = 3 if member.type == tarfile.REGTYPE else 0
        archive.addfile(member, io.BytesIO(b"abc"))
    data = stream.getvalue()
    return rng.choice((data, data, damaged(rng, data), bench.pickle(), b"", b"\x1f\x8b" + data[:50]))
