"""Labels without alignment, by the CTC loss."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Sounds:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        labels = torch.randint(1, 6, (4,))
        return {"sound": F.one_hot(labels.repeat_interleave(4), 6) + 0.3 * torch.randn(16, 6), "labels": labels}


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(6, 24, 3, padding=1), nn.ReLU(), nn.Conv1d(24, 6, 3, padding=1))

    def forward(self, samples):
        return self.net(samples["sound"].transpose(1, 2)).log_softmax(1).permute(2, 0, 1)


def ctc(outputs, batch):
    lengths = [torch.full((len(batch["labels"]),), length) for length in (16, 4)]
    return F.ctc_loss(outputs, batch["labels"], *lengths, reduction="none")


def make():
    return Experiment(Recogniser(), ctc, train_data=Sounds(), test_data=Sounds())
