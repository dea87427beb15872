"""A copy of the parameters follows them.

`detach` cuts the graph and shares the memory: the optimiser's step changes the "old" weights too. A penalty on the
distance from these weights is always zero, and so is its gradient.
"""

import torch
from torch import nn

SOURCES = ["mlverse/torch#441", "datawhalechina/easy-rl#117", "ai2cm/ace#1009"]
MOVES, STAYS = ["model"], []


def buggy():
    networks, optimizer = setup()
    old = [parameter.detach() for parameter in networks.parameters()]
    optimizer.step()

    def penalty():
        return sum((new - kept).square().sum() for new, kept in zip(networks.parameters(), old, strict=True))

    return penalty, networks


def fixed():
    networks, optimizer = setup()
    old = [parameter.detach().clone() for parameter in networks.parameters()]
    optimizer.step()

    def penalty():
        return sum((new - kept).square().sum() for new, kept in zip(networks.parameters(), old, strict=True))

    return penalty, networks


def setup():
    networks = nn.ModuleDict({"model": nn.Linear(4, 3)})
    networks["model"](torch.randn(8, 4)).square().mean().backward()
    return networks, torch.optim.SGD(networks.parameters(), lr=0.1)
