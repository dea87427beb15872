"""DeepFool: the nearest adversarial example by steps to the nearest boundary of the linearised model.

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
    r"""Step to the nearest boundary of the linearised model until the model errs.

    With ``g_k = grad (z_k - z_y)`` the boundary to class k is linearised as :math:`g_k \cdot d = z_y - z_k`. A step is
    the shortest d, in the norm and in the box, that reaches one of these hyperplanes; if the model is still right
    there, the next step starts from a little beyond. Without a box the step is the paper's. With a box it is exact too;
    clipping the paper's step would end short of the boundary. In L1 few coordinates change, as in SparseFool.

    At the end the example is moved onto the boundary, because the steps overshoot and the path bends: the displacement
    from `x` is shortened, and `x` is projected onto the boundary linearised at the example, as long as the result is
    nearer. For a linear model the result is the nearest adversarial example, to rounding.

    Deterministic, and rows do not depend on each other. While the block `EXAMPLE` is open, steps are differentiated;
    their choices of a class and of coordinates on the box are constant.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Largest number of steps. Rows that have succeeded take no more.
        overshoot: The part of a step by which the next starts beyond the boundary, at least 0.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `n_classes`.

    Returns:
        The nearest adversarial examples found, with the shape, dtype and device of `x`: `x` itself where the model errs
        already; where no adversarial example was found, the point whose logits came closest to an error.

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
