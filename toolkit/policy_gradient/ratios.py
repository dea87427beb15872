"""Probability ratios of two policies: PPO and GRPO, off-policy weights, penalties on the divergence from a reference.

Leading dimensions (*) are batches and times, K samples of a group, T tokens of a sample. Log-probabilities are those of
the action that was taken, in nats. Losses are means.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from toolkit._checks import choice, number
from toolkit._tensors import (
    bounded,
    common_dtype,
    exponential_remainder,
    floating,
    floating_alike,
    largest_exponent,
    promoted,
    wide,
)
from toolkit.blocks import block, stop_gradient
from toolkit.policy_gradient._shapes import one_for_each_row
from toolkit.policy_gradient.sampled import ADVANTAGE

__all__ = [
    "IMPORTANCE_WEIGHTS",
    "LOG_RATIO",
    "OLD_POLICY",
    "REFERENCE_POLICY",
    "clipped_surrogate_pg_loss",
    "grpo_loss",
    "importance_ratios",
    "kl_penalty",
    "off_policy_pg_loss",
    "reverse_kl_loss",
]

OLD_POLICY = block(
    "policy_gradient.old_policy",
    "The policy that drew the action is in the past: the ratio to it is 1 in value, and its gradient is the score.",
)
IMPORTANCE_WEIGHTS = block(
    "policy_gradient.importance_weights",
    "An importance weight corrects how often an action was drawn: it weighs the score, and has no score of its own.",
)
REFERENCE_POLICY = block(
    "policy_gradient.reference_policy",
    "The reference is the place that the policy is tied to: if both moved, they would meet in between.",
)
LOG_RATIO = block(
    "policy_gradient.log_ratio",
    "The log-ratio is the price of a drawn action, a reward like any other: it weighs the score.",
)

Estimator = Literal["k1", "k2", "k3"]


def importance_ratios(log_prob_t: Tensor, old_log_prob_t: Tensor | None = None) -> Tensor:
    r"""Return ``pi(a) / sg(pi_old(a)) = exp(log pi - sg(log pi_old))``.

    With the block `OLD_POLICY` in place the gradient with respect to ``log pi`` is the ratio. On-policy, ``log pi_old``
    is the same tensor: the value is 1 for every policy, and with the block open the gradient is exactly 0. A ratio too
    large for its dtype is set near the largest number, without a gradient: clipping an infinite ratio would give NaN.

    Args:
        log_prob_t: (\*).
        old_log_prob_t: (\*). None: `log_prob_t` itself, for a single update from the samples.

    Returns:
        (\*).

    Raises:
        ValueError: If shapes differ.

    References:
        Schulman, Wolski, Dhariwal, Radford and Klimov, "Proximal policy optimization algorithms", 2017, section 3.

    Example:
        >>> log_prob = torch.tensor([-1.0], requires_grad=True)
        >>> importance_ratios(log_prob)
        tensor([1.], grad_fn=<ExpBackward0>)
        >>> torch.autograd.grad(importance_ratios(log_prob), log_prob)
        (tensor([1.]),)
    """
    old = log_prob_t if old_log_prob_t is None else old_log_prob_t
    floating_alike(log_prob_t=log_prob_t, old_log_prob_t=old)
    x = log_prob_t - stop_gradient(old, OLD_POLICY)
    return x.clamp(max=largest_exponent(x.dtype)).exp()


def clipped_surrogate_pg_loss(
    prob_ratios_t: Tensor, adv_t: Tensor, epsilon: float, *, epsilon_high: float | None = None
) -> Tensor:
    r"""Return the loss of PPO, the mean of ``-min(r sg(A), clip(r, 1 - e, 1 + e') sg(A))``.

    With the block `ADVANTAGE` in place the ratio's gradient is ``-A / N``, and 0 where the ratio has left the closed
    interval in the direction of its advantage. Open, the advantage gets ``-r / N``, or minus the clipped ratio over N
    where the minimum takes it.

    Args:
        prob_ratios_t: (\*), ratios, as `importance_ratios` returns them.
        adv_t: (\*), advantages.
        epsilon: e, less than 1.
        epsilon_high: e'. None: e.

    Returns:
        A scalar, in the units of the reward.

    Raises:
        ValueError: If shapes differ, or a width of the interval is out of its range.

    References:
        Schulman et al., "Proximal policy optimization algorithms", 2017, equation 7.

    Example:
        >>> clipped_surrogate_pg_loss(torch.tensor([1.5, 0.9]), torch.tensor([1.0, -2.0]), 0.25)
        tensor(0.2750)
    """
    low, high = _interval(epsilon, epsilon_high)
    adv_t = promoted(adv_t, prob_ratios_t)
    floating_alike(prob_ratios_t=prob_ratios_t, adv_t=adv_t)
    return -_clipped_objective(prob_ratios_t, stop_gradient(adv_t, ADVANTAGE), low, high).mean()


def grpo_loss(
    log_prob_t: Tensor,
    adv: Tensor,
    *,
    old_log_prob_t: Tensor | None = None,
    reference_log_prob_t: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    mask_t: Tensor | None = None,
) -> Tensor:
    r"""Return the loss of GRPO: PPO's for each token, plus `beta` times the estimator k3 of the divergence.

    ``-1/K sum_i 1/|o_i| sum_t (min(r_it A_i, clip(r_it) A_i) - beta k3_it)``, where a sample has one advantage for all
    of its tokens. In the first update ``r`` is 1, and with `OLD_POLICY` open its gradient is exactly 0: the policy
    learns nothing from the reward, and the value of the loss does not show it.

    Args:
        log_prob_t: (\*, K, T), log-probabilities of tokens.
        adv: (\*, K), as `group_advantages` returns them.
        old_log_prob_t: (\*, K, T). None: `log_prob_t`, for a single update from the samples.
        reference_log_prob_t: (\*, K, T), of the reference policy; needed for a positive `beta`.
        epsilon: As in `clipped_surrogate_pg_loss`.
        epsilon_high: Likewise.
        beta: Weight of the divergence.
        mask_t: (\*, K, T), nonzero for tokens that count, all with the same weight. A sample without tokens counts 0.
            None: all tokens count.

    Returns:
        A scalar; half precision is computed in float32 and rounded once.

    Raises:
        ValueError: If shapes differ, a number is out of its range, or `beta` is positive without a reference.

    References:
        Shao et al., "DeepSeekMath: pushing the limits of mathematical reasoning in open language models", 2024.

    Example:
        >>> log_prob = torch.tensor([[-1.0, -2.0], [-0.5, -0.3]], requires_grad=True)
        >>> torch.autograd.grad(grpo_loss(log_prob, torch.tensor([1.0, -1.0])), log_prob)
        (tensor([[-0.2500, -0.2500],
                [ 0.2500,  0.2500]]),)
    """
    low, high = _interval(epsilon, epsilon_high)
    beta = number("beta", beta, least=0)
    adv = promoted(adv, log_prob_t)
    floating(log_prob_t=log_prob_t, adv=adv)
    if log_prob_t.ndim < 2:
        raise ValueError(f"`log_prob_t` should have shape (*, K, T). Found {tuple(log_prob_t.shape)}.")
    one_for_each_row(log_prob_t=log_prob_t, adv=adv)
    if beta and reference_log_prob_t is None:
        raise ValueError(f"`reference_log_prob_t` should be given for a positive `beta`. Found None, {beta:g}.")
    others = {"old_log_prob_t": old_log_prob_t, "reference_log_prob_t": reference_log_prob_t}
    floating_alike(0, log_prob_t=log_prob_t, **{name: given for name, given in others.items() if given is not None})
    if mask_t is not None:
        floating_alike(log_prob_t=log_prob_t, mask_t=promoted(mask_t, log_prob_t))
        mask_t = mask_t.bool()
    log_prob = _unpadded(log_prob_t, mask_t)
    old = None if old_log_prob_t is None else _unpadded(old_log_prob_t, mask_t)
    advantages = stop_gradient(wide(adv), ADVANTAGE).unsqueeze(-1)
    tokens = -_clipped_objective(importance_ratios(log_prob, old), advantages, low, high)
    if beta and reference_log_prob_t is not None:
        tokens = tokens + beta * kl_penalty(log_prob, _unpadded(reference_log_prob_t, mask_t))
    means = tokens.mean(-1) if mask_t is None else (tokens * mask_t).sum(-1) / mask_t.sum(-1).clamp(min=1)
    return means.mean().to(common_dtype(log_prob_t, adv))


def off_policy_pg_loss(
    log_prob_t: Tensor, behaviour_log_prob_t: Tensor, adv_t: Tensor, *, clip_rho: float | None = None
) -> Tensor:
    r"""Return the surrogate for actions of another policy, the mean of ``-sg(min(rho, clip)) log pi(a) sg(A)``.

    ``rho = pi(a) / mu(a)``. With both blocks in place the gradient with respect to ``log pi`` is ``-min(rho, clip) A /
    N``; without clipping its expectation under the behaviour policy mu is the policy gradient. With
    `IMPORTANCE_WEIGHTS` open and without a clip it is multiplied by ``1 + log pi``: an action less likely than 37 % is
    pushed in the wrong direction. With `ADVANTAGE` open the advantage gets ``-rho log pi / N``.

    Args:
        log_prob_t: (\*), of the policy that learns.
        behaviour_log_prob_t: (\*), of the policy that drew the actions.
        adv_t: (\*).
        clip_rho: Upper bound of the weights, as V-trace's for the policy gradient. None: no bound.

    Returns:
        A scalar.

    Raises:
        ValueError: If shapes differ, or `clip_rho` is not positive.

    References:
        Degris, White and Sutton, "Off-policy actor-critic", 2012.
        Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures",
        2018, section 4.2.

    Example:
        >>> log_prob = torch.tensor([-2.0], requires_grad=True)
        >>> loss = off_policy_pg_loss(log_prob, torch.tensor([-2.0]), torch.tensor([3.0]))
        >>> torch.autograd.grad(loss, log_prob)
        (tensor([-3.]),)
    """
    adv_t = promoted(adv_t, log_prob_t)
    floating_alike(log_prob_t=log_prob_t, behaviour_log_prob_t=behaviour_log_prob_t, adv_t=adv_t)
    rho = (log_prob_t - behaviour_log_prob_t).exp()
    if clip_rho is not None:
        rho = bounded(rho, most=number("clip_rho", clip_rho, above=0))
    # An action that the policy would never take has the weight 0, and 0 * -inf is NaN.
    scores = log_prob_t.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)
    return -(stop_gradient(rho, IMPORTANCE_WEIGHTS) * scores * stop_gradient(adv_t, ADVANTAGE)).mean()


def kl_penalty(log_prob_t: Tensor, reference_log_prob_t: Tensor, kind: Estimator = "k3") -> Tensor:
    r"""Return an estimate of ``KL(pi || ref)`` from each action drawn from pi, in nats.

    With ``x = log ref - log pi``: k1 is ``-x``, k2 is ``x^2 / 2``, k3 is ``exp(x) - 1 - x``. As estimates k1 and k3 are
    unbiased. As losses the three have different gradients; `reverse_kl_loss` has the right one:

    - k1: ``grad log pi``, whose expectation is 0, so it is noise alone;
    - k2: ``-x grad log pi``, whose expectation is the gradient of ``KL(pi || ref)``;
    - k3: ``(1 - exp(x)) grad log pi``, whose expectation is the gradient of ``KL(ref || pi)``, the other divergence.

    The block `REFERENCE_POLICY` holds ref constant. Open, ``log ref`` gets minus the gradient of ``log pi``.

    Args:
        log_prob_t: (\*).
        reference_log_prob_t: (\*).
        kind: See above.

    Returns:
        (\*).

    Raises:
        ValueError: If shapes differ or `kind` is unknown.

    References:
        Schulman, "Approximating KL divergence", 2020.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), "k3")
        tensor([0.1065])
    """
    choice("kind", kind, ("k1", "k2", "k3"))
    floating_alike(log_prob_t=log_prob_t, reference_log_prob_t=reference_log_prob_t)
    x = stop_gradient(reference_log_prob_t, REFERENCE_POLICY) - log_prob_t
    if kind == "k1":
        return -x
    return 0.5 * x.square() if kind == "k2" else exponential_remainder(x)


def reverse_kl_loss(log_prob_t: Tensor, reference_log_prob_t: Tensor) -> Tensor:
    r"""Return a surrogate for ``KL(pi || ref)``, the mean of ``sg(log pi - log ref) log pi`` over actions of pi.

    With the block `LOG_RATIO` in place the gradient with respect to ``log pi`` is ``(log pi - log ref) / N``, that of
    the mean of k2 in `kl_penalty`. It is an unbiased estimate of the gradient of ``KL(pi || ref)``. Open, ``log pi /
    N`` is added, so the entropy is counted twice, and ``log ref`` gets ``-log pi / N``. The value is not the
    divergence.

    Args:
        log_prob_t: Log-probabilities of the N actions, drawn from pi, under pi, (\*).
        reference_log_prob_t: Log-probabilities of the same actions under the reference policy, (\*).

    Returns:
        A scalar.

    Raises:
        ValueError: If shapes differ.

    References:
        Schulman, "Approximating KL divergence", 2020.

    Example:
        >>> log_prob = torch.tensor([-1.0], requires_grad=True)
        >>> torch.autograd.grad(reverse_kl_loss(log_prob, torch.tensor([-1.5])), log_prob)
        (tensor([0.5000]),)
    """
    floating_alike(log_prob_t=log_prob_t, reference_log_prob_t=reference_log_prob_t)
    return (stop_gradient(log_prob_t - reference_log_prob_t, LOG_RATIO) * log_prob_t).mean()


def _unpadded(log_prob_t: Tensor, mask_t: Tensor | None) -> Tensor:
    """Return 0 where there is no token: padding may hold anything, and 0 * NaN is NaN. Half precision is widened."""
    return wide(log_prob_t) if mask_t is None else wide(log_prob_t).where(mask_t, 0)


def _interval(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    low = number("epsilon", epsilon, above=0, below=1)
    high = low if epsilon_high is None else number("epsilon_high", epsilon_high, above=0)
    return 1 - low, 1 + high


def _clipped_objective(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratios * advantages, bounded(ratios, low, high) * advantages)
