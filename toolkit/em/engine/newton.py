r"""Newton's method for a Gaussian mixture of few parameters, by the exact Hessian of its log-likelihood.

EM converges at the rate of missing information: slowly where components overlap. The Hessian is that of the complete
data plus the missing information (Louis 1982). For P parameters it costs one product of a matrix (P, N) with itself,
about as much as a few EM steps where P is small. Steps are damped by a multiple of the complete data's information, the
metric of EM: where the log-likelihood is not concave, or the quadratic model is poor, they turn into short EM steps.

N samples, D features, K components, Q quadratic features, P parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import lapack

from toolkit.em.covariance import Structure
from toolkit.em.engine.acceleration import Climb
from toolkit.em.engine.small import SmallData, SmallMixture

__all__ = ["climb_by_newton", "has_few_parameters"]

# The most parameters of a mixture, and numbers in the matrix (P, N). On thirty data sets a step with 100 parameters
# took as long as four EM steps, and saved six.
_PARAMETERS = 128
_NUMBERS = 2**18

# The largest variance that `reg_covar` may add, in units of a component's own: the model takes it for constant.
_RIDGE = 1e-3

# Damping where the model is poor for the first time, and by what it is multiplied where steps fail and succeed.
_FIRST = 0.05
_GROWTH = 4.0
_MOST = 1e6

# A model that predicts less than this share of `tol` ends a fit without a further step.
_MARGIN = 0.01

# The error of a predicted gain, as a share of `tol`, below which a whole step ends a fit: the error is of third order
# in the step, the remaining gain of fourth.
_SURE = 0.1

# The shares of the predicted gain below which damping grows, and above which it falls.
_POOR = 0.25
_GOOD = 0.75


@functools.lru_cache(maxsize=64)
def _products(n_features: int, is_matrix: bool) -> tuple[Any, Any, Any]:
    """Return i <= j of the products of features (Q,), and their variances for a standard normal."""
    i, j = np.triu_indices(n_features) if is_matrix else (np.arange(n_features),) * 2
    return i, j, np.where(i == j, 2.0, 1.0)


def has_few_parameters(structure: Structure, n_components: int, n_features: int, n_samples: int) -> bool:
    """Say whether a Newton step of this mixture is worth its time."""
    if structure.is_shared or structure.shape_of_one(n_features) == ():
        return False
    n_parameters = n_components * (1 + n_features + structure.n_parameters_of_one(n_features))
    return n_parameters <= min(_PARAMETERS, _NUMBERS // n_samples)


class _Point:
    """A mixture, its log-likelihood in nats per sample, and on demand the quadratic model of it.

    In the coordinates ``y = P_k^T (x - m_k)``, in which component k is standard normal, its log-joint changes by ``a_k
    + b_k y + sum_{i <= j} c_kij y_i y_j`` less a log-normaliser. The derivatives with respect to ``(a_k, b_k, c_k)``
    are ``u_nk = (1, y, y_i y_j - [i = j])``, so the gradient is ``sum_n r_nk u_nk``, and minus the Hessian is the
    diagonal of the complete data, less ``sum_n r_nk u_nk u_nk^T`` in block k, plus ``sum_n w_n w_n^T`` with the blocks
    ``r_nk u_nk`` of ``w_n``.
    """

    def __init__(self, data: SmallData, mixture: SmallMixture) -> None:
        self._data, self.mixture = data, mixture
        n_features = mixture.means.shape[1]
        self._products = _products(n_features, data.structure.is_matrix)
        factor = mixture.factor if data.structure.is_matrix else _matrices(mixture.factor)
        self._factor, self._transposed = factor, factor.transpose(0, 2, 1)
        self._y = data.whitened(self._transposed, mixture.means)
        joint = -0.5 * (self._y * self._y).sum(1)
        joint += (mixture.log_weights + np.log(factor.diagonal(0, 1, 2)).sum(1))[:, None]
        peak = joint.max(0)
        joint -= peak
        np.exp(joint, out=joint)
        densities = joint.sum(0)
        joint /= densities
        self._responsibilities = joint
        found = np.log(densities) + peak
        total = float(found.sum() if data.weights is None else found @ data.weights)
        self.value = total / data.total_weight - 0.5 * n_features * math.log(2 * math.pi)

    def model(self) -> tuple[Any, Any] | None:
        """Return minus the Hessian (P, P) and the gradient (P,), in units of the complete data; None if undefined."""
        data, (i, j, variances) = self._data, self._products
        (k, d, n), shares = self._y.shape, np.exp(self.mixture.log_weights)
        u = np.empty((k, 1 + d + len(i), n))
        u[:, 0] = 1.0
        u[:, 1 : 1 + d] = self._y
        np.multiply(self._y[:, i], self._y[:, j], out=u[:, 1 + d :])
        u[:, 1 + d :] -= (i == j)[:, None]
        w = self._responsibilities[:, None] * u
        weighted = w if data.weights is None else w * data.weights
        gradient = weighted.sum(2)
        counts = gradient[:, :1].copy()
        gradient[:, 0] -= data.total_weight * shares
        added = self._transposed @ data.ridge @ self._factor
        gradient[:, 1 + d :] += counts * added[:, i, j]
        complete = np.empty_like(gradient)
        complete[:, 0] = data.total_weight * shares
        complete[:, 1 : 1 + d] = counts
        complete[:, 1 + d :] = counts * variances
        if not complete.min() > 0 or added.diagonal(0, 1, 2).max() > _RIDGE:
            return None
        size = gradient.size
        information = w.reshape(size, n) @ weighted.reshape(size, n).T
        every = np.arange(k)
        information.reshape(k, -1, k, size // k)[every, :, every] -= weighted @ u.transpose(0, 2, 1)
        self._scale = 1 / np.sqrt(complete.ravel())
        information *= self._scale
        information *= self._scale[:, None]
        information.flat[:: size + 1] += 1.0
        return information, gradient.ravel() * self._scale

    def moved(self, step: Any) -> SmallMixture:
        """Return the mixture at a step (P,) in units of the complete data."""
        (i, j, _), means = self._products, self.mixture.means
        (k, d), parts = means.shape, (step * self._scale).reshape(len(means), -1)
        raised = self.mixture.log_weights + parts[:, 0]
        raised -= raised.max()
        # To first order the precision changes by -C. As a square it is always positive.
        root = np.zeros((k, d, d))
        root[:, i, j] = root[:, j, i] = -0.5 * parts[:, 1 + d :]
        root[:, range(d), range(d)] = 1 + 2 * root[:, range(d), range(d)]
        # The Cholesky factor in reversed order is upper triangular.
        upper = np.linalg.cholesky((root @ root)[:, ::-1, ::-1])[:, ::-1, ::-1]
        shifts = np.linalg.solve(self._transposed, parts[:, 1 : 1 + d, None])[:, :, 0]
        factor = self._factor @ upper
        return SmallMixture(
            log_weights=raised - np.log(np.exp(raised).sum()),
            means=means + shifts,
            factor=factor if self._data.structure.is_matrix else factor.diagonal(0, 1, 2).copy(),
            structure=self._data.structure,
        )


def climb_by_newton(
    data: SmallData,
    start: SmallMixture,
    *,
    tol: float,
    max_iter: int,
    rounding: float,
    allows: Callable[[SmallMixture], bool],
    tell: Callable[[int, float], None] | None = None,
) -> Climb[SmallMixture]:
    """Take damped Newton steps that raise the log-likelihood, until the model predicts a gain of at most `tol`.

    The prediction counts only where the model is concave, so that a fit does not end at a saddle point.

    Args:
        data: The samples; the structure is full or diag.
        start: Where to start.
        tol: Nats per sample.
        max_iter: The most evaluations after the one at the start.
        rounding: As in `climb`.
        allows: Says whether a step may lead to a mixture.
        tell: Called with the number of evaluations after the start, and the log-likelihood.

    Returns:
        The highest point. It has not converged where no step leads higher, or a component is empty or so narrow that
        `reg_covar` matters.

    References:
        Louis, "Finding the observed information matrix when using the EM algorithm", 1982, section 3. Marquardt, "An
        algorithm for least-squares estimation of nonlinear parameters", 1963.
    """
    with np.errstate(all="ignore"):
        here = _Point(data, start)
        history, n_iter, damping = [here.value], 0, 0.0
        while True:
            found = here.model()
            if found is None or not math.isfinite(here.value):
                return Climb(here.mixture, here.value, False, n_iter, tuple(history))
            information, gradient = found
            least = max(tol, rounding * (1 + abs(here.value)))
            step = _solved(information, gradient, 0.0)
            whole = math.inf if step is None else 0.5 * float(gradient @ step) / data.total_weight
            if whole <= _MARGIN * least:
                return Climb(here.mixture, here.value, True, n_iter, tuple(history))
            damping = 0.0 if whole <= least else damping
            there = None
            while there is None:
                step = _solved(information, gradient, damping)
                if n_iter == max_iter or damping > _MOST:
                    return Climb(here.mixture, here.value, False, n_iter, tuple(history))
                if step is None:
                    damping = max(_GROWTH * damping, _FIRST)
                    continue
                predicted = float(gradient @ step - 0.5 * step @ information @ step) / data.total_weight
                n_iter += 1
                there = _point(data, here, step, allows)
                gain = -math.inf if there is None else there.value - here.value
                if tell is not None:
                    tell(n_iter, here.value if there is None else there.value)
                if not gain > 0:
                    there = None
                    if whole <= least:  # rounding hides the gain
                        return Climb(here.mixture, here.value, True, n_iter, tuple(history))
                if gain < _POOR * predicted:
                    damping = max(_GROWTH * damping, _FIRST)
            history.append(there.value)
            here = there
            if whole <= least or (damping == 0 and abs(gain - predicted) <= _SURE * least):
                return Climb(here.mixture, here.value, True, n_iter, tuple(history))
            if gain > _GOOD * predicted:
                damping = damping / _GROWTH if damping > _FIRST / _GROWTH else 0.0


def _point(data: SmallData, here: _Point, step: Any, allows: Callable[[SmallMixture], bool]) -> _Point | None:
    """Return the point at the end of a step. None: it is no mixture, or is not allowed."""
    try:
        mixture = here.moved(step)
        return _Point(data, mixture) if allows(mixture) else None
    except np.linalg.LinAlgError:
        return None


def _solved(information: Any, gradient: Any, damping: float) -> Any:
    """Return the damped Newton step, or None where the damped model is not concave."""
    matrix = information.copy()
    matrix.flat[:: len(gradient) + 1] += damping
    lower, failed = lapack.dpotrf(matrix, lower=1, overwrite_a=1)
    return None if failed or not math.isfinite(lower[-1, -1]) else lapack.dpotrs(lower, gradient, lower=1)[0]


def _matrices(factor: Any) -> Any:
    """Return factors (K, D) as matrices (K, D, D)."""
    return factor[:, :, None] * np.eye(factor.shape[1])
