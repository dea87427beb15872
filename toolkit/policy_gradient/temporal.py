"""Advantages and value targets of trajectories: generalised advantage estimation and V-trace.

Leading dimensions (*) are batches, T times, the last dimension. As in rlax, ``v_tm1[t]`` is the value of the state in
which an action is taken, and ``r_t[t]``, ``discount_t[t]`` and ``v_t[t]`` are the reward, the discount and the value
after it. The discount is 0 where the episode ended, but not where it was truncated. Half precision is computed in
float32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from toolkit._checks import broadcasts, number
from toolkit._recursion import discounted_sums
from toolkit._tensors import bounded, common_dtype, floating, floating_alike, promoted, wide
from toolkit.blocks import block, stop_recording
from toolkit.policy_gradient.sampled import ADVANTAGE, VALUE_TARGET

__all__ = [
    "VTRACE_TARGET",
    "VTraceOutput",
    "gae_value_loss",
    "truncated_generalized_advantage_estimation",
    "vtrace",
    "vtrace_td_error_and_advantage",
]

VTRACE_TARGET = block(
    "policy_gradient.vtrace_target",
    "The corrected return is the label of the critic: neither later values nor the policy in the weights move to it.",
)


class VTraceOutput(NamedTuple):
    r"""Results of `vtrace_td_error_and_advantage`, each (\*, T), in the units of the reward.

    Attributes:
        errors: Target minus value, for the critic.
        pg_advantage: Weighted advantage, for the policy.
        q_estimate: One-step return to the next target.
    """

    errors: Tensor
    pg_advantage: Tensor
    q_estimate: Tensor


def truncated_generalized_advantage_estimation(
    r_t: Tensor, discount_t: Tensor, lambda_: float | Tensor, values: Tensor
) -> Tensor:
    r"""Return ``A_t = d_t + discount_t lambda_t A_{t+1}`` with the TD errors ``d_t = r_t + discount_t v_{t+1} - v_t``.

    With the block `ADVANTAGE` in place the result is a constant. Open, a cotangent w of the advantages gives the values
    ``-w_t`` plus decayed cotangents of earlier times.

    Args:
        r_t: (\*, T), rewards.
        discount_t: (\*, T).
        lambda_: From 0, the TD error, to 1, the return minus the value: a number, or a tensor that broadcasts to
            (\*, T).
        values: (\*, T + 1), the last one being the bootstrapped value.

    Returns:
        (\*, T), in the units of the reward.

    Raises:
        ValueError: If shapes do not fit, or `lambda_` is a number outside of 0 to 1.

    References:
        Schulman, Moritz, Levine, Jordan and Abbeel, "High-dimensional continuous control using generalized advantage
        estimation", 2016, equation 16.

    Example:
        >>> rewards, discounts = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.0])
        >>> truncated_generalized_advantage_estimation(rewards, discounts, 1.0, torch.tensor([0.2, 0.4, 9.0]))
        tensor([0.3000, 0.6000])
    """
    lambda_ = _checked(r_t, discount_t, lambda_, values)
    with stop_recording(ADVANTAGE):
        return _advantages(r_t, discount_t, lambda_, values).to(common_dtype(r_t, discount_t, values))


def gae_value_loss(r_t: Tensor, discount_t: Tensor, lambda_: float | Tensor, values: Tensor) -> Tensor:
    r"""Return the critic's loss that goes with generalised advantages, the mean of ``(sg(A_t + v_t) - v_t)^2 / 2``.

    ``A_t + v_t`` is the lambda-return, so this is TD(lambda). With the block `VALUE_TARGET` in place the gradient with
    respect to a value is ``-A_t / N``. Open, it is that of the mean of ``A_t^2 / 2``: later values move away from
    earlier values.

    Args:
        r_t: (\*, T).
        discount_t: (\*, T).
        lambda_: As in `truncated_generalized_advantage_estimation`.
        values: (\*, T + 1).

    Returns:
        A scalar, in squared units of the reward.

    Raises:
        ValueError: As `truncated_generalized_advantage_estimation`.

    References:
        Schulman et al., "High-dimensional continuous control using generalized advantage estimation", 2016.

    Example:
        >>> rewards, discounts = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.0])
        >>> gae_value_loss(rewards, discounts, 1.0, torch.tensor([0.2, 0.4, 9.0]))
        tensor(0.1125)
    """
    lambda_ = _checked(r_t, discount_t, lambda_, values)
    v_tm1 = wide(values[..., :-1])
    with stop_recording(VALUE_TARGET):
        targets = _advantages(r_t, discount_t, lambda_, values) + v_tm1
    return (0.5 * (targets - v_tm1).square().mean()).to(common_dtype(r_t, discount_t, values))


def vtrace(
    v_tm1: Tensor,
    v_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    rho_tm1: Tensor,
    lambda_: float | Tensor = 1.0,
    clip_rho_threshold: float = 1.0,
) -> Tensor:
    r"""Return the errors of V-trace, ``sg(target_t) - v_tm1``, to be squared by the critic's loss.

    ``target_t = v_tm1 + e_t`` with
    ``e_t = min(clip, rho_t) (r_t + discount_t v_t - v_tm1) + discount_t lambda_t min(1, rho_t) e_{t+1}``.
    With the block `VTRACE_TARGET` in place half of the squared errors has the gradient ``-e`` by `v_tm1`. Open, the
    target also has a gradient with respect to the values and to importance weights below their bounds.

    Args:
        v_tm1: (\*, T).
        v_t: (\*, T).
        r_t: (\*, T).
        discount_t: (\*, T).
        rho_tm1: (\*, T), importance ratios of the learned policy to the acting policy.
        lambda_: A number from 0 to 1, or a tensor that broadcasts to (\*, T).
        clip_rho_threshold: Bound of the weights of TD errors.

    Returns:
        (\*, T), in the units of the reward.

    Raises:
        ValueError: If shapes differ or a number is out of its range.

    References:
        Espeholt, Soyer, Munos, Simonyan, Mnih, Ward, Doron, Firoiu, Harley, Dunning, Legg and Kavukcuoglu, "IMPALA:
        scalable distributed deep-RL with importance weighted actor-learner architectures", 2018, equation 1.

    Example:
        >>> one = torch.ones(2)
        >>> vtrace(0 * one, 0 * one, one, 0.5 * one, torch.tensor([0.5, 3.0]))
        tensor([0.7500, 1.0000])
    """
    r_t = promoted(r_t, v_tm1)
    floating_alike(v_tm1=v_tm1, v_t=v_t, r_t=r_t, discount_t=discount_t, rho_tm1=rho_tm1)
    lambda_ = _lambda(lambda_, r_t)
    dtype = common_dtype(v_tm1, v_t, r_t, discount_t, rho_tm1)
    v_tm1, v_t, r_t, discount_t, rho_tm1 = map(wide, (v_tm1, v_t, r_t, discount_t, rho_tm1))
    return (_vtrace_targets(v_tm1, v_t, r_t, discount_t, rho_tm1, lambda_, clip_rho_threshold) - v_tm1).to(dtype)


def vtrace_td_error_and_advantage(
    v_tm1: Tensor,
    v_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    rho_tm1: Tensor,
    lambda_: float | Tensor = 1.0,
    clip_rho_threshold: float = 1.0,
    clip_pg_rho_threshold: float = 1.0,
) -> VTraceOutput:
    r"""Return the errors of `vtrace`, and the advantages of its policy gradient.

    ``q_t = r_t + discount_t (lambda_t target_{t+1} + (1 - lambda_t) v_t)``, with v_t alone in the last step, and
    ``pg_advantage_t = min(clip_pg, rho_t) (q_t - v_tm1)``. The block `ADVANTAGE` holds both constant. In rlax they keep
    the gradient with respect to values and weights; open the block for this.

    Args:
        v_tm1: As in `vtrace`, like all arguments below.
        v_t: (\*, T).
        r_t: (\*, T).
        discount_t: (\*, T).
        rho_tm1: (\*, T).
        lambda_: A number or a tensor.
        clip_rho_threshold: Bound of the weights of TD errors.
        clip_pg_rho_threshold: Bound of the weights of the policy gradient.

    Raises:
        ValueError: As `vtrace`.

    References:
        Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures",
        2018, section 4.2.

    Example:
        >>> one = torch.ones(2)
        >>> vtrace_td_error_and_advantage(0 * one, 0 * one, one, 0.5 * one, torch.tensor([0.5, 3.0])).pg_advantage
        tensor([0.7500, 1.0000])
    """
    r_t = promoted(r_t, v_tm1)
    floating_alike(v_tm1=v_tm1, v_t=v_t, r_t=r_t, discount_t=discount_t, rho_tm1=rho_tm1)
    clip_pg = number("clip_pg_rho_threshold", clip_pg_rho_threshold, above=0, infinite=True)
    lambda_ = _lambda(lambda_, r_t)
    dtype = common_dtype(v_tm1, v_t, r_t, discount_t, rho_tm1)
    v_tm1, v_t, r_t, discount_t, rho_tm1 = map(wide, (v_tm1, v_t, r_t, discount_t, rho_tm1))
    errors = _vtrace_targets(v_tm1, v_t, r_t, discount_t, rho_tm1, lambda_, clip_rho_threshold) - v_tm1
    with stop_recording(ADVANTAGE):
        weight = lambda_ if isinstance(lambda_, float) else lambda_.expand_as(r_t)[..., :-1]
        later = v_tm1[..., 1:] + weight * errors[..., 1:]
        q_estimate = r_t + discount_t * torch.cat([later, v_t[..., -1:]], -1)
        pg_advantage = bounded(rho_tm1, most=clip_pg) * (q_estimate - v_tm1)
    return VTraceOutput(errors.to(dtype), pg_advantage.to(dtype), q_estimate.to(dtype))


def _checked(r_t: Tensor, discount_t: Tensor, lambda_: float | Tensor, values: Tensor) -> float | Tensor:
    floating_alike(r_t=promoted(r_t, discount_t), discount_t=discount_t)
    floating(values=values)
    expected = (*r_t.shape[:-1], r_t.shape[-1] + 1) if r_t.dim() else None
    if values.shape != expected:
        raise ValueError(
            f"`values` should have shape {expected}, one time more than `r_t`. Found {tuple(values.shape)}."
        )
    return _lambda(lambda_, r_t)


def _lambda(lambda_: float | Tensor, r_t: Tensor) -> float | Tensor:
    """Return a checked number, or a tensor that broadcasts to the rewards."""
    if r_t.dim() == 0 or r_t.shape[-1] == 0:
        raise ValueError(f"`r_t` should have at least one time. Found shape {tuple(r_t.shape)}.")
    if not isinstance(lambda_, Tensor) or lambda_.dim() == 0:
        return number("lambda_", lambda_, least=0, most=1)
    floating(lambda_=lambda_)
    if not broadcasts(lambda_.shape, r_t.shape):
        raise ValueError(
            f"`lambda_` should broadcast to the shape {tuple(r_t.shape)} of `r_t`. Found {tuple(lambda_.shape)}."
        )
    return wide(lambda_)


def _advantages(r_t: Tensor, discount_t: Tensor, lambda_: float | Tensor, values: Tensor) -> Tensor:
    """Return the advantages of half precision in float32."""
    r_t, discount_t, values = wide(r_t), wide(discount_t), wide(values)
    errors = torch.addcmul(r_t, discount_t, values[..., 1:]) - values[..., :-1]
    return discounted_sums(errors, discount_t * lambda_)


def _vtrace_targets(
    v_tm1: Tensor,
    v_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    rho_tm1: Tensor,
    lambda_: float | Tensor,
    clip_rho_threshold: float,
) -> Tensor:
    clip = number("clip_rho_threshold", clip_rho_threshold, above=0, infinite=True)
    with stop_recording(VTRACE_TARGET):
        traces = bounded(rho_tm1, most=1)
        weights = traces if clip == 1 else bounded(rho_tm1, most=clip)
        errors = weights * (torch.addcmul(r_t, discount_t, v_t) - v_tm1)
        return v_tm1 + discounted_sums(errors, discount_t * traces * lambda_)
