"""Models as users bring them: decoders in the manner of nanoGPT and LLaMA, and one with most of what else is in use."""

import math

import torch
from torch import nn
from torch.nn import functional as F


def rotated(x):
    """Rotary positions (RoFormer, equation 34), the halves of a head beside each other as in LLaMA's."""
    half = x.shape[-1] // 2
    with torch.autocast(x.device.type, enabled=False):
        rates = torch.exp(torch.arange(half, device=x.device).float() * (-math.log(10000.0) / half))
        places = torch.arange(x.shape[-2], device=x.device).float()
        angles = places[:, None] @ rates[None, :]
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, width, length, heads, *, rotary):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(x).split(width, 2)
        )
        if self.rotary:
            q, k = rotated(q), rotated(k)
        scores = (q @ k.transpose(-2, -1)) * (k.shape[-1] ** -0.5)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        mixed = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class _Decoder(nn.Module):
    def __init__(self, vocabulary, length, width=16, heads=2, *, rotary=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = _Attention(width, length, heads, rotary=rotary)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], dtype=torch.long, device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return self.head(self.norms[2](x))


class _Mixed(nn.Module):
    def __init__(self, vocabulary, classes, width=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.wide = nn.Conv1d(width, 2 * width, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.narrow = nn.Conv1d(2 * width, width, 3, stride=2, groups=2)
        self.back = nn.ConvTranspose1d(width, width, 3, groups=2)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(width))
        self.router = nn.Linear(2 * width, 4)
        self.head = nn.Sequential(
            nn.Linear(2 * width, width), nn.SiLU(), nn.LayerNorm(width), nn.Linear(width, classes)
        )

    def forward(self, tokens):
        x = self.tokens(tokens).transpose(1, 2)
        x = self.narrow(F.relu(self.norm(self.wide(x))))
        x = self.drop(torch.tanh(self.back(x))) * self.scale[:, None]
        x = torch.cat([x.mean(-1), x.amax(-1)], -1)
        scores = self.router(x)
        best, which = scores.topk(2, dim=-1)
        share = torch.zeros_like(scores).scatter(1, which, best.softmax(-1).to(scores.dtype))
        first = torch.zeros_like(scores)
        first[torch.arange(len(x), device=x.device), which[:, 0]] = best[:, 0]
        return self.head(x) * (share * first).sum(1, keepdim=True)


def decoder(card, rotary=False):
    return _Decoder(card.num_classes, card.input_shape[0], rotary=rotary)


def mixed(card):
    return _Mixed(12, card.num_classes)


class _Broken(nn.Module):
    """Works on a CPU; on a GPU it stops, or waits."""

    def __init__(self, how, card):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(card.input_shape[0], card.num_classes)
        self.gain = nn.Parameter(torch.ones(1))
        self.mean = torch.zeros(card.input_shape[0])  # no buffer, so nothing moves it

    def forward(self, x):
        x = x * self.gain
        if self.how == "adaptive pooling":
            return self.linear(F.adaptive_avg_pool2d(x, 3).mean((2, 3)))
        y = x.mean((2, 3))
        if self.how == "constant on the CPU":
            y = y - self.mean
        if self.how == "product of integers":
            whole = y.long()
            y = y + (whole @ whole.T).sum(1, keepdim=True)
        if self.how == "reads a value" and y.max().item() > 1e6:
            y = y / 2
        return self.linear(y)


def broken(card, how):
    return _Broken(how, card)
