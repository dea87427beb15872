"""The detach of the discriminator's step is repeated in the generator's.

The discriminator's step detaches the fake batch. The same line is copied into the generator's step, usually to silence
an error about the graph. There it removes the generator's whole gradient. The loss still changes, because the
discriminator does.
"""

import torch
from torch import nn
from torch.nn.functional import softplus

SOURCES = ["tamarott/SinGAN#117", "samet-akcay/skip-ganomaly#5"]
MOVES, STAYS = ["generator"], []


def buggy():
    networks, noise = setup()

    def generator_loss():
        fake = networks["generator"](noise)
        return softplus(-networks["discriminator"](fake.detach())).mean()

    return generator_loss, networks


def fixed():
    networks, noise = setup()

    def generator_loss():
        fake = networks["generator"](noise)
        return softplus(-networks["discriminator"](fake)).mean()

    return generator_loss, networks


def setup():
    networks = nn.ModuleDict({"generator": nn.Linear(2, 4), "discriminator": nn.Linear(4, 1)})
    return networks, torch.randn(8, 2)
