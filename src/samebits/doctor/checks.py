"""All checks in their order, each printed as soon as it is done."""

from __future__ import annotations

import json
import tempfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from samebits import __version__
from samebits.doctor import machine, repository, sharing, software
from samebits.doctor.containers import containers
from samebits.doctor.finding import Finding, of_error
from samebits.doctor.store import store
from samebits.errors import HostError, UserError, WorkerError, from_exit_code
from samebits.host import DriverFacts, TorchBuild, driver_facts, torch_build
from samebits.tracking.store import tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from samebits.host.cluster_environment import Nodes

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_CODES = (HostError.exit_code, UserError.exit_code, WorkerError.exit_code)  # a host that fails may fail the model too


def host_findings(params_file: Path) -> Iterator[Finding]:
    """What the host and the repository lack; neither torch nor MLflow is imported."""
    build = torch_build()
    driver: DriverFacts | HostError
    try:
        driver = driver_facts(ask_cuda=True)
    except HostError as error:
        driver = error
    gpus = len(driver.gpus) if isinstance(driver, DriverFacts) else 0
    yield from software.python()
    yield from software.locks(build)
    yield from gpu_findings(build, driver)
    yield from machine.cores(gpus)
    yield from machine.shared_memory(gpus)
    yield from machine.open_files()
    yield from machine.disk(Path.cwd(), name="disk")
    yield from machine.disk(Path(tempfile.gettempdir()), name="temporary files")
    yield from store(tracking_uri())
    yield from containers(gpus)
    yield from repository.git()
    yield from sharing.clone()
    yield from repository.dvc()
    yield from sharing.dvc_cache()
    yield from repository.params(params_file)
    yield from repository.logs()


def gpu_findings(build: TorchBuild, driver: DriverFacts | HostError) -> Iterator[Finding]:
    """What is found out about GPUs; no more than the error where one of them cannot be read."""
    if isinstance(driver, HostError):
        yield of_error(driver, name="driver")
        return
    yield from software.torch_against_driver(build, driver)
    yield from machine.devices(driver.gpus)  # before this command itself uses them
    yield from software.cuda(len(driver.gpus) if build.cuda else 0)
    yield from machine.peers()


def as_line(finding: Finding) -> Text:
    """One line; a hint is its end."""
    status = Text(f"{finding.status:<8}", style=_COLOURS[finding.status])
    return Text.assemble(
        status, f" {finding.name:<16} {finding.text}{f'. hint: {finding.hint}' if finding.hint else ''}"
    )


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(as_line(finding))
        yield finding


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Without what was said before: two looks may begin with the same data."""
    said: set[Finding] = set()
    for finding in findings:
        if finding not in said:
            said.add(finding)
            yield finding


def visit(
    params_file: Path,
    *,
    with_model: bool,
    checkpoint: Path | None,
    as_json: bool,
    nodes: Nodes | None = None,
    with_memory: bool = False,
    limit: int | None = None,
) -> None:
    """Print what was found, as lines or as JSON; of several ``nodes``, each of which calls this, node 0 alone does.

    ``limit`` is what each device may hold of what fits, in bytes; None for what is free now.

    Raises HostError, UserError or WorkerError by what failed.
    """
    findings: Iterable[Finding] = host_findings(params_file)
    if nodes is not None:
        from samebits.doctor.nodes import nodes_findings  # importing torch takes seconds

        findings = nodes_findings(params_file, nodes, findings)
    if with_model:
        from samebits.doctor.model import model_findings  # importing torch takes seconds

        findings = chain(findings, model_findings(params_file, checkpoint=checkpoint))
    if with_memory:
        from samebits.doctor.memory import memory_findings

        findings = chain(findings, memory_findings(params_file, data_dir=Path("data"), limit=limit))
    findings = _once(findings)
    listed = list(findings if as_json else _shown(findings))
    codes = {finding.exit_code for finding in listed}
    code = next((code for code in _CODES if code in codes), 0)
    if as_json and not (nodes and nodes.rank):
        report = {"samebits": __version__, "exit_code": code, "findings": [finding.as_json() for finding in listed]}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    if code:
        names = dict.fromkeys(finding.name for finding in listed if finding.status == "failed")
        raise from_exit_code(code, f"failed: {', '.join(names)}", hint="each of these lines ends in what to do")
