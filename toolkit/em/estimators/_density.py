"""`GaussianParameters.log_joint` made fast for predictions: NumPy for few samples, matrix products for diagonals.

N samples, D features, K components.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toolkit.em.covariance import structure_of
from toolkit.em.gaussian import CovarianceType, GaussianParameters

__all__ = ["FEW", "log_joint", "log_joint_of_few"]

# Numbers in the (K, N, D) array of differences up to which NumPy's calls, which cost less than torch's, pay.
FEW = 2**12

# The largest rounding error of expanded squares, in nats.
_LOST = 1e-10


def log_joint(mixture: GaussianParameters, x: Tensor) -> Tensor:
    """Return log-joints (N, K) of samples (N, D), float64; squares are expanded unless this loses accuracy.

    For variances along the axes, ``p (x - m)^2`` is a product of matrices, ``p x^2 - 2 p m x + p m^2``, about the
    centre of the mixture.
    """
    structure = structure_of(mixture.covariance_type)
    if structure.is_matrix or not len(x):
        return mixture.log_joint(x)
    centre = mixture.weights @ mixture.means
    points, means = x - centre, mixture.means - centre
    precisions = structure.precisions(mixture.precisions_cholesky).view(len(means), -1).expand(means.shape)
    low, high = torch.aminmax(points, dim=0)
    largest = (precisions * (torch.maximum(-low, high) + means.abs()).square()).sum(1).max()
    if not float(largest) * 4 * torch.finfo(x.dtype).eps < _LOST:
        return mixture.log_joint(x)
    constant = mixture.log_weights + mixture.log_determinants - 0.5 * mixture.n_features * math.log(2 * math.pi)
    weighted = precisions * means
    shift = constant - 0.5 * (weighted * means).sum(1)
    linear = torch.addmm(shift[:, None], weighted, points.mT)  # products of few columns take three times as long
    return linear.addmm_(precisions, points.square_().mT, alpha=-0.5).mT


def log_joint_of_few(
    weights: npt.NDArray[Any],
    means: npt.NDArray[Any],
    factor: npt.NDArray[Any],
    x: npt.NDArray[Any],
    kind: CovarianceType,
) -> npt.NDArray[np.float64]:
    """Return log-joints (N, K) of a few samples (N, D), float64.

    Args:
        weights: (K,).
        means: (K, D).
        factor: Factors of the precisions, shaped by the type.
        x: (N, D).
        kind: The type.
    """
    n_features = means.shape[1]
    factor = factor.astype(np.float64, copy=False)
    differences = x - means[:, None].astype(np.float64, copy=False)
    match kind:
        case "full" | "tied":
            whitened, diagonal = differences @ factor, factor.diagonal(axis1=-2, axis2=-1)
        case "diag":
            whitened, diagonal = differences * factor[:, None], factor
        case "spherical":
            whitened, diagonal = differences * factor[:, None, None], np.repeat(factor[:, None], n_features, 1)
    with np.errstate(divide="ignore"):
        constant = np.log(weights.astype(np.float64, copy=False)) + np.log(diagonal).sum(-1)
    distances = (whitened * whitened).sum(2).T
    found: npt.NDArray[np.float64] = constant - 0.5 * (distances + n_features * math.log(2 * math.pi))
    return found
