r"""Gradient temporal-difference learning: GTD2 and TDC, which converge off-policy where TD(0) diverges.

Both descend on the projected Bellman error, whose gradient has a product of two expectations. A second function h, the
error estimate, learns one of them, :math:`h \approx E[\rho \delta]`, so that one sample is enough for the product. In
the linear case :math:`v = \theta^\top \phi` and :math:`h = w^\top \phi`.

GTD2 is the saddle point of :math:`\rho \delta h - h^2 / 2`: h ascends and v descends. So the loss of v and the loss of
h are the same product with opposite signs, and only blocks keep them apart. With `ESTIMATED_ERROR` open the gradients
of v in both losses cancel exactly, and v does not learn. With `GTD2_ESTIMATE` open the gradients of h cancel likewise.

``*`` the dimensions of the batch; time t-1 is ``tm1``. A ``discount_t`` is 0 at the end of an episode.

References:
    Sutton, Maei, Precup, Bhatnagar, Silver, Szepesvari and Wiewiora, "Fast gradient-descent methods for
    temporal-difference learning with linear function approximation", 2009.
    Patterson, White and White, "A generalized projected Bellman error for off-policy value estimation in reinforcement
    learning", 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._tensors import floating_alike
from toolkit.blocks import block, stop_gradient

__all__ = [
    "ESTIMATED_ERROR",
    "GTD2_ESTIMATE",
    "TDC_ERROR",
    "TDC_ESTIMATE",
    "error_estimate_loss",
    "gtd2_loss",
    "tdc_loss",
]

GTD2_ESTIMATE = block(
    "value_learning.gtd2_estimate",
    "The estimate of the error is a weight of this sample: it learns from a loss of its own, with the opposite sign.",
)
TDC_ERROR = block(
    "value_learning.tdc_error",
    "The error is the length of the step of TD(0): the correction, and not this term, accounts for its gradient.",
)
TDC_ESTIMATE = block(
    "value_learning.tdc_estimate",
    "The estimate of the error is the weight of the correction: it learns from a loss of its own.",
)
ESTIMATED_ERROR = block(
    "value_learning.estimated_error",
    "The error is a label for its estimate: the values do not move to make it easier to estimate.",
)


def gtd2_loss(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor, v_t: Tensor, h_tm1: Tensor, rho_tm1: Tensor | None = None
) -> Tensor:
    r"""Return :math:`\rho \delta \operatorname{sg}(h_{t-1})` with :math:`\delta = r_t + \gamma_t v_t - v_{t-1}`.

    Its gradient with respect to the parameters of v is :math:`\rho h (\gamma_t \nabla v_t - \nabla v_{t-1})`, the
    update of GTD2. With `GTD2_ESTIMATE` open h gets :math:`\rho \delta`, which cancels its own label in
    `error_estimate_loss`: h learns to be 0.

    Args:
        v_tm1: Values before the step, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        v_t: Values after the step, (\*).
        h_tm1: Estimates of the error before the step, (\*); `error_estimate_loss` trains them.
        rho_tm1: Ratios of the probabilities of the action, target policy over behaviour, (\*). None: 1, on-policy.

    Returns:
        (\*), in squared units of the reward; its value does not show progress.

    Raises:
        ValueError: If an argument is not a floating-point tensor, or has another shape than `v_tm1`.

    References:
        Sutton et al., 2009, the algorithm GTD2; Sutton and Barto, "Reinforcement learning: an introduction", 2018,
        section 11.7.

    Example:
        >>> v, one, h = torch.tensor([0.5, 2.0], requires_grad=True), torch.tensor(1.0), torch.tensor(3.0)
        >>> torch.autograd.grad(gtd2_loss(v[0], one, 0.5 * one, v[1], h), v)
        (tensor([-3.0000,  1.5000]),)
    """
    error = _weighted_error(v_tm1, r_t, discount_t, v_t, h_tm1, rho_tm1)
    return error * stop_gradient(h_tm1, GTD2_ESTIMATE)


def tdc_loss(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor, v_t: Tensor, h_tm1: Tensor, rho_tm1: Tensor | None = None
) -> Tensor:
    r"""Return :math:`\rho \gamma_t v_t \operatorname{sg}(h_{t-1}) - \operatorname{sg}(\rho \delta) v_{t-1}`.

    Its gradient with respect to the parameters of v is :math:`\rho (h \gamma_t \nabla v_t - \delta \nabla v_{t-1})`:
    that of TD(0) and a correction. With `TDC_ERROR` open they also get :math:`-\rho v_{t-1} \nabla \delta`, with
    `TDC_ESTIMATE` open h gets :math:`\rho \gamma_t v_t`.

    Arguments, result and errors are those of `gtd2_loss`.

    References:
        Sutton et al., 2009, the algorithm TDC; Sutton and Barto, "Reinforcement learning: an introduction", 2018,
        section 11.7.

    Example:
        >>> v, one, h = torch.tensor([0.5, 2.0], requires_grad=True), torch.tensor(1.0), torch.tensor(3.0)
        >>> torch.autograd.grad(tdc_loss(v[0], one, 0.5 * one, v[1], h), v)
        (tensor([-1.5000,  1.5000]),)
    """
    error = stop_gradient(_weighted_error(v_tm1, r_t, discount_t, v_t, h_tm1, rho_tm1), TDC_ERROR)
    correction = discount_t * v_t * stop_gradient(h_tm1, TDC_ESTIMATE)
    return (correction if rho_tm1 is None else rho_tm1 * correction) - error * v_tm1


def error_estimate_loss(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor, v_t: Tensor, h_tm1: Tensor, rho_tm1: Tensor | None = None
) -> Tensor:
    r"""Return :math:`h_{t-1}^2 / 2 - \operatorname{sg}(\rho \delta) h_{t-1}`, the loss of the estimate in GTD2 and TDC.

    It is :math:`(h - \rho \delta)^2 / 2` up to a constant, so its minimum is :math:`h = E[\rho \delta]`. With
    `ESTIMATED_ERROR` open the parameters of v get :math:`-\rho h (\gamma_t \nabla v_t - \nabla v_{t-1})`: exactly the
    opposite of GTD2.

    Arguments, shapes, units and errors are those of `gtd2_loss`.

    References:
        As `gtd2_loss`: the least mean squares step for the second weights.

    Example:
        >>> v, one, h = torch.tensor([0.5, 2.0]), torch.tensor(1.0), torch.tensor(3.0, requires_grad=True)
        >>> torch.autograd.grad(error_estimate_loss(v[0], one, 0.5 * one, v[1], h), h)
        (tensor(1.5000),)
    """
    error = stop_gradient(_weighted_error(v_tm1, r_t, discount_t, v_t, h_tm1, rho_tm1), ESTIMATED_ERROR)
    return 0.5 * h_tm1.square() - error * h_tm1


def _weighted_error(
    v_tm1: Tensor, r_t: Tensor, discount_t: Tensor, v_t: Tensor, h_tm1: Tensor, rho_tm1: Tensor | None
) -> Tensor:
    floating_alike(v_tm1=v_tm1, r_t=r_t, discount_t=discount_t, v_t=v_t, h_tm1=h_tm1)
    error = torch.addcmul(r_t, discount_t, v_t) - v_tm1
    if rho_tm1 is None:
        return error
    floating_alike(v_tm1=v_tm1, rho_tm1=rho_tm1)
    return rho_tm1 * error
