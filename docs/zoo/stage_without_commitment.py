"""A second codebook is never committed to: the remainder cancels the encoder.

The second codebook quantizes the remainder, latent vector minus first code. The first code has passed a
straight-through step, so its gradient is that of the latent vector: the two cancel, and the commitment loss of the
second stage trains nothing. With the remainder's code held constant it does. Once that is mended, the decoder's
gradient arrives at the encoder once for each stage, which one straight-through step around the sum avoids.
"""

import torch
from torch import nn

SOURCES = [
    "facebookresearch/encodec#25",
    "lucidrains/vector-quantize-pytorch#33",
    "EdoardoBotta/RQ-VAE-Recommender#67",
    "descriptinc/descript-audio-codec#107",
]
MOVES, STAYS = ["encoder"], ["first", "second"]


def buggy():
    networks, x = setup()

    def second_commitment():
        z = networks["encoder"](x)
        remainder = z - (z + (nearest(networks["first"], z) - z).detach())
        return (remainder - nearest(networks["second"], remainder).detach()).square().mean()

    return second_commitment, networks


def fixed():
    networks, x = setup()

    def second_commitment():
        z = networks["encoder"](x)
        remainder = z - nearest(networks["first"], z).detach()
        return (remainder - nearest(networks["second"], remainder).detach()).square().mean()

    return second_commitment, networks


def nearest(codebook, z):
    return codebook(torch.cdist(z, codebook.weight).argmin(1))


def setup():
    networks = {"encoder": nn.Linear(4, 3), "first": nn.Embedding(5, 3), "second": nn.Embedding(5, 3)}
    return nn.ModuleDict(networks), torch.randn(8, 4)
