r"""Robust losses as weighted squares with held weights; and proximal terms with a held anchor.

A robust loss :math:`\rho(r)` has the gradient :math:`w(r)\, r`, so squares with held weights have the same gradient,
and the weights as their Hessian: minimising them is a step of iteratively reweighted least squares. With c the scale
and :math:`u = (r / c)^2`:

==================  ============================================  ======================  =========================
kind                :math:`\rho`                                  weights w               w r^2 / 2 without the block
==================  ============================================  ======================  =========================
``huber``           :math:`r^2 / 2`, beyond c                     :math:`1`, beyond c     half the pull beyond c
                    :math:`c |r| - c^2 / 2`                       :math:`c / |r|`
``cauchy``          :math:`c^2 \log(1 + u) / 2`                   :math:`1 / (1 + u)`     :math:`w^2 r`
``geman_mcclure``   :math:`r^2 / (1 + u) / 2`                     :math:`1 / (1 + u)^2`   repels beyond c
``welsch``          :math:`c^2 (1 - e^{-u}) / 2`                  :math:`e^{-u}`          repels beyond c
==================  ============================================  ======================  =========================

The half-quadratic form adds a penalty on the weights, and these weights minimise the sum. To first order its block is
then redundant, by the envelope theorem.

``*`` any dimensions.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from toolkit._checks import choice, number
from toolkit._tensors import bounded, floating, floating_alike, wide
from toolkit.blocks import block, stop_gradient

__all__ = [
    "ANCHOR",
    "MAJORISER",
    "WEIGHTS",
    "half_quadratic_loss",
    "proximal_penalty",
    "reweighted_loss",
    "robust_loss",
    "robust_weights",
]

WEIGHTS = block(
    "curvature.weights",
    "How far each residual is trusted: with the weights held, weighted squares have the gradient of the robust loss; "
    "without, distant points repel the fit.",
)
MAJORISER = block(
    "curvature.majoriser",
    "The weights are at the minimum of the loss, so holding them leaves the gradient as it is and makes the curvature "
    "that of a quadratic.",
)
ANCHOR = block(
    "curvature.anchor",
    "The anchor is the point that a step should stay close to; if it follows, the step is free.",
)

_FAR = 1e9  # beside its square, 1 is less than a rounding

Kind = Literal["huber", "cauchy", "geman_mcclure", "welsch"]


def robust_loss(residuals: Tensor, *, kind: Kind, scale: float) -> Tensor:
    r"""Return :math:`\rho(r)` of each residual, the first column of the module's table, in squared units of the data.

    Args:
        residuals: r, (\*).
        kind: One of the table's.
        scale: c, the residual from which a point loses influence.

    Returns:
        (\*); half precision is computed in float32 and rounded.

    Raises:
        ValueError: If `kind` is not one of the four, `scale` not positive, or `residuals` not a floating-point tensor.

    References:
        Holland and Welsch, "Robust regression using iteratively reweighted least-squares", 1977, table 1. Black and
        Rangarajan, "On the unification of line processes, outlier rejection, and robust statistics", 1996.

    Example:
        >>> robust_loss(torch.tensor([0.0, 1.0, 3.0]), kind="huber", scale=1.0)
        tensor([0.0000, 0.5000, 2.5000])
    """
    r, scale = _checked(residuals, kind, scale)
    if kind == "huber":
        loss = huber_loss(r, torch.zeros_like(r), reduction="none", delta=scale)
    elif kind == "cauchy":
        loss = scale**2 / 2 * _log_one_plus_square(r / scale)
    else:
        u = _log_one_plus_square(r / scale) if kind == "geman_mcclure" else (r / scale).square()
        loss = scale**2 / 2 * -(-u).expm1()
    return loss.to(residuals.dtype)


def robust_weights(residuals: Tensor, *, kind: Kind, scale: float) -> Tensor:
    r"""Return the weights :math:`w = \rho'(r) / r` of iteratively reweighted least squares, from 0 to 1.

    Args:
        residuals: As in `robust_loss`, like the other arguments, the shape of the result and the errors.
        kind: One of the table's.
        scale: c.

    References:
        As `robust_loss`.

    Example:
        >>> robust_weights(torch.tensor([0.0, 1.0, 4.0]), kind="huber", scale=1.0)
        tensor([1.0000, 1.0000, 0.2500])
    """
    r, scale = _checked(residuals, kind, scale)
    return _weights(r, kind, scale).to(residuals.dtype)


def reweighted_loss(residuals: Tensor, *, kind: Kind, scale: float) -> Tensor:
    r"""Return :math:`\operatorname{sg}(w)\, r^2 / 2` of each residual.

    With the block `WEIGHTS` in place its gradient is that of `robust_loss`, and its Hessian w. With the block open
    its gradient is :math:`w r (1 + r w' / 2 w)`, the last column of the module's table.

    Args:
        residuals: As in `robust_loss`, like the other arguments, the shape of the result and the errors.
        kind: One of the table's.
        scale: c.

    References:
        Holland and Welsch, "Robust regression using iteratively reweighted least-squares", 1977.

    Example:
        >>> r = torch.tensor([0.5, 4.0], requires_grad=True)
        >>> torch.autograd.grad(reweighted_loss(r, kind="huber", scale=1.0).sum(), r)
        (tensor([0.5000, 1.0000]),)
    """
    r, scale = _checked(residuals, kind, scale)
    roots = stop_gradient((_log_weights(r, kind, scale) / 2).exp(), WEIGHTS)  # w r^2 would be 0 times infinity
    return ((roots * r).square() / 2).to(residuals.dtype)


def half_quadratic_loss(residuals: Tensor, *, kind: Kind, scale: float) -> Tensor:
    r"""Return :math:`\operatorname{sg}(w)\, r^2 / 2 + \phi(\operatorname{sg}(w))`, whose value is `robust_loss`.

    Here :math:`\phi` is the penalty with :math:`\rho(r) = \min_w w r^2 / 2 + \phi(w)`. At the minimum the loss has no
    slope in w, so its gradient is that of `robust_loss` with the block `MAJORISER` in place and open. The Hessian
    differs: the weights, with the block; :math:`\rho''`, negative for an outlier, without.

    Args:
        residuals: As in `robust_loss`, like the other arguments, the shape of the result and the errors.
        kind: One of the table's.
        scale: c.

    References:
        Geman and Reynolds, "Constrained restoration and the recovery of discontinuities", 1992. Black and Rangarajan,
        "On the unification of line processes, outlier rejection, and robust statistics", 1996.

    Example:
        >>> half_quadratic_loss(torch.tensor([0.0, 1.0, 3.0]), kind="huber", scale=1.0)
        tensor([0.0000, 0.5000, 2.5000])
    """
    r, scale = _checked(residuals, kind, scale)
    v = stop_gradient(_log_weights(r, kind, scale), MAJORISER)
    if kind == "huber":
        penalty = (-v).expm1()
    elif kind == "cauchy":
        penalty = v.expm1() - v
    else:
        penalty = (v / 2).expm1().square() if kind == "geman_mcclure" else v * v.exp() - v.expm1()
    near = r.abs() < _FAR  # beyond it v.exp() * r.square() may be 0 times infinity
    weighted = torch.where(near, v.exp() * torch.where(near, r, 0).square(), ((v / 2).exp() * r).square())
    return (weighted / 2 + scale**2 / 2 * penalty).to(residuals.dtype)


def proximal_penalty(point: Tensor, anchor: Tensor, *, step: float) -> Tensor:
    r"""Return :math:`\lVert x - \operatorname{sg}(a) \rVert^2 / (2 \lambda)`.

    Next to a loss, its minimum is a proximal step from the anchor. The gradient is :math:`(x - a) / \lambda`; with the
    block `ANCHOR` open, the anchor gets the opposite. At ``anchor = point`` both are zero, and the block changes only
    the Hessian: :math:`1 / \lambda` with the block, zero without.

    Args:
        point: x, (\*).
        anchor: a, (\*).
        step: :math:`\lambda`, the step size.

    Returns:
        A scalar, the sum.

    Raises:
        ValueError: If `step` is not positive, or the shapes differ.

    References:
        Parikh and Boyd, "Proximal algorithms", 2014, section 1.1.

    Example:
        >>> proximal_penalty(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]), step=0.5)
        tensor(5.)
    """
    step = number("step", step, above=0)
    floating_alike(point=point, anchor=anchor)
    return (point - stop_gradient(anchor, ANCHOR)).square().sum() / (2 * step)


def _weights(r: Tensor, kind: Kind, scale: float) -> Tensor:
    if kind == "huber":
        return scale / r.abs().clamp(min=scale)
    u = (r / scale).square()
    if kind == "welsch":
        return (-u).exp()
    return 1 / (1 + u) if kind == "cauchy" else (1 + u) ** -2


def _log_weights(r: Tensor, kind: Kind, scale: float) -> Tensor:
    if kind == "huber":
        return -(r.abs() / scale).clamp(min=1).log()
    if kind == "welsch":
        return -(r / scale).clamp(-_FAR, _FAR).square()
    return -_log_one_plus_square(r / scale) * (1 if kind == "cauchy" else 2)


def _log_one_plus_square(z: Tensor) -> Tensor:
    """Return ``log(1 + z^2)``, also where the square is too large for its dtype."""
    near, far = bounded(z, -_FAR, _FAR), bounded(z.abs(), _FAR)
    return torch.where(z.abs() < _FAR, near.square().log1p(), 2 * far.log())


def _checked(residuals: Tensor, kind: Kind, scale: float) -> tuple[Tensor, float]:
    choice("kind", kind, get_args(Kind))
    floating(residuals=residuals)
    return wide(residuals), number("scale", scale, above=0)
