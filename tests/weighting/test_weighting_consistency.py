"""Consistency training: a semi-gradient towards the prediction at the lower noise level."""

import copy

import pytest
import torch
from contract import BlockCase
from torch import nn
from values import doubles, gradients, leaves, values_of, witness

from toolkit import unblock
from toolkit.gradients import field_jacobian
from toolkit.weighting import CONSISTENCY_TARGET, consistency_function, consistency_loss, karras_times

THETA = leaves(theta=(0.7, -0.4))
X, NOISE = doubles((0.6, -0.2), (1.1, 0.3)), doubles((0.5, -1), (0.2, 0.9))
LATE, EARLY = doubles(1, 0.8), doubles(0.6, 0.2)
HUBER = 0.3


def _model(theta):
    return consistency_function(lambda x, t: theta * x)


def _slope(t):
    """Return d f / d theta over the input, and f over the input, of the linear network."""
    above = t - 0.002
    return 0.5 * above / (0.25 + t**2).sqrt(), 0.25 / (above**2 + 0.25)


def _parts(theta):
    found = []
    for t in (LATE, EARLY):
        (out, skip), noisy = _slope(t), X + t[:, None] * NOISE
        found.append((noisy * (skip[:, None] + out[:, None] * theta), noisy * out[:, None]))
    return found


def _squares(target):
    def formula(theta):
        (late, by_late), (early, by_early) = _parts(theta)
        return {"theta": (2 * (late - early) * (by_late - target * by_early)).sum(0)}

    return witness(formula)


def _huber(target):
    def formula(theta):
        (late, by_late), (early, by_early) = _parts(theta)
        length = ((late - early).square().sum(1, keepdim=True) + HUBER**2).sqrt()
        return {"theta": ((late - early) / length * (by_late - target * by_early)).sum(0)}

    return witness(formula)


def _loss(c=None):
    return lambda p: consistency_loss(_model(p["theta"]), X, NOISE, LATE, EARLY, c=c).sum()


BLOCK_CASES = [
    BlockCase(
        id="weighting consistency",
        block=CONSISTENCY_TARGET,
        parameters=THETA,
        loss=_loss(),
        blocked=_squares(0),
        opened=_squares(1),
    ),
    BlockCase(
        id="weighting consistency pseudo-Huber",
        block=CONSISTENCY_TARGET,
        parameters=THETA,
        loss=_loss(HUBER),
        blocked=_huber(0),
        opened=_huber(1),
    ),
]

PEER_CASES = {
    "consistency": (
        values_of(THETA()),
        {"x": X, "noise": NOISE, "late": LATE, "early": EARLY},
        lambda p, c: consistency_loss(_model(p["theta"]), c["x"], c["noise"], c["late"], c["early"]).sum(),
    )
}


def test_numbers():
    theta = doubles(0.7)[0].requires_grad_()

    def loss():
        levels = doubles(1), doubles(0.6)  # x + t z is 1.5 and 1.2
        return consistency_loss(_model(theta), doubles(0.75), doubles(0.75), *levels)[0]

    assert loss().item() == pytest.approx(0.00209057629, abs=1e-11)
    assert torch.autograd.grad(loss(), theta)[0].item() == pytest.approx(-0.06122091329, abs=1e-9)
    with unblock(CONSISTENCY_TARGET):
        assert torch.autograd.grad(loss(), theta)[0].item() == pytest.approx(-0.01921112211, abs=1e-9)


def test_blocked_gradient_is_that_of_no_loss():
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model = consistency_function(lambda x, t: network(torch.cat([x, t[:, None]], 1)))
    field = field_jacobian(lambda: consistency_loss(model, X, NOISE, LATE, EARLY).sum(), network)
    assert not field.is_gradient_field


def test_function_is_the_identity_at_the_lowest_level():
    x = torch.randn(3, 2, 2)
    f = consistency_function(lambda x, t: 1e6 * torch.ones_like(x), sigma_min=0.01)
    torch.testing.assert_close(f(x, torch.full((3,), 0.01)), x)


def test_another_target_has_no_gradient_and_is_used():
    network = nn.Linear(2, 2, dtype=torch.float64)
    average = copy.deepcopy(network)
    with torch.no_grad():
        average.weight.mul_(0.5)

    def loss():
        models = [lambda x, t, n=n: n(x) * t[:, None] for n in (network, average)]
        return consistency_loss(models[0], X, NOISE, LATE, EARLY, target=models[1]).sum()

    noisy = [X + t[:, None] * NOISE for t in (LATE, EARLY)]
    difference = network(noisy[0]) * LATE[:, None] - average(noisy[1]) * EARLY[:, None]
    torch.testing.assert_close(loss(), difference.square().sum())
    assert torch.autograd.grad(loss(), average.weight, allow_unused=True) == (None,)
    with unblock(CONSISTENCY_TARGET):
        (found,) = torch.autograd.grad(loss(), average.weight)
    assert found.abs().sum() > 0


def test_pseudo_huber_distance_keeps_its_digits():
    x = doubles((1e-9, 0.0)).float()
    found = consistency_loss(lambda x, t: x * t[:, None], x, 0 * x, torch.ones(1), torch.zeros(1), c=0.5)
    assert found.item() == pytest.approx(1e-18, rel=1e-5)
    far = consistency_loss(lambda x, t: x * t[:, None], 1e12 * x, 0 * x, torch.ones(1), torch.zeros(1), c=0.5)
    assert far.item() == pytest.approx((1e6 + 0.25) ** 0.5 - 0.5, rel=1e-6)


def test_equal_predictions_have_gradient_zero():
    theta = doubles(0.7)[0].requires_grad_()
    loss = consistency_loss(lambda x, t: theta * x, X, 0 * NOISE, LATE, EARLY, c=0.1)
    assert torch.autograd.grad(loss.sum(), theta)[0] == 0


def test_levels_rise_from_the_lowest_to_the_highest():
    times = karras_times(18)
    assert (times[0].item(), times[-1].item()) == (0.002, 80.0)
    assert (times.diff() > 0).all()
    roots = times ** (1 / 7)
    torch.testing.assert_close(roots.diff(), roots.diff().mean().expand(17))


def test_images_of_any_shape():
    x, z = torch.randn(3, 1, 4, 4), torch.randn(3, 1, 4, 4)
    t, s = torch.rand(3) + 1, torch.rand(3)
    found = consistency_loss(lambda x, t: x, x, z, t, s)
    torch.testing.assert_close(found, (t - s) ** 2 * z.square().sum((1, 2, 3)))


@pytest.mark.keeps_its_sums
def test_compiled_is_eager():
    p = THETA()
    (found,) = torch.autograd.grad(torch.compile(_loss(), backend="aot_eager")(p), p["theta"])
    torch.testing.assert_close(found, gradients(_loss()(p), p)["theta"])


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"`model` and `target` should return .* one shape. Found \(2, 1\) and \(2,\)"):
        consistency_loss(lambda x, t: x, *torch.ones(2, 2, 1), *torch.ones(2, 2), target=lambda x, t: x[:, 0])
    with pytest.raises(ValueError, match=r"should have shapes \(N, ...\) twice and \(N,\) twice"):
        consistency_loss(lambda x, t: x, X, NOISE[:1], LATE, EARLY)
    with pytest.raises(ValueError, match="`c` should be positive"):
        consistency_loss(lambda x, t: x, X, NOISE, LATE, EARLY, c=0)
    with pytest.raises(ValueError, match="`n` should be an integer from 2"):
        karras_times(1)
    with pytest.raises(ValueError, match="`sigma_max` should be"):
        karras_times(3, sigma_max=0.001)
    with pytest.raises(ValueError, match="`sigma_data` should be positive"):
        consistency_function(lambda x, t: x, sigma_data=0)
