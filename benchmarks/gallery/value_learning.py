"""Time of temporal-difference losses beside rlax: a whole gradient, eager and compiled, for 256 samples in float32.

JAX hands a call to another thread by default. Its users wait for this, so the goals compare with it. Within one thread
a small loss takes rlax less time than the guards and allocations of any compiled call take torch. Rows without a goal
show this, and the part of ours above such a call.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import Row, timed_row
from toolkit.value_learning import (
    categorical_q_learning,
    q_learning,
    quantile_q_learning,
    td_lambda,
    td_learning,
)

_SIZE, _ACTIONS, _ATOMS, _STEPS = 256, 6, 51, 20
_NOTE = f"value and gradient, {_SIZE} samples"
_CALL = "a square alone"  # the cost of a call: it has no goal, and the small losses below are not much above it

# Name -> ours for a batch, rlax's for one sample, and the arguments, by the first of which both are differentiated.
_Program = tuple[Callable[..., Tensor], Callable[..., Any], tuple[Tensor, ...]]


def rows() -> Iterator[Row]:
    """Measure value and gradient in processor time of all threads: rlax is compiled, and computes on others too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jax
        import rlax
        from jax.extend.backend import clear_backends
    for name, program in _programs(rlax).items():
        yield from _rows(name, *program)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    clear_backends()
    for name in (_CALL, "TD(0)"):
        yield from _rows(name, *_programs(rlax)[name], peer="rlax in the same thread")
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    clear_backends()
    yield _row_above_a_call(*(_programs(rlax)[name] for name in (_CALL, "TD(0)")))


def _joint(ours: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the compiled value and gradient by the first argument."""
    torch.compiler.reset()  # compiled forms of one function are tried one after the other
    joint: Callable[..., Any] = torch.compile(
        torch.func.grad_and_value(lambda *values: ours(*values).mean()), fullgraph=True
    )
    return joint


def _row_above_a_call(call: _Program, program: _Program) -> Row:
    """Compare a small loss with the smallest one, both compiled."""
    (ours, _, arguments), (floor, _, of_floor) = program, call
    joint, least = _joint(ours), _joint(floor)
    what = "compiled TD(0) / compiled square alone"
    return timed_row(what, lambda: joint(*arguments), lambda: least(*of_floor), note=_NOTE)


def _rows(
    name: str,
    ours: Callable[..., Tensor],
    theirs: Callable[..., Any],
    arguments: tuple[Tensor, ...],
    peer: str = "rlax",
) -> Iterator[Row]:
    import jax

    compiled = jax.jit(jax.value_and_grad(lambda *values: jax.vmap(theirs)(*values).mean()))
    arrays = [jax.numpy.asarray(argument.numpy()) for argument in arguments]
    leaf, *others = arguments[0].clone().requires_grad_(), *arguments[1:]

    def loss(*values: Tensor) -> Tensor:
        return ours(*values).mean()

    joint = _joint(ours)
    forms: dict[str, tuple[Callable[[], object], str]] = {
        "eager": (lambda: torch.autograd.grad(loss(leaf, *others), leaf), ""),
        "compiled": (lambda: joint(*arguments), "" if name == _CALL or peer != "rlax" else "at most 1.5"),
    }

    def of_rlax() -> object:
        return jax.block_until_ready(compiled(*arrays))

    for form, (program, goal) in forms.items():
        yield timed_row(f"{form} {name} / {peer}", program, of_rlax, goal, note=_NOTE, clock=time.process_time)


def _programs(rlax: Any) -> dict[str, _Program]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(_SIZE, *shape, generator=generator)

    actions = torch.randint(_ACTIONS, (_SIZE,), generator=generator, dtype=torch.int32)
    step = (draw(), draw().sigmoid())
    values = draw(_STEPS + 1)
    atoms, tau = torch.linspace(-10, 10, _ATOMS), (torch.arange(_ATOMS) + 0.5) / _ATOMS
    return {
        _CALL: (torch.square, lambda v: v**2, (draw(),)),
        "TD(0)": (
            lambda v, r, d, w: 0.5 * td_learning(v, r, d, w).square(),
            lambda v, r, d, w: 0.5 * rlax.td_learning(v, r, d, w) ** 2,
            (draw(), *step, draw()),
        ),
        f"Q-learning, {_ACTIONS} actions": (
            lambda q, a, r, d, w: 0.5 * q_learning(q, a, r, d, w).square(),
            lambda q, a, r, d, w: 0.5 * rlax.q_learning(q, a, r, d, w) ** 2,
            (draw(_ACTIONS), actions, *step, draw(_ACTIONS)),
        ),
        f"TD(lambda), {_STEPS} steps": (
            lambda v, r, d, w: 0.5 * td_lambda(v, r, d, w, 0.9).square(),
            lambda v, r, d, w: 0.5 * rlax.td_lambda(v, r, d, w, 0.9) ** 2,
            (values[:, :-1].contiguous(), draw(_STEPS), draw(_STEPS).sigmoid(), values[:, 1:].contiguous()),
        ),
        f"C51, {_ATOMS} atoms": (
            lambda q, a, r, d, w: categorical_q_learning(atoms, q, a, r, d, atoms, w),
            lambda q, a, r, d, w: rlax.categorical_q_learning(atoms.numpy(), q, a, r, d, atoms.numpy(), w),
            (draw(_ACTIONS, _ATOMS), actions, *step, draw(_ACTIONS, _ATOMS)),
        ),
        f"QR-DQN, {_ATOMS} quantiles": (
            lambda q, a, r, d, w: quantile_q_learning(q, tau, a, r, d, w, w, huber_param=1),
            lambda q, a, r, d, w: rlax.quantile_q_learning(q, tau.numpy(), a, r, d, w, w, 1.0),
            (draw(_ATOMS, _ACTIONS), actions, *step, draw(_ATOMS, _ACTIONS)),
        ),
    }
