"""Checks before the first step that the machines of one training have the same code, data and software."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samebits.errors import HostError, UserError
from samebits.files import Part
from samebits.hashes import sha256_tree
from samebits.host import boot_id, count_cores, count_gpus, torch_build, visible_uuids
from samebits.params import flatten, keys_affecting
from samebits.records.card import read_card
from samebits.records.provenance import git_changes, git_state
from samebits.training.models.sources import find_sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from samebits.params import Params

_HASH_DIGITS = 12
_HINT = "the machines of a training must have the same"


class NodeFacts(Part):
    """One machine of a training: its name, its kernel, its devices, and everything that must be equal on all.

    ``machine`` identifies the kernel. It tells machines of the same name apart, and shows that two containers share a
    machine; ``uuids`` then tell which GPUs each of them has. A difference in ``chosen`` is the user's to correct, one
    in ``installed`` the host's.
    """

    name: str
    machine: str
    gpus: int
    uuids: tuple[str, ...]
    cores: int
    num_devices: int | Literal["auto"]
    chosen: dict[str, Any]
    installed: dict[str, Any]


def node_facts(params: Params, arguments: Mapping[str, Any], data_dir: Path | None) -> NodeFacts:
    """The facts of this machine; ``arguments`` are the stage's arguments that must be the same everywhere.

    Without ``data_dir`` the facts leave the data out.

    Raises:
        UserError: the data card cannot be read.
        HostError: a GPU cannot be read.
    """
    git, build, sources = git_state(), torch_build(), find_sources(params.model)
    values = flatten(params.model_dump(mode="json"))
    for key in keys_affecting("own_devices"):
        del values[key]
    return NodeFacts(
        name=socket.gethostname(),
        machine=hashlib.sha256(boot_id().encode()).hexdigest()[:_HASH_DIGITS],  # of the kernel that runs here
        gpus=count_gpus(),
        uuids=visible_uuids(),
        cores=count_cores(),
        num_devices=params.train.num_devices,
        chosen={
            **{f"--{name.replace('_', '-')}": value for name, value in arguments.items()},
            **{f"params {key}": value for key, value in values.items()},
            "commit": git.told,
            "changes on top of the commit": git_changes(git),
            "samebits": sha256_tree(Path(__file__).parent.parent)[:_HASH_DIGITS],
            **{f"model: {name}": found[:_HASH_DIGITS] for name, found in (sources.files if sources else {}).items()},
            "data": read_card(data_dir / "card.json", params).sha256[:_HASH_DIGITS] if data_dir else None,
        },
        installed={
            "image": os.environ.get("SAMEBITS_IMAGE_ID") or os.environ.get("SAMEBITS_IMAGE") or None,
            "torch": build.version,
            "CUDA": build.cuda,
            **(sources.packages if sources else {}),
        },
    )


def _unequal(nodes: Sequence[NodeFacts], facts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For each fact, the first machine whose value is not that of node 0."""
    for name in {key: None for values in facts for key in values}:
        expected = facts[0].get(name)
        for rank, (node, values) in enumerate(zip(nodes, facts, strict=True)):
            if (value := values.get(name)) != expected:
                yield f"{name}: node 0 ({nodes[0].name}) has {expected}, node {rank} ({node.name}) has {value}"
                break


def require_equal(nodes: Sequence[NodeFacts]) -> None:
    """Raise the first of ``disagreements``, if there is one."""
    for error in disagreements(nodes):
        raise error


def disagreements(nodes: Sequence[NodeFacts]) -> Iterator[UserError | HostError]:
    """Differences from node 0, each with both values and the first machine that has another.

    A difference in software or devices is a HostError, any other a UserError.
    """
    for text in _unequal(nodes, [node.chosen for node in nodes]):
        yield UserError(text, hint=_HINT)
    for text in _unequal(nodes, [node.installed for node in nodes]):
        yield HostError(text, hint=_HINT)
    with_gpus = [rank for rank, node in enumerate(nodes) if node.gpus]
    if with_gpus and len(with_gpus) < len(nodes):
        rank = next(rank for rank in range(len(nodes)) if rank not in with_gpus)
        text = f"node {rank} ({nodes[rank].name}) has no GPU, node {with_gpus[0]} ({nodes[with_gpus[0]].name}) has some"
        yield HostError(text, hint="set CUDA_VISIBLE_DEVICES= on all of them to train on CPUs")
