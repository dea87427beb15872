"""pytorch-crf 0.7.2: the likelihood of a linear chain."""

import torch
from torch import nn
from torchcrf import CRF


def likelihood():
    layer, chain, x, tags = nn.Linear(4, 5), CRF(5), torch.randn(6, 2, 4), torch.randint(5, (6, 2))
    return lambda: -chain(layer(x), tags), nn.ModuleList([layer, chain])


def masked_likelihood():
    layer, chain, x, tags = nn.Linear(4, 5), CRF(5), torch.randn(6, 2, 4), torch.randint(5, (6, 2))
    mask = torch.arange(6)[:, None] < torch.tensor([6, 4])
    return lambda: -chain(layer(x), tags, mask=mask, reduction="mean"), nn.ModuleList([layer, chain])
