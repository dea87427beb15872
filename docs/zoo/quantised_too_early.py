"""The codebook's loss comes after the straight-through step, where the codebook is held constant.

The straight-through estimator passes the gradient at the chosen code on to the encoder's output. A loss of its result
only trains the encoder. The loss that should pull the codes to the data must be computed before this step.
"""

import torch
from torch import nn

SOURCES = ["andylolu2/jax-vqvae-gpt#2"]
MOVES, STAYS = ["codebook"], ["encoder"]


def buggy():
    networks, x = setup()

    def codebook_loss():
        z = networks["encoder"](x)
        codes = networks["codebook"](torch.cdist(z, networks["codebook"].weight).argmin(1))
        codes = z + (codes - z).detach()
        return (codes - z.detach()).square().mean()

    return codebook_loss, networks


def fixed():
    networks, x = setup()

    def codebook_loss():
        z = networks["encoder"](x)
        codes = networks["codebook"](torch.cdist(z, networks["codebook"].weight).argmin(1))
        return (codes - z.detach()).square().mean()

    return codebook_loss, networks


def setup():
    return nn.ModuleDict({"encoder": nn.Linear(4, 3), "codebook": nn.Embedding(5, 3)}), torch.randn(8, 4)
