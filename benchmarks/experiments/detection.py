"""Detection in a grid: each cell says whether an object is in it, of which class, and where its box lies."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Squares:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        image, kind, size = 0.1 * torch.randn(1, 32, 32), number % 3, 4 + number % 5
        top, left = torch.randint(0, 32 - size, (2,)).tolist()
        image[:, top : top + size, left : left + size] += kind + 1
        row, column = (top + size // 2) // 8, (left + size // 2) // 8
        here = torch.zeros(4, 4)
        here[row, column] = 1
        return {"image": image, "here": here, "kind": kind, "box": torch.tensor([top, left, size, size]) / 32}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in ((1, 8), (8, 16), (16, 32))]
        self.body = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        self.head = nn.Conv2d(32, 1 + 3 + 4, 1)

    def forward(self, samples):
        return self.head(self.body(samples["image"])).movedim(1, -1)


def detection_loss(outputs, batch):
    objectness = F.binary_cross_entropy_with_logits(outputs[..., 0], batch["here"], reduction="none").mean((1, 2))
    cell = (outputs[..., 1:] * batch["here"][..., None]).sum((1, 2))
    kinds = F.cross_entropy(cell[:, :3], batch["kind"], reduction="none")
    return objectness + kinds + F.smooth_l1_loss(cell[:, 3:], batch["box"], reduction="none").sum(1)


def found(outputs, batch):
    return outputs[..., 0].flatten(1).argmax(1) == batch["here"].flatten(1).argmax(1)


def make():
    return Experiment(Detector(), detection_loss, train_data=Squares(), test_data=Squares(), metrics={"found": found})
