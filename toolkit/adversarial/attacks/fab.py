"""FAB: the nearest adversarial example by steps along the boundary that lean towards the clean input.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit.adversarial.attacks._hyperplane import inner
from toolkit.adversarial.attacks._minimal import MinimalOptions, Nearest, Search, minimal_search
from toolkit.adversarial.attacks.losses import Loss
from toolkit.adversarial.balls.box import by_row, column, wide
from toolkit.blocks import no_graph

__all__ = ["fab"]


def fab(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 10,
    restarts: int = 1,
    pull: float = 0.1,
    extrapolation: float = 1.05,
    retreat: float = 0.9,
    generator: torch.Generator | None = None,
    **options: Unpack[MinimalOptions],
) -> Tensor:
    r"""Move along the boundary towards its point nearest to the input: the fast adaptive boundary attack.

    At :math:`x_t` the boundary to a class is linearised. Two displacements onto this hyperplane are the shortest in the
    norm that stay in the box: d from :math:`x_t` and c from the clean input. The step goes to
    :math:`(1 - \alpha)(x_t + \eta d) + \alpha (x + \eta c)` with :math:`\alpha = |d| / (|d| + |c|)`, at most `pull`,
    and the `extrapolation` eta. An adversarial point is a candidate, and the next step starts between it and the clean
    input (`retreat`). The projections are exact, without bisection.

    Each other class is attacked separately, as in the targeted version that the authors recommend, with one backward
    pass per class and step. After each restart the nearest examples are moved onto the boundary as in `deepfool`; for a
    linear model they are then the nearest adversarial examples, to rounding.

    With one restart it is deterministic and rows do not depend on each other. While the block `EXAMPLE` is open, steps
    are differentiated; the choices of a candidate and of coordinates on the box are constant.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of steps per class and restart.
        restarts: Number of runs for each class. The first starts at `x`, the others at random in a ball of half the
            distance found so far. More restarts are never worse.
        pull: Largest alpha, from 0 to 1.
        extrapolation: Eta, at least 1.
        retreat: The part of an adversarial displacement at which the next step starts, from 0 to 1.
        generator: Draws the starts after the first, if any. None: torch's global generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `n_classes`.

    Returns:
        As in `deepfool`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, if `n_classes` is less than 2, or if `pull`, `extrapolation` or `retreat` is out of
            its range.

    References:
        Croce and Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack", 2020,
        algorithm 1.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> fab(lambda x: x @ weight.T - torch.tensor([3.5, 0.0]), torch.ones(1, 2), torch.tensor([0]))
        tensor([[0.5000, 0.5000]])
    """
    steps = integer("steps", steps)
    restarts = integer("restarts", restarts)
    pull = number("pull", pull, least=0, most=1)
    retreat = number("retreat", retreat, least=0, most=1)
    extrapolation = number("extrapolation", extrapolation, least=1, most=2)
    draws = own_generator(generator) if restarts > 1 else None
    with minimal_search(model, x, labels, default_norm="linf", **options) as search:
        nearest, logits = search.start()
        classes = search.rivals(logits)
        losses = [None] if classes is None else [_beats(rival) for rival in classes.unbind(1)]
        for restart in range(restarts):
            for loss in losses:
                example = search.attack.x
                if restart and draws is not None:
                    example = _start(search, nearest, draws)
                for _ in range(steps):
                    nearest, example = _step(search, nearest, example, loss, pull, extrapolation, retreat)
            # After every restart, so that more of them are never worse.
            nearest = search.bring_closer(nearest, classes)
        return search.finish(nearest)


def _beats(rival: Tensor) -> Loss:
    """Return the loss ``z_rival - z_label``."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.to(wide(logits))
        return (logits.gather(1, rival[:, None]) - logits.gather(1, labels.long()[:, None]))[:, 0]

    return loss


def _start(search: Search, nearest: Nearest, generator: torch.Generator) -> Tensor:
    """Draw from a ball of half the distance that is to be beaten."""
    with no_graph():
        tried = search.length(nearest.example.double() - search.attack.x.double())
        radius = torch.minimum(torch.where(nearest.is_found, nearest.distance, tried), search.radius) / 2
        return search.threat(radius).around(search.attack.x).sample(generator)


def _step(
    search: Search,
    nearest: Nearest,
    example: Tensor,
    loss: Loss | None,
    pull: float,
    extrapolation: float,
    retreat: float,
) -> tuple[Nearest, Tensor]:
    x = search.attack.x
    point, slope, logits, value = search.linearise(example, loss)
    start, clean = point.to(slope.dtype), x.to(slope.dtype)
    here = search.to_plane(point, slope, -value)
    there = search.to_plane(x, slope, search.margin(logits, slope, point) - value - inner(slope, clean - start))
    lengths = search.length(here), search.length(there)
    share = lengths[0] / (lengths[0] + lengths[1]).clamp(min=torch.finfo(torch.float64).tiny)
    share = column(share.clamp(max=pull).to(start.dtype), start)
    target = (1 - share) * (start + extrapolation * here) + share * (clean + extrapolation * there)
    moved = search.move(start, target - start)
    logits = search.attack.model(moved.clone())
    nearest = search.offer(nearest, moved, logits)
    with no_graph():
        crossed = search.attack.succeeds(logits)
    back = search.move(clean, retreat * (moved.to(clean.dtype) - clean))
    return nearest, by_row(crossed, back, moved)
