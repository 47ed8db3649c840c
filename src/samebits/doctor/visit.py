"""All checks in their order, each printed as soon as it is done."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from samebits import __version__
from samebits.doctor import machine, repository, software
from samebits.doctor.containers import containers
from samebits.doctor.finding import Finding, of_error
from samebits.doctor.store import store
from samebits.errors import HostError, UserError, WorkerError, from_exit_code
from samebits.host import driver_facts, torch_build
from samebits.tracking.store import tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_CODES = (HostError.exit_code, UserError.exit_code, WorkerError.exit_code)  # a host that fails may fail the model too


def host_findings(params_file: Path) -> Iterator[Finding]:
    """What the host and the repository lack; neither torch nor MLflow is imported."""
    build = torch_build()
    try:
        driver = driver_facts()
    except HostError as error:
        yield of_error(error, name="driver")
        driver = {"driver": None, "cuda": None, "gpus": [], "problem": error.message}
    gpus = len(driver["gpus"])
    yield from software.python()
    yield from software.locks(build)
    yield from software.torch_against_driver(build, driver)
    yield from machine.devices(driver["gpus"])  # before this command itself uses them
    yield from software.cuda(gpus if build["cuda"] else 0)
    yield from machine.peers()
    yield from machine.cores(gpus)
    yield from machine.shared_memory(gpus)
    yield from machine.open_files()
    yield from machine.disk(Path.cwd(), name="disk")
    yield from machine.disk(Path(tempfile.gettempdir()), name="temporary files")
    yield from store(tracking_uri())
    yield from containers(gpus)
    yield from repository.git()
    yield from repository.dvc()
    yield from repository.params(params_file)
    yield from repository.logs()


def _line(finding: Finding) -> Text:
    """One line; a hint is its end."""
    status = Text(f"{finding.status:<8}", style=_COLOURS[finding.status])
    return Text.assemble(
        status, f" {finding.name:<16} {finding.text}{f'. hint: {finding.hint}' if finding.hint else ''}"
    )


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(_line(finding))
        yield finding


def _exit_code(findings: Iterable[Finding]) -> int:
    codes = {finding.exit_code for finding in findings}
    return next((code for code in _CODES if code in codes), 0)


def visit(params_file: Path, *, with_model: bool, checkpoint: Path | None, as_json: bool) -> None:
    """Print what was found, as lines or as one JSON object.

    Raises:
        HostError, UserError, WorkerError: something failed; the exit code says of which kind.
    """
    findings: Iterable[Finding] = host_findings(params_file)
    if with_model:
        from samebits.doctor.model import model_findings  # importing torch takes seconds

        findings = chain(findings, model_findings(params_file, checkpoint=checkpoint))
    found = list(findings if as_json else _shown(findings))
    code = _exit_code(found)
    if as_json:
        report = {"samebits": __version__, "exit_code": code, "findings": [asdict(finding) for finding in found]}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    if code:
        names = dict.fromkeys(finding.name for finding in found if finding.status == "failed")
        raise from_exit_code(code, f"failed: {', '.join(names)}", hint="each of these lines ends in what to do")
