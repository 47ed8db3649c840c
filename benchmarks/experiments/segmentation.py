"""Segmentation by a small U-Net; image and mask are cropped and mirrored alike, at random."""

import torch
from torch import nn
from torch.nn import functional as F

from samebits import Experiment


class Discs:
    def __init__(self, train):
        self.train = train
        grid = torch.stack(torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij"), -1)
        centres = 6 + 12 * torch.rand(64, 2, generator=torch.Generator().manual_seed(1))
        self.masks = [((grid - centre).norm(dim=-1) < 5).long() for centre in centres]

    def __len__(self):
        return 512

    def __getitem__(self, number):
        mask = self.masks[number % 64]
        image = mask + 0.5 * torch.randn(24, 24)
        top, left = torch.randint(0, 9, (2,)).tolist() if self.train else (4, 4)
        image, mask = (one[top : top + 16, left : left + 16] for one in (image, mask))
        if self.train and torch.rand(()) < 0.5:
            image, mask = image.flip(1), mask.flip(1)
        return image[None], mask


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.low = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 2, 1)

    def forward(self, image):
        high = F.relu(self.down(image))
        low = F.relu(self.low(F.max_pool2d(high, 2)))
        return self.head(torch.cat([high, self.up(low)], dim=1)).movedim(1, -1)


def make():
    return Experiment(UNet(), train_data=Discs(train=True), test_data=Discs(train=False))
