"""Run operations of PyTorch's test database on three shards at once, on each alone, and by a replay of other numbers.

    python tests/numerics/together_probe.py [NAME ...] > out.json

For each operation: how many samples had the ``same`` bits, how many ran ``apart`` alone, and what differed in how many;
how many were ``recorded`` over all shards, and whose ``replay`` had other bits than the passes themselves.
"""

import json
import sys
import warnings
from collections import Counter
from itertools import chain

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from operations_probe import NO_MODE, UNINITIALISED, all_samples, name_of, tensors
from samebits.numerics.exact.batch_norm import ShardNorms
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.recorders import StoppedError
from samebits.numerics.exact.traces import Traces

SCALES = (1.0, 0.5, 8.0)  # of the shards' numbers, so that a grid of all would show
SAMPLES = {torch.float32: 6}


def bits(x):
    plain = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return str(x.dtype), tuple(x.shape), plain.flatten().view(torch.uint8).numpy().tobytes()


def shards_of(x):
    return [(x.detach() * scale).to(x.dtype) if x.is_floating_point() else x.detach().clone() for scale in SCALES]


def made_by(function, inputs, draws, *, at_once, defer=None):
    """Results, and gradients of the inputs that are trained."""
    engine = Engine(draws, defer=defer)

    def forward(*inputs):
        with OneForm(engine, ShardNorms(nn.Module(), engine), together=torch.empty(0) if at_once else None):
            return function(*inputs)

    with engine:
        run = torch.func.vmap(forward, randomness="different") if at_once else forward
        results = run(*inputs)
    wanted = [t for t in results if t.is_floating_point() and t.requires_grad]
    sources, grads = [t for t in inputs if t.requires_grad], []
    if wanted and sources:
        shapes = [t.shape[1:] if at_once else t.shape for t in wanted]
        slopes = [(torch.arange(shape.numel()) % 7 + 1).to(torch.float32).div(8).view(shape) for shape in shapes]
        slopes = [one.to(t.dtype).expand(t.shape) for one, t in zip(slopes, wanted, strict=True)]
        with Engine(defer=defer):
            grads = torch.autograd.grad(wanted, sources, slopes, allow_unused=True)
    return results, grads


def both_passes(function, inputs, draws, *, at_once):
    """Bits of results and gradients; with ``at_once`` those of each shard."""
    results, grads = made_by(function, inputs, draws, at_once=at_once)
    if not at_once:
        return [bits(t) for t in results], [None if g is None else bits(g) for g in grads]
    return [
        ([bits(t[shard]) for t in results], [None if g is None else bits(g[shard]) for g in grads])
        for shard in range(len(SCALES))
    ]


def replayed(function, inputs, draws):
    """Bits as of ``both_passes`` for all shards, by a recording that was made with the shards in reverse order."""
    kept = [x.detach().flip(0).requires_grad_(x.requires_grad) for x in inputs]
    made = []

    def run():
        results, grads = made_by(function, kept, draws, at_once=True, defer=lambda *_: None)
        made.extend([results, grads])
        return []

    _, replay = Traces().record(run)
    with torch.no_grad():
        for to, x in zip(kept, inputs, strict=True):
            to.copy_(x)
    replay()
    results, grads = made
    return [
        ([bits(t[shard]) for t in results], [None if g is None else bits(g[shard]) for g in grads])
        for shard in range(len(SCALES))
    ]


def compared(op, sample, number):
    """What was found of a sample."""
    flat, form = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    if not places:
        return ["apart"]

    def function(*inputs):
        leaves = list(flat)
        for place, tensor in zip(places, inputs, strict=True):
            leaves[place] = tensor
        first, args, kwargs = tree_unflatten(leaves, form)
        return tuple(tensors(op(first, *args, **kwargs)))

    shards = [shards_of(flat[place]) for place in places]
    trained = [flat[place].requires_grad for place in places]
    try:
        alone = []
        for shard, inputs in enumerate(zip(*shards, strict=True)):
            inputs = [x.requires_grad_(train) for x, train in zip(inputs, trained, strict=True)]
            alone.append(both_passes(function, inputs, Draws(0, number, [shard]), at_once=False))
    except Exception:  # noqa: BLE001 - refused, or PyTorch's own
        return ["refused"]
    stacked = [torch.stack(parts).detach().requires_grad_(train) for parts, train in zip(shards, trained, strict=True)]
    try:
        at_once = both_passes(function, stacked, Draws(0, number, range(len(SCALES))), at_once=True)
    except Exception:  # noqa: BLE001 - then shards run one by one
        return ["apart"]
    found = ["same" if at_once == alone else "gradients"]
    if [results for results, _ in at_once] != [results for results, _ in alone]:
        found = ["results"]
    try:
        again = replayed(function, stacked, Draws(0, number, range(len(SCALES))))
    except (RuntimeError, StoppedError):  # it cannot be recorded, or answers otherwise: the model's own pass runs
        return found
    return [*found, "recorded" if again == at_once else "replay"]


def main():
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = {}
    for op in op_db:
        if name_of(op) in NO_MODE or UNINITIALISED in op.name or (sys.argv[1:] and op.name not in sys.argv[1:]):
            continue
        samples = enumerate(all_samples(op, SAMPLES))
        out[name_of(op)] = Counter(chain.from_iterable(compared(op, sample, number) for number, sample in samples))
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
