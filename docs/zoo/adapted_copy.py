"""Meta-learning adapts a copy that is cut off from the initial parameters.

MAML learns initial parameters from which few steps of gradient descent fit a new task. The steps are taken on a copy of
the network. If the copy is detached, the outer loss falls from step to step of the inner loop, but no gradient reaches
the initial parameters, and nothing is learned. In the library higher such a copy is the default.
"""

import torch
from torch import nn
from torch.nn.functional import linear, mse_loss

SOURCES = ["facebookresearch/higher#30", "facebookresearch/higher#54", "facebookresearch/higher#69"]
MOVES, STAYS = ["start"], []


def buggy():
    networks, x, y = setup()

    def loss():
        adapted = [parameter.detach().requires_grad_() for parameter in networks["start"].parameters()]
        for _ in range(3):
            slopes = torch.autograd.grad(mse_loss(linear(x[:4], *adapted), y[:4]), adapted, create_graph=True)
            adapted = [parameter - 0.1 * slope for parameter, slope in zip(adapted, slopes, strict=True)]
        return mse_loss(linear(x[4:], *adapted), y[4:])

    return loss, networks


def fixed():
    networks, x, y = setup()

    def loss():
        adapted = list(networks["start"].parameters())
        for _ in range(3):
            slopes = torch.autograd.grad(mse_loss(linear(x[:4], *adapted), y[:4]), adapted, create_graph=True)
            adapted = [parameter - 0.1 * slope for parameter, slope in zip(adapted, slopes, strict=True)]
        return mse_loss(linear(x[4:], *adapted), y[4:])

    return loss, networks


def setup():
    return nn.ModuleDict({"start": nn.Linear(3, 2)}), torch.randn(8, 3), torch.randn(8, 2)
