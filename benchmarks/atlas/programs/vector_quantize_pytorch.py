"""vector-quantize-pytorch 1.32.0: quantizers between an encoder and a decoder."""

import torch
from torch import nn
from vector_quantize_pytorch import FSQ, LFQ, ResidualVQ, SimVQ, VectorQuantize


def _autoencoder(quantizer):
    encoder, decoder, x = nn.Linear(6, 8), nn.Linear(8, 6), torch.randn(4, 16, 6)

    def loss():
        quantized, _, *losses = quantizer(encoder(x))
        return (decoder(quantized) - x).square().mean() + sum(part.sum() for part in losses[:1])

    return loss, nn.ModuleDict({"encoder": encoder, "decoder": decoder, "quantizer": quantizer})


def averaged_codebook():
    return _autoencoder(VectorQuantize(dim=8, codebook_size=32))


def k_means_start():
    return _autoencoder(VectorQuantize(dim=8, codebook_size=16, kmeans_init=True, threshold_ema_dead_code=2))


def learnt_codebook():
    quantizer = VectorQuantize(
        dim=8, codebook_size=32, learnable_codebook=True, ema_update=False, orthogonal_reg_weight=1.0
    )
    return _autoencoder(quantizer)


def rotation_trick():
    return _autoencoder(VectorQuantize(dim=8, codebook_size=32, rotation_trick=True))


def straight_through():
    return _autoencoder(VectorQuantize(dim=8, codebook_size=32, rotation_trick=False))


def cosine_similarity():
    return _autoencoder(VectorQuantize(dim=8, codebook_size=32, use_cosine_sim=True))


def residual():
    return _autoencoder(ResidualVQ(dim=8, codebook_size=32, num_quantizers=3))


def simple():
    return _autoencoder(SimVQ(dim=8, codebook_size=32))


def finite_scalar():
    return _autoencoder(FSQ(levels=[5, 5, 5], dim=8))


def lookup_free():
    return _autoencoder(LFQ(dim=8, codebook_size=256, entropy_loss_weight=0.1, diversity_gamma=1.0))
