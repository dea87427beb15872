"""byol-pytorch 0.9.1: an online network that predicts the projections of its moving average."""

import torch
from byol_pytorch import BYOL
from torchvision import models


def _learner(**options):
    net = models.resnet18(num_classes=10)
    learner = BYOL(net, image_size=32, hidden_layer="avgpool", projection_size=16, projection_hidden_size=32, **options)
    images = torch.rand(4, 3, 32, 32)
    return learner, images


def byol():
    learner, images = _learner()
    return lambda: learner(images), learner


def byol_with_its_average():
    learner, images = _learner()

    def loss():
        learner.update_moving_average()
        return learner(images)

    return loss, learner


def simsiam():
    learner, images = _learner(use_momentum=False)
    return lambda: learner(images), learner
