"""snntorch 1.0.0: spiking neurons over five steps."""

import snntorch as snn
import torch
from snntorch import surrogate
from torch import nn


def _two_layers(first, second):
    layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 2), first, second])
    x = 3 * torch.rand(5, 3, 4)

    def loss():
        states, total = [first.reset_mem(), second.reset_mem()], 0.0
        for step in x:
            spikes, states[0] = first(layers[0](step), states[0])
            _, states[1] = second(layers[1](spikes), states[1])
            total = total + states[1].square().mean()
        return total

    return loss, layers


def _leaky(**options):
    first = snn.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(), learn_beta=True, **options)
    return _two_layers(first, snn.Leaky(beta=0.9, spike_grad=surrogate.atan()))


def reset_by_subtraction():
    return _leaky(reset_mechanism="subtract")


def reset_to_zero():
    return _leaky(reset_mechanism="zero")


def without_reset():
    return _leaky(reset_mechanism="none")


def lapicque():
    return _two_layers(snn.Lapicque(beta=0.9), snn.Leaky(beta=0.9))


def straight_through():
    gradient = surrogate.straight_through_estimator()
    return _two_layers(snn.Leaky(beta=0.9, spike_grad=gradient), snn.Leaky(beta=0.9))
