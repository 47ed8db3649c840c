"""Families of models that nobody wrote for the kit, small and with random weights, for ``model_coverage.py``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from common import import_torchvision

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES, LENGTH, TOKENS, PIXELS = 8, 16, 64, 32


class Family(NamedTuple):
    """A model's factory, its library, and what a batch of ``SAMPLES`` of it is."""

    library: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(5, TOKENS, (SAMPLES, LENGTH), generator=generator)


def images(generator: torch.Generator, pixels: int = PIXELS) -> Tensor:
    return torch.rand((SAMPLES, 3, pixels, pixels), generator=generator) - 0.5


def sounds(generator: torch.Generator, length: int = 1024) -> Tensor:
    return torch.rand((SAMPLES, length), generator=generator) - 0.5


class Maps(nn.Module):
    """A model of maps, such as those of a segmentation: what it gives has the channels last, as the loss takes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found = self.model(x)
        maps: Tensor = found["out"] if isinstance(found, dict) else found
        return maps.movedim(1, -1)


class Named(nn.Module):
    """A model that gets its batch by name, and gives one tensor: logits, or its last hidden state."""

    def __init__(self, model: nn.Module, key: str, **more: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model, self.key, self.more = model, key, more

    def forward(self, x: Tensor) -> Tensor:
        found = self.model(**{self.key: x}, **{name: make(x) for name, make in self.more.items()})
        if isinstance(found, Tensor):
            return found
        for name in ("logits", "last_hidden_state", "prediction_logits", "sample", "spectrogram"):
            value = getattr(found, name, None)
            if isinstance(value, Tensor):
                return value
        raise TypeError(f"{type(found).__name__} has no tensor that is known")


# -- written by hand, in the ways of public code ---------------------------------------------------------------------


class Recurrent(nn.Module):
    """Embedded tokens through a recurrent layer of PyTorch's."""

    def __init__(self, layer: Callable[..., nn.Module], **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.layer = layer(16, 16, batch_first=True, **settings)
        self.head = nn.Linear(32 if settings.get("bidirectional") else 16, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.embedding(x))[0])
        return y


def _block(inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two levels down and up, with transposed convolutions and what is passed across."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first, self.second, self.deep = _block(3, 8, norm), _block(8, 16, norm), _block(16, 16, norm)
        self.up, self.last = nn.ConvTranspose2d(16, 16, 2, stride=2), _block(24, 8, norm)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = self.first(x)
        x = self.deep(self.second(nn.functional.max_pool2d(across, 2)))
        y: Tensor = self.head(self.last(torch.cat([self.up(x), across], 1))).movedim(1, -1)
        return y


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))


class Mixer(nn.Module):
    """MLP-Mixer, one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.places, self.channels = _mlp(LENGTH), _mlp(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = x + self.places(self.norms[0](x).mT).mT
        x = x + self.channels(self.norms[1](x))
        y: Tensor = self.head(x.mean(1))
        return y


class NanoGPT(nn.Module):
    """In the manner of nanoGPT: learned positions, fused attention, tied embeddings."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        y: Tensor = self.head(self.norm(self.layers(hidden, mask, is_causal=True)))
        return y


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.layers = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**level) for level in range(3))
        self.head = nn.Linear(16, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x).mT
        for level, layer in enumerate(self.layers):
            value, gate = layer(nn.functional.pad(hidden, (2**level, 0))).chunk(2, 1)
            hidden = hidden + value.tanh() * gate.sigmoid()
        y: Tensor = self.head(hidden.mT)
        return y


class FourierOperator(nn.Module):
    """A spectral layer of a Fourier neural operator, its weights as pairs of real numbers."""

    def __init__(self, modes: int = 6, width: int = 8) -> None:
        super().__init__()
        self.lift, self.local, self.head = nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, 4, 1)
        self.weight, self.modes = nn.Parameter(torch.randn(width, width, modes, modes, 2) / width), modes

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        known = torch.fft.rfft2(x)
        kept = torch.zeros_like(known)
        kept[:, :, : self.modes, : self.modes] = torch.einsum(
            "bixy,ioxy->boxy", known[:, :, : self.modes, : self.modes], torch.view_as_complex(self.weight)
        )
        x = nn.functional.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + self.local(x))
        y: Tensor = self.head(x).movedim(1, -1)
        return y


class Features(nn.Module):
    """Tabular data: embeddings of categories beside numbers, as in FT-Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.categories = nn.EmbeddingBag(TOKENS, 16, mode="mean")
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.categories(x))
        return y


def _own_families() -> dict[str, Family]:
    made: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
        "lstm": (partial(Recurrent, nn.LSTM, num_layers=2, dropout=0.1), tokens),
        "bilstm": (partial(Recurrent, nn.LSTM, bidirectional=True), tokens),
        "gru": (partial(Recurrent, nn.GRU), tokens),
        "rnn": (partial(Recurrent, nn.RNN), tokens),
        "unet with BatchNorm": (UNet, images),
        "unet with InstanceNorm": (partial(UNet, nn.InstanceNorm2d), images),
        "unet with GroupNorm": (partial(UNet, partial(nn.GroupNorm, 4)), images),
        "mlp-mixer": (Mixer, images),
        "nanoGPT": (NanoGPT, tokens),
        "wavenet": (WaveNet, tokens),
        "fourier neural operator": (FourierOperator, images),
        "tabular with EmbeddingBag": (Features, tokens),
    }
    return {name: Family("by hand", *family) for name, family in made.items()}


def families() -> dict[str, Family]:
    """All families by name."""
    from families_of_libraries import other_families
    from families_of_transformers import transformers_families
    from families_of_vision import vision_families

    import_torchvision()
    return {**_own_families(), **transformers_families(), **vision_families(), **other_families()}
