r"""Mixtures of counts: independent Bernoulli, Poisson or categorical features within each component.

Within a component the features are independent, so a missing entry is left out exactly: its factor of the density is 1.
Missing entries are NaN (for categories also any negative code).

A prior is given as pseudo-counts: observations added to every component. MAP EM never lowers
``log_likelihood(mixture, x) + mixture.log_prior() / N``, where N is the sum of the sample weights.

N samples, D features, K components, C categories of all features together.
"""

from toolkit.em.models.discrete.bernoulli import BernoulliMixture
from toolkit.em.models.discrete.categorical import CategoricalMixture
from toolkit.em.models.discrete.poisson import PoissonMixture

__all__ = ["BernoulliMixture", "CategoricalMixture", "PoissonMixture"]
