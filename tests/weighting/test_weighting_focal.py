"""Focal loss: the paper's gradient without the block, with it that of a cross entropy without its first terms."""

import pytest
import torch
from contract import BlockCase
from torch.nn import functional
from values import doubles, gradients, leaves, values_of, witness

from toolkit import unblock
from toolkit.gradients import field_jacobian
from toolkit.weighting import FOCAL_WEIGHT, focal_loss, held_focal_loss, held_sigmoid_focal_loss, sigmoid_focal_loss

SIGNS = doubles(1, -1, -1)
TARGETS = (SIGNS + 1) / 2
SIGMOID = leaves(x=(0.4, -1.2, 2.0))
LOGITS = ((0.4, -1.2, 2.0, 0.3), (-0.5, 1.1, 0.2, -0.9))
SOFTMAX = leaves(x=LOGITS)
LABELS = torch.tensor([0, 3])
CONSTANTS = {"signs": SIGNS, "one_hot": functional.one_hot(LABELS, 4).double()}


def _sigmoid(x):
    p = torch.sigmoid(SIGNS * x)
    return {"x": -SIGNS * (1 - p) ** 3}


def _sigmoid_open(x):
    p = torch.sigmoid(SIGNS * x)
    return {"x": SIGNS * (1 - p) ** 2 * (2 * p * p.log() + p - 1)}


def _softmax(slope):
    def formula(x):
        p = torch.softmax(x, -1)
        own = p.gather(-1, LABELS[:, None])
        return {"x": slope(own) * (p - functional.one_hot(LABELS, 4)) / 2}

    return formula


BLOCK_CASES = [
    BlockCase(
        id="weighting focal sigmoid",
        block=FOCAL_WEIGHT,
        parameters=SIGMOID,
        loss=lambda p: held_sigmoid_focal_loss(p["x"], TARGETS, alpha=None, reduction="sum"),
        blocked=witness(_sigmoid),
        opened=witness(_sigmoid_open),
    ),
    BlockCase(
        id="weighting focal softmax",
        block=FOCAL_WEIGHT,
        parameters=SOFTMAX,
        loss=lambda p: held_focal_loss(p["x"], LABELS, gamma=1.5),
        blocked=witness(_softmax(lambda p: (1 - p) ** 1.5)),
        opened=witness(_softmax(lambda p: (1 - p) ** 1.5 - 1.5 * (1 - p) ** 0.5 * p * p.log())),
    ),
]

PEER_CASES = {
    "focal_sigmoid": (
        values_of(SIGMOID()),
        {"signs": SIGNS},
        lambda p, c: held_sigmoid_focal_loss(p["x"], (c["signs"] + 1) / 2, alpha=None, reduction="sum"),
    ),
    "focal_softmax": (
        values_of(SOFTMAX()),
        {"one_hot": CONSTANTS["one_hot"]},
        lambda p, c: held_focal_loss(p["x"], c["one_hot"].argmax(-1), gamma=1.5),
    ),
}


def test_numbers():
    p = SIGMOID()
    loss = held_sigmoid_focal_loss(p["x"], TARGETS, alpha=None, reduction="sum")
    assert loss.item() == pytest.approx(1.746806983, abs=1e-9)
    expected = doubles(-0.06463199209, 0.01240262169, 0.6833254493)
    torch.testing.assert_close(gradients(loss, p)["x"], expected, rtol=0, atol=1e-9)
    loss = sigmoid_focal_loss(p["x"], TARGETS, alpha=None, reduction="sum")
    expected = doubles(-0.1635614451, 0.03408559375, 1.07671373)
    torch.testing.assert_close(gradients(loss, p)["x"], expected, rtol=0, atol=1e-8)


def _without_first_terms(p, gamma):
    return -p.log() - sum((1 - p) ** j / j for j in range(1, gamma + 1))


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_held_weight_minimises_cross_entropy_without_its_first_terms(gamma):
    (x,) = SOFTMAX().values()
    own = torch.softmax(x, -1).gather(-1, LABELS[:, None])
    (expected,) = torch.autograd.grad(_without_first_terms(own, gamma).mean(), x)
    (found,) = torch.autograd.grad(held_focal_loss(x, LABELS, gamma=gamma), x)
    torch.testing.assert_close(found, expected)


def test_held_weight_is_the_gradient_of_a_loss():
    p = SOFTMAX()
    assert field_jacobian(lambda: held_focal_loss(p["x"], LABELS), p).is_gradient_field


def test_the_held_gradient_is_shorter():
    x = torch.linspace(-6, 6, 25, dtype=torch.float64, requires_grad=True)
    (held,) = torch.autograd.grad(held_sigmoid_focal_loss(x, torch.ones_like(x), reduction="sum"), x)
    (full,) = torch.autograd.grad(sigmoid_focal_loss(x, torch.ones_like(x), reduction="sum"), x)
    assert (held.abs() < full.abs()).all()


def test_gamma_zero_is_cross_entropy():
    x = SIGMOID()["x"].detach()
    found = sigmoid_focal_loss(x, TARGETS, alpha=None, gamma=0)
    torch.testing.assert_close(found, functional.binary_cross_entropy_with_logits(x, TARGETS, reduction="none"))
    logits = SOFTMAX()["x"].detach()
    torch.testing.assert_close(focal_loss(logits, LABELS, gamma=0), functional.cross_entropy(logits, LABELS))


def test_alpha_weighs_classes():
    x = SIGMOID()["x"].detach()
    plain = sigmoid_focal_loss(x, TARGETS, alpha=None)
    torch.testing.assert_close(sigmoid_focal_loss(x, TARGETS), doubles(0.25, 0.75, 0.75) * plain)


def test_soft_targets_are_those_of_the_formula():
    x, t = doubles(0.4, -1.2), doubles(0.3, 0.9)
    p = torch.sigmoid(x)
    expected = (1 - (p * t + (1 - p) * (1 - t))) ** 2
    expected = expected * functional.binary_cross_entropy_with_logits(x, t, reduction="none")
    torch.testing.assert_close(sigmoid_focal_loss(x, t, alpha=None), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_saturated_logits_have_finite_gradients(dtype, gamma):
    x = torch.tensor([-300.0, -40, 40, 300], dtype=dtype, requires_grad=True)
    for loss in (sigmoid_focal_loss, held_sigmoid_focal_loss):
        (found,) = torch.autograd.grad(loss(x, torch.ones_like(x), None, gamma, "sum"), x)
        assert found.dtype == dtype
        assert found.isfinite().all()
        torch.testing.assert_close(found[0].item(), -1.0, rtol=0.01, atol=0)
        assert found[-1].abs() < 1e-6
    logits = torch.tensor([[300.0, 0], [0, 300]], dtype=dtype, requires_grad=True)
    for loss in (focal_loss, held_focal_loss):
        (found,) = torch.autograd.grad(loss(logits, torch.tensor([0, 0]), gamma, "sum"), logits)
        assert found.isfinite().all()


@pytest.mark.parametrize("loss", [sigmoid_focal_loss, held_sigmoid_focal_loss])
def test_vmap_is_a_loop(loss):
    x = torch.randn(3, 4, dtype=torch.float64)
    t = (torch.randn(3, 4) > 0).double()
    torch.testing.assert_close(torch.func.vmap(loss)(x, t), loss(x, t))


@pytest.mark.keeps_its_sums
def test_compiled_is_eager():
    x, t = SIGMOID()["x"].detach(), TARGETS
    loss = held_sigmoid_focal_loss
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, t), loss(x, t))


def test_errors_name_the_argument():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"`targets` should have the shape of `inputs`, \(2, 3\). Found \(2,\)"):
        sigmoid_focal_loss(x, torch.zeros(2))
    with pytest.raises(ValueError, match=r"`labels` should have shape \(2,\). Found \(3,\)"):
        focal_loss(x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="`gamma` should be finite and not negative"):
        held_focal_loss(x, torch.zeros(2, dtype=torch.long), gamma=-1)
    with pytest.raises(ValueError, match=r"`alpha` should be from 0 to 1\. Found -1"):
        held_sigmoid_focal_loss(x, x, alpha=-1)
    with pytest.raises(ValueError, match="`reduction` should be one of"):
        focal_loss(x, torch.zeros(2, dtype=torch.long), reduction="batchmean")


def test_the_open_block_is_the_papers_loss():
    p = SOFTMAX()
    with unblock(FOCAL_WEIGHT):
        (found,) = torch.autograd.grad(held_focal_loss(p["x"], LABELS), p["x"])
    torch.testing.assert_close(found, torch.autograd.grad(focal_loss(p["x"], LABELS), p["x"])[0])
