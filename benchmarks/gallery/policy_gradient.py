"""Policy gradients beside torchrl, which is eager, and beside rlax under `jax.jit`, ours being compiled."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import Row, gradient, timed_row
from toolkit import policy_gradient as pg

BATCH, TIMES, ACTIONS, SIZE = 256, 20, 6, 4


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32, at batches of 256."""
    yield from _plain_rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("torchrl"):
            yield from _rows_of_torchrl()
        if importlib.util.find_spec("rlax"):
            yield from _rows_of_rlax()


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _trajectories(times: int = TIMES) -> dict[str, Tensor]:
    rho = _draw(BATCH, times, seed=3).exp()
    return {
        "r": _draw(BATCH, times, seed=1),
        "d": torch.full((BATCH, times), 0.9),
        "v": _draw(BATCH, times + 1, seed=2),
        "rho": rho,
    }


def _value_loop(r: Tensor, d: Tensor, v: Tensor) -> Tensor:
    """Return the value loss of generalised advantages, written as a loop over times into a buffer."""
    advantages = torch.zeros_like(r)
    total = torch.zeros(len(r))
    with torch.no_grad():
        for t in range(r.shape[1] - 1, -1, -1):
            total = r[:, t] + d[:, t] * v[:, t + 1] - v[:, t] + 0.95 * d[:, t] * total
            advantages[:, t] = total
    return 0.5 * (advantages + v[:, :-1].detach() - v[:, :-1]).square().mean()


def _plain_rows() -> Iterator[Row]:
    """Measure against the loss as it is usually written."""
    logits, actions, advantages = _draw(BATCH, ACTIONS).requires_grad_(), torch.arange(BATCH) % ACTIONS, _draw(BATCH)
    index = actions[:, None]

    def written() -> Tensor:
        return -(logits.log_softmax(-1).gather(1, index)[:, 0] * advantages.detach()).mean()

    yield timed_row(
        "policy_gradient_loss / log_softmax and gather",
        gradient(lambda: pg.policy_gradient_loss(logits, actions, advantages), logits),
        gradient(written, logits),
        "at most 1.1",
    )
    for times in (TIMES, 500):
        t = _trajectories(times)
        v = t["v"].requires_grad_()
        yield timed_row(
            f"gae_value_loss / a loop over {times} times",
            gradient(lambda t=t, v=v: pg.gae_value_loss(t["r"], t["d"], 0.95, v), v),
            gradient(lambda t=t, v=v: _value_loop(t["r"], t["d"], v), v),
            "at most 1.1",
        )


def _rows_of_torchrl() -> Iterator[Row]:
    import torchrl.objectives.value.functional as functional

    for times in (TIMES, 500):
        t = _trajectories(times)
        done = torch.zeros(BATCH, times, 1, dtype=torch.bool)
        columns = t["v"][:, :-1, None], t["v"][:, 1:, None], t["r"][..., None], done, done
        for name in ("generalized_advantage_estimate", "vec_generalized_advantage_estimate"):
            theirs = getattr(functional, name)
            yield timed_row(
                f"generalised advantages / torchrl's {name}, {times} times",
                lambda t=t: pg.truncated_generalized_advantage_estimation(t["r"], t["d"], 0.95, t["v"]),
                lambda theirs=theirs, columns=columns: theirs(0.9, 0.95, *columns),
                "at most 1.1",
                note="forward",
            )
        log_rho = t["rho"].log()[..., None]
        yield timed_row(
            f"vtrace_td_error_and_advantage / torchrl's, {times} times",
            lambda t=t: pg.vtrace_td_error_and_advantage(t["v"][:, :-1], t["v"][:, 1:], t["r"], t["d"], t["rho"]),
            lambda log_rho=log_rho, columns=columns: functional.vtrace_advantage_estimate(
                0.9, log_rho, 0 * log_rho, *columns
            ),
            "at most 1.1",
            note="forward",
        )


def _rows_of_rlax() -> Iterator[Row]:
    import jax
    import rlax

    t = _trajectories()
    r, d, v, rho = (t[name] for name in ("r", "d", "v", "rho"))
    logits, actions, adv = _draw(BATCH, ACTIONS), torch.arange(BATCH) % ACTIONS, _draw(BATCH)
    action, slope = _draw(BATCH, SIZE), _draw(BATCH, SIZE, seed=4)
    np = jax.numpy

    def of_gae(v: Any, r: Any, d: Any) -> Any:
        found = jax.vmap(lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, 0.95, v, True))(r, d, v)
        return 0.5 * np.mean((jax.lax.stop_gradient(found + v[:, :-1]) - v[:, :-1]) ** 2)

    def of_vtrace(v: Any, r: Any, d: Any, rho: Any) -> Any:
        return 0.5 * np.mean(jax.vmap(rlax.vtrace)(v[:, :-1], v[:, 1:], r, d, rho) ** 2)

    programs: list[tuple[str, Callable[..., Tensor], Callable[..., Any], tuple[Tensor, ...]]] = [
        (
            "policy_gradient_loss",
            pg.policy_gradient_loss,
            lambda logits, a, adv: rlax.policy_gradient_loss(logits, a, adv, np.ones_like(adv)),
            (logits, actions, adv),
        ),
        (
            "clipped_surrogate_pg_loss",
            lambda ratios, adv: pg.clipped_surrogate_pg_loss(ratios, adv, 0.2),
            lambda ratios, adv: rlax.clipped_surrogate_pg_loss(ratios, adv, 0.2),
            (_draw(BATCH).exp(), adv),
        ),
        (
            "dpg_loss",
            lambda a, slope: pg.dpg_loss(a, slope).sum(),
            lambda a, slope: np.sum(jax.vmap(rlax.dpg_loss)(a, slope)),
            (action, slope),
        ),
        ("gae_value_loss", lambda v, r, d: pg.gae_value_loss(r, d, 0.95, v), of_gae, (v, r, d)),
        (
            "vtrace",
            lambda v, r, d, rho: 0.5 * pg.vtrace(v[:, :-1], v[:, 1:], r, d, rho).square().mean(),
            of_vtrace,
            (v, r, d, rho),
        ),
    ]
    for name, ours, theirs, inputs in programs:
        jitted = jax.jit(jax.value_and_grad(theirs))
        arrays = [np.asarray(each.numpy()) for each in inputs]

        def of_rlax(jitted: Any = jitted, arrays: Any = arrays) -> object:
            return jax.block_until_ready(jitted(*arrays))

        torch.compiler.reset()
        compiled = torch.compile(torch.func.grad_and_value(ours), fullgraph=True)
        what = f"compiled grad_and_value of {name} / rlax's, jitted"
        # jax computes in threads of its own
        of_process = partial(timed_row, clock=time.process_time)
        yield of_process(what, lambda compiled=compiled, inputs=inputs: compiled(*inputs), of_rlax, "at most 1.5")
        leaf = inputs[0].clone().requires_grad_()
        eager = gradient(lambda ours=ours, leaf=leaf, inputs=inputs: ours(leaf, *inputs[1:]), leaf)
        yield of_process(f"eager {name} / rlax's, jitted", eager, of_rlax)
