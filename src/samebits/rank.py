"""One rank of a job in its process: what it feeds, how it runs and fails, and what the launcher learns of that."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from typing import TYPE_CHECKING, Protocol

from samebits import diagnosis
from samebits.data.batches import Batches, rank_parts
from samebits.errors import Interrupted, SamebitsError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from samebits.data.batches import Batch
    from samebits.data.card import Card
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.placement import Placement
    from samebits.strategies import Strategy


def batches_of(params: Params, numerics: NumericsName, data: Batch, card: Card, strategy: Strategy) -> Batches:
    """What one rank feeds from ``data``."""
    train = params.train
    layout = rank_parts(
        train.global_batch_size,
        params.shards(numerics),
        accum=train.grad_accum_steps,
        rank=strategy.rank,
        ranks=strategy.world_size,
    )
    samples, device = train.global_batch_size, strategy.device
    return Batches(data, card, seed=params.seed, global_batch_size=samples, layout=layout, device=device)


class Rank(Protocol):
    """What one worker process does; ``model`` is None until it is built."""

    strategy: Strategy
    model: nn.Module | None

    def run(self) -> None:
        """Do it."""
        ...


def run_rank(make: Callable[[], Rank], placement: Placement, scratch: Path) -> None:
    """Run one rank; a failure is left in ``scratch`` as plain data, and the process ends with its exit code."""
    rank: Rank | None = None
    try:
        rank = make()
        rank.run()
        # The wrapper must be gone before the process group: freed by the wrapper's destructor, which keeps
        # Python's lock, the group would wait for ever for threads of its own that need the lock.
        gc.collect()
        rank.strategy.close()
    except Interrupted as error:
        raise SystemExit(error.exit_code) from None
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher must learn of it
        found = diagnosis.explain(error, placement=placement, model=rank.model if rank else None)
        report_failure(found, scratch)
        if isinstance(found, WorkerError):
            time.sleep(1)  # a rank that failed for want of another lets the launcher see that one first
        raise SystemExit(found.exit_code) from None


def report_failure(error: SamebitsError, scratch: Path) -> None:
    """Leave an error for the launcher."""
    rank = os.environ.get("RANK", "0")
    report = {
        "time": time.time(),
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
        "traceback": traceback.format_exc(),
    }
    (scratch / f"rank{rank}.json").write_text(json.dumps(report), encoding="utf-8")
