"""pytorch-msssim 1.0.0: structural similarity of images."""

import torch
from pytorch_msssim import ms_ssim, ssim
from torch import nn


def _filtered(similarity, size):
    layer, images = nn.Conv2d(1, 1, 3, padding=1), torch.rand(1, 1, size, size)
    return lambda: 1 - similarity(layer(images), images, data_range=1.0), layer


def structural():
    return _filtered(ssim, 16)


def multi_scale():
    return _filtered(ms_ssim, 176)
