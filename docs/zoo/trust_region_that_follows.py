"""The old policy of a trust region moves along with the new one.

The Fisher matrix of a policy is the Hessian of its divergence from the old policy. At this moment both are the same
policy, so the divergence is zero, which many readers take for a mistake. If the old policy is not held, its derivatives
are zero too: the matrix vanishes, and no step is too long.
"""

import torch
from torch import nn

SOURCES = [
    "ajlangley/cpo-pytorch#10",
    "dongminlee94/deep_rl#5",
    "Khrylx/PyTorch-RL#11",
    "ikostrikov/pytorch-trpo#2",
]
MOVES, STAYS = ["policy"], []


def buggy():
    networks, states, vector = setup()

    def product():
        new = networks["policy"](states).log_softmax(1)
        old = new
        divergence = (old.exp() * (old - new)).sum(1).mean()
        slopes = torch.autograd.grad(divergence, list(networks["policy"].parameters()), create_graph=True)
        return sum((slope * v).sum() for slope, v in zip(slopes, vector, strict=True))

    return product, networks


def fixed():
    networks, states, vector = setup()

    def product():
        new = networks["policy"](states).log_softmax(1)
        old = new.detach()
        divergence = (old.exp() * (old - new)).sum(1).mean()
        slopes = torch.autograd.grad(divergence, list(networks["policy"].parameters()), create_graph=True)
        return sum((slope * v).sum() for slope, v in zip(slopes, vector, strict=True))

    return product, networks


def setup():
    networks = nn.ModuleDict({"policy": nn.Linear(4, 3)})
    return networks, torch.randn(8, 4), [torch.randn(3, 4), torch.randn(3)]
