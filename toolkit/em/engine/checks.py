"""Checks of samples and their weights, each in one place.

N samples, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._checks import function
from toolkit.em.mixture import check_shape_of_weights

__all__ = [
    "FLOATS",
    "check_callback",
    "check_covariance",
    "check_finite",
    "check_floats",
    "check_matrix",
    "check_prior",
    "check_samples",
    "check_tensor",
    "check_weights",
]

FLOATS = (torch.float32, torch.float64)


def check_matrix(x: Tensor, *, whole: bool = True) -> None:
    """Raise a ValueError unless `x` has shape (N, D), with at least one feature and, if `whole`, one sample."""
    if x.ndim != 2 or x.shape[1] == 0 or (whole and len(x) == 0):
        raise ValueError(f"`x` should have shape (N, D), at least (1, 1). Found {tuple(x.shape)}.")


def check_floats(x: Tensor) -> None:
    """Raise a TypeError unless `x` is a float32 or float64 tensor."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"`x` should be a float32 or float64 tensor. Found {found}.")


def check_finite(x: Tensor, start: int = 0) -> None:
    """Raise a ValueError unless the samples, which begin at row `start` of all, are finite; in bounded memory."""
    for part in x.split(2**14):
        finite = part.isfinite().all(1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise ValueError(f"`x` should be finite. Found {part[row].tolist()} in row {start + row}.")
        start += len(part)


def check_weights(weights: Tensor | None, n: int, *, allow_zeros: bool = False, name: str = "sample_weight") -> None:
    """Raise an error unless weights (N,) are finite, not negative and, without `allow_zeros`, not all 0."""
    if weights is None:
        return
    check_shape_of_weights(weights, (n,), name)
    sound = bool((weights.isfinite() & (weights >= 0)).all())
    if not sound or not (allow_zeros or bool((weights > 0).any())):
        should = "finite and not negative" if allow_zeros else "finite, not negative and not all 0"
        raise ValueError(
            f"`{name}` should be {should}. Found a minimum of {float(weights.min())} "
            f"and a sum of {float(weights.sum())}."
        )


def check_samples(x: Tensor, sample_weight: Tensor | None) -> None:
    """Raise a TypeError or ValueError unless there are samples, and not all weights are 0."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` should be a tensor. Found {type(x).__name__}.")
    if x.ndim == 0 or len(x) == 0:
        raise ValueError(f"`x` should hold at least one sample. Found shape {tuple(x.shape)}.")
    check_weights(sample_weight, len(x))


def check_callback(callback: object) -> None:
    """Raise a TypeError unless the callback is a function or None."""
    if callback is not None:
        function("callback", callback, "a number of evaluations and a log-likelihood")


def check_prior(prior: object) -> None:
    """Raise a TypeError unless the prior of a Gaussian mixture has a mode and a density, or is None."""
    if prior is not None and not (hasattr(prior, "maximise") and hasattr(prior, "log_density")):
        raise TypeError(f"`prior` should be a Prior or None. Found {prior!r}.")


def check_covariance(covariance: Tensor) -> None:
    """Raise a ValueError unless the covariance of the samples is finite."""
    if not bool(covariance.isfinite().all()):
        raise ValueError("`x` should have a finite covariance. Found an infinite one: its values are too large.")


def check_tensor(x: Tensor, sample_weight: Tensor | None, n_components: int, *, whole: bool = True) -> None:
    """Raise a TypeError or ValueError unless a mixture can be fitted to the samples with their weights."""
    check_floats(x)
    check_matrix(x, whole=whole)
    check_finite(x)
    if whole and n_components > len(x):
        raise ValueError(f"`n_components` should be at most {len(x)}, the number of samples. Found {n_components}.")
    check_weights(sample_weight, len(x), allow_zeros=not whole)
