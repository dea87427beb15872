"""The detach in a ratio that is always 1 is left out.

With one update for each batch of samples, the ratio of new to old policy in PPO and GRPO is exp(l - l.detach()): always
1, which many readers take for a mistake. Its gradient is that of l. Without the block the two halves cancel in the
gradient too, and the policy does not learn.
"""

import torch
from torch import nn

SOURCES = ["huggingface/trl#2608", "huggingface/trl#2681", "lsdefine/simple_GRPO#33", "dhcode-cpp/X-R1#11"]
MOVES, STAYS = ["policy"], []


def buggy():
    networks, states, actions, advantages = setup()

    def loss():
        log_prob = networks["policy"](states).log_softmax(1)[range(8), actions]
        ratio = (log_prob - log_prob).exp()
        return -(ratio * advantages).mean()

    return loss, networks


def fixed():
    networks, states, actions, advantages = setup()

    def loss():
        log_prob = networks["policy"](states).log_softmax(1)[range(8), actions]
        ratio = (log_prob - log_prob.detach()).exp()
        return -(ratio * advantages).mean()

    return loss, networks


def setup():
    return nn.ModuleDict({"policy": nn.Linear(4, 3)}), torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8)
