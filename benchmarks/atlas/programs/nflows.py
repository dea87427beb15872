"""nflows 0.14: likelihoods of normalizing flows."""

import torch
from nflows import distributions, flows, transforms


def _likelihood(*layers):
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([4]))
    x = torch.randn(16, 4)
    flow.log_prob(x)  # the first call sets layers that look at the data
    return lambda: -flow.log_prob(x).mean(), flow


def autoregressive():
    return _likelihood(transforms.MaskedAffineAutoregressiveTransform(4, 8), transforms.RandomPermutation(4))


def splines():
    layer = transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(4, 8, tails="linear", tail_bound=3)
    return _likelihood(layer)


def normalized():
    return _likelihood(transforms.ActNorm(4), transforms.LULinear(4), transforms.BatchNorm(4))
