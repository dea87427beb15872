"""REINFORCE with a baseline, and actor-critic: the score of sampled actions, weighted by a constant advantage.

Leading dimensions (*) are batches and times, A actions, D dimensions of a continuous action. Time indices as in rlax:
logits, actions, advantages and values of one time have the same index. Losses are means over all leading dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit._checks import number
from toolkit._tensors import floating, floating_alike, in_range, promoted, same_shape
from toolkit.blocks import block, stop_gradient
from toolkit.policy_gradient._shapes import actions_of

__all__ = ["ACTION", "ADVANTAGE", "VALUE_TARGET", "actor_critic_loss", "gaussian_log_prob", "policy_gradient_loss"]

ADVANTAGE = block(
    "policy_gradient.advantage",
    "The advantage says by how much an action is reinforced: a critic inside of it learns values from its own loss, "
    "and would learn from this one to please the policy.",
)
VALUE_TARGET = block(
    "policy_gradient.value_target",
    "The return is the label of the critic: the prediction moves towards it, and it does not move.",
)
ACTION = block(
    "policy_gradient.action",
    "The score of a policy is the derivative of its log-probability at an action that was drawn: with a "
    "reparameterised action the path through the draw would be added.",
)

# `torch.nn.functional.cross_entropy` gives an ignored label the loss 0; no action may be ignored.
_NO_ACTION = -(2**62)


def policy_gradient_loss(logits_t: Tensor, a_t: Tensor, adv_t: Tensor, w_t: Tensor | None = None) -> Tensor:
    r"""Return the surrogate of REINFORCE, the mean of ``-w log pi(a) sg(A)``.

    With the block `ADVANTAGE` in place the logits' gradient is ``w A (pi - onehot(a)) / N``, and A gets no gradient.
    Open, A gets ``-w log pi(a) / N`` as well, which raises the advantage of every action.

    Args:
        logits_t: (\*, A), unnormalised log-probabilities.
        a_t: (\*), integers, the sampled actions.
        adv_t: (\*), advantages, or returns without a baseline.
        w_t: (\*), a weight for each action. None: 1.

    Returns:
        A scalar, in nats times the units of the reward.

    Raises:
        ValueError: If shapes differ or the actions are not integers below A.

    References:
        Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.

    Example:
        >>> logits = torch.tensor([[0.2, -0.4, 0.7], [1.0, 0.1, -0.3]], requires_grad=True)
        >>> loss = policy_gradient_loss(logits, torch.tensor([2, 0]), torch.tensor([1.5, -0.8]))
        >>> loss
        tensor(0.2895, grad_fn=<MeanBackward0>)
    """
    actions_of(logits_t, a_t)
    adv_t = promoted(adv_t, logits_t)
    floating(adv_t=adv_t)
    same_shape(a_t=a_t, adv_t=adv_t)
    weights, surprise = stop_gradient(adv_t, ADVANTAGE), _surprise(logits_t, a_t)
    if w_t is not None:
        w_t = promoted(w_t, logits_t)
        floating(w_t=w_t)
        same_shape(a_t=a_t, w_t=w_t)
        weights = weights * w_t
        surprise = surprise.masked_fill((w_t == 0) & surprise.isinf(), 0.0)  # padding may name an illegal action
    return (surprise * weights).mean()


def actor_critic_loss(logits_t: Tensor, a_t: Tensor, v_t: Tensor, g_t: Tensor, *, critic_weight: float = 1.0) -> Tensor:
    r"""Return the losses of actor and critic together, the mean of ``-log pi(a) sg(G - v) + c / 2 (sg(G) - v)^2``.

    With both blocks in place the actor gets ``A (pi - onehot(a)) / N`` and the critic ``-c A / N``, ``A = G - v``. With
    `ADVANTAGE` open the critic gets ``log pi(a) / N`` as well. Its fixed point rises from the mean return to
    ``E[G] + H(pi) / c``: it overestimates every state by the policy's entropy. With `VALUE_TARGET` open the critic's
    square also moves the return towards the value.

    If actor and critic share parameters, the blocked gradient is not the gradient of any loss.

    Args:
        logits_t: (\*, A).
        a_t: (\*), integers, the sampled actions.
        v_t: (\*), the critic's values.
        g_t: (\*), returns of the actions, sampled or bootstrapped.
        critic_weight: c.

    Returns:
        A scalar.

    Raises:
        ValueError: If shapes differ, the actions are not integers below A, or `critic_weight` is not positive.

    References:
        Mnih, Badia, Mirza, Graves, Lillicrap, Harley, Silver and Kavukcuoglu, "Asynchronous methods for deep
        reinforcement learning", 2016.

    Example:
        >>> logits, values = torch.zeros(1, 2), torch.zeros(1, requires_grad=True)
        >>> loss = actor_critic_loss(logits, torch.tensor([1]), values, torch.tensor([2.0]))
        >>> torch.autograd.grad(loss, values)
        (tensor([-2.]),)
    """
    critic_weight = number("critic_weight", critic_weight, above=0)
    actions_of(logits_t, a_t)
    g_t = promoted(g_t, logits_t)
    floating(v_t=v_t, g_t=g_t)
    same_shape(a_t=a_t, v_t=v_t, g_t=g_t)
    advantages = stop_gradient(g_t, VALUE_TARGET) - v_t
    actor = _surprise(logits_t, a_t) * stop_gradient(advantages, ADVANTAGE)
    return (actor + 0.5 * critic_weight * advantages.square()).mean()


def gaussian_log_prob(a_t: Tensor, mean_t: Tensor, log_std_t: Tensor) -> Tensor:
    r"""Return the log-probability of a held action under a Gaussian policy with independent components, in nats.

    With the block `ACTION` in place its gradient is the score, ``z / std`` for the mean and ``z^2 - 1`` for the log of
    the deviation, ``z = (a - mean) / std``, whose expectation is 0. Open, and with a reparameterised action
    ``a = mean + std z``, it is the derivative along the draw, 0 and -1.

    Args:
        a_t: (\*, D).
        mean_t: (\*, D).
        log_std_t: (\*, D).

    Returns:
        (\*).

    Raises:
        ValueError: If shapes differ.

    References:
        Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992,
        section 6.

    Example:
        >>> gaussian_log_prob(torch.tensor([1.0]), torch.zeros(1), torch.zeros(1))
        tensor(-1.4189)
    """
    a_t = promoted(a_t, mean_t)
    floating_alike(mean_t=mean_t, a_t=a_t, log_std_t=log_std_t)
    z = (stop_gradient(a_t, ACTION) - mean_t) * (-log_std_t).exp()
    return (-0.5 * z.square() - log_std_t - 0.5 * math.log(2 * math.pi)).sum(-1)


def _surprise(logits_t: Tensor, a_t: Tensor) -> Tensor:
    """Return ``-log pi(a)``, in nats."""
    if a_t.dim() > 1:
        return _surprise(logits_t.flatten(0, -2), a_t.flatten()).reshape(a_t.shape)
    labels = a_t if a_t.dtype == torch.int64 else a_t.long()
    try:
        return torch.nn.functional.cross_entropy(logits_t, labels, reduction="none", ignore_index=_NO_ACTION)
    except (IndexError, RuntimeError):
        in_range("a_t", labels, logits_t.shape[-1])
        raise
