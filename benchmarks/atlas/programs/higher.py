"""higher 0.2.1: meta-learning through the steps of an optimizer."""

import higher
import torch
from torch import nn


def _adapted(optimizer=torch.optim.SGD, **options):
    net, mse = nn.Linear(4, 1), nn.functional.mse_loss
    (x, y), (x_test, y_test) = ((torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2))
    inner = optimizer(net.parameters(), 0.1)

    def loss():
        with higher.innerloop_ctx(net, inner, copy_initial_weights=False, **options) as (adapted, steps):
            for _ in range(2):
                steps.step(mse(adapted(x), y))
            return mse(adapted(x_test), y_test)

    return loss, net


def maml():
    return _adapted()


def maml_by_adam():
    return _adapted(torch.optim.Adam)


def first_order():
    return _adapted(track_higher_grads=False)
