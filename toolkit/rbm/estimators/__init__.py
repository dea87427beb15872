"""Restricted Boltzmann machines as scikit-learn's users know them: thin faces of the functional core."""

from toolkit.rbm.estimators.bernoulli import BernoulliRBM
from toolkit.rbm.estimators.gaussian import GaussianRBM

__all__ = ["BernoulliRBM", "GaussianRBM"]
