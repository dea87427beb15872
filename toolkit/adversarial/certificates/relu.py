"""Exact verification of small ReLU networks: descent, then branch and bound, then linear programs for the rest.

This module shares no code with the attacks, so that it can serve as an independent check of them.

N samples, each of shape (...) with D features in all, C classes.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit._checks import choice, number
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.certificates._branching import Cases, optimise, split
from toolkit.adversarial.certificates._farthest import BallAndBox, ball_and_box
from toolkit.adversarial.certificates._layers import Affine, affine_chain
from toolkit.adversarial.certificates._linear_relaxation import (
    Interval,
    errors_of,
    relaxed_bounds,
    relaxed_lower_bound,
)
from toolkit.adversarial.certificates._programs import Program
from toolkit.adversarial.certificates.bounds import margin_layer, model_labels
from toolkit.blocks import no_graph

__all__ = ["Verification", "verify_relu"]

Goal = Literal["verdict", "margin"]


@dataclass(frozen=True)
class Verification:
    """Bounds of the worst-case margin ``min_{x' in ball(x)} min_{j != y} z_y(x') - z_j(x')`` of each sample.

    Attributes:
        lower: Proved lower bound of the margin on the ball, (N,), float64. It includes the rounding of the proof, and
            of the model when it is run in float64.
        upper: Upper bound: the model's margin at `examples`, computed in float64, (N,), float64.
        examples: Inputs of the ball with the smallest margin found, (N, ...), float64.
    """

    lower: Tensor
    upper: Tensor
    examples: Tensor

    @property
    def robust(self) -> Tensor:
        """Samples for which a proof shows that every input of the ball is classified as the label, (N,)."""
        return self.lower > 0

    @property
    def broken(self) -> Tensor:
        """Samples whose `examples` are misclassified, (N,). A tie between two classes counts as misclassified."""
        return self.upper <= 0

    @property
    def unknown(self) -> Tensor:
        """Samples neither robust nor broken: a limit was reached, or the margin is zero up to rounding, (N,)."""
        return ~(self.robust | self.broken)

    def __str__(self) -> str:
        counts = ", ".join(f"{int(getattr(self, name).sum())} {name}" for name in ("robust", "broken", "unknown"))
        return f"{len(self.lower)} samples: {counts}"


def verify_relu(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
    goal: Goal = "verdict",
    tolerance: float = 1e-5,
    time_limit: float | None = None,
) -> Verification:
    """Decide exactly for each sample whether any input of a ball changes the class; or find its worst-case margin.

    There are three steps, each for the samples that the previous step leaves open. First, a descent on each margin
    searches for a misclassified input. Second, branch and bound: an undecided ReLU is taken to be on in one case, and
    off in another. Linear functions bound each case (as in `certify_crown`, with optimised slopes and multipliers),
    thousands of cases at once. Third, in Linf and L1, samples that need too many cases are solved by linear programs,
    one for each case, which are slower and bound more tightly.

    "Exact" means: an adversarial input is inside of the ball, and the model itself misclassifies it in float64. Every
    proved bound is a dual bound, which holds for any slopes, multipliers and dual variables. So the solver of the
    programs, HiGHS, only proposes dual variables and need not be trusted. The rounding of float64, in the proof and in
    the model, is bounded and subtracted (about 1e-13 of the logits for a small network). The scale of the model does
    not matter: inputs of ReLUs are first scaled to lie between -1 and 1. In L2 the third step is missing, so a sample
    with too many cases may be unknown.

    A float64 copy of the model is run; the model itself is never changed. Time grows exponentially with the number of
    undecided ReLUs; about fifty are feasible.

    Args:
        model: A `torch.nn.Sequential` of Linear, Conv1d, Conv2d, BatchNorm1d, BatchNorm2d, AvgPool2d,
            AdaptiveAvgPool2d, `Normalize`, ReLU, Flatten, Unflatten, Identity, dropout and Sequential, from inputs (N,
            ...) to logits (N, C); run in evaluation mode, in any mode of the model. Its layers become dense matrices.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,), integers of any width.
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.
        mask: True where an input may change, broadcast to `x`; None: everywhere.
        goal: ``"verdict"`` stops at a sample once the sign of its worst margin is known; ``"margin"`` continues until
            `lower` and `upper` differ by about `tolerance`.
        tolerance: The difference at which ``goal="margin"`` stops, in the units of the logits.
        time_limit: Seconds for one margin, in each of the last two steps; samples that need more are unknown. The cases
            of all margins are bounded together, and share the sum of their limits. None: no limit.

    Raises:
        TypeError: If the model has other layers, or hooks, `x` is not floating point, `labels` are not integers, or
            `mask` is not Boolean.
        ValueError: If `norm` or `goal` is unknown, shapes do not fit, a label is not a class, `epsilon` is negative or
            not finite, `tolerance` or `time_limit` is not positive, or `x` lies outside of `bounds`.

    References:
        Wang et al., "Beta-CROWN: efficient bound propagation with per-neuron split constraints for neural network
        robustness verification", 2021 (the cases); Ehlers, "Formal verification of piece-wise linear feed-forward
        neural networks", 2017 (the programs); Neumaier and Shcherbina, "Safe bounds in linear and mixed-integer linear
        programming", 2004.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False))
        >>> _ = model[0].load_state_dict({"weight": torch.tensor([[1.0], [-1.0]]), "bias": torch.zeros(2)})
        >>> _ = model[2].load_state_dict({"weight": torch.tensor([[1.0, 1.0], [0.0, 0.5]])})
        >>> x, labels = torch.tensor([[0.5], [0.5]]), torch.tensor([0, 0])
        >>> print(verify_relu(model, x, labels, epsilon=torch.tensor([0.4, 0.5]), bounds=None))
        2 samples: 1 robust, 1 broken, 0 unknown
    """
    choice("goal", goal, ("verdict", "margin"))
    tolerance = number("tolerance", tolerance, above=0)
    time_limit = None if time_limit is None else number("time_limit", time_limit, above=0, infinite=True)
    with no_graph():
        ball = ball_and_box(x, epsilon, norm, bounds, mask)
        chain = affine_chain(model, x, torch.float64)
        labels = model_labels(labels, x, len(chain[-1].bias))
        judge = copy.deepcopy(model).double().eval()
        search = _Search(chain, ball, labels, goal, tolerance, time_limit)
        search.branch()
        if norm != "l2" and search.chain:  # without rectifiers the bounds are the margins, but for rounding
            for row in search.undecided():
                search.solve(row)
        examples = ball.inward(search.examples).reshape(x.shape)
        # The final check gets a copy: the first layer may write into its input.
        logits = judge(examples.clone()) if len(x) else search.upper.new_empty(0, 2)
        margins = logits.gather(1, labels[:, None]) - logits
        upper = margins.scatter(1, labels[:, None], torch.inf).amin(1)
        return Verification(torch.minimum(search.lower.amin(1), upper), upper, examples)


class _Search:
    """The bounds so far for every sample and every other class, and the steps that improve them.

    Attributes:
        lower: Proved lower bounds, (N, C); infinite at the label.
        upper: The smallest margin found, (N,).
        examples: The inputs with these margins, (N, D).
    """

    def __init__(
        self,
        chain: list[Affine],
        ball: BallAndBox,
        labels: Tensor,
        goal: Goal,
        tolerance: float,
        time_limit: float | None,
    ) -> None:
        self.ball, self.labels = ball, labels
        self.goal, self.tolerance, self.time_limit = goal, tolerance, time_limit
        chain, self.hidden = _of_order_one(chain, relaxed_bounds(chain[:-1], ball, outward=True))
        self.chain, last = chain[:-1], chain[-1]
        self.weight, self.bias = margin_layer(last.weight, last.bias, labels)
        self.provable_bias = self.bias - 2 * _rounding_of_margins(chain, self.hidden, ball, labels)
        errors = errors_of(self.chain, self.hidden, ball)
        self.errors = [float(error.max()) if error.numel() else 0.0 for error in errors]
        margins, points = relaxed_lower_bound(self.weight, self.provable_bias, self.chain, self.hidden, ball, errors)
        self.lower = margins.scatter(1, labels[:, None], torch.inf)
        self.upper, self.examples = torch.full_like(self.lower[:, 0], torch.inf), ball.start.clone()
        self._descend(points)

    def undecided(self) -> list[int]:
        """Return the samples that are still undecided."""
        return self._is_open().any(1).nonzero()[:, 0].tolist()

    def _is_open(self) -> Tensor:
        """Return which margins, (N, C), could still change the result."""
        return (self.lower <= self._enough()[:, None]) & self._worthwhile()[:, None]

    def _enough(self) -> Tensor:
        """Return the lower bound that a proof has to reach, (N,)."""
        return torch.zeros_like(self.upper) if self.goal == "verdict" else self.upper - self.tolerance

    def _worthwhile(self) -> Tensor:
        """Return the samples for which a proof would still improve the result, (N,)."""
        return (self.upper > 0) | (self.goal == "margin")

    def _descend(self, points: Tensor) -> None:
        """Lower every open margin, starting at the relaxed minimiser, by steps towards the best vertex.

        These Frank-Wolfe steps stay inside of ball and box in every norm.
        """
        samples, classes = self._is_open().nonzero(as_tuple=True)
        everywhere = torch.arange(len(self.labels), device=self.labels.device)
        self._try(everywhere, self.ball.start)
        point, ball = points[samples, classes], self.ball.rows(samples)
        weight = self.weight[samples, classes]
        for step in range(_DESCENT):
            signs = []
            hidden = point
            for layer in self.chain:
                hidden = hidden @ layer.weight.T + layer.bias
                signs.append(hidden > 0)
                hidden = hidden.clamp(min=0)
            self._try(samples, point)
            slope = weight
            for layer, sign in zip(reversed(self.chain), reversed(signs), strict=True):
                slope = (slope * sign) @ layer.weight
            vertex = ball.start + ball.farthest(-slope)
            self._try(samples, vertex)
            point = point + (1 - step / _DESCENT) * (vertex - point)
            if self.goal == "verdict" and step % 4 == 3:
                left = self.upper[samples] > 0
                samples, point, weight, ball = samples[left], point[left], weight[left], ball.rows(left)

    def branch(self) -> None:
        """Prove margins by cases, all margins together; margins that need too many cases are left to the programs."""
        if not self.chain:
            return
        samples, classes = self._is_open().nonzero(as_tuple=True)
        index = torch.arange(len(samples), device=samples.device)
        open_cases = Cases.begin(
            index,
            self.weight[samples, classes],
            self.provable_bias[samples, classes],
            self.ball.rows(samples),
            [Interval(lower[samples], upper[samples]) for lower, upper in self.hidden],
        )
        proved, given_up = torch.full_like(open_cases.constant, torch.inf), torch.zeros_like(index, dtype=torch.bool)
        n_cases, steps = torch.zeros_like(index), _FIRST_STEPS
        end = math.inf if self.time_limit is None else time.monotonic() + len(samples) * self.time_limit
        # A program finds the last digits of a margin faster.
        limit = _CASES if self.goal == "verdict" else _CASES // 8

        def close(cases: Cases) -> None:
            # No case is lost: each ends here with its bound, or splits in two that keep this bound until they improve
            # it.
            proved.scatter_reduce_(0, cases.margin, cases.bound, "amin")

        while len(open_cases.margin):
            now, later = open_cases.rows(slice(-_BATCH, None)), open_cases.rows(slice(None, -_BATCH))
            now, points, gaps = optimise(now, self.chain, steps, self.errors)
            steps = _STEPS
            self._try(samples[now.margin], points)
            n_cases.scatter_add_(0, now.margin, torch.ones_like(now.margin))
            done = now.bound > self._enough()[samples[now.margin]]
            close(now.rows(done))
            left, gaps = now.rows(~done), [gap[~done] for gap in gaps]
            halves, splittable = split(left, gaps)
            if not splittable.all():
                last, points, _ = optimise(left.rows(~splittable), self.chain, _LAST_STEPS, self.errors)
                self._try(samples[last.margin], points)
                close(last)
                given_up[last.margin[last.bound <= self._enough()[samples[last.margin]]]] = True
            open_cases = later.and_also(halves)
            given_up |= (n_cases > limit) | ~self._worthwhile()[samples] | (time.monotonic() > end)
            dropped = given_up[open_cases.margin]
            close(open_cases.rows(dropped))
            open_cases = open_cases.rows(~dropped)
        self.lower[samples, classes] = torch.maximum(self.lower[samples, classes], proved)

    def _try(self, samples: Tensor, points: Tensor) -> None:
        """Keep the points with a smaller margin than before."""
        hidden = points
        for layer in self.chain:
            hidden = (hidden @ layer.weight.T + layer.bias).clamp(min=0)
        margins = (self.weight[samples] @ hidden[:, :, None])[..., 0] + self.bias[samples]
        margins = margins.scatter(1, self.labels[samples][:, None], torch.inf).amin(1)
        least = self.upper.scatter_reduce(0, samples, margins, "amin")
        better = (margins < self.upper[samples]) & (margins == least[samples])
        self.upper[samples[better]] = margins[better]
        self.examples[samples[better]] = points[better]

    def solve(self, row: int) -> None:
        """Decide one sample by linear programs for each open class, the most vulnerable first."""
        ball = self.ball.rows(torch.tensor([row], device=self.labels.device))
        program = Program(self.chain, ball, [Interval(low[row], high[row]) for low, high in self.hidden])

        def enough() -> float:
            return self._enough()[row].item() if self._worthwhile()[row] else -torch.inf

        def visit(displacement: NDArray[np.float64]) -> None:
            point = ball.start + ball.settle(torch.from_numpy(displacement)[None])
            self._try(torch.tensor([row], device=self.labels.device), point)

        for other in self.lower[row].argsort().tolist():
            if self._is_open()[row, other]:
                weight, bias = self.weight[row, other].numpy(), self.provable_bias[row, other].item()
                proved = program.bound(weight, bias, enough, visit, self.time_limit)
                self.lower[row, other] = max(self.lower[row, other].item(), proved)


def _of_order_one(chain: list[Affine], hidden: list[Interval]) -> tuple[list[Affine], list[Interval]]:
    """Return the same function with rectified units between -1 and 1. The factors are powers of two, so it is exact.

    The tolerances of a solver, and steps of a fixed size, should not depend on the units of the model.
    """
    if not len(hidden) or not len(hidden[0].lower):
        return chain, hidden
    scaled, bounds, before = [], [], None
    for layer, (lower, upper) in zip(chain, [*hidden, (None, None)], strict=True):
        if before is not None:
            layer = layer._replace(weight=layer.weight * before, weight_size=layer.weight_size * before)
        if lower is None or upper is None:
            scaled.append(layer)
            break
        _, exponent = torch.maximum(-lower, upper).amax(0).frexp()
        before = torch.ones_like(layer.bias).ldexp(exponent)
        weight, weight_size = layer.weight / before[:, None], layer.weight_size / before[:, None]
        scaled.append(Affine(weight, layer.bias / before, weight_size, layer.bias_size / before, layer.terms))
        bounds.append(Interval(lower / before, upper / before))
    return scaled, bounds


def _rounding_of_margins(chain: list[Affine], hidden: list[Interval], ball: BallAndBox, labels: Tensor) -> Tensor:
    """Return how far the margins, (N, C), of a model that is run in float64 may be from the exact ones."""
    error = torch.zeros_like(ball.start)
    for layer, own in zip(chain, errors_of(chain, hidden, ball), strict=True):
        error = error @ layer.weight_size.T + own
    return error + error.gather(1, labels[:, None])


_DESCENT = 24
# Steps on a margin's first bound, and on each later case, which starts from the result of the previous one.
# If every rectifier is decided, only the multipliers are left to optimise.
_FIRST_STEPS, _STEPS, _LAST_STEPS = 16, 8, 200
_BATCH, _CASES = 512, 4000
