"""The strategies in one process: what they hand to PyTorch, and what they do with random streams."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from samebits import strategies
from samebits.params import parse_params
from samebits.placement import place
from samebits.strategies import DataParallelStrategy, DDPStrategy, SingleDeviceStrategy, make_strategy

TRAIN = parse_params({"train": {"oversubscribe": True, "num_devices": 2}}).train


@pytest.mark.parametrize(
    ("strategy", "cls"), [("single", SingleDeviceStrategy), ("dp", DataParallelStrategy), ("ddp", DDPStrategy)]
)
def test_each_name_is_a_class(strategy, cls, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = make_strategy(place(strategy, TRAIN, gpus=0, cores=2), TRAIN)
    assert type(made) is cls
    assert (made.rank, made.world_size) == ((1, 2) if strategy == "ddp" else (0, 1))
    assert made.device == torch.device("cpu")
    assert made.cuda_devices == ()


class Recorder(nn.Module):
    """Stands in for a wrapper that needs GPUs."""

    def __init__(self, module, **options):
        super().__init__()
        self.module, self.options = module, options


@pytest.mark.parametrize(
    ("gpus", "count", "device_ids", "cuda_devices"),
    [(4, 4, [0, 1, 2, 3], (0, 1, 2, 3)), (2, 4, [0, 1, 0, 1], (0, 1)), (1, 2, [0, 0], (0,)), (0, 2, None, ())],
)
def test_what_dp_hands_to_its_wrapper(gpus, count, device_ids, cuda_devices, monkeypatch):
    monkeypatch.setattr(strategies, "DataParallel", Recorder)
    train = parse_params({"train": {"oversubscribe": True, "num_devices": count}}).train
    strategy = DataParallelStrategy(place("dp", train, gpus=gpus, cores=2), train)
    module = nn.Linear(1, 1)
    wrapped = strategy.parallelise(module)
    assert wrapped.module is module
    assert wrapped.options == {"device_ids": device_ids}
    assert strategy.cuda_devices == cuda_devices
    assert strategy.device == torch.device("cuda:0" if gpus else "cpu")


def test_what_ddp_hands_to_its_wrapper(monkeypatch):
    monkeypatch.setattr(strategies, "DistributedDataParallel", Recorder)
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    raw = {"num_devices": 4, "oversubscribe": True, "ddp": {"static_graph": True, "bucket_cap_mb": 7}}
    train = parse_params({"train": raw}).train
    strategy = DDPStrategy(place("ddp", train, gpus=2, cores=2), train)
    assert strategy.device == torch.device("cuda:1")
    assert strategy.parallelise(nn.Linear(1, 1)).options == {
        "device_ids": [torch.device("cuda:1")],
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "bucket_cap_mb": 7,
    }


class SplitInTwo(nn.Module):
    """What DataParallel does with two devices, on a CPU: chunks, replicas that share weights, gathered outputs."""

    def __init__(self, module, device_ids):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return torch.cat([self.module(part) for part in inputs.chunk(2)])


def test_gradients_under_dp_are_those_of_single(monkeypatch):
    monkeypatch.setattr(strategies, "DataParallel", SplitInTwo)
    placement = replace(place("dp", TRAIN, gpus=2, cores=2), device_type="cpu")
    strategy = DataParallelStrategy(placement, TRAIN)
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(5, 3), torch.randn(7, 5), torch.randint(3, (7,))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    nn.functional.cross_entropy(strategy.parallelise(model)(inputs), targets).backward()
    assert torch.allclose(model.weight.grad, expected, atol=1e-6)


def test_random_streams_continue_where_they_stood():
    strategy = SingleDeviceStrategy(place("single", TRAIN, gpus=0, cores=2), TRAIN)
    strategy.seed(1)
    state = strategy.random_state()
    first = torch.rand(4)
    strategy.set_random_state(state)
    assert torch.equal(torch.rand(4), first)
    strategy.seed(2)
    assert not torch.equal(torch.rand(4), first)


def test_every_rank_has_its_own_stream(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    drawn = []
    for rank in ("0", "1"):
        monkeypatch.setitem(os.environ, "RANK", rank)
        monkeypatch.setitem(os.environ, "LOCAL_RANK", rank)
        DDPStrategy(place("ddp", TRAIN, gpus=0, cores=2), TRAIN).seed(0)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] != drawn[1]
