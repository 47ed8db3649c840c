"""Run stage scripts in forks of one process that has imported torch, which saves seconds for each of them.

Each line on stdin is a request ``{"script", "arguments", "folder", "environ"}``; the answer is a line with the exit
code. The script's output goes to ``stdout`` and ``stderr`` in a folder of the request, ``output``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401 - a training in fast numerics would import it, for seconds

import samebits.workers.launch  # noqa: F401

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
import forked


def run(request: dict[str, Any]) -> NoReturn:
    forked.settle(request["folder"], f"{request['output']}/stdout", f"{request['output']}/stderr")
    os.environ.update(request["environ"])
    sys.argv = [request["script"], *request["arguments"]]
    forked.run(partial(runpy.run_path, request["script"], run_name="__main__"))


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
