"""The machines of one training: their number, the rank of this one, and the address of node 0.

They come from options of stage train, from torchrun's variables, or from Slurm's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from samebits.errors import UserError
from samebits.host.variables import START_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PORT = 29500  # torchrun's default
_ALL_DEVICES = {"auto", "cpu", "gpu", "cuda"}  # torchrun's values for all devices


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines ("nodes") of a training: this is node ``rank`` of ``count``, and ``master`` is node 0's address.

    ``num_devices`` is the setting for this node; None means that of the parameters. ``served``: torchrun's agent
    already runs the store at that port. Within ``start_seconds`` the others may not have started, and node 0's name may
    be unknown.
    """

    count: int = 1
    rank: int = 0
    master: str = ""
    port: int = DEFAULT_PORT
    num_devices: str | None = None
    served: bool = False
    start_seconds: int = 0

    @property
    def several(self) -> bool:
        """Whether there is more than one node."""
        return self.count > 1

    def environ(self) -> dict[str, str]:
        """These nodes as torchrun's variables, for a container without Slurm's commands."""
        values = {
            "PET_NNODES": self.count,
            "PET_NODE_RANK": self.rank,
            "PET_MASTER_ADDR": self.master,
            "PET_MASTER_PORT": self.port,
            "PET_NPROC_PER_NODE": self.num_devices,
            START_SECONDS: self.start_seconds or None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def find_nodes(
    count: int | None = None,
    rank: int | None = None,
    master: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> Nodes:
    """The nodes from the options, else from torchrun's variables, else from a Slurm step.

    ``master`` is a host name or an address, and may end in ``:PORT``.

    Raises:
        UserError: a number is missing or out of range, or one machine has several processes.
    """
    nodes = _find(count, rank, master, environ)
    return replace(nodes, start_seconds=_number(environ, START_SECONDS, "0")) if nodes.several else nodes


def _find(count: int | None, rank: int | None, master: str | None, environ: Mapping[str, str]) -> Nodes:
    if (count, rank, master) != (None, None, None):
        return _from_options(count, rank, master)
    if environ.get("TORCHELASTIC_RUN_ID"):
        return _from_agent(environ)
    if "PET_NNODES" in environ:
        return _from_torchrun(environ)
    if "SLURM_STEP_ID" in environ and "SLURM_STEP_NUM_NODES" in environ:
        return _from_slurm(environ)
    return Nodes()


def _from_options(count: int | None, rank: int | None, master: str | None) -> Nodes:
    if count is None or rank is None or (master is None and count > 1):
        hint = "as in --nodes 2 --node-rank 0 --master 10.0.0.1, with the same --nodes and --master on each machine"
        raise UserError("--nodes, --node-rank and --master are given together or not at all", hint=hint)
    host, port = _host_and_port(master or "", "--master")
    return _validated(Nodes(count=count, rank=rank, master=host, port=port), "--nodes", "--node-rank", "--master")


def _from_agent(environ: Mapping[str, str]) -> Nodes:
    """From the variables of torchrun's workers. There must be one worker on each machine."""
    number = _number(environ, "LOCAL_WORLD_SIZE", "1")
    if number > 1:
        raise UserError(
            f"torchrun started {number} processes on this machine, and stage train starts its workers itself",
            hint="torchrun --nproc-per-node=1, with the devices of each machine as --num-devices",
        )
    nodes = Nodes(
        count=_number(environ, "GROUP_WORLD_SIZE", "1"),
        rank=_number(environ, "GROUP_RANK", "0"),
        master=environ.get("MASTER_ADDR", ""),
        port=_number(environ, "MASTER_PORT", str(DEFAULT_PORT)),
        served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    return _validated(nodes, "GROUP_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def _from_torchrun(environ: Mapping[str, str]) -> Nodes:
    """From the variables that torchrun's command line reads."""
    low, _, high = environ["PET_NNODES"].partition(":")
    if high not in ("", low):
        raise UserError(
            f"PET_NNODES: got {environ['PET_NNODES']}, accepts one number: the machines of a training do not change",
            hint="a training that was stopped goes on with another number of machines in exact",
        )
    devices = environ.get("PET_NPROC_PER_NODE")
    nodes = Nodes(
        count=_number({"PET_NNODES": low}, "PET_NNODES"),
        rank=_number(environ, "PET_NODE_RANK", "0"),
        master=environ.get("PET_MASTER_ADDR", ""),
        port=_number(environ, "PET_MASTER_PORT", str(DEFAULT_PORT)),
        num_devices="auto" if devices in _ALL_DEVICES else devices,
    )
    return _validated(nodes, "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")


def _from_slurm(environ: Mapping[str, str]) -> Nodes:
    """From the Slurm step. The allocation may have more nodes, and a batch script runs outside of any step."""
    count = _number(environ, "SLURM_STEP_NUM_NODES")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", str(count))
    if tasks != count:
        raise UserError(
            f"srun started {tasks} tasks on {count} machines, and stage train starts its workers itself",
            hint="srun --ntasks-per-node=1, with the devices of each machine as --num-devices",
        )
    if count == 1:
        return Nodes()
    nodes = Nodes(
        count=count,
        rank=_number(environ, "SLURM_NODEID"),
        master=environ.get("PET_MASTER_ADDR") or _first_host(environ["SLURM_STEP_NODELIST"]),
        # One port for each job, below the kernel's ephemeral ports.
        port=_number(environ, "PET_MASTER_PORT", str(20000 + _number(environ, "SLURM_JOB_ID", "0") % 10000)),
    )
    return _validated(nodes, "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST")


def _first_host(names: str) -> str:
    """The first host of a Slurm list, such as ``rack[1-2]n[01-18],login``.

    ``scontrol show hostnames`` prints it too, but images lack that command.
    """
    whole = re.match(r"(?:[^\[\],]|\[[^\]]*\])*", names)
    assert whole, "a match may be empty"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", whole[0])


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None or not re.fullmatch(r"\d{1,9}", text):
        raise UserError(f"{name}: got {text}, expected a number", hint="set it on each machine")
    return int(text)


def _host_and_port(master: str, name: str) -> tuple[str, int]:
    """Parse ``host``, ``host:port``, ``[v6 address]:port`` or a bare IPv6 address."""
    if match := re.fullmatch(r"\[(.+)\](?::(\d{1,5}))?|([^:]*):(\d{1,5})", master):
        host, port = match[1] or match[3], int(match[2] or match[4] or DEFAULT_PORT)
    else:
        host, port = master, DEFAULT_PORT
    if not host and master:
        raise UserError(f"{name}: got {master}, expected a host", hint="as in 10.0.0.1 or node0:29500")
    return host, port


def _validated(nodes: Nodes, count: str, rank: str, master: str) -> Nodes:
    """The same nodes if they are valid. Errors name the variables or options ``count``, ``rank`` and ``master``."""
    if nodes.count < 1:
        raise UserError(f"{count}: got {nodes.count}, accepts 1 or more", hint="count the machines")
    if not 0 <= nodes.rank < nodes.count:
        raise UserError(
            f"{rank}: got {nodes.rank}, accepts 0 to {nodes.count - 1}",
            hint="number the machines from 0; the one with the master's address is 0",
        )
    if nodes.several and not nodes.master:
        raise UserError(f"{master} is not set, and there are {nodes.count} machines", hint="name node 0's address")
    if not 0 < nodes.port < 2**16:
        raise UserError(f"the port of {master}: got {nodes.port}, accepts 1 to 65535", hint="29500 is torchrun's")
    return nodes
