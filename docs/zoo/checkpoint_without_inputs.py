"""A checkpoint whose inputs are all detached trains none of its parameters.

The reentrant checkpoint decides by its inputs whether a gradient is needed, and does not see the parameters inside. If
a block stands in front of it, the checkpoint records no graph. The loss is right, and every parameter inside keeps
`grad=None`. Torch only warns once.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SOURCES = ["InternLM/xtuner#2048", "mlfoundations/open_clip#573", "pytorch/pytorch#7617"]
MOVES, STAYS = ["block", "head"], ["backbone"]


def buggy():
    networks, x = setup()

    def loss():
        features = networks["backbone"](x).detach()
        features = checkpoint(networks["block"], features, use_reentrant=True)
        return networks["head"](features).square().mean()

    return loss, networks


def fixed():
    networks, x = setup()

    def loss():
        features = networks["backbone"](x).detach()
        features = checkpoint(networks["block"], features, use_reentrant=False)
        return networks["head"](features).square().mean()

    return loss, networks


def setup():
    networks = {"backbone": nn.Linear(4, 5), "block": nn.Linear(5, 5), "head": nn.Linear(5, 1)}
    return nn.ModuleDict(networks), torch.randn(8, 4)
