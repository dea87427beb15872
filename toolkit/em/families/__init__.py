"""Mixtures of other families than the Gaussian: counts, heavy tails, low-rank covariances, and distributions given."""

from toolkit.em.families._fit import fit_family
from toolkit.em.families.custom import DistributionMixture
from toolkit.em.families.discrete import BernoulliMixture, CategoricalMixture, PoissonMixture
from toolkit.em.families.factors import FactorAnalysers, NoiseType
from toolkit.em.families.student import ScatterType, StudentMixture

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
