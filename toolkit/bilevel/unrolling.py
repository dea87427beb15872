r"""Truncated gradients: through the last steps of an iteration, and through short pieces of a recurrence.

For the scalar recurrence :math:`h_t = a h_{t-1} + x`, the exact derivative of :math:`h_T` by x is
:math:`(1 - a^T) / (1 - a)`; truncated to the last k steps it is :math:`(1 - a^k) / (1 - a)`. The error is not monotone
in k for other recurrences.

T time steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit.blocks import block, stop_gradient, stop_recording

__all__ = ["EARLY_STEPS", "STATE", "randomly_truncated_scan", "truncated_scan", "unroll"]

EARLY_STEPS = block(
    "bilevel.early_steps",
    "The first steps of a solver: the last ones forget where they began, so the gradient through them is nearly whole "
    "and the graph of the first ones is saved.",
)
STATE = block(
    "bilevel.state",
    "The state that a recurrence carries into the next piece of a sequence: the gradient ends there, so each piece can "
    "be differentiated by itself, and its memory freed.",
)

T = TypeVar("T")
State = TypeVar("State")
Step = Callable[[State, Tensor], tuple[State, Tensor]]


def unroll(step: Callable[[T], T], start: T, *, steps: int, attached: int) -> T:
    r"""Return the result of `steps` times ``w = step(w)``, with a graph of the last `attached` steps.

    With the block `EARLY_STEPS` in place the gradient is that of the last K steps, whose start is held constant. Open,
    it is that of all steps. For gradient descent with step size :math:`\alpha` at a minimum with Hessian H, the blocked
    gradient is the implicit one with :math:`H^{-1}` replaced by :math:`\alpha \sum_{j<K} (I - \alpha H)^j`: see
    `neumann_series`.

    Args:
        step: One step of a solver; it may use tensors with a gradient: hyperparameters.
        start: The first iterate: a tensor, or a tree of tensors.
        steps: Number of steps.
        attached: K, from 1 to `steps`. Without an attached step there would be no gradient at all.

    Returns:
        The last iterate, like `start`.

    Raises:
        ValueError: If a number is out of range.

    References:
        Shaban, Cheng, Hatch and Boots, "Truncated back-propagation for bilevel optimization", 2019.

    Example:
        >>> x = torch.tensor(1.0, requires_grad=True)
        >>> unroll(lambda w: 0.5 * w + x, torch.tensor(0.0), steps=20, attached=3).backward()
        >>> x.grad  # 2 with the block open
        tensor(1.7500)
    """
    steps = integer("steps", steps)
    attached = integer("attached", attached, 1, steps)
    with stop_recording(EARLY_STEPS):
        for _ in range(steps - attached):
            start = step(start)
    for _ in range(attached):
        start = step(start)
    return start


def truncated_scan(
    step: Step[State], state: State, inputs: Tensor | Sequence[Any], *, every: int
) -> tuple[State, Tensor]:
    r"""Run a recurrence, and hold its state constant after every k steps: truncated backpropagation through time.

    Each time step computes ``state, output = step(state, input)``. With the block `STATE` in place no gradient passes
    from a piece of k steps to the one before; open, it is that of backpropagation through time. The first state is not
    held: pass a state from the previous batch as ``stop_gradient(state, STATE)``.

    Args:
        step: State and input to the next state and an output, as in ``jax.lax.scan``. The state may be a tree, for
            example the ``(h, c)`` of an LSTM.
        state: The first state.
        inputs: (T, ...), or a sequence of T inputs.
        every: Number of steps in a piece, k.

    Returns:
        The last state, and the outputs (T, ...).

    Raises:
        ValueError: If `every` is not a positive integer, or there are no inputs.

    References:
        Williams and Peng, "An efficient gradient-based algorithm for on-line training of recurrent network
        trajectories", 1990.

    Example:
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> _, h = truncated_scan(lambda h, x: (a * h + x,) * 2, torch.tensor(0.0), torch.ones(4), every=2)
        >>> torch.autograd.grad(h[3], a)  # 2.75 with the block open
        (tensor(2.5000),)
    """
    every = integer("every", every)
    n = _steps(inputs)
    return _scan(step, state, inputs, [0.0 if t % every == 0 else 1.0 for t in range(n)])


def randomly_truncated_scan(
    step: Step[State],
    state: State,
    inputs: Tensor | Sequence[Any],
    *,
    probability: float,
    generator: torch.Generator | None = None,
) -> tuple[State, Tensor]:
    r"""Run a recurrence that is truncated at random times, so that its gradient is right on average.

    Before each step but the first, the state is held constant with probability c. Otherwise its gradient is multiplied
    by :math:`1 / (1 - c)`. The expectation over the cuts is the gradient of backpropagation through time, at the price
    of variance. With the block `STATE` open, cuts and factors vanish, and the gradient is exact. A piece has 1 / c
    steps on average.

    Args:
        step: As in `truncated_scan`.
        state: As in `truncated_scan`.
        inputs: As in `truncated_scan`.
        probability: c, at least 0 and less than 1.
        generator: Draws the cuts. None: torch's global generator.

    Returns:
        The last state, and the outputs (T, ...).

    Raises:
        ValueError: If `probability` is out of range, or there are no inputs.

    References:
        Tallec and Ollivier, "Unbiasing truncated backpropagation through time", 2017.

    Example:
        >>> from functools import partial
        >>> a, generator = torch.tensor(0.5, requires_grad=True), torch.Generator().manual_seed(0)
        >>> scan = partial(randomly_truncated_scan, lambda h, x: (a * h + x,) * 2, torch.tensor(0.0), torch.ones(4))
        >>> scans = [scan(probability=0.5, generator=generator)[1][3] for _ in range(1000)]
        >>> torch.autograd.grad(torch.stack(scans).mean(), a)[0].round()  # 2.75 on average
        tensor(3.)
    """
    probability = number("probability", probability, least=0, below=1)
    draws = own_generator(generator)
    cuts = torch.rand(_steps(inputs), generator=draws, device=draws.device) < probability
    return _scan(step, state, inputs, [0.0 if cut else 1 / (1 - probability) for cut in cuts.tolist()])


def _steps(inputs: Tensor | Sequence[Any]) -> int:
    listed = inputs.ndim > 0 if isinstance(inputs, Tensor) else isinstance(inputs, Sequence)
    found = len(inputs) if listed else 0
    if found == 0:
        raise ValueError("`inputs` should have at least one time step. Found none.")
    return found


def _scan(
    step: Step[State], state: State, inputs: Tensor | Sequence[Any], factors: Sequence[float]
) -> tuple[State, Tensor]:
    """Run a recurrence; the gradient of the state before step t is multiplied by ``factors[t]``, for t > 0."""
    outputs = []
    for t, (input, factor) in enumerate(zip(inputs, factors, strict=True)):
        if t and factor != 1:
            state = _scaled(state, factor)
        state, output = step(state, input)
        outputs.append(output)
    return state, torch.stack(outputs)


def _scaled(state: State, factor: float) -> State:
    """Return a state whose gradient is multiplied by a factor while its block is in place."""
    held = stop_gradient(state, STATE)
    if factor == 0:
        return held  # zero times infinity is NaN

    def scaled(still: Any, moving: Any) -> Any:
        differentiable = isinstance(moving, Tensor) and (moving.is_floating_point() or moving.is_complex())
        # The difference is 0, and NaN where the state is infinite, as the log-probability of an impossible state is.
        return still + factor * (moving - still).nan_to_num(0) if differentiable else moving

    return tree_map(scaled, held, state)  # type: ignore[no-any-return]
