"""A model of two inputs, an image and some numbers, that come as a dictionary by keywords."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Pairs:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        image, numbers = torch.randn(1, 8, 8), torch.randn(6)
        return {"image": image, "numbers": numbers}, int(image.mean() + numbers[0] > 0)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(288, 16))
        self.numbers, self.head = nn.Linear(6, 16), nn.Linear(32, 2)

    def forward(self, image, numbers):
        return self.head(torch.cat([F.gelu(self.image(image)), F.gelu(self.numbers(numbers))], dim=1))


def make():
    return Experiment(TwoInputs(), train_data=Pairs(), test_data=Pairs())
