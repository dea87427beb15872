"""DeepFool: the nearest adversarial example by walking to the nearest boundary of the linearised model.

N samples, each of shape (...), C classes, K of them considered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from torch import Tensor

from toolkit._checks import integer, number
from toolkit.adversarial.attacks._minimal import MinimalOptions, Nearest, Search, minimal_search

__all__ = ["deepfool"]


def deepfool(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 50,
    overshoot: float = 0.02,
    **options: Unpack[MinimalOptions],
) -> Tensor:
    r"""Walk to the nearest boundary of the linearised model until it is crossed.

    With ``g_k = grad (z_k - z_y)`` the boundary to class k is linearised as :math:`g_k \cdot d = z_y - z_k`. A step is
    the shortest d, in the norm and in the box, that reaches one of these hyperplanes; where the model has not changed
    its mind there, the next step starts from a little beyond. Without a box the step is the paper's; with one it is
    exact too, where clipping it would end on the near side. In L1 few coordinates change, as in SparseFool.

    In the end the example is brought onto the boundary (the walk overshoots and bends): the way from `x` is shortened,
    and `x` projected onto the boundary as linearised at the example, as long as that is nearer. For a linear model the
    result is the nearest adversarial example, to rounding.

    Deterministic, and rows do not depend on each other. While the block `EXAMPLE` is open, steps are differentiated;
    which class and which coordinates on the box they choose is constant.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's answers at `x`.
        steps: Largest number of steps. Rows that are done are dropped.
        overshoot: The part of a step by which the next starts beyond the boundary, at least 0.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `n_classes`.

    Returns:
        The nearest adversarial examples found, with the shape, dtype and device of `x`: `x` itself where the model errs
        already, and the point that came closest to an error in logits where no adversarial example was found.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, if `n_classes` is less than 2, or if `overshoot` is negative or not finite.

    References:
        Moosavi-Dezfooli, Fawzi and Frossard, "DeepFool: a simple and accurate method to fool deep neural networks",
        2016, algorithm 2; in L1 after Modas, Moosavi-Dezfooli and Frossard, "SparseFool: a few pixels make a big
        difference", 2019.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> deepfool(lambda x: x @ weight.T - torch.tensor([2.0, 0.0]), torch.ones(1, 2), torch.tensor([0]))
        tensor([[0.4000, 0.2000]])
    """
    steps = integer("steps", steps)
    overshoot = number("overshoot", overshoot, least=0)
    with minimal_search(model, x, labels, **options) as search:
        nearest, logits = search.start()
        classes = search.rivals(logits)
        example = search.attack.x
        for _ in range(steps):
            index = (~nearest.is_found).nonzero()[:, 0]
            if not len(index):
                break
            here = None if classes is None else classes[index]
            some, moved = _step(search.rows(index), nearest.rows(index), example[index], here, overshoot)
            nearest, example = nearest.put(index, some), example.index_copy(0, index, moved)
        nearest = search.offer(nearest, example)
        return search.finish(search.bring_closer(nearest))


def _step(
    search: Search, nearest: Nearest, example: Tensor, classes: Tensor | None, overshoot: float
) -> tuple[Nearest, Tensor]:
    """Return the record after a step, and the point beyond the boundary to go on from."""
    planes = search.planes(example, classes)
    nearest = search.offer(nearest, planes.point, planes.logits)
    move, slope, gain = search.to_nearest_plane(planes.point, planes)
    nearest = search.offer(nearest, search.move(planes.point, move))
    return nearest, search.move(planes.point, search.to_plane(planes.point, slope, (1 + overshoot) * gain))
