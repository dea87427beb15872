"""denoising-diffusion-pytorch 2.3.4: the training losses of its diffusions."""

import torch
from denoising_diffusion_pytorch import (
    ElucidatedDiffusion,
    GaussianDiffusion,
    GaussianDiffusion1D,
    LearnedGaussianDiffusion,
    Unet,
    Unet1D,
    VParamContinuousTimeGaussianDiffusion,
)


def _net(**options):
    return Unet(dim=8, dim_mults=(1, 2), channels=1, flash_attn=False, **options)


def _of_images(diffusion):
    images = torch.rand(2, 1, 8, 8)
    return lambda: diffusion(images), diffusion


def gaussian():
    return _of_images(GaussianDiffusion(_net(), image_size=8, timesteps=50, auto_normalize=False))


def self_conditioned():
    return _of_images(GaussianDiffusion(_net(self_condition=True), image_size=8, timesteps=50))


def learned_variance():
    return _of_images(LearnedGaussianDiffusion(_net(learned_variance=True), image_size=8, timesteps=50))


def elucidated():
    return _of_images(ElucidatedDiffusion(_net(learned_sinusoidal_cond=True), image_size=8, channels=1))


def velocity():
    net = _net(learned_sinusoidal_cond=True)
    return _of_images(VParamContinuousTimeGaussianDiffusion(net, image_size=8, channels=1))


def sequences():
    diffusion = GaussianDiffusion1D(Unet1D(dim=8, dim_mults=(1, 2), channels=2), seq_length=16, timesteps=50)
    sequences = torch.rand(2, 2, 16)
    return lambda: diffusion(sequences), diffusion
