"""How the workers of one launch find each other. Everything that assumes a single host stands here.

On one host no address is needed: the launcher's agent keeps its state in its own memory, and the process group
meets at a file. The TCP store that PyTorch uses by default looks up a name for ``::ffff:127.0.0.1`` at every
connection, which takes 5 seconds when a name server does not answer, and in the launcher it needs a thread,
beside which no worker can be forked safely.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.launcher.api import LaunchConfig

from samebits.strategies import INIT_METHOD

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

_BACKEND = "samebits-one-host"


class OneHostRendezvous(RendezvousHandler):
    """The rendezvous of an agent that is alone."""

    def get_backend(self) -> str:
        """Return the registered name."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once, with a store in this process's memory; the address in it is never used."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing waits for it."""

    def num_nodes_waiting(self) -> int:
        """No other node exists."""
        return 0

    def get_run_id(self) -> str:
        """Name the launch in messages."""
        return "samebits"

    def shutdown(self) -> bool:
        """Nothing is open."""
        return True


def _handler(_: RendezvousParameters) -> RendezvousHandler:
    return OneHostRendezvous()


def launch_config(workers: int) -> LaunchConfig:
    """So many forked workers on this host, none of which is started again."""
    rendezvous_handler_registry.register(_BACKEND, _handler)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id="samebits",
        rdzv_backend=_BACKEND,
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="fork",
    )


def enter_worker(scratch: Path) -> None:
    """Tell a worker's process group to meet at a file in ``scratch`` and to talk over the loopback interface."""
    os.environ[INIT_METHOD] = f"file://{scratch}/process-group"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
