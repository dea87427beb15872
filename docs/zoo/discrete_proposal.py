"""An importance-weighted bound gives its discrete proposal no gradient.

A discrete sample has no derivative, so the proposal learns from its score: the log-probability of the sample, times the
bound as a number. Here the log-probability in the weights is detached, and the score is multiplied by zero, as in
Pyro's RenyiELBO at alpha = 0. The proposal then stays at its initial values, and only the model learns.
"""

import torch
from torch import nn

SOURCES = ["pyro-ppl/pyro#1450", "pyro-ppl/pyro#3289"]
MOVES, STAYS = ["model", "proposal"], []


def buggy():
    networks, inputs, codes = setup()

    def loss():
        log_proposal = networks["proposal"](inputs).log_softmax(1)[range(8), codes]
        log_weights = log_joint(networks["model"], inputs, codes) - log_proposal.detach()
        return -log_weights.logsumexp(0).mean()

    return loss, networks


def fixed():
    networks, inputs, codes = setup()

    def loss():
        log_proposal = networks["proposal"](inputs).log_softmax(1)[range(8), codes]
        bound = (log_joint(networks["model"], inputs, codes) - log_proposal).logsumexp(0)
        score = (log_proposal - log_proposal.detach()).sum(0)
        return -(bound + score * bound.detach()).mean()

    return loss, networks


def log_joint(model, inputs, codes):
    means = model(nn.functional.one_hot(codes, 3).to(inputs))
    return -0.5 * (inputs - means).square().sum(2)


def setup():
    networks = nn.ModuleDict({"proposal": nn.Linear(4, 3), "model": nn.Linear(3, 4)})
    return networks, torch.randn(8, 4), torch.randint(3, (5, 8))
