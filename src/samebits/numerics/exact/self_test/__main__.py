"""Run the self-test of ``exact`` on the CPU and each visible GPU, and print each case with its time.

    python -m samebits.numerics.exact.self_test [DEVICE ...]

The exit code is 3 if a case fails. Not tested are sums over ranks: a training tests those.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING

from samebits.numerics.environment import prepare_environment

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    """Print a line for each case on each device; return the exit code."""
    prepare_environment()
    import torch

    from samebits.errors import HostError
    from samebits.numerics.exact.self_test.cases import CASES
    from samebits.numerics.exact.self_test.check import arrives, wrong_cases

    def passes(device: torch.device, name: str) -> bool:
        return not wrong_cases(device, [name])

    def line(name: str, test: Callable[..., bool], *arguments: object) -> bool:
        started = time.perf_counter()
        held = test(*arguments)
        milliseconds = 1e3 * (time.perf_counter() - started)
        sys.stdout.write(f"{'ok' if held else 'failed':<8} {milliseconds:8.1f} ms  {name}\n")
        return held

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    devices = [torch.device(name) for name in sys.argv[1:] or ["cpu", *gpus]]
    held = []
    for device in devices:
        sys.stdout.write(f"{device}\n")
        torch.zeros(1, device=device)  # starts CUDA, which no case should be blamed for
        started = time.perf_counter()
        held += [line(name, passes, device, name) for name in CASES]
        sys.stdout.write(f"{len(CASES)} cases: {1e3 * (time.perf_counter() - started):.0f} ms\n")
    for source, target in itertools.permutations([device for device in devices if device.type == "cuda"], 2):
        held.append(line(f"a copy from {source} to {target}", arrives, source, target))
    return 0 if all(held) else HostError.exit_code


if __name__ == "__main__":
    sys.exit(main())
