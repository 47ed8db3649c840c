"""Sets of points, whose order does not matter: a maximum over what is computed for each."""

import torch
from torch import nn

from samebits import Experiment


class Clouds:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        kind = number % 3
        points = torch.randn(20, 3)
        points = points / points.norm(dim=1, keepdim=True).clamp_min(1e-3) if kind == 1 else points
        return points * torch.tensor([1.0, 1.0, 0.1 if kind == 2 else 1.0]), kind


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))

    def forward(self, points):
        return self.head(self.each(points).amax(1))


def make():
    return Experiment(PointNet(), train_data=Clouds(), test_data=Clouds())
