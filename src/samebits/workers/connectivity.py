"""Checks that machines reach each other at ports that the kernel chooses, as workers do. A firewall may block them."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from samebits.errors import HostError
from samebits.host.addresses import own_ip

if TYPE_CHECKING:
    from samebits.workers.rendezvous import Rendezvous

OPEN_PORTS = "open all ports among the machines; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
"""Hint where they do not."""

_SECONDS = 5.0  # time for a machine to answer


def require_reach(rendezvous: Rendezvous) -> None:
    """Have every machine connect to a port of every other. All must call it.

    Without this check, workers would wait for each other for minutes without saying why.

    Raises:
        HostError: one machine does not reach another; all machines raise it.
        SamebitsError: another machine failed meanwhile.
    """
    source = own_ip(os.environ.get("GLOO_SOCKET_IFNAME") or rendezvous.address.interface(), rendezvous.address.ip)
    with open_port(source) as server:
        places = rendezvous.share("place", [source, server.getsockname()[1]])
        others = [place for node, place in enumerate(places) if node != rendezvous.nodes.rank]
        unreached = next((why for ip, port in others if (why := knock(source, ip, port))), "")
        problems = rendezvous.share("problem", unreached)
    if problem := next(filter(None, problems), ""):
        raise HostError(problem, hint=OPEN_PORTS)


def open_port(ip: str) -> socket.socket:
    """A listening socket at an address of this machine, with a port that the kernel chooses."""
    return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=128)


def knock(source: str, ip: str, port: int) -> str:
    """Connect from ``source`` to a port of another machine; return why that fails, empty if it does not."""
    try:
        socket.create_connection((ip, port), timeout=_SECONDS).close()
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else str(error.strerror).lower()
        return f"{source} does not reach port {port} of {ip}: {why}"
    return ""
