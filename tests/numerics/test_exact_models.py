"""A user's own models in the exact numerics, in the usual public styles and unchanged."""

import copy
import functools
import gc
import itertools
import mmap
import os
import random
import re
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Beta, MultivariateNormal
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import exact_probe
from samebits.errors import RefusedError, UserError
from samebits.numerics.exact.ambient import unguarded
from samebits.numerics.exact.batch_norm import RunningStatistics, ShardNorms
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.exact.survey import Refusals
from samebits.numerics.exact.windows import Windows
from samebits.numerics.fast import FastNumerics
from samebits.numerics.interface import MicroBatch
from samebits.params import parse_params
from samebits.portable.random import Stream
from samebits.training.diagnosis import require_same_again

CPU = torch.device("cpu")
SAMPLES, SHARDS, STEPS = 16, 4, 3
TOKENS, LENGTH = 20, 12
TRAIN = parse_params({"train": {"optimizer": {"name": "adamw", "lr": 0.003}}}).train


class FusedAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """In the manner of GPT-2: tied embeddings, fused qkv, tanh GELU."""

    def __init__(self, width=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.ln_1, self.attn = nn.LayerNorm(width), FusedAttention(width, 2)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = x + self.attn(self.ln_1(x))
        return self.head(x + self.mlp(self.ln_2(x)))


class ResidualNet(nn.Module):
    """Convolutions of all kinds, max and average pooling, GroupNorm, SiLU."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2))
        self.deep = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), nn.SiLU(), nn.Conv2d(8, 8, 1, bias=False)
        )
        self.pool = nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(32, TOKENS)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.pool(x + self.deep(x)).flatten(1))


class Encoder(nn.Module):
    """``nn.TransformerEncoderLayer`` over embedded tokens, sinusoidal positions, the mean of the sequence."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        angles = torch.arange(LENGTH).unsqueeze(1) * torch.exp(-torch.arange(0, width, 2) / width * 4.0)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens) + self.positions).mean(dim=1))


class Rotary(nn.Module):
    """RMSNorm, rotary embeddings, einsum attention with a mask, a gate, a parameter of its own."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(TOKENS, width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.gate = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, TOKENS)

    def turn(self, x):
        half = x.shape[-1] // 2
        rates = 1.0 / 100.0 ** (torch.arange(half, device=x.device) / half)
        angle = torch.outer(torch.arange(x.shape[1], device=x.device), rates)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        scores = torch.einsum("bqd,bkd->bqk", self.turn(self.q(x)), self.turn(self.k(x))) / x.shape[-1] ** 0.5
        mask = torch.ones_like(scores).tril().bool()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return self.head(x + self.scale * torch.sigmoid(self.gate(x)) * torch.tanh(weights @ self.v(x)))


class Signal(nn.Module):
    """Conv1d, weight sharing by calling a layer twice, standard deviation, a learned start."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3, stride=2, padding=1)
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(12, TOKENS)

    def forward(self, x):
        y = self.conv(x.flatten(2)).transpose(1, 2)
        y = self.again(F.softplus(self.again(y)))
        return self.head(torch.cat([y.mean(1), y.std(1)], dim=-1))


class Norms(nn.Module):
    """Normalisation over the batch in all its forms, also of a weight, and one layer that is frozen."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(
            nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8, momentum=None), nn.ReLU(),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        )  # fmt: skip
        self.kernel = nn.Parameter(torch.linspace(-0.5, 0.5, 8 * 8 * 9).view(8, 8, 3, 3))
        self.frozen = nn.BatchNorm2d(8)
        self.plain, self.again = nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, TOKENS)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = self.stem(x)
        x = self.frozen(x + self.deep(x))
        kernel = F.batch_norm(self.kernel.view(1, 8, -1), None, None, training=True).view_as(self.kernel)
        x = F.conv2d(x, kernel, padding=1).mean((2, 3))
        return self.head(self.again(self.plain(x)) + self.again(x.square()))


class Recurrent(nn.Module):
    """Recurrent layers and cells of all kinds, over padded and packed samples, with dropout between layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.first = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.1, bidirectional=True, proj_size=4)
        self.second, self.cell, self.head = nn.GRU(8, 8, batch_first=True), nn.LSTMCell(8, 8), nn.Linear(16, TOKENS)

    def forward(self, tokens):
        x = self.first(self.embedding(tokens))[0]
        lengths = 1 + tokens[:, 0].remainder(LENGTH).cpu()
        _, (last,) = self.second(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        state = None
        for step in x[:, :3].unbind(1):
            state = self.cell(step, state)
        return self.head(torch.cat([last, state[0]], 1))


class Spectral(nn.Module):
    """Fourier transforms as layers, a filter of frequencies, rotary embeddings by complex numbers."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS)
        self.filter = nn.Parameter(0.1 * torch.randn(LENGTH // 2 + 1, width, 2))
        angles = torch.outer(torch.arange(LENGTH), 1.0 / 100.0 ** torch.linspace(0, 1, width // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns).flatten(-2)
        x = x + 0.1 * torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        frequencies = torch.fft.rfft(x, dim=1, norm="ortho")
        x = torch.fft.irfft(frequencies * torch.view_as_complex(self.filter), n=LENGTH, dim=1, norm="ortho")
        return self.head(x.mean(1) + torch.fft.rfft(x, dim=1).abs().mean(1))


class Assorted(nn.Module):
    """Layers and functions that models have now and then."""

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        nn.init.orthogonal_(self.conv.parametrizations.weight.original1.data.view(4, 27))
        self.bags = nn.EmbeddingBag(9, 8, mode="max")
        self.near, self.mix, self.head = nn.Parameter(torch.randn(5, 36)), nn.Bilinear(8, 5, 6), nn.Linear(6, TOKENS)

    def forward(self, x):
        y = F.pad(self.conv(x), (1, 1, 1, 1), mode="replicate")
        y = F.avg_pool2d(y, 3, 2, ceil_mode=True) + F.adaptive_max_pool2d(y, 4)
        y = F.interpolate(y, size=(3, 3), mode="bicubic", antialias=True).flatten(1)
        bags = self.bags(y.detach().mul(10).long().remainder(9)[:, :6])
        far = torch.cdist(y, self.near) + F.gumbel_softmax(y[:, :5], tau=2.0)
        best = torch.zeros_like(bags).scatter_reduce(0, bags.long().remainder(len(bags)), bags, "amax")
        spread = y.median(1, keepdim=True).values - y.kthvalue(3, 1, keepdim=True).values + y.cummax(1).values[:, -1:]
        return self.head(self.mix(bags + best, far) * spread + y.norm(3.0, dim=1, keepdim=True))


class Resampled(nn.Module):
    """A spatial transformer, upsampling of three kinds, inverse functions."""

    def __init__(self):
        super().__init__()
        self.turn, self.first, self.second = nn.Linear(192, 6), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, TOKENS)

    def forward(self, x):
        turn = torch.eye(2, 3) + 0.1 * torch.atan(self.turn(x.flatten(1))).view(-1, 2, 3)
        places = F.affine_grid(turn, [x.shape[0], 3, 8, 8], align_corners=False)
        y = F.grid_sample(self.first(x), places, padding_mode="reflection", align_corners=False)
        y = F.interpolate(self.second(y), scale_factor=2, mode="bilinear")
        y = y + F.interpolate(y[..., :6, :6], size=(12, 12), mode="bicubic", align_corners=True)
        y = torch.asinh(F.hardshrink(y, 0.01)).flatten(2)
        return self.head(F.interpolate(y, scale_factor=0.5, mode="linear").mean(-1))


def transformers_model(config, model):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    return getattr(transformers, model)(getattr(transformers, config)(vocab_size=TOKENS, **sizes, intermediate_size=32))


def images():
    return torch.from_numpy(Stream(3, "x").normal(SAMPLES * 3 * 64)).float().view(SAMPLES, 3, 8, 8)


def tokens():
    return torch.from_numpy(Stream(3, "tokens").below(TOKENS, SAMPLES * LENGTH)).view(SAMPLES, LENGTH)


def classes():
    return torch.from_numpy(Stream(3, "y").below(TOKENS, SAMPLES))


MODELS = {
    "decoder": (Decoder, tokens, tokens),
    "residual net": (ResidualNet, images, classes),
    "encoder": (Encoder, tokens, classes),
    "rotary": (Rotary, tokens, tokens),
    "signal": (Signal, images, classes),
    "norms": (Norms, images, classes),
    "recurrent": (Recurrent, tokens, classes),
    "spectral": (Spectral, tokens, classes),
    "assorted": (Assorted, images, classes),
    "resampled": (Resampled, images, classes),
    "transformers gpt2": (lambda: transformers_model("GPT2Config", "GPT2LMHeadModel"), tokens, tokens),
    "transformers llama": (lambda: transformers_model("LlamaConfig", "LlamaForCausalLM"), tokens, tokens),
    "transformers bert": (lambda: transformers_model("BertConfig", "BertForMaskedLM"), tokens, tokens),
}


def exact(targets=(), shards=SHARDS):
    split = {"shards": shards, "samples": SAMPLES}
    return ExactNumerics(TRAIN, CPU, "cross_entropy", tuple(targets), seed=0, **split)


def train(factory, inputs=images, targets=classes, *, splits=1, fast=False):
    """Hash of the final weights, and the losses."""
    x, y = inputs(), targets()
    numerics = FastNumerics(TRAIN, CPU, "cross_entropy") if fast else exact(y.shape[1:])
    return exact_probe.run(numerics, factory, x, y, shards=SHARDS, splits=splits, steps=STEPS)


def prepared(model, shards=SHARDS):
    """Exact numerics, the module of a model in them, and a batch of images."""
    numerics = exact(shards=shards)
    numerics.prepare(model)
    return numerics, numerics.module(model), MicroBatch(images(), classes(), 0, range(shards))


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_and_every_split_gives_the_same_bits(name):
    whole = train(*MODELS[name])
    assert train(*MODELS[name], splits=4) == whole
    assert whole[1][-1] < whole[1][0] or "encoder" in name


def with_state(numerics, factory, shards):
    """The state of a model after some steps."""
    state = {}

    def keep(model):
        state.update(type(numerics).model_state_dict(numerics, model))
        return state

    numerics.model_state_dict = keep
    exact_probe.run(numerics, factory, images(), classes(), shards=shards, splits=shards, steps=STEPS)
    return state


@pytest.mark.parametrize("shards", [1, 4])
def test_batch_norm_is_that_of_a_device_with_the_samples_of_a_shard(shards):
    """Losses and running statistics are PyTorch's own, of which several shards have the mean."""
    fast = exact_probe.run(FastNumerics(TRAIN, CPU, "cross_entropy"), Norms, images(), classes(), shards=shards,
                           splits=shards, steps=STEPS)  # fmt: skip
    assert exact_probe.run(exact(shards=shards), Norms, images(), classes(), shards=shards, splits=1,
                           steps=STEPS)[1] == pytest.approx(fast[1], rel=1e-3)  # fmt: skip
    if shards == 1:
        mine = with_state(exact(shards=1), Norms, 1)
        theirs = with_state(FastNumerics(TRAIN, CPU, "cross_entropy"), Norms, 1)
        for name in (name for name in mine if "running" in name or "tracked" in name):
            assert mine[name].tolist() == pytest.approx(theirs[name].tolist(), rel=5e-3, abs=1e-3), name


def test_running_statistics_are_the_mean_over_the_shards_of_all_ranks():
    """Two ranks with two shards each know the same afterwards; a shard that was normalised elsewhere is refused."""
    both, ranks = [[], []], []
    for _ in range(2):
        model = nn.Sequential(nn.BatchNorm1d(2))
        ranks.append((model, RunningStatistics(4)))
    barrier = threading.Barrier(2, timeout=60)

    def of_all(rank):
        def largest(values):
            both[rank].append(values)
            barrier.wait()
            largest = torch.maximum(both[0][-1], both[1][-1])
            barrier.wait()  # before either adds its next values
            return largest

        return largest

    def settle(rank):
        model, running = ranks[rank]
        for shard in (2 * rank, 2 * rank + 1):
            norms = ShardNorms(model, Engine(), running.start(shard))
            norms.batch_norm(torch.tensor([[0.0, 1.0], [2.0, 5.0]]) + shard, model[0].running_mean,
                             model[0].running_var, training=True)  # fmt: skip
        running.settle(model, of_all(rank), CPU)

    threads = [threading.Thread(target=settle, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, _ in ranks:
        assert model[0].running_mean.tolist() == pytest.approx([0.25, 0.45])  # a tenth of 2.5 and 4.5
        assert model[0].running_var.tolist() == pytest.approx([1.1, 1.7])
    windows = Windows()
    _, running = ranks[0]
    running.start(0)
    running.check(windows, CPU)
    with pytest.raises(RefusedError, match="the shards of a batch reach other BatchNorm layers"):
        windows.settle(lambda values: values, CPU)


def test_ranks_that_reach_other_layers_of_batch_norm_are_refused():
    model, running = nn.BatchNorm1d(2), RunningStatistics(1)
    ShardNorms(model, Engine(), running.start(0)).batch_norm(torch.eye(2), *model.buffers(), training=True)
    with pytest.raises(RefusedError, match="the shards of a batch reach other BatchNorm layers"):
        running.settle(model, lambda values: values + 1, CPU)  # another rank has a larger number for its layers


@pytest.mark.parametrize(
    "name", ["residual net", "rotary", "signal", "resampled", "transformers llama"]
)  # without dropout
def test_it_learns_what_fast_learns(name):
    assert train(*MODELS[name])[1] == pytest.approx(train(*MODELS[name], fast=True)[1], rel=2e-3)


class Does(nn.Module):
    """A layer over what a function makes of the model and its flat samples, and beside it a layer and a buffer."""

    def __init__(self, what=lambda net, x: x):
        super().__init__()
        self.body, self.other, self.what = nn.Linear(192, TOKENS), nn.Linear(192, 192), what
        self.norm = nn.BatchNorm1d(192)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.body(self.what(self, x.flatten(1)))


def beside(do):
    """What does something with the model, and leaves the samples as they are."""

    def what(net, x):
        do(net)
        return x

    return what


class Normalised(nn.Sequential):
    def __init__(self, norm):
        super().__init__(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(144, TOKENS))


def normed():
    return nn.Sequential(nn.Flatten(), nn.RMSNorm(192), nn.Linear(192, TOKENS))


class Borrows(nn.Module):
    """Uses a weight by another way than its module."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(192, TOKENS)
        weight = self.body.weight
        self.again = lambda y: y @ weight

    def forward(self, x):
        y = self.body(x.flatten(1))
        return y + self.body(self.again(y))


class Remembers(nn.Module):
    """Looks at a weight through a list, and lets no gradient pass."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(192, TOKENS)
        self.known = [self.body.weight.detach()]

    def forward(self, x):
        return self.body(x.flatten(1)) + x.flatten(1) @ self.known[0].T


def compiled(module):
    module.compile(backend="eager")
    return module


def traced(module):
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        return torch.jit.trace(module, images())


def hooked(hook):
    model = Does()
    getattr(model.body.weight, hook)(lambda _: None)
    return model


OWN = torch.Generator().manual_seed(1)
REPLACE = ".* hint: replace it by operations"
REFUSED = [
    (lambda: Normalised(nn.SyncBatchNorm(4)),
     r"model\.1 \(SyncBatchNorm\): it normalises by the batch of all ranks by PyTorch's own"),
    (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.InstanceNorm2d(3), nn.Flatten(), nn.Linear(3, TOKENS)),
     r"model\.1 \(InstanceNorm2d\): it has one value for each channel of a sample"),
    (lambda: compiled(Does()), r"model \(Does\): a compiler may fuse"),
    (lambda: traced(normed()), r"model \(Top\w+\): TorchScript may fuse"),
    (Borrows, r"body\.weight: forward uses it from beside the model"),
    (Remembers, r"body\.weight: forward uses it from beside the model"),
    (lambda: hooked("register_hook"), r"model\.body\.weight: it has a hook for its gradient, expected none"),
    (lambda: hooked("register_post_accumulate_grad_hook"),
     r"model\.body\.weight: it has a hook for its gradient, expected none"),
    (lambda: (net := Does(), net.register_forward_hook(lambda net, x, y: torch.special.i0(y)))[0], r"in forward: .*i0"),
    (lambda: Does().double(), r"model\.body\.weight: its values are torch\.float64, expected float32"),
    (lambda: (torch.set_num_threads(2), Does())[1], "the factory changes a switch of PyTorch's: set_num_threads"),
    (lambda: torch.linalg.inv(nn.Linear(4, 4).weight), ".*linalg"),  # what a factory computes is exact too
]  # fmt: skip
REFUSED_IN_FORWARD = [
    (lambda net, x: x.half().float() * x.half(), r"model \(Does\): .*use float32\. hint: leave out torch\.autocast"),
    (lambda net, x: (torch.manual_seed(0), x)[1], r"model \(Does\): torch.manual_seed restarts draws, which"),
    (lambda net, x: (torch.set_rng_state(torch.get_rng_state()), x)[1], r".*torch.set_rng_state restarts draws"),
    (lambda net, x: (torch.random.fork_rng().__enter__(), x)[1], r".*torch.random.fork_rng restarts draws"),
    (lambda net, x: torch.special.i0(x), rf"model \(Does\): .*i0: it has no exact version{REPLACE}"),
    (lambda net, x: torch.fft.fft(x.double()).real.float(), rf"model \(Does\): .*fft.*float64{REPLACE}"),
    (lambda net, x: torch.special.erfcx(x), rf"model \(Does\): .*erfcx{REPLACE}"),
    (lambda net, x: torch.poisson(x.abs()),
     r"model \(Does\): poisson: its draws differ between devices\. hint: make it of uniform, normal"),
    (lambda net, x: Beta(x.abs() + 1, 1.0).rsample(), r".*_sample_dirichlet: its draws.* as Kumaraswamy draws"),
    (lambda net, x: MultivariateNormal(x[0, :2], torch.eye(2)).sample() + x[:, :2],
     r".*linalg_cholesky_ex: .* hint: .* give MultivariateNormal its scale_tril"),
    (lambda net, x: torch.linalg.inv(x @ x.T) @ x, r"model \(Does\): .*linalg.* hint: use torch\.linalg\.qr"),
    (lambda net, x: torch.sparse.mm(x.to_sparse(), x.T), r".*_to_sparse: .* hint: keep the places as integers"),
    (lambda net, x: x + len(torch.unique(x)), r".*_unique2: .* hint: give it integers"),
    (lambda net, x: x + torch.rand(x.shape, generator=OWN),
     ".*draws from a generator of the model's own follow from how often it has drawn"),
    (lambda net, x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)),
     r"model \(Does\): torch.cond: control flow as an operation is not looked into"),
    (lambda net, x: net.other.weight.requires_grad_(False) @ x.T,
     r"model \(Does\): forward changes whether a parameter is trained \(requires_grad\)"),
    (lambda net, x: checkpoint(lambda y: net.other(y).tanh(), x, use_reentrant=False),
     "Linear: forward runs again in the backward pass, as activation checkpointing has it"),
    (lambda net, x: x * (x.data_ptr() % 2), r"model \(Does\): forward asks where a tensor lies in memory"),
    (lambda net, x: x + float(np.sum(x.numpy())), r"model \(Does\): forward hands a tensor to NumPy, whose arithmetic"),
    (lambda net, x: (y := net.other(x), y.register_hook(lambda _: net.other.weight.grad))[0],
     r"in the backward pass: a parameter's gradient \(\.grad\) is asked for"),
    (lambda net, x: x + net.norm(x[:1]), r"model\.norm \(BatchNorm1d\): it has one value for each channel of a shard"),
    (lambda net, x: F.batch_norm(x, torch.zeros(192), torch.ones(192), training=True),
     r"model \(Does\): running statistics are expected in the buffers of a module"),
    (lambda net, x: x * time.time(), r"model \(Does\): time.time is asked for"),
    (lambda net, x: x + len(Path(__file__).read_text()), r"model \(Does\): .*test_exact_models.py is read"),
    (beside(lambda net: threading.Thread(target=print).start()), r"model \(Does\): a thread is started"),
    (beside(lambda net: subprocess.run(["true"])), r"model \(Does\): a process is started"),
    (lambda net, x: (setattr(net.what, "seen", 1), x)[1], r"an argument of .*<lambda>.seen: written in forward"),
    (beside(lambda net: torch.set_num_threads(2)), "a switch of PyTorch's.set_num_threads: written in forward"),
    *((beside(write), f"{name}: written in forward, so its value depends on how") for write, name in [
        (lambda net: random.random(), "Python's random numbers"),
        (lambda net: np.random.rand(), "NumPy's random numbers"),  # noqa: NPY002
        (lambda net: np.random.standard_normal(), "NumPy's random numbers"),  # noqa: NPY002
        (lambda net: net.seen.add_(1), r"model\.seen"),
        (lambda net: net.norm.running_mean.add_(1), r"model\.norm.running_mean"),
        (lambda net: net.norm.running_mean.data.add_(1), r"model\.norm.running_mean"),
        (lambda net: setattr(net, "seen", net.seen + 1), r"model\.seen"),
        (lambda net: net.body.weight.detach().mul_(0.5), r"model\.body\.weight"),
        (lambda net: _disable_current_modes()(net.body.weight.detach().mul_)(0.5), r"model\.body\.weight"),
        # ``.data`` counts its versions apart.
        (lambda net: net.body.weight.data.mul_(0.999), r"model\.body\.weight"),
        (lambda net: net.body.weight.data[0].clamp_(max=0.1), r"model\.body\.weight"),
        (lambda net: setattr(net.body.weight, "data", net.body.weight.data.clamp(max=0.1)), r"model\.body\.weight"),
        (lambda net: net.seen.data.add_(1), r"model\.seen"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("factory", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_not_exact_is_refused_with_its_place(factory, why):
    try:
        with pytest.raises(UserError, match=f"^exact: {why}"):
            train(factory)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("what", "why"), REFUSED_IN_FORWARD, ids=[why for _, why in REFUSED_IN_FORWARD])
def test_what_forward_may_not_do_is_named(what, why):
    try:
        with pytest.raises(RefusedError, match=f"^exact: {why}"):
            train(lambda: Does(what))
    finally:
        torch.set_num_threads(1)
        vars(what).pop("seen", None)


def test_a_switch_is_named_before_a_backward_pass_that_needs_it():
    with pytest.raises(RefusedError, match=r"^exact: a switch of PyTorch's, set_grad_enabled: written in forward"):
        require_same_again(*prepared(Does(beside(lambda net: torch.set_grad_enabled(False)))))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Does(functools.partial(lambda ticks, net, x: torch.special.i0(x) * next(ticks), itertools.cycle([1]))),
         "model.what[0], an iterator: written in forward"),
        (lambda: Does(lambda net, x: torch.special.i0(x) @ net.other.weight.requires_grad_(False).T),
         "Does in model: forward changes whether a parameter is trained"),
        (lambda: Does(lambda net, x: (torch.special.i0(x), setattr(net.body.weight, "data", torch.ones(20, 192)))[0]),
         "model.body.weight: written in forward"),
    ],
)  # fmt: skip
def test_a_survey_tells_of_what_ends_a_pass_and_of_the_rest(make, told):
    numerics, refusals = exact(), Refusals()
    numerics.survey(make(), MicroBatch(images(), classes(), 0, range(SHARDS)), refusals)
    found = [text for text, _ in refusals.told()]
    for part in (told, "Does in model: prims::bessel_i0: it has no exact version"):
        assert sum(text.startswith(part) for text in found) == 1, found


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_a_layer_is_refused(reentrant):
    def what(net, x):
        return checkpoint(net.other, net.other(x).relu(), use_reentrant=reentrant)

    def tried_and_trained():
        require_same_again(*prepared(Does(what), shards=2))
        train(lambda: Does(what))

    with pytest.raises(RefusedError, match="forward runs again in the backward pass"):
        tried_and_trained()


class TwoNames(nn.Module):
    """A bias under two names, of which forward reads one, as in heads of BERT, BART and T5."""

    def __init__(self, *, both=False):
        super().__init__()
        self.decoder = nn.Linear(192, TOKENS)
        self.bias = self.decoder.bias
        self.both = both

    def forward(self, x):
        out = self.decoder(x.flatten(1))
        return out + self.bias if self.both else out


@pytest.mark.parametrize("both", [False, True])
def test_a_parameter_under_two_names_is_one_that_gets_one_gradient(both):
    model = TwoNames(both=both)
    numerics, module, batch = prepared(model, shards=1)
    numerics.backward(numerics.loss(numerics.forward(module, batch), batch.targets))
    assert [name for name, p in module.named_parameters() if p.grad is None] == []
    assert model.bias is model.decoder.bias
    assert train(lambda: TwoNames(both=both), splits=4) == train(lambda: TwoNames(both=both))


class OnNothing(nn.Module):
    """A layer that gets no samples, as an expert does that no token is sent to."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.body = copy.deepcopy(layer), nn.Linear(192, TOKENS)

    def forward(self, x):
        return self.body(x.flatten(1)) + self.layer(x[:0]).sum()


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3), nn.GroupNorm(1, 3), nn.LayerNorm(8)]
)
def test_a_layer_may_get_an_empty_batch(layer):
    assert train(lambda: OnNothing(layer))[1] == pytest.approx(train(lambda: OnNothing(layer), fast=True)[1])


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (lambda net, x: x / (x - x), ["Does in model: div makes infinity of finite numbers (test_"]),
        (lambda net, x: (x - x) / (x - x), ["Does in model: div makes NaN (test_"]),
        (lambda net, x: x * (x - x + 1e-30).exp().log().reciprocal(), ["Does in model: reciprocal makes infinity of"]),
        (lambda net, x: net.other(x).relu().sqrt(), ["Does in model: div makes infinity of"]),
        (lambda net, x: net.other(x * 1e30).pow(2), ["Does in model: "]),
        (lambda net, x: x.masked_fill(x > 0, -torch.inf).softmax(1), []),
        (lambda net, x: x, []),
    ],
)
def test_what_makes_infinity_or_nan_is_named(what, found):
    numerics, module, batch = prepared(Does(what))
    told = numerics.not_finite(module, batch)
    assert bool(told) == bool(found)
    for text, start in zip(told[: len(found)], found, strict=True):
        assert text.startswith(start), told
        assert "test_exact_models.py:" in text


def test_weights_that_are_not_finite_are_named_before_what_comes_of_them():
    model = Does()
    with torch.no_grad():
        model.body.bias[0] = torch.inf
    numerics, module, batch = prepared(model)
    assert numerics.not_finite(module, batch) == ["model.body.bias: infinite or NaN before this step"]


class Helper:
    """A class beside the model's own, of the same file."""

    seen, shapes = 0, []


LOCAL, MAPPED = threading.local(), mmap.mmap(-1, 16)
LISTS, MAPPINGS = [0], [0]
for _ in range(8):
    LISTS, MAPPINGS = [LISTS], {0: MAPPINGS}


def count_in(holder):
    while not isinstance(holder[0], int):
        holder = holder[0]
    holder[0] += 1


def made_from_text():
    scope = {}
    exec("def what(net, x, seen=[0]):\n    seen[0] += 1\n    return x", scope)
    return scope["what"]


def count_in_a_gradient(net):
    if net.seen.grad is None:
        net.seen.grad = torch.zeros(())
    net.seen.grad.add_(1)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (beside(lambda net: setattr(Helper, "seen", Helper.seen + 1)), "Helper.seen"),
        (beside(lambda net: Helper.shapes.append(1)), "Helper.shapes"),
        (beside(lambda net: setattr(LOCAL, "seen", getattr(LOCAL, "seen", 0) + 1)), "test_exact_models.LOCAL.seen"),
        (beside(lambda net: MAPPED.__setitem__(0, (MAPPED[0] + 1) % 256)), "test_exact_models.MAPPED"),
        (beside(count_in_a_gradient), "model.seen.grad"),
        (beside(lambda net: count_in(LISTS)), "test_exact_models.LISTS" + "[0]" * 8),
        (beside(lambda net: count_in(MAPPINGS)), "test_exact_models.MAPPINGS" + "[0]" * 8),
        (made_from_text(), "an argument of what[0]"),
        (lambda net, x: x + len(gc.get_objects()) % 2, "gc.get_objects is asked for"),
        (lambda net, x: x + len(list(Path("/proc/self/fd").iterdir())), "/proc/self/fd is listed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_kept_beside_the_model_is_named_whether_it_is_used_or_not(what, name):
    with pytest.raises(RefusedError, match=re.escape(name)):
        train(lambda: Does(what))
    with pytest.raises(RefusedError, match=re.escape(name)):  # by its name, before anything is compared
        require_same_again(*prepared(Does(what)))


@pytest.mark.parametrize(
    ("what", "kept"),
    [
        (lambda net, x: x + net.kept(192), functools.lru_cache(torch.rand)),  # draws once, for all samples
        (lambda net, x: x * net.kept(), itertools.cycle([1.0, 2.0]).__next__),  # is as before after two shards
    ],
)
def test_a_model_is_fed_twice_and_has_to_give_the_same(what, kept):
    model = Does(what)
    model.kept = kept
    with pytest.raises(RefusedError, match=r"exact: shard 0 gives other bits when the shards come in reverse order"):
        require_same_again(*prepared(model))
    assert torch.get_num_threads() == 1


def alone(net, x):
    """A model that looks whether it is alone runs as it is, and is."""
    assert not torch.distributed.is_initialized()
    return x * torch.get_num_threads() * os.cpu_count() * (1 + torch.distributed.get_rank())


@pytest.mark.parametrize(
    "what", [alone, lambda net, x: x + torch.empty_like(x), lambda net, x: x + x.new_empty(x.shape)]
)
def test_ranks_threads_and_memory_that_nobody_has_written_change_nothing(what):
    assert train(lambda: Does(what)) == train(Does)


def test_a_thread_that_a_factory_leaves_behind_is_refused():
    done = threading.Event()

    def make():
        with unguarded():  # as by a library's own code
            threading.Thread(target=done.wait, name="left-over").start()
        return Does()

    try:
        with pytest.raises(RefusedError, match=r"exact: the factory leaves a thread running \(left-over\)"):
            train(make)
    finally:
        done.set()


class FlattenedByView(nn.Module):
    """A convolution whose output is viewed as rows, as code is written that knows it to be contiguous."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, TOKENS)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).view(len(x), -1))


def drawn():
    """Makes a parameter of draws, as position embeddings are made."""
    model = Does(lambda net, x: x + net.embedding)
    model.embedding = nn.Parameter(torch.randn(192) * 0.02 + torch.rand(192) + torch.randperm(192))
    return model


def upsampling():
    """A decoder with a transposed convolution and nearest upsampling."""
    up = nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1)
    return nn.Sequential(up, nn.Upsample(scale_factor=2, mode="nearest"), nn.Flatten(), nn.Linear(2048, TOKENS))


def clamping():
    """Writes to the batch that it is given."""
    return Does(lambda net, x: x.clamp_(-1.0, 1.0))


class Sampled(nn.Module):
    """Looks at a picture in fixed places between its points."""

    def __init__(self, mode="bilinear", padding_mode="zeros"):
        super().__init__()
        self.register_buffer("places", nn.init.uniform_(torch.empty(1, 8, 8, 2), -1.1, 1.1))
        self.how, self.body = {"mode": mode, "padding_mode": padding_mode}, nn.Linear(192, TOKENS)

    def forward(self, x):
        seen = F.grid_sample(x, self.places.expand(len(x), -1, -1, -1), align_corners=False, **self.how)
        return self.body(seen.flatten(1))


@pytest.mark.parametrize(
    "factory",
    [FlattenedByView, drawn, clamping, upsampling, normed, Sampled, lambda: Sampled("bicubic", "border")],
)
def test_more_layers_learn_what_fast_learns_in_every_split(factory):
    whole = train(factory)
    assert train(factory, splits=4) == whole
    assert whole[1] == pytest.approx(train(factory, fast=True)[1], rel=1e-4)
