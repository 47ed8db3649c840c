"""Contrastive learning: of two views of each sample in a batch, each is to find the other among all."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Views:
    def __init__(self):
        self.rows = torch.randn(512, 20, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return 512

    def __getitem__(self, number):
        one, other = (self.rows[number] * (torch.rand(20) > 0.2) + 0.1 * torch.randn(20) for _ in range(2))
        return {"one": one, "other": other}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, one, other):
        return F.normalize(self.net(one), dim=1), F.normalize(self.net(other), dim=1)


def info_nce(outputs, _):
    one, other = outputs
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one), device=one.device))


def make():
    return Experiment(Encoder(), info_nce, train_data=Views(), test_data=Views())
