"""Q-learning moves its target as well.

The prediction should move towards the target. Without a block the loss also moves the target towards the prediction:
the semi-gradient -d phi of TD learning becomes the residual gradient -d (phi - gamma phi'), and the target network,
which should stay fixed, is trained.
"""

import torch
from torch import nn

SOURCES = ["datawhalechina/easy-rl#117", "Farama-Foundation/Gymnasium#1494", "udlbook/udlbook#281"]
MOVES, STAYS = ["online"], ["target"]


def buggy():
    networks, states, next_states, actions, rewards = setup()

    def loss():
        best = networks["target"](next_states).amax(1)
        predicted = networks["online"](states)[range(8), actions]
        return (rewards + 0.9 * best - predicted).square().mean()

    return loss, networks


def fixed():
    networks, states, next_states, actions, rewards = setup()

    def loss():
        with torch.no_grad():
            best = networks["target"](next_states).amax(1)
        predicted = networks["online"](states)[range(8), actions]
        return (rewards + 0.9 * best - predicted).square().mean()

    return loss, networks


def setup():
    networks = nn.ModuleDict({"online": nn.Linear(4, 3), "target": nn.Linear(4, 3)})
    return networks, torch.randn(8, 4), torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8)
