"""When a training writes checkpoints, and how it goes on from one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from samebits.errors import Interrupted
from samebits.trainer import Training

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.resume import Checkpoints
    from samebits.stopping import StopRequest
    from samebits.trainer import Trainable


class CheckpointKeeper:
    """Checkpoints after every ``every`` steps, 0 for none, and when somebody asks to stop.

    Every rank has one and calls it at the same steps; rank 0 writes.
    """

    def __init__(self, checkpoints: Checkpoints, every: int, stop: StopRequest) -> None:
        self._checkpoints, self._every, self._stop = checkpoints, every, stop
        self._complained = False

    def resume(self, job: Trainable) -> Training | None:
        """Continue from the newest whole checkpoint, which rank 0 chooses."""
        newest = self._checkpoints.newest()
        step = int(job.strategy.maximum([-1 if newest is None else newest])[0])
        self._stop.armed = True
        if step < 0:
            return None
        tensors, record = self._checkpoints.load(step)
        streams = {key: tensors.pop(key) for key in list(tensors) if key.startswith("random.")}
        job.load_state(tensors, record["state"])
        count = len(job.strategy.random_state())
        own = [streams.get(f"random.{job.strategy.rank}.{i}") for i in range(count)]
        if all(stream is not None for stream in own):
            job.strategy.set_random_state([stream for stream in own if stream is not None])
        return Training(record["losses"], record["step_seconds"], record["seconds"], record["resumed"])

    def next_stop(self, step: int) -> int:
        """The next multiple of ``every``."""
        return (step // self._every + 1) * self._every if self._every else sys.maxsize

    def segment_done(self, job: Trainable, so_far: Training) -> None:
        """Ask all ranks whether to stop; write if so, or if a multiple of ``every`` is reached.

        Raises:
            Interrupted: somebody asked to stop.
        """
        signum = int(job.strategy.maximum([self._stop.signum])[0])
        step = len(so_far.losses)
        if signum or (self._every and step % self._every == 0):
            self._save(job, so_far)
        if signum:
            raise Interrupted(signum)

    def training_done(self) -> None:
        """What is left to do is not kept; whoever asks to stop from here on is obeyed at once."""
        self._stop.armed = False

    def delete(self) -> None:
        """The training's files are written: nothing will go on from here."""
        self._checkpoints.delete()

    def _save(self, job: Trainable, so_far: Training) -> None:
        strategy = job.strategy
        tensors, state = job.state()
        for i, stream in enumerate(strategy.random_state()):
            everyone: Tensor = strategy.gather(stream.to(strategy.device))
            tensors |= {f"random.{rank}.{i}": one for rank, one in enumerate(everyone)}
        record = {
            "state": state,
            "losses": so_far.losses,
            "step_seconds": so_far.step_seconds,
            "seconds": so_far.seconds,
            "resumed": so_far.resumed,
        }
        try:
            self._checkpoints.save(len(so_far.losses), tensors, record)
        except OSError as error:
            if not self._complained:
                sys.stderr.write(f"no checkpoint could be written, the training goes on: {error}\n")
            self._complained = True
