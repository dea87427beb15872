"""Mixtures and hidden Markov models as scikit-learn estimators: thin classes over the functional core."""

from toolkit.em.estimators.hmm import BaseHMM, CategoricalHMM, GaussianHMM
from toolkit.em.estimators.mixture import BaseMixture, CollapseWarning, GaussianMixture

__all__ = ["BaseHMM", "BaseMixture", "CategoricalHMM", "CollapseWarning", "GaussianHMM", "GaussianMixture"]
