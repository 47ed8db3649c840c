"""Two networks with an optimizer each, which the kit does not train."""

import torch
from torch import nn

from samebits import Experiment


class Points:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        return torch.randn(2) * 0.1 + 1


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, real):
        made = self.generator(torch.randn(len(real), 4))
        return self.critic(real), self.critic(made)


def make():
    net = GAN()
    two = [torch.optim.Adam(part.parameters(), 1e-3) for part in (net.generator, net.critic)]
    return Experiment(
        net, lambda outputs, _: (outputs[1] - outputs[0]).squeeze(1), optimizer=lambda groups: two,
        train_data=Points(), test_data=Points(),
    )  # fmt: skip
