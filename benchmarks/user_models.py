"""Models as users write them, small, for ``exact.py``: vectors or images to classes, and tokens to the next ones.

Each is written in the usual way of its family, without a thought of the kit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

# -- images --------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(norm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The output has the input's shape."""
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class ManyModules(nn.Module):
    """A convolution, many narrow residual blocks with GroupNorm, and a layer for the classes."""

    def __init__(self, blocks: int = 28, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(
            *(Residual(width, lambda channels: nn.GroupNorm(4, channels)) for _ in range(blocks))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to one output per class."""
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class ResNet(nn.Module):
    """The ResNet-18 of small images with BatchNorm (He et al. 2015), of half its width."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        for number in range(4):
            wide = width << number
            if number:
                stages += [nn.Conv2d(wide // 2, wide, 3, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()]
            stages += [Residual(wide, nn.BatchNorm2d) for _ in range(2)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to one output per class."""
        out: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return out


class Normed(nn.Module):
    """Two convolutions with BatchNorm, and a layer for the classes."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(a, b, 3, 2, 1, bias=False) for a, b in ((3, width), (width, 2 * width)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, 2 * width))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to one output per class."""
        y = F.relu(self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))
        out: Tensor = self.head(y.mean((2, 3)))
        return out


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection, of which the middle one has a quarter of the channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = [(channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.shortcut: nn.Module = nn.Identity()
        if channels != 4 * width:
            one = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(one, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Channels to four times the width."""
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = F.relu(y) if number < 2 else y
        return F.relu(self.shortcut(x) + y)


class ResNet50(nn.Module):
    """The ResNet-50 with BatchNorm (He et al. 2015), whose first convolution is that for small images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks, channels = [], 64
        for number, depth in enumerate((3, 4, 6, 3)):
            for index in range(depth):
                blocks.append(Bottleneck(channels, 64 << number, 2 if number and not index else 1))
                channels = 256 << number
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to one output per class."""
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, and a network of two layers for each position (Liu et al. 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The output has the input's shape."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        out: Tensor = x + y.permute(0, 3, 1, 2)
        return out


class ConvNeXt(nn.Module):
    """Two stages of ConvNeXt on patches of 4 x 4."""

    def __init__(self, width: int = 48, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Sequential(*(ConvNeXtBlock(width) for _ in range(blocks)))
        self.smaller = nn.Conv2d(width, 2 * width, 2, 2)
        self.second = nn.Sequential(*(ConvNeXtBlock(2 * width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to one output per class."""
        y = self.second(self.smaller(self.first(self.patches(x))))
        out: Tensor = self.head(self.norm(y.mean((2, 3))))
        return out


class ViT(nn.Module):
    """A vision transformer on patches of 4 x 4 with a token for the class (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 96, layers: int = 4, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.positions = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(0.02 * torch.randn(1, 65, width)),
        )
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to one output per class."""
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(x), -1, -1), y], dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.encoder(y)[:, 0]))
        return out


# -- tokens --------------------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    """Attention to what came before, and a network of two layers for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The output has the input's shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class NanoGPT(nn.Module):
    """A decoder in the style of GPT-2, with one matrix for tokens and their logits."""

    def __init__(self, vocab: int = 64, length: int = 64, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to the logits of the next ones."""
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(y)))
        return out


class GPT2(nn.Module):
    """The GPT-2 of the package transformers, small and without dropout."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes |= {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        self.inner = GPT2LMHeadModel(GPT2Config(**sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to the logits of the next ones."""
        out: Tensor = self.inner(x).logits
        return out


class RMSNorm(nn.Module):
    """A norm without a mean (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The output has the input's shape."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, length, width)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class LlamaBlock(nn.Module):
    """Attention with rotary positions and fewer keys than queries, and a gated network for each position."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys = heads, keys
        size = width // heads
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2))
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, keys * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The output has the input's shape."""
        batch, length, width = x.shape
        y = self.norms[0](x)
        q = self.q(y).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (part(y).view(batch, length, self.keys, -1).transpose(1, 2) for part in (self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.keys, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """A decoder in the style of Llama (Touvron et al. 2023)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, vocab: int = 64, width: int = 96, layers: int = 4, heads: int = 4, keys: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, keys) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocab, bias=False)
        size = width // heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(64), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to the logits of the next ones."""
        y, length = self.tokens(x), x.shape[1]
        for block in self.blocks:
            y = block(y, self.cos[:length], self.sin[:length])
        out: Tensor = self.head(self.norm(y))
        return out


class Bert(nn.Module):
    """An encoder in the style of BERT (Devlin et al. 2018), with logits for each position."""

    def __init__(self, vocab: int = 64, length: int = 64, width: int = 96, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to logits of each position."""
        y = self.norm(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        out: Tensor = self.head(self.encoder(y))
        return out


class LSTM(nn.Module):
    """Two layers of an LSTM over embedded tokens, with logits for each position."""

    def __init__(self, vocab: int = 64, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to the logits of the next ones."""
        out: Tensor = self.head(self.lstm(self.tokens(x))[0])
        return out
