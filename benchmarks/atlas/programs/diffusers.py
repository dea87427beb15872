"""diffusers 0.42.1: denoising, distillation weights and autoencoders."""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DModel, VQModel
from diffusers.training_utils import EMAModel, compute_snr
from torch import nn


def _denoiser():
    net = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
    )
    schedule, images = DDPMScheduler(100), torch.randn(2, 1, 8, 8)

    def loss():
        noise, times = torch.randn_like(images), torch.randint(100, (2,))
        predicted = net(schedule.add_noise(images, noise, times), times).sample
        ratio = compute_snr(schedule, times)
        weights = ratio.clamp(max=5.0) / ratio
        return (weights * (predicted - noise).square().mean((1, 2, 3))).mean()

    return loss, net


def denoiser():
    return _denoiser()


def denoiser_with_its_average():
    plain, net = _denoiser()
    average = EMAModel(net.parameters())

    def loss():
        value = plain()
        average.step(net.parameters())
        return value

    return loss, net


def checkpointed_denoiser():
    loss, net = _denoiser()
    net.enable_gradient_checkpointing()
    return loss, net


def vector_quantizer():
    model = VQModel(
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        latent_channels=4,
        num_vq_embeddings=16,
        norm_num_groups=4,
        sample_size=8,
    )
    images = torch.randn(2, 1, 8, 8)

    def loss():
        latents = model.encode(images).latents
        _, commitment, _ = model.quantize(latents)
        return nn.functional.mse_loss(model.decode(latents).sample, images) + commitment

    return loss, model


def autoencoder():
    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    images = torch.randn(2, 3, 8, 8)

    def loss():
        posterior = model.encode(images).latent_dist
        reconstructed = model.decode(posterior.sample()).sample
        return nn.functional.mse_loss(reconstructed, images) + 0.01 * posterior.kl().mean()

    return loss, model
