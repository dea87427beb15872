"""entmax 1.3: sparse probabilities and their losses."""

import torch
from entmax import entmax15, entmax15_loss, entmax_bisect, entmax_bisect_loss, sparsemax, sparsemax_loss
from torch import nn


def _of_logits(loss):
    layer, x, labels = nn.Linear(4, 5), torch.randn(3, 4), torch.tensor([0, 1, 2])
    return lambda: loss(layer(x), labels).mean(), layer


def _likelihood(probabilities):
    return _of_logits(lambda logits, labels: -(probabilities(logits) + 1e-3).log()[torch.arange(3), labels])


def bisection():
    layer, x, labels = nn.Linear(4, 5), torch.randn(3, 4), torch.tensor([0, 1, 2])
    alpha = torch.tensor(1.4, requires_grad=True)

    def loss():
        return -(entmax_bisect(layer(x), alpha) + 1e-3).log()[torch.arange(3), labels].mean()

    return loss, {**dict(layer.named_parameters()), "alpha": alpha}


def entmax():
    return _likelihood(lambda logits: entmax15(logits, dim=1))


def sparse_maximum():
    return _likelihood(lambda logits: sparsemax(logits, dim=1))


def entmax_loss():
    return _of_logits(entmax15_loss)


def sparse_maximum_loss():
    return _of_logits(sparsemax_loss)


def bisection_loss():
    return _of_logits(lambda logits, labels: entmax_bisect_loss(logits, labels, 1.5))
