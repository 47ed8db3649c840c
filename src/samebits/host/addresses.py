"""Node 0's address: what its name stands for, whether it is this machine's, and by which interface it is reached."""

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
_AGAIN_SECONDS = 1.0  # until a name is looked up again that may come to be known
_WAITING = 4096  # connections that nobody has taken up yet, as PyTorch's own store lets wait
_SAY_SECONDS = 3.0  # of waiting, before a line says for whom


class Waiting:
    """A wait that is said once, if it is long."""

    def __init__(self) -> None:
        self._say_at = time.monotonic() + _SAY_SECONDS

    def say(self, text: str) -> None:
        """Write a line to stderr, when it is time."""
        if time.monotonic() > self._say_at:
            self._say_at = math.inf
            sys.stderr.write(f"{text}\n")


@dataclass(frozen=True)
class Address:
    """Where node 0 is: as a number, at which no name is looked up any more, and a port."""

    name: str
    ip: str
    port: int

    @classmethod
    def of(cls, nodes: Nodes) -> Self:
        """Look up node 0's address, again and again while machines are still on their way.

        Raises:
            UserError: the name is that of each machine's own loopback interface.
            HostError: the name is not known, or no name server answers.
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
        """Raise HostError unless node 0 can listen there: it is no address of this machine, or the port is in use."""
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
        """A socket that listens there. Raises OSError."""
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
        """This machine's network interface towards node 0; None if the kernel does not say."""
        address = _ip_towards(self.ip)
        return next((name for name, ip in interfaces() if ip == address), None)


def own_ip(interface: str | None, towards: str) -> str:
    """This machine's address at an interface; without one of that name, that from which it reaches another address."""
    named = (ip for name, ip in interfaces() if name == interface)
    return next(named, None) or _ip_towards(towards) or "127.0.0.1"


def _ip_towards(ip: str) -> str | None:
    """The address from which this machine reaches another; None if the kernel does not say."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((ip, 9))  # sends nothing, but chooses the route
        return str(probe.getsockname()[0])
    return None


def _resolve(name: str, patience: float) -> str:
    """The address of a host: not its loopback if it has another, and IPv4 before IPv6.

    A name that is not known is looked up again for so many seconds.
    """
    deadline, waiting = time.monotonic() + patience, Waiting()
    while True:
        lookup = _Lookup(name)
        problem = lookup.problem()
        while problem and lookup.is_alive() and time.monotonic() < deadline:  # one at a time: workers are forked soon
            waiting.say(f"waiting: {problem}")
            problem = lookup.problem()
        if not problem:
            return lookup.addresses[0]
        if time.monotonic() >= deadline:
            raise HostError(problem, hint="give its address, or write it into /etc/hosts")
        waiting.say(f"waiting: {problem}")
        time.sleep(_AGAIN_SECONDS)


class _Lookup(threading.Thread):
    """One look at the name servers, in a thread because the resolver has no time limit of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self._host, self._error = name, ""
        self.addresses: list[str] = []
        self.start()

    def run(self) -> None:
        """Ask the resolver, and keep its addresses in ``addresses``, or why there are none."""
        try:
            answers = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            addresses = [str(answer[4][0]) for answer in answers]
            # A name may also stand for a loopback address, as Debian's own in /etc/hosts.
            self.addresses = sorted(addresses, key=lambda ip: (is_loopback(ip), ":" in ip))
        except OSError as error:
            self._error = str(error.strerror)

    def problem(self) -> str:
        """Why there is no address, after a while; nothing where there is one."""
        self.join(_RESOLVE_SECONDS)
        if self.is_alive():
            return f"no name server answered for {self._host} within {_RESOLVE_SECONDS:g} s"
        return "" if self.addresses else f"{self._host} is no host that this machine knows: {self._error}"


def is_loopback(host: str) -> bool:
    """Whether an address is one of each machine's own, or stands for that by name."""
    return host.startswith("127.") or host in ("::1", "localhost")


def interfaces() -> list[tuple[str, str]]:
    """The network interfaces of this machine with each of their addresses."""
    import psutil  # here, because one machine alone asks for none

    internet = {socket.AF_INET, socket.AF_INET6}
    return [
        (name, one.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in internet
    ]
