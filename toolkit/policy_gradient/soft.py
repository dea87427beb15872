"""The three losses of soft actor-critic: each trains one part and uses the other two.

Leading dimensions (*) are batches, D dimensions of an action. Entropies and log-probabilities are in nats, and the
temperature alpha in units of the reward per nat.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from toolkit._checks import choice, number
from toolkit._random import own_generator
from toolkit._tensors import floating_alike, promoted
from toolkit.blocks import block, stop_gradient
from toolkit.policy_gradient._shapes import scalar

__all__ = [
    "ENTROPY_GAP",
    "SOFT_TARGET",
    "TEMPERATURE",
    "sac_actor_loss",
    "sac_critic_loss",
    "sac_temperature_loss",
    "squashed_gaussian_sample",
]

TEMPERATURE = block(
    "policy_gradient.temperature",
    "The temperature is the price of an entropy: the policy pays it, and may not lower it.",
)
SOFT_TARGET = block(
    "policy_gradient.soft_target",
    "The soft return is the label of the critic: neither the policy, nor the temperature, nor the next value moves to "
    "it.",
)
ENTROPY_GAP = block(
    "policy_gradient.entropy_gap",
    "The gap to the wanted entropy is a measurement: it moves the temperature, and the temperature moves the policy.",
)


def sac_actor_loss(log_alpha: Tensor, log_prob_t: Tensor, q_t: Tensor) -> Tensor:
    r"""Return the actor's loss, the mean of ``sg(alpha) log pi(a) - Q(a)``, with a reparameterised action a.

    Hold the critic's parameters by `held_critic`. With the block `TEMPERATURE` in place the gradient with respect to
    ``log pi`` is ``alpha / N``. Open, and with the three losses summed, ``log alpha`` gets ``alpha E[log pi]`` as well;
    the total is then ``-alpha H`` for every policy: for a negative target entropy H, alpha falls to 0.

    Args:
        log_alpha: A tensor without dimensions.
        log_prob_t: (\*).
        q_t: (\*), the critic's value of the action, the smaller one of two critics.

    Returns:
        A scalar, in the units of the reward.

    Raises:
        ValueError: If shapes do not fit.

    References:
        Haarnoja, Zhou, Hartikainen, Tucker, Ha, Tan, Kumar, Zhu, Gupta, Abbeel and Levine, "Soft actor-critic
        algorithms and applications", 2018, section 4.

    Example:
        >>> sac_actor_loss(torch.tensor(0.0), torch.tensor([-1.0, 1.0]), torch.tensor([2.0, 3.0]))
        tensor(-2.5000)
    """
    scalar("log_alpha", log_alpha)
    floating_alike(log_prob_t=log_prob_t, q_t=q_t)
    return (stop_gradient(log_alpha.exp(), TEMPERATURE) * log_prob_t - q_t).mean()


def sac_critic_loss(
    q_tm1: Tensor, r_t: Tensor, discount_t: Tensor, q_t: Tensor, log_prob_t: Tensor, log_alpha: Tensor
) -> Tensor:
    r"""Return the critic's loss, the mean of ``(Q(s, a) - sg(r + discount (Q'(s', a') - alpha log pi(a'))))^2 / 2``.

    With the block `SOFT_TARGET` in place the gradient with respect to `q_tm1` is the error e over N. Open, ``Q'``,
    ``log pi`` and ``log alpha`` get ``-discount e``, ``alpha discount e`` and ``alpha discount e log pi`` over N as
    well.

    Args:
        q_tm1: (\*), the critic's value of the action that was taken.
        r_t: (\*).
        discount_t: (\*), 0 where the episode ended.
        q_t: (\*), the target network's value of an action of the policy in the next state, the smaller one of two
            critics.
        log_prob_t: (\*), of that action.
        log_alpha: A tensor without dimensions.

    Returns:
        A scalar, in squared units of the reward.

    Raises:
        ValueError: If shapes do not fit.

    References:
        Haarnoja et al., "Soft actor-critic algorithms and applications", 2018, section 4.

    Example:
        >>> one = torch.ones(1)
        >>> sac_critic_loss(one, one, 0.5 * one, 2 * one, -one, torch.tensor(0.0))
        tensor(1.1250)
    """
    scalar("log_alpha", log_alpha)
    r_t = promoted(r_t, q_tm1)
    floating_alike(q_tm1=q_tm1, r_t=r_t, discount_t=discount_t, q_t=q_t, log_prob_t=log_prob_t)
    targets = stop_gradient(r_t + discount_t * (q_t - log_alpha.exp() * log_prob_t), SOFT_TARGET)
    return 0.5 * (q_tm1 - targets).square().mean()


def sac_temperature_loss(
    log_alpha: Tensor,
    log_prob_t: Tensor,
    *,
    target_entropy: float,
    multiplier: Literal["alpha", "log_alpha"] = "alpha",
) -> Tensor:
    r"""Return the temperature's loss, the mean of ``-alpha sg(log pi(a) + H)``.

    With the block `ENTROPY_GAP` in place ``log alpha`` gets the loss itself: alpha rises while the entropy is below H.
    Open, ``log pi`` gets ``-alpha / N``, which is exactly minus the actor's: if the losses are summed, the entropy
    bonus is gone, the entropy falls below H, and alpha rises without bound.

    Args:
        log_alpha: A tensor without dimensions.
        log_prob_t: (\*).
        target_entropy: H, in nats.
        multiplier: ``"alpha"``, as in the paper, or ``"log_alpha"``, as in many implementations: the gradient of
            ``log alpha`` is divided by alpha.

    Returns:
        A scalar.

    Raises:
        ValueError: If `log_alpha` has dimensions or another argument is out of its range.

    References:
        Haarnoja et al., "Soft actor-critic algorithms and applications", 2018, section 5.

    Example:
        >>> sac_temperature_loss(torch.tensor(0.0), torch.tensor([1.5]), target_entropy=-1.0)
        tensor(-0.5000)
    """
    choice("multiplier", multiplier, ("alpha", "log_alpha"))
    scalar("log_alpha", log_alpha)
    floating_alike(log_prob_t=log_prob_t)
    entropy = number("target_entropy", target_entropy)
    factor = log_alpha.exp() if multiplier == "alpha" else log_alpha
    return -(factor * stop_gradient(log_prob_t + entropy, ENTROPY_GAP)).mean()


def squashed_gaussian_sample(
    mean_t: Tensor, log_std_t: Tensor, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return a reparameterised action ``tanh(u)``, ``u = mean + std z``, and its log-probability.

    ``log pi(a) = sum_d log N(u_d) - log(1 - tanh(u_d)^2)``. The last term is computed as
    ``2 (log 2 - u - softplus(-2 u))``, which is exact where ``tanh(u)`` rounds to 1.

    Args:
        mean_t: (\*, D).
        log_std_t: (\*, D).
        generator: Draws z. None: torch's global generator.

    Returns:
        Actions (\*, D) in -1 to 1, and log-probabilities (\*) in nats.

    Raises:
        ValueError: If shapes differ.

    References:
        Haarnoja et al., "Soft actor-critic algorithms and applications", 2018, appendix C.

    Example:
        >>> action, log_prob = squashed_gaussian_sample(torch.tensor([30.0]), torch.tensor([0.0]))
        >>> action, log_prob > 50
        (tensor([1.]), tensor(True))
    """
    floating_alike(mean_t=mean_t, log_std_t=log_std_t)
    source = own_generator(generator)
    z = torch.randn(mean_t.shape, generator=source, dtype=mean_t.dtype, device=source.device).to(mean_t.device)
    u = mean_t + log_std_t.exp() * z
    log_normal = -0.5 * z.square() - log_std_t - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
    return u.tanh(), (log_normal - log_slope).sum(-1)
