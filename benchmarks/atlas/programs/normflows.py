"""normflows 1.7.3: divergences of a normalizing flow from its target."""

import normflows as nf
import torch


def _flow():
    layers = [
        nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 8, 2], init_zeros=False)),
        nf.flows.Permute(2),
        nf.flows.ActNorm(2),
    ]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), layers, nf.distributions.TwoMoons())
    flow.forward_kld(torch.randn(16, 2))  # the first call sets ActNorm
    return flow


def forward_divergence():
    flow, x = _flow(), torch.randn(16, 2)
    return lambda: flow.forward_kld(x), flow


def reverse_divergence():
    flow = _flow()
    return lambda: flow.reverse_kld(16), flow


def reverse_divergence_by_the_path():
    flow = _flow()
    return lambda: flow.reverse_kld(16, score_fn=False), flow


def alpha_divergence():
    flow = _flow()
    return lambda: flow.reverse_alpha_div(16, dreg=False), flow


def doubly_reparameterized_alpha_divergence():
    flow = _flow()
    return lambda: flow.reverse_alpha_div(16, dreg=True), flow
