"""The advantage of a shared network is only half blocked.

Policy and value share a trunk. The subtracted value is detached, but the returns also end in a bootstrapped value of
the same network. So the policy's loss still moves the value head.
"""

import torch
from torch import nn

SOURCES = ["PacktPublishing/Deep-Reinforcement-Learning-Hands-On-Second-Edition#60"]
MOVES, STAYS = ["trunk", "policy"], ["value"]


def buggy():
    network, states, next_states, actions, rewards = setup()

    def policy_loss():
        features, next_features = network["trunk"](states).tanh(), network["trunk"](next_states).tanh()
        returns = rewards + 0.9 * network["value"](next_features).squeeze(1)
        advantage = returns - network["value"](features).squeeze(1).detach()
        log_prob = network["policy"](features).log_softmax(1)[range(8), actions]
        return -(log_prob * advantage).mean()

    return policy_loss, network


def fixed():
    network, states, next_states, actions, rewards = setup()

    def policy_loss():
        features, next_features = network["trunk"](states).tanh(), network["trunk"](next_states).tanh()
        returns = rewards + 0.9 * network["value"](next_features).squeeze(1)
        advantage = (returns - network["value"](features).squeeze(1)).detach()
        log_prob = network["policy"](features).log_softmax(1)[range(8), actions]
        return -(log_prob * advantage).mean()

    return policy_loss, network


def setup():
    network = nn.ModuleDict({"trunk": nn.Linear(4, 5), "policy": nn.Linear(5, 3), "value": nn.Linear(5, 1)})
    return network, torch.randn(8, 4), torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8)
