"""The stops of two losses are exchanged: the codebook's loss trains the encoder.

The codebook's loss should draw the codes to the encoder's output, and the commitment loss the output to the codes. Both
have the same value, so a stop on the wrong side cannot be seen in it.
"""

import torch
from torch import nn

SOURCES = ["MishaLaskin/vqvae#20", "karpathy/deep-vector-quantization#2"]
MOVES, STAYS = ["codebook"], ["encoder"]


def buggy():
    networks, x = setup()

    def codebook_loss():
        z = networks["encoder"](x)
        codes = networks["codebook"](torch.cdist(z, networks["codebook"].weight).argmin(1))
        return (codes.detach() - z).square().mean()

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
