"""Families of libraries for other data than images: diffusers, torch_geometric, and ones of tables and of sounds."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from families import SAMPLES, TOKENS, Family, Maps, Named, images, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

PLACES, WIDTH, CLASSES = 12, 8, 5


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand((SAMPLES, *shape), generator=generator) - 0.5


def _of(
    module: str, batch: Callable[[torch.Generator], Tensor], **makes: Callable[[Any], nn.Module]
) -> dict[str, Family]:
    """Families of one library, of functions that make them of one of its modules."""
    library = module.partition(".")[0]
    return {f"{library}.{name}": Family(library, partial(_made, module, make), batch) for name, make in makes.items()}


def _made(module: str, make: Callable[[Any], nn.Module]) -> nn.Module:
    return make(import_module(module))


class First(nn.Module):
    """A model that gives more than one tensor, of which the first is its answer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        y: Tensor = self.model(*inputs)[0]
        return y


# -- diffusers -----------------------------------------------------------------------------------------------------


def _whole(number: int) -> Callable[[Tensor], Tensor]:
    """The same whole number for each sample, as a time or as a class."""
    return lambda x: torch.full((len(x),), number, device=x.device)


def _column(x: Tensor) -> Tensor:
    """What conditions a model: three places of as many numbers as the image is high."""
    return x[..., 0]


def _ones(x: Tensor, *shape: int) -> Tensor:
    """Conditions that are the same for each sample."""
    return torch.ones((len(x), *shape), device=x.device)


_LEVELS: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
_CODER: dict[str, Any] = {**_LEVELS, "down_block_types": ("DownEncoderBlock2D",) * 2,
                          "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
_DIT: dict[str, Any] = {**_HEADS, "in_channels": 3, "sample_size": 16, "norm_num_groups": 1}
_TIME = {"timestep": _whole(7)}


def _diffusers_families() -> dict[str, Family]:
    found = _of(
        "diffusers", partial(images, pixels=16),
        UNet2DModel=lambda d: Maps(Named(
            d.UNet2DModel(**_LEVELS, out_channels=CLASSES, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                          up_block_types=("AttnUpBlock2D", "UpBlock2D"), dropout=0.1),
            "sample", **_TIME)),
        UNet2DConditionModel=lambda d: Maps(Named(
            d.UNet2DConditionModel(
                **_LEVELS, in_channels=3, out_channels=CLASSES, cross_attention_dim=16, attention_head_dim=4,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
            "sample", encoder_hidden_states=_column, **_TIME)),
        AutoencoderKL=lambda d: Maps(Named(
            d.AutoencoderKL(**_CODER, out_channels=CLASSES), "sample", sample_posterior=lambda _: True)),
        AutoencoderKL_mode=lambda d: Maps(Named(d.AutoencoderKL(**_CODER, out_channels=CLASSES), "sample")),
        VQModel=lambda d: Maps(Named(d.VQModel(**_CODER, out_channels=CLASSES, num_vq_embeddings=16), "sample")),
        AutoencoderTiny=lambda d: Maps(Named(
            d.AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
                              num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)), "sample")),
        DiTTransformer2DModel=lambda d: Maps(Named(
            d.DiTTransformer2DModel(**_DIT, num_embeds_ada_norm=10), "hidden_states", class_labels=_whole(3), **_TIME)),
        Transformer2DModel=lambda d: Maps(Named(
            d.Transformer2DModel(**_DIT, cross_attention_dim=16), "hidden_states", encoder_hidden_states=_column)),
        PixArtTransformer2DModel=lambda d: Maps(Named(
            d.PixArtTransformer2DModel(**_DIT, out_channels=6, cross_attention_dim=16, caption_channels=16,
                                       use_additional_conditions=False),
            "hidden_states", encoder_hidden_states=_column, **_TIME)),
        SD3Transformer2DModel=lambda d: Maps(Named(
            d.SD3Transformer2DModel(16, in_channels=3, out_channels=CLASSES, **_HEADS, joint_attention_dim=16,
                                    caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=16),
            "hidden_states", encoder_hidden_states=_column, pooled_projections=lambda x: x[:, 0, 0], **_TIME)),
        UVit2DModel=lambda d: Maps(Named(
            d.UVit2DModel(16, cond_embed_dim=8, micro_cond_encode_dim=4, micro_cond_embed_dim=20, encoder_hidden_size=8,
                          vocab_size=TOKENS, codebook_size=TOKENS, in_channels=16, block_out_channels=16,
                          num_res_blocks=1, block_num_heads=2, num_hidden_layers=2, num_attention_heads=2,
                          intermediate_size=32),
            "input_ids", encoder_hidden_states=lambda x: _ones(x, 3, 8), pooled_text_emb=lambda x: _ones(x, 8),
            micro_conds=lambda x: _ones(x, 5))),
        FluxTransformer2DModel=lambda d: Named(
            d.FluxTransformer2DModel(in_channels=16, out_channels=CLASSES, **_HEADS, num_single_layers=1,
                                     joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4)),
            "hidden_states", encoder_hidden_states=lambda x: x[:, :4], pooled_projections=lambda x: x[:, 0],
            txt_ids=lambda _: torch.zeros(4, 3), img_ids=lambda x: torch.zeros(x.shape[1], 3), **_TIME),
        UNet1DModel=lambda d: Maps(Named(
            d.UNet1DModel(block_out_channels=(32, 32, 64), out_channels=CLASSES, extra_in_channels=64), "sample",
            **_TIME)),
        AutoencoderOobleck=lambda d: Maps(Named(
            d.AutoencoderOobleck(8, [2, 4], [1, 2], decoder_channels=8, decoder_input_channels=4), "sample",
            sample_posterior=lambda _: True)),
    )  # fmt: skip
    batches: dict[str, Callable[[torch.Generator], Tensor]] = {
        "FluxTransformer2DModel": lambda generator: numbers(generator, 16, 16),
        "UVit2DModel": lambda generator: tokens(generator).view(SAMPLES, 4, 4),
        "UNet1DModel": lambda generator: numbers(generator, 2, 64),
        "AutoencoderOobleck": lambda generator: numbers(generator, 2, 64),
    }
    return found | {
        name: family._replace(batch=batches[kind])
        for name, family in found.items() if (kind := name.split(".")[1]) in batches
    }  # fmt: skip


# -- torch_geometric -----------------------------------------------------------------------------------------------


def _edges(samples: int) -> Tensor:
    """Edges of a batch of equal graphs, each a ring with chords."""
    here = torch.arange(PLACES)
    ring = torch.cat([torch.stack([here, (here + step) % PLACES]) for step in (1, -1, 3)], 1)
    return (ring[:, None] + PLACES * torch.arange(samples)[:, None]).flatten(1)


def _of_edges(edges: Tensor) -> Tensor:
    """Two numbers for each edge."""
    step = (edges[1] - edges[0]).float()
    return torch.stack([step, step.abs()], 1) / PLACES


class Graphs(nn.Module):
    """A batch of graphs as one, through layers, of which each gets of its settings what it names, and pooled."""

    def __init__(self, layers: list[nn.Module], pool: nn.Module, width: int = 16, **settings: str) -> None:
        super().__init__()
        self.layers, self.pool, self.settings = nn.ModuleList(layers), pool, settings
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        edges = _edges(len(x))
        known = {"edges": edges, "of_edges": _of_edges(edges), "positions": x.flatten(0, 1)[:, :3],
                 "kinds": edges[0] % 2, "graphs": torch.arange(len(x)).repeat_interleave(PLACES)}  # fmt: skip
        hidden = x.flatten(0, 1)
        for layer in self.layers:
            hidden = layer(hidden, **{name: known[key] for name, key in self.settings.items()}).relu()
        y: Tensor = self.head(self.pool(hidden, known["graphs"]))
        return y


class DensePooled(nn.Module):
    """Dense graphs, pooled into clusters that are learned, as in DiffPool."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.layer, self.clusters = library.DenseGCNConv(WIDTH, 16), library.DenseSAGEConv(WIDTH, 4)
        self.pool, self.head = library.dense_diff_pool, nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        adjacency = torch.zeros(PLACES, PLACES).index_put(tuple(_edges(1)), torch.ones(())).expand(len(x), -1, -1)
        hidden, *_ = self.pool(self.layer(x, adjacency).relu(), adjacency, self.clusters(x, adjacency))
        y: Tensor = self.head(hidden.mean(1))
        return y


class Atoms(nn.Module):
    """SchNet on atoms whose bonds are given, with a number for each molecule."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.model = library.SchNet(16, 16, 2, 8, interaction_graph=self.bonds)
        self.head = nn.Linear(1, CLASSES)

    def bonds(self, positions: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        edges = _edges(len(positions) // PLACES)
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        molecules = torch.arange(len(x)).repeat_interleave(PLACES)
        y: Tensor = self.head(self.model(1 + torch.arange(len(x) * PLACES) % 5, x.flatten(0, 1)[:, :3], molecules))
        return y


def _geometric_families() -> dict[str, Family]:
    def stack(
        make: Callable[[Any, int], nn.Module], pool: str = "MeanAggregation", **settings: str
    ) -> Callable[[Any], nn.Module]:
        settings = settings or {"edge_index": "edges"}
        return lambda g: Graphs(
            [make(g, WIDTH), make(g, 16)],
            g.Set2Set(16, 2) if pool == "Set2Set" else getattr(g, pool)(),
            32 if pool == "Set2Set" else 16,
            **settings,
        )

    def whole(name: str, pool: str = "MeanAggregation", **settings: Any) -> Callable[[Any], nn.Module]:
        return lambda g: Graphs([getattr(g, name)(WIDTH, 16, 2, **settings)], getattr(g, pool)(), edge_index="edges")

    def mlp(inputs: int, outputs: int = 16) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))

    with_edges = {"edge_index": "edges", "edge_attr": "of_edges"}
    with_places = {"edge_index": "edges", "pos": "positions"}
    return _of(
        "torch_geometric.nn", lambda generator: numbers(generator, PLACES, WIDTH),
        GCN=whole("GCN", dropout=0.1, norm="BatchNorm"),
        GAT=whole("GAT", heads=2, dropout=0.1),
        GraphSAGE=whole("GraphSAGE", "MaxAggregation", norm="LayerNorm"),
        GIN=whole("GIN", "SumAggregation", jk="cat"),
        PNA=whole("PNA", aggregators=["mean", "min", "max", "std"], scalers=["identity", "amplification"],
                  deg=torch.tensor([0, 0, 0, PLACES])),
        EdgeCNN=whole("EdgeCNN"),
        GraphUNet=lambda g: Graphs([g.GraphUNet(WIDTH, 16, 16, 2)], g.MeanAggregation(), edge_index="edges",
                                   batch="graphs"),
        ChebConv=stack(lambda g, width: g.ChebConv(width, 16, 3)),
        GATv2Conv=stack(lambda g, width: g.GATv2Conv(width, 8, heads=2, edge_dim=2), **with_edges),
        TransformerConv=stack(lambda g, width: g.TransformerConv(width, 8, heads=2, edge_dim=2, dropout=0.1),
                              **with_edges),
        GINEConv=stack(lambda g, width: g.GINEConv(mlp(width), edge_dim=2), "Set2Set", **with_edges),
        RGCNConv=stack(lambda g, width: g.RGCNConv(width, 16, 2), edge_index="edges", edge_type="kinds"),
        GatedGraphConv=stack(lambda g, _: g.GatedGraphConv(16, 2)),
        GPSConv=lambda g: Graphs([g.GPSConv(WIDTH, g.GCNConv(WIDTH, WIDTH), heads=2)], g.AttentionalAggregation(
            nn.Linear(WIDTH, 1)), WIDTH, edge_index="edges", batch="graphs"),
        PointNetConv=stack(lambda g, width: g.PointNetConv(mlp(width + 3), mlp(16)), "MaxAggregation", **with_places),
        PointTransformerConv=stack(lambda g, width: g.PointTransformerConv(width, 16), **with_places),
        DenseGCNConv=DensePooled,
        SchNet=Atoms,
    )  # fmt: skip


# -- tables and sounds ---------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A model of tables that gets categories beside numbers: the last two columns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x[:, :-2], (x[:, -2:] > 0).long())
        return y


def _table_families() -> dict[str, Family]:
    table = partial(_of, batch=lambda generator: numbers(generator, WIDTH))
    block: dict[str, Any] = {"n_blocks": 2, "d_block": 16}
    attention: dict[str, Any] = {
        "attention_n_heads": 2, "attention_dropout": 0.1, "ffn_d_hidden": None, "ffn_d_hidden_multiplier": 2.0,
        "ffn_dropout": 0.1, "residual_dropout": 0.0,
    }  # fmt: skip
    return {
        **table(
            "rtdl_revisiting_models",
            MLP=lambda r: r.MLP(d_in=WIDTH, d_out=CLASSES, **block, dropout=0.1),
            ResNet=lambda r: r.ResNet(d_in=WIDTH, d_out=CLASSES, **block, d_hidden_multiplier=2.0, dropout1=0.1,
                                      dropout2=0.0),
            FTTransformer=lambda r: Table(r.FTTransformer(
                n_cont_features=WIDTH - 2, cat_cardinalities=[2, 2], d_out=CLASSES, **block, **attention)),
        ),
        **table(
            "rtdl_num_embeddings",
            PeriodicEmbeddings=lambda r: nn.Sequential(
                r.PeriodicEmbeddings(WIDTH, 4, n_frequencies=4, lite=False), nn.Flatten(),
                nn.Linear(4 * WIDTH, CLASSES)),
            PiecewiseLinearEmbeddings=lambda r: nn.Sequential(
                r.PiecewiseLinearEmbeddings([torch.linspace(-0.5, 0.5, 5)] * WIDTH, 4, activation=True, version="B"),
                nn.Flatten(), nn.Linear(4 * WIDTH, CLASSES)),
        ),
        **table(
            "tabm",
            TabM=lambda t: Table(t.TabM.make(
                n_num_features=WIDTH - 2, cat_cardinalities=[2, 2], d_out=CLASSES, k=4, **block)),
        ),
        **table(
            "pytorch_tabnet.tab_network",
            TabNet=lambda t: First(t.TabNet(
                WIDTH, CLASSES, n_d=4, n_a=4, group_attention_matrix=torch.eye(WIDTH))),
            TabNet_entmax=lambda t: First(t.TabNet(
                WIDTH, CLASSES, n_d=4, n_a=4, group_attention_matrix=torch.eye(WIDTH), mask_type="entmax")),
        ),
    }  # fmt: skip


def _sound_families() -> dict[str, Family]:
    return {
        **_of(
            "conformer", lambda generator: numbers(generator, PLACES, 16),
            Conformer=lambda c: c.Conformer(16, depth=2, dim_head=8, heads=2, conv_kernel_size=7, ff_dropout=0.1),
        ),
        **_of(
            "snac", lambda generator: numbers(generator, 1, 1024),
            SNAC=lambda s: Maps(nn.Sequential(
                First(s.SNAC(encoder_dim=16, encoder_rates=[2, 4], decoder_dim=128, decoder_rates=[4, 2],
                             attn_window_size=4, codebook_size=16, codebook_dim=4, vq_strides=[2, 1])),
                nn.Conv1d(1, CLASSES, 1))),
        ),
    }  # fmt: skip


def other_families() -> dict[str, Family]:
    return {**_diffusers_families(), **_geometric_families(), **_table_families(), **_sound_families()}
