"""Hidden Markov models: their parameters, Baum-Welch, Viterbi, posteriors, and the surrogate for gradient EM."""

from toolkit.em.hmm._emissions import CategoricalEmissions, Emissions, GaussianEmissions
from toolkit.em.hmm.core import (
    e_step,
    em_step,
    expected_log_joint,
    fit,
    log_likelihood,
    log_likelihoods,
    m_step,
    posteriors,
    sample,
    surrogate,
    total_log_likelihood,
    viterbi,
)
from toolkit.em.hmm.parameters import DirichletPrior, HMMParameters, Posteriors

__all__ = [
    "CategoricalEmissions",
    "DirichletPrior",
    "Emissions",
    "GaussianEmissions",
    "HMMParameters",
    "Posteriors",
    "e_step",
    "em_step",
    "expected_log_joint",
    "fit",
    "log_likelihood",
    "log_likelihoods",
    "m_step",
    "posteriors",
    "sample",
    "surrogate",
    "total_log_likelihood",
    "viterbi",
]
