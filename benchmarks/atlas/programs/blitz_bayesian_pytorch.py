"""blitz-bayesian-pytorch 0.2.8: sampled bounds of Bayesian networks."""

import torch
from blitz.modules import BayesianLinear, BayesianLSTM
from blitz.utils import variational_estimator
from torch import nn


@variational_estimator
class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = BayesianLinear(4, 8), BayesianLinear(8, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())


@variational_estimator
class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.last = BayesianLSTM(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.recurrent(x)[0][:, -1])


def _bound(network, x):
    y, criterion = torch.randn(len(x), 1), nn.MSELoss()
    return lambda: network.sample_elbo(x, y, criterion, 2, 1 / 8), network


def feed_forward():
    return _bound(_Network(), torch.randn(8, 4))


def recurrent():
    return _bound(_Recurrent(), torch.randn(8, 5, 4))
