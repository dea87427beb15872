"""spikingjelly 2.0.0: spiking neurons with and without their detached reset."""

import torch
from spikingjelly.activation_based import functional, neuron
from torch import nn


def _network(make):
    net = nn.Sequential(nn.Linear(4, 8), make(), nn.Linear(8, 2), make())
    x = 20 * torch.rand(5, 3, 4)

    def loss():
        functional.reset_net(net)
        return (sum(net(step) for step in x) - 1).square().mean()

    return loss, net


def leaky():
    return _network(neuron.LIFNode)


def leaky_with_detached_reset():
    return _network(lambda: neuron.LIFNode(detach_reset=True))


def leaky_with_detached_hard_reset():
    return _network(lambda: neuron.LIFNode(detach_reset=True, v_reset=0.0, decay_input=False))


def soft_reset():
    return _network(lambda: neuron.LIFNode(detach_reset=True, v_reset=None))


def parametric():
    return _network(lambda: neuron.ParametricLIFNode(detach_reset=True))


def integrate_and_fire():
    return _network(lambda: neuron.IFNode(detach_reset=True))
