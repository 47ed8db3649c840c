"""A convolutional autoencoder that removes noise; the noise is of the dataset, and new in each epoch."""

import torch
from torch import nn

from samebits import Experiment


class Noisy:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        clean = torch.sin(torch.linspace(0, 3 + number % 7, 64)).view(1, 8, 8)
        return clean + 0.3 * torch.randn(1, 8, 8), clean


def make():
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.LeakyReLU(0.1), nn.MaxPool2d(2),
        nn.Conv2d(12, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.Upsample(scale_factor=2), nn.Conv2d(12, 1, 3, padding=1),
    )  # fmt: skip
    return Experiment(net, train_data=Noisy(), test_data=Noisy())
