"""Games beside the way they are usually written: two backward passes for a GAN, a custom function for a reversal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks._measure import Row, gradient, timed_row
from toolkit.games import discriminator_loss, generator_loss, reverse_gradient


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32."""
    yield timed_row("GAN step in one backward pass / in two with detach and zero_grad, batch 128", *_gan(), "at most 1")
    try:
        from pytorch_revgrad import RevGrad
    except ModuleNotFoundError:
        return
    layer, x = RevGrad(alpha=0.5), torch.randn(256, 512, requires_grad=True)
    ours = gradient(lambda: reverse_gradient(x, 0.5).sin().sum(), x)
    yield timed_row("reverse_gradient / pytorch_revgrad, 256 x 512", ours, gradient(lambda: layer(x).sin().sum(), x))


def _gan() -> tuple[Callable[[], object], Callable[[], object]]:
    discriminator = nn.Sequential(
        nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
    )
    generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
    real, noise, softplus = torch.randn(128, 64), torch.randn(128, 32), nn.functional.softplus

    def one_pass() -> None:
        discriminator.zero_grad()
        generator.zero_grad()
        fake = generator(noise)
        loss = discriminator_loss(discriminator, real, fake, kind="non_saturating")
        (loss + generator_loss(discriminator, fake, kind="non_saturating")).backward()

    def two_passes() -> None:
        discriminator.zero_grad()
        fake = generator(noise)
        (softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()).backward()
        generator.zero_grad()
        softplus(-discriminator(fake)).mean().backward()

    return one_pass, two_passes
