"""Mixtures and hidden Markov models as scikit-learn estimators: thin classes over the functional core."""

from toolkit.em.estimators.base_hmm import BaseHMM
from toolkit.em.estimators.base_mixture import BaseMixture
from toolkit.em.estimators.hmm import CategoricalHMM, GaussianHMM
from toolkit.em.estimators.mixture import CollapseWarning, GaussianMixture

__all__ = ["BaseHMM", "BaseMixture", "CategoricalHMM", "CollapseWarning", "GaussianHMM", "GaussianMixture"]
