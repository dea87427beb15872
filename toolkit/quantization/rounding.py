"""Straight-through estimators: a value on a grid, with the gradient of the continuous input.

c the cotangent that arrives at the result. Every value lies exactly on its grid, in any precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit._tensors import bounded, floating, wide
from toolkit.blocks import block, stop_gradient

__all__ = ["ONE_HOT", "ROUND", "SIGN", "TOP_K", "gumbel_softmax", "one_hot_ste", "round_ste", "sign_ste", "top_k_ste"]

ROUND = block(
    "quantization.round",
    "Rounding has slope zero almost everywhere: with the rounding error held constant, the gradient of the result is "
    "passed to the input.",
)
SIGN = block(
    "quantization.sign",
    "A sign has slope zero: with its distance from the clipped input held constant, the gradient passes where the "
    "input is not clipped.",
)
TOP_K = block(
    "quantization.top_k",
    "The entries left out have slope zero: with the amount removed held constant, they too receive the gradient and "
    "can return among the largest.",
)
ONE_HOT = block(
    "quantization.one_hot",
    "An index has no slope: with the distance of the one-hot vector from the probabilities held constant, the "
    "probabilities receive its gradient.",
)


def round_ste(x: Tensor) -> Tensor:
    """Return ``x + sg(round(x) - x)``, the nearest integers, halves to even.

    With the block in place, x gets the gradient c of the result unchanged; with the block open 0, that of rounding.

    Args:
        x: Of any shape.

    Raises:
        ValueError: If `x` is not a floating-point tensor.

    References:
        Bengio, Léonard and Courville, "Estimating or propagating gradients through stochastic neurons for conditional
        computation", 2013.

    Example:
        >>> x = torch.tensor([0.3, -1.7], requires_grad=True)
        >>> (round_ste(x) * torch.tensor([1.0, 2.0])).sum().backward()
        >>> round_ste(x).tolist(), x.grad
        ([0.0, -2.0], tensor([1., 2.]))
    """
    floating(x=x)
    return x + stop_gradient(x.round() - x, ROUND)


def sign_ste(x: Tensor) -> Tensor:
    """Return ``h + sg(sign(x) - h)`` with ``h = clip(x, -1, 1)`` and ``sign(0) = 1``.

    With the block in place, x gets the gradient c of the result where ``|x| <= 1``, and 0 elsewhere; with the block
    open it gets 0.

    Args:
        x: Of any shape.

    Raises:
        ValueError: If `x` is not a floating-point tensor.

    References:
        Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized neural networks", 2016, section 1.3.

    Example:
        >>> x = torch.tensor([0.3, -1.7], requires_grad=True)
        >>> (sign_ste(x) * torch.tensor([1.0, 2.0])).sum().backward()
        >>> sign_ste(x).tolist(), x.grad
        ([1.0, -1.0], tensor([1., 0.]))
    """
    floating(x=x)
    clipped = bounded(x, -1, 1)
    return clipped + stop_gradient(torch.where(x >= 0, 1.0, -1.0).to(x.dtype) - clipped, SIGN)


def top_k_ste(x: Tensor, k: int, *, dim: int = -1) -> Tensor:
    """Return ``x + sg(m x - x)`` with the mask m of the `k` entries of largest magnitude: the others are 0.

    With the block in place, x gets the gradient c of the result, also for the entries left out. With the block open it
    gets ``m c``, the gradient of a sparse layer: not 0, unlike that of the other functions here.

    Args:
        x: Of any shape.
        k: The number of entries that are kept along `dim`.
        dim: The dimension.

    Raises:
        ValueError: If `x` has no dimension `dim`, or `k` is not between 1 and its size.

    References:
        Bengio, Léonard and Courville, "Estimating or propagating gradients through stochastic neurons for conditional
        computation", 2013, for the estimator.

    Example:
        >>> x = torch.tensor([0.3, -1.7, 2.2], requires_grad=True)
        >>> top_k_ste(x, 2).square().sum().backward()
        >>> top_k_ste(x, 1).tolist(), x.grad
        ([0.0, 0.0, 2.200000047683716], tensor([ 0.0000, -3.4000,  4.4000]))
    """
    dim = _checked(dim, x=x)
    k = integer("k", k, 1, x.shape[dim])
    kept = torch.zeros_like(x, dtype=torch.bool).scatter(dim, x.abs().topk(k, dim=dim).indices, True)
    return x + stop_gradient(x * kept - x, TOP_K)


def one_hot_ste(probabilities: Tensor, *, dim: int = -1) -> Tensor:
    """Return ``p + sg(onehot(argmax p) - p)``: exactly one-hot, with the gradient of the probabilities p.

    With the block in place, p gets the gradient c of the result; with the block open 0.

    Args:
        probabilities: Entries in [0, 1], along `dim`.
        dim: The dimension.

    Raises:
        ValueError: If `probabilities` has no dimension `dim`.

    References:
        Jang, Gu and Poole, "Categorical reparameterization with Gumbel-softmax", 2016, section 2.2.

    Example:
        >>> p = torch.tensor([0.2, 0.5, 0.3], requires_grad=True)
        >>> (one_hot_ste(p) * torch.tensor([1.0, -2.0, 4.0])).sum().backward()
        >>> one_hot_ste(p).tolist(), p.grad
        ([0.0, 1.0, 0.0], tensor([ 1., -2.,  4.]))
    """
    dim = _checked(dim, probabilities=probabilities)
    return _one_hot(probabilities, probabilities.argmax(dim, keepdim=True), dim)


def gumbel_softmax(
    logits: Tensor, *, temperature: float = 1.0, dim: int = -1, generator: torch.Generator | None = None
) -> Tensor:
    r"""Draw one-hot vectors, with the gradient of the relaxed draw.

    .. math::
        y = \operatorname{softmax}((l + g) / \tau), \qquad g \sim \operatorname{Gumbel}(0, 1)

    The result is the one-hot vector of ``argmax(l + g)``, a sample of ``softmax(logits)`` at every temperature, with
    the gradient of y as in `one_hot_ste`. With the block in place the gradient is ``y (c - y.c) / temperature``, with
    the block open 0. Half precision is drawn in float32: rounded noise has ties, which favour the first category.

    Args:
        logits: Unnormalised log-probabilities; -inf: never drawn.
        temperature: :math:`\tau`. A low one has less bias and more variance.
        dim: The dimension of the categories.
        generator: Draws g on the CPU. None: torch's global generator of the device of `logits`.

    Raises:
        ValueError: If `temperature` is not positive, or `logits` has no dimension `dim`.

    References:
        Jang, Gu and Poole, "Categorical reparameterization with Gumbel-softmax", 2016, equations 1 and 2, section 2.2.

    Example:
        >>> logits = torch.tensor([0.0, 2.0, -torch.inf])
        >>> gumbel_softmax(logits, generator=torch.Generator().manual_seed(0))
        tensor([0., 1., 0.])
    """
    temperature = number("temperature", temperature, above=0)
    dim = _checked(dim, logits=logits)
    noisy = wide(logits) + _gumbel_noise(wide(logits), generator)
    # Not the argmax of the relaxed draw: at a high temperature its entries are equal but for rounding.
    chosen = noisy.argmax(dim, keepdim=True)
    return _one_hot(torch.softmax(noisy / temperature, dim), chosen, dim).to(logits.dtype)


def _checked(dim: int, **named: Tensor) -> int:
    """Return the number of a dimension of a tensor."""
    ((name, tensor),) = named.items()
    floating(**named)
    dim = integer("dim", dim, -tensor.ndim, tensor.ndim - 1)
    if not tensor.shape[dim]:
        raise ValueError(f"`{name}` should have entries along `dim`. Found shape {tuple(tensor.shape)}.")
    return dim


def _one_hot(probabilities: Tensor, chosen: Tensor, dim: int) -> Tensor:
    """Return the one-hot vectors of the chosen indices, with the gradient of the probabilities."""
    hard = torch.zeros_like(probabilities).scatter(dim, chosen, 1.0)
    return probabilities + stop_gradient(hard - probabilities, ONE_HOT)


def _gumbel_noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard Gumbel noise of this shape, finite also where a draw would be 0."""
    if generator is None:
        draws = torch.empty_like(like).exponential_()
    else:
        own = own_generator(generator)
        draws = torch.empty(like.shape, dtype=like.dtype, device=own.device).exponential_(generator=own).to(like.device)
    return draws.clamp_(min=torch.finfo(like.dtype).tiny).log_().neg_()
