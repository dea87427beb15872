"""piq 0.8.0: measures of image quality as losses."""

import piq
import torch
from torch import nn


def _filtered(criterion, channels=3, size=48):
    layer, images = nn.Conv2d(channels, channels, 3, padding=1), torch.rand(1, channels, size, size)
    return lambda: criterion(layer(images).sigmoid(), images), layer


def structural_similarity():
    return _filtered(piq.SSIMLoss())


def feature_similarity():
    return _filtered(piq.FSIMLoss())


def visual_saliency():
    return _filtered(piq.VSILoss())


def gradient_magnitude():
    return _filtered(piq.GMSDLoss())


def haar_wavelets():
    return _filtered(piq.HaarPSILoss())


def total_variation():
    layer, images, criterion = nn.Conv2d(3, 3, 3), torch.rand(1, 3, 16, 16), piq.TVLoss()
    return lambda: criterion(layer(images).sigmoid()), layer


def information_fidelity():
    return _filtered(piq.VIFLoss())


def mean_deviation():
    return _filtered(piq.MDSILoss())
