"""Virtual adversarial training: penalise the change of the prediction in its most sensitive direction. No labels.

N samples, each of shape (...) with D features in all, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit._tensors import exact_products
from toolkit.adversarial._untouched import untouched
from toolkit.adversarial.attacks._setting import check_logits, ordinary
from toolkit.adversarial.balls import Ball, Bounds, Norm, per_sample
from toolkit.adversarial.balls.box import check_inputs, draw, features, norm_of, remark_on_width, wide
from toolkit.adversarial.training._terms import (
    Model,
    clean_and_moved,
    divergence,
    divergence_from,
    logits_at,
    losses_and_slope,
    point_and_logits,
)
from toolkit.blocks import (
    block,
    carries_gradient,
    no_graph,
    ordinary_tensors,
    stop_gradient,
    stop_recording,
)

__all__ = [
    "VIRTUAL_CLEAN",
    "VIRTUAL_DIRECTION",
    "Direction",
    "power_direction",
    "vat_direction",
    "vat_loss",
    "virtual_divergence",
    "virtual_example",
]

VIRTUAL_CLEAN = block(
    "adversarial.virtual_clean",
    "The clean answer stands in for a label: the answer nearby moves towards it, and it does not come to meet it.",
)

VIRTUAL_DIRECTION = block(
    "adversarial.virtual_direction",
    "The virtual adversarial direction is where the answer is probed: the loss moves the model, not the probe.",
)

# Called as ``direction(model, x)``; returns directions of the shape of x.
Direction = Callable[[Model, Tensor], Tensor]


def vat_direction(model: Model, x: Tensor) -> Tensor:
    """Return the direction in which the model's prediction changes most at `x`, exactly.

    For small r, ``KL(p(x) || p(x + r)) = r^T H r / 2`` with ``H = J^T (diag(p) - p p^T) J``, where J is the Jacobian of
    the logits, (C, D). The direction is the eigenvector of the largest eigenvalue of H. H is (D, D), but its rank is
    less than C: with ``H = B^T B`` the eigenvector is ``B^T u``, where u is the eigenvector of the Gram matrix
    ``B B^T``, which is only (C - 1, C - 1). B takes C - 1 backward passes and no power iteration.

    The rows of B are gradients of the differences ``z_j - z_m`` to the most likely class m, weighted by ``sqrt(p_j)``
    relative to the largest weight, so nothing rounds to zero where the model is confident. The sign of an eigenvector
    is free; here the most likely class loses in its direction. ``torch.autocast`` has no effect.

    The model runs in evaluation mode and is restored. While the block `VIRTUAL_DIRECTION` is in place nothing is
    recorded; with it open, the eigenvector is differentiated (once, and where its eigenvalue is simple).

    Args:
        model: Inputs (N, ...) to logits (N, C), at least two classes; the samples do not depend on each other.
        x: (N, ...).

    Returns:
        Directions of Euclidean norm 1, (N, ...); zero for samples at which the model is flat.

    Raises:
        ValueError: If `x` is not a batch of samples, or the logits are not (N, C) with at least two classes.

    References:
        Miyato, Maeda, Koyama and Ishii, "Virtual adversarial training: a regularization method for supervised and
        semi-supervised learning", 2018, section 3.3: the dominant eigenvector, there by power iteration.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> vat_direction(lambda x: x @ weight.T, torch.ones(1, 2))
        tensor([[-0.6000, -0.8000]])
    """
    check_inputs("x", x)
    with ordinary_tensors(), stop_recording(VIRTUAL_DIRECTION), untouched(model), exact_products(x.device):
        recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            point, logits = point_and_logits(model, ordinary(x))
            differences = _differences(logits, point)
            sums = differences.sum(0).unbind()
        slopes = [torch.autograd.grad(s, point, retain_graph=True, create_graph=recorded)[0] for s in sums]
        jacobian = torch.stack(slopes, 1).flatten(2).to(wide(x))
        differences = differences.to(jacobian.dtype)
        factor = _factor(differences, jacobian)
        dominant = _dominant_eigenvector(factor @ factor.mT)
        towards = (dominant[:, None] @ factor).squeeze(1)
        with no_graph():
            downhill = (differences.softmax(1)[:, None] @ jacobian).squeeze(1)
            sign = torch.where((towards * downhill).sum(1, keepdim=True) < 0, -1.0, 1.0).to(towards.dtype)
        return _of_unit_length((sign * towards).view_as(point)).to(x.dtype)


def power_direction(
    model: Model, x: Tensor, *, iterations: int = 1, xi: float | None = None, generator: torch.Generator | None
) -> Tensor:
    """Return an approximation of `vat_direction` by power iteration, as in the paper.

    From a random unit vector, each iteration takes ``d <- grad_d KL(p(x) || p(x + xi d))``, normalised: a product with
    H up to terms of order xi, by one backward pass. It costs less than `vat_direction` if there are many classes; its
    error depends on the ratio of the second eigenvalue of H to the first.

    The model runs in evaluation mode, without ``torch.autocast``, whose rounding is larger than the probe, and is
    restored. While the block `VIRTUAL_DIRECTION` is in place nothing is recorded; with it open, the iterations are
    differentiated.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: (N, ...).
        iterations: Number of products with H.
        xi: Length of the probe. None: the third root of the roundoff, 5e-3 in single precision. Much smaller probes
            give only rounding error: the difference of two predictions is of size xi.
        generator: Draws the start. None: torch's global generator.

    Returns:
        Directions of Euclidean norm 1, (N, ...), with the sign that follows from the start; zero where the model is
        flat.

    Raises:
        ValueError: If `iterations` or `xi` is not positive, or `x` is not a batch of samples.

    References:
        Miyato et al., "Virtual adversarial training", 2018, section 3.3 and algorithm 1.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> power_direction(lambda x: x @ weight.T, torch.ones(1, 2), generator=torch.Generator().manual_seed(0)).abs()
        tensor([[0.6000, 0.8000]])
    """
    check_inputs("x", x)
    iterations, generator = integer("iterations", iterations), own_generator(generator)
    xi = torch.finfo(x.dtype).eps ** (1 / 3) if xi is None else xi
    xi = number("xi", xi, above=0)
    with ordinary_tensors(), stop_recording(VIRTUAL_DIRECTION), untouched(model), exact_products(x.device):
        x = ordinary(x)
        from_clean = divergence_from(logits_at(model, x))
        towards = _of_unit_length(draw(torch.randn, x, generator)).to(x.dtype)
        for _ in range(iterations):
            probe = x + xi * towards
            _, gradient = losses_and_slope(model, probe, from_clean)
            towards = _of_unit_length(gradient.to(wide(x))).to(x.dtype)
        return towards


def virtual_example(
    model: Model,
    x: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "l2",
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
    direction: Direction = vat_direction,
) -> Tensor:
    """Return `x`, moved by epsilon in the virtual adversarial direction and kept inside of ball and box.

    In L2 the displacement is the maximum of the quadratic form, if the box does not interfere. In Linf it is
    ``epsilon * sign(r)`` and in L1 the largest components of r, as in the steps of other attacks: the exact maximum is
    hard to find there.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: (N, ...), inside of `bounds`.
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        bounds: Least and greatest value of an input; None for no box.
        mask: True where an input may change, broadcast to `x`; None: everywhere.
        direction: Called as ``direction(model, x)``: `vat_direction`, or for example
            ``partial(power_direction, iterations=1, generator=generator)``.

    Returns:
        (N, ...), a constant while the block `VIRTUAL_DIRECTION` is in place.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`.
    """
    ball = Ball(epsilon, norm, bounds, mask).around(x)
    remark_on_width(epsilon, norm, bounds, x[:1].numel())
    towards = stop_gradient(direction(model, x), VIRTUAL_DIRECTION)
    return ball.settle(ball.step(x, towards, per_sample("epsilon", epsilon, x).to(x.dtype)))


def vat_loss(
    model: Model,
    x: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "l2",
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
    direction: Direction = vat_direction,
) -> Tensor:
    """Return the local distributional smoothness of virtual adversarial training: ``mean KL(p(x) || p(x + r))``.

    r is epsilon times the direction in which the prediction changes most (`virtual_example`). With both blocks in place
    the gradient is ``sum_j (p_j(x + r) - p_j(x)) grad z_j(x + r)``, averaged: neither the clean prediction
    (`VIRTUAL_CLEAN`) nor the direction (`VIRTUAL_DIRECTION`) is differentiated. The loss uses no labels: add it, for
    samples with and without labels, to a loss of the labelled samples.

    Clean inputs and moved ones share one forward pass, so that in training mode batch normalisation updates its
    running statistics once. The loss is computed in the current mode of the model. The arguments are those of
    `virtual_example`.

    Returns:
        A scalar, in nats per sample.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`.

    References:
        Miyato, Maeda, Koyama and Ishii, "Virtual adversarial training: a regularization method for supervised and
        semi-supervised learning", 2018, section 3.2.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> x = torch.tensor([[-0.3, 0.3]])
        >>> vat_loss(lambda x: x @ weight.T, x, epsilon=0.1, bounds=None)
        tensor(0.0310)
    """
    example = virtual_example(model, x, epsilon=epsilon, norm=norm, bounds=bounds, mask=mask, direction=direction)
    return virtual_divergence(*clean_and_moved(model, x, example)).mean()


def virtual_divergence(clean: Tensor, moved: Tensor) -> Tensor:
    """Return the divergence of the logits at x and x + r, with the clean side held by the block `VIRTUAL_CLEAN`."""
    return divergence(stop_gradient(clean, VIRTUAL_CLEAN), moved)


def _differences(logits: Tensor, x: Tensor) -> Tensor:
    """Return the logits of all classes but the most likely one, relative to it, (N, C - 1)."""
    check_logits(logits, len(x))
    most_likely = logits.argmax(1, keepdim=True)
    others = torch.arange(logits.shape[1] - 1, device=logits.device).expand(len(x), -1)
    others = others + (others >= most_likely)
    return logits.gather(1, others) - logits.gather(1, most_likely)


def _factor(differences: Tensor, jacobian: Tensor) -> Tensor:
    """Return B with ``B^T B`` proportional to H, (N, C - 1, D).

    With s the square roots of the probabilities of the others, ``diag(p) - p p^T = diag(s) (I - s s^T) diag(s)`` on the
    differences, and ``I - s s^T`` is the square of ``I - c s s^T`` with ``c = 1 / (1 + sqrt(p_m))``.
    """
    total = torch.logaddexp(differences.logsumexp(1, keepdim=True), torch.zeros_like(differences[:, :1]))
    roots = ((differences - total) / 2).exp()
    with no_graph():  # the direction does not depend on these factors, so neither does its derivative
        largest = differences.amax(1, keepdim=True)
        size = jacobian.abs().amax((1, 2), keepdim=True)
        size = size.masked_fill(size == 0, 1)
    rows = ((differences - largest) / 2).exp()[:, :, None] * (jacobian / size)
    correction = (roots / (1 + (-total / 2).exp()))[:, :, None] * (roots[:, None] @ rows)
    return rows - correction


def _dominant_eigenvector(gram: Tensor) -> Tensor:
    """Return the unit eigenvector of the largest eigenvalue, (N, C - 1).

    Differentiated by perturbation theory, ``du = (lambda - G)^+ dG u``: the derivative of all eigenvectors together
    does not exist where the small eigenvalues are equal, as they are where there are more classes than features.
    """
    with no_graph():
        values, vectors = torch.linalg.eigh(gram)
        dominant: Tensor = vectors[:, :, -1]
    if not carries_gradient(gram):
        return dominant
    with no_graph():
        gaps = values[:, -1:] - values[:, :-1]
        inverse = (1 / gaps).masked_fill(gaps == 0, 0)
        others = vectors[:, :, :-1]
        constant = gram.clone()
    change = ((gram - constant) @ dominant[:, :, None]).squeeze(2)
    along = inverse * (change[:, None] @ others).squeeze(1)
    turned: Tensor = dominant + (others @ along[:, :, None]).squeeze(2)
    return turned


def _of_unit_length(direction: Tensor) -> Tensor:
    """Return the direction of every sample with Euclidean norm 1; zero where it is zero."""
    with no_graph():
        largest = direction.abs().amax(features(direction), keepdim=True)
        largest = largest.masked_fill(largest == 0, torch.inf)
    scaled = direction / largest
    unit: Tensor = scaled / norm_of(scaled).clamp(min=0.5)  # the norm is at least 1, or 0
    return unit
