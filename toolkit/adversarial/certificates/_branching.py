"""Proofs by cases: undecided rectifiers are assumed on, then off, until linear bounds prove each case.

R cases, D inputs, M units of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.adversarial.certificates._farthest import BallAndBox
from toolkit.adversarial.certificates._layers import Affine
from toolkit.adversarial.certificates._linear_relaxation import Interval, lines

__all__ = ["Cases", "optimise", "split"]


@dataclass(frozen=True)
class Cases:
    """Linear functions of the last rectifiers' outputs, each to be bounded below under its own assumptions.

    Attributes:
        margin: The index of each case's margin, (R,).
        objective: (R, M).
        constant: (R,).
        ball: The ball of each case's sample.
        hidden: Bounds before each rectifier, (R, M) each, without the assumptions in `signs`.
        signs: For each layer 1 where a unit is assumed to be on, -1 off, 0 neither, (R, M).
        slopes: For each layer the slope of the line below each rectifier, between 0 and 1, (R, M).
        prices: For each layer the multiplier of each assumption, not negative, (R, M).
        bound: The best lower bound so far, (R,).
    """

    margin: Tensor
    objective: Tensor
    constant: Tensor
    ball: BallAndBox
    hidden: list[Interval]
    signs: list[Tensor]
    slopes: list[Tensor]
    prices: list[Tensor]
    bound: Tensor

    @classmethod
    def begin(
        cls, margin: Tensor, objective: Tensor, constant: Tensor, ball: BallAndBox, hidden: list[Interval]
    ) -> Cases:
        """Return cases without assumptions."""
        none = [torch.zeros_like(lower) for lower, _ in hidden]
        slopes = [lines(lower, upper)[0] for lower, upper in hidden]
        bound = torch.full_like(constant, -torch.inf)
        return cls(margin, objective, constant, ball.rows(slice(None)), hidden, none, slopes, none, bound)

    def rows(self, index: Tensor | slice) -> Cases:
        """Return the selected cases."""
        return Cases(*(_mapped(lambda part: part[index], getattr(self, field.name)) for field in fields(self)))

    def and_also(self, other: Cases) -> Cases:
        """Return the concatenation of both sets of cases."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Cases(*(_mapped(lambda *parts: torch.cat(parts), *pair) for pair in pairs))

    def relaxations(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the lines around each rectifier; under an assumption both lines are the rectifier itself."""
        found = []
        for (lower, upper), sign in zip(self.hidden, self.signs, strict=True):
            found.append(lines(torch.where(sign > 0, 0, lower), torch.where(sign < 0, 0, upper)))
        return found


def _mapped(function: Callable[..., Tensor], *values: Any) -> Any:
    """Return values of one form, with a function of their tensors in the place of each tensor."""
    first = values[0]
    if isinstance(first, list):
        return [_mapped(function, *parts) for parts in zip(*values, strict=True)]
    if isinstance(first, tuple):
        return type(first)(*(_mapped(function, *parts) for parts in zip(*values, strict=True)))
    return function(*values) if isinstance(first, Tensor) else first


def optimise(cases: Cases, chain: list[Affine], steps: int, errors: list[float]) -> tuple[Cases, Tensor, list[Tensor]]:
    """Raise the lower bounds by the slopes of the lower lines and by the multipliers of the assumptions.

    For fixed slopes and multipliers the bound is ``min_x a . x + c`` as in `relaxed_lower_bound`, with the multipliers'
    part ``- sign * price * z`` added: the added part is not positive where the assumption holds, so any price that is
    not negative gives a bound. The derivative with respect to a slope or a price depends on the value ``v`` of the unit
    by its lines at the minimiser x: it is the coefficient times v, or ``- sign * v``. Steps follow the signs of the
    derivatives.

    Args:
        cases: The cases.
        chain: The layers.
        steps: Number of steps.
        errors: Largest rounding error of a unit of each layer, which is subtracted from the bounds.

    Returns:
        The cases with the best bounds; the minimisers of the last step, (R, D); and for each layer the loss of the
        bound by the gap between the lines of each unit, (R, M).

    References:
        Xu et al., "Fast and complete: enabling complete neural network verification with rapid and massively parallel
        incomplete verifiers", 2021 (slopes); Wang et al., "Beta-CROWN: efficient bound propagation with per-neuron
        split constraints for neural network robustness verification", 2021 (multipliers).
    """
    relaxations = cases.relaxations()
    crossing = [(offset > 0).to(offset.dtype) for _, _, offset in relaxations]
    slopes = [
        torch.where(cross > 0, slope, below)
        for cross, slope, (below, _, _) in zip(crossing, cases.slopes, relaxations, strict=True)
    ]
    prices, bound = list(cases.prices), cases.bound
    point = cases.ball.start
    gaps: list[Tensor] = []
    for step in range(steps):
        objective, constant = cases.objective, cases.constant
        objectives: list[Tensor] = []
        gaps = []
        for depth in reversed(range(len(chain))):
            _, above, offset = relaxations[depth]
            positive, negative = objective.clamp(min=0), objective.clamp(max=0)
            loss = negative * offset
            constant = constant + loss.sum(1)
            gaps.insert(0, -loss)
            objectives.insert(0, objective)
            through = positive * slopes[depth] + negative * above - cases.signs[depth] * prices[depth]
            constant = constant - errors[depth] * (objective.abs() + prices[depth]).sum(1)
            constant = constant + through @ chain[depth].bias
            objective = through @ chain[depth].weight
        point = cases.ball.start + cases.ball.farthest(-objective)
        bound = torch.maximum(bound, (objective * point).sum(1) + constant)
        rate, value = 0.5 * _FINAL ** (step / steps), point
        for depth, layer in enumerate(chain):
            _, above, offset = relaxations[depth]
            value = value @ layer.weight.T + layer.bias
            coefficient, slope = objectives[depth], slopes[depth]
            passed = torch.where(coefficient > 0, slope * value, above * value + offset)
            moved = (slope + rate * (coefficient.clamp(min=0) * value).sign()).clamp(0, 1)
            slopes[depth] = torch.where(crossing[depth] > 0, moved, slope)
            scale = rate * coefficient.abs().amax(1, keepdim=True)
            step_of_price = -cases.signs[depth] * value.sign() * scale
            prices[depth] = (prices[depth] + step_of_price).clamp(min=0) * cases.signs[depth].abs()
            value = passed
    return replace(cases, slopes=slopes, prices=prices, bound=bound), point, gaps


# The last step, as a share of the first.
_FINAL = 0.05


def split(cases: Cases, gaps: list[Tensor]) -> tuple[Cases, Tensor]:
    """Return each case twice: with the most costly unit assumed on, and assumed off.

    Returns:
        The cases, first with the unit on, then with the unit off; and a mask (R,) of the given cases that have a unit
        to split. Cases without such a unit are left out.
    """
    crossing = [(offset > 0).to(gap.dtype) for gap, (_, _, offset) in zip(gaps, cases.relaxations(), strict=True)]
    # If no unit has a gap in the objective, split any undecided unit.
    scores = torch.cat([(gap + 1e-12) * cross for gap, cross in zip(gaps, crossing, strict=True)], 1)
    best, unit = scores.max(1)
    splittable = best > 0
    chosen = torch.zeros_like(scores).scatter(1, unit[:, None], 1).split([gap.shape[1] for gap in gaps], 1)
    halves = [
        replace(cases, signs=[sign + way * one for sign, one in zip(cases.signs, chosen, strict=True)]).rows(splittable)
        for way in (1, -1)
    ]
    return halves[0].and_also(halves[1]), splittable
