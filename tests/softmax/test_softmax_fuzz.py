"""Seeded random inputs beside sums over pairs in extended precision: gradients and curvatures.

C classes; rows have shape (*, C), with the classes last. On x86 `LONG` has 11 more bits than float64.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from values import seeded

from toolkit.softmax import cross_entropy, log_softmax, logsumexp, softmax

LONG = np.longdouble
NAMES = ["softmax", "log_softmax", "logsumexp", "cross_entropy"]
# Ties, unsure rows, sure rows, and the whole range of the exponential.
SCALES = [0.0, 0.3, 1.0, 4.0, 15.0, 80.0]
OFFSETS = [0.0, 0.0, 100.0, -1e6]


def draw(seed: int) -> tuple[Tensor, int]:
    """Return an input in some order of memory, and the dimension of its classes."""
    choose = np.random.default_rng(seed)
    shape = [int(choose.integers(1, 8)) for _ in range(choose.integers(1, 4))]
    dim = int(choose.integers(len(shape)))
    shape[dim] = int(choose.integers(1, 40))
    x = choose.choice(SCALES) * torch.randn(shape, dtype=torch.float64, generator=seeded(seed)) + choose.choice(OFFSETS)
    if choose.random() < 0.3:
        x = x.round()
    if choose.random() < 0.3:
        x = x.masked_fill(torch.rand(shape, generator=seeded(seed)) < 0.1, float(x.min()) - 3)
    x = x.to(torch.float32 if choose.random() < 0.4 else torch.float64)
    how = choose.integers(3)
    if how == 1:
        x = x.movedim(dim, 0).contiguous().movedim(0, dim)
    elif how == 2:
        x = torch.stack([x, x], -1)[..., 1]
    return x, dim


def pairs(y: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums over j of y_j (a_i - a_j) and of their absolute values, (*, C)."""
    terms = y[..., None, :] * (a[..., :, None] - a[..., None, :])
    return terms.sum(-1), np.abs(terms).sum(-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", range(4))
def test_random_inputs_have_the_gradient_and_the_curvature_of_extended_precision(name, block):
    for seed in range(50 * block, 50 * (block + 1)):
        x, dim = draw(seed)
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        labels = torch.randint(x.shape[dim], x.select(dim, 0).shape, generator=seeded(seed))
        if name == "cross_entropy":
            found = cross_entropy(leaf, labels, dim, reduction="none").unsqueeze(dim)
        elif name == "logsumexp":
            found = logsumexp(leaf, dim, keepdim=True)
        else:
            found = {"softmax": softmax, "log_softmax": log_softmax}[name](leaf, dim)
        g = (seed % 3 * 50 + torch.randn(found.shape, dtype=torch.float64, generator=seeded(seed))).to(x.dtype)
        v = torch.randn(x.shape, dtype=torch.float64, generator=seeded(seed + 1)).to(x.dtype)
        (gradient,) = torch.autograd.grad(found, leaf, g, create_graph=True)
        (curvature,) = torch.autograd.grad(gradient, leaf, v, allow_unused=True)

        z, g, v = (tensor.movedim(dim, -1).double().numpy().astype(LONG) for tensor in (x, g, v))
        z = z - z.max(-1, keepdims=True)
        e = np.exp(z)
        y = e / e.sum(-1, keepdims=True)
        of_g, size_of_g = pairs(y, g if name == "softmax" else v)
        of_v, size_of_v = pairs(y, v)
        others = np.stack([np.delete(y, i, -1).sum(-1) for i in range(y.shape[-1])], -1)
        at_label = np.arange(y.shape[-1]) == labels.numpy()[..., None]
        if name == "softmax":
            first, scale = y * of_g, y * size_of_g
            second = y * (of_g * of_v - (y * of_g * of_v).sum(-1, keepdims=True))
            size = y * (size_of_g * size_of_v + (y * size_of_g * size_of_v).sum(-1, keepdims=True))
        elif name == "log_softmax":
            total, most = g.sum(-1, keepdims=True), np.abs(g).sum(-1, keepdims=True)
            first = g * others - y * np.stack([np.delete(g, i, -1).sum(-1) for i in range(y.shape[-1])], -1)
            scale = np.abs(g) * others + y * (most - np.abs(g))
            of_others = (y * np.abs(v)).sum(-1, keepdims=True) - y * np.abs(v)
            second, size = -y * of_v * total, y * (others * np.abs(v) + of_others) * most
        else:
            first = g * np.where(at_label & (name == "cross_entropy"), -others, y)
            scale, second = np.abs(first), g * y * of_v
            # The curvature of cross entropy is a sum of two parts, those with the label's tangent and without.
            of_label = np.abs(np.where(at_label, v, 0).sum(-1, keepdims=True)) if name == "cross_entropy" else 0
            size = np.abs(g) * y * (size_of_v + of_label)
        # One roundoff for each nat between logits and for each term of a sum, and some tens for the other operations.
        # A curvature is made of six products; torch's kernel of log-softmax loses up to 1 / (1 - y) = 16 times as much.
        roundoffs = torch.finfo(x.dtype).eps / 2 * (60 + y.shape[-1] - z.min(-1, keepdims=True))
        tiny = 1000 * torch.finfo(x.dtype).smallest_normal
        for what, tensor, expected, condition, times in (
            ("gradient", gradient, first, scale, 1),
            ("curvature", curvature, second, size, 16 if name == "log_softmax" else 6),
        ):
            if tensor is None:  # an unused leaf: the second derivative is zero
                assert (expected == 0).all(), (seed, what)
                continue
            error = np.abs(tensor.detach().movedim(dim, -1).double().numpy() - expected)
            assert (error <= times * roundoffs * condition + tiny).all(), (seed, what)
