"""Ports of this host for servers that tests and tools start."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(10_000, 32_768)
"""Linux gives none of these to a client or to a server that asks for any, so none is taken while one's own starts."""


def free_port() -> int:
    """A port of loopback that nobody listens at now, by chance another one at every call."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
