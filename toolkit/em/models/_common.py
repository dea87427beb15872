"""Common parts of the families: weights, checks of the data, seeds for a start, and draws.

N samples, D features, K components.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit._random import device_of
from toolkit.em.covariance import soft_counts
from toolkit.em.engine.checks import check_covariance, check_finite, check_floats, check_matrix, check_weights
from toolkit.em.engine.starts import LLOYD_STEPS, lloyd, seeds

__all__ = [
    "FAR",
    "centres",
    "check_shape",
    "check_start",
    "check_table",
    "clamp_coordinates",
    "is_wrapped",
    "log_of",
    "log_weights_of",
    "partition",
    "raise_row",
    "shares",
    "standard_normal",
]

# e^-40 is less than a rounding error of 1: coordinates beyond it change no likelihood, and would spoil extrapolation.
FAR = 40.0


def shares(counts: Tensor) -> Tensor:
    """Return log-weights for sums of responsibilities (K,)."""
    counts = soft_counts(counts)
    return counts.log() - counts.sum().log()


def log_of(values: Tensor) -> Tensor:
    """Return logarithms; those of 0 are minus infinity, with derivative 0."""
    positive = values > 0
    return torch.where(positive, values, 1.0).log().masked_fill(~positive, -torch.inf)


def clamp_coordinates(values: Tensor, *, above: bool = False) -> Tensor:
    """Return logarithms bounded from below (and above), so that every coordinate is finite."""
    return values.clamp(-FAR, FAR if above else None)


def is_wrapped(*values: Tensor) -> bool:
    """Say whether a tensor is wrapped by `torch.func`, so that its values cannot control the computation."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(value) for value in values)


def check_shape(x: Tensor, n_features: int) -> None:
    """Raise a ValueError unless the samples have this number of features; a single feature would broadcast."""
    if x.ndim != 2 or x.shape[1] != n_features:
        raise ValueError(f"`x` should have shape (N, {n_features}). Found {tuple(x.shape)}.")


def check_start(x: Tensor, n_components: int, sample_weight: Tensor | None = None) -> int:
    """Return `n_components` as a Python integer; raise unless `x` (N, D) can be split into that many components."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` should be a tensor. Found {type(x).__name__}.")
    if x.is_complex():
        raise TypeError(f"`x` should be real. Found {x.dtype}.")
    check_matrix(x)
    n_components = integer("n_components", n_components)
    if n_components > len(x):
        raise ValueError(f"`n_components` should be at most {len(x)}, the number of samples. Found {n_components}.")
    check_weights(sample_weight, len(x))
    if sample_weight is not None:
        kind = torch.finfo(x.dtype if x.is_floating_point() else torch.get_default_dtype())
        total = float(sample_weight.double().sum())
        if not kind.tiny / kind.eps <= total <= kind.max * kind.eps:
            raise ValueError(f"`sample_weight` should have a sum that suits {kind.dtype}. Found {total:.3g}.")
    return n_components


def check_table(x: Tensor, *, missing: bool = False) -> None:
    """Raise a TypeError or ValueError unless `x` (N, D) holds finite floating-point numbers, or NaN if `missing`."""
    check_floats(x)
    check_matrix(x)
    if missing:
        raise_row(x, x.isinf(), "be finite, or NaN where missing")
    else:
        check_finite(x)


def raise_row(x: Tensor, bad: Tensor, should: str) -> None:
    """Raise a ValueError that shows the first sample in which `bad` (N, D) is true."""
    if bool(bad.any()):
        row = int(bad.any(1).nonzero()[0])
        raise ValueError(f"`x` should {should}. Found {x[row].tolist()} in row {row}.")


def partition(x: Tensor, n: int, weights: Tensor | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Split real samples by a few steps of k-means, in units of each feature's spread.

    Args:
        x: (N, D), finite.
        n: K, at most N.
        weights: (N,), or None: all 1.
        generator: Randomness. None is torch's global generator.

    Returns:
        The component of each sample (N,), and the weight of each sample (N,) in `x`'s type.

    Raises:
        ValueError: If the variance of a feature overflows.
    """
    weights = torch.ones_like(x[:, 0]) if weights is None else weights.to(x)
    share = (weights / weights.sum())[:, None]
    centred = x - (share * x).sum(0)
    variances = (share * centred.square()).sum(0)
    check_covariance(variances)
    spread = variances.sqrt()
    points = centred / torch.where(spread > 0, spread, 1.0)
    _, labels = lloyd(points, points[seeds(points, n, weights, generator)], LLOYD_STEPS, weights=weights)
    return labels[0], weights


def log_weights_of(values: Mapping[str, Tensor]) -> Tensor:
    """Return normalised log-weights from the coordinates."""
    return values["log_weights"].log_softmax(0)


def centres(x: Tensor, weights: Tensor) -> Tensor:
    """Return the means of the samples (N, D) weighted by (N, K); an empty component gets the mean of all samples."""
    counts = weights.sum(0)[:, None]
    centre = x.mean(0)
    return centre + weights.mT @ (x - centre) / torch.where(counts > 0, counts, 1.0)


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal numbers in the type and on the device of `like`."""
    device = device_of(generator, like)
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)
