"""Calls of the functions of `toolkit.bilevel` that take a number or a generator."""

from functools import partial

import torch
from calls import Call

from toolkit import bilevel

CALLS = {
    "bilevel.adapt": Call(
        bilevel.adapt, loss=lambda p: p["w"].square().sum(), parameters={"w": torch.ones(2)}, steps=2, step_size=0.1
    ),
    "bilevel.conjugate_gradient": Call(
        bilevel.conjugate_gradient, operator=lambda x: 2 * x, b=torch.ones(2), tolerance=0.1, max_steps=2
    ),
    "bilevel.fixed_point": Call(
        partial(bilevel.fixed_point, torch.cos), start=torch.zeros(2, 1), memory=2, tolerance=0.1, max_steps=4
    ),
    "bilevel.implicit_adapt": Call(
        bilevel.implicit_adapt,
        loss=lambda p: p["w"].square().sum(),
        parameters={"w": torch.ones(2)},
        strength=1.0,
        minimise=partial(bilevel.adapt, steps=2, step_size=0.1),
    ),
    "bilevel.neumann_series": Call(
        bilevel.neumann_series, operator=lambda x: x, b=torch.ones(2), steps=2, step_size=0.5
    ),
    "bilevel.phantom": Call(partial(bilevel.phantom, torch.cos), start=torch.zeros(2, 1), steps=2, damping=0.5),
    "bilevel.randomly_truncated_scan": Call(
        bilevel.randomly_truncated_scan,
        step=lambda h, x: (h + x, h),
        state=torch.ones(1, requires_grad=True),
        inputs=torch.ones(9, 1),
        probability=0.5,
        generator=None,
    ),
    "bilevel.reptile_loss": Call(
        bilevel.reptile_loss, parameters={"w": torch.ones(2)}, adapted={"w": torch.zeros(2)}, step_size=0.5
    ),
    "bilevel.truncated_scan": Call(
        bilevel.truncated_scan, step=lambda h, x: (h + x, h), state=torch.ones(1), inputs=torch.ones(4, 1), every=2
    ),
    "bilevel.unroll": Call(bilevel.unroll, step=torch.cos, start=torch.ones(1), steps=3, attached=2),
}

RESULTS = {"bilevel.ConvergenceWarning", "bilevel.Solved"}
