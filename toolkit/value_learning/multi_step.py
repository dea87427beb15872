r"""Bootstrapped returns of several steps: n-step returns, lambda-returns and TD(lambda).

Time is the last dimension. The value before step t predicts the return from step t on. A sequence ends with a value,
``v_t[..., -1]``, at which longer windows are cut. With ``discount_t = 0`` at the end of an episode, a window that
reaches the end has rewards alone, and no value.

``*`` the dimensions of the batch, T steps. Half precision is computed in float32 and rounded once.

References:
    Sutton and Barto, "Reinforcement learning: an introduction", 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._recursion import discounted_sums
from toolkit._tensors import common_dtype, floating_alike, wide
from toolkit.blocks import block, stop_gradient
from toolkit.value_learning._arguments import of_shape

__all__ = ["LAMBDA_RETURNS", "N_STEP_RETURNS", "lambda_returns", "n_step_bootstrapped_returns", "td_lambda"]

N_STEP_RETURNS = block(
    "value_learning.n_step_returns",
    "The rewards of n steps and the value behind them are a label: that value does not move towards an earlier one.",
)
LAMBDA_RETURNS = block(
    "value_learning.lambda_returns",
    "The mixture of the returns of all lengths is a label: the values in it do not move towards an earlier one.",
)


def n_step_bootstrapped_returns(r_t: Tensor, discount_t: Tensor, v_t: Tensor, n: int) -> Tensor:
    r"""Return the n-step returns as labels.

    :math:`r_t + \gamma_t r_{t+1} + \ldots + \gamma_t \cdots \gamma_{t+n-1} v_{t+n-1}`, as in rlax: the value after a
    step has the index of that step.

    With `N_STEP_RETURNS` open the derivative with respect to the value at the end of a window is the product of its
    discounts.

    Args:
        r_t: Rewards, (\*, T).
        discount_t: Discounts, (\*, T); 0 where an episode ends.
        v_t: Values after each step, (\*, T).
        n: Length of the windows; at the end of the sequence they are shorter.

    Returns:
        (\*, T), the labels of the values before each step, in units of the reward.

    Raises:
        ValueError: If an argument is not a floating-point tensor with a dimension of time, shapes differ, or `n` is not
            a positive integer.

    References:
        Sutton and Barto, 2018, section 7.1.

    Example:
        >>> r, half = torch.tensor([1.0, 0.0, 2.0]), torch.full((3,), 0.5)
        >>> n_step_bootstrapped_returns(r, half, torch.tensor([8.0, 8.0, 4.0]), n=2)
        tensor([3., 2., 4.])
    """
    _check(r_t, discount_t, v_t)
    length, dtype = r_t.shape[-1], common_dtype(r_t, discount_t, v_t)
    r_t, discount_t, v_t = map(wide, (r_t, discount_t, v_t))
    returns = v_t
    for step in range(min(integer("n", n), length)):
        # The window of step t, one longer, is r_t + discount_t * (the window of step t + 1).
        later = returns if step == 0 else torch.cat([returns[..., 1:], v_t[..., -1:]], -1)
        returns = torch.addcmul(r_t, discount_t, later)
    return stop_gradient(returns.to(dtype), N_STEP_RETURNS)


def lambda_returns(r_t: Tensor, discount_t: Tensor, v_t: Tensor, lambda_: Tensor | float) -> Tensor:
    r"""Return :math:`G_t = r_t + \gamma_t ((1 - \lambda) v_t + \lambda G_{t+1})` as labels.

    The last return ends with its value, :math:`G_T = r_T + \gamma_T v_T`.

    With `LAMBDA_RETURNS` open :math:`\partial G_t / \partial v_k` is
    :math:`\gamma_t \lambda \cdots \gamma_{k-1} \lambda \, \gamma_k (1 - \lambda)`, without the last factor at the end
    of the sequence. So with lambda 1 and an episode that ends, the block is redundant: the label contains no value.

    Args:
        r_t: Rewards, (\*, T).
        discount_t: Discounts, (\*, T); 0 where an episode ends.
        v_t: Values after each step, (\*, T).
        lambda_: From 0, the return of one step, to 1, the longest; a number, or one for each step, (\*, T).

    Returns:
        (\*, T), the labels of the values before each step, in units of the reward.

    Raises:
        ValueError: If an argument is not a floating-point tensor with a dimension of time, shapes differ, or `lambda_`
            is a number that is not from 0 to 1.

    References:
        Sutton and Barto, 2018, section 12.1.

    Example:
        >>> r, half = torch.tensor([1.0, 0.0, 2.0]), torch.full((3,), 0.5)
        >>> lambda_returns(r, half, torch.tensor([8.0, 8.0, 4.0]), 0.5)
        tensor([3.7500, 3.0000, 4.0000])
    """
    _check(r_t, discount_t, v_t)
    dtype = common_dtype(r_t, discount_t, v_t)
    if isinstance(lambda_, Tensor):
        of_shape(r_t.shape if lambda_.ndim else lambda_.shape, "of `r_t`, or none", lambda_=lambda_)
        lambda_ = wide(lambda_)
    else:
        lambda_ = number("lambda_", lambda_, least=0, most=1)
    r_t, discount_t, v_t = map(wide, (r_t, discount_t, v_t))
    decay = discount_t * lambda_
    # Each return is an affine function of the next one. The last one is not mixed: it ends in its value.
    mixed = torch.addcmul(r_t, discount_t - decay, v_t)
    last = torch.addcmul(r_t[..., -1:], discount_t[..., -1:], v_t[..., -1:])
    returns = discounted_sums(mixed, decay, last)
    return stop_gradient(returns.to(dtype), LAMBDA_RETURNS)


def td_lambda(v_tm1: Tensor, r_t: Tensor, discount_t: Tensor, v_t: Tensor, lambda_: Tensor | float) -> Tensor:
    r"""Return the errors of TD(lambda) in the forward view, :math:`\operatorname{sg}(G_t) - v_{t-1}`.

    G are the `lambda_returns`. Their sum of squares, halved, is also the value loss with generalised advantages as
    targets. With `LAMBDA_RETURNS` open each value also gets a gradient from every earlier error, through its return.

    Args:
        v_tm1: Values before each step, (\*, T).
        r_t: Rewards, (\*, T).
        discount_t: Discounts, (\*, T); 0 where an episode ends.
        v_t: Values after each step, (\*, T).
        lambda_: From 0, TD(0), to 1, Monte Carlo; a number, or one for each step, (\*, T).

    Returns:
        (\*, T), in units of the reward.

    Raises:
        ValueError: As in `lambda_returns`, or if `v_tm1` has another shape.

    References:
        Sutton, "Learning to predict by the methods of temporal differences", 1988; Sutton and Barto, 2018, section
        12.1.

    Example:
        >>> r, half, v = torch.tensor([1.0, 0.0, 2.0]), torch.full((3,), 0.5), torch.tensor([1.0, 8.0, 8.0, 4.0])
        >>> td_lambda(v[:-1], r, half, v[1:], 0.5)
        tensor([ 2.7500, -5.0000, -4.0000])
    """
    floating_alike(v_tm1=v_tm1, r_t=r_t)
    return lambda_returns(r_t, discount_t, v_t, lambda_) - v_tm1


def _check(r_t: Tensor, discount_t: Tensor, v_t: Tensor) -> None:
    floating_alike(r_t=r_t, discount_t=discount_t, v_t=v_t)
    if r_t.ndim == 0 or r_t.shape[-1] == 0:
        raise ValueError(f"`r_t` should have a last dimension of time. Found shape {tuple(r_t.shape)}.")
