"""The loss of the policy moves the critic.

An advantage measures how good an action was. It weights the action's log-probability and must be a constant in the
policy's loss. Otherwise this loss also moves the critic's value, to reduce the weights, against the critic's own loss.
With the block the published results could be reproduced.
"""

import torch
from torch import nn

SOURCES = [
    "astariul/encode-attend-navigate-pytorch#3",
    "ChenRocks/fast_abs_rl#49",
    "keras-team/keras-io#194",
    "muupan/async-rl#12",
    "pytorch/rl#1187",
]
MOVES, STAYS = ["actor"], ["critic"]


def buggy():
    networks, states, actions, returns = setup()

    def policy_loss():
        advantage = returns - networks["critic"](states).squeeze(1)
        log_prob = networks["actor"](states).log_softmax(1)[range(8), actions]
        return -(log_prob * advantage).mean()

    return policy_loss, networks


def fixed():
    networks, states, actions, returns = setup()

    def policy_loss():
        advantage = returns - networks["critic"](states).squeeze(1).detach()
        log_prob = networks["actor"](states).log_softmax(1)[range(8), actions]
        return -(log_prob * advantage).mean()

    return policy_loss, networks


def setup():
    networks = nn.ModuleDict({"actor": nn.Linear(4, 3), "critic": nn.Linear(4, 1)})
    return networks, torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8)
