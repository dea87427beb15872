"""Attacks that change few coordinates or pixels: the saliency map, SparseFool, and one pixel.

N samples, each of shape (...) with D features in all, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit.adversarial.attacks._hyperplane import inner, shortest_move
from toolkit.adversarial.attacks._setting import Pick, Setting, setting
from toolkit.adversarial.attacks.deepfool import deepfool
from toolkit.adversarial.attacks.losses import difference_loss, without_label
from toolkit.adversarial.balls import Bounds
from toolkit.blocks import no_graph

__all__ = ["SparseOptions", "jsma", "one_pixel", "sparsefool"]

_PAIRS_AT_ONCE = 10_000_000


class SparseOptions(TypedDict, total=False):
    """The keywords of attacks that count the coordinates they change.

    Attributes:
        bounds: Least and greatest value of an input, each a number or broadcast to the inputs. Default: ``(0, 1)``.
        mask: True where an input may change, broadcast to the inputs. None: everywhere.
        targets: (N,); the classes to move towards. None moves away from the labels.
        logits: As in `CommonOptions`.
    """

    bounds: Bounds
    mask: Tensor | None
    targets: Tensor | None
    logits: Pick | None


def jsma(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    share: float = 0.1,
    theta: float = 1.0,
    **options: Unpack[SparseOptions],
) -> Tensor:
    """Raise the two coordinates that help the target class most and the other classes least, until it wins.

    With ``a = d z_t / d x`` and ``b = d sum_{j != t} z_j / d x``, a step moves by `theta` the pair (i, k) with the
    greatest ``-(a_i + a_k) (b_i + b_k)`` among those with ``a_i + a_k > 0 > b_i + b_k``. Coordinates at the face of the
    box are left out. Each step needs memory for all pairs of coordinates of some samples.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        share: The largest share of the coordinates to change, above 0 and at most 1; gamma of the paper.
        theta: The change of a coordinate in a step, clipped to the box; negative to lower coordinates.
        **options: `bounds`, `mask`, `targets`, `logits`. Without `targets` the target is the likeliest class other than
            the label.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`; the values of `x` where the attack has succeeded
        already.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `share` is out of its range or allows fewer than two coordinates, or `theta` is
            0.

    References:
        Papernot, McDaniel, Jha, Fredrikson, Celik and Swami, "The limitations of deep learning in adversarial
        settings", 2016, algorithm 3.

    Example:
        >>> weight = torch.tensor([[-1.0, -4.0, -2.0, 9.0], [1.0, 4.0, 2.0, -9.0]])
        >>> jsma(lambda x: x @ weight.T, torch.full((1, 4), 0.5), share=0.5)
        tensor([[0.5000, 1.0000, 1.0000, 0.5000]])
    """
    share, theta = number("share", share, above=0, most=1), number("theta", theta)
    if theta == 0:
        raise ValueError(f"`theta` should not be 0. Found {theta!r}.")
    with setting(model, x, labels, **_whole_box(options)) as attack:
        example = attack.x.clone()
        pairs = _pairs(share, attack.x)
        target = _target(attack)
        for _ in range(pairs):
            rows = (~attack.succeeds(attack.logits(example))).nonzero()[:, 0]
            if not len(rows):
                break
            part, here = attack.rows(rows), example[rows]
            pair, found = _best_pair(part, here, target[rows], theta)
            moved = here.flatten(1).scatter_add(1, pair, theta * found[:, None].expand(-1, 2).to(here.dtype))
            example[rows] = torch.clamp(moved.view_as(here), part.ball.lower, part.ball.upper)
            if not found.any():
                break
        return attack.ball.settle(example)


def _whole_box(options: SparseOptions) -> dict[str, Any]:
    """Return the options of an attack on the whole box; raise for those of a ball."""
    for name in ("ball", "epsilon", "norm"):
        if name in options:
            raise TypeError(f"`{name}` should be left out of an attack that counts coordinates. Give `bounds`.")
    return {"epsilon": None, **options}


def _pairs(share: float, x: Tensor) -> int:
    """Return the number of pairs to change; raise if there is none."""
    size = math.prod(x.shape[1:])
    if share * size < 2:
        raise ValueError(
            f"`share` should leave a pair of the {size} coordinates to change. Found {share:g}: one is {2 / size:.2g}."
        )
    return int(share * size) // 2


def _target(attack: Setting) -> Tensor:
    """Return the class to move each sample to, (N,)."""
    if attack.targets is not None:
        return attack.targets
    return without_label(attack.logits(attack.x), attack.labels).argmax(1)


def _best_pair(part: Setting, here: Tensor, target: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Return the pair of coordinates that helps most, (N, 2), and whether there is one, (N,)."""
    towards = 1 if theta > 0 else -1
    _, gain, _ = part.gradient(here, lambda logits, _: logits.gather(1, target[:, None])[:, 0])
    _, total, _ = part.gradient(here, lambda logits, _: logits.sum(1))
    with no_graph():
        gain, loss = towards * gain.flatten(1), towards * (total - gain).flatten(1)
        face = part.ball.upper if towards > 0 else part.ball.lower
        is_fixed = (here == face).flatten(1)
        pairs, found = [], []
        n = gain.shape[1]
        for some in torch.arange(len(gain), device=gain.device).split(max(1, _PAIRS_AT_ONCE // n**2)):
            helps, hurts = (side[some, :, None] + side[some, None, :] for side in (gain, loss))
            score = torch.where((helps > 0) & (hurts < 0), -helps * hurts, -torch.inf)
            score = score.masked_fill(is_fixed[some, :, None] | is_fixed[some, None, :], -torch.inf)
            score.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
            best, index = score.flatten(1).max(1)
            pairs.append(torch.stack([index // n, index % n], 1))
            found.append(best > -torch.inf)
        return torch.cat(pairs), torch.cat(found)


def sparsefool(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 20,
    overshoot: float = 3.0,
    **options: Unpack[SparseOptions],
) -> Tensor:
    """Cross the linearised boundary that DeepFool finds, and change the steepest coordinates first.

    From x_t DeepFool finds a point b on the boundary. At ``c = x_t + overshoot * (b - x_t)`` the model has the slope w.
    The step is the sparsest d in the box with ``w . d = w . (c - x_t)``: the coordinates with the largest ``|w_i|`` go
    to the faces of the box, until the hyperplane through c is reached.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Largest number of steps.
        overshoot: Lambda of the paper, at least 1. A larger one takes fewer steps and changes more coordinates.
        **options: `bounds`, `mask`, `targets`, `logits`.

    Returns:
        As in `jsma`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `overshoot` is less than 1.

    References:
        Modas, Moosavi-Dezfooli and Frossard, "SparseFool: a few pixels make a big difference", 2019, algorithm 2.

    Example:
        >>> weight = torch.tensor([[0.0, 0.0, 0.0], [1.0, 4.0, -2.0]])
        >>> x, labels = torch.full((1, 3), 0.5), torch.tensor([0])
        >>> sparsefool(lambda x: x @ weight.T - torch.tensor([0.0, 3.0]), x, labels, overshoot=1.1)
        tensor([[0.5000, 0.9125, 0.5000]])
    """
    steps, overshoot = integer("steps", steps), number("overshoot", overshoot, least=1)
    with setting(model, x, labels, **_whole_box(options)) as attack:
        example = attack.x.clone()
        for _ in range(steps):
            rows = (~attack.succeeds(attack.logits(example))).nonzero()[:, 0]
            if not len(rows):
                break
            part, here = attack.rows(rows), example[rows]
            threat = part.threat
            boundary = deepfool(
                part.model, here, part.labels, targets=part.targets, bounds=threat.bounds, mask=threat.mask
            )
            point, slope, _ = part.gradient(here + overshoot * (boundary - here), difference_loss)
            gain = inner(slope, point - here)
            move = shortest_move("l1", here, slope, gain, part.ball.lower, part.ball.upper)
            moved = (here.to(move.dtype) + move.nan_to_num(0.0)).to(here.dtype)
            moved = torch.clamp(moved, part.ball.lower, part.ball.upper)
            if torch.equal(moved, here):
                break
            example = example.index_copy(0, rows, moved)
        return attack.ball.settle(example)


def one_pixel(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    pixels: int = 1,
    steps: int = 100,
    population: int = 100,
    generator: torch.Generator | None,
    **options: Unpack[SparseOptions],
) -> Tensor:
    """Change one pixel, or a few, to values that are found by differential evolution from the logits alone.

    A candidate has a place and a value for each channel of each pixel. In each step every candidate is compared with
    ``r_1 + 0.5 (r_2 - r_3)``, where the r are three random other candidates, and replaced if the model errs by more at
    the new candidate. The attack leaves a sample as soon as one of its candidates is adversarial.

    Args:
        model: Inputs (N, ...) to logits (N, C). It need not be differentiable.
        x: Clean images, (N, C, H, W), or vectors, (N, D), whose coordinates are the pixels.
        labels: (N,). None: the model's predictions at `x`.
        pixels: Number of pixels to change.
        steps: Number of generations.
        population: Number of candidates, at least 4. A step evaluates all of them.
        generator: Draws the candidates and their combinations. None: torch's global generator.
        **options: `bounds`, `mask`, `targets`, `logits`. The bounds have to be finite.

    Returns:
        The best candidates, with the shape, dtype and device of `x`; the values of `x` where the attack has succeeded
        already.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `pixels` is not positive, `population` is less than 4, or bounds are not finite.

    References:
        Su, Vargas and Sakurai, "One pixel attack for fooling deep neural networks", 2019, section 3; Storn and Price,
        "Differential evolution", 1997.

    Example:
        >>> weight = torch.tensor([[0.0, 0.0, 0.0], [1.0, 4.0, -2.0]])
        >>> model = lambda x: x @ weight.T - torch.tensor([0.0, 3.0])
        >>> example = one_pixel(model, torch.full((1, 3), 0.5), torch.tensor([0]), generator=torch.Generator())
        >>> (example != 0.5).int()
        tensor([[0, 1, 0]], dtype=torch.int32)
    """
    pixels, steps, population = integer("pixels", pixels), integer("steps", steps), integer("population", population, 4)
    draws = own_generator(generator)
    with setting(model, x, labels, **_whole_box(options)) as attack:
        bounds = attack.threat.bounds
        if bounds is None or not all(torch.as_tensor(side).isfinite().all() for side in bounds):
            raise ValueError(f"`bounds` should be finite: values are drawn between them. Found {bounds}.")
        n_channels = attack.x.shape[1] if attack.x.dim() > 2 else 1
        shape = (population, pixels, 1 + n_channels)
        example, done = attack.x.clone(), attack.succeeds(attack.logits(attack.x))
        genes = torch.rand(shape, generator=draws, device=draws.device).to(attack.x.device)
        genes = genes.expand(len(attack.x), *shape).clone()
        fitness = torch.full(genes.shape[:2], -torch.inf, device=genes.device)
        for step in range(steps + 1):
            tried = genes if step == 0 else _crossed(genes, draws)
            rows = (~done).nonzero()[:, 0]
            if not len(rows):
                break
            part = attack.rows(rows.repeat_interleave(population))
            moved = _with_pixels(part, tried[rows].flatten(0, 1))
            logits = part.logits(moved)
            value = part.strength(logits).view(len(rows), population).to(fitness.dtype)
            better = value > fitness[rows]
            genes[rows] = torch.where(better[:, :, None, None], tried[rows], genes[rows])
            before = fitness[rows].amax(1)
            fitness[rows] = torch.where(better, value, fitness[rows])
            best = value.argmax(1)
            chosen = moved.view(len(rows), population, *moved.shape[1:])[
                torch.arange(len(rows), device=best.device), best
            ]
            improved = value.amax(1) > before
            example[rows[improved]] = chosen[improved]
            done[rows] = part.succeeds(logits).view(len(rows), population).any(1)
        return attack.ball.settle(example)


def _crossed(genes: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``r_1 + 0.5 (r_2 - r_3)`` for every candidate, the same combinations for all samples."""
    population = genes.shape[1]
    order = torch.rand(population, population, generator=generator, device=generator.device).to(genes.device)
    order.fill_diagonal_(2.0)  # a candidate is not its own parent
    first, second, third = order.argsort(1)[:, :3].unbind(1)
    return (genes[:, first] + 0.5 * (genes[:, second] - genes[:, third])).clamp(0, 1)


def _with_pixels(part: Setting, genes: Tensor) -> Tensor:
    """Return the clean inputs with some pixels replaced, by a place and values from 0 to 1, (N, pixels, 1 + C)."""
    n_channels = genes.shape[2] - 1
    flat, lower, upper = (
        side.reshape(len(genes), n_channels, -1) for side in (part.x, part.ball.lower, part.ball.upper)
    )
    size = flat.shape[2]
    place = (genes[:, :, :1] * size).long().clamp(max=size - 1).transpose(1, 2).expand(-1, n_channels, -1)
    least, most = lower.gather(2, place), upper.gather(2, place)
    values = least + genes[:, :, 1:].transpose(1, 2).to(flat.dtype) * (most - least)
    return torch.clamp(flat.scatter(2, place, values), lower, upper).view_as(part.x)
