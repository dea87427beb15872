"""Linear programs of a ReLU network, for proofs that do not depend on the tolerances of a solver.

D inputs, K rectifiers that may be on or off, R rows, V variables.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from toolkit.adversarial.certificates._farthest import BallAndBox
from toolkit.adversarial.certificates._layers import Affine
from toolkit.adversarial.certificates._linear_relaxation import EPSILON, Interval, rounding_of

__all__ = ["Program"]

Array = NDArray[np.float64]


class Program:
    """The network of one sample as linear constraints, and searches over the states of its rectifiers.

    The variables are the displacement (in L1 its positive and its negative part), in units of its range, and the
    outputs of the rectifiers that may be on or off. All other units are affine functions of these variables and are
    substituted. A rectifier has two rows: ``output - input >= 0``, an equation while it is taken to be on, and ``output
    <= line``, where the line joins the ends of its graph. While it is taken to be off, its output is at most 0.
    """

    def __init__(self, chain: list[Affine], ball: BallAndBox, hidden: list[Interval]) -> None:
        """Build the program.

        Args:
            chain: The layers before the margins, whose units should be of the order of 1.
            ball: The ball of one sample.
            hidden: Bounds before each rectifier, (M,) each, that hold in spite of rounding.
        """
        # An affine function of several layers is rounded in each of them.
        self._rounding = (len(chain) + 1) * rounding_of(chain, ball)
        open_units = [((low < 0) & (high > 0)).numpy() for low, high in hidden]
        self._n_open = int(sum(units.sum() for units in open_units))
        start, (down, up) = ball.start[0].numpy(), (side[0].numpy() for side in ball.enclosing())
        self._range = _powers_of_two(np.maximum(-down, up))
        lower, upper = down / self._range, up / self._range
        signs = [1.0]
        if ball.norm == "l1":
            signs, lower, upper = [1.0, -1.0], np.zeros(2 * len(start)), np.concatenate([upper, -lower])
        self.displacement = np.hstack([sign * np.diag(self._range) for sign in signs])
        n_inputs = len(lower)
        self._outputs = n_inputs + np.arange(self._n_open)
        state = np.hstack([self.displacement, np.zeros((len(start), self._n_open))])
        constant, size = start, np.abs(start) + np.maximum(-down, up)
        rises, under_lines = [], []
        ends: list[Array] = []
        for layer, (low_tensor, high_tensor), units in zip(chain, hidden, open_units, strict=True):
            weight, bias = layer.weight.numpy(), layer.bias.numpy()
            state, constant = weight @ state, weight @ constant + bias
            size = layer.weight_size.numpy() @ size + layer.bias_size.numpy()
            low, high = low_tensor.numpy()[units], high_tensor.numpy()[units]
            output = np.zeros_like(state[units])
            output[np.arange(len(low)), n_inputs + sum(len(end) for end in ends) + np.arange(len(low))] = 1
            # A little steeper and higher than the line, so that it is above it in spite of rounding.
            slope = high / (high - low) * (1 + 4 * EPSILON)
            offset = -low * slope * (1 + 4 * EPSILON)
            before, shift = state[units], constant[units]
            rises.append((output - before, shift, size[units] + high))
            under_lines.append((output - slope[:, None] * before, slope * shift + offset, size[units] + high))
            ends.append(high)
            off = (high_tensor <= 0).numpy()
            state[off], constant[off], size[off] = 0, 0, 0
            state[units], constant[units], size[units] = output, 0, high
        self._state, self._constant, self._size = state, constant, size
        blocks = [_stacked(rises, len(state[0])), _stacked(under_lines, len(state[0]))]
        if ball.norm == "l1":
            radius = ball.radius[0].numpy()
            unit = _powers_of_two(radius)
            length = np.concatenate([np.tile(self._range, 2) / unit, np.zeros(self._n_open)])
            blocks.append((length[None], radius / unit, radius / unit))
        self._rows, limits, self._sizes = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        is_rise = np.arange(len(limits)) < self._n_open
        self._row_lower, self._row_upper = np.where(is_rise, limits, -np.inf), np.where(is_rise, np.inf, limits)
        self._lower = np.concatenate([lower, np.zeros(self._n_open)])
        self._upper = np.concatenate([upper, *ends])
        self._reach = np.maximum(np.abs(self._lower), np.abs(self._upper))
        self._signs = np.zeros(self._n_open, np.int8)
        self._solver = _solver(self._rows, self._row_lower, self._row_upper, self._lower, self._upper)

    def bound(
        self,
        weight: Array,
        bias: float,
        enough: Callable[[], float],
        visit: Callable[[Array], None],
        time_limit: float | None,
    ) -> float:
        """Return a lower bound of ``weight . hidden + bias``: above ``enough()``, or the best that can be proved.

        Cases with the least bound come first. Each is split at the rectifier that costs its bound most.

        Args:
            weight: Weights of the last rectifiers' outputs, (M,).
            bias: The constant of the function.
            enough: Returns the bound above which a case is closed; called for every case.
            visit: Called with the displacement, (D,), at which each program has its least value.
            time_limit: Seconds; None for no limit.
        """
        cost = weight @ self._state
        scale = float(_powers_of_two(np.abs(cost).max(initial=0)))
        cost /= scale
        constant = weight @ self._constant + bias - self._rounding * (np.abs(weight) @ self._size + abs(bias))
        self._solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
        end = math.inf if time_limit is None else time.monotonic() + time_limit
        order = itertools.count()
        cases: list[tuple[float, int, NDArray[np.int8]]] = [(-math.inf, next(order), np.zeros(self._n_open, np.int8))]
        while cases:
            bound, _, signs = heapq.heappop(cases)
            if bound > enough() or time.monotonic() > end:
                return bound
            value, gaps, displacement = self._relaxed(cost, signs)
            bound = max(bound, float(value * scale + constant))
            if displacement is not None:
                visit(displacement)
            if bound > enough():
                heapq.heappush(cases, (bound, next(order), signs))
            elif signs.all():  # nothing is left to split
                return min(bound, cases[0][0]) if cases else bound
            else:
                unit = int(np.where(signs == 0, gaps, -1).argmax())
                for way in (1, -1):
                    half = signs.copy()
                    half[unit] = way
                    heapq.heappush(cases, (bound, next(order), half))
        return math.inf

    def _relaxed(self, cost: Array, signs: NDArray[np.int8]) -> tuple[float, Array, Array | None]:
        """Bound ``cost . variables`` below while some rectifiers are taken to be on (1) or off (-1).

        Returns:
            The bound, infinite where no input has these states; how much the gap of each rectifier takes off it, (K,);
            and the displacement at which the program has its least value, if it has one.
        """
        row_upper, upper = self._row_upper.copy(), self._upper.copy()
        on = np.flatnonzero(signs > 0)
        row_upper[on] = self._row_lower[on]
        upper[self._outputs[signs < 0]] = 0
        for unit in np.flatnonzero(signs != self._signs).tolist():
            output = int(self._outputs[unit])
            self._solver.changeRowBounds(unit, self._row_lower[unit], row_upper[unit])
            self._solver.changeColBounds(output, 0.0, upper[output])
        self._signs = signs
        self._solver.run()
        status = self._solver.getModelStatus()
        gaps = np.zeros(self._n_open)
        if status == highspy.HighsModelStatus.kInfeasible:
            _, exists, ray = self._solver.getDualRay()
            rays = [sign * np.asarray(ray) for sign in (1, -1)] if exists else []
            proved = any(self._weak_dual(0 * cost, ray, row_upper, upper) > 0 for ray in rays)
            return (math.inf if proved else -math.inf), gaps, None
        if status != highspy.HighsModelStatus.kOptimal:
            return -math.inf, gaps, None
        solution = self._solver.getSolution()
        prices, variables = np.asarray(solution.row_dual), np.asarray(solution.col_value)
        outputs = variables[self._outputs]
        inputs = outputs - (self._rows[: self._n_open] @ variables - self._row_lower[: self._n_open])
        gaps = (outputs - np.maximum(inputs, 0)) * np.abs(prices[self._n_open : 2 * self._n_open])
        n_inputs = self.displacement.shape[1]
        return self._weak_dual(cost, prices, row_upper, upper), gaps, self.displacement @ variables[:n_inputs]

    def _weak_dual(self, cost: Array, prices: Array, row_upper: Array, upper: Array) -> float:
        """Return a lower bound of ``cost . variables`` that holds for any prices of the rows, less its own rounding.

        ``cost . v = prices . (rows v) + (cost - prices rows) . v``, each part bounded by the ends of its ranges: how
        exactly the solver has solved decides how tight it is, not whether it holds.

        References:
            Neumaier and Shcherbina, "Safe bounds in linear and mixed-integer linear programming", 2004.
        """
        ends = np.where(prices > 0, self._row_lower, row_upper)
        prices = np.where(np.isfinite(ends), prices, 0)
        rest = cost - prices @ self._rows
        value = prices @ np.where(np.isfinite(ends), ends, 0) + np.minimum(rest * self._lower, rest * upper).sum()
        absolute = np.abs(prices)
        size = absolute @ self._sizes + (np.abs(cost) + absolute @ np.abs(self._rows)) @ self._reach
        return float(value - 4 * self._rounding * size)


def _stacked(parts: list[tuple[Array, Array, Array]], width: int) -> tuple[Array, Array, Array]:
    """Return the rows of all layers as one matrix, with their limits and the sizes of their terms."""
    rows, limits, sizes = zip(*parts, strict=True)
    return np.concatenate(rows).reshape(-1, width), np.concatenate(limits), np.concatenate(sizes)


def _powers_of_two(values: Any) -> Array:
    """Return the least power of two above each value, by which numbers are divided without rounding; 1 for 0."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(1.0, np.where(mantissa == 0, 0, exponent))


def _solver(rows: Array, row_lower: Array, row_upper: Array, lower: Array, upper: Array) -> Any:
    """Return a solver that keeps its basis from one program to the next, and prints nothing."""
    n_rows, n_columns = rows.shape
    program = highspy.HighsLp()
    program.num_row_, program.num_col_ = n_rows, n_columns
    program.col_cost_ = np.zeros(n_columns)
    program.row_lower_, program.row_upper_ = row_lower, row_upper
    program.col_lower_, program.col_upper_ = lower, upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    at = [np.flatnonzero(row) for row in rows]
    program.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(columns) for columns in at])]).astype(np.int32)
    program.a_matrix_.index_ = np.concatenate([*at, []]).astype(np.int32)
    program.a_matrix_.value_ = rows[rows != 0]
    make: Any = highspy.Highs  # whose type has half of its methods
    solver = make()
    solver.silent()
    options: dict[str, Any] = {"solver": "simplex", "presolve": "off", "threads": 1, "dual_feasibility_tolerance": 1e-9}
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(program)
    return solver
