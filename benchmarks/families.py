"""Families of models that nobody wrote for the kit, small and with random weights, for ``model_coverage.py``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

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


class Named(nn.Module):
    """A model that gets its batch by name, and gives one tensor: logits, or its last hidden state."""

    def __init__(self, model: nn.Module, key: str, **more: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model, self.key, self.more = model, key, more

    def forward(self, x: Tensor) -> Tensor:
        found = self.model(**{self.key: x}, **{name: make(x) for name, make in self.more.items()})
        for name in ("logits", "last_hidden_state", "prediction_logits", "sample", "spectrogram"):
            value = getattr(found, name, None)
            if isinstance(value, Tensor):
                return value
        raise TypeError(f"{type(found).__name__} has no tensor that is known")


# -- transformers --------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "d_embed"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
                     "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "encoder_ffn_dim",
                     "decoder_ffn_dim", "moe_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    "vocab_size": TOKENS, "n_vocab": TOKENS, "head_dim": 8, "d_kv": 8, "image_size": PIXELS, "patch_size": 8,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def _transformers(kind: str, auto: str, key: str, changes: dict[str, Any], more: dict[str, Any]) -> nn.Module:
    import transformers

    usual = transformers.AutoConfig.for_model(kind)
    small = {name: value for name, value in _SMALL.items() if type(getattr(usual, name, None)) is type(value)}
    settable = {
        name: value for name, value in small.items() if not isinstance(getattr(type(usual), name, None), property)
    }
    config = transformers.AutoConfig.for_model(kind, **{**settable, **changes})
    config.use_cache = False
    return Named(getattr(transformers, auto).from_config(config), key, **more)


def _of(
    auto: str,
    key: str,
    batch: Callable[[torch.Generator], Tensor],
    kinds: str,
    more: dict[str, Any] | None = None,
    **changes: dict[str, Any],
) -> dict[str, Family]:
    """Families of transformers that one class makes of their configurations."""
    return {
        kind: Family("transformers", partial(_transformers, kind, auto, key, changes.get(kind, {}), more or {}), batch)
        for kind in kinds.split()
    }


_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
_SWIN = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "patch_size": 4,
    "image_size": PIXELS,
}
_PYRAMID = {
    **_STAGES, "num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
}  # fmt: skip
_SPEECH = {
    "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "do_stable_layer_norm": True, "feat_extract_norm": "layer",
}  # fmt: skip


def _transformers_families() -> dict[str, Family]:
    both = {"decoder_input_ids": Tensor.clone}
    speech = ("wav2vec2", "hubert", "wavlm", "unispeech", "data2vec-audio", "unispeech-sat", "wav2vec2-conformer")
    return {
        **_of(
            "AutoModelForCausalLM", "input_ids", tokens,
            "gpt2 gpt_neo gpt_neox gptj opt bloom codegen llama mistral mixtral qwen2 qwen2_moe qwen3 gemma gemma2 phi "
            "phi3 falcon mpt stablelm starcoder2 cohere olmo olmo2 granite persimmon xglm biogpt ctrl openai-gpt "
            "mamba mamba2 rwkv recurrent_gemma jamba glm nemotron helium exaone4 smollm3 ernie4_5",
            gptj={"rotary_dim": 4},
            codegen={"rotary_dim": 4, "n_head": 4, "num_attention_heads": 4},
            gpt_neo={"attention_types": [[["global", "local"], 1]]},
            mamba2={"num_heads": 4, "n_groups": 1, "state_size": 8, "chunk_size": 8},
            nemotron={"num_key_value_heads": 2},
        ),
        **_of(
            "AutoModelForMaskedLM", "input_ids", tokens,
            "bert roberta distilbert albert electra deberta deberta-v2 mpnet roformer xlm-roberta camembert convbert "
            "squeezebert layoutlm mobilebert fnet nystromformer yoso megatron-bert esm ibert modernbert xmod "
            "data2vec-text rembert luke",
            esm={"vocab_size": TOKENS, "mask_token_id": 3, "pad_token_id": 0},
            luke={"entity_vocab_size": 16, "entity_emb_size": 16},
            xmod={"languages": ["en_XX"], "default_language": "en_XX"},
        ),
        **_of("AutoModelForSeq2SeqLM", "input_ids", tokens, "t5 mt5 bart mbart pegasus marian blenderbot umt5 m2m_100 "
              "longt5 switch_transformers bigbird_pegasus prophetnet plbart led", both),
        **_of(
            "AutoModelForImageClassification", "pixel_values", images,
            "vit deit beit swin swinv2 convnext convnextv2 resnet regnet mobilenet_v1 mobilenet_v2 efficientnet bit "
            "poolformer segformer levit cvt focalnet pvt dinov2 vit_msn data2vec-vision mobilevit "
            "swiftformer pvt_v2 ijepa hiera dinov2_with_registers hgnet_v2",
            swin=_SWIN,
            swinv2=_SWIN,
            resnet={**_STAGES, "embedding_size": 8},
            regnet={"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 8, "groups_width": 8},
            poolformer={"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
            focalnet={"embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]},
            deit={"architectures": ["DeiTForImageClassification"]},
            convnext={**_STAGES, "num_stages": 2},
            convnextv2={**_STAGES, "num_stages": 2},
            efficientnet={"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320, "image_size": PIXELS},
            bit={"hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 2},
            segformer=_PYRAMID,
            pvt={**_PYRAMID, "patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]},
            levit={"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "key_dim": [8, 8, 8],
                   "patch_size": 16, "architectures": ["LevitForImageClassification"]},
            cvt={"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
            hiera={"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1,
                   "image_size": [PIXELS, PIXELS]},
        ),
        **_of(
            "AutoModel", "input_values", sounds,
            " ".join((*speech, "sew")),
            **dict.fromkeys(speech, _SPEECH),
            sew={**_SPEECH, "squeeze_factor": 2},
        ),
    }  # fmt: skip


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
    return {**_own_families(), **_transformers_families()}
