"""torchsde 0.2.6: solutions of a stochastic differential equation."""

import torch
import torchsde
from torch import nn


class _Motion(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.drift, self.scale = nn.Linear(2, 2), nn.Linear(2, 2)

    def f(self, t, y):
        return self.drift(y).tanh()

    def g(self, t, y):
        return self.scale(y).sigmoid()

    def h(self, t, y):
        return -y


def _solved(solve, **options):
    motion, start, times = _Motion(), torch.randn(4, 2), torch.tensor([0.0, 0.5])

    def loss():
        noise = torchsde.BrownianInterval(0.0, 0.5, size=(4, 2), entropy=0)
        return solve(motion, start, times, bm=noise, dt=0.1, **options)[-1].square().mean()

    return loss, motion


def euler():
    return _solved(torchsde.sdeint, method="euler")


def milstein():
    return _solved(torchsde.sdeint, method="milstein")


def adaptive():
    return _solved(torchsde.sdeint, method="euler", adaptive=True, rtol=1e-2)


def adjoint():
    return _solved(torchsde.sdeint_adjoint, method="euler")
