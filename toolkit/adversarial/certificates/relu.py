"""Exact verification of small ReLU networks: search, then proofs by cases, then mixed-integer programs for the rest.

It shares no code with the attacks, so it can be their witness.

N samples, each of shape (...) with D features in all, C classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import Bounds as VariableBounds
from scipy.optimize import LinearConstraint, milp
from torch import Tensor, nn

from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.certificates._branching import Cases, optimise, split
from toolkit.adversarial.certificates._farthest import BallAndBox, ball_and_box
from toolkit.adversarial.certificates._layers import Affine, affine_chain
from toolkit.adversarial.certificates._linear_relaxation import Interval, relaxed_bounds, relaxed_lower_bound
from toolkit.adversarial.certificates.bounds import margin_layer, model_labels
from toolkit.blocks import no_graph

__all__ = ["Verification", "verify_relu"]

Goal = Literal["verdict", "margin"]


@dataclass(frozen=True)
class Verification:
    """What is known of the worst-case margin ``min_{x' in ball(x)} min_{j != y} z_y(x') - z_j(x')`` of each sample.

    Attributes:
        lower: Proved: no input of the ball has a smaller margin, (N,), float64.
        upper: Reached: the margin of the model, in float64, at `examples`, (N,), float64.
        examples: Inputs of the ball with the smallest margin found, (N, ...), float64.
    """

    lower: Tensor
    upper: Tensor
    examples: Tensor

    @property
    def robust(self) -> Tensor:
        """Where it is proved that every input of the ball is classified as the label, (N,)."""
        return self.lower > _ROUNDING

    @property
    def broken(self) -> Tensor:
        """Where `examples` has an input that is not, (N,). One at which two classes are equal counts as broken."""
        return self.upper <= 0

    @property
    def unknown(self) -> Tensor:
        """Where neither is known: a limit was reached, or the margin is too near to zero, (N,)."""
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
    once. What takes too many cases is left, in Linf and L1, to a program with one binary variable for each rectifier
    that may be on or off: one program for each other class, the most vulnerable first.

    What "exact" means: an input that is broken is inside of the ball and was put through the model itself, in float64.
    A proof by cases holds up to the rounding of float64: a bound counts from 1e-9. A proof by a program holds up to
    the tolerances of its solver, HiGHS: 1e-6 in the constraints and in the binaries. So `tolerance` is taken off every
    bound that a program proves, and a sample whose worst margin lies between 0 and twice `tolerance` may be unknown.
    In L2 the last step is missing, so that a sample may be unknown for the number of its cases.

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
        tolerance: See above; in the units of the logits.
        time_limit: Seconds for one program; a sample for which it is not enough is unknown. None for no limit.

    Raises:
        TypeError: If the model has other layers, or hooks, `x` is not floating point, `labels` are not integers, or
            `mask` is not Boolean.
        ValueError: If `norm` or `goal` is unknown, shapes do not fit, a label is not a class, `epsilon` is negative or
            not finite, `tolerance` or `time_limit` is not positive, or `x` lies outside of `bounds`.

    Source:
        Tjeng, Xiao and Tedrake, "Evaluating robustness of neural networks with mixed integer programming", 2019 (the
        programs); Wang et al., "Beta-CROWN: efficient bound propagation with per-neuron split constraints for neural
        network robustness verification", 2021 (the cases).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False))
        >>> _ = model[0].load_state_dict({"weight": torch.tensor([[1.0], [-1.0]]), "bias": torch.zeros(2)})
        >>> _ = model[2].load_state_dict({"weight": torch.tensor([[1.0, 1.0], [0.0, 0.5]])})
        >>> x, labels = torch.tensor([[0.5], [0.5]]), torch.tensor([0, 0])
        >>> print(verify_relu(model, x, labels, epsilon=torch.tensor([0.4, 0.5]), bounds=None))
        2 samples: 1 robust, 1 broken, 0 unknown
    """
    if goal not in ("verdict", "margin"):
        raise ValueError(f"`goal` should be 'verdict' or 'margin'. Found {goal!r}.")
    for argument, value in (("tolerance", tolerance), ("time_limit", time_limit)):
        if value is not None and not value > 0:
            raise ValueError(f"`{argument}` should be positive. Found {value}.")
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
        self.chain, self.ball, self.labels = chain[:-1], ball, labels
        self.weight, self.bias = margin_layer(chain[-1].weight, chain[-1].bias, labels)
        self.goal, self.tolerance, self.time_limit = goal, tolerance, time_limit
        self.hidden = relaxed_bounds(self.chain, ball)
        margins, points = relaxed_lower_bound(self.weight, self.bias, self.chain, self.hidden, ball)
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
        return torch.full_like(self.upper, _ROUNDING) if self.goal == "verdict" else self.upper - self.tolerance

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
            self.bias[samples, classes],
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
            now, points, gaps = optimise(now, self.chain, steps)
            steps = _STEPS
            self._try(samples[now.margin], points)
            n_cases.scatter_add_(0, now.margin, torch.ones_like(now.margin))
            done = now.bound > self._enough()[samples[now.margin]]
            close(now.rows(done))
            left, gaps = now.rows(~done), [gap[~done] for gap in gaps]
            halves, splittable = split(left, gaps)
            if not splittable.all():
                last, points, _ = optimise(left.rows(~splittable), self.chain, _LAST_STEPS)
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
        """Decide one sample by one program for each other class that is open, the most vulnerable first."""
        ball = self.ball.rows(torch.tensor([row]))
        program = _Program(self.chain, ball, [Interval(low[row], high[row]) for low, high in self.hidden])
        for other in self.lower[row].argsort().tolist():
            if not self._is_open()[row, other]:
                continue
            ceiling = 2 * self.tolerance if self.goal == "verdict" else float(self.upper[row])
            answer = program.minimise(
                self.weight[row, other].numpy(), float(self.bias[row, other]), ceiling, self.goal, self.time_limit
            )
            self.lower[row, other] = max(self.lower[row, other].item(), answer.bound - self.tolerance)
            if answer.displacement is not None:
                self._try(torch.tensor([row]), ball.start + ball.settle(torch.from_numpy(answer.displacement)[None]))


class _Answer(NamedTuple):
    """What a program found: a proved bound of the margin, and the displacement of its best solution, (D,), if any."""

    bound: float
    displacement: np.ndarray | None


class _Program:
    """One sample's network as linear constraints: ``margin(x')`` for x' in the ball, with binaries for open rectifiers.

    The variables are the displacement (in L1 its positive and its negative part), the outputs of the rectifiers that
    may be on or off, and whether they are on. Everything else is an affine function of them and is put in.
    """

    def __init__(self, chain: list[Affine], ball: BallAndBox, hidden: list[Interval]) -> None:
        start, radius = ball.start[0].numpy(), float(ball.radius[0])
        down, up = (side[0].numpy() for side in ball.enclosing())
        features = len(start)
        self.displacement = np.eye(features)
        lower, upper = [down], [up]
        if ball.norm == "l1":
            self.displacement = np.hstack([np.eye(features), -np.eye(features)])
            lower, upper = [np.zeros(2 * features)], [np.concatenate([up, -down])]
        n_inputs = self.displacement.shape[1]
        open_units = [((low < 0) & (high > 0)).numpy() for low, high in hidden]
        n_open = int(sum(units.sum() for units in open_units))
        n_variables = n_inputs + 2 * n_open
        rows, limits = [], []
        if ball.norm == "l1":
            row = np.zeros((1, n_variables))
            row[0, :n_inputs] = 1
            rows.append(row)
            limits.append(np.array([radius]))
        state, constant = np.zeros((features, n_variables)), start
        state[:, :n_inputs] = self.displacement
        column = n_inputs
        for layer, (low_tensor, high_tensor), units in zip(chain, hidden, open_units, strict=True):
            weight, low, high = layer.weight.numpy(), low_tensor.numpy()[units], high_tensor.numpy()[units]
            state, constant = weight @ state, weight @ constant + layer.bias.numpy()
            off = (high_tensor <= 0).numpy()
            state[off], constant[off] = 0, 0
            before, shift = state[units], constant[units]
            count = len(low)
            output, switch = np.zeros_like(before), np.zeros_like(before)
            output[np.arange(count), column + np.arange(count)] = 1
            switch[np.arange(count), column + n_open + np.arange(count)] = 1
            # output >= before; output <= before - low (1 - switch); output <= high switch
            rows += [before - output, output - before - low[:, None] * switch, output - high[:, None] * switch]
            limits += [-shift, shift - low, np.zeros(count)]
            lower.append(np.zeros(count))
            upper.append(high)
            state[units], constant[units] = output, 0
            column += count
        self.state, self.constant = state, constant
        self.rows = np.vstack(rows) if rows else np.zeros((0, n_variables))
        self.limits = np.concatenate(limits) if limits else np.zeros(0)
        self.bounds = VariableBounds(
            np.concatenate([*lower, np.zeros(n_open)]), np.concatenate([*upper, np.ones(n_open)])
        )
        self.integrality = np.concatenate([np.zeros(n_variables - n_open), np.ones(n_open)])

    def minimise(
        self, weight: np.ndarray, bias: float, ceiling: float, goal: Goal, time_limit: float | None
    ) -> _Answer:
        """Minimise ``weight . hidden + bias`` below `ceiling`; for a verdict the first solution below it is enough."""
        objective, shift = weight @ self.state, weight @ self.constant + bias
        options = {"mip_rel_gap": 1e9 if goal == "verdict" else 0.0}
        if time_limit is not None:
            options["time_limit"] = time_limit
        found = milp(
            objective,
            integrality=self.integrality,
            bounds=self.bounds,
            constraints=LinearConstraint(
                np.vstack([self.rows, objective]), -np.inf, np.append(self.limits, ceiling - shift)
            ),
            options=options,
        )
        if found.status == _INFEASIBLE:
            return _Answer(ceiling, None)
        proved = found.mip_dual_bound
        bound = -np.inf if proved is None or not np.isfinite(proved) else proved + shift
        if found.x is None:
            return _Answer(bound, None)
        return _Answer(bound, self.displacement @ found.x[: self.displacement.shape[1]])


_DESCENT = 24
# Steps on a margin's first bound, and on each case after it, which begins where the one before ended.
# Where every rectifier is decided the multipliers are all that is left.
_FIRST_STEPS, _STEPS, _LAST_STEPS = 16, 8, 200
_BATCH, _CASES = 512, 4000
# What a bound has to be above zero to be a proof in spite of rounding.
_ROUNDING = 1e-9
_INFEASIBLE = 2
