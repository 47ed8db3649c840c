"""A variational autoencoder, whose forward draws noise."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Blobs:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        centre = 2 + 12 * torch.rand(2)
        grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"), -1)
        return {"image": (-(grid - centre).pow(2).sum(-1) / 8).exp().flatten()}


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 256), nn.Sigmoid())

    def forward(self, image):
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def evidence(outputs, batch):
    image, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1)
    return F.mse_loss(image, batch["image"], reduction="none").sum(1) + divergence


def make():
    return Experiment(VAE(), evidence, train_data=Blobs(), test_data=Blobs())
