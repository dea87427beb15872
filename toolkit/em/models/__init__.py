"""Mixtures beyond plain Gaussians.

Other families: counts, heavy tails, low-rank covariances, and any `torch.distributions`. Gaussians: missing values,
streams, priors, parsimonious covariances, and model selection.
"""

from toolkit.em.models._fit import fit_family
from toolkit.em.models.custom import DistributionMixture
from toolkit.em.models.discrete import BernoulliMixture, CategoricalMixture, PoissonMixture
from toolkit.em.models.factors import FactorAnalysers, NoiseType
from toolkit.em.models.student import ScatterType, StudentMixture

__all__ = [
    "BernoulliMixture",
    "CategoricalMixture",
    "DistributionMixture",
    "FactorAnalysers",
    "NoiseType",
    "PoissonMixture",
    "ScatterType",
    "StudentMixture",
    "fit_family",
]
