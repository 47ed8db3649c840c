"""A recommendation model in the manner of DLRM: embeddings of categories, their products, and dense features."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment

SIZES = (50, 20, 8)


class Clicks:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        categories = torch.stack([torch.randint(size, ()) for size in SIZES])
        dense = torch.rand(4)
        clicked = torch.rand(()) < 0.2 + 0.6 * (categories[0] % 2) * dense[0]
        return {"dense": dense, "categories": categories, "clicked": clicked.float()}


class DLRM(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in SIZES)
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width))
        self.top = nn.Sequential(nn.Linear(width + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, categories, clicked):
        dense = self.bottom(dense)
        every = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = every @ every.transpose(1, 2)
        rows, columns = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([dense, products[:, rows, columns]], dim=1)).squeeze(1)


def log_loss(outputs, batch):
    return F.binary_cross_entropy_with_logits(outputs, batch["clicked"], reduction="none")


def make():
    return Experiment(DLRM(), log_loss, train_data=Clicks(), test_data=Clicks())
