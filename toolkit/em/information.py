r"""Precision of EM estimates: information matrices, the rate of convergence, and standard errors.

With :math:`a_{nk} = \log \pi_k f_k(x_n)`, responsibilities :math:`r_{nk}` and weights :math:`w_n`, in unconstrained
coordinates :math:`\theta`, summed over the samples:

====================  ==============================================================================================
information           definition
====================  ==============================================================================================
observed              :math:`I_o = -\nabla^2 \sum_n w_n \log \sum_k e^{a_{nk}}`
complete              :math:`I_c = -\sum_{nk} w_n \bar r_{nk} \nabla^2 a_{nk}`, at fixed responsibilities
missing               :math:`I_m = \sum_n w_n \mathrm{Cov}_{k \sim r_n}(\nabla a_{nk})`
====================  ==============================================================================================

Louis: :math:`I_o = I_c - I_m`. The complete information is minus the Hessian of the blocked surrogate. So the surrogate
has the right gradient and too much curvature; the excess is the information in the samples' unknown labels. Dempster,
Laird and Rubin: at a maximum the Jacobian of the EM map is :math:`J = I_c^{-1} I_m`, the fraction of missing
information, so its largest eigenvalue is EM's rate of convergence. Meng and Rubin solve for the covariance,
:math:`I_o^{-1} = (1 - J)^{-1} I_c^{-1}`: standard errors from the EM map.

N samples, K components, P coordinates, Q directions that are not redundant, M natural parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.func import hessian, jacfwd

from toolkit._checks import choice, function
from toolkit._data import all_weights
from toolkit.blocks import no_graph, unblock
from toolkit.em.engine.checks import check_samples
from toolkit.em.engine.coordinates import Layout, flat
from toolkit.em.mixture import RESPONSIBILITIES, Family, check_mixture, e_step, expectation, log_density

__all__ = [
    "ErrorMethod",
    "complete_information",
    "em_jacobian",
    "louis_information",
    "missing_information",
    "missing_information_rate",
    "observed_information",
    "standard_errors",
]

ErrorMethod = Literal["sem", "louis", "sandwich"]

F = TypeVar("F", bound=Family)

# Attributes that are natural parameters, in the families that have them.
_NATURAL = ("weights", "means", "covariances", "scatters", "degrees_of_freedom", "rates", "probabilities")

# Eigenvalues of the complete information, scaled to a unit diagonal, below which a direction is redundant.
_REDUNDANT = 1e-9

# The relative error of the covariance above which the EM map does not confirm it.
_SEM_ERROR = 0.02

# The most numbers that the derivatives of one batch of samples may take.
_BATCH_NUMBERS = 2**23


@no_graph()
def observed_information(mixture: Family, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """Return minus the Hessian of the log-likelihood, exactly, summed over the samples.

    Args:
        mixture: The parameters, usually at a maximum of the likelihood.
        x: (N, D), or another shape that the mixture takes; the first dimension counts the samples.
        sample_weight: (N,), not negative: numbers of copies. None: all 1.

    Returns:
        (P, P), float64, in nats; rows and columns in the order of ``mixture.unconstrained()``, each flattened.

    Raises:
        TypeError: If `mixture` is not a mixture, or `x` or `sample_weight` is not a tensor.
        ValueError: If there are no samples, the weights are negative or of another shape, or a coordinate is infinite.

    References:
        Efron & Hinkley, "Assessing the accuracy of the maximum likelihood estimator: observed versus expected Fisher
        information", 1978, section 1.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
        >>> one = m_step(x, torch.ones_like(x), covariance_type="spherical")
        >>> observed_information(one, x)[1, 1]  # of the mean: N / variance
        tensor(3.2000, dtype=torch.float64)
    """
    at = _Coordinates(mixture, x, sample_weight)

    def log_likelihood(position: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return (weight * log_density(at.mixture(position), x)).sum()

    return -_sum(hessian(log_likelihood)(at.position, *batch) for batch in at.batches())


@no_graph()
def complete_information(mixture: Family, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """Return minus the Hessian of the expected complete-data log-likelihood, at fixed responsibilities.

    This is the observed information of samples with known components, averaged by the responsibilities. It equals minus
    the Hessian of the blocked `surrogate`, times the sum of the weights. Arguments, rows and columns, and errors are
    those of `observed_information`.

    References:
        Louis, "Finding the observed information matrix when using the EM algorithm", 1982, equation 3.2.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [2.0], [5.0], [9.0]], dtype=torch.float64)
        >>> two = m_step(x, torch.eye(2).double().repeat_interleave(2, 0), covariance_type="spherical")
        >>> bool(torch.linalg.eigvalsh(complete_information(two, x) - observed_information(two, x)).min() > -1e-9)
        True
    """
    at = _Coordinates(mixture, x, sample_weight)

    def expected(position: Tensor, x: Tensor, held: Tensor) -> Tensor:
        return expectation(held, at.mixture(position).log_joint(x)).sum()

    here = at.mixture(at.position)
    return -_sum(
        hessian(expected)(at.position, part, weight[:, None] * e_step(here, part)[0]) for part, weight in at.batches()
    )


@no_graph()
def missing_information(mixture: Family, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """Return the covariance of the complete-data score given the samples: the information lost with the labels.

    The matrix is positive semi-definite. Arguments, rows and columns, and errors are those of `observed_information`.

    References:
        Louis, "Finding the observed information matrix when using the EM algorithm", 1982, equation 3.2.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
        >>> one = m_step(x, torch.ones_like(x), covariance_type="spherical")
        >>> bool(missing_information(one, x).abs().max() < 1e-9)  # one component has no labels to lose
        True
    """
    at = _Coordinates(mixture, x, sample_weight)
    here = at.mixture(at.position)

    def covariance(x: Tensor, weight: Tensor) -> Tensor:
        responsibilities = e_step(here, x)[0]
        slopes = jacfwd(lambda position: at.mixture(position).log_joint(x))(at.position)
        slopes = slopes.masked_fill((responsibilities == 0)[..., None], 0.0)
        deviations = slopes - torch.einsum("nk,nkp->np", responsibilities, slopes)[:, None]
        rows = (weight[:, None] * responsibilities)[..., None] * deviations
        return _product(rows.flatten(0, 1), deviations.flatten(0, 1))

    return _sum(covariance(*batch) for batch in at.batches())


@no_graph()
def louis_information(mixture: Family, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """Return the observed information without a derivative of the likelihood: complete minus missing.

    Arguments, result and errors are those of `observed_information`; only the computation differs.

    References:
        Louis, "Finding the observed information matrix when using the EM algorithm", 1982, equation 3.1.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [2.0], [5.0], [9.0]], dtype=torch.float64)
        >>> two = m_step(x, torch.eye(2).double().repeat_interleave(2, 0), covariance_type="spherical")
        >>> torch.allclose(louis_information(two, x), observed_information(two, x))
        True
    """
    return complete_information(mixture, x, sample_weight) - missing_information(mixture, x, sample_weight)


@no_graph()
def em_jacobian(mixture: Family, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """Return the Jacobian of one EM step: the derivative of the coordinates after it by those before it.

    The block `em.responsibilities` is opened for this derivative. With the block in place the M-step sees constants,
    and the derivative is exactly 0. At a maximum the eigenvalues are the fractions of missing information. Arguments
    and errors are those of `observed_information`.

    Returns:
        (P, P), float64: row i is the gradient of coordinate i after the step.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, theorem 4.
        Meng & Rubin, "Using EM to obtain asymptotic variance-covariance matrices: the SEM algorithm", 1991,
        equation 2.2.1, where the matrix is transposed, and estimated from differences of EM steps.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
        >>> one = m_step(x, torch.ones_like(x), covariance_type="spherical")
        >>> bool(em_jacobian(one, x).abs().max() < 1e-9)  # with one component, a step ends at the maximum
        True
    """
    at = _Coordinates(mixture, x, sample_weight)

    def em(position: Tensor) -> Tensor:
        here = at.mixture(position)
        responsibilities = e_step(here, at.x)[0]
        return flat(here.m_step(at.x, at.weight[:, None] * responsibilities).unconstrained())

    with unblock(RESPONSIBILITIES):
        jacobian: Tensor = jacfwd(em)(at.position)
    return jacobian


@no_graph()
def missing_information_rate(mixture: Family, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """Return the fractions of missing information; at a maximum the largest is EM's rate of convergence.

    The fractions are the eigenvalues of ``complete^-1 missing`` over the directions in which the coordinates are not
    redundant. A rate near 1 means that the samples hold almost no information about some direction, and that EM needs
    ``1 / (1 - rate)`` steps to reduce the error by a factor e. The rate assumes an exact M-step, and no latent
    variables but the components. Arguments are those of `observed_information`.

    Returns:
        (Q,), float64, not negative, the largest first.

    Raises:
        TypeError: As in `observed_information`.
        ValueError: As in `observed_information`, or if the complete information has a negative direction.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 3.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [2.0], [5.0], [9.0]], dtype=torch.float64)
        >>> two = m_step(x, torch.eye(2).double().repeat_interleave(2, 0), covariance_type="spherical")
        >>> rates = missing_information_rate(two, x)
        >>> bool((0 <= rates).all() and (rates < 1).all())
        True
    """
    basis = _whitener(complete_information(mixture, x, sample_weight))
    rates: Tensor = torch.linalg.eigvalsh(basis.mT @ missing_information(mixture, x, sample_weight) @ basis)
    return rates.flip(0).clamp(min=0.0)  # rounding can take a zero below


@no_graph()
def standard_errors(
    mixture: F,
    x: Tensor,
    *,
    method: ErrorMethod = "louis",
    sample_weight: Tensor | None = None,
    natural: Callable[[F], Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    r"""Return the standard errors of a fitted mixture's parameters.

    The delta method carries the covariance of the coordinates over to the natural parameters, to first order in 1/N.
    Redundant coordinates, such as the common constant of log-weights, do not matter.

    - ``"louis"``: :math:`I_o^{-1}`, by Louis' identity.
    - ``"sem"``: :math:`(1 - J)^{-1} I_c^{-1}`: the same numbers at a maximum, from the EM map. The M-step must be
      differentiable and maximise the expected log-joint. A family with further latent variables (Student components,
      factor analysers), or with an M-step that only raises the expected log-joint, is refused.
    - ``"sandwich"``: :math:`I_o^{-1} S I_o^{-1}`, with S the sum of the scores' outer products. It does not assume that
      the data come from such a mixture, as the other two do (Huber).

    Args:
        mixture: A maximum of the likelihood, found with a small `tol`.
        x: As in `observed_information`.
        method: ``"louis"``, ``"sem"`` or ``"sandwich"``.
        sample_weight: As in `observed_information`.
        natural: Returns the parameters of interest of a mixture, by name. None: the mixture's weights, means,
            covariances, scatters, degrees of freedom, rates and probabilities, as far as it has them.

    Returns:
        Name -> standard errors, in the shape of the parameters, float64; 0 for parameters that are not estimated.

    Raises:
        TypeError: As in `observed_information`.
        ValueError: As in `observed_information`, or if the method is unknown, the mixture is not at a maximum, or its
            M-step does not fit ``"sem"``.

    References:
        Louis 1982, section 3. Meng & Rubin 1991, equation 2.3.5. Huber, "The behavior of maximum likelihood estimates
        under nonstandard conditions", 1967, section 3.

    Example:
        >>> from toolkit.em import GaussianParameters
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
        >>> one = GaussianParameters.from_covariances(weights=torch.ones(1, dtype=torch.float64), means=x.mean(0)[None],
        ...     covariances=x.var(0, correction=0), covariance_type="spherical")
        >>> standard_errors(one, x)["means"]  # sigma / sqrt(N)
        tensor([[0.5590]], dtype=torch.float64)
    """
    choice("method", method, get_args(ErrorMethod))
    if natural is not None:
        function("natural", natural, "the mixture")
    at = _Coordinates(mixture, x, sample_weight)
    complete = complete_information(mixture, x, sample_weight)
    basis = _whitener(complete)
    missing = basis.mT @ missing_information(mixture, x, sample_weight) @ basis
    rates, vectors = torch.linalg.eigh(missing)
    _check_maximum(float(rates[-1]))
    if method == "sem":
        jacobian = em_jacobian(mixture, x, sample_weight)
        _check_m_step(basis.mT @ complete @ jacobian @ basis - missing, float(rates[-1]))
        identity = torch.eye(len(jacobian), dtype=jacobian.dtype, device=jacobian.device)
        covariance = torch.linalg.solve(identity - jacobian, basis @ basis.mT)
    else:
        directions = basis @ vectors / (1 - rates).sqrt()
        covariance = directions @ directions.mT
        if method == "sandwich":
            covariance = covariance @ _squares_of_scores(at) @ covariance
    return _carried_over(at, covariance, natural)


def _carried_over(
    at: _Coordinates[F], covariance: Tensor, natural: Callable[[F], Mapping[str, Tensor]] | None
) -> dict[str, Tensor]:
    """Return the standard errors of natural parameters: the delta method."""

    def values(position: Tensor) -> dict[str, Tensor]:
        there = at.mixture(position)
        return dict(_natural(there) if natural is None else natural(there))

    errors = {}
    slopes = jacfwd(values)(at.position)
    for name, value in values(at.position).items():
        rows = slopes[name].reshape(value.numel(), -1)
        variances = ((rows @ covariance) * rows).sum(1)
        errors[name] = variances.clamp(min=0).sqrt().reshape(value.shape)
    return errors


def _natural(mixture: Family) -> Iterator[tuple[str, Tensor]]:
    for name in _NATURAL:
        value = getattr(mixture, name, None)
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(value) if isinstance(part, Tensor))


def _squares_of_scores(at: _Coordinates[F]) -> Tensor:
    def squares(x: Tensor, weight: Tensor) -> Tensor:
        scores = jacfwd(lambda position: log_density(at.mixture(position), x))(at.position)
        return _product(weight[:, None] * scores, scores)

    return _sum(squares(*batch) for batch in at.batches())


def _whitener(complete: Tensor) -> Tensor:
    """Return B (P, Q) with ``B^T complete B = 1``, whose columns span the directions that are not redundant."""
    scale = complete.diagonal().clamp(min=0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    values, vectors = torch.linalg.eigh(complete / scale / scale[:, None])
    if float(values[0]) < -_REDUNDANT * float(values[-1]):
        raise ValueError(
            f"`mixture` should be near a maximum of the likelihood, where the complete information is positive. Found "
            f"an eigenvalue of {float(values[0]):.3g}."
        )
    kept = values > _REDUNDANT * values[-1]
    basis: Tensor = vectors[:, kept] / values[kept].sqrt() / scale[:, None]
    return basis


def _check_maximum(rate: float) -> None:
    if not rate < 1 - _REDUNDANT:
        raise ValueError(
            f"`mixture` should be at a maximum of the likelihood that is not flat. Found a fraction of missing "
            f"information of {rate:.9g}: fit it with a smaller `tol`, or with fewer components."
        )


def _check_m_step(difference: Tensor, rate: float) -> None:
    # The relative error of the covariance is this difference over the information that is left.
    error = float(torch.linalg.matrix_norm(difference, 2)) / (1 - rate)
    if not error < _SEM_ERROR:
        raise ValueError(
            "`method` should be 'louis' or 'sandwich' here. Found 'sem', and an EM map whose derivative is not that of "
            f"a maximum of the expected log-joint (relative error {error:.2g}): the M-step stops short of it, or the "
            "mixture is at no maximum of the likelihood."
        )


class _Coordinates(Generic[F]):
    """A mixture as a function of its flat coordinates, and the samples, all in float64."""

    def __init__(self, mixture: F, x: Tensor, sample_weight: Tensor | None) -> None:
        check_mixture(mixture)
        check_samples(x, sample_weight)
        self._like = mixture
        leaves = mixture.unconstrained()
        self._layout = Layout(leaves)
        self.x = x.double() if x.is_floating_point() else x
        self.weight = all_weights(x, sample_weight)
        self.position = flat(leaves)
        if not bool(self.position.isfinite().all()):
            names = [name for name, leaf in leaves.items() if not bool(leaf.isfinite().all())]
            raise ValueError(
                f"`mixture` should have finite coordinates. Found infinite ones in {', '.join(names)}: a parameter at "
                "the edge of its range has no standard error."
            )

    def mixture(self, position: Tensor) -> F:
        return self._like.with_unconstrained(self._layout.leaves(position))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of samples and weights, small enough that the derivatives of all log-joints fit the memory."""
        here = self.mixture(self.position)
        try:
            n_components = here.log_joint(self.x[:1]).shape[1]
        except ValueError:
            here.log_joint(self.x)  # so that the message has the shape of all samples
            raise
        per_sample = n_components * len(self.position) * (1 + self.x[0].numel())
        size = max(1, _BATCH_NUMBERS // per_sample)
        return zip(self.x.split(size), self.weight.split(size), strict=True)


def _sum(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left.mT @ right
