"""Expectation maximisation: Gaussian mixtures by closed-form steps, and by the gradient of a blocked surrogate."""

from toolkit.em._fit import Fit, Init, fit, start
from toolkit.em._fused import em_step
from toolkit.em.gaussian import (
    COVARIANCE_TYPES,
    CovarianceType,
    GaussianParameters,
    from_unconstrained,
    m_step,
    precisions_cholesky,
    to_unconstrained,
)
from toolkit.em.mixture import (
    RESPONSIBILITIES,
    Family,
    Mixture,
    e_step,
    evidence_lower_bound,
    log_density,
    log_likelihood,
    surrogate,
)

__all__ = [
    "COVARIANCE_TYPES",
    "RESPONSIBILITIES",
    "CovarianceType",
    "Family",
    "Fit",
    "GaussianParameters",
    "Init",
    "Mixture",
    "e_step",
    "em_step",
    "evidence_lower_bound",
    "fit",
    "from_unconstrained",
    "log_density",
    "log_likelihood",
    "m_step",
    "precisions_cholesky",
    "start",
    "surrogate",
    "to_unconstrained",
]
