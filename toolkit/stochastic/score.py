r"""The score function estimator and DiCE: gradients through a draw that has no derivative.

:math:`\nabla E_q[c] = E_q[c \nabla \log q + \nabla c]`: the parameters act on a sample through its probability alone.
The cost multiplies the score as a number; its own dependence on the parameters is a separate term.

S samples, T draws in order, K outcomes; ``*`` any further dimensions, over which is averaged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._tensors import floating, floating_alike, promoted, wide
from toolkit.blocks import block, stop_gradient
from toolkit.stochastic._others import of_the_others
from toolkit.stochastic._shapes import fits, several

__all__ = [
    "BASELINE",
    "MAGIC_BOX",
    "SAMPLING_WEIGHTS",
    "SCORE_COST",
    "dice_loss",
    "enumerated_loss",
    "leave_one_out",
    "magic_box",
    "score_function_loss",
]

SCORE_COST = block(
    "stochastic.score_cost",
    "The cost says how much a draw's probability should change; the cost's own gradient is a term of its own, and here "
    "it would be multiplied by a log-probability.",
)
BASELINE = block(
    "stochastic.baseline",
    "The baseline only lowers the variance: it is fitted to the cost, not to the log-probability that it is multiplied "
    "with.",
)
SAMPLING_WEIGHTS = block(
    "stochastic.sampling_weights",
    "A sum over all outcomes stands for the mean over samples, and the frequency of a sample has no gradient.",
)
MAGIC_BOX = block(
    "stochastic.magic_box",
    "The log-probability is subtracted from itself, so that the factor is 1 while each of its derivatives is that of a "
    "probability, divided by the probability.",
)


def score_function_loss(log_prob: Tensor, cost: Tensor, *, baseline: Tensor | None = None) -> Tensor:
    r"""Return the surrogate ``mean(log q(z) * (sg(c) - sg(b)) + c)`` of the expected cost, to be minimised.

    With the blocks in place its gradient is an unbiased estimate of :math:`\nabla E_q[c]` for every baseline that does
    not depend on its own sample. Opening `SCORE_COST` adds :math:`\log q \, \nabla c` per sample. For a cost
    :math:`\log q - \log p` that is :math:`-\nabla H(q)` on average: an entropy bonus. Opening `BASELINE` adds
    :math:`-\log q \, \nabla b`, which pushes the baseline down wherever an outcome is unlikely.

    Only the gradient of the surrogate has a meaning: the mean of `cost` is the objective.

    Args:
        log_prob: Log-probability of each sample in nats, summed over the dimensions of one sample, (S, \*).
        cost: (S, \*); may depend on the parameters itself.
        baseline: Of a shape that broadcasts to that of `cost`. None: 0. See `leave_one_out`.

    Returns:
        A scalar, in the units of the cost.

    Raises:
        ValueError: If the shapes do not fit.

    References:
        Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.
        Schulman, Heess, Weber & Abbeel, "Gradient estimation using stochastic computation graphs", 2015.

    Example:
        >>> theta = torch.tensor(0.3, requires_grad=True)
        >>> log_prob = torch.nn.functional.logsigmoid(theta).expand(2)
        >>> score_function_loss(log_prob, torch.tensor([1.0, 3.0]), baseline=torch.tensor(0.5)).backward()
        >>> theta.grad  # 1.5 (1 - sigmoid(theta))
        tensor(0.6383)
    """
    cost = promoted(cost, log_prob)
    floating_alike(log_prob=log_prob, cost=cost)
    signal = stop_gradient(cost, SCORE_COST)
    if baseline is not None:
        baseline = promoted(baseline, cost)
        fits("baseline", baseline, "cost", cost)
        signal = signal - stop_gradient(baseline, BASELINE)
    return (log_prob * signal + cost).mean()


def leave_one_out(costs: Tensor) -> Tensor:
    r"""Return the baseline of each sample, the mean cost of the others: :math:`b_s = \sum_{j \neq s} c_j / (S - 1)`.

    With it `score_function_loss` stays unbiased. The mean of all S costs would shrink the gradient by ``(S - 1) / S``.

    Args:
        costs: (S, \*), of independent samples of the same distribution.

    Returns:
        (S, \*).

    Raises:
        ValueError: If there are fewer than two samples.

    References:
        Kool, van Hoof & Welling, "Buy 4 REINFORCE samples, get a baseline for free!", 2019.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 2.0, 6.0]))
        tensor([4.0000, 3.5000, 1.5000])
    """
    costs = promoted(costs)
    several("costs", costs, 2)
    means = of_the_others(wide(costs), torch.cumsum, torch.add) / (len(costs) - 1)
    return means.to(costs.dtype)


def enumerated_loss(log_probs: Tensor, losses: Tensor) -> Tensor:
    r"""Return :math:`\sum_k sg(q_k) L_k`, the mean of a sampled surrogate over all outcomes of a small space.

    With the block in place its gradient is :math:`\sum_k q_k \nabla L_k`, the expectation of the gradients of
    single samples, without any noise. With the block open, :math:`\sum_k L_k \nabla q_k` is added. Outcomes with
    probability 0 do not contribute.

    Args:
        log_probs: In nats, (\*, K).
        losses: The surrogate of a single sample, for each outcome, (\*, K).

    Returns:
        A scalar: the mean over ``*``, in the units of the losses.

    Raises:
        ValueError: If the shapes differ.

    References:
        Schulman, Heess, Weber & Abbeel, "Gradient estimation using stochastic computation graphs", 2015.

    Example:
        >>> theta = torch.tensor([0.2, -0.5, 1.0], requires_grad=True)
        >>> log_q = theta.log_softmax(0)
        >>> enumerated_loss(log_q, log_q * torch.tensor([1.0, 0.3, -0.7])).backward()
        >>> theta.grad
        tensor([ 0.2982,  0.0547, -0.3529])
    """
    losses = promoted(losses, log_probs)
    floating_alike(log_probs=log_probs, losses=losses)
    weights = stop_gradient(log_probs.exp(), SAMPLING_WEIGHTS)
    return (weights * losses.masked_fill(weights == 0, 0.0)).sum(-1).mean()


def magic_box(log_prob: Tensor) -> Tensor:
    r"""Return :math:`\exp(\tau - sg(\tau))`: exactly 1, with the derivatives of a probability divided by it.

    ``magic_box(log q(z)) * c(z)`` can be differentiated any number of times, and each derivative is an unbiased
    estimate of that of :math:`E_q[c]`. With the block open the box is a constant, and the draw has no derivative of any
    order. An impossible draw (log-probability ``-inf``) has none either.

    Args:
        log_prob: The sum of the log-probabilities of all draws that influence a cost, any shape, in nats.

    Returns:
        Ones of the same shape.

    References:
        Foerster, Farquhar, Al-Shedivat, Rocktäschel, Xing & Whiteson, "DiCE: the infinitely differentiable Monte Carlo
        estimator", 2018.

    Example:
        >>> theta = torch.tensor(0.5, requires_grad=True)
        >>> (slope,) = torch.autograd.grad(magic_box(theta.square()), theta, create_graph=True)
        >>> torch.autograd.grad(slope, theta)  # d2 exp(theta^2) / exp(theta^2) = 4 theta^2 + 2
        (tensor(3.),)
    """
    floating(log_prob=log_prob)
    possible = log_prob.masked_fill(log_prob.isneginf(), 0.0)
    return (possible - stop_gradient(possible, MAGIC_BOX)).exp()


def dice_loss(log_probs: Tensor, costs: Tensor, *, baselines: Tensor | None = None) -> Tensor:
    r"""Return :math:`\sum_t box(\sum_{s \leq t} \log q_s) c_t + \sum_t (1 - box(\log q_t)) b_t`, to be minimised.

    Its value is the mean over ``*`` of the summed costs. Each of its derivatives, of any order, is an unbiased estimate
    of that of the expected cost, if each baseline depends only on earlier draws. A surrogate of the form
    ``sg(c) * log q`` is right at the first order only. With the block open the gradient is that of the costs' own
    dependence on the parameters.

    Args:
        log_probs: Log-probability in nats of each draw, (T, \*).
        costs: Cost of each step, caused by its own draw and earlier ones, (T, \*).
        baselines: Expected sum of the costs from each step on, (T, \*). None: 0.

    Returns:
        A scalar, in the units of the costs.

    Raises:
        ValueError: If the shapes differ.

    References:
        Foerster, Farquhar, Al-Shedivat, Rocktäschel, Xing & Whiteson, "DiCE: the infinitely differentiable Monte Carlo
        estimator", 2018.

    Example:
        >>> theta = torch.tensor([0.3, -0.2], requires_grad=True)
        >>> loss = dice_loss(torch.nn.functional.logsigmoid(theta), torch.tensor([1.0, 2.0]))
        >>> loss.backward()
        >>> loss.item(), theta.grad  # (1 - sigmoid(theta)) times the costs from each draw on
        (3.0, tensor([1.2767, 1.0997]))
    """
    costs = promoted(costs, log_probs)
    floating_alike(costs=costs, log_probs=log_probs)
    several("log_probs", log_probs)
    total = (magic_box(log_probs.cumsum(0)) * costs).sum(0)
    if baselines is not None:
        baselines = promoted(baselines, log_probs)
        floating_alike(costs=costs, baselines=baselines)
        total = total + ((1 - magic_box(log_probs)) * baselines).sum(0)
    return total.mean()
