r"""Entropic optimal transport whose dual potentials are held constant.

The potentials are optimal, so the derivative of the dual value through them is zero (envelope theorem), and the block
saves the backward pass through all iterations. That holds for first derivatives at convergence. After few iterations
the error of the blocked gradient is of first order in the error of the potentials, that of the open gradient of second
order. Second derivatives are wrong with the block at any number of iterations: the potentials move with the points.

N and M points of weight a and b; ``*`` leading dimensions.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._tensors import floating, is_visible, largest_exponent, wide
from toolkit.blocks import block, stop_recording

__all__ = ["POTENTIALS", "sinkhorn_loss", "sinkhorn_potentials"]

POTENTIALS = block(
    "weighting.potentials",
    "The potentials are optimal for the cost, so the first derivative through them is zero; holding them saves the "
    "backward pass through the iterations.",
)

# Of a sum of weights: more than the rounding of bfloat16 and the steps of finite differences.
SLACK = 0.01


def sinkhorn_loss(
    cost: Tensor, a: Tensor | None = None, b: Tensor | None = None, *, epsilon: float, iterations: int = 100
) -> Tensor:
    r"""Return the value of entropic optimal transport, :math:`\min_P \langle P, M \rangle + \epsilon KL(P, a b^T)`.

    .. math:: \langle a, f \rangle + \langle b, g \rangle
        - \epsilon \Bigl(\sum_{ij} a_i b_j e^{(f_i + g_j - M_{ij}) / \epsilon} - 1\Bigr)

    with the potentials f, g of `sinkhorn_potentials`. With the block `POTENTIALS` in place the gradient with respect to
    the cost is the plan :math:`P_{ij} = a_i b_j e^{(f_i + g_j - M_{ij}) / \epsilon}`, and with respect to a it is
    :math:`f - \epsilon` at convergence. Opened, it is the derivative of the value after these iterations, which
    converges to the same. The blocked Hessian is not that of the value.

    Args:
        cost: M, (\*, N, M).
        a: Weights that sum to 1, (\*, N). None: uniform. With the block open the gradient with respect to a weight of 0
            is NaN.
        b: Likewise, (\*, M).
        epsilon: Strength of the entropy, in the units of the cost.
        iterations: Updates of each potential.

    Returns:
        (\*), in the units of the cost; half precision is computed in float32.

    Raises:
        ValueError: If the shapes do not fit, weights on the processor do not sum to 1 within 0.01, `epsilon` is not
            positive, or `iterations` is not a positive integer.

    References:
        Cuturi, "Sinkhorn distances: lightspeed computation of optimal transport", 2013. Feydy, Séjourné, Vialard,
        Amari, Trouvé and Peyré, "Interpolating between optimal transport and MMD using Sinkhorn divergences", 2019.

    Example:
        >>> x, y = torch.tensor([[0.1], [0.9], [0.4]]), torch.tensor([[0.0], [1.2]])
        >>> sinkhorn_loss((x - y.T).square() / 2, epsilon=0.3)
        tensor(0.1841)
    """
    epsilon, cost, a, b = _checked(cost, a, b, epsilon)
    with stop_recording(POTENTIALS):
        f, g = _potentials(cost, a, b, epsilon, integer("iterations", iterations))
    # A density can overflow only between two points without weight, where the plan is 0.
    log_density = ((f[..., :, None] + g[..., None, :] - cost) / epsilon).clamp(max=largest_exponent(cost.dtype))
    plan = a[..., :, None] * b[..., None, :] * log_density.exp()
    return (a * f).sum(-1) + (b * g).sum(-1) - epsilon * (plan.sum((-2, -1)) - 1)


def sinkhorn_potentials(
    cost: Tensor, a: Tensor | None = None, b: Tensor | None = None, *, epsilon: float, iterations: int = 100
) -> tuple[Tensor, Tensor]:
    r"""Return the dual potentials of entropic optimal transport, by updates in the log domain from g = 0.

    .. math:: f_i = -\epsilon \log \sum_j b_j e^{(g_j - M_{ij}) / \epsilon}, \qquad
        g_j = -\epsilon \log \sum_i a_i e^{(f_i - M_{ij}) / \epsilon}

    Nothing is held constant here; `sinkhorn_loss` holds the potentials.

    Args:
        cost: As in `sinkhorn_loss`, like all arguments below.
        a: (\*, N), or None.
        b: (\*, M), or None.
        epsilon: Strength of the entropy.
        iterations: Updates of each potential.

    Returns:
        f (\*, N) and g (\*, M), in the units of the cost.

    Raises:
        ValueError: As in `sinkhorn_loss`.

    References:
        As `sinkhorn_loss`.

    Example:
        >>> sinkhorn_potentials(torch.tensor([[0.0, 1.0], [3.0, 0.0]]), epsilon=1.0)
        (tensor([0.0308, 1.0308]), tensor([ 0.5354, -0.4646]))
    """
    epsilon, cost, a, b = _checked(cost, a, b, epsilon)
    return _potentials(cost, a, b, epsilon, integer("iterations", iterations))


def _potentials(cost: Tensor, a: Tensor, b: Tensor, epsilon: float, iterations: int) -> tuple[Tensor, Tensor]:
    kernel = -cost / epsilon
    to_rows, to_columns = kernel + b.log()[..., None, :], kernel + a.log()[..., :, None]
    g = torch.zeros_like(cost[..., 0, :])
    for _ in range(iterations):
        f = -torch.logsumexp(to_rows + g[..., None, :], -1)
        g = -torch.logsumexp(to_columns + f[..., :, None], -2)
    return epsilon * f, epsilon * g


def _checked(cost: Tensor, a: Tensor | None, b: Tensor | None, epsilon: float) -> tuple[float, Tensor, Tensor, Tensor]:
    """Return the strength, the cost and both weights."""
    epsilon = number("epsilon", epsilon, above=0)
    floating(cost=cost)
    if cost.ndim < 2 or 0 in cost.shape[-2:]:
        raise ValueError(f"`cost` should have shape (..., N, M) with N, M > 0. Found {tuple(cost.shape)}.")
    cost, found = wide(cost), []
    for name, weights, n in (("a", a, cost.shape[-2]), ("b", b, cost.shape[-1])):
        if weights is not None:
            floating(**{name: weights})
        if weights is not None and weights.shape[-1:] != (n,):
            raise ValueError(f"`{name}` should have {n} entries, as `cost` has. Found {tuple(weights.shape)}.")
        if weights is not None and is_visible(weights) and ((weights.sum(-1) - 1).abs() > SLACK).any():
            raise ValueError(f"`{name}` should sum to 1. Found {weights.sum(-1).tolist()}.")
        found.append(cost.new_full((n,), 1 / n) if weights is None else wide(weights))
    leading = [tuple(each.shape) for each in (cost[..., 0, 0], found[0][..., 0], found[1][..., 0])]
    with suppress(RuntimeError):
        torch.broadcast_shapes(*leading)
        return epsilon, cost, found[0], found[1]
    raise ValueError(f"`cost`, `a` and `b` should have leading dimensions that broadcast. Found {leading}.")
