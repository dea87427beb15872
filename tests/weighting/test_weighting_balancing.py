"""Balanced losses and samples: gradients with each weight held, and what is left without the block."""

import math

import pytest
import torch
from contract import BlockCase
from torch.nn import functional
from values import doubles, gradients, leaves, values_of, witness

from toolkit import unblock
from toolkit.gradients import compare, field_jacobian
from toolkit.weighting import (
    ADAPTIVE_WEIGHT,
    GRADNORM_TARGET,
    IMPORTANCE_WEIGHTS,
    LOSS_RATIOS,
    NLL_WEIGHTS,
    OWN_LOSSES,
    PROFILED_VARIANCES,
    adaptive_weight,
    beta_nll_loss,
    gradnorm_loss,
    importance_weighted_loss,
    profiled_uncertainty_loss,
    ratio_balanced_loss,
    self_normalized_loss,
    uncertainty_loss,
)

POINT = leaves(t=(0.7, -0.3))
LAYER = leaves(w=(0.4, -0.9))
TASKS = leaves(weights=(1.3, 0.7))
NORMS, LOSSES, FIRST = doubles(2, 0.5), doubles(0.8, 1.4), doubles(1, 1)
SAMPLES = leaves(losses=(0.4, 1.7, 0.9), log_weights=(-0.3, 0.8, 0.1))
GAUSSIAN = leaves(mean=(0.3, -1.2), var=(0.8, 2.5))
Y, BETA = doubles(1.1, 0.4), 0.5


def two_losses(t):
    return torch.stack([(t - doubles(1, 2)).square().sum(), (t**4).sum() + t[0] * t[1] + 1])


def slopes(t):
    """Return both losses and their gradients in closed form."""
    return two_losses(t), 2 * (t - doubles(1, 2)), 4 * t**3 + t.flip(0)


def _own(t):
    (l1, l2), g1, g2 = slopes(t)
    return {"t": g1 / l1 + g2 / l2}


def _ratio(t):
    (l1, l2), g1, g2 = slopes(t)
    return {"t": g1 + l1 / l2 * g2}


def autoencoder(w):
    return (w - 1).square().sum(), -(w[0] * w[1] + w[0] ** 3)


def _adaptive_loss(p):
    rec, gan = autoencoder(p["w"])
    return rec + adaptive_weight(rec, gan, p["w"]) * gan


def _adaptive(w):
    g_rec, g_gan = 2 * (w - 1), torch.stack([-w[1] - 3 * w[0] ** 2, -w[0]])
    return {"w": g_rec + g_rec.norm() / (g_gan.norm() + 1e-4) * g_gan}


def _adaptive_open(w):
    found = _adaptive(w)["w"]
    g_rec, g_gan = 2 * (w - 1), torch.stack([-w[1] - 3 * w[0] ** 2, -w[0]])
    of_rec, of_gan = 2 * torch.eye(2).double(), torch.stack([torch.stack([-6 * w[0], doubles(-1)[0]]), doubles(-1, 0)])
    n, d = g_rec.norm(), g_gan.norm()
    slope = of_rec @ g_rec / n / (d + 1e-4) - n / (d + 1e-4) ** 2 * (of_gan @ g_gan / d)
    return {"w": found + autoencoder(w)[1] * slope}


def _goal_and_signs(weights):
    rates = (LOSSES / LOSSES.mean()) ** 1.5
    norms = weights * NORMS
    return rates, (norms - norms.mean() * rates).sign()


def _gradnorm_open(weights):
    rates, signs = _goal_and_signs(weights)
    return {"weights": signs * NORMS - (signs * rates).mean() * NORMS}


def _importance(losses, log_weights):
    return {"losses": log_weights.exp() / log_weights.exp().sum(), "log_weights": torch.zeros(3).double()}


def _importance_open(losses, log_weights):
    w = _importance(losses, log_weights)["losses"]
    return {"losses": w, "log_weights": w * (losses - w @ losses)}


def _beta_nll(mean, var):
    r = mean - Y
    return {"mean": var ** (BETA - 1) * r, "var": 0.5 * var ** (BETA - 2) * (var - r**2)}


def _beta_nll_open(mean, var):
    found = _beta_nll(mean, var)
    nll = 0.5 * (var.log() + (mean - Y) ** 2 / var)
    return {"mean": found["mean"], "var": found["var"] + BETA * var ** (BETA - 1) * nll}


def _gradnorm(p, c):
    return gradnorm_loss(p["weights"], c["norms"], c["losses"], c["first"], alpha=1.5)


BLOCK_CASES = [
    BlockCase(
        id="weighting own losses",
        block=OWN_LOSSES,
        parameters=POINT,
        loss=lambda p: self_normalized_loss(two_losses(p["t"])),
        blocked=witness(_own),
        opened=lambda p: {"t": torch.zeros(2).double()},
        tolerance=1e-14,
    ),
    BlockCase(
        id="weighting loss ratios",
        block=LOSS_RATIOS,
        parameters=POINT,
        loss=lambda p: ratio_balanced_loss(two_losses(p["t"])),
        blocked=witness(_ratio),
        opened=witness(lambda t: {"t": 2 * slopes(t)[1]}),
    ),
    BlockCase(
        id="weighting profiled variances",
        block=PROFILED_VARIANCES,
        parameters=POINT,
        loss=lambda p: profiled_uncertainty_loss(two_losses(p["t"])),
        blocked=witness(lambda t: {"t": _own(t)["t"] / 2}),
        opened=witness(lambda t: {"t": _own(t)["t"] / 2}),
        without_peer="It is redundant: both of its gradients are the same closed form.",
    ),
    BlockCase(
        id="weighting gradnorm",
        block=GRADNORM_TARGET,
        parameters=TASKS,
        loss=lambda p: gradnorm_loss(p["weights"], NORMS, LOSSES, FIRST, alpha=1.5),
        blocked=witness(lambda weights: {"weights": _goal_and_signs(weights)[1] * NORMS}),
        opened=witness(_gradnorm_open),
    ),
    BlockCase(
        id="weighting adaptive weight",
        block=ADAPTIVE_WEIGHT,
        parameters=LAYER,
        loss=_adaptive_loss,
        blocked=witness(_adaptive),
        opened=witness(_adaptive_open),
    ),
    BlockCase(
        id="weighting importance",
        block=IMPORTANCE_WEIGHTS,
        parameters=SAMPLES,
        loss=lambda p: importance_weighted_loss(p["losses"], p["log_weights"]),
        blocked=witness(_importance),
        opened=witness(_importance_open),
    ),
    BlockCase(
        id="weighting beta nll",
        block=NLL_WEIGHTS,
        parameters=GAUSSIAN,
        loss=lambda p: beta_nll_loss(p["mean"], Y, p["var"], beta=BETA).sum(),
        blocked=witness(_beta_nll),
        opened=witness(_beta_nll_open),
    ),
]

PEER_CASES = {
    "self_normalized": (values_of(POINT()), {}, lambda p, c: self_normalized_loss(two_losses(p["t"]))),
    "ratio_balanced": (values_of(POINT()), {}, lambda p, c: ratio_balanced_loss(two_losses(p["t"]))),
    "gradnorm": (values_of(TASKS()), {"norms": NORMS, "losses": LOSSES, "first": FIRST}, _gradnorm),
    "adaptive": (values_of(LAYER()), {}, lambda p, c: _adaptive_loss(p)),
    "importance": (values_of(SAMPLES()), {}, lambda p, c: importance_weighted_loss(p["losses"], p["log_weights"])),
    "beta_nll": (
        values_of(GAUSSIAN()),
        {"y": Y},
        lambda p, c: beta_nll_loss(p["mean"], c["y"], p["var"], beta=BETA).sum(),
    ),
}

NUMBERS = {
    "weighting own losses": (2.0, (0.921032184, -0.2848009029), (0, 0)),
    "weighting loss ratios": (10.76, (4.95515315, -1.532228858), (-1.2, -9.2)),
    "weighting gradnorm": (3.453024371, (2, -0.5), (2.815609743, -0.2960975643)),
    "weighting adaptive weight": (6.003359151, (1.685171769, -6.547782637), (5.052266317, -4.982687738)),
}


@pytest.mark.parametrize("case", [case for case in BLOCK_CASES if case.id in NUMBERS], ids=lambda case: case.id)
def test_numbers(case):
    value, blocked, opened = NUMBERS[case.id]
    p = case.parameters()
    loss = case.loss(p)
    assert loss.item() == pytest.approx(value, rel=1e-9)
    (found,) = gradients(loss, p).values()
    torch.testing.assert_close(found, doubles(*blocked), rtol=0, atol=1e-8)
    with unblock(case.block):
        (found,) = gradients(case.loss(p), p).values()
    torch.testing.assert_close(found, doubles(*opened), rtol=0, atol=1e-8)


def test_sequences_are_stacked():
    x = doubles(2, 5).requires_grad_()
    for function in (self_normalized_loss, ratio_balanced_loss, profiled_uncertainty_loss):
        torch.testing.assert_close(function([x[0], x[1]]), function(x))
    many = torch.rand(3, 4).double() + 0.5
    torch.testing.assert_close(torch.func.vmap(ratio_balanced_loss)(many), ratio_balanced_loss(many))


def test_the_ratio_is_the_gradient_of_no_loss_and_the_quotient_of_one():
    p = POINT()
    assert field_jacobian(lambda: self_normalized_loss(two_losses(p["t"])), p).is_gradient_field
    field = field_jacobian(lambda: ratio_balanced_loss(two_losses(p["t"])), p)
    assert not field.is_gradient_field
    (_, l2), g1, g2 = slopes(p["t"].detach())
    twist = torch.outer(g1, g2) / l2  # the only part of the Jacobian of L1 / L2 g2 that is not symmetric
    torch.testing.assert_close((field.jacobian - field.jacobian.T).norm(), (twist - twist.T).norm())


def test_weighted_likelihood_is_the_gradient_of_no_loss():
    p = GAUSSIAN()
    assert not field_jacobian(lambda: beta_nll_loss(p["mean"], Y, p["var"], beta=0.5).sum(), p).is_gradient_field
    assert field_jacobian(lambda: beta_nll_loss(p["mean"], Y, p["var"], beta=0).sum(), p).is_gradient_field


def test_profiled_variances_are_redundant():
    p = POINT()
    (effect,) = compare(lambda: profiled_uncertainty_loss(two_losses(p["t"])), p).effects
    assert effect.verdict.kind == "redundant"


def test_profiled_variances_are_optimal():
    losses = doubles(0.4, 7)
    best = uncertainty_loss(losses, losses.log())
    torch.testing.assert_close(profiled_uncertainty_loss(losses), best)
    for shift in (-0.1, 0.1):
        assert uncertainty_loss(losses, losses.log() + shift) > best


@pytest.mark.parametrize("function", [self_normalized_loss, ratio_balanced_loss, profiled_uncertainty_loss])
def test_a_loss_of_zero_is_finite_and_a_negative_one_is_not_hidden(function):
    x = torch.tensor([2.0, 0.0], requires_grad=True)
    (found,) = torch.autograd.grad(function(x**2), x)
    assert found.isfinite().all()
    assert function(torch.tensor([2.0, -1.0])).isnan()


def test_adaptive_weight_is_bounded():
    w = doubles(0.4, -0.9).requires_grad_()
    rec, gan = autoencoder(w)
    assert adaptive_weight(rec, gan, w, most=3).item() == 3
    assert adaptive_weight(rec, 0 * gan, w).item() == 1e4
    with unblock(ADAPTIVE_WEIGHT):
        weight = adaptive_weight(*autoencoder(w), w)
    assert weight.requires_grad


def test_weighted_samples_left_out():
    losses = doubles(1, math.inf, 3).requires_grad_()
    log_weights = doubles(0, -math.inf, 0).requires_grad_()
    loss = importance_weighted_loss(losses, log_weights)
    assert loss.item() == 2
    assert gradients(loss, {"x": losses})["x"].tolist() == [0.5, 0, 0.5]
    with unblock(IMPORTANCE_WEIGHTS):
        loss = importance_weighted_loss(losses, log_weights)
    assert gradients(loss, {"x": log_weights})["x"].tolist() == [-0.5, 0, 0.5]
    nothing = torch.full((2, 3), -math.inf, dtype=torch.float64, requires_grad=True)
    with unblock(IMPORTANCE_WEIGHTS):
        loss = importance_weighted_loss(torch.ones(2, 3).double(), nothing)
    assert loss.tolist() == [0, 0]
    assert gradients(loss.sum(), {"x": nothing})["x"].eq(0).all()


def test_weighted_samples_of_great_weight():
    losses = doubles(1, 5)
    assert importance_weighted_loss(losses, doubles(1000, 1000)).item() == 3


def test_beta_one_gives_the_mean_the_squared_error_and_beta_zero_is_torchs():
    p = GAUSSIAN()
    found = gradients(beta_nll_loss(p["mean"], Y, p["var"], beta=1).sum(), p)["mean"]
    torch.testing.assert_close(found, p["mean"].detach() - Y)
    expected = functional.gaussian_nll_loss(p["mean"], Y, p["var"], reduction="none")
    torch.testing.assert_close(beta_nll_loss(p["mean"], Y, p["var"], beta=0), expected)


def test_a_variance_of_zero_is_bounded():
    var = torch.zeros(2, requires_grad=True)
    (found,) = torch.autograd.grad(beta_nll_loss(torch.zeros(2), torch.ones(2), var).sum(), var)
    assert found.tolist() == [0, 0]


def test_of_two_tasks_with_a_common_goal_the_block_is_redundant():
    """One norm is as far above the mean as the other is below it: the derivatives of the mean cancel."""
    p = TASKS()
    loss = gradnorm_loss(p["weights"], NORMS, LOSSES, FIRST, alpha=0)
    (found,) = torch.autograd.grad(loss, p["weights"])
    with unblock(GRADNORM_TARGET):
        opened = gradnorm_loss(p["weights"], NORMS, LOSSES, FIRST, alpha=0)
    torch.testing.assert_close(torch.autograd.grad(opened, p["weights"])[0], found)
    assert found.abs().min() > 0


def test_gradnorm_raises_the_weight_of_a_slow_task():
    weights = doubles(1, 1).requires_grad_()
    loss = gradnorm_loss(weights, doubles(1, 1), [doubles(0.1)[0], doubles(0.9)[0]], [FIRST[0], FIRST[1]], alpha=1.0)
    assert gradients(loss, {"w": weights})["w"].tolist() == [1, -1]


def test_one_loss_is_its_own_balance():
    x = torch.tensor(3.0, requires_grad=True)
    assert ratio_balanced_loss(x**2).item() == 9
    assert gradients(ratio_balanced_loss(x**2), {"x": x})["x"] == 6


def test_every_sample_may_have_its_own_log_variances():
    losses, s = torch.rand(4, 3), torch.randn(4, 3)
    found = uncertainty_loss(losses, s)
    torch.testing.assert_close(found, torch.stack([uncertainty_loss(*row) for row in zip(losses, s, strict=True)]))


@pytest.mark.parametrize("shape", [(3, 1), (1,), (4, 1)])
def test_log_variances_are_not_spread_over_losses(shape):
    with pytest.raises(
        ValueError, match=r"`log_variances` should have shape \(3,\) or the shape of `losses`, \(4, 3\)"
    ):
        uncertainty_loss(torch.ones(4, 3), torch.zeros(shape))


def test_errors_name_the_argument():
    for losses in ([torch.ones(2), torch.ones(2, 1)], []):
        with pytest.raises(ValueError, match="`losses` should be tensors of one shape"):
            self_normalized_loss(losses)
    with pytest.raises(ValueError, match=r"`log_weights` should have the shape of `losses`, \(2,\). Found \(3,\)"):
        importance_weighted_loss(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"same shape. Found .*\(3,\)"):
        gradnorm_loss(torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(2), alpha=1)
    with pytest.raises(ValueError, match="`alpha` should be finite and not negative"):
        gradnorm_loss(torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2), alpha=-1)
    with pytest.raises(ValueError, match="`beta` should be from 0 to 1"):
        beta_nll_loss(torch.ones(2), torch.ones(2), torch.ones(2), beta=2)
    with pytest.raises(ValueError, match="`target` should have the shape of `input`"):
        beta_nll_loss(torch.ones(2, 1), torch.ones(2), torch.ones(2))
    w = torch.ones(2, requires_grad=True)
    for name in ("delta", "most"):
        with pytest.raises(ValueError, match=f"`{name}` should be positive"):
            adaptive_weight(w.sum(), w.sum(), w, **{name: 0})
