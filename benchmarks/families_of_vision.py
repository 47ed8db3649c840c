"""Families of libraries for images: timm, torchvision and segmentation_models_pytorch."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from families import SAMPLES, Family, Maps, images

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CLASSES = 5

_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
_PLAIN: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_MIXER: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
_RESNET: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32), "stem_width": 8}
_SWIN: dict[str, Any] = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
_COAT: dict[str, Any] = {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1), "stem_width": 16}
_XCEPTION = [{"in_chs": 64, "out_chs": 32, "stride": 2}, {"in_chs": 32, "out_chs": 64, "stride": 2}]

_HIGH: dict[str, Any] = {"stem_width": 8} | {
    f"stage{n}": {"num_modules": 1, "num_branches": n, "block_type": "BASIC" if n > 1 else "BOTTLENECK",
                  "num_blocks": (1,) * n, "num_channels": (8, 16, 24, 32)[:n], "fuse_method": "SUM"}
    for n in (1, 2, 3, 4)
}  # fmt: skip

_TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": _RESNET,
    "resnext50_32x4d": {**_RESNET, "cardinality": 4, "base_width": 32},
    "seresnet18": _RESNET,
    "res2net50_26w_4s": {**_RESNET, "base_width": 32},
    "resnest14d": {**_RESNET, "stem_width": 8},
    "skresnet18": {**_RESNET, "channels": (16, 32, 32, 32)},
    "resnetv2_18": {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32), "stem_chs": 8},
    "tf_efficientnetv2_b0": {"channel_multiplier": 0.25, "depth_multiplier": 0.3},
    "mobilenetv3_small_050": {},
    "tinynet_e": {},
    "lcnet_035": {},
    "rexnet_100": {"width_mult": 0.2, "depth_mult": 0.5},
    "ghostnet_050": {},
    "regnety_002": {},
    "test_nfnet": {},
    "DenseNet": {"growth_rate": 8, "block_config": (2, 2)},
    "DLA": {"levels": (1, 1, 1, 2, 1, 1), "channels": (8, 8, 16, 16, 24, 24), "base_width": 32},
    "XceptionAligned": {"block_cfg": _XCEPTION},
    "inception_next_atto": _FOUR,
    "convnext_atto": _FOUR,
    "HighResolutionNet": {"cfg": _HIGH},
    "vit_tiny_patch16_224": {**_PLAIN, "drop_path_rate": 0.1},
    "deit_tiny_distilled_patch16_224": _PLAIN,
    "beit_base_patch16_224": _PLAIN,
    "cait_xxs24_224": _PLAIN,
    "convit_tiny": {**_PLAIN, "depth": 3, "local_up_to_layer": 2},
    "vit_relpos_small_patch16_224": _PLAIN,
    "eva02_tiny_patch14_224": {**_PLAIN, "embed_dim": 48},
    "xcit_nano_12_p16_224": {**_PLAIN, "patch_size": 16},
    "swin_tiny_patch4_window7_224": _SWIN,
    "swinv2_tiny_window8_256": _SWIN,
    "maxvit_rmlp_pico_rw_256": _COAT,
    "coatnet_pico_rw_224": _COAT,
    "MlpMixer": _MIXER,
    "gmlp": _MIXER,
    "MetaFormer": _FOUR,
    "caformer": {**_FOUR, "dims": (8, 16, 32, 32)},
    "edgenext_xx_small": {**_FOUR, "dims": (8, 16, 24, 32), "heads": (2, 2, 2, 2)},
    "mambaout_femto": _FOUR,
    "starnet_s1": {"base_dim": 8, "depths": (1, 1, 1, 1)},
    "FocalNet": {"embed_dim": 16, "depths": (1, 1), "focal_levels": (1, 1), "focal_windows": (3, 3)},
    "ConvMixer": {"dim": 16, "depth": 2, "kernel_size": 5},
    "pit_ti_224": {
        "img_size": 32, "base_dims": (16, 16), "depth": (1, 1), "heads": (1, 2), "patch_size": 8, "stride": 4,
    },
    "levit_128s": {"img_size": 64, "embed_dim": (16, 24, 32), "depth": (1, 1, 1), "num_heads": (2, 2, 2)},
    "VOLO": {"layers": (1, 1), "img_size": 32, "stem_hidden_dim": 8, "embed_dims": (16, 32), "num_heads": (2, 2),
             "downsamples": (True, False), "outlook_attention": (True, False)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 2)},
    "Twins": {"img_size": 64, "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 2), "depths": (1, 1, 1, 1)},
    "sequencer2d_s": {"img_size": 32, "layers": (1, 1), "patch_sizes": (4, 2), "embed_dims": (16, 32),
                      "hidden_sizes": (8, 8), "mlp_ratios": (2.0, 2.0)},
    "hiera_tiny_224": {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 1, 1)},
}  # fmt: skip


def _timm(name: str, settings: dict[str, Any]) -> nn.Module:
    """A model of timm by the name of its entry or class; some are a class with another layer."""
    models = import_module("timm.models")
    if name == "gmlp":
        layer, mlp = models.mlp_mixer.SpatialGatingBlock, models.mlp_mixer.GatedMlp
        name, settings = "MlpMixer", {**settings, "block_layer": layer, "mlp_layer": mlp, "mlp_ratio": 4}
    if name == "caformer":
        m = models.metaformer
        mixers, norms = (m.SepConv, m.Attention), (m.LayerNorm2dNoBias, m.LayerNormNoBias)
        pairs = {"token_mixers": mixers, "norm_layers": norms}
        name, settings = "MetaFormer", {**settings, **{key: (a, a, b, b) for key, (a, b) in pairs.items()}}
    model: nn.Module = getattr(models, name)(num_classes=CLASSES, **settings)
    return model


def _side(settings: dict[str, Any]) -> int:
    """How many pixels a model of timm takes."""
    size = settings.get("img_size", 32)
    return size if isinstance(size, int) else int(size[0])


# -- torchvision ---------------------------------------------------------------------------------------------------


def _torchvision(make: Callable[[Any], nn.Module]) -> nn.Module:
    return make(import_module("torchvision.models"))


def _narrow(model: Any, width: int) -> nn.Module:
    """A model whose two wide layers before the last, nine tenths of its numbers, are narrow."""
    for place, layer in enumerate(model.classifier):
        if isinstance(layer, nn.Linear):
            last = place == len(model.classifier) - 1
            model.classifier[place], width = nn.Linear(width, CLASSES if last else 32), 32
    narrow: nn.Module = model
    return narrow


def _levels(m: Any, **levels: str) -> nn.Module:
    """What a small MobileNetV2 gives at some of its levels, for a head of another task."""
    model: nn.Module = m._utils.IntermediateLayerGetter(
        m.mobilenet_v2(width_mult=0.25).features, {level: name for name, level in levels.items()}
    )
    return model


def _inception(blocks: Any) -> nn.Module:
    """The blocks of Inception v3, of which the whole model has eleven and 22 million numbers."""
    return nn.Sequential(
        blocks.BasicConv2d(3, 16, kernel_size=3, stride=2), blocks.InceptionA(16, 8), blocks.InceptionB(232),
        blocks.InceptionC(712, 8), blocks.InceptionD(768), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(1280, CLASSES),
    )  # fmt: skip


def _blocks(m: Any) -> list[Any]:
    """Two blocks of EfficientNet."""
    block = m.efficientnet.MBConvConfig
    return [block(1, 3, 1, 16, 8, 1, 1, 1), block(4, 5, 2, 8, 16, 2, 1, 1)]


_TORCHVISION: dict[str, Callable[[Any], nn.Module]] = {
    "alexnet": lambda m: _narrow(m.alexnet(), 256 * 36),
    "vgg11_bn": lambda m: _narrow(
        m.VGG(m.vgg.make_layers([8, "M", 16, "M", 16, "M", 32, "M", 32, "M"], batch_norm=True)), 32 * 49),
    "resnet": lambda m: m.ResNet(m.resnet.BasicBlock, (1, 1, 1, 1), CLASSES),
    "resnext": lambda m: m.ResNet(m.resnet.Bottleneck, (1, 1, 1, 1), CLASSES, groups=4, width_per_group=4),
    "densenet": lambda m: m.DenseNet(8, (2, 2), 16, num_classes=CLASSES),
    "googlenet": lambda m: m.googlenet(num_classes=CLASSES, aux_logits=False, init_weights=False),
    "squeezenet1_1": lambda m: m.squeezenet1_1(num_classes=CLASSES),
    "shufflenet_v2": lambda m: m.ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 64], CLASSES),
    "mobilenet_v2": lambda m: m.mobilenet_v2(num_classes=CLASSES, width_mult=0.25),
    "mobilenet_v3": lambda m: m.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25),
    "mnasnet": lambda m: m.MNASNet(0.25, CLASSES),
    "efficientnet": lambda m: m.EfficientNet(_blocks(m), 0.2, num_classes=CLASSES),
    "regnet": lambda m: m.RegNet(m.regnet.BlockParams.from_init_params(2, 16, 16.0, 2.5, 8), CLASSES, 16),
    "convnext": lambda m: m.ConvNeXt([m.convnext.CNBlockConfig(8, 16, 1), m.convnext.CNBlockConfig(16, None, 1)], 0.1,
                                     num_classes=CLASSES),
    "vit": lambda m: m.VisionTransformer(32, 8, 2, 2, 16, 32, 0.1, num_classes=CLASSES),
    "swin": lambda m: m.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=CLASSES),
    "swin_v2": lambda m: m.SwinTransformer(
        [4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=CLASSES, block=m.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=m.swin_transformer.PatchMergingV2),
    "maxvit": lambda m: m.MaxVit((32, 32), 8, 4, [16, 16], [1, 1], 8, 0.1, num_classes=CLASSES),
    "inception_v3": lambda m: _inception(m.inception),
    "deeplabv3": lambda m: Maps(m.segmentation.DeepLabV3(
        _levels(m, out="13"), m.segmentation.deeplabv3.DeepLabHead(24, CLASSES, (2, 3, 4)))),
    "fcn": lambda m: Maps(m.segmentation.FCN(_levels(m, out="13"), m.segmentation.fcn.FCNHead(24, CLASSES))),
    "lraspp": lambda m: Maps(m.segmentation.LRASPP(_levels(m, low="3", high="13"), 8, 24, CLASSES, 16)),
    "r3d": lambda m: m.video.resnet.VideoResNet(
        m.video.resnet.BasicBlock, [m.video.resnet.Conv3DSimple] * 4, [1, 1, 1, 1], m.video.resnet.BasicStem, CLASSES),
}  # fmt: skip
_PIXELS = {"alexnet": 64, "PAN": 128}
"""Pixels of what does not take 32."""


def films(generator: torch.Generator) -> Tensor:
    return torch.rand((SAMPLES, 3, 4, 16, 16), generator=generator) - 0.5


# -- segmentation_models_pytorch -----------------------------------------------------------------------------------

_DECODERS: dict[str, dict[str, Any]] = {
    "Unet": {"decoder_channels": (16, 8, 8)},
    "UnetPlusPlus": {"decoder_channels": (16, 8, 8)},
    "MAnet": {"decoder_channels": (16, 8, 8), "decoder_pab_channels": 8},
    "Linknet": {},
    "FPN": {"encoder_depth": 5, "decoder_pyramid_channels": 16, "decoder_segmentation_channels": 32},
    "PSPNet": {"psp_out_channels": 16},
    "PAN": {"encoder_depth": 5, "decoder_channels": 8},
    "DeepLabV3": {"decoder_channels": 16, "decoder_atrous_rates": (2, 3, 4)},
    "DeepLabV3Plus": {"encoder_depth": 5, "decoder_channels": 16, "decoder_atrous_rates": (2, 3, 4)},
    "UPerNet": {"encoder_depth": 5, "decoder_channels": 16},
    "Segformer": {"encoder_depth": 5, "decoder_segmentation_channels": 16},
}


def _segmentation(name: str, settings: dict[str, Any]) -> nn.Module:
    settings = {"encoder_depth": 3, **settings}
    library = import_module("segmentation_models_pytorch")
    return Maps(getattr(library, name)("tu-lcnet_050", encoder_weights=None, classes=CLASSES, **settings))


def vision_families() -> dict[str, Family]:
    timm = {
        name: Family("timm", partial(_timm, name, settings), partial(images, pixels=_side(settings)))
        for name, settings in _TIMM.items()
    }
    torchvision = {
        name: Family("torchvision", partial(_torchvision, make), partial(images, pixels=_PIXELS.get(name, 32)))
        for name, make in _TORCHVISION.items()
    }
    torchvision["r3d"] = torchvision["r3d"]._replace(batch=films)
    segmentation = {
        name: Family(
            "segmentation_models_pytorch",
            partial(_segmentation, name, settings),
            partial(images, pixels=_PIXELS.get(name, 32)),
        )
        for name, settings in _DECODERS.items()
    }
    return {
        f"{family.library}.{name}": family
        for found in (timm, torchvision, segmentation)
        for name, family in found.items()
    }
