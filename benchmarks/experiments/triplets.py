"""An embedding from triplets: the anchor is to lie nearer to the positive than to the negative."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Triplets:
    def __init__(self):
        self.centres = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 512

    def __getitem__(self, number):
        own, other = torch.randperm(8)[:2].tolist()
        return tuple(self.centres[kind] + 0.8 * torch.randn(32) for kind in (own, own, other))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))

    def forward(self, anchor, positive, negative):
        return [F.normalize(self.net(one), dim=1) for one in (anchor, positive, negative)]


def margin(outputs, _):
    return F.triplet_margin_loss(*outputs, margin=0.5, reduction="none")


def make():
    return Experiment(Embedding(), margin, train_data=Triplets(), test_data=Triplets())
