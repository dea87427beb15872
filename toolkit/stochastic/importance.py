r"""Bounds with several importance samples, and the weights that their gradients hold constant.

:math:`L = E[\log \frac{1}{K} \sum_k w_k]` with :math:`w_k = p(x, z_k) / q(z_k)`. Every loss is the negative of a
quantity to maximise. The normalised weights are :math:`\tilde w = softmax(\log w)`.

K samples of the proposal q, along dimension 0; ``*`` any further dimensions, over which is averaged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Distribution

from toolkit._tensors import floating_alike
from toolkit.blocks import block, stop_gradient
from toolkit.stochastic._others import of_the_others
from toolkit.stochastic._shapes import several

__all__ = [
    "DREG_WEIGHTS",
    "IWAE_WEIGHTS",
    "VIMCO_SIGNAL",
    "WAKE_SAMPLES",
    "WAKE_WEIGHTS",
    "dreg_loss",
    "iwae_bound",
    "iwae_loss",
    "vimco_loss",
    "wake_loss",
    "wake_proposal_loss",
]

IWAE_WEIGHTS = block(
    "stochastic.iwae_weights",
    "The gradient of a log-mean of weights is the mean of the gradients of the log-weights, weighted by them; the "
    "weights' own gradient is already counted.",
)
DREG_WEIGHTS = block(
    "stochastic.dreg_weights",
    "The square of a weight is the factor that remains when the score terms are reparameterised a second time.",
)
WAKE_WEIGHTS = block(
    "stochastic.wake_weights",
    "The weights say which samples the posterior prefers; the model follows the samples, the weights follow no one.",
)
WAKE_SAMPLES = block(
    "stochastic.wake_samples",
    "The proposal moves towards the samples that the weights prefer; if they moved along, they would stay likely "
    "anyway.",
)
VIMCO_SIGNAL = block(
    "stochastic.vimco_signal",
    "How much a sample raised the bound above the bound that the others predict: a number that its score is multiplied "
    "by.",
)


def iwae_bound(log_weights: Tensor) -> Tensor:
    r"""Return the objective, :math:`\log \frac{1}{K} \sum_k w_k` averaged over ``*``, in nats.

    Its own gradient with respect to reparameterised samples is unbiased. The gradient of the proposal's parameters
    becomes pure noise as K grows; that of `dreg_loss`, with the same expectation, does not.

    Args:
        log_weights: :math:`\log p(x, z_k) - \log q(z_k)` in nats, (K, \*).

    Returns:
        A scalar.

    Raises:
        ValueError: If there is no sample.

    References:
        Burda, Grosse & Salakhutdinov, "Importance weighted autoencoders", 2016.

    Example:
        >>> iwae_bound(torch.tensor([0.0, -torch.inf]))
        tensor(-0.6931)
    """
    several("log_weights", log_weights)
    return log_weights.logsumexp(0).mean() - math.log(len(log_weights))


def iwae_loss(log_weights: Tensor) -> Tensor:
    r"""Return :math:`-\sum_k sg(\tilde w_k) \log w_k`, whose gradient is exactly that of ``-iwae_bound``.

    With the block open a second term is added,
    :math:`-\sum_k \tilde w_k \log w_k (\nabla \log w_k - \sum_j \tilde w_j \nabla \log w_j)`. The sum is the gradient
    of a softmax-weighted mean, which is not a bound; published code has trained with it.

    With log-weights from `path_log_prob` this is the estimator of Roeder et al., which is biased for more than one
    sample.

    Args:
        log_weights: As in `iwae_bound`, (K, \*).

    Returns:
        A scalar, in nats.

    Raises:
        ValueError: If there is no sample.

    References:
        Burda, Grosse & Salakhutdinov, "Importance weighted autoencoders", 2016, equation 14.

    Example:
        >>> log_weights = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> iwae_loss(log_weights).backward()
        >>> log_weights.grad
        tensor([-0.2689, -0.7311])
    """
    several("log_weights", log_weights)
    return -_weighted(stop_gradient(log_weights.softmax(0), IWAE_WEIGHTS), log_weights)


def dreg_loss(log_weights: Tensor) -> Tensor:
    r"""Return :math:`-\sum_k sg(\tilde w_k)^2 \log w_k`, for the parameters of the proposal.

    The log-weights have to be taken with `path_log_prob`: then the gradient with respect to the parameters of the
    proposal is an unbiased estimate of that of ``-iwae_bound`` whose signal-to-noise ratio grows with K. For the
    parameters of the model it is biased: use `iwae_loss` or `iwae_bound`.

    With the block open :math:`-2 \sum_k \tilde w_k^2 \log w_k (\nabla \log w_k - \sum_j \tilde w_j \nabla \log w_j)`
    is added.

    Args:
        log_weights: :math:`\log p(x, z_k) - \log q(z_k; sg \phi)` in nats, (K, \*).

    Returns:
        A scalar, in nats.

    Raises:
        ValueError: If there is no sample.

    References:
        Tucker, Lawson, Gu & Maddison, "Doubly reparameterized gradient estimators for Monte Carlo objectives", 2019.

    Example:
        >>> log_weights = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> dreg_loss(log_weights).backward()
        >>> log_weights.grad
        tensor([-0.0723, -0.5344])
    """
    several("log_weights", log_weights)
    return -_weighted(stop_gradient(log_weights.softmax(0), DREG_WEIGHTS).square(), log_weights)


def wake_loss(log_weights: Tensor, log_probs: Tensor) -> Tensor:
    r"""Return :math:`-\sum_k sg(\tilde w_k) \log r(z_k)`, the loss of reweighted wake-sleep.

    With log-probabilities of the model, :math:`\log p(x, z_k)`, this is the wake phase of the model;
    `wake_proposal_loss` is that of the proposal. The weights are normalised by their own sum, so the bias is of order 1
    / K. The update is not the gradient of any loss. With the block open the weights learn too: they come to prefer the
    sample that is already likely.

    Args:
        log_weights: As in `iwae_bound`, (K, \*).
        log_probs: Log-probability of each sample under the distribution that learns, in nats, (K, \*).

    Returns:
        A scalar, in nats.

    Raises:
        ValueError: If the shapes differ, or there is no sample.

    References:
        Bornschein & Bengio, "Reweighted wake-sleep", 2015.

    Example:
        >>> log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> wake_loss(torch.tensor([0.0, 1.0]), log_probs).backward()
        >>> log_probs.grad
        tensor([-0.2689, -0.7311])
    """
    floating_alike(log_weights=log_weights, log_probs=log_probs)
    several("log_weights", log_weights)
    return -_weighted(stop_gradient(log_weights.softmax(0), WAKE_WEIGHTS), log_probs)


def wake_proposal_loss(log_weights: Tensor, proposal: Distribution, samples: Tensor) -> Tensor:
    r"""Return :math:`-\sum_k sg(\tilde w_k) \log q(sg(z_k))`, the wake phase of the proposal.

    It lowers :math:`KL(p(z | x) \| q)`, the divergence from the posterior, for samples of any kind. With
    `WAKE_SAMPLES` open and reparameterised samples, the samples move along with the proposal: a Gaussian then keeps its
    mean and only becomes narrower.

    Args:
        log_weights: As in `iwae_bound`, (K, \*).
        proposal: q, whose log-probabilities of the samples have the shape of the log-weights.
        samples: K samples of the proposal along dimension 0.

    Returns:
        A scalar, in nats.

    Raises:
        ValueError: If the shapes differ, or there is no sample.

    References:
        Bornschein & Bengio, "Reweighted wake-sleep", 2015.

    Example:
        >>> mean = torch.tensor(0.5, requires_grad=True)
        >>> q = torch.distributions.Normal(mean, 1.0)
        >>> wake_proposal_loss(torch.tensor([0.0, 1.0]), q, torch.tensor([0.5, 1.5])).backward()
        >>> mean.grad  # minus the weight of the second sample
        tensor(-0.7311)
    """
    return wake_loss(log_weights, proposal.log_prob(stop_gradient(samples, WAKE_SAMPLES)))


def vimco_loss(log_weights: Tensor, log_probs: Tensor) -> Tensor:
    r"""Return :math:`-\hat L - \sum_k \log q(z_k) \, sg(\hat L - \hat L_{-k})` for samples that have no gradient.

    :math:`\hat L` is `iwae_bound`; :math:`\hat L_{-k}` is the same with weight k replaced by the geometric mean of the
    others, and does not depend on sample k. The gradient is an unbiased estimate of that of the expected
    ``-iwae_bound``, for the parameters of the proposal and of the model. With the block open
    :math:`-\sum_k \log q(z_k) \nabla (\hat L - \hat L_{-k})` is added.

    Args:
        log_weights: As in `iwae_bound`, with its own gradient, (K, \*).
        log_probs: :math:`\log q(z_k)` in nats, (K, \*).

    Returns:
        A scalar. Only its gradient has a meaning: the objective is `iwae_bound`.

    Raises:
        ValueError: If the shapes differ, or there are fewer than two samples.

    References:
        Mnih & Rezende, "Variational inference for Monte Carlo objectives", 2016.

    Example:
        >>> log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> vimco_loss(torch.tensor([0.0, 1.0]), log_probs).backward()
        >>> log_probs.grad
        tensor([ 0.3799, -0.6201])
    """
    floating_alike(log_weights=log_weights, log_probs=log_probs)
    several("log_weights", log_weights, 2)
    total = log_weights.logsumexp(0)
    signal = stop_gradient(total - _without_each(log_weights), VIMCO_SIGNAL)
    return math.log(len(log_weights)) - (total + (log_probs * signal).sum(0)).mean()


def _weighted(weights: Tensor, terms: Tensor) -> Tensor:
    """Return the mean over ``*`` of the weighted sum; a sample without weight does not count, even at ``-inf``."""
    return (weights * terms.masked_fill(weights == 0, 0.0)).sum(0).mean()


def _without_each(log_weights: Tensor) -> Tensor:
    """Return the log-sum of weights with each of them in turn replaced by the geometric mean of the others."""
    k = len(log_weights)
    mean = of_the_others(log_weights, torch.cumsum, torch.add) / (k - 1)
    return torch.logaddexp(of_the_others(log_weights, torch.logcumsumexp, torch.logaddexp), mean)
