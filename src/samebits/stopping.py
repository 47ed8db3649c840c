"""Being asked to stop: SIGINT and SIGTERM end a worker at once, or first let it write a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time

GRACE_SECONDS = 10.0  # for the steps that are under way and the checkpoint; the launcher waits 30 s before SIGKILL
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class StopRequest:
    """Waits for signals in a thread, because the main thread may be in a collective that does not return.

    While it is ``armed`` a signal is kept in ``signum``, for the training to see between two segments. Otherwise, and
    when the grace is over, the process ends by the signal. Both signals must have their
    default action.
    """

    def __init__(self) -> None:
        self.armed = False
        self.signum = 0
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # threads that start later inherit it
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self.signum = signal.sigwait(_SIGNALS)
        if self.armed:
            time.sleep(GRACE_SECONDS)  # Ctrl-C comes twice: from the terminal, and from the launcher
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.kill(os.getpid(), self.signum)
