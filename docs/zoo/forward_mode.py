"""`no_grad` holds a scale constant in one mode of differentiation and not in the other.

The inputs are divided by a scale that should be a constant. The penalty needs a directional derivative, and forward
mode computes it cheaply; but `torch.no_grad` only stops reverse mode. `jacrev` and `jacfwd` of such a function
disagree. `detach` stops both modes.
"""

import torch
from torch import nn
from torch.func import jvp

SOURCES = ["pytorch/pytorch#128600", "pytorch/pytorch#78961", "pytorch/pytorch#189423"]
MOVES, STAYS = ["network"], []


def buggy():
    networks, x, direction = setup()

    def normalised(x):
        with torch.no_grad():
            scale = x.abs().amax(1, keepdim=True)
        return networks["network"](x / scale).tanh()

    def penalty():
        _, slope = jvp(normalised, (x,), (direction,))
        return slope.square().mean()

    return penalty, networks


def fixed():
    networks, x, direction = setup()

    def normalised(x):
        scale = x.abs().amax(1, keepdim=True).detach()
        return networks["network"](x / scale).tanh()

    def penalty():
        _, slope = jvp(normalised, (x,), (direction,))
        return slope.square().mean()

    return penalty, networks


def setup():
    return nn.ModuleDict({"network": nn.Linear(4, 3)}), torch.randn(8, 4), torch.randn(8, 4)
