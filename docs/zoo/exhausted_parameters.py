"""The critic is frozen by a loop over an iterator that is already at its end.

The loss of the policy should not move the critic, so the critic's parameters are frozen meanwhile. `parameters()`
returns an iterator, which the optimizer has read to its end. The loop that freezes them finds none left, and says
nothing.
"""

import torch
from torch import nn

SOURCES = ["openai/spinningup#251", "openai/spinningup#320", "openai/spinningup#329"]
MOVES, STAYS = ["actor"], ["critic"]


def buggy():
    networks, states = setup()
    parameters = networks["critic"].parameters()
    torch.optim.Adam(parameters)

    def policy_loss():
        for parameter in parameters:
            parameter.requires_grad = False
        actions = networks["actor"](states).tanh()
        values = networks["critic"](torch.cat([states, actions], 1))
        for parameter in parameters:
            parameter.requires_grad = True
        return -values.mean()

    return policy_loss, networks


def fixed():
    networks, states = setup()
    parameters = list(networks["critic"].parameters())
    torch.optim.Adam(parameters)

    def policy_loss():
        for parameter in parameters:
            parameter.requires_grad = False
        actions = networks["actor"](states).tanh()
        values = networks["critic"](torch.cat([states, actions], 1))
        for parameter in parameters:
            parameter.requires_grad = True
        return -values.mean()

    return policy_loss, networks


def setup():
    return nn.ModuleDict({"actor": nn.Linear(4, 2), "critic": nn.Linear(6, 1)}), torch.randn(8, 4)
