"""Run a command as if on a host with GPUs, which a stand-in for NVML simulates.

    PYTHONPATH=tools python -m nvml A make test

``A`` to ``F`` are the hosts of ``tools/nvml/hosts``. torch's version file names CUDA.
"""

import os
import sys
import tempfile
from pathlib import Path

import nvml


def main() -> None:
    """Replace this process by the command."""
    if len(sys.argv) < 3 or sys.argv[1] not in nvml.HOSTS:
        sys.exit(f"usage: python -m nvml {{{','.join(nvml.HOSTS)}}} COMMAND...")
    host, *command = sys.argv[1:]
    library = nvml.build(Path(tempfile.mkdtemp(prefix="nvml-")))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.execvpe(command[0], command, {**os.environ, **nvml.environ(library, nvml.HOSTS[host])})  # noqa: S606


if __name__ == "__main__":
    main()
