"""zuko 1.6.0: normalizing flows."""

import torch
import zuko


def _likelihood(flow):
    x = torch.randn(16, 2)
    return lambda: -flow().log_prob(x).mean(), flow


def spline_flow():
    return _likelihood(zuko.flows.NSF(2, 0, transforms=2, hidden_features=[8]))


def autoregressive_flow():
    return _likelihood(zuko.flows.MAF(2, 0, transforms=2, hidden_features=[8]))


def neural_autoregressive_flow():
    return _likelihood(zuko.flows.NAF(2, 0, transforms=1, hidden_features=[8]))


def reverse_divergence():
    flow = zuko.flows.NSF(2, 0, transforms=2, hidden_features=[8])

    def loss():
        x, log_density = flow().rsample_and_log_prob((16,))
        return (log_density + x.square().sum(1)).mean()

    return loss, flow


def mixture():
    return _likelihood(zuko.flows.GMM(2, 0, components=3))
