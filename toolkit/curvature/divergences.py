r"""Divergences from a held point: zero to first order, and to second order the Gauss-Newton or Fisher matrix.

A divergence :math:`D(f, \operatorname{sg} f)` of a model's outputs from themselves has the value 0 and the gradient 0.
Its Hessian is :math:`J^T H J`, with J the Jacobian of the outputs and H the Hessian of the divergence in the outputs:
the second derivatives of the model drop out, because the slope of the divergence is zero. With the block open,
:math:`D(f, f)` is zero everywhere, and so is the Hessian.

N samples, C classes, D dimensions of a Gaussian; ``*`` batch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from toolkit._tensors import exponential_remainder, floating_alike, wide
from toolkit.blocks import block, is_blocked, stop_gradient, variable
from toolkit.curvature.products import tensors_of

__all__ = [
    "HELD_OUTPUTS",
    "HELD_POLICY",
    "LINEAR_PART",
    "gauss_newton_loss",
    "gaussian_kl_from_held",
    "held_divergence",
    "kl_from_held",
    "kl_to_held",
]

HELD_OUTPUTS = block(
    "curvature.held_outputs",
    "The divergence is measured from outputs that stay where they are; if they move along, it is zero everywhere and "
    "has no curvature.",
)
HELD_POLICY = block(
    "curvature.held_policy",
    "The old policy is the centre of the trust region; if it moves along, no step leaves the region and nothing limits "
    "it.",
)
LINEAR_PART = block(
    "curvature.linear_part",
    "The model of the loss is linear but for its Gauss-Newton term, so its slope is a constant; if it moves, the "
    "second derivatives of the network come back.",
)


def held_divergence(loss: Callable[[Tensor], Tensor], outputs: Tensor, held: Tensor) -> Tensor:
    r"""Return :math:`\ell(f) - \ell(h) - \nabla \ell(h) \cdot (f - h)` with :math:`h = \operatorname{sg}(held)`.

    This is the Bregman divergence of the loss, ``|f - h|^2 / 2`` for half squares and ``KL(softmax h || softmax f)``
    for cross entropy. At ``held = outputs`` its Hessian is the generalised Gauss-Newton matrix of the loss. Its
    gradient is :math:`\nabla \ell(f) - \nabla \ell(h)` by f; with the block `HELD_OUTPUTS` open, also
    :math:`-\nabla^2 \ell(h) (f - h)` by h.

    Args:
        loss: Outputs to a scalar, convex and twice differentiable.
        outputs: f, of any shape.
        held: h, of the same shape.

    Returns:
        A scalar, in the units of `loss`; not negative, up to rounding.

    Raises:
        ValueError: If the shapes differ.

    References:
        Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", 2002, for the matrix.
        Martens, "New insights and perspectives on the natural gradient method", 2020, section 8.

    Example:
        >>> f, h = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])
        >>> held_divergence(lambda f: (f - 7).square().sum() / 2, f, h)
        tensor(2.5000)
    """
    floating_alike(outputs=outputs, held=held)
    held = stop_gradient(held, HELD_OUTPUTS)
    base = loss(held)
    with torch.enable_grad():
        point = variable(held)
        # Of the slope too, if `held` is open or the loss has parameters of its own.
        (slope,) = torch.autograd.grad(loss(point), point, create_graph=base.requires_grad)
    return loss(outputs) - base - (slope * (outputs - held)).sum()


def gauss_newton_loss(loss: Callable[[Tensor], Tensor], outputs: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    r"""Return a loss with the value and the gradient of ``loss(outputs)``, and the Gauss-Newton matrix as its Hessian.

    .. math::
        \operatorname{sg}(\ell) + \operatorname{sg}(g) \cdot (w - \operatorname{sg}(w)) + D(f, \operatorname{sg} f),
        \qquad g = \nabla_w \ell(f(w))

    with D from `held_divergence`. A Newton method on it is Gauss-Newton, and its Hessian has no negative eigenvalue. To
    first order both blocks are redundant. With `LINEAR_PART` open the Hessian is :math:`\nabla^2 \ell + J^T H J`; with
    `HELD_OUTPUTS` open it is zero.

    The shorter form :math:`\operatorname{sg}(\nabla \ell) \cdot f + |f - \operatorname{sg} f|^2 / 2` keeps the second
    derivatives of f: its Hessian is the full one.

    Args:
        loss: Outputs to a scalar, convex and twice differentiable.
        outputs: f(w), of any shape.
        parameters: w, the tensors to differentiate by.

    Returns:
        A scalar, in the units of `loss`.

    Raises:
        ValueError: If `parameters` is a tensor.

    References:
        Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", 2002.

    Example:
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> model = gauss_newton_loss(lambda f: (f - 1) ** 2 / 2, w**2, [w])
        >>> (slope,) = torch.autograd.grad(model, w, create_graph=True)
        >>> model, slope, torch.autograd.grad(slope, w)[0]
        (tensor(4.5000, grad_fn=<AddBackward0>), tensor(12., grad_fn=<AddBackward0>), tensor(16.))
    """
    parameters = tensors_of(parameters)
    value = loss(outputs)
    if not value.requires_grad:
        return value
    slopes = torch.autograd.grad(
        value, parameters, create_graph=not is_blocked(LINEAR_PART), retain_graph=True, materialize_grads=True
    )
    model, *held = [stop_gradient(tensor, LINEAR_PART) for tensor in (value, *slopes, *parameters)]
    for parameter, slope, point in zip(parameters, held[: len(slopes)], held[len(slopes) :], strict=True):
        model = model + (slope * (parameter - point)).sum()
    return model + held_divergence(loss, outputs, outputs)


def kl_from_held(logits: Tensor, held: Tensor) -> Tensor:
    r"""Return :math:`KL(q \,\|\, p)`, with :math:`q = \operatorname{softmax}(\operatorname{sg}(held))`, in nats.

    It is the divergence of trust region policy optimisation: at ``held = logits`` its Hessian is the Fisher matrix
    :math:`\operatorname{diag}(p) - p p^T`. The gradient with respect to the logits is :math:`p - q`; with the block
    `HELD_POLICY` open, the held logits get :math:`q (\log q - \log p - KL)`, and at ``held = logits`` the sum of both
    is zero, in every order. Its third derivative differs from that of `kl_to_held` by a factor of two.

    Args:
        logits: (\*, C); ``-inf`` for an action that is impossible in both.
        held: (\*, C), logits of the old policy.

    Returns:
        (\*); half precision is computed in float32.

    Raises:
        ValueError: If the shapes differ, or an argument is not a floating-point tensor.

    References:
        Schulman, Levine, Moritz, Jordan and Abbeel, "Trust region policy optimization", 2015, appendix C.

    Example:
        >>> kl_from_held(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
        tensor(0.1201)
    """
    log_p, log_q = _log_probabilities(logits, held)
    return _divergence(log_q, log_p)


def kl_to_held(logits: Tensor, held: Tensor) -> Tensor:
    r"""Return :math:`KL(p \,\|\, q)`, with :math:`q = \operatorname{softmax}(\operatorname{sg}(held))`, in nats.

    This is the penalty that keeps a language model near its reference model. At ``held = logits`` its Hessian is that
    of `kl_from_held`. The gradient with respect to the logits is :math:`p (\log p - \log q - KL)`; with the block
    `HELD_POLICY` open, the held logits get :math:`q - p`.

    Args:
        logits: (\*, C), as in `kl_from_held`.
        held: (\*, C).

    Returns:
        As `kl_from_held`.

    Raises:
        ValueError: As `kl_from_held`.

    References:
        Kakade, "A natural policy gradient", 2001, for the metric; Ziegler et al., "Fine-tuning language models from
        human preferences", 2019, equation 2, for the penalty.

    Example:
        >>> kl_to_held(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
        tensor(0.1109)
    """
    return _divergence(*_log_probabilities(logits, held))


def gaussian_kl_from_held(mean: Tensor, log_std: Tensor, held_mean: Tensor, held_log_std: Tensor) -> Tensor:
    r"""Return :math:`KL(q \,\|\, p)` of diagonal Gaussians, the first of them held, in nats.

    At equal arguments its Hessian is :math:`\operatorname{diag}(1 / s^2)` by the means and 2 by the log deviations. The
    gradient is :math:`(\mu - \mu_q) / s^2` and :math:`1 - (s_q^2 + (\mu - \mu_q)^2) / s^2`; with the block
    `HELD_POLICY` open, the held arguments get :math:`(\mu_q - \mu) / s^2` and :math:`s_q^2 / s^2 - 1`.

    Args:
        mean: (\*, D).
        log_std: Logarithms of the standard deviations, (\*, D) or (D).
        held_mean: As `mean`, of the old policy.
        held_log_std: As `log_std`, of the old policy.

    Returns:
        (\*), the sum over the dimensions; half precision is computed in float32.

    Raises:
        ValueError: If a held argument has another shape than its counterpart, `log_std` has neither shape, or an
            argument is not a floating-point tensor.

    References:
        Schulman, Levine, Moritz, Jordan and Abbeel, "Trust region policy optimization", 2015, appendix C.

    Example:
        >>> zeros = torch.zeros(2)
        >>> gaussian_kl_from_held(torch.tensor([1.0, 2.0]), zeros, zeros, zeros)
        tensor(2.5000)
    """
    floating_alike(1, mean=mean, held_mean=held_mean)
    floating_alike(log_std=log_std, held_log_std=held_log_std)
    if log_std.shape not in (mean.shape, mean.shape[-1:]):
        raise ValueError(
            f"`log_std` should have shape {tuple(mean.shape)} or {tuple(mean.shape[-1:])}. Found "
            f"{tuple(log_std.shape)}."
        )
    mean, log_std = wide(mean), wide(log_std)
    held_mean, held_log_std = stop_gradient((wide(held_mean), wide(held_log_std)), HELD_POLICY)
    distance = (mean - held_mean) * (-log_std).exp()
    return 0.5 * (exponential_remainder(2 * (held_log_std - log_std)) + distance.square()).sum(-1)


def _log_probabilities(logits: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    floating_alike(1, logits=logits, held=held)
    return torch.log_softmax(wide(logits), -1), torch.log_softmax(stop_gradient(wide(held), HELD_POLICY), -1)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the sum of ``p (log p - log q) + q - p`` over the last dimension, no term negative; 0 log 0 is 0."""
    p, q = log_p.exp(), log_q.exp()
    x = torch.where(p == 0, 0, log_q - log_p)
    near = x.abs() < 1
    terms = torch.where(near, p * exponential_remainder(torch.where(near, x, 0)), q - p - p * x)
    return torch.where(p == 0, q, terms).sum(-1)
