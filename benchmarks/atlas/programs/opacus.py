"""opacus 1.6.0: gradients of each sample."""

import torch
from opacus import GradSampleModule
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn


def _of_samples(layers, x):
    model = GradSampleModule(layers)
    return lambda: model(x).square().mean(), model


def feed_forward():
    return _of_samples(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(8, 4))


def convolution():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU())
    return _of_samples(layers, torch.randn(4, 1, 8, 8))


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = DPLSTM(4, 8, batch_first=True)

        def forward(self, x):
            return self.recurrent(x)[0]

    return _of_samples(Last(), torch.randn(3, 5, 4))


def attention():
    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = DPMultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    return _of_samples(Self(), torch.randn(3, 5, 8))
