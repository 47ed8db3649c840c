"""Families of transformers, of their own configurations made small."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from families import LENGTH, PIXELS, SAMPLES, TOKENS, Family, Named, images, sounds, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

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


def frames(generator: torch.Generator) -> Tensor:
    """Spectra of eight bands, over time."""
    return torch.rand((SAMPLES, 2 * LENGTH, 8), generator=generator) - 0.5


def bands(generator: torch.Generator) -> Tensor:
    return frames(generator).mT.contiguous()


def _begin(x: Tensor) -> Tensor:
    """The first tokens of an answer."""
    return torch.arange(1, 9, device=x.device).expand(len(x), -1)


def transformers_families() -> dict[str, Family]:
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
        **_of(
            "AutoModelForSpeechSeq2Seq", "input_features", frames, "speech_to_text",
            {"decoder_input_ids": _begin},
            speech_to_text={"input_feat_per_channel": 8, "conv_channels": 16, "conv_kernel_sizes": [3, 3]},
        ),
        **_of(
            "AutoModelForSpeechSeq2Seq", "input_features", bands, "whisper",
            {"decoder_input_ids": _begin},
            whisper={"num_mel_bins": 8, "max_source_positions": LENGTH},
        ),
        **_of(
            "AutoModelForSpeechSeq2Seq", "input_values", sounds, "moonshine",
            {"decoder_input_ids": _begin},
            moonshine={f"{part}_num_{name}": 2 for part in ("encoder", "decoder")
                       for name in ("hidden_layers", "attention_heads", "key_value_heads")},
        ),
        **_of(
            "AutoModel", "input_features", frames, "wav2vec2-bert parakeet_encoder",
            **{"wav2vec2-bert": {"feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 5,
                                 "apply_spec_augment": False},
               "parakeet_encoder": {"num_mel_bins": 8, "subsampling_conv_channels": 8, "conv_kernel_size": 5,
                                    "subsampling_factor": 4}},
        ),
        **_of(
            "AutoModelForAudioClassification", "input_values", frames, "audio-spectrogram-transformer",
            **{"audio-spectrogram-transformer": {
                "num_mel_bins": 8, "max_length": 2 * LENGTH, "patch_size": 4, "frequency_stride": 4, "time_stride": 4}},
        ),
    }  # fmt: skip
