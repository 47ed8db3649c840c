"""Masked language modelling with a transformer's encoder; the dataset masks tokens at random."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment

WORDS, LENGTH, MASK = 32, 16, 0


class Masked:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        tokens = (number + torch.arange(LENGTH) * (1 + number % 3)) % (WORDS - 1) + 1
        masked = torch.rand(LENGTH) < 0.2
        return {"input_ids": tokens.masked_fill(masked, MASK), "labels": tokens.masked_fill(~masked, -100)}


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(LENGTH, width))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids, labels):
        x = self.tokens(input_ids) + self.places
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def masked_loss(outputs, batch):
    losses = F.cross_entropy(outputs["logits"].transpose(1, 2), batch["labels"], reduction="none", ignore_index=-100)
    return losses.sum(1) / LENGTH


def make():
    return Experiment(Encoder(), masked_loss, train_data=Masked(), test_data=Masked())
