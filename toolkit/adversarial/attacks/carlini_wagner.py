"""Carlini and Wagner's attack: distance plus a penalty for not being adversarial, minimised by Adam.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit.adversarial.attacks._minimal import MinimalOptions, Nearest, Search, check_only_l2, minimal_search
from toolkit.adversarial.balls.box import column, sum_of
from toolkit.blocks import no_graph

__all__ = ["carlini_wagner"]


def carlini_wagner(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 50,
    searches: int = 4,
    learning_rate: float = 0.05,
    **options: Unpack[MinimalOptions],
) -> Tensor:
    r"""Minimise the squared distance plus a weighted penalty, and search for the least weight that suffices.

    :math:`\min_{x'} |x' - x|_2^2 + c \max(z_y - \max_{j \ne y} z_j, 0)` at `x'`, by Adam with a rate that falls
    linearly to zero. Clipping keeps the point in the box; the paper's tanh cannot reach the faces of the box. The
    weight c is searched for every sample; a value succeeds if its descent meets an adversarial point. It is multiplied
    by ten until a value succeeds, or halved until a value fails; then c is the geometric mean of the last success and
    the last failure. The first c is twice the smallest that suffices for the model linearised at `x`, so nothing
    depends on the scale of the logits. A sample whose descent makes no progress for a third of its steps waits for the
    next c.

    The nearest adversarial point of all steps and searches is kept, and moved onto the boundary at the end, as in
    `deepfool`. Deterministic, and rows do not depend on each other. While the block `EXAMPLE` is open, steps are
    differentiated; c and the choice of the nearest point are constant.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Largest number of Adam's steps per search.
        searches: Number of weights c that are tried for every sample.
        learning_rate: Adam's first rate: about the change of a coordinate per step, in the units of `x`.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `n_classes`.

    Returns:
        As in `deepfool`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, if `norm` is not ``"l2"``, `n_classes` is less than 2, `searches` is not positive, or
            `learning_rate` is not positive and finite.

    References:
        Carlini and Wagner, "Towards evaluating the robustness of neural networks", 2017, section V, with their loss
        f6; Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> carlini_wagner(lambda x: x @ weight.T - torch.tensor([2.0, 0.0]), torch.ones(1, 2), torch.tensor([0]))
        tensor([[0.4000, 0.2000]])
    """
    steps = integer("steps", steps)
    searches = integer("searches", searches)
    learning_rate = number("learning_rate", learning_rate, above=0)
    with minimal_search(model, x, labels, **options) as search:
        check_only_l2("carlini_wagner", search.norm)
        nearest, logits = search.start()
        classes = search.rivals(logits)
        weight = _first_weight(search)
        least, most = torch.zeros_like(weight), torch.full_like(weight, torch.inf)
        pending = nearest.distance.isinf() | (nearest.distance > 0)
        index = pending.nonzero()[:, 0]
        for _ in range(searches if len(index) else 0):
            found, some = _descend(
                search.rows(index), nearest.rows(index), weight[index], steps=steps, learning_rate=learning_rate
            )
            nearest = nearest.put(index, some)
            success = torch.zeros_like(pending).index_copy(0, index, found)
            least, most = torch.where(success, least, weight), torch.where(success, weight, most)
            between = (least > 0) & most.isfinite()
            middle = torch.where(between, least * most, 1).sqrt()
            weight = torch.where(between, middle, torch.where(most.isinf(), 10 * weight, most / 2))
        return search.finish(search.bring_closer(nearest, classes))


def _first_weight(search: Search) -> Tensor:
    """Return twice the c at which the minimum crosses the boundary of the linearised model, (N,)."""
    _, slope, _, value = search.linearise(search.attack.x)
    squared = sum_of(slope.square()).flatten()
    needed = 2 * (-value).clamp(min=0) / squared.masked_fill(squared == 0, 1)
    return 2 * needed.masked_fill(needed == 0, 1)


def _descend(
    search: Search, nearest: Nearest, weight: Tensor, *, steps: int, learning_rate: float
) -> tuple[Tensor, Nearest]:
    """Return whether a descent has met an adversarial point, (N,), and the record after it."""
    found = torch.zeros_like(nearest.is_found)
    index = torch.arange(len(weight), device=weight.device)
    part, record = search, nearest
    x = search.attack.x.to(weight.dtype)
    example, mean, square = x, torch.zeros_like(x), torch.zeros_like(x)
    least = torch.full_like(weight, torch.inf)  # value of the objective
    waited = torch.zeros_like(index)
    for step in range(steps):
        point, slope, logits, value = part.linearise(example.to(search.attack.x.dtype))
        record = part.offer(record, point, logits)
        clean = part.attack.x.to(weight.dtype)
        with no_graph():
            found = found.index_put((index,), found[index] | part.attack.succeeds(logits))
            objective = sum_of((point - clean).square()).flatten() + weight * (-value).clamp(min=0)
            better = objective < 0.999 * least
            least, waited = torch.minimum(objective, least), torch.where(better, 0, waited + 1)
        gradient = 2 * (point - clean) - column(torch.where(value > 0, 0, weight), slope) * slope
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient.square()
        first, second = 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)
        rate = learning_rate * (1 - step / steps)
        # Below the root: its derivative at zero is infinite.
        change = -rate * (mean / first) / (square / second + 1e-16).sqrt()
        ball = part.attack.ball
        example = torch.clamp(example + change, ball.lower.to(x.dtype), ball.upper.to(x.dtype))
        keep = waited < max(10, steps // 3)
        if not keep.all():
            nearest = nearest.put(index, record)
            index, record, part = index[keep], record.rows(keep), part.rows(keep)
            example, mean, square = example[keep], mean[keep], square[keep]
            weight, least, waited = weight[keep], least[keep], waited[keep]
            if not len(index):
                return found, nearest
    return found, nearest.put(index, part.offer(record, example.to(search.attack.x.dtype)))
