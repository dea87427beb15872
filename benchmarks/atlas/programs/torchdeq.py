"""torchdeq 0.1.0: fixed points and their gradients."""

import torch
from torch import nn
from torchdeq import get_deq
from torchdeq.loss import fp_correction


def _fixed_point(**options):
    solver = get_deq(f_max_iter=20, b_max_iter=20, **options).train()
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    nn.init.normal_(layer.weight, std=0.1)

    def step(z):
        return torch.tanh(layer(z) + x)

    return solver, layer, step


def _squared(**options):
    solver, layer, step = _fixed_point(**options)
    return lambda: solver(step, torch.zeros(3, 4))[0][-1].square().mean(), layer


def default():
    return _squared()


def phantom():
    return _squared(ift=False, grad=3)


def several_gradients():
    return _squared(ift=False, grad=[2, 3], n_states=2)


def implicit():
    return _squared(ift=True)


def implicit_by_a_hook():
    return _squared(hook_ift=True)


def corrected():
    solver, layer, step = _fixed_point(n_states=3)
    target = torch.zeros(3, 4)

    def loss():
        states, _ = solver(step, torch.zeros(3, 4))
        return fp_correction(lambda z, y: (z - y).square().mean(), (states, target))

    return loss, layer
