"""Restricted Boltzmann machines with scikit-learn's interface, thin wrappers of the functional core."""

from toolkit.rbm.estimators.bernoulli import BernoulliRBM
from toolkit.rbm.estimators.gaussian import GaussianRBM

__all__ = ["BernoulliRBM", "GaussianRBM"]
