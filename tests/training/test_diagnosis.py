"""PyTorch's own words for the classic mistakes, as PyTorch raises them, and what becomes of them."""

import math
import runpy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conftest import small
from samebits.errors import CollectiveError, HostError, NotFiniteError, UserError, WorkerError
from samebits.numerics.fast import FastNumerics
from samebits.numerics.interface import MicroBatch
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.remarks import BatchNorm, IdleParameters
from samebits.training import diagnosis
from samples import card, placed

PARAMS = parse_params(
    {
        "data": {"kwargs": {"features": 128}},
        "train": {"num_devices": 2, "oversubscribe": True, "global_batch_size": 256},
    }
)
SINGLE, DP, DDP = (placed(name, PARAMS, gpus=0)[0] for name in ("single", "dp", "ddp"))
DP2, _ = placed("dp", PARAMS, gpus=2)

MESSAGES = [
    (
        RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        UserError, "the model and its batch are on different devices",
    ),
    (
        RuntimeError("Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same"),
        UserError, "the model and its batch are on different devices",
    ),
    (
        RuntimeError("Expected to have finished reduction in the prior iteration.\nMore text"),
        UserError, "a parameter got no gradient at some step",
    ),
    (
        RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_determ"),
        UserError, "cumsum_cuda_kernel has no deterministic kernel on this device",
    ),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried 9"),
        HostError, "out of memory on the host's memory with 128 samples per device and a model of 0.00 GiB",
    ),
    (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"), CollectiveError,
     "a rank waited in vain for another"),
    (
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        HostError, "this build of torch does not fit the GPU or its driver",
    ),
    (
        torch.distributed.DistBackendError("NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_D"),
        WorkerError, "NCCL failed: NCCL error in",
    ),
    (RuntimeError("NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO)"), WorkerError, "NCCL failed: NCCL"),
    (RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete"), CollectiveError, "waited in vain"),
    (RuntimeError("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same"),
     UserError, "on different devices"),
    (RuntimeError("Input type (double) and bias type (float) should be the same"), WorkerError, "RuntimeError: Input"),
    (TypeError("Linear.forward() missing 1 required positional argument: 'input'"), UserError, "takes more than a"),
    (TypeError("Attention.forward() missing 1 required positional argument: 'key'"), WorkerError, "TypeError: Att"),
    (RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation: x"),
     UserError, "the model's backward pass failed: one of"),
    (RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"), UserError, "backward"),
    (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), HostError, "a compiler"),
    (IndexError("Target 7 is out of bounds."), UserError, "a target is the class 7, for which the model has no output"),
    (ZeroDivisionError("division by zero"), WorkerError, "ZeroDivisionError: division by zero"),
    (UserError("own words", hint="h"), UserError, "own words"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "kind", "message"), MESSAGES, ids=[str(case[0])[:30] for case in MESSAGES])
def test_pytorchs_words_become_ours(error, kind, message):
    found = diagnosis.explain(error, placement=DDP, model=nn.Linear(2, 2))
    assert type(found) is kind
    assert message in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    ("got", "expected", "classes", "hint"),
    [
        ((8,), (8, 1), None, "give each value an axis: outputs.unsqueeze(-1)"),
        ((8, 12, 50), (8, 50, 12), 12, "classes are the last axis: outputs.movedim(1, -1)"),
        ((8, 12, 4, 6), (8, 4, 6, 12), 12, "classes are the last axis: outputs.movedim(1, -1)"),
        ((8, 5), (8, 5, 2), 2, "return 2 outputs, one for each class, in the place of each"),
        ((8, 9), (8, 10), 10, "end the model with one output for each class"),
        ((8, 3), (8, 2), None, "return the values in the shape of the targets"),
    ],
)
def test_a_shape_that_does_not_fit_is_told_with_what_makes_it_fit(got, expected, classes, hint):
    made = card(num_classes=classes, loss="cross_entropy" if classes else "mse")
    assert diagnosis._hint_for_shape(got, expected, made).startswith(hint)
    if "movedim" in hint:
        assert torch.zeros(got).movedim(1, -1).shape == expected


@pytest.mark.parametrize(
    ("layer", "shape", "message", "hint"),
    [
        (nn.Embedding(4, 2), (3,), "looks up rows by numbers that are no integers", "int16 or wider"),
        (nn.Conv2d(3, 4, 3), (2, 32, 32, 3), "the samples have 3 channels as their last axis",
         "transpose the file: inputs.transpose(0, 3, 1, 2)"),
    ],
)  # fmt: skip
def test_samples_that_a_layer_does_not_take_are_told_with_what_makes_them_fit(layer, shape, message, hint):
    with pytest.raises(RuntimeError) as caught:
        layer(torch.zeros(shape))
    told = diagnosis.explain(caught.value, placement=SINGLE, model=None)
    assert message in told.message
    assert hint in told.hint


def test_a_device_that_cannot_be_asked_is_named_all_the_same(monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    found = diagnosis.explain(RuntimeError("CUDA error: out of memory"), placement=DP2, model=None)
    assert str(found).startswith("out of memory on cuda:0 with 128 samples per device and a model of 0.00 GiB")


def test_out_of_memory_says_what_fills_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30 // 2, 80 * 2**30))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total")
    model = nn.Linear(2**14, 2**14, bias=False, device="meta")
    found = diagnosis.explain(error, placement=DP2, model=model)
    assert str(found) == (
        "out of memory on cuda:1 (80.0 GiB, 0.5 GiB free) with 128 samples per device and a model of 1.00 GiB of "
        "weights, as much again for gradients and for each optimizer state, and on the first device all outputs. "
        "hint: raise train.grad_accum_steps, lower train.global_batch_size, or use precision bf16"
    )


@pytest.fixture
def trial(data_dir):
    params = parse_params(small())
    card = read_card(data_dir(params) / "card.json")
    numerics = FastNumerics(params.train, torch.device("cpu"), card.loss)

    def run(model, placement, **asked):
        rows, asked = placement.rows_per_device, {"wants_ranks": False, "graphs": False, **asked}
        batch = MicroBatch(torch.randn(rows, 128), torch.zeros(rows, dtype=torch.int64), 0)
        return diagnosis.trial_step(model, numerics, batch, card=card, placement=placement, **asked)

    return run


def idle():
    model = nn.Linear(128, 10)
    model.spare = nn.Linear(2, 2)
    return model


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, x):
        return self.table(x.argmax(1)) + x[:, :2]


BATCH_NORM = nn.Sequential(nn.Linear(128, 10), nn.BatchNorm1d(10))


@pytest.mark.parametrize(
    ("model", "placement", "notes"),
    [
        (nn.Linear(128, 10), DDP, []),
        (BATCH_NORM, SINGLE, []),
        (BATCH_NORM, DDP, [BatchNorm(devices=2, strategy="ddp")]),
        (BATCH_NORM, DP, []),  # a fallback: one device
        (BATCH_NORM, DP2, [BatchNorm(devices=2, strategy="dp")]),
        (idle(), SINGLE, [IdleParameters(names=("spare.weight", "spare.bias"))]),
    ],
)
def test_notes(model, placement, notes, trial):
    assert trial(model, placement) == notes


def test_a_batch_norm_over_the_whole_batch_needs_no_note(trial):
    assert trial(BATCH_NORM, DDP, synced=True) == []


@pytest.mark.parametrize(
    ("model", "placement", "message"),
    [
        (idle(), DDP, "no gradient reaches spare.weight, spare.bias; ranks, as those of ddp, would wait"),
        (nn.Linear(128, 9), SINGLE, r"the model returned shape \(256, 9\) for 256 samples, expected \(256, 10\)"),
        (nn.Linear(128, 10).requires_grad_(False), SINGLE, "no parameter that requires a gradient"),
        (nn.Sequential(nn.Linear(128, 10), nn.Flatten(0)), SINGLE, r"returned shape \(2560,\)"),
        (nn.Sequential(nn.Linear(128, 10), nn.SyncBatchNorm(10)), DDP,
         r"model\.1: SyncBatchNorm waits for the other ranks, and a device is also timed without them"),
        (nn.LSTM(128, 10), SINGLE, "the model returned tuple, expected a tensor or an object with a tensor .logits"),
        (nn.Sequential(nn.Linear(128, 4), Looks(), nn.Linear(2, 10)), SINGLE,
         r"the gradients of 1\.table\.weight are sparse"),
    ],
)  # fmt: skip
def test_refusals(model, placement, message, trial):
    with pytest.raises(UserError, match=message):
        trial(model, placement)


def test_what_ddp_would_refuse_is_refused_before_single_trains(trial):
    with pytest.raises(UserError, match=r"keep to single and dp in train\.strategies"):
        trial(idle(), SINGLE, wants_ranks=True)


class Counts(nn.Linear):
    """Writes an attribute, which a graph would not, or a buffer in place, which it does."""

    def __init__(self, *, in_place):
        super().__init__(128, 10)
        self.in_place, self.calls = in_place, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.in_place:
            self.seen += 1
        else:
            self.calls += 1
        return super().forward(x)


def test_what_a_cuda_graph_would_not_run_again_is_named(trial):
    trial(Counts(in_place=False), SINGLE)
    trial(Counts(in_place=True), SINGLE, graphs=True)
    with pytest.raises(UserError, match=r"^train\.cuda_graphs: model\.calls: written in forward"):
        trial(Counts(in_place=False), SINGLE, graphs=True)


def test_a_mistake_in_the_models_code_is_found_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("def forward(x):\n    return x @ x\n")
    space = runpy.run_path(str(tmp_path / "net.py"))
    with pytest.raises(RuntimeError) as caught:
        space["forward"](torch.ones(2, 3))
    arguments = ["--strategy", "ddp", "--numerics", "exact", "--params", "my params.yaml"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/samebits", "stage", "train", *arguments])
    found = diagnosis.explain(caught.value, placement=DDP, model=None)
    assert type(found) is UserError
    assert str(found).startswith(
        "net.py:2: the model or its loss raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )
    again = "--strategy ddp --numerics exact --params 'my params.yaml' --debug` shows the traceback"
    assert f"`samebits stage train {again}" in str(found)
    for argv, hint in (
        (["/the/kit/pipeline/train.py", *arguments], f"`samebits stage train {again}"),
        (["/somewhere/samebits", "doctor"], "`samebits stage train --strategy ddp --debug` shows the traceback"),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert hint in str(diagnosis.explain(caught.value, placement=DDP, model=None))


def test_samples_that_are_not_finite_are_named_before_what_comes_of_them():
    inputs = {"x": torch.zeros(4, 2, 2), "mask": torch.ones(4, 2, dtype=torch.bool)}
    inputs["x"][1, 0, 1], targets = math.nan, torch.zeros(4)
    targets[3] = -math.inf
    batches = [MicroBatch({"x": torch.zeros(4, 2)}, torch.zeros(4), 6), MicroBatch(inputs, targets, 6, start=8)]
    numerics = SimpleNamespace(not_finite=lambda module, batch: [])
    found = diagnosis.where_not_finite(NotFiniteError("x", hint=""), numerics, nn.Linear(1, 1), batches, lambda x: x)
    assert str(found).startswith("sample 10, 12 of the batch of step 7: infinity or NaN. hint: correct")
    assert isinstance(found, UserError)
    for elsewhere, kind in ((1, CollectiveError), (0, NotFiniteError)):  # the rank that has met it says where
        told = partial(torch.add, other=elsewhere)
        found = diagnosis.where_not_finite(NotFiniteError("x", hint=""), numerics, nn.Linear(1, 1), batches[:1], told)
        assert type(found) is kind
