"""Run stage scripts in forks of one process that has imported torch, which saves seconds for each of them.

Each line on stdin is a request ``{"script", "arguments", "folder", "environ"}``; the answer is a line with the exit
code. The script's output goes to ``stdout`` and ``stderr`` in a folder of the request, ``output``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401 - a training in fast numerics would import it, for seconds

import samebits.evaluation
import samebits.launch  # noqa: F401


def run(request: dict[str, Any]) -> NoReturn:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{request['output']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    os.environ.update(request["environ"])
    sys.argv = [request["script"], *request["arguments"]]
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what a fresh interpreter would print and end with
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
