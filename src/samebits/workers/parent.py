"""Ends a forked process together with its parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os

_PR_SET_PDEATHSIG = 1


def end_with_parent(signum: int) -> None:
    """Have the kernel send this process a signal when its parent ends, at once if the parent has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os.kill(os.getpid(), signum)
