"""Robust losses: held weights give their gradient; majorisers change the curvature alone; proximal terms."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from contract import BlockCase

from toolkit import unblock
from toolkit.curvature import (
    ANCHOR,
    MAJORISER,
    WEIGHTS,
    half_quadratic_loss,
    proximal_penalty,
    reweighted_loss,
    robust_loss,
    robust_weights,
)

KINDS = ["huber", "cauchy", "geman_mcclure", "welsch"]
SCALE = 1.3
RESIDUALS = torch.tensor([0.3, -1.1, 4.0, -0.2, -2.4], dtype=torch.float64)


def residuals():
    return {"r": RESIDUALS.clone().requires_grad_()}


def influence(kind, r):
    """Return the derivative of the robust loss by its residual."""
    u = (r / SCALE) ** 2
    return {
        "huber": torch.where(r.abs() <= SCALE, r, SCALE * r.sign()),
        "cauchy": r / (1 + u),
        "geman_mcclure": r / (1 + u) ** 2,
        "welsch": r * (-u).exp(),
    }[kind]


def with_moving_weights(kind, r):
    """Return the derivative of ``w(r) r^2 / 2``."""
    u = (r / SCALE) ** 2
    return {
        "huber": torch.where(r.abs() <= SCALE, r, SCALE * r.sign() / 2),
        "cauchy": r / (1 + u) ** 2,
        "geman_mcclure": r * (1 - u) / (1 + u) ** 3,
        "welsch": r * (1 - u) * (-u).exp(),
    }[kind]


def derivative(formula, kind):
    return lambda p: {"r": formula(kind, p["r"].detach())}


def slope_of_slope(function, kind):
    """Return a scalar whose gradient is the second derivative."""

    def loss(p):
        (slope,) = torch.autograd.grad(function(p["r"], kind=kind, scale=SCALE).sum(), p["r"], create_graph=True)
        return slope.sum()

    return loss


def second_derivative(kind, r):
    u = (r / SCALE) ** 2
    return {
        "huber": (r.abs() <= SCALE).double(),
        "cauchy": (1 - u) / (1 + u) ** 2,
        "geman_mcclure": (1 - 3 * u) / (1 + u) ** 3,
        "welsch": (1 - 2 * u) * (-u).exp(),
    }[kind]


def weights(kind, r):
    return influence(kind, r) / r


POINT, ANCHORS = torch.tensor([0.4, -1.2], dtype=torch.float64), torch.tensor([1.0, 0.3], dtype=torch.float64)

BLOCK_CASES = [
    *(
        BlockCase(
            id=f"curvature-reweighted-{kind}",
            block=WEIGHTS,
            parameters=residuals,
            loss=lambda p, kind=kind: reweighted_loss(p["r"], kind=kind, scale=SCALE).sum(),
            blocked=derivative(influence, kind),
            opened=derivative(with_moving_weights, kind),
        )
        for kind in KINDS
    ),
    *(
        BlockCase(
            id=f"curvature-half-quadratic-{kind}",
            block=MAJORISER,
            parameters=residuals,
            loss=lambda p, kind=kind: half_quadratic_loss(p["r"], kind=kind, scale=SCALE).sum(),
            blocked=derivative(influence, kind),
            opened=derivative(influence, kind),
        )
        for kind in KINDS
    ),
    *(
        BlockCase(
            id=f"curvature-of-half-quadratic-{kind}",
            block=MAJORISER,
            parameters=residuals,
            loss=slope_of_slope(half_quadratic_loss, kind),
            blocked=derivative(weights, kind),
            opened=derivative(second_derivative, kind),
        )
        for kind in KINDS
    ),
    BlockCase(
        id="curvature-proximal",
        block=ANCHOR,
        parameters=lambda: {"x": POINT.clone().requires_grad_(), "a": ANCHORS.clone().requires_grad_()},
        loss=lambda p: proximal_penalty(p["x"], p["a"], step=0.3),
        blocked=lambda p: {"x": (POINT - ANCHORS) / 0.3, "a": torch.zeros(2).double()},
        opened=lambda p: {"x": (POINT - ANCHORS) / 0.3, "a": (ANCHORS - POINT) / 0.3},
    ),
]

PEER_CASES = {
    "reweighted_squares": (
        {"r": RESIDUALS},
        {},
        lambda p, c: sum(reweighted_loss(p["r"], kind=kind, scale=SCALE).sum() for kind in ("cauchy", "welsch")),
    ),
    "half_quadratic": ({"r": RESIDUALS}, {}, lambda p, c: slope_of_slope(half_quadratic_loss, "cauchy")(p)),
    "proximal": ({"x": POINT, "a": ANCHORS}, {}, lambda p, c: proximal_penalty(p["x"], p["a"], step=0.3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_the_table(kind):
    r = residuals()["r"]
    value = robust_loss(r, kind=kind, scale=SCALE)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), r)[0], influence(kind, RESIDUALS))
    torch.testing.assert_close(robust_weights(RESIDUALS, kind=kind, scale=SCALE), weights(kind, RESIDUALS))
    torch.testing.assert_close(half_quadratic_loss(RESIDUALS, kind=kind, scale=SCALE), value.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_the_minimum_of_the_half_quadratic_form(kind):
    """The penalty makes the robust loss the lowest of all weighted squares, at the stated weight."""
    scipy = pytest.importorskip("scipy.optimize")
    penalty = {
        "huber": lambda w: SCALE**2 / 2 * (1 / w - 1),
        "cauchy": lambda w: SCALE**2 / 2 * (w - 1 - np.log(w)),
        "geman_mcclure": lambda w: SCALE**2 / 2 * (1 - np.sqrt(w)) ** 2,
        "welsch": lambda w: SCALE**2 / 2 * (1 - w + w * np.log(w)),
    }[kind]
    for r in (0.3, 2.4):
        found = scipy.minimize_scalar(
            lambda w, r=r: w * r**2 / 2 + penalty(w), bounds=(1e-9, 1), method="bounded", options={"xatol": 1e-12}
        )
        point = torch.tensor(r, dtype=torch.float64)
        assert robust_loss(point, kind=kind, scale=SCALE).item() == pytest.approx(found.fun, abs=1e-7)
        assert robust_weights(point, kind=kind, scale=SCALE).item() == pytest.approx(found.x, abs=1e-4)


def test_numbers_of_the_absolute_value_with_a_floor():
    """The majoriser of ``max(|x|, floor)`` is a half-quadratic Huber loss over its scale."""
    x = torch.tensor([1.5, -0.2, 0.05], dtype=torch.float64, requires_grad=True)

    def slopes():
        value = half_quadratic_loss(x, kind="huber", scale=0.1).sum() / 0.1
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return slope, torch.autograd.grad(slope.sum(), x)[0]

    slope, curvature = slopes()
    expected = torch.tensor([1, -1, 0.5], dtype=torch.float64)
    torch.testing.assert_close(slope.detach(), expected)
    torch.testing.assert_close(curvature, torch.tensor([1 / 1.5, 5, 10], dtype=torch.float64))
    with unblock(MAJORISER):
        slope, curvature = slopes()
    torch.testing.assert_close(slope.detach(), expected)
    torch.testing.assert_close(curvature, torch.tensor([0.0, 0, 10], dtype=torch.float64))
    with unblock(WEIGHTS):  # the same weights without their penalty: the constant matters
        value = reweighted_loss(x, kind="huber", scale=0.1).sum() / 0.1
        (slope,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(slope, torch.tensor([0.5, -0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("kind", ["geman_mcclure", "welsch"])
def test_distant_points_repel_with_the_weights_open(kind):
    r = torch.tensor([4.0], dtype=torch.float64, requires_grad=True)
    with unblock(WEIGHTS):
        opened = torch.autograd.grad(reweighted_loss(r, kind=kind, scale=1.0).sum(), r)[0]
    assert opened < 0 < torch.autograd.grad(reweighted_loss(r, kind=kind, scale=1.0).sum(), r)[0]


def test_a_newton_step_on_the_surrogate_is_a_step_of_reweighted_least_squares():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 3 * torch.randn(20, generator=generator).double()
    beta = torch.tensor([0.2, 0.1, -0.3], dtype=torch.float64)

    def loss(b):
        return reweighted_loss(y - x @ b, kind="cauchy", scale=1.0).sum()

    step = torch.linalg.solve(
        torch.autograd.functional.hessian(loss, beta), torch.autograd.functional.jacobian(loss, beta)
    )
    root = robust_weights(y - x @ beta, kind="cauchy", scale=1.0).sqrt()
    expected = torch.linalg.lstsq(root[:, None] * x, root * y).solution
    torch.testing.assert_close(beta - step, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_and_huge_residuals(kind, dtype):
    r = torch.tensor([0.0, 1e-3, 1e4, -1e6], dtype=dtype, requires_grad=True)
    for function, block in ((robust_loss, None), (reweighted_loss, WEIGHTS), (half_quadratic_loss, MAJORISER)):
        for blocks in ((), (block,) if block else ()):
            with unblock(*blocks):
                value = function(r, kind=kind, scale=1.0)
                (slope,) = torch.autograd.grad(value.sum(), r)
            assert value.isfinite().all()
            assert slope.isfinite().all()
            assert value.dtype == dtype
            assert (value[0], slope[0]) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_whose_square_is_infinite(kind):
    """``c^2 log(1 + r^2) / 2`` is finite there, with the slope ``c^2 / r``; the other losses have their last value."""
    r = torch.tensor([1e15, -1e25], requires_grad=True)
    expected = {
        "huber": ([1e15, 1e25], [1.0, -1.0]),
        "cauchy": ([15 * math.log(10), 25 * math.log(10)], [1e-15, -1e-25]),
    }.get(kind, ([0.5, 0.5], [0.0, 0.0]))
    for function in (robust_loss, half_quadratic_loss, reweighted_loss):
        value = function(r, kind=kind, scale=1.0)
        (slope,) = torch.autograd.grad(value.sum(), r)
        torch.testing.assert_close(slope, torch.tensor(expected[1]), rtol=1e-4, atol=1e-40)
        if function is reweighted_loss:  # w r^2 / 2
            value_expected = {"huber": [5e14, 5e24], "cauchy": [0.5, 0.5]}.get(kind, [0.0, 0.0])
        else:
            value_expected = expected[0]
        torch.testing.assert_close(value, torch.tensor(value_expected), rtol=1e-5, atol=1e-28)


def test_at_its_own_anchor_the_block_decides_on_the_hessian_alone():
    def penalty(x):
        return proximal_penalty(x, x, step=0.3)

    for blocks, expected in (((), torch.eye(2).double() / 0.3), ((ANCHOR,), torch.zeros(2, 2).double())):
        with unblock(*blocks):
            x = POINT.clone().requires_grad_()
            assert torch.autograd.grad(penalty(x), x)[0].tolist() == [0, 0]
            torch.testing.assert_close(torch.autograd.functional.hessian(penalty, POINT), expected)


def test_the_minimum_is_a_proximal_step():
    """Of the absolute value: soft thresholding."""
    scipy = pytest.importorskip("scipy.optimize")
    for anchor, expected in ((1.0, 0.7), (0.2, 0.0), (-2.0, -1.7)):
        found = scipy.minimize_scalar(
            lambda x, a=anchor: abs(x) + proximal_penalty(torch.tensor([x]), torch.tensor([a]), step=0.3).item(),
            bounds=(-3, 3),
            method="bounded",
        )
        assert found.x == pytest.approx(expected, abs=1e-3)


@pytest.mark.skipif(not importlib.util.find_spec("optax"), reason="optax is not installed")
def test_the_huber_loss_of_optax():
    import jax
    import optax

    jax.config.update("jax_enable_x64", True)
    value, pullback = jax.vjp(lambda r: optax.losses.huber_loss(r, delta=SCALE), RESIDUALS.numpy())
    r = residuals()["r"]
    found = robust_loss(r, kind="huber", scale=SCALE)
    np.testing.assert_allclose(found.detach().numpy(), value, rtol=1e-12)
    slope = torch.autograd.grad(reweighted_loss(r, kind="huber", scale=SCALE).sum(), r)[0]
    np.testing.assert_allclose(slope.numpy(), pullback(jax.numpy.ones(5))[0], rtol=1e-12)


def test_the_huber_loss_of_torch():
    zero = torch.zeros(5).double()
    expected = torch.nn.functional.huber_loss(RESIDUALS, zero, delta=SCALE, reduction="none")
    torch.testing.assert_close(robust_loss(RESIDUALS, kind="huber", scale=SCALE), expected)


@pytest.mark.parametrize("function", [robust_loss, robust_weights, reweighted_loss, half_quadratic_loss])
def test_wrong_arguments_are_refused(function):
    with pytest.raises(ValueError, match="`kind` should be one of 'huber', 'cauchy'"):
        function(RESIDUALS, kind="tukey", scale=1.0)
    with pytest.raises(ValueError, match="`scale` should be positive"):
        function(RESIDUALS, kind="huber", scale=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_large_residuals_of_half_precision_have_a_loss(kind):
    """Their squares exceed the range of float16."""
    r = torch.tensor([-30000.0, 300.0, 0.5], dtype=torch.float16, requires_grad=True)
    exact = r.detach().double()
    for function in (robust_loss, robust_weights, reweighted_loss, half_quadratic_loss):
        found = function(r, kind=kind, scale=1.0)
        torch.testing.assert_close(found, function(exact, kind=kind, scale=1.0).to(found))
        assert torch.autograd.grad(found.sum(), r, allow_unused=True)[0].isfinite().all()


def test_an_anchor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="`anchor` should have the shape of `point`"):
        proximal_penalty(POINT, ANCHORS[:, None], step=1)


def test_a_step_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="`step` should be positive"):
        proximal_penalty(POINT, ANCHORS, step=0)
