"""Two tasks with one body: a class and a number, with a weight that is trained for each."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Rows:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        x = torch.randn(16)
        return x, {"kind": int(x[:4].sum() > 0), "value": x[4:].abs().mean()}


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.value = nn.Linear(16, 32), nn.Linear(32, 2), nn.Linear(32, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        x = torch.relu(self.body(x))
        return self.kind(x), self.value(x).squeeze(1), self.log_variances.expand(len(x), 2)


def both(outputs, targets):
    kind, value, log_variances = outputs
    losses = torch.stack([
        F.cross_entropy(kind, targets["kind"], reduction="none"), (value - targets["value"]).pow(2)
    ], dim=1)  # fmt: skip
    return (losses * (-log_variances).exp() + log_variances).sum(1)


def groups(model):
    free = [parameter for name, parameter in model.named_parameters() if name == "log_variances"]
    rest = [parameter for name, parameter in model.named_parameters() if name != "log_variances"]
    return [{"params": rest}, {"params": free, "weight_decay": 0.0}]


def make():
    return Experiment(TwoTasks(), both, groups, train_data=Rows(), test_data=Rows())
