"""A term of the loss is a plain number without a gradient.

One term is converted to a plain float, so that a log of it does not keep the graph. The total is right to the last
digit, but its gradient is that of the other term, for any weight of the first.
"""

import torch
from torch import nn

SOURCES = ["guopengf/FL-MRCM#10", "isayev/ReLeaSE#39", "yifita/deep_cage#16"]
MOVES, STAYS = ["encoder", "decoder"], []


def buggy():
    networks, x = setup()

    def loss():
        code = networks["encoder"](x)
        reconstruction = (networks["decoder"](code) - x).square().mean()
        sparsity = code.abs().mean().item()
        return reconstruction + 0.1 * sparsity

    return loss, networks


def fixed():
    networks, x = setup()

    def loss():
        code = networks["encoder"](x)
        reconstruction = (networks["decoder"](code) - x).square().mean()
        sparsity = code.abs().mean()
        return reconstruction + 0.1 * sparsity

    return loss, networks


def setup():
    return nn.ModuleDict({"encoder": nn.Linear(4, 3), "decoder": nn.Linear(3, 4)}), torch.randn(8, 4)
