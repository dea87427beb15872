"""torchdiffeq 0.2.5: solutions of a differential equation."""

import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint, odeint_event


class _Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, t, y):
        return self.linear(y).tanh()


def _solved(solve, **options):
    flow, start, times = _Flow(), torch.randn(4, 2), torch.tensor([0.0, 1.0])
    return lambda: solve(flow, start, times, **options)[-1].square().mean(), flow


def adaptive():
    return _solved(odeint)


def fixed_steps():
    return _solved(odeint, method="rk4")


def implicit_steps():
    return _solved(odeint, method="implicit_adams")


def adjoint():
    return _solved(odeint_adjoint)


def event():
    flow, start = _Flow(), torch.randn(2)

    def loss():
        time, states = odeint_event(
            flow, start, torch.tensor(0.0), event_fn=lambda t, y: t - 0.5 + 0.1 * y.sum(), odeint_interface=odeint
        )
        return time + states[-1].square().sum()

    return loss, flow
