"""Exact verification of small ReLU networks: search, then proofs by cases, then linear programs for the rest.

It shares no code with the attacks, so it can be their witness.

N samples, each of shape (...) with D features in all, C classes.
"""

from __future__ import annotations

import copy
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
    """What is known of the worst-case margin ``min_{x' in ball(x)} min_{j != y} z_y(x') - z_j(x')`` of each sample.

    Attributes:
        lower: Proved: no input of the ball has a smaller margin, (N,), float64. The rounding of the proof, and of a
            model that is run in float64, is taken off.
        upper: Reached: the margin of the model, in float64, at `examples`, (N,), float64.
        examples: Inputs of the ball with the smallest margin found, (N, ...), float64.
    """

    lower: Tensor
    upper: Tensor
    examples: Tensor

    @property
    def robust(self) -> Tensor:
        """Where it is proved that every input of the ball is classified as the label, (N,)."""
        return self.lower > 0

    @property
    def broken(self) -> Tensor:
        """Where `examples` has an input that is not, (N,). One at which two classes are equal counts as broken."""
        return self.upper <= 0

    @property
    def unknown(self) -> Tensor:
        """Where neither is known: a limit was reached, or the margin is within rounding of zero, (N,)."""
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
    """Decide for each sample whether any input of a ball changes the class, exactly; or find its worst-case margin.

    Three steps, each for what the one before leaves open. A descent on each margin looks for an input that is
    misclassified. Proofs by cases take a rectifier that may be on or off to be on, then off, and bound each case by
    linear functions (as `certify_crown` does, with slopes and multipliers that are optimised), thousands of cases at
    once. What takes too many cases is left, in Linf and L1, to linear programs, one for each case: slower for a case,
    and with a tighter bound.

    What "exact" means: an input that is broken is inside of the ball and was put through the model itself, in float64.
    Every bound is that of a dual, which holds whatever slopes, multipliers and prices it is computed from: the solver
    of the programs, HiGHS, is asked for good prices and is not trusted. How far float64 may have rounded a bound, or
    the model, is bounded too and taken off (some 1e-13 of the logits for a small network). The units of the model do
    not matter: those of the rectifiers are made to lie between -1 and 1 first. In L2 the last step is missing, so that
    a sample may be unknown for the number of its cases.

    The model is read, and a float64 copy of it is run; it is never touched itself. Time grows exponentially with the
    number of rectifiers that may be on or off: about fifty are well possible.

    Args:
        model: A `torch.nn.Sequential` of Linear, Conv1d, Conv2d, BatchNorm1d, BatchNorm2d, AvgPool2d,
            AdaptiveAvgPool2d, `Normalize`, ReLU, Flatten, Unflatten, Identity, dropout and Sequential, from inputs (N,
            ...) to logits (N, C); in evaluation mode, whatever mode it is in. Its layers become dense matrices.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,), integers of any width.
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.
        mask: True where an input may change, broadcast to `x`; None: everywhere.
        goal: ``"verdict"`` stops at a sample once the sign of its worst margin is known; ``"margin"`` goes on until
            `lower` and `upper` are within about `tolerance`.
        tolerance: For ``goal="margin"``, in the units of the logits.
        time_limit: Seconds for the programs of one margin; a sample for which it is not enough is unknown. None for no
            limit.

    Raises:
        TypeError: If the model has other layers, or hooks, `x` is not floating point, `labels` are not integers, or
            `mask` is not Boolean.
        ValueError: If `norm` or `goal` is unknown, shapes do not fit, a label is not a class, `epsilon` is negative or
            not finite, `tolerance` or `time_limit` is not positive, or `x` lies outside of `bounds`.

    Source:
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
    time_limit = None if time_limit is None else number("time_limit", time_limit, above=0)
    with no_graph():
        ball = ball_and_box(x, epsilon, norm, bounds, mask, torch.float64, ("linf", "l2", "l1"))
        chain = affine_chain(model, x, torch.float64)
        labels = model_labels(labels, x, len(chain[-1].bias))
        judge = copy.deepcopy(model).double().eval()
        search = _Search(chain, ball, labels, goal, tolerance, time_limit)
        search.branch()
        if norm != "l2":
            for row in search.undecided():
                search.solve(row)
        examples = ball.inward(search.examples).reshape(x.shape)
        # The judge gets a copy: its first layer may write into its input.
        logits = judge(examples.clone()) if len(x) else search.upper.new_empty(0, 2)
        margins = logits.gather(1, labels[:, None]) - logits
        upper = margins.scatter(1, labels[:, None], torch.inf).amin(1)
        return Verification(torch.minimum(search.lower.amin(1), upper), upper, examples)


class _Search:
    """What is known so far of every sample and every other class, and the steps that find out more.

    Attributes:
        lower: Proved, (N, C); infinite at the label.
        upper: Reached, (N,).
        examples: Where, (N, D).
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
        """Return the samples of which more has to be found out."""
        return self._is_open().any(1).nonzero()[:, 0].tolist()

    def _is_open(self) -> Tensor:
        """Say which margins, (N, C), could still change the result."""
        return (self.lower <= self._enough()[:, None]) & self._worthwhile()[:, None]

    def _enough(self) -> Tensor:
        """Return what a margin has to be proved to be above, (N,)."""
        return torch.zeros_like(self.upper) if self.goal == "verdict" else self.upper - self.tolerance

    def _worthwhile(self) -> Tensor:
        """Say of which samples a proof would still be news, (N,)."""
        return (self.upper > 0) | (self.goal == "margin")

    def _descend(self, points: Tensor) -> None:
        """Lower every margin that is open from where the relaxed one is least, by steps towards the best vertex.

        Steps are those of Frank and Wolfe: they stay inside of ball and box whatever the norm.
        """
        samples, classes = self._is_open().nonzero(as_tuple=True)
        everywhere = torch.arange(len(self.labels))
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
        """Prove margins by cases, all margins together; those that take too many are left to the programs."""
        if not self.chain:
            return
        samples, classes = self._is_open().nonzero(as_tuple=True)
        index = torch.arange(len(samples))
        open_cases = Cases.begin(
            index,
            self.weight[samples, classes],
            self.provable_bias[samples, classes],
            self.ball.rows(samples),
            [Interval(lower[samples], upper[samples]) for lower, upper in self.hidden],
        )
        proved, given_up = torch.full_like(open_cases.constant, torch.inf), torch.zeros_like(index, dtype=torch.bool)
        n_cases, steps = torch.zeros_like(index), _FIRST_STEPS
        # The last digits of a margin are found sooner by a program.
        limit = _CASES if self.goal == "verdict" else _CASES // 8

        def close(cases: Cases) -> None:
            # Not a case is lost: each ends here with its bound, or as two halves that have it until they have a better.
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
            given_up |= (n_cases > limit) | ~self._worthwhile()[samples]
            dropped = given_up[open_cases.margin]
            close(open_cases.rows(dropped))
            open_cases = open_cases.rows(~dropped)
        self.lower[samples, classes] = torch.maximum(self.lower[samples, classes], proved)

    def _try(self, samples: Tensor, points: Tensor) -> None:
        """Keep those points that have a smaller margin than any before."""
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
        """Decide one sample by linear programs for each other class that is open, the most vulnerable first."""
        ball = self.ball.rows(torch.tensor([row]))
        program = Program(self.chain, ball, [Interval(low[row], high[row]) for low, high in self.hidden])

        def enough() -> float:
            return self._enough()[row].item() if self._worthwhile()[row] else -torch.inf

        def visit(displacement: NDArray[np.float64]) -> None:
            point = ball.start + ball.settle(torch.from_numpy(displacement)[None])
            self._try(torch.tensor([row]), point)

        for other in self.lower[row].argsort().tolist():
            if self._is_open()[row, other]:
                weight, bias = self.weight[row, other].numpy(), self.provable_bias[row, other].item()
                proved = program.bound(weight, bias, enough, visit, self.time_limit)
                self.lower[row, other] = max(self.lower[row, other].item(), proved)


def _of_order_one(chain: list[Affine], hidden: list[Interval]) -> tuple[list[Affine], list[Interval]]:
    """Return the same function, whose rectified units lie between -1 and 1: divided by powers of two, so exactly.

    What a solver, or a step of a fixed size, takes for little should not depend on the units of the model.
    """
    if not len(hidden) or not len(hidden[0].lower):
        return chain, hidden
    scaled, bounds, before = [], [], None
    for layer, (lower, upper) in zip(chain, [*hidden, (None, None)], strict=True):
        weight = layer.weight if before is None else layer.weight * before
        if lower is None or upper is None:
            scaled.append(Affine(weight, layer.bias))
            break
        _, exponent = torch.maximum(-lower, upper).amax(0).frexp()
        before = torch.ones_like(layer.bias).ldexp(exponent)
        scaled.append(Affine(weight / before[:, None], layer.bias / before))
        bounds.append(Interval(lower / before, upper / before))
    return scaled, bounds


def _rounding_of_margins(chain: list[Affine], hidden: list[Interval], ball: BallAndBox, labels: Tensor) -> Tensor:
    """Return how far the margins, (N, C), of a model that is run in float64 may be from the exact ones."""
    error = torch.zeros_like(ball.start)
    for layer, own in zip(chain, errors_of(chain, hidden, ball), strict=True):
        error = error @ layer.weight.abs().T + own
    return error + error.gather(1, labels[:, None])


_DESCENT = 24
# Steps on a margin's first bound, and on each case after it, which begins where the one before ended.
# Where every rectifier is decided the multipliers are all that is left.
_FIRST_STEPS, _STEPS, _LAST_STEPS = 16, 8, 200
_BATCH, _CASES = 512, 4000
