"""Node 0's address: name resolution, whether it belongs to this machine, and the network interface that reaches it."""

from __future__ import annotations

import errno
import math
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from samebits.errors import HostError, UserError, few

if TYPE_CHECKING:
    from samebits.host.cluster_environment import Nodes

_RESOLVE_SECONDS = 5.0
_AGAIN_SECONDS = 1.0  # between two lookups of a name that may become known
_WAITING = 4096  # backlog of connections, as in PyTorch's own store
_SAY_SECONDS = 3.0  # of waiting before a message


class Waiting:
    """A wait with one message, printed only if the wait is long."""

    def __init__(self) -> None:
        self._say_at = time.monotonic() + _SAY_SECONDS

    @property
    def due(self) -> bool:
        """Whether the wait is long and nothing was written yet."""
        return time.monotonic() > self._say_at

    def say(self, text: str) -> None:
        """Write a line to stderr if one is due."""
        if self.due:
            self._say_at = math.inf
            sys.stderr.write(f"{text}\n")


@dataclass(frozen=True)
class Address:
    """Node 0's name, its resolved IP address, and its port. Nothing looks the name up again."""

    name: str
    ip: str
    port: int

    @classmethod
    def of(cls, nodes: Nodes) -> Self:
        """Resolve node 0's name, and retry while machines are still starting.

        Raises:
            UserError: the name resolves to the loopback interface, which no other machine reaches.
            HostError: the name is unknown, or no name server answers.
        """
        ip = _resolve(nodes.master, nodes.start_seconds)
        if is_loopback(ip) and not is_loopback(nodes.master):
            hint = "give node 0's address in its network, or correct /etc/hosts there"
            raise UserError(f"{nodes.master} is {ip} on this machine, where no other one reaches it", hint=hint)
        return cls(nodes.master, ip, nodes.port)

    def __str__(self) -> str:
        ip = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{ip}:{self.port}" if self.name == self.ip else f"{self.name} ({ip}:{self.port})"

    def check_mine(self) -> None:
        """Raise HostError if this machine cannot listen here: the address is not its own, or the port is in use."""
        try:
            self.listen().close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                hint = "give another port on every machine, or end what listens there: see ss -ltnp"
                raise HostError(f"port {self.port} is in use on this machine, node 0", hint=hint) from None
            addresses = few([f"{ip} ({name})" for name, ip in interfaces() if not is_loopback(ip)], 4)
            text = f"{self} is no address of this machine, which is node 0: {error.strerror}"
            raise HostError(text, hint=f"it has {addresses}" if addresses else "it has no network") from None

    def listen(self) -> socket.socket:
        """A socket that listens at this address. Raises OSError."""
        listener = socket.socket(socket.AF_INET6 if ":" in self.ip else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.ip, self.port))
            listener.listen(_WAITING)
        except OSError:
            listener.close()
            raise
        return listener

    def interface(self) -> str | None:
        """The network interface with this machine's route to node 0; None if the kernel does not tell."""
        address = _ip_towards(self.ip)
        return next((name for name, ip in interfaces() if ip == address), None)


def own_ip(interface: str | None, towards: str) -> str:
    """This machine's address at an interface; without that interface, the source address ``towards`` an IP."""
    named = (ip for name, ip in interfaces() if name == interface)
    return next(named, None) or _ip_towards(towards) or "127.0.0.1"


def _ip_towards(ip: str) -> str | None:
    """The source address of packets to ``ip``; None if the kernel does not tell."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((ip, 9))  # sends no packet, but selects the route
        return str(probe.getsockname()[0])
    return None


def _resolve(name: str, patience: float) -> str:
    """The IP address of a host: loopback only if it has no other, and IPv4 before IPv6.

    An unknown name is looked up again for ``patience`` seconds.
    """
    deadline, waiting, lookup = time.monotonic() + patience, Waiting(), _Lookup(name)
    while problem := lookup.problem():
        if time.monotonic() >= deadline:
            raise HostError(problem, hint="give its address, or write it into /etc/hosts")
        goes_on = lookup.is_alive()
        waiting.say(f"waiting: {problem}")
        if not goes_on:  # one thread at a time, because workers are forked soon
            time.sleep(_AGAIN_SECONDS)
            lookup = _Lookup(name)
    return lookup.addresses[0]


class _Lookup(threading.Thread):
    """One name lookup, in a thread because the resolver has no time limit of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self._host, self._error = name, ""
        self.addresses: list[str] = []
        self.start()

    def run(self) -> None:
        """Fill ``addresses``, or keep the resolver's error."""
        try:
            answers = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            addresses = [str(answer[4][0]) for answer in answers]
            # A name may have a loopback address too, as the host name in Debian's /etc/hosts.
            self.addresses = sorted(addresses, key=lambda ip: (is_loopback(ip), ":" in ip))
        except OSError as error:
            self._error = str(error.strerror)

    def problem(self) -> str:
        """Why there is no address after some seconds; empty if there is one."""
        self.join(_RESOLVE_SECONDS)
        if self.is_alive():
            return f"no name server answered for {self._host} within {_RESOLVE_SECONDS:g} s"
        return "" if self.addresses else f"{self._host} is no host that this machine knows: {self._error}"


def is_loopback(host: str) -> bool:
    """Whether a host is the loopback interface, by address or by name."""
    return host.startswith("127.") or host in ("::1", "localhost")


def interfaces() -> list[tuple[str, str]]:
    """Name and address of each network interface of this machine; one pair for each address."""
    import psutil  # imported here: a training on one machine does not need it

    internet = {socket.AF_INET, socket.AF_INET6}
    return [
        (name, one.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in internet
    ]
