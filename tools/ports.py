"""Ports of this host for servers that tests and tools start."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(10_000, 32_768)
"""Linux gives none of these to a client, or to a server that asks for any port. So a free one stays free."""


def free_port() -> int:
    """A random port of loopback at which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
