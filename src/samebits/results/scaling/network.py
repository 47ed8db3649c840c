"""The network between hosts, as a user writes it: ``400Gb/s,5us``."""

from __future__ import annotations

import re

from samebits.errors import UserError
from samebits.files import Part

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_BANDWIDTH = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<prefix>[kKMGT]?)(?P<unit>bit|b|B)(?:/s|ps)")
_LATENCY = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<unit>ns|us|µs|ms|s)")
EXAMPLE = "400Gb/s,5us"


class Network(Part):
    """Bandwidth of each device's link in each direction, and latency of a message."""

    text: str
    bytes_per_second: float
    latency_seconds: float


def parse_network(text: str) -> Network:
    """Read a bandwidth and a latency, such as ``400Gb/s,5us`` or ``12.5GB/s, 20 us``.

    Units are b (bits) or B (bytes) per second with k, M, G or T for powers of 1000, and ns, us, ms or s.

    Raises:
        UserError: the text is something else, or the bandwidth is 0.
    """
    first, comma, second = (part.strip() for part in text.partition(","))
    if not comma:
        raise _refused(
            text, "a bandwidth, a comma and a latency", f"such as {EXAMPLE}; 0us where latency costs nothing"
        )
    bandwidth, latency = _BANDWIDTH.fullmatch(first), _LATENCY.fullmatch(second)
    if bandwidth is None:
        raise _refused(first, "a bandwidth such as 400Gb/s", "b is bits and B is bytes, with k, M, G or T before it")
    if latency is None:
        raise _refused(second, "a latency such as 5us", "its unit is ns, us, ms or s")
    bits = 8 if bandwidth["unit"] == "B" else 1
    speed = float(bandwidth["number"]) * _PREFIXES[bandwidth["prefix"]] * bits / 8
    if not 0 < speed < 1e18:
        raise _refused(first, "a bandwidth above 0", "such as 400Gb/s")
    seconds = float(latency["number"]) * _SECONDS[latency["unit"]]
    if not seconds < 1e6:
        raise _refused(second, "a latency below 1000000 s", "such as 5us")
    return Network(text=f"{first},{second}".replace(" ", ""), bytes_per_second=speed, latency_seconds=seconds)


def _refused(got: str, accepts: str, hint: str) -> UserError:
    return UserError(f"--network: got {got!r}, expected {accepts}", hint=hint)
