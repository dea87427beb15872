"""e3nn 0.6.0: equivariant layers."""

import torch
from e3nn import nn as equivariant
from e3nn import o3
from torch import nn


def normalized_product():
    product = o3.FullyConnectedTensorProduct("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o")
    norm, x, y = equivariant.BatchNorm("2x0e+1x1o"), torch.randn(4, 5), torch.randn(4, 4)
    return lambda: norm(product(x, y)).pow(3).sum().abs(), nn.ModuleList([product, norm])


def gated():
    linear = o3.Linear("4x0e+2x1o", "5x0e+2x0e+2x1o")
    gate = equivariant.Gate("5x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
    x = torch.randn(4, 10)
    return lambda: gate(linear(x)).square().mean(), linear
