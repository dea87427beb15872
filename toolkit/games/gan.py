r"""Losses of generative adversarial networks, with the two blocks that let one backward pass train both networks.

The discriminator's loss holds the fake samples constant, so it has no gradient for the generator; the generator's loss
holds the discriminator's parameters constant, so it has no gradient for the discriminator. The gradient of their sum is
then the game's field :math:`(\partial_\psi L_D, \partial_\theta L_G)`, and neither loss computes a derivative that an
optimiser discards.

N samples, each of shape (...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import logsigmoid, relu

from toolkit._checks import choice, number
from toolkit._random import own_generator
from toolkit._slopes import value_and_slopes
from toolkit._tensors import floating, floating_alike, lengths
from toolkit.blocks import block, stop_gradient

__all__ = [
    "FAKE",
    "INTERPOLATES",
    "JUDGE",
    "dirac_gan",
    "discriminator_loss",
    "generator_loss",
    "gradient_penalty",
    "zero_centred_penalty",
]

FAKE = block(
    "games.fake",
    "The discriminator learns to reject the fake samples as they are; through them its loss would train the generator "
    "to be rejected.",
)
JUDGE = block(
    "games.judge",
    "The generator is judged by the discriminator as it is; through its weights the generator's loss would train it to "
    "be fooled.",
)
INTERPOLATES = block(
    "games.interpolates",
    "The penalty shapes the discriminator at points between real and fake; through them it would move the generator "
    "to flatter points.",
)

Kind = Literal["minimax", "non_saturating", "hinge", "wasserstein"]
Loss = Callable[[Tensor, Tensor], Tensor]


def discriminator_loss(discriminator: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, *, kind: Kind) -> Tensor:
    r"""Return the discriminator's loss, the mean over samples of one of these.

    ==============================  =======================================================================
    minimax, non_saturating         :math:`\log(1 + e^{-D(x)}) + \log(1 + e^{D(\operatorname{sg} \hat x)})`
    hinge                           :math:`\max(0, 1 - D(x)) + \max(0, 1 + D(\operatorname{sg} \hat x))`
    wasserstein                     :math:`D(\operatorname{sg} \hat x) - D(x)`
    ==============================  =======================================================================

    With the block `FAKE` open, the generator also receives the mean of :math:`d'(D(\hat x))\, \nabla D(\hat x)`, where
    d is the term of the fake samples. Next to `generator_loss` it cancels that loss exactly for ``"minimax"`` and
    ``"wasserstein"``, and for ``"hinge"`` inside the margin: the generator does not learn.

    Args:
        discriminator: Samples (N, ...) to logits, (N) or (N, 1), higher for real samples.
        real: x, (N, ...).
        fake: Samples of the generator, (M, ...).
        kind: One of the table's.

    Returns:
        A scalar; in nats for the first two kinds.

    Raises:
        ValueError: If `kind` is not one of the four.

    References:
        Goodfellow et al., "Generative adversarial nets", 2014, equation 1. Lim and Ye, "Geometric GAN", 2017. Arjovsky,
        Chintala and Bottou, "Wasserstein GAN", 2017.

    Example:
        >>> discriminator_loss(lambda x: x, torch.tensor([0.0]), torch.tensor([0.5]), kind="hinge")
        tensor(2.5000)
    """
    choice("kind", kind, get_args(Kind))
    floating(real=real, fake=fake)
    at_real, at_fake = discriminator(real), discriminator(stop_gradient(fake, FAKE))
    if kind == "hinge":
        return relu(1 - at_real).mean() + relu(1 + at_fake).mean()
    if kind == "wasserstein":
        return at_fake.mean() - at_real.mean()
    return -logsigmoid(at_real).mean() - logsigmoid(-at_fake).mean()


def generator_loss(discriminator: nn.Module, fake: Tensor, *, kind: Kind) -> Tensor:
    r"""Return the generator's loss, the mean over samples of one of these.

    ==============================  ===================================================================
    minimax                         :math:`-\log(1 + e^{D(\hat x)})`
    non_saturating                  :math:`\log(1 + e^{-D(\hat x)})`
    hinge, wasserstein              :math:`-D(\hat x)`
    ==============================  ===================================================================

    The block `JUDGE` holds the discriminator's parameters: they get no gradient, which saves its computation. With the
    block open, they get :math:`\partial_\psi L_G`, and the discriminator learns to be fooled.

    Args:
        discriminator: As in `discriminator_loss`, a module.
        fake: Samples of the generator, (N, ...).
        kind: One of the table's.

    Returns:
        A scalar; in nats for the first two kinds.

    Raises:
        ValueError: If `kind` is not one of the four.
        TypeError: If `discriminator` is not a module.

    References:
        Goodfellow et al., "Generative adversarial nets", 2014, equation 1 and section 3. Lim and Ye, "Geometric GAN",
        2017. Arjovsky, Chintala and Bottou, "Wasserstein GAN", 2017.

    Example:
        >>> generator_loss(torch.nn.Identity(), torch.tensor([0.5]), kind="non_saturating")
        tensor(0.4741)
    """
    choice("kind", kind, get_args(Kind))
    if not isinstance(discriminator, nn.Module):
        raise TypeError(f"`discriminator` should be a torch.nn.Module. Found {type(discriminator).__name__}.")
    held: dict[str, Tensor] = {name: stop_gradient(weight, JUDGE) for name, weight in discriminator.named_parameters()}
    floating(fake=fake)
    logits = functional_call(discriminator, held, (fake,))
    if kind == "minimax":
        return logsigmoid(-logits).mean()
    return -logsigmoid(logits).mean() if kind == "non_saturating" else -logits.mean()


def gradient_penalty(
    discriminator: Callable[[Tensor], Tensor],
    real: Tensor,
    fake: Tensor,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return the penalty of WGAN-GP, the mean of :math:`(\lVert \nabla D(\tilde x) \rVert - 1)^2`.

    The interpolates :math:`\tilde x = \epsilon x + (1 - \epsilon) \hat x`, with :math:`\epsilon` uniform for each
    sample, contain the fake samples and are held by the block `INTERPOLATES`. Open, the generator receives
    :math:`2 (1 - \epsilon) (\lVert s \rVert - 1)\, \nabla^2 D(\tilde x)\, s / \lVert s \rVert` with
    :math:`s = \nabla D(\tilde x)`. The slope s has a graph, so the penalty trains the discriminator. Where s is exactly
    zero, the gradient of its norm is taken as zero.

    Args:
        discriminator: Samples (N, ...) to logits, (N) or (N, 1); each logit depends on its own sample alone (no batch
            normalisation).
        real: x, (N, ...).
        fake: (N, ...), one for each real sample.
        generator: Draws the :math:`\epsilon`. None: torch's global generator.

    Returns:
        A scalar; the paper multiplies it by 10.

    Raises:
        ValueError: If `real` and `fake` have different shapes.

    References:
        Gulrajani, Ahmed, Arjovsky, Dumoulin and Courville, "Improved training of Wasserstein GANs", 2017, equation 3.

    Example:
        >>> gradient_penalty(lambda x: 3 * x, torch.tensor([0.0]), torch.tensor([0.5]))
        tensor(4.)
    """
    floating_alike(real=real, fake=fake)
    _check_samples(real=real)
    draws = own_generator(generator)
    shape = (len(real), *[1] * (real.dim() - 1))
    weights = torch.rand(shape, generator=draws, device=draws.device, dtype=real.dtype).to(real.device)
    points = stop_gradient(weights * real + (1 - weights) * fake, INTERPOLATES)
    norms = lengths(_slopes(discriminator, points))
    return (norms - 1).square().mean()


def zero_centred_penalty(discriminator: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    r"""Return the mean of :math:`\lVert \nabla D(x) \rVert^2`: the penalty R1 on real samples, R2 on fake ones.

    Real samples need no block. Hold fake samples with ``stop_gradient(fake, FAKE)``; otherwise the penalty trains the
    generator as well.

    Args:
        discriminator: As in `gradient_penalty`.
        samples: x, (N, ...).

    Returns:
        A scalar; the paper multiplies it by :math:`\gamma / 2`.

    Raises:
        ValueError: If `samples` is not a floating-point tensor (N, ...).

    References:
        Mescheder, Geiger and Nowozin, "Which training methods for GANs do actually converge?", 2018, section 4.1.

    Example:
        >>> zero_centred_penalty(lambda x: 3 * x, torch.tensor([0.0, 1.0]))
        tensor(9.)
    """
    _check_samples(samples=samples)
    return _slopes(discriminator, samples).square().sum(1).mean()


def dirac_gan(*, kind: Kind, real: float = 0.0) -> tuple[Loss, Loss]:
    r"""Return the losses of the Dirac-GAN: the discriminator ``D(x) = psi * x``, a fake point theta, a real point.

    Both are called with (psi, theta), as the losses in `toolkit.games.play` are. With the real point at 0, the field
    has its equilibrium at (0, 0) and there the eigenvalues :math:`\pm i f'(0)`, where :math:`f'(0)` is 1/2 for
    ``"minimax"`` and ``"non_saturating"`` and 1 for ``"hinge"`` and ``"wasserstein"``: continuous play circles it, and
    simultaneous steps spiral outwards. An R1 penalty :math:`\gamma \psi^2 / 2` in the discriminator's loss adds
    :math:`-\gamma / 2` to the real parts.

    Args:
        kind: As in `discriminator_loss`.
        real: The real point.

    Returns:
        The losses of the discriminator and of the generator: psi and theta, (\*), to a scalar, the mean over (\*).

    Raises:
        ValueError: If `kind` is not one of the four, or `real` is not a finite number.

    References:
        Mescheder, Geiger and Nowozin, "Which training methods for GANs do actually converge?", 2018, definition 2.1 and
        lemma 2.3.

    Example:
        >>> of_discriminator, of_generator = dirac_gan(kind="wasserstein")
        >>> of_discriminator(torch.tensor(-0.5), torch.tensor(2.0)), of_generator(torch.tensor(-0.5), torch.tensor(2.0))
        (tensor(-1.), tensor(1.))
    """
    choice("kind", kind, get_args(Kind))
    real = number("real", real)

    def of_discriminator(psi: Tensor, theta: Tensor) -> Tensor:
        at_real, at_fake = psi * real, psi * theta
        if kind == "hinge":
            return (relu(1 - at_real) + relu(1 + at_fake)).mean()
        if kind == "wasserstein":
            return (at_fake - at_real).mean()
        return -(logsigmoid(at_real) + logsigmoid(-at_fake)).mean()

    def of_generator(psi: Tensor, theta: Tensor) -> Tensor:
        if kind == "minimax":
            return logsigmoid(-psi * theta).mean()
        return -(logsigmoid(psi * theta) if kind == "non_saturating" else psi * theta).mean()

    return of_discriminator, of_generator


def _check_samples(**named: Tensor) -> None:
    floating(**named)
    for name, samples in named.items():
        if samples.ndim == 0:
            raise ValueError(f"`{name}` should have shape (N, ...). Found ().")


def _slopes(discriminator: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Return the gradient of each logit with respect to its own sample, (N, features), recorded if gradients are."""
    (slopes,) = value_and_slopes(lambda inputs: discriminator(*inputs).sum(), [points])[1]
    return slopes[:, None].flatten(1)
