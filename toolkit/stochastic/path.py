r"""Gradients along the path of a sample: sticking the landing, and implicit reparameterisation.

A reparameterised sample depends on its distribution's parameters :math:`\phi`, and so does its log-density, directly
and through the sample. ``*`` any shape.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.distributions.constraints import Constraint

from toolkit._checks import broadcasts
from toolkit.blocks import block, stop_gradient

__all__ = [
    "DENSITY_PARAMETERS",
    "IMPLICIT_CDF",
    "IMPLICIT_DENSITY",
    "IMPLICIT_POINT",
    "IMPLICIT_SAMPLE",
    "implicit_sample",
    "path_log_prob",
]

DENSITY_PARAMETERS = block(
    "stochastic.density_parameters",
    "The score of a sample has mean zero: without it the gradient along the path remains, and at the optimum that is "
    "zero for every sample.",
)
IMPLICIT_SAMPLE = block(
    "stochastic.implicit_sample",
    "The sample is a number; its derivative comes from the distribution function alone, and would be counted twice.",
)
IMPLICIT_POINT = block(
    "stochastic.implicit_point",
    "The distribution function moves with its parameters at a fixed point; along the path of a sample it does not move "
    "at all.",
)
IMPLICIT_CDF = block(
    "stochastic.implicit_cdf",
    "The value of the distribution function is subtracted from itself, so that the sample keeps its value.",
)
IMPLICIT_DENSITY = block(
    "stochastic.implicit_density",
    "The density turns a change of the distribution function into one of the sample; it is multiplied by a difference "
    "that is zero, so its gradient is too.",
)

_PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device, Constraint)


def path_log_prob(distribution: Distribution, value: Tensor) -> Tensor:
    r"""Return :math:`\log q(z; sg(\phi))`: the log-density with the parameters of the distribution held constant.

    In an evidence lower bound, ``path_log_prob(q, z) - log_joint``, it drops the score
    :math:`\nabla_\phi \log q(z; \phi)`, whose mean is zero. The gradient stays unbiased, and is zero for every sample
    once q is the posterior. With several importance samples it does not stay unbiased: see `dreg_loss`. With the block
    open it is ``distribution.log_prob(value)``.

    Args:
        distribution: Of `torch.distributions`; the tensors inside of mixtures, products and transformed distributions
            are found too. Caches of transforms are not used, because a cached inverse does not depend on the sample.
        value: A reparameterised sample.

    Returns:
        Like ``distribution.log_prob(value)``, in nats.

    Raises:
        TypeError: If the distribution holds its parameters in anything but tensors, distributions and transforms, a
            module or a function for example.

    References:
        Roeder, Wu & Duvenaud, "Sticking the landing: simple, lower-variance gradient estimators for variational
        inference", 2017.

    Example:
        >>> mean = torch.tensor(0.5, requires_grad=True)
        >>> q = torch.distributions.Normal(mean, 0.8)
        >>> z = mean + 0.8 * 0.7
        >>> torch.autograd.grad(path_log_prob(q, z), mean)  # q.log_prob(z) has no gradient with respect to the mean
        (tensor(-0.8750),)
    """
    return _held(distribution, {}).log_prob(value)  # type: ignore[no-any-return]


def implicit_sample(distribution: Distribution, value: Tensor) -> Tensor:
    r"""Return a sample with the gradient :math:`-\nabla_\phi F(z; \phi) / f(z; \phi)` of its distribution function F.

    That is :math:`sg(z) - (F(sg(z)) - sg(F)) / sg(f)`: the derivative of the inverse of F, without the inverse. It
    makes samples of any univariate continuous distribution with a differentiable ``cdf`` differentiable, mixtures
    (`torch.distributions.MixtureSameFamily`) for example. Only first derivatives are right. Opening the blocks matters
    if the value is differentiable already, with derivative :math:`z'`: `IMPLICIT_SAMPLE` open doubles it,
    `IMPLICIT_POINT` open makes it zero, both open give :math:`z'` again. With `IMPLICIT_CDF` open the gradient is zero;
    the leak of `IMPLICIT_DENSITY` is zero.

    Args:
        distribution: Continuous, with scalar events, ``cdf`` and ``log_prob``.
        value: Samples of it, (\*).

    Returns:
        The same samples, (\*). The gradient is 0 where the density underflows.

    Raises:
        ValueError: If the distribution is discrete, its events are not scalars, torch has no ``cdf`` of it, or `value`
            does not have its batch shape as last dimensions.

    References:
        Figurnov, Mohamed & Mnih, "Implicit reparameterization gradients", 2018.

    Example:
        >>> scale = torch.tensor(0.8, requires_grad=True)
        >>> q = torch.distributions.Normal(0.5, scale)
        >>> torch.autograd.grad(implicit_sample(q, torch.tensor(1.1)), scale)  # (z - mean) / scale
        (tensor(0.7500),)
    """
    if distribution.event_shape or distribution.support.is_discrete:  # type: ignore[union-attr]
        found = f"events of shape {tuple(distribution.event_shape)} of {type(distribution).__name__}"
        raise ValueError(f"`distribution` should be continuous with scalar events. Found {found}.")
    if not broadcasts(distribution.batch_shape, value.shape):
        shapes = f"{tuple(distribution.batch_shape)} of the distribution. Found {tuple(value.shape)}"
        raise ValueError(f"`value` should have a shape that ends with the batch shape {shapes}.")
    point = stop_gradient(value, IMPLICIT_POINT)
    try:
        cdf = distribution.cdf(point)
    except NotImplementedError as error:
        found = type(distribution).__name__
        raise ValueError(f"`distribution` should have a distribution function, `cdf`. Found {found}.") from error
    density = stop_gradient(distribution.log_prob(point).exp(), IMPLICIT_DENSITY)
    step = (cdf - stop_gradient(cdf, IMPLICIT_CDF)) / density.clamp_min(torch.finfo(density.dtype).tiny)
    return stop_gradient(value, IMPLICIT_SAMPLE) - step


def _held(part: Any, known: dict[int, Any]) -> Any:
    """Return a distribution, or a part of one, with all of its tensors behind the block.

    A transform and its inverse refer to each other: `known` has the copies made so far. A cache of a transform knows
    its sample by identity, and the tensors held are others.
    """
    if isinstance(part, Tensor):
        return stop_gradient(part, DENSITY_PARAMETERS)
    if isinstance(part, (list, tuple)) and not isinstance(part, torch.Size):
        return type(part)([_held(each, known) for each in part])
    if isinstance(part, (Distribution, Transform)):
        if id(part) not in known:
            known[id(part)] = held = copy.copy(part)
            held.__dict__.update({name: _held(value, known) for name, value in vars(part).items()})
        return known[id(part)]
    if isinstance(part, weakref.ref):
        return None  # the inverse of a transform in earlier versions of torch, which makes it again
    if isinstance(part, _PLAIN):
        return part
    raise TypeError(
        f"`distribution` should hold its parameters in tensors, distributions and transforms. Found "
        f"{type(part).__name__}."
    )
