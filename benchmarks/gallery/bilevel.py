"""Adaptation and equilibria beside higher, torchopt, torchdeq and plain loops of autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._measure import Row, timed_row
from toolkit import unblock
from toolkit.bilevel import FIXED_POINT, INNER_GRADIENT, Solved, adapt, equilibrium, fixed_point, phantom
from toolkit.gradients.memory import measure_memory

STEPS, RATE = 3, 0.02


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32, and the memory that the graph keeps."""
    yield from _adaptation()
    yield from _memory()
    yield from _equilibria()


def _model() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(10, 1)
    return model, x, x.sin()


def _adaptation() -> Iterator[Row]:
    import higher
    import torchopt

    model, x, y = _model()
    parameters = dict(model.named_parameters())

    def loss(p: Any) -> Tensor:
        return (torch.func.functional_call(model, p, (x,)) - y).square().mean()

    def ours() -> object:
        return torch.autograd.grad(
            loss(adapt(loss, parameters, steps=STEPS, step_size=RATE)), list(parameters.values())
        )

    def opened() -> None:
        with unblock(INNER_GRADIENT):
            ours()

    def plain(create_graph: bool) -> object:
        p = parameters
        for _ in range(STEPS):
            slopes = torch.autograd.grad(loss(p), list(p.values()), create_graph=create_graph)
            p = {name: value - RATE * slope for (name, value), slope in zip(p.items(), slopes, strict=True)}
        return torch.autograd.grad(loss(p), list(parameters.values()))

    def of_higher() -> object:
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (copy, step):
            for _ in range(STEPS):
                step.step((copy(x) - y).square().mean())
            return torch.autograd.grad((copy(x) - y).square().mean(), list(parameters.values()))

    def of_torchopt() -> object:
        optimizer = torchopt.sgd(RATE)
        p = tuple(parameters.values())
        state = optimizer.init(p)
        for _ in range(STEPS):
            slopes = torch.autograd.grad(loss(dict(zip(parameters, p, strict=True))), p, create_graph=True)
            updates, state = optimizer.update(slopes, state, inplace=False)
            p = torchopt.apply_updates(p, updates, inplace=False)
        return torch.autograd.grad(loss(dict(zip(parameters, p, strict=True))), list(parameters.values()))

    yield timed_row("first-order MAML / a plain loop, 3 steps", ours, partial(plain, False), "at most 1.3")
    yield timed_row("MAML / a plain loop, 3 steps", opened, partial(plain, True), "at most 1.3")
    yield timed_row("MAML / higher, 3 steps", opened, of_higher, "at most 1.1")
    yield timed_row("MAML / torchopt, 3 steps", opened, of_torchopt, "at most 1.1")
    yield timed_row("MAML: blocked / open, 3 steps", ours, opened, "at most 0.8")


def _layer() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weight = (0.5 * torch.randn(64, 64) / 8).requires_grad_()
    return weight, torch.randn(32, 64), torch.zeros(32, 64)


def _function(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ weight + x)


def _equilibria() -> Iterator[Row]:
    import torchdeq

    weight, x, start = _layer()
    ours = partial(fixed_point, memory=0, tolerance=1e-5, max_steps=30)

    def backward(value: Tensor) -> object:
        return torch.autograd.grad(value.sum(), weight)

    def theirs(**options: Any) -> Callable[[], object]:
        deq = torchdeq.get_deq(
            f_solver="fixed_point_iter", f_max_iter=30, f_tol=1e-4, b_max_iter=30, b_tol=1e-4, **options
        )
        deq.train()
        return lambda: backward(deq(lambda z: _function(z, weight, x), start)[0][-1])

    def one_step(steps: int) -> object:
        return backward(phantom(lambda z: _function(z, weight, x), start, steps=steps, solver=ours).value)

    def implicit() -> object:
        return backward(equilibrium(_function, start, weight, x, solver=ours).value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for steps in (1, 5):
            yield timed_row(
                f"phantom, {steps} steps / torchdeq, 32 x 64",
                partial(one_step, steps),
                theirs(grad=steps),
                "at most 1.1",
            )
        yield timed_row("equilibrium / torchdeq, 32 x 64", implicit, theirs(ift=True), "at most 1.1")


def _memory() -> Iterator[Row]:
    weight, x, start = _layer()

    def exactly(function: Callable[[Tensor], Tensor], z: Tensor) -> Solved:
        found = fixed_point(function, z, memory=0, tolerance=0, max_steps=30)
        return Solved(found.value, found.residual, found.steps, torch.ones_like(found.converged))

    def kept() -> int:
        return measure_memory(
            lambda: phantom(lambda z: _function(z, weight, x), start, solver=exactly).value.sum()
        ).graph

    blocked = kept()
    with unblock(FIXED_POINT):
        opened = kept()
    note = f"{blocked / 2**20:.2f} MiB against {opened / 2**20:.2f} MiB"
    yield Row(
        "one-step equilibrium: bytes that the graph keeps, blocked / open, 30 iterations",
        blocked / opened,
        "at most 0.1",
        note,
    )
