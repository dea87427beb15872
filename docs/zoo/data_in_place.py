"""A change in place through `.data` makes the gradient wrong, and nobody notices.

The sigmoid keeps its result for its own derivative. A change in place would normally be noticed, because a tensor
counts its changes; `.data` shares the memory but not the count. The backward pass then uses the changed values, as if
the sigmoid had returned them.
"""

import torch
from torch import nn

SOURCES = ["pytorch/pytorch#6990", "pytorch/pytorch#7000", "pytorch/pytorch#30987"]
MOVES, STAYS = ["gate", "value"], []


def buggy():
    networks, x = setup()

    def loss():
        gate = networks["gate"](x).sigmoid()
        gate.data.clamp_(min=0.4)
        return (gate * networks["value"](x)).square().mean()

    return loss, networks


def fixed():
    networks, x = setup()

    def loss():
        gate = networks["gate"](x).sigmoid()
        gate = gate.clamp(min=0.4)
        return (gate * networks["value"](x)).square().mean()

    return loss, networks


def setup():
    return nn.ModuleDict({"gate": nn.Linear(4, 3), "value": nn.Linear(4, 3)}), torch.randn(8, 4)
