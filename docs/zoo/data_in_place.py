"""An in-place change through `.data` makes the gradient wrong, without an error.

The sigmoid saves its result for its derivative. Autograd normally detects an in-place change, because a tensor counts
its changes; `.data` shares the memory but not the counter. The backward pass then uses the changed values, as if the
sigmoid had returned them.
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
