"""botorch 0.18.1: acquisition functions, differentiated by the candidates."""

import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qExpectedImprovement,
    qKnowledgeGradient,
    qLogNoisyExpectedImprovement,
    qMaxValueEntropy,
)
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood


def _data():
    x = torch.rand(30, 2, dtype=torch.float64)
    return x, (3 * x.sum(1, keepdim=True)).sin()


def _acquisition(make, n_candidates=2):
    x, y = _data()
    candidates = torch.rand(1, n_candidates, 2, dtype=torch.float64, requires_grad=True)
    acquisition = make(SingleTaskGP(x, y), x, y)
    return lambda: -acquisition(candidates).sum(), {"candidates": candidates}


def _sampler():
    return SobolQMCNormalSampler(torch.Size([16]), seed=0)


def marginal_likelihood():
    x, y = _data()
    model = SingleTaskGP(x, y).train()
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    return lambda: -objective(model(*model.train_inputs), model.train_targets), model


def expected_improvement():
    return _acquisition(lambda model, x, y: qExpectedImprovement(model, y.max(), sampler=_sampler()))


def analytic_improvement():
    return _acquisition(lambda model, x, y: LogExpectedImprovement(model, y.max()), n_candidates=1)


def upper_confidence_bound():
    return _acquisition(lambda model, x, y: UpperConfidenceBound(model, beta=0.2), n_candidates=1)


def noisy_improvement():
    return _acquisition(lambda model, x, y: qLogNoisyExpectedImprovement(model, x, sampler=_sampler()))


def knowledge_gradient():
    return _acquisition(lambda model, x, y: qKnowledgeGradient(model, num_fantasies=4), n_candidates=6)


def entropy_search():
    return _acquisition(lambda model, x, y: qMaxValueEntropy(model, torch.rand(50, 2).double()), n_candidates=1)
