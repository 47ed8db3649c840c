"""Checks of all machines of a training: findings on each, differences between them, and their network."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from samebits.doctor.finding import Finding, failed, of_error, ok, warning
from samebits.doctor.pairs import BYTES, NodePair, measure_pairs
from samebits.errors import SamebitsError
from samebits.files import Part, scratch_folder
from samebits.host.addresses import is_loopback
from samebits.host.variables import SECRET
from samebits.params import load_params
from samebits.workers.connectivity import OPEN_PORTS
from samebits.workers.consistency import NodeFacts, disagreements, node_facts
from samebits.workers.processes import Ranks, launch
from samebits.workers.rendezvous import Rendezvous
from samebits.workers.world import environment_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from samebits.doctor.pairs import Backend
    from samebits.host.cluster_environment import Nodes

_SECONDS = 60.0  # for all machines to connect


class Visit(Part):
    """Facts and findings of one machine."""

    facts: NodeFacts
    findings: tuple[Finding, ...]


def nodes_findings(params_file: Path, nodes: Nodes, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings of all machines, on node 0; none on the others. Each machine must call it with its own ``findings``.

    Raises:
        UserError: params.yaml is wrong.
        HostError: the machines do not connect.
    """
    params = load_params(params_file)
    with Rendezvous(nodes, seconds=_SECONDS) as meeting:
        facts = node_facts(params, {"nodes": nodes.count}, None)
        here = Visit(facts=facts, findings=tuple(findings))
        meeting.join()
        visits = [Visit.model_validate(one) for one in meeting.share("visits", here.model_dump(mode="json"))]
        machines = [visit.facts for visit in visits]
        names = [machine.name for machine in machines]
        joined = list(
            _joined(nodes, names, environment_of(nodes, meeting.address), with_gpus=all(m.gpus for m in machines))
        )
    if nodes.rank:
        return
    yield ok(f"{nodes.count}: {', '.join(names)}, which meet at {meeting.address}", name="nodes")
    if not (os.environ.get(SECRET) or is_loopback(meeting.address.ip)):
        text = f"whoever reaches {meeting.address} can speak for a machine: {SECRET} is not set"
        yield warning(text, "give all machines the same random text by it", name="secret")
    yield from beside(names, [visit.findings for visit in visits])
    errors = list(disagreements(machines))
    yield from (of_error(error, name="the same") for error in errors)
    if not errors:
        yield ok("commit, changes on top of it, params, image, torch and CUDA", name="the same")
    yield from joined


def beside(names: Sequence[str], findings: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """The findings of all nodes by check. A finding of some nodes only gets their names."""
    for name in {finding.name: None for one in findings for finding in one}:
        said: dict[Finding, list[str]] = {}
        for node, one in zip(names, findings, strict=True):
            for finding in one:
                if finding.name == name:
                    said.setdefault(finding, []).append(node)
        for finding, nodes in said.items():
            whose = "" if len(nodes) == len(names) else f"{', '.join(nodes)}: "
            yield replace(finding, text=whose + finding.text)


def _joined(nodes: Nodes, names: Sequence[str], environment: dict[str, str], *, with_gpus: bool) -> Iterator[Finding]:
    """Measurements between each pair of nodes: over gloo, which trainings on GPUs use too, and over NCCL."""
    backends: tuple[Backend, ...] = ("gloo", "nccl") if with_gpus else ("gloo",)
    for backend in backends:
        with scratch_folder() as folder:
            file = folder / "pairs.jsonl"
            ranks = Ranks(range(nodes.rank, nodes.rank + 1), nodes.count, environment)
            try:
                launch(partial(measure_pairs, backend, file), ranks)
            except SamebitsError as error:
                yield of_error(error, name=backend)
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        yield from (_of_pair(NodePair.model_validate_json(line), names) for line in lines)


def _of_pair(pair: NodePair, names: Sequence[str]) -> Finding:
    name = f"{names[pair.first]} - {names[pair.second]}"
    if pair.round_trip_seconds is None or pair.bytes_per_second is None:
        return failed(f"{pair.backend} does not connect them: {pair.problem}", OPEN_PORTS, name=name)
    trip, speed = 1e3 * pair.round_trip_seconds, pair.bytes_per_second / 1e9
    text = (
        f"{pair.backend}: a round trip takes {trip:.3g} ms, an all-reduce of {BYTES >> 20} MiB runs at {speed:.3g} GB/s"
    )
    return ok(text, name=name)
