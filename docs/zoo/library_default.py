"""A library function stops the gradient only if a flag is set.

The function that computes advantages has its flag off by default, while related functions of the same library have it
on. The call looks complete, the values are right, and the policy's loss moves the critic.
"""

import torch
from torch import nn

SOURCES = ["google-deepmind/rlax#28", "google-deepmind/rlax#161"]
MOVES, STAYS = ["actor"], ["critic"]


def advantages(rewards, values, *, discount, trace, stop_target_gradients=False):
    """Return generalised advantages (T,) of rewards (T,) and values (T + 1,), as a library might offer them."""
    deltas = rewards + discount * values[1:] - values[:-1]
    found = [deltas[-1]]
    for delta in deltas[:-1].flip(0):
        found.append(delta + discount * trace * found[-1])
    found = torch.stack(found[::-1])
    return found.detach() if stop_target_gradients else found


def buggy():
    networks, states, actions, rewards = setup()

    def policy_loss():
        values = networks["critic"](states).squeeze(1)
        advantage = advantages(rewards, values, discount=0.9, trace=0.95)
        log_prob = networks["actor"](states[:-1]).log_softmax(1)[range(8), actions]
        return -(log_prob * advantage).mean()

    return policy_loss, networks


def fixed():
    networks, states, actions, rewards = setup()

    def policy_loss():
        values = networks["critic"](states).squeeze(1)
        advantage = advantages(rewards, values, discount=0.9, trace=0.95, stop_target_gradients=True)
        log_prob = networks["actor"](states[:-1]).log_softmax(1)[range(8), actions]
        return -(log_prob * advantage).mean()

    return policy_loss, networks


def setup():
    networks = nn.ModuleDict({"actor": nn.Linear(4, 3), "critic": nn.Linear(4, 1)})
    return networks, torch.randn(9, 4), torch.randint(3, (8,)), torch.randn(8)
