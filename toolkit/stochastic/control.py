r"""Discrete draws: an unbiased control variate with a relaxation, and the biased straight-through estimator.

A Bernoulli variable b with logit :math:`\theta` is the sign of :math:`z = \theta + logit(u)`, u uniform. ``*`` any
shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from toolkit._random import own_generator
from toolkit._tensors import floating, floating_alike, promoted
from toolkit.blocks import block, stop_gradient

__all__ = [
    "REBAR_SIGNAL",
    "STRAIGHT_THROUGH",
    "RelaxedBernoulli",
    "rebar_loss",
    "relaxed_bernoulli",
    "straight_through",
]

REBAR_SIGNAL = block(
    "stochastic.rebar_signal",
    "The cost above its control variate is the number that multiplies the score; the control variate's own gradient is "
    "a term of its own.",
)
STRAIGHT_THROUGH = block(
    "stochastic.straight_through",
    "A discrete draw has no derivative: it takes that of its mean, whose value is subtracted again.",
)


class RelaxedBernoulli(NamedTuple):
    """A binary draw and its two relaxations.

    Attributes:
        sample: b, 0 or 1, without a gradient.
        relaxed: z, differentiable; b is 1 where it is positive.
        conditional: A second draw of z given b, differentiable at a fixed b.
    """

    sample: Tensor
    relaxed: Tensor
    conditional: Tensor


def relaxed_bernoulli(logits: Tensor, *, generator: torch.Generator | None = None) -> RelaxedBernoulli:
    r"""Draw b with probability :math:`\sigma(\theta)`, its logistic variable z, and another z given b.

    :math:`z = \theta + logit(u)`. Given b = 1 the second one is :math:`softplus(logit(v) + softplus(\theta))`, given b
    = 0 it is :math:`-softplus(logit(v) + softplus(-\theta))`, with v uniform: finite for every logit.

    Args:
        logits: :math:`\theta`, (\*).
        generator: Draws u and v. None: torch's global generator.

    Returns:
        Three tensors (\*).

    References:
        Tucker, Mnih, Maddison, Lawson & Sohl-Dickstein, "REBAR: low-variance, unbiased gradient estimates for discrete
        latent variable models", 2017.

    Example:
        >>> b, z, other = relaxed_bernoulli(torch.zeros(3), generator=torch.Generator().manual_seed(0))
        >>> bool((((z > 0) == b.bool()) & ((other > 0) == b.bool())).all())
        True
    """
    floating(logits=logits)
    draws = own_generator(generator)
    noise, second = (_logistic(logits, draws) for _ in range(2))
    relaxed = logits + noise
    positive = relaxed > 0
    sign = torch.where(positive, 1.0, -1.0).to(logits)
    return RelaxedBernoulli(positive.to(logits), relaxed, sign * softplus(second + softplus(sign * logits)))


def rebar_loss(log_prob: Tensor, cost: Tensor, relaxed: Tensor, conditional: Tensor) -> Tensor:
    r"""Return the surrogate ``mean(log q(b) * sg(f(b) - c(z~)) + f(b) + c(z) - c(z~))`` of the expected cost.

    c is any differentiable function of the relaxation: :math:`\eta f(\sigma(z / \lambda))` in REBAR, a network in
    RELAX. With the block in place the gradient is an unbiased estimate of :math:`\nabla E[f(b)]` for each c; its
    variance depends on c, and a c that does not fit *raises* it. With the block open
    :math:`\log q(b) \nabla (f(b) - c(\tilde z))` is added, and the estimate is biased.

    Args:
        log_prob: Log-probability of each draw b in nats, (\*).
        cost: f(b), (\*).
        relaxed: c(z), (\*).
        conditional: :math:`c(\tilde z)`, of the second draw given b, (\*).

    Returns:
        A scalar, in the units of the cost. Only its gradient has a meaning.

    Raises:
        ValueError: If the shapes differ.

    References:
        Tucker, Mnih, Maddison, Lawson & Sohl-Dickstein, "REBAR: low-variance, unbiased gradient estimates for discrete
        latent variable models", 2017.
        Grathwohl, Choi, Wu, Roeder & Duvenaud, "Backpropagation through the void", 2018.

    Example:
        >>> logits = torch.tensor([0.4, -0.3], requires_grad=True)
        >>> b, z, other = relaxed_bernoulli(logits, generator=torch.Generator().manual_seed(0))
        >>> log_prob = -torch.nn.functional.softplus((1 - 2 * b) * logits)
        >>> rebar_loss(log_prob, (b - 0.45) ** 2, z.sigmoid(), other.sigmoid()).backward()
        >>> logits.grad.shape
        torch.Size([2])
    """
    cost = promoted(cost, log_prob)
    floating_alike(log_prob=log_prob, cost=cost, relaxed=relaxed, conditional=conditional)
    signal = stop_gradient(cost - conditional, REBAR_SIGNAL)
    return (log_prob * signal + cost + relaxed - conditional).mean()


def straight_through(sample: Tensor, mean: Tensor) -> Tensor:
    r"""Return ``sample + (mean - sg(mean))``: the discrete draw, with the gradient of its mean.

    The gradient of f is :math:`f'(b) \nabla p`, which is that of :math:`E[f(b)]` only for a linear f. With the block
    open the gradient is zero.

    Args:
        sample: A draw of any discrete variable, (\*): bits, or the rows of a one-hot matrix.
        mean: Its expectation, (\*): probabilities.

    Returns:
        The values of `sample`, bit for bit, (\*).

    Raises:
        ValueError: If the shapes differ.

    References:
        Bengio, Léonard & Courville, "Estimating or propagating gradients through stochastic neurons for conditional
        computation", 2013.

    Example:
        >>> p = torch.tensor([0.2, 0.9], requires_grad=True)
        >>> straight_through(torch.tensor([0.0, 1.0]), p).square().sum().backward()
        >>> p.grad
        tensor([0., 2.])
    """
    sample = promoted(sample, mean)
    floating_alike(sample=sample, mean=mean)
    return sample + (mean - stop_gradient(mean, STRAIGHT_THROUGH))


def _logistic(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard logistic noise, finite everywhere."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    uniform = torch.rand(like.shape, generator=generator, dtype=dtype, device=generator.device)
    uniform = uniform.clamp_min(torch.finfo(dtype).eps / 4)  # the middle of the interval that is rounded to 0
    return (uniform.log() - (-uniform).log1p()).to(like)
