"""Gathers the machines of a training, checks that they are alike, and places the ranks on them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samebits.strategies.placement import Devices
from samebits.training.placement import place, this_machine
from samebits.workers.connectivity import require_reach
from samebits.workers.consistency import NodeFacts, node_facts, require_equal
from samebits.workers.peers import PeerMonitor, Peers
from samebits.workers.processes import Ranks
from samebits.workers.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from samebits.batch_split import BatchSplit
    from samebits.host.addresses import Address
    from samebits.host.cluster_environment import Nodes
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.strategies import StrategyName
    from samebits.strategies.placement import Placement


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """The placement of a training, the ranks of this machine, and the launchers of the others.

    ``leads``: rank 0, the only one that writes, is on this machine. ``nodes`` are the names of several machines and of
    their kernels.
    """

    placement: Placement
    split: BatchSplit
    ranks: Ranks
    peers: Peers
    leads: bool = True
    nodes: tuple[tuple[str, str], ...] = ()


@contextmanager
def gathered(
    params: Params,
    strategy: StrategyName,
    numerics: NumericsName,
    nodes: Nodes,
    *,
    arguments: Mapping[str, Any],
    data_dir: Path,
    prepare: Callable[[], object],
) -> Iterator[WorldSpec]:
    """The world of a training. Several machines stay connected until the block ends.

    ``arguments`` are the stage's arguments beside ``params``; they must be the same everywhere. ``prepare`` makes
    ``data_dir`` on a machine that lacks it.

    Raises:
        UserError: see ``place``; or the machines differ in what a training is made from.
        HostError: see ``place``; or the machines do not find or reach each other.
        SamebitsError: another machine failed.
    """
    if not nodes.several:
        placement, split = place(strategy, params, numerics, this_machine())
        ranks = Ranks(range(placement.world_size), placement.world_size)
        yield WorldSpec(placement=placement, split=split, ranks=ranks, peers=Peers())
        return
    limit = params.train.timeout_s
    with Rendezvous(nodes, seconds=limit) as rendezvous:
        rendezvous.join()
        if nodes.rank and not (data_dir / "card.json").exists():
            with rendezvous.busy():
                prepare()
        told = {**arguments, "strategy": strategy, "numerics": numerics, "nodes": nodes.count}
        facts = _exchange(rendezvous, node_facts(params, told, data_dir))
        devices = [
            Devices(
                gpus=one.gpus,
                cores=one.cores,
                wanted=one.num_devices,
                name=one.name,
                machine=one.machine,
                uuids=one.uuids[: one.gpus],
            )
            for one in facts
        ]
        placement, split = place(strategy, params, numerics, *devices)
        here = placement.ranks_by_node[nodes.rank]
        gpus = placement.devices[here.start : here.stop] if placement.device_type == "cuda" else ()
        yield WorldSpec(
            placement=placement,
            split=split,
            ranks=Ranks(here, placement.world_size, environment_of(nodes, rendezvous.address)),
            peers=PeerMonitor(rendezvous, [one.name for one in facts], timeout_s=limit, gpus=gpus),
            leads=nodes.rank == 0,
            nodes=tuple((one.name, one.machine) for one in facts),
        )


def _exchange(rendezvous: Rendezvous, here: NodeFacts) -> list[NodeFacts]:
    """Share the facts of all machines; check that the machines are alike and reach each other."""
    facts = [NodeFacts.model_validate(one) for one in rendezvous.share("facts", here.model_dump(mode="json"))]
    require_equal(facts)
    require_reach(rendezvous)
    rendezvous.close_door()
    return facts


def environment_of(nodes: Nodes, address: Address) -> dict[str, str]:
    """The variables by which torchrun tells a worker that the launchers host the process group's store."""
    interface = address.interface()
    return {
        "GROUP_RANK": str(nodes.rank),
        "MASTER_ADDR": address.ip,
        "MASTER_PORT": str(address.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
    }
