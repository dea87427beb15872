r"""Bilevel optimisation: gradients through solvers, and the blocks that truncate them.

An outer loss is evaluated at the result of an inner computation: adapted parameters, a minimum, a fixed point, the
state of a recurrence. The exact gradient runs through all of the inner computation. Each block here holds a part of
this computation constant, and saves the graph of the part:

- `adaptation`: MAML and its first-order form, Reptile, implicit MAML.
- `implicit`: gradients of minima and roots by the implicit function theorem, of any order.
- `unrolling`: truncated unrolling of a solver, truncated backpropagation through time.
- `equilibrium`: fixed points with one-step, phantom and implicit gradients.
- `solvers`: fixed-point iteration with Anderson's acceleration, conjugate gradients, the Neumann series.
"""

from toolkit.bilevel.adaptation import ADAPTED, INNER_GRADIENT, adapt, implicit_adapt, reptile_loss
from toolkit.bilevel.equilibrium import FIXED_POINT, equilibrium, phantom
from toolkit.bilevel.implicit import JACOBIAN, SOLUTION, implicit_minimum, implicit_root, newton_step
from toolkit.bilevel.solvers import ConvergenceWarning, Solved, conjugate_gradient, fixed_point, neumann_series
from toolkit.bilevel.unrolling import EARLY_STEPS, STATE, randomly_truncated_scan, truncated_scan, unroll

__all__ = [
    "ADAPTED",
    "EARLY_STEPS",
    "FIXED_POINT",
    "INNER_GRADIENT",
    "JACOBIAN",
    "SOLUTION",
    "STATE",
    "ConvergenceWarning",
    "Solved",
    "adapt",
    "conjugate_gradient",
    "equilibrium",
    "fixed_point",
    "implicit_adapt",
    "implicit_minimum",
    "implicit_root",
    "neumann_series",
    "newton_step",
    "phantom",
    "randomly_truncated_scan",
    "reptile_loss",
    "truncated_scan",
    "unroll",
]
