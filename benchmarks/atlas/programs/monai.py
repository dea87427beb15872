"""monai 1.6.1: segmentation losses and a quantized autoencoder."""

import torch
from monai.losses import ContrastiveLoss, DiceCELoss, FocalLoss, HausdorffDTLoss, SoftclDiceLoss
from monai.networks.nets import VQVAE, UNet
from torch import nn


def _images():
    return torch.rand(2, 1, 16, 16), (torch.rand(2, 1, 16, 16) > 0.5).float()


def segmentation():
    net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,))
    (images, labels), criterion = _images(), DiceCELoss(to_onehot_y=True, softmax=True)
    return lambda: criterion(net(images), labels), net


def quantized_autoencoder():
    net = VQVAE(
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(4, 8),
        num_res_channels=(4, 4),
        num_res_layers=1,
        downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
        upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
        num_embeddings=8,
        embedding_dim=4,
    )
    images, _ = _images()

    def loss():
        reconstructed, quantization = net(images)
        return (reconstructed - images).square().mean() + quantization

    return loss, net


def _of_a_layer(criterion):
    layer, (images, labels) = nn.Conv2d(1, 1, 3, padding=1), _images()
    return lambda: criterion(layer(images), labels), layer


def hausdorff():
    return _of_a_layer(HausdorffDTLoss(sigmoid=True))


def focal():
    return _of_a_layer(FocalLoss())


def center_lines():
    return _of_a_layer(SoftclDiceLoss())


def contrastive():
    layer, x, criterion = nn.Linear(4, 8), torch.randn(6, 4), ContrastiveLoss()
    return lambda: criterion(layer(x), layer(x + 0.1)), layer
