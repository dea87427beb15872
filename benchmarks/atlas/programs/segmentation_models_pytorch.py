"""segmentation-models-pytorch 0.6.0: losses of segmentation."""

import torch
from segmentation_models_pytorch import losses
from torch import nn


def _labelled(criterion):
    layer, images, labels = nn.Conv2d(1, 3, 3, padding=1), torch.rand(2, 1, 8, 8), torch.randint(3, (2, 8, 8))
    return lambda: criterion(layer(images), labels), layer


def dice():
    return _labelled(losses.DiceLoss("multiclass"))


def jaccard():
    return _labelled(losses.JaccardLoss("multiclass"))


def tversky():
    return _labelled(losses.TverskyLoss("multiclass"))


def focal():
    return _labelled(losses.FocalLoss("multiclass"))


def reduced_focal():
    return _labelled(losses.FocalLoss("multiclass", reduced_threshold=0.5))


def lovasz():
    return _labelled(losses.LovaszLoss("multiclass"))


def soft_cross_entropy():
    return _labelled(losses.SoftCrossEntropyLoss(smooth_factor=0.1))


def correlation():
    layer, images = nn.Conv2d(1, 1, 3, padding=1), torch.rand(2, 1, 8, 8)
    labels, criterion = (torch.rand(2, 1, 8, 8) > 0.5).float(), losses.MCCLoss()
    return lambda: criterion(layer(images).sigmoid(), labels), layer
