"""Square: a black-box attack that changes one random square at a time and keeps the changes that help.

N samples of C channels, H rows and W columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit.adversarial.attacks._hyperplane import ORDER, reach_together
from toolkit.adversarial.attacks._setting import AttackOptions, Setting, setting
from toolkit.adversarial.balls import Norm, RoundRegion
from toolkit.adversarial.balls._rounding import laid_out_as
from toolkit.adversarial.balls.box import by_row, norm_of, wide

__all__ = ["square"]

# The share of the changed pixels is halved at these queries out of 10 000 (Andriushchenko et al. 2020, section 5.1).
_HALVED_AT = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


def square(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    queries: int = 5000,
    proportion: float = 0.8,
    generator: torch.Generator | None,
    **options: Unpack[AttackOptions],
) -> Tensor:
    r"""Search at random, by squares, from the logits alone: a missing or masked gradient does not matter.

    In Linf every pixel of a square is set to the same corner of the ball, drawn for each channel; the start is stripes
    one pixel wide. In L2 and L1 the perturbation is a grid of bumps at first, which fall off from their centres; a step
    moves the length inside of one random window to another window, as a new bump. A change is kept if it lowers
    ``z_y - max_{j != y} z_j`` (with targets: if it raises the target's lead). The windows cover `proportion` of the
    image at first, and less and less of it. A sample is dropped from the batch as soon as it is adversarial.

    Inputs (N, C, H, W) are images; (N, D) is an image of one channel if D is a square number, else a row of D pixels
    whose squares are segments; (N, C, L) is such a row with C channels. Inputs of any other shape are taken as one row.

    All random numbers are drawn for all samples, needed or not, so the result for a sample does not depend on how soon
    the others are broken. While the block `EXAMPLE` is open, an example moves with its `x` where it is not on the box;
    the search itself has no derivative.

    Args:
        model: Inputs (N, ...) to logits (N, C). It need not be differentiable.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        queries: Largest number of evaluations of the model per sample, the clean input included.
        proportion: Share of the pixels that is changed at first, above 0 and at most 1.
        generator: Draws windows and signs. None: torch's global generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`, inside of ball and box in exact arithmetic;
        the values of `x` where the model errs already.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, if `queries` is not positive, or `proportion` is not above 0 and at most 1.

    References:
        Andriushchenko, Croce, Flammarion and Hein, "Square attack: a query-efficient black-box adversarial attack via
        random search", 2020, algorithms 1 to 3; L1 as in Croce and Hein, "Mind the box: L1-APGD for sparse
        adversarial attacks on image classifiers", 2021.

    Example:
        >>> decide = lambda x: torch.stack([x.sum(1).round(), torch.full((len(x),), 2.5)], 1)  # no derivative
        >>> generator = torch.Generator().manual_seed(0)
        >>> example = square(decide, torch.ones(1, 4), torch.tensor([0]), epsilon=0.5, generator=generator)
        >>> decide(example).argmax(1)
        tensor([1])
    """
    queries, generator = integer("queries", queries), own_generator(generator)
    proportion = number("proportion", proportion, above=0, most=1)
    with setting(model, x, labels, **options) as attack:
        norm, shape = attack.threat.norm, _image_shape(attack.x)
        example, logits = attack.x.clone(), attack.logits(attack.x)
        best, done = attack.strength(logits), attack.succeeds(logits)
        for query in range(1, queries):
            if done.all():
                break
            # For all samples, also those that are done.
            window = _window(proportion, query, queries, shape, norm)
            drawn = _draw(attack.x, shape, generator, at_start=query == 1)
            alive = (~done).nonzero()[:, 0]
            part, here = attack.rows(alive), example[alive]
            if query == 1:
                tried = _start(part, drawn[alive], shape, norm)
            else:
                tried = _STEPS[norm](part, here, drawn[alive], shape, window)
            tried = part.ball.settle(tried)
            logits = part.logits(tried)
            value, success = part.strength(logits), part.succeeds(logits)
            # The start is kept in any case: the clean input is not on the sphere that is searched.
            better = success | (value > best[alive]) | (query == 1)
            example = example.index_copy(0, alive, by_row(better, tried, here))
            best = best.index_copy(0, alive, torch.where(better, value, best[alive]))
            done = done.index_copy(0, alive, success)
        return laid_out_as(attack.x, example)


def _image_shape(x: Tensor) -> tuple[int, int, int]:
    """Return channels, rows and columns."""
    size = x[0].numel() if len(x) else max(1, math.prod(x.shape[1:]))
    if x.dim() == 4:
        return x.shape[1], x.shape[2], x.shape[3]
    if x.dim() == 3:
        return x.shape[1], 1, x.shape[2]
    side = math.isqrt(size)
    return (1, side, side) if x.dim() == 2 and side * side == size else (1, 1, size)


def _window(proportion: float, query: int, queries: int, shape: tuple[int, int, int], norm: Norm) -> tuple[int, int]:
    """Return rows and columns of the windows at a query."""
    _, height, width = shape
    share = proportion / 2 ** sum(10_000 * query > at * queries for at in _HALVED_AT)
    # Bumps have centres, so they are odd. In L1, where few large changes are best, one may be a single pixel.
    least = 3 if norm == "l2" else 1
    area = share * height * width
    side = max(least, round(area if height == 1 else math.sqrt(area)))
    if norm != "linf":
        side += 1 - side % 2
    return min(side, height), min(side, width)


def _draw(x: Tensor, shape: tuple[int, int, int], generator: torch.Generator, *, at_start: bool) -> Tensor:
    """Return uniform numbers: (N, C, H, W) for the start; (N, 5 + C) for a step's two positions, turn and signs."""
    size, dtype = (shape, torch.float32) if at_start else ((5 + shape[0],), torch.float64)
    return torch.rand(len(x), *size, generator=generator, dtype=dtype, device=generator.device).to(x.device)


def _start(part: Setting, drawn: Tensor, shape: tuple[int, int, int], norm: Norm) -> Tensor:
    """Return stripes one pixel wide in Linf, and a grid of bumps of random sign in L2 and L1."""
    x = part.x
    if norm == "linf":
        stripes = (drawn[:, :, :1] < 0.5).expand(-1, *shape).reshape(x.shape)
        return torch.where(stripes, part.ball.upper, part.ball.lower)
    _, height, width = shape
    rows, columns = max(1, height // 5), max(1, width // 5)
    tiles = -(-height // rows), -(-width // columns)
    bumps = _bump(rows, columns, x)[0].repeat(*tiles)[:height, :width]
    signs = drawn[:, :, : tiles[0], : tiles[1]].sub(0.5).sign()
    signs = signs.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :height, :width]
    return _onto_sphere(part, bumps * signs.to(bumps.dtype), norm)


def _corner(part: Setting, here: Tensor, drawn: Tensor, shape: tuple[int, int, int], window: tuple[int, int]) -> Tensor:
    """Return the examples with a square of every channel on one corner of the ball, another one than now."""
    inside, _ = _place(drawn[:, :2], shape, window)
    up = (drawn[:, 5:] < 0.5)[:, :, None, None].expand(-1, *shape).reshape(here.shape)
    square = inside[:, None].expand(-1, *shape).reshape(here.shape)
    lower, upper = part.ball.lower, part.ball.upper
    tried = torch.where(square, torch.where(up, upper, lower), here)
    other = torch.where(square, torch.where(up, lower, upper), here)
    same = (tried == here).flatten(1).all(1)
    return by_row(same, other, tried)


def _moved_bump(
    part: Setting, here: Tensor, drawn: Tensor, shape: tuple[int, int, int], window: tuple[int, int], norm: Norm
) -> Tensor:
    """Return the examples with the length in two windows made into a bump in the first."""
    order, dtype = ORDER[norm], wide(here)
    offset = (here.to(dtype) - part.x.to(dtype)).view(-1, *shape)
    inside, places = _place(drawn[:, :2], shape, window)
    emptied, _ = _place(drawn[:, 2:4], shape, window)
    inside, emptied = inside[:, None], emptied[:, None]
    bumps = _bump(*window, here)
    turned = (drawn[:, 4] < 0.5).long() * (len(bumps) - 1)
    bump = bumps[turned[:, None, None], places[0], places[1]]
    signs = drawn[:, 5:].sub(0.5).sign().to(dtype)[:, :, None, None]
    powers = offset.abs() ** order
    assert isinstance(part.ball, RoundRegion)
    radius = part.ball.radius.to(dtype).view(-1, 1, 1, 1)
    left = (radius**order - powers.sum((1, 2, 3), keepdim=True)).clamp(min=0) / shape[0]
    budget = (left + (powers * (inside | emptied)).sum((2, 3), keepdim=True)) ** (1 / order)
    old = offset * inside
    length = (powers * inside).sum((1, 2, 3), keepdim=True) ** (1 / order)
    new = bump[:, None] * signs * inside + torch.where(length > 0, old / torch.where(length > 0, length, 1), 0)
    size = (new.abs() ** order).sum((2, 3), keepdim=True) ** (1 / order)
    new = budget * new / torch.where(size > 0, size, 1)
    return _onto_sphere(part, torch.where(inside, new, offset * ~emptied), norm)


def _onto_sphere(part: Setting, offset: Tensor, norm: Norm) -> Tensor:
    """Return ``x + clip(s * offset)`` on the sphere, or the point of the box where it does not reach the sphere."""
    ball = part.ball
    assert isinstance(ball, RoundRegion)
    offset = offset.view_as(part.x).to(ball.down.dtype)
    if norm == "l2":
        size = norm_of(offset)
        far = 1e3 * ball.radius.to(offset.dtype) / size.masked_fill(size == 0, 1)  # the ball's projection only shrinks
        return ball.project((part.x.to(offset.dtype) + far * offset).to(part.x.dtype))
    room = torch.where(offset > 0, ball.up, -ball.down)
    length = reach_together(offset.abs(), room, ball.radius.to(offset.dtype))
    moved = part.x.to(offset.dtype) + length * offset.sign()
    return torch.clamp(moved.to(part.x.dtype), ball.lower, ball.upper)


def _place(
    position: Tensor, shape: tuple[int, int, int], window: tuple[int, int]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return where a window lies, (N, H, W) Boolean, and for every pixel its row and column in the window."""
    inside, places = [], []
    for axis in (0, 1):
        size, side = shape[1 + axis], window[axis]
        first = (position[:, axis] * (size - side + 1)).long().clamp(max=size - side)
        place = torch.arange(size, device=position.device) - first[:, None]
        inside.append((place >= 0) & (place < side))
        places.append(place.clamp(0, side - 1))
    return inside[0][:, :, None] & inside[1][:, None, :], (places[0][:, :, None], places[1][:, None, :])


def _bump(height: int, width: int, like: Tensor) -> Tensor:
    """Return two bumps of opposite sign, one beside the other, upright and turned, (2 or 1, H, W).

    Each falls off from its centre as ``sum_{k >= q} 1 / (k + 1)^2`` with the distance q, the larger one of that in rows
    and that in columns.
    """
    if height == 1:
        pair = torch.cat([_half(1, width // 2, like), -_half(1, width - width // 2, like)], 1)
        return pair[None]
    pair = torch.cat([_half(height // 2, width, like), -_half(height - height // 2, width, like)], 0)
    return torch.stack([pair, pair.T]) if height == width else pair[None]


def _half(height: int, width: int, like: Tensor) -> Tensor:
    rows, columns = (torch.arange(size, device=like.device) - size // 2 for size in (height, width))
    distance = torch.maximum(rows.abs()[:, None], columns.abs()[None, :])
    n_rings = max(height, width) // 2 + 1
    rings = 1 / torch.arange(1, n_rings + 1, device=like.device, dtype=wide(like)) ** 2
    return rings.flip(0).cumsum(0).flip(0)[distance.clamp(max=n_rings - 1)]


_STEPS: dict[Norm, Callable[..., Tensor]] = {
    "linf": _corner,
    "l2": partial(_moved_bump, norm="l2"),
    "l1": partial(_moved_bump, norm="l1"),
}
