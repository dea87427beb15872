"""Expectation maximisation of mixtures and hidden Markov models, by closed-form steps or by a blocked surrogate.

`mixture` has the E-step, the block and the surrogates; `gaussian` and `hmm` have the models; `gradient` and
`information` use the block. Behind them: `covariance`, the structures; `engine`, the fast pass and the accelerated
iteration; `models`, other mixtures; `estimators`, the classes for users of scikit-learn.
"""

from typing import TYPE_CHECKING

from toolkit._lazy import lazy
from toolkit.em import hmm
from toolkit.em.engine.acceleration import Accelerate, Climb, climb, maximise_likelihood
from toolkit.em.engine.fit import Fit, fit
from toolkit.em.engine.fused import em_step
from toolkit.em.engine.starts import Init, start
from toolkit.em.engine.statistics import Statistics
from toolkit.em.gaussian import (
    COVARIANCE_TYPES,
    CovarianceType,
    GaussianParameters,
    from_unconstrained,
    m_step,
    precisions_cholesky,
    to_unconstrained,
)
from toolkit.em.gradient import gradient_em
from toolkit.em.information import (
    ErrorMethod,
    complete_information,
    em_jacobian,
    louis_information,
    missing_information,
    missing_information_rate,
    observed_information,
    standard_errors,
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
from toolkit.em.models import (
    BernoulliMixture,
    CategoricalMixture,
    DistributionMixture,
    FactorAnalysers,
    NoiseType,
    PoissonMixture,
    ScatterType,
    StudentMixture,
    fit_family,
)
from toolkit.em.models.missing import (
    MissingGaussian,
    draw_missing,
    em_step_missing,
    fit_missing,
    impute,
    marginal_log_joint,
    start_missing,
    surrogate_missing,
)
from toolkit.em.models.online import (
    IncrementalState,
    OnlineState,
    incremental_start,
    incremental_step,
    online_start,
    online_step,
)
from toolkit.em.models.parsimonious import (
    COVARIANCE_MODELS,
    CovarianceModel,
    ParsimoniousCovariances,
    ParsimoniousParameters,
    covariances_from_scatter,
    n_free_parameters,
)
from toolkit.em.models.prior import Prior
from toolkit.em.models.search import fit_parsimonious
from toolkit.em.models.selection import Candidate, Criterion, Selection, aic, bic, icl, select, spikes

if TYPE_CHECKING:
    from toolkit.em.estimators import BaseMixture, CategoricalHMM, CollapseWarning, GaussianHMM, GaussianMixture

__all__ = [
    "COVARIANCE_MODELS",
    "COVARIANCE_TYPES",
    "RESPONSIBILITIES",
    "Accelerate",
    "BaseMixture",
    "BernoulliMixture",
    "Candidate",
    "CategoricalHMM",
    "CategoricalMixture",
    "Climb",
    "CollapseWarning",
    "CovarianceModel",
    "CovarianceType",
    "Criterion",
    "DistributionMixture",
    "ErrorMethod",
    "FactorAnalysers",
    "Family",
    "Fit",
    "GaussianHMM",
    "GaussianMixture",
    "GaussianParameters",
    "IncrementalState",
    "Init",
    "MissingGaussian",
    "Mixture",
    "NoiseType",
    "OnlineState",
    "ParsimoniousCovariances",
    "ParsimoniousParameters",
    "PoissonMixture",
    "Prior",
    "ScatterType",
    "Selection",
    "Statistics",
    "StudentMixture",
    "aic",
    "bic",
    "climb",
    "complete_information",
    "covariances_from_scatter",
    "draw_missing",
    "e_step",
    "em_jacobian",
    "em_step",
    "em_step_missing",
    "evidence_lower_bound",
    "fit",
    "fit_family",
    "fit_missing",
    "fit_parsimonious",
    "from_unconstrained",
    "gradient_em",
    "hmm",
    "icl",
    "impute",
    "incremental_start",
    "incremental_step",
    "log_density",
    "log_likelihood",
    "louis_information",
    "m_step",
    "marginal_log_joint",
    "maximise_likelihood",
    "missing_information",
    "missing_information_rate",
    "n_free_parameters",
    "observed_information",
    "online_start",
    "online_step",
    "precisions_cholesky",
    "select",
    "spikes",
    "standard_errors",
    "start",
    "start_missing",
    "surrogate",
    "surrogate_missing",
    "to_unconstrained",
]

# Importing scikit-learn takes as long as importing the rest of this package.
__getattr__ = lazy(
    __name__,
    "toolkit.em.estimators",
    {"BaseMixture", "CategoricalHMM", "CollapseWarning", "GaussianHMM", "GaussianMixture"},
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
