"""torchattacks 3.5.1: training on adversarial images."""

import torch
import torchattacks
from torch import nn


def _trained(make):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 4))
    images, labels = torch.rand(4, 3, 8, 8), torch.arange(4)
    attack = make(model)
    return lambda: nn.functional.cross_entropy(model(attack(images, labels)), labels), model


def fast_gradient_sign():
    return _trained(torchattacks.FGSM)


def projected_gradient():
    return _trained(lambda model: torchattacks.PGD(model, steps=3))


def trades():
    return _trained(lambda model: torchattacks.TPGD(model, steps=3))


def momentum():
    return _trained(lambda model: torchattacks.MIFGSM(model, steps=3))


def deep_fool():
    return _trained(lambda model: torchattacks.DeepFool(model, steps=3))


def carlini_wagner():
    return _trained(lambda model: torchattacks.CW(model, steps=3))
