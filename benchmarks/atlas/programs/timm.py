"""timm 1.0.31: image classifiers, losses and averages of weights."""

import timm
import torch
from timm import loss as losses
from timm.utils import ModelEmaV3


def _classified(model, criterion):
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    return lambda: criterion(model(images), labels), model


def _resnet():
    return timm.create_model("resnet10t", num_classes=4)


def resnet():
    return _classified(_resnet(), torch.nn.CrossEntropyLoss())


def resnet_with_its_average():
    plain, model = _classified(_resnet(), torch.nn.CrossEntropyLoss())
    average = ModelEmaV3(model, decay=0.9)

    def loss():
        value = plain()
        average.update(model, step=10)
        return value

    return loss, model


def vision_transformer():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=4
    )
    return _classified(model, losses.LabelSmoothingCrossEntropy())


def binary_cross_entropy():
    return _classified(_resnet(), losses.BinaryCrossEntropy(target_threshold=0.2))


def jensen_shannon():
    model, criterion = _resnet(), losses.JsdCrossEntropy(num_splits=2)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(4)
    return lambda: criterion(model(images), labels), model


def asymmetric():
    model, criterion = _resnet(), losses.AsymmetricLossMultiLabel(disable_torch_grad_focal_loss=True)
    images, labels = torch.randn(4, 3, 32, 32), torch.eye(4)
    return lambda: criterion(model(images), labels), model


def scaled_standardized_convolution():
    model = timm.create_model("nf_resnet26", num_classes=4, stem_type="3x3")
    return _classified(model, torch.nn.CrossEntropyLoss())
