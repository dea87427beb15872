"""A gradient without a graph is detached.

The result of `torch.autograd.grad` has no history unless `create_graph` is set. Detaching it has no effect, and makes
the next reader search for a reason.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

SOURCES = ["seanie12/CLAPS#3", "zhuchen03/FreeLB#18", "pytorch/examples#731"]
MOVES, STAYS = ["classifier"], []


def buggy():
    networks, x, labels = setup()

    def loss():
        x_clean = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy(networks["classifier"](x_clean), labels), x_clean)
        x_adversarial = x + 0.1 * slope.detach().sign()
        return cross_entropy(networks["classifier"](x_adversarial), labels)

    return loss, networks


def fixed():
    networks, x, labels = setup()

    def loss():
        x_clean = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy(networks["classifier"](x_clean), labels), x_clean)
        x_adversarial = x + 0.1 * slope.sign()
        return cross_entropy(networks["classifier"](x_adversarial), labels)

    return loss, networks


def setup():
    return nn.ModuleDict({"classifier": nn.Linear(4, 3)}), torch.randn(8, 4), torch.randint(3, (8,))
