"""Held statistics: batch renormalisation, running scales, MixStyle."""

import copy

import pytest
import torch
from contract import BlockCase
from torch import nn
from values import doubles, gradients, leaves, values_of, witness

from toolkit import unblock
from toolkit.gradients import field_jacobian
from toolkit.weighting import (
    CORRECTIONS,
    RUNNING_SCALE,
    RUNNING_STATISTICS,
    STYLE,
    BatchRenorm,
    batch_renorm,
    ema_normalize,
    mixstyle,
)

BATCH = leaves(x=(0.5, -1.0, 2.0, 0.1))
C = doubles(1, -2, 0.5, 0.3)
IMAGES = leaves(x=((0.5, -1.0, 2.0, 0.1), (3.0, 1.0, -0.4, 0.8)))
COTANGENTS = doubles((1, -2, 0.5, 0.3), (0.2, 0.4, -1, 0.7))
SWAP = torch.tensor([1, 0])
TWO_BATCHES = leaves(first=(0.5, -1.0, 2.0, 0.1), second=(1.1, 0.4))


def _renorm_loss(x, c=C):
    return (c * batch_renorm(x[:, None], doubles(0.2), doubles(1.5))[:, 0]).sum()


def _renorm(x):
    sigma = ((x - x.mean()).square().mean() + 1e-3).sqrt()
    normal = (x - x.mean()) / sigma
    return {"x": (C - C.mean() - normal * (C * normal).mean()) / 1.5}


def _scale(x):
    s = 0.9 * 2 + 0.1 * x.abs().mean()
    return {"x": C / s}


def _scale_open(x):
    s = 0.9 * 2 + 0.1 * x.abs().mean()
    return {"x": C / s - (C @ x) / s**2 * 0.1 * x.sign() / 4}


def _mixed(x, c=COTANGENTS):
    return (c * mixstyle(x[:, None], SWAP, 0.7)[:, 0]).sum()


def _style(x):
    sigma = (x.var(1, keepdim=True) + 1e-6).sqrt()
    return {"x": COTANGENTS * (0.7 + 0.3 * sigma[SWAP] / sigma)}


def _two_batches(p):
    """Train on a batch and evaluate on the next: only running statistics connect the two."""
    layer = BatchRenorm(1, momentum=0.2, affine=False, dtype=torch.float64)
    layer.train()(p["first"][:, None])
    return (layer.eval()(p["second"][:, None]) * doubles((1.5,), (-0.4,))).sum()


def _running(first):
    mean, std = first.mean(), ((first - first.mean()).square().mean() + 1e-3).sqrt()
    return mean, std, 0.2 * mean, 0.8 + 0.2 * std


def _running_closed(first, second):
    return {"first": torch.zeros(4).double(), "second": doubles(1.5, -0.4) / _running(first)[3]}


def _running_open(first, second):
    mean, std, mu, sigma = _running(first)
    c = doubles(1.5, -0.4)
    by_mean, by_std = -0.2 * c.sum() / sigma, -0.2 * (c @ (second - mu)) / sigma**2
    slope = by_mean / 4 + by_std * (first - mean) / (4 * std)
    return {"first": slope, "second": c / sigma}


BLOCK_CASES = [
    BlockCase(
        id="weighting renorm",
        block=CORRECTIONS,
        parameters=BATCH,
        loss=lambda p: _renorm_loss(p["x"]),
        blocked=witness(_renorm),
        opened=lambda p: {"x": C / 1.5},
    ),
    BlockCase(
        id="weighting running statistics",
        block=RUNNING_STATISTICS,
        parameters=TWO_BATCHES,
        loss=_two_batches,
        blocked=witness(_running_closed),
        opened=witness(_running_open),
    ),
    BlockCase(
        id="weighting running scale",
        block=RUNNING_SCALE,
        parameters=BATCH,
        loss=lambda p: (C * ema_normalize(p["x"], doubles(2)[0], decay=0.9)[0]).sum(),
        blocked=witness(_scale),
        opened=witness(_scale_open),
    ),
    BlockCase(
        id="weighting style",
        block=STYLE,
        parameters=IMAGES,
        loss=lambda p: _mixed(p["x"]),
        blocked=witness(_style),
    ),
]

PEER_CASES = {
    "batch_renorm": (values_of(BATCH()), {"c": C}, lambda p, c: _renorm_loss(p["x"], c["c"])),
    "running_statistics": (values_of(TWO_BATCHES()), {"c": doubles(1.5, -0.4)}, lambda p, c: _two_batches(p)),
    "running_scale": (
        values_of(BATCH()),
        {"c": C},
        lambda p, c: (c["c"] * ema_normalize(p["x"], doubles(2)[0], decay=0.9)[0]).sum(),
    ),
    "mixstyle": (values_of(IMAGES()), {"c": COTANGENTS}, lambda p, c: _mixed(p["x"], c["c"])),
}

NUMBERS = {
    "weighting renorm": (
        2.38,
        (0.6479527105, -0.5713379469, -0.4660899654, 0.3894752018),
        (0.6666666667, -1.333333333, 0.3333333333, 0.2),
    ),
    "weighting running scale": (
        1.867724868,
        (0.5291005291, -1.058201058, 0.2645502646, 0.1587301587),
        (0.5043951737, -1.033495703, 0.2398449092, 0.1340248033),
    ),
    "weighting style": (
        5.473605398,
        (1.040740193, -2.081480386, 0.5203700965, 0.3122220579),
        (1.062971179, -1.79965905, 0.2830107332, 0.4036771375),
    ),
}


@pytest.mark.parametrize("case", [case for case in BLOCK_CASES if case.id in NUMBERS], ids=lambda case: case.id)
def test_numbers(case):
    value, blocked, opened = NUMBERS[case.id]
    p = case.parameters()
    assert case.loss(p).item() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(_first_row(gradients(case.loss(p), p)["x"]), doubles(*blocked), rtol=0, atol=1e-8)
    with unblock(case.block):
        torch.testing.assert_close(_first_row(gradients(case.loss(p), p)["x"]), doubles(*opened), rtol=0, atol=1e-8)


def _first_row(gradient):
    return gradient if gradient.ndim == 1 else gradient[0]


# --- batch renormalisation -------------------------------------------------------------------------------------------


def test_gradient_of_renormalisation_is_a_multiple_of_batch_normalisations():
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    c = torch.randn(6, 2, 3, dtype=torch.float64)
    mean, std = torch.randn(2).double(), torch.rand(2).double() + 0.5
    (found,) = torch.autograd.grad((c * batch_renorm(x, mean, std, rmax=100, dmax=100)).sum(), x)
    (norm,) = torch.autograd.grad((c * nn.functional.batch_norm(x, None, None, training=True, eps=1e-3)).sum(), x)
    sigma = (x.detach().var((0, 2), correction=0) + 1e-3).sqrt()
    torch.testing.assert_close(found, norm * (sigma / std)[:, None])


def test_without_limits_the_value_is_that_of_inference():
    x = torch.randn(6, 2, dtype=torch.float64)
    mean, std = doubles(0.3, -2), doubles(1.7, 0.6)
    torch.testing.assert_close(batch_renorm(x, mean, std, rmax=100, dmax=100), (x - mean) / std)


def test_at_the_tightest_limits_it_is_batch_normalisation():
    x = torch.randn(6, 2, 5)
    expected = nn.functional.batch_norm(x, None, None, training=True, eps=1e-3)
    torch.testing.assert_close(batch_renorm(x, torch.ones(2), torch.rand(2) + 1, rmax=1, dmax=0), expected)


def test_limits_hold():
    x = doubles((0.0,), (2.0,))  # mean 1, deviation 1
    found = batch_renorm(x, doubles(-9), doubles(0.1), rmax=2, dmax=3, eps=1e-12)
    torch.testing.assert_close(found, doubles((1.0,), (5.0,)))


def test_renormalisation_is_the_gradient_of_no_loss():
    p = BATCH()
    assert not field_jacobian(lambda: _renorm_loss(p["x"]), p).is_gradient_field


def test_module_trains_with_the_statistics_before_the_batch():
    layer = BatchRenorm(2, momentum=0.1)
    x = torch.randn(8, 2, 3)
    y = layer(x)
    torch.testing.assert_close(y, batch_renorm(x, torch.zeros(2), torch.ones(2)))
    torch.testing.assert_close(layer.running_mean, 0.1 * x.mean((0, 2)))
    torch.testing.assert_close(layer.running_std, 0.9 + 0.1 * (x.var((0, 2), correction=0) + 1e-3).sqrt())
    assert not layer.running_mean.requires_grad


def test_evaluation_moves_nothing():
    layer = BatchRenorm(2).eval()
    layer.running_mean.copy_(torch.tensor([1.0, 2.0]))
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(5, 2)
    torch.testing.assert_close(layer(x), x - torch.tensor([1.0, 2.0]))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_running_statistics_converge_to_those_of_the_data():
    layer = BatchRenorm(1, momentum=0.05)
    for _ in range(300):
        layer(3 + 2 * torch.randn(32, 1))
    assert layer.running_mean.item() == pytest.approx(3, abs=0.3)
    assert layer.running_std.item() == pytest.approx(2, abs=0.3)


def test_a_batch_of_one_sample_is_finite():
    layer = BatchRenorm(2)
    x = torch.tensor([[1.0, -2.0]], requires_grad=True)
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    assert found.isfinite().all()


def test_state_is_saved_and_affine_may_be_left_out():
    layer, other = BatchRenorm(2), BatchRenorm(2)
    layer(torch.randn(4, 2))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2)
    torch.testing.assert_close(other(x), layer(x))
    assert not list(BatchRenorm(2, affine=False).parameters())
    assert repr(layer) == "BatchRenorm(2, eps=0.001, momentum=0.01, rmax=3.0, dmax=5.0)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_module_keeps_its_dtype(dtype):
    layer = BatchRenorm(2, dtype=dtype)
    assert layer(torch.randn(4, 2, dtype=dtype)).dtype == dtype
    assert layer.running_std.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_of_half_precision_have_statistics_of_float32(dtype):
    """As a convolution under autocast makes them; the mean is a hundred deviations from 0."""
    x = (10 + 0.1 * torch.randn(64, 2, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    state = torch.full((2,), 10.0), torch.full((2,), 0.1)
    error = (batch_renorm(x, *state).double() - batch_renorm(x.double(), *state)).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps  # the rounding of results up to 4
    layer, twin = BatchRenorm(2), BatchRenorm(2)
    for module, input in ((layer, x), (twin, x.double())):
        for mode in (True, False):
            assert module.train(mode)(input).dtype == input.dtype
    torch.testing.assert_close(layer.running_mean, twin.running_mean)
    order, own = torch.arange(64).flip(0), torch.full((64,), 0.7)
    mixed = mixstyle(x, order, own)
    assert mixed.dtype == dtype
    error = (mixed.double() - mixstyle(x.double(), order, own.double())).abs().max()
    assert error <= 16 * torch.finfo(dtype).eps  # the rounding of results up to 16


@pytest.mark.keeps_its_sums
def test_module_compiles():
    layer, x = BatchRenorm(2), torch.randn(4, 2)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(layer.running_mean, twin.running_mean)


# --- running scale and MixStyle --------------------------------------------------------------------------------------


def test_scale_follows_its_input():
    scale = torch.tensor(0.0)
    for _ in range(200):
        y, scale = ema_normalize(torch.full((3,), -4.0, requires_grad=True), scale, decay=0.9)
    assert scale.item() == pytest.approx(4)
    assert not scale.requires_grad
    torch.testing.assert_close(y, -torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_scale_of_half_precision_inputs_moves_by_small_steps(dtype):
    scale, x = torch.tensor(2.0, dtype=dtype), torch.full((4,), 3.0, dtype=dtype)
    for _ in range(1000):
        y, scale = ema_normalize(x, scale, decay=0.999)
    assert scale.item() == pytest.approx(3 - 0.999**1000, rel=1e-4)
    assert y.dtype == dtype


def test_zeros_stay_zeros():
    x = torch.zeros(3, requires_grad=True)
    y, scale = ema_normalize(x, torch.tensor(0.0), decay=0.9)
    assert y.tolist() == [0, 0, 0]
    assert scale == 0


def test_mixed_images_have_mixed_styles():
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    order, own = torch.tensor([2, 0, 3, 1]), torch.rand(4).double()
    y = mixstyle(x, order, own, eps=1e-12)
    mean, std = x.mean((2, 3)), x.std((2, 3))
    torch.testing.assert_close(y.mean((2, 3)), own[:, None] * mean + (1 - own)[:, None] * mean[order])
    torch.testing.assert_close(y.std((2, 3)), own[:, None] * std + (1 - own)[:, None] * std[order])
    torch.testing.assert_close(mixstyle(x, order, 1.0), x)


def test_a_constant_channel_is_finite():
    x = torch.ones(2, 1, 4, requires_grad=True)
    (found,) = torch.autograd.grad(mixstyle(x, SWAP, 0.5).sum(), x)
    assert found.isfinite().all()


def test_errors_name_the_argument():
    with pytest.raises(
        ValueError, match=r"`running_mean` should have one value for each of the 2 channels. Found \(3,\)"
    ):
        batch_renorm(torch.zeros(4, 2), torch.zeros(3), torch.ones(2))
    with pytest.raises(ValueError, match=r"`input` should have shape \(N, C, ...\), not empty. Found \(0, 2\)"):
        batch_renorm(torch.zeros(0, 2), torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="`rmax` should be finite and at least 1"):
        BatchRenorm(2, rmax=0.5)
    with pytest.raises(ValueError, match="`num_features` should be a positive integer"):
        BatchRenorm(0)
    with pytest.raises(ValueError, match=r"`input` should have 2 channels in dimension 1. Found \(4, 3\)"):
        BatchRenorm(2).eval()(torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"`scale` should have no dimensions. Found shape \(1,\)"):
        ema_normalize(torch.zeros(2), torch.ones(1), decay=0.9)
    with pytest.raises(ValueError, match="`decay` should be from 0 to 1"):
        ema_normalize(torch.zeros(2), torch.tensor(1.0), decay=2)
    with pytest.raises(ValueError, match="with two entries in each channel"):
        mixstyle(torch.zeros(0, 3, 1), SWAP[:0], 0.5)
    with pytest.raises(ValueError, match="with two entries in each channel"):
        mixstyle(torch.zeros(2, 3, 1), SWAP, 0.5)
