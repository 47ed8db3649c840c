"""All checks in their order. Each is printed as soon as it is done."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from samebits import __version__
from samebits.doctor import machine, repository, sharing, software
from samebits.doctor.containers import containers
from samebits.doctor.finding import Finding, Status, of_error
from samebits.doctor.store import store
from samebits.errors import HostError, UserError, WorkerError, counted, from_exit_code
from samebits.host import DriverFacts, TorchBuild, driver_facts, torch_build
from samebits.results.lines import width_of, wrapped
from samebits.tracking.store import tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from samebits.host.cluster_environment import Nodes

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_COUNTED: dict[Status, str] = {"failed": "failure", "warning": "warning"}
_UNCOUNTED: tuple[Status, ...] = ("ok", "skipped")
# The first code wins, because a failure of the host may be the cause of the others.
_CODES = (HostError.exit_code, UserError.exit_code, WorkerError.exit_code)


def host_findings(params_file: Path) -> Iterator[Finding]:
    """Findings on the host and the repository, without importing torch or MLflow."""
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
    if build.version and not (gpus and build.cuda):  # GPUs need none
        yield from software.kernels()
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
    """Findings on GPUs; only the error if the driver cannot read one of them."""
    if isinstance(driver, HostError):
        yield of_error(driver, name="driver")
        return
    yield from software.torch_against_driver(build, driver)
    if driver.silent:
        return
    yield from machine.devices(driver.gpus)  # before this command itself uses them
    yield from machine.float64(driver.gpus)
    yield from software.cuda(len(driver.gpus) if build.cuda else 0)
    yield from machine.peers()


def as_lines(finding: Finding, width: int) -> list[Text]:
    """A finding as lines of at most so many columns; the hint begins a line of its own."""
    head = f"{finding.status:<8} {finding.name:<16} "
    indent = " " * len(head)
    first, *more = wrapped(finding.text, width - len(indent))
    hint = wrapped(f"hint: {finding.hint}", width - len(indent)) if finding.hint else []
    style = _COLOURS[finding.status]
    lines = [Text.assemble((finding.status, style), head[len(finding.status) :], first)]
    return [*lines, *(Text(indent + line) for line in more), *(Text(indent + line, style=style) for line in hint)]


def say_ready(findings: Sequence[Finding], *, tried: bool) -> str:
    """Whether trainings run here, in one line: ``ready: 1 warning, 16 ok, 4 skipped``. ``tried``: a model was."""
    counts = Counter(finding.status for finding in findings)
    ready = "not ready" if counts["failed"] else "ready"
    told = [counted(counts[status], noun) for status, noun in _COUNTED.items() if counts[status]]
    told += [f"{counts[status]} {status}" for status in _UNCOUNTED if counts[status]]
    untried = "" if tried or counts["failed"] else "; the model was not tried: `samebits doctor --model` does"
    return f"{ready}: {', '.join(told)}{untried}"


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    console = Console(highlight=False, soft_wrap=True)
    with console.status("looking") if console.is_terminal else nullcontext():  # --model takes a minute
        for finding in findings:
            for line in as_lines(finding, width_of(console)):
                console.print(line)
            yield finding


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings without repetitions: --model and --memory may begin with the same one on the data."""
    said: set[Finding] = set()
    for finding in findings:
        if finding not in said:
            said.add(finding)
            yield finding


def visit(
    params_file: Path,
    *,
    data_dir: Path,
    with_model: bool,
    checkpoint: Path | None,
    as_json: bool,
    nodes: Nodes | None = None,
    with_memory: bool = False,
    limit: int | None = None,
) -> None:
    """Print all findings, as lines or as JSON. With several ``nodes``, each calls this, and node 0 alone prints.

    ``limit`` is the memory of each device in bytes, for ``with_memory``; None for the memory that is free now.

    Raises HostError, UserError or WorkerError, by the first kind of failure.
    """
    findings: Iterable[Finding] = host_findings(params_file)
    if nodes is not None:
        from samebits.doctor.nodes import nodes_findings  # importing torch takes seconds

        findings = nodes_findings(params_file, nodes, findings)
    if with_model:
        from samebits.doctor.model import model_findings  # importing torch takes seconds

        findings = chain(findings, model_findings(params_file, checkpoint=checkpoint, data_dir=data_dir))
    if with_memory:
        from samebits.doctor.memory import memory_findings

        findings = chain(findings, memory_findings(params_file, data_dir=data_dir, limit=limit))
    findings = _once(findings)
    listed = list(findings if as_json else _shown(findings))
    if not as_json and not (nodes and nodes.rank):
        click.echo(f"\n{say_ready(listed, tried=with_model)}")
    codes = {finding.exit_code for finding in listed}
    code = next((code for code in _CODES if code in codes), 0)
    if as_json and not (nodes and nodes.rank):
        report = {"samebits": __version__, "exit_code": code, "findings": [finding.as_json() for finding in listed]}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    if code:
        names = dict.fromkeys(finding.name for finding in listed if finding.status == "failed")
        raise from_exit_code(code, f"failed: {', '.join(names)}", hint="below each of these lines stands what to do")
