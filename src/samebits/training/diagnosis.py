"""Finds common mistakes by a trial step before the model is wrapped, and explains PyTorch's errors."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from samebits.errors import (
    CollectiveError,
    HostError,
    NotFiniteError,
    RefusedError,
    SamebitsError,
    UserError,
    WorkerError,
    caused_by,
    few,
    first_line,
    place_of,
)
from samebits.here import of_kit, stage_command, this_stage
from samebits.host.software import OTHER_BUILD
from samebits.models.nested import leaves_of
from samebits.numerics.allocators import is_out_of_memory
from samebits.numerics.graphs import written_in_forward as not_run_again
from samebits.remarks import BatchNorm, IdleParameters
from samebits.strategies import STRATEGIES
from samebits.training.mixing import batch_norms_of, by_shard, mixed_samples
from samebits.training.models.attributes import state, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from samebits.numerics.interface import MicroBatch, Numerics
    from samebits.records.card import Card
    from samebits.remarks import ModelNote
    from samebits.strategies.placement import Placement


def trial_step(
    model: nn.Module,
    numerics: Numerics,
    batch: MicroBatch,
    *,
    card: Card,
    placement: Placement,
    wants_ranks: bool,
    graphs: bool = False,
    synced: bool = False,
    seen: AbstractContextManager[object] | None = None,
) -> list[ModelNote]:
    """Run the unwrapped model forward and backward on one device's share of a batch; return notes.

    The forward pass runs in the block ``seen``. ``wants_ranks``: also refuse what training by several ranks refuses.
    ``graphs``: also refuse what CUDA graphs would not run again. ``synced``: BatchNorm will normalise by the whole
    batch. The caller restores weights, buffers and random streams.

    Raises:
        UserError: the output does not fit the task; a parameter for which ranks would wait gets no gradient; or forward
            writes something, which ``exact`` and CUDA graphs refuse.
    """
    batch = batch.head(placement.rows_per_device)
    rows = batch.rows
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("the model has no parameter that requires a gradient", hint="train at least one parameter")
    ranks = wants_ranks or placement.has_ranks
    waiting = [f"model.{path}" for path, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm)]
    if waiting and ranks and numerics.name == "fast":  # exact refuses its operation
        raise UserError(
            f"{few(waiting)}: SyncBatchNorm waits for the other ranks, and a device is also timed without them",
            hint="use nn.BatchNorm, with train.ddp.sync_batchnorm: true, or nn.GroupNorm",
        )
    before = state(model) if graphs else {}
    module = numerics.module(model)
    with seen or nullcontext():
        outputs = numerics.forward(module, batch)
    buffers = dict(model.named_buffers())  # forward may write them
    if before and (paths := [path for path in written(before, state(model)) if path not in buffers]):
        raise not_run_again(f"model.{path}" for path in paths)
    got = tuple(outputs.shape)
    if numerics.own_loss is None and not (got[:1] == (rows,) and card.fits(got[1:])):
        classes = ("classes",) if card.loss == "cross_entropy" and card.num_classes is None else ()
        expected = (rows, *card.output_shape, *classes)
        raise UserError(
            f"the model returned shape {got} for {rows} samples, expected {expected}",
            hint=_hint_for_shape(got, expected, card),
        )
    numerics.backward(numerics.loss(outputs, batch.targets))
    if sparse := [name for name, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse]:
        raise UserError(f"the gradients of {few(sparse)} are sparse, expected dense ones", hint="give sparse=False")
    notes: list[ModelNote] = []
    shards, over_batch = (numerics.batch_norm == which for which in ("shard", "global"))
    parts = placement.devices_used > 1 or shards
    if parts and not over_batch and not synced and batch_norms_of(model):
        note = BatchNorm(devices=placement.devices_used, strategy=placement.strategy)
        notes.append(by_shard(note, model, numerics, batch) if shards else note)
    if parts or over_batch:
        notes += mixed_samples(model, numerics, batch)
    idle = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        if ranks:
            raise UserError(
                f"no gradient reaches {few(idle)}; ranks, as those of ddp, would wait for it at the next step",
                hint="use it in forward, set its requires_grad to False, or keep to single and dp in train.strategies",
            )
        notes.append(IdleParameters(names=tuple(idle)))
    return notes


def _hint_for_shape(got: tuple[int, ...], expected: tuple[int | str, ...], card: Card) -> str:
    """How to turn one shape into the other."""
    if (*got, 1) == expected:
        return "give each value an axis: outputs.unsqueeze(-1)"
    if len(got) > 2 and (got[0], *got[2:], got[1]) == expected:
        return "classes are the last axis: outputs.movedim(1, -1)"
    if card.loss == "mse":
        return "return the values in the shape of the targets, one row for each sample"
    if got == expected[:-1]:
        return f"return {expected[-1]} outputs, one for each class, in the place of each"
    return "end the model with one output for each class of data/card.json"


def require_same_again(numerics: Numerics, module: nn.Module, batch: MicroBatch) -> dict[int, bytes]:
    """Feed some shards twice, the second time in reverse order and with other threads; return their fingerprints.

    Raises RefusedError: a shard gave other bits.
    """
    first = numerics.fingerprint(module, batch)
    require_alike(first, numerics.fingerprint(module, batch, backwards=True), "the shards come in reverse order")
    numerics.try_together(module, batch, first)
    return first


def require_alike(first: dict[int, bytes], second: dict[int, bytes], when: str) -> None:
    """Raise RefusedError: a shard gave other bits."""
    if unlike := [shard for shard, found in first.items() if second[shard] != found]:
        raise RefusedError(
            f"shard {unlike[0]} gives other bits when {when}: forward depends on more than parameters, samples "
            "and draws",
            hint=f"look for a draw that a cache keeps, see {of_kit('docs/concepts/exact.md')}, or set "
            "train.numerics: [fast]",
        )


def hint_for_nan(*, first: bool) -> str:
    """The hint for a loss that is not finite; at the ``first`` step no learning rate has been applied yet."""
    if first:
        return "look for a division by zero, or a root or logarithm of zero, in forward, or for NaN in a sample"
    return "lower train.optimizer.lr, or set train.clip_grad_norm or a warm-up; or look for NaN in a sample"


def where_not_finite(
    error: NotFiniteError,
    numerics: Numerics,
    module: nn.Module,
    micro_batches: Iterable[MicroBatch],
    largest_of_all: Callable[[torch.Tensor], torch.Tensor],
) -> SamebitsError:
    """The error, with the samples that have infinity or NaN on this rank, or the operations that made it.

    Every rank must call it.
    """
    samples, found, step = list[str](), list[str](), 0
    for batch in micro_batches:
        samples, step = _not_finite_samples(batch), batch.step
        found = samples or numerics.not_finite(module, batch)
        if found:
            break
    device = next(module.parameters()).device
    elsewhere = bool(largest_of_all(torch.tensor(len(found), device=device)))
    if samples:
        what = f"sample {few(samples)} of the batch of step {step + 1}: infinity or NaN"
        return UserError(what, hint="correct the sample, or leave it out")
    if found:
        grows = "if these numbers grow from step to step, lower train.optimizer.lr or set train.clip_grad_norm"
        hint = "keep what it divides by, or takes the root or logarithm of, away from zero"
        return UserError(f"{error.message}: {few(found)}", hint=hint if step == 0 else f"{hint}; {grows}")
    if elsewhere:
        return CollectiveError("another rank has met infinity or NaN", hint="see what it says")
    return error


def _not_finite_samples(batch: MicroBatch) -> list[str]:
    """The numbers in the global batch, from 1, of samples whose inputs or targets have infinity or NaN."""
    wrong = {
        row
        for _, x in leaves_of((batch.inputs, batch.targets))
        if x.is_floating_point()
        for row in (~x.flatten(1).isfinite().all(1) if x.dim() > 1 else ~x.isfinite()).nonzero().flatten().tolist()
    }
    return [str(batch.start + row + 1) for row in sorted(wrong)]


class _Known(NamedTuple):
    """A pattern in PyTorch's error, and our error for it. {0} is the match, {line} the first line of PyTorch's text."""

    pattern: str
    kind: type[SamebitsError]
    message: str
    hint: str


_KNOWN = (
    _Known(
        r"same device"
        r"|Input type \([^)]*cuda[^)]*\) and (weight|bias) type \((?![^)]*cuda)"
        r"|Input type \((?![^)]*cuda)[^)]*\) and (weight|bias) type \([^)]*cuda",
        UserError,
        "the model and its batch are on different devices: {line}",
        "make tensors in forward with device=x.device, and keep constant tensors with register_buffer",
    ),
    _Known(
        r"expected input\[\d+, \d+, \d+, ([134])\] to have \d+ channels",
        UserError,
        "the samples have {0[1]} channels as their last axis, where PyTorch's convolutions take them first: {line}",
        "transpose the file: inputs.transpose(0, 3, 1, 2); or in forward, x.permute(0, 3, 1, 2)",
    ),
    _Known(
        r"scalar types: Long, Int; but got \S+FloatTensor",
        UserError,
        "the model looks up rows by numbers that are no integers: {line}",
        "save tokens as int16 or wider, since bytes are fed as float32; or .long() in forward",
    ),
    _Known(
        r"Target (-?\d+) is out of bounds",
        UserError,
        "a target is the class {0[1]}, for which the model has no output",
        "count classes from 0, and give the model an output for each",
    ),
    _Known(
        r"DataLoader worker \(pid",
        WorkerError,
        "a loading process of the dataset ended: {line}",
        "give it memory, in a container --shm-size too, or lower train.loader.num_workers; 0 loads without one",
    ),
    _Known(
        r"Expected to have finished reduction",
        UserError,
        "a parameter got no gradient at some step, and the ranks wait for it",
        "use every parameter at every step, or set its requires_grad to False",
    ),
    _Known(
        r"modified by an inplace operation|does not require grad and does not have a grad_fn",
        UserError,
        "the model's backward pass failed: {line}",
        "look for an operation in place, or a .detach(), between the parameters and the output",
    ),
    _Known(
        r"Failed to find C compiler|[Nn]o working C\+?\+? compiler|InvalidCxxCompiler",
        HostError,
        "train.compile needs a compiler: {line}",
        "install gcc and g++, or set train.compile: false",
    ),
    _Known(
        r"(\S+) does not have a deterministic implementation",
        UserError,
        "{0[1]} has no deterministic kernel on this device, so the run could not be repeated",
        "replace the operation in the model",
    ),
    _Known(
        r"driver version is insufficient|no kernel image|driver .* too old",
        HostError,
        "this build of torch does not fit the GPU or its driver: {line}",
        f"see `samebits doctor`; install a newer driver, or {OTHER_BUILD}",
    ),
    _Known(
        r"(?s)\A(?!.*[Tt]imed? ?out).*NCCL [Ee]rror",
        WorkerError,
        "NCCL failed: {line}",
        "NCCL_DEBUG=INFO says why; in a container give it shared memory with --shm-size or --ipc=host",
    ),
    _Known(
        r"[Tt]imed? ?out|Connection (closed|reset)|DistBackendError",
        CollectiveError,
        "a rank waited in vain for another: {line}",
        "see which rank failed first; raise train.timeout_s if a step may take that long",
    ),
)
"""The first match from the top counts."""


def explain(error: BaseException, *, placement: Placement, model: nn.Module | None) -> SamebitsError:
    """Turn any error of a worker into one that says what to do."""
    if isinstance(error, SamebitsError):
        return error
    if refusal := caused_by(error, RefusedError):
        return refusal
    text = str(error)
    if is_out_of_memory(error):
        return _out_of_memory(text, placement, model)
    line = first_line(text)
    line = line if len(line) <= 300 else line[:297] + "..."
    if model is not None and re.match(
        rf"{re.escape(type(model).__qualname__)}\.forward\(\) missing \d+ required", text
    ):
        what = f"the model's forward takes more than a sample has inputs: {line}"
        hint = "with data.task: dataset give the inputs as a dictionary of these names; a sample of two has one input"
        return UserError(what, hint=hint)
    for known in _KNOWN:
        if match := re.search(known.pattern, f"{type(error).__name__} {text}"):
            return known.kind(known.message.format(match, line=line), hint=known.hint)
    command = this_stage("--debug") or stage_command("train", "--strategy", placement.strategy, "--debug")
    hint = f"`{command}` shows the traceback"
    if place := place_of(error):
        return UserError(f"{place}: the model or its loss raised {type(error).__name__}: {line}", hint=hint)
    return WorkerError(f"{type(error).__name__}: {line}", hint=hint)


def _out_of_memory(text: str, placement: Placement, model: nn.Module | None) -> HostError:
    weights = sum(p.nbytes for p in model.parameters()) / 2**30 if model is not None else 0.0
    where = "the host's memory"
    if placement.device_type == "cuda":
        named = re.search(r"GPU (\d+)", text)
        device = int(named[1]) if named else placement.devices[0]
        where = f"cuda:{device}"
        with suppress(RuntimeError):  # the CUDA context may be unusable
            free, total = torch.cuda.mem_get_info(device)
            where += f" ({total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free)"
    rows, gathers = placement.rows_per_device, STRATEGIES[placement.strategy].gathers
    return HostError(
        f"out of memory on {where} with {rows} samples per device and a model of {weights:.2f} GiB of weights, as much "
        f"again for gradients and for each optimizer state{', and on the first device all outputs' if gathers else ''}",
        hint="raise train.grad_accum_steps, lower train.global_batch_size, or use precision bf16",
    )
