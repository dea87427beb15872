"""kornia 0.9.0: image losses and augmentations."""

import kornia
import torch
from kornia import augmentation, losses
from torch import nn


def _filtered(criterion):
    layer, images = nn.Conv2d(1, 1, 3, padding=1), torch.rand(1, 1, 16, 16)
    return lambda: criterion(layer(images), images), layer


def structural_similarity():
    return _filtered(lambda found, images: losses.ssim_loss(found, images, 5))


def multi_scale_similarity():
    return _filtered(losses.MS_SSIMLoss(sigmas=[0.5, 1.0]))


def total_variation():
    return _filtered(lambda found, images: losses.total_variation(found).mean())


def augmented():
    steps = augmentation.AugmentationSequential(
        augmentation.RandomAffine(10.0),
        augmentation.RandomGaussianNoise(),
    )
    return _filtered(lambda found, images: steps(found).square().mean())


def focal():
    layer, images = nn.Conv2d(1, 3, 3, padding=1), torch.rand(1, 1, 8, 8)
    labels = torch.randint(3, (1, 8, 8))
    return lambda: losses.focal_loss(layer(images), labels, 0.5, reduction="mean"), layer


def lovasz():
    layer, images = nn.Conv2d(1, 3, 3, padding=1), torch.rand(1, 1, 8, 8)
    labels = torch.randint(3, (1, 8, 8))
    return lambda: losses.lovasz_softmax_loss(layer(images), labels), layer


def hausdorff():
    layer, images = nn.Conv2d(1, 3, 3, padding=1), torch.rand(1, 1, 8, 8)
    labels, criterion = torch.randint(3, (1, 1, 8, 8)), losses.HausdorffERLoss()
    return lambda: criterion(layer(images), labels), layer


def corners():
    return _filtered(lambda found, images: kornia.feature.harris_response(found).square().mean())
