"""What becomes a CUDA graph and what is refused, with stand-ins for PyTorch's capture, on a CPU."""

import random
import runpy
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from samebits.errors import UserError
from samebits.numerics.fast import FastNumerics
from samebits.numerics.graphs import capture
from samebits.params.schema import Train


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({}, "cuda", None),
        ({"precision": "fp16"}, "cuda", None),  # the scaler works on what comes out of the graphs
        ({}, "cpu", "graphs_on_cpu"),
        ({"compile": True}, "cuda", "graphs_with_compile"),
        ({"grad_accum_steps": 2}, "cuda", "graphs_with_accumulation"),
        ({"ddp": {"sync_batchnorm": True}}, "cuda", "graphs_with_sync"),
    ],
)
def test_where_graphs_are_made(settings, device, reason):
    assert Train(cuda_graphs=True, **settings).why_no_graphs(device) == reason
    if device == "cpu":
        assert not FastNumerics(Train(cuda_graphs=True), torch.device(device), "mse").graphs


class Normed(nn.Module):
    """Its outputs depend on a buffer that each forward changes in place, and on numbers that the device draws."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.drop(self.norm(self.linear(x))) * self.calls


class Draws(nn.Linear):
    def __init__(self, draw):
        super().__init__(4, 3)
        self.draw = draw

    def forward(self, x):
        self.draw()
        return super().forward(x)


class Replaces(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        y = super().forward(x)
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y


def warm_up(module, arguments, **_):
    """What PyTorch's capture runs, without what it makes."""
    for _ in range(4):
        module(*arguments)
    return module


def captured(stand_in, module=None):
    """The sample of which a model's graphs are made, with a stand-in for PyTorch's capture."""
    sample = torch.randn(8, 4)
    with mock.patch.object(torch.cuda, "make_graphed_callables", stand_in):
        capture(module or nn.Linear(4, 3), (sample,), (torch.randn(8, 4),))
    return sample


def test_a_pass_that_is_replayed_as_it_was_is_taken():
    module = Normed()
    captured(warm_up, module.eval())
    assert module.training
    assert all(p.grad is None for p in module.parameters())


def test_the_sample_is_copied_for_the_replays_write_to_it():
    given = []
    sample = captured(lambda module, arguments, **_: given.extend(arguments))
    assert torch.equal(given[0], sample)
    assert given[0].data_ptr() != sample.data_ptr()


def test_a_graph_that_does_not_look_at_its_input_is_refused():
    def freeze(module, arguments, **_):
        plain = module.forward
        module.forward = lambda x: plain(*arguments)

    with pytest.raises(UserError, match=r"^train\.cuda_graphs: a captured pass gave other numbers than the model"):
        captured(freeze)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Draws(random.random), "forward draws random numbers on the host"),
        (Draws(np.random.rand), "forward draws random numbers on the host"),
        (Replaces(), r"mean: written in forward, which a CUDA graph does not run again\. hint: .*or set train\.cuda"),
    ],
)
def test_what_a_graph_would_not_run_again_is_refused(module, message):
    with pytest.raises(UserError, match=message):
        captured(warm_up, module)


def test_a_capture_that_breaks_names_the_line_of_the_model(tmp_path, monkeypatch):
    """PyTorch ends the capture on the way out, which raises an error of its own."""
    (tmp_path / "net.py").write_text("def forward(x):\n    raise RuntimeError('not permitted when capturing\\nmore')\n")
    forward = runpy.run_path(str(tmp_path / "net.py"))["forward"]

    def broken(module, arguments, **_):
        try:
            forward(*arguments)
        finally:
            raise RuntimeError("failed due to a previous error during capture")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        captured(broken)
    assert str(caught.value).startswith(
        "train.cuda_graphs: net.py:2: the model cannot be captured: not permitted when capturing. hint: take .item()"
    )


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
def test_a_capture_without_room_is_out_of_memory(error):
    def broken(*_, **__):
        try:
            raise error
        finally:
            raise RuntimeError("failed due to a previous error during capture")

    with pytest.raises(type(error), match=str(error)):
        captured(broken)
