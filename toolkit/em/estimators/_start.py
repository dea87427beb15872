"""Checks of the parameters of a start that the user gives.

D features, K components.
"""

from __future__ import annotations

from torch import Tensor

from toolkit.em.covariance import CovarianceType, structure_of


def check_init_parameters(
    weights: Tensor | None,
    means: Tensor | None,
    precisions: Tensor | None,
    shape: tuple[int, int],
    kind: CovarianceType,
) -> Tensor | None:
    """Return the precisions' Cholesky factor, or None; raise a ValueError if a given parameter is invalid."""
    k, d = shape
    if weights is not None:
        _check_shape("weights_init", weights, (k,))
        if bool((weights < 0).any()) or not abs(float(weights.sum()) - 1) < 1e-6:
            raise ValueError(
                "`weights_init` should be not negative and sum to 1. "
                f"Found {weights.tolist()}, which sum to {float(weights.sum()):.6g}."
            )
    if means is not None:
        _check_shape("means_init", means, (k, d))
    if precisions is None:
        return None
    structure = structure_of(kind)
    _check_shape("precisions_init", precisions, structure.shape(k, d))
    factor, sound = structure.factor_of_precisions(precisions)
    if not bool(sound.all()) and not structure.is_matrix:
        raise ValueError(f"`precisions_init` should be positive. Found {float(precisions.min())}.")
    if not bool(sound.all()):
        which = "" if structure.is_shared else f" Found one that is not, of component {int((~sound).nonzero()[0])}."
        raise ValueError(f"`precisions_init` should be symmetric and positive definite.{which}")
    return factor


def _check_shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    if value.shape != expected:
        raise ValueError(f"`{name}` should have shape {expected}. Found {tuple(value.shape)}.")
    if not bool(value.isfinite().all()):
        raise ValueError(f"`{name}` should be finite. Found {value.tolist()}.")
