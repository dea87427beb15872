"""The discriminator's loss runs through the generator, and `retain_graph` hides it.

Both losses use the same fake batch. Without a block the first backward pass frees the generator's graph, so the second
one raises "Trying to backward through the graph a second time". The message recommends `retain_graph=True`. This flag
removes the error, and the generator's `.grad` then contains the gradient of the discriminator's loss.
"""

import torch
from torch import nn
from torch.nn.functional import softplus

SOURCES = ["pytorch/examples#116", "VITA-Group/DeblurGANv2#19", "Lightning-AI/pytorch-lightning#666"]
MOVES, STAYS = ["discriminator"], ["generator"]


def buggy():
    networks, real, noise = setup()

    def discriminator_loss():
        fake = networks["generator"](noise)
        logits = networks["discriminator"](fake)
        return softplus(-networks["discriminator"](real)).mean() + softplus(logits).mean()

    return discriminator_loss, networks


def fixed():
    networks, real, noise = setup()

    def discriminator_loss():
        fake = networks["generator"](noise)
        logits = networks["discriminator"](fake.detach())
        return softplus(-networks["discriminator"](real)).mean() + softplus(logits).mean()

    return discriminator_loss, networks


def setup():
    networks = nn.ModuleDict({"generator": nn.Linear(2, 4), "discriminator": nn.Linear(4, 1)})
    return networks, torch.randn(8, 4), torch.randn(8, 2)
