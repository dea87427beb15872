"""Gradient reversal: the same bits, the negative gradient; with the block open, no reversal."""

import importlib.util

import pytest
import torch
from contract import BlockCase
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from toolkit import unblock
from toolkit.games import REVERSED, domain_adversarial_loss, reverse_gradient
from toolkit.testing import assert_load_bearing

FEATURES = {"source": [[0.3, -1.2], [0.8, 0.5], [-0.4, 0.9]], "target": [[1.5, 0.2], [-0.7, -0.3]]}
WEIGHT, SCALE = torch.tensor([0.6, -1.1], dtype=torch.float64), 0.7


def features():
    named = {name: torch.tensor(rows, dtype=torch.float64, requires_grad=True) for name, rows in FEATURES.items()}
    return {**named, "weight": WEIGHT.clone().requires_grad_()}


def domain_loss(p):
    return domain_adversarial_loss(lambda x: x @ p["weight"], p["source"], p["target"], scale=SCALE)


def slopes(factor):
    def witness(p):
        source, target, weight = (p[name].detach() for name in ("source", "target", "weight"))
        residuals = {"source": 1 / (1 + (-source @ weight).exp()), "target": -1 / (1 + (target @ weight).exp())}
        found = {name: factor * r[:, None] * weight / 5 for name, r in residuals.items()}
        by_weight = (residuals["source"] @ source + residuals["target"] @ target) / 5
        return {**found, "weight": by_weight}

    return witness


BLOCK_CASES = [
    BlockCase(
        id="games-reversal",
        block=REVERSED,
        parameters=features,
        loss=domain_loss,
        blocked=slopes(-SCALE),
        opened=slopes(1.0),
    )
]

PEER_CASES = {
    "domain_adversarial": (
        {name: value.detach() for name, value in features().items()},
        {},
        lambda p, c: domain_loss(p),
    )
}


@pytest.mark.parametrize(
    ("through", "expected"),
    [
        (lambda h: reverse_gradient(h, 0.7), (-0.0098377978, -0.0196755956)),
        (lambda h: h.detach(), (-0.4159914721, -0.8319829442)),
        (lambda h: h, (-0.9962110069, -1.9924220138)),
    ],
    ids=["reversed", "stopped", "open"],
)
def test_numbers_of_a_feature_with_a_class_and_a_domain(through, expected):
    f = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)
    h = f @ torch.tensor([1.0, 2.0], dtype=torch.float64)
    loss = softplus(-0.8 * h) + softplus(-1.1 * through(h))
    found = torch.autograd.grad(loss, f)[0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 7.0])
def test_the_value_is_the_input_bit_for_bit(scale, dtype):
    x = torch.tensor([0.1, -3.0, 1e-7, 6e4], dtype=dtype, requires_grad=True)
    y = reverse_gradient(x, scale)
    assert torch.equal(y, x)
    assert y.dtype == dtype
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, torch.full_like(x, -scale))
    with unblock(REVERSED):
        y = reverse_gradient(x, scale)
        assert torch.equal(y, x)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_the_loss_is_the_mean_cross_entropy_of_all_samples():
    p = features()
    logits = torch.cat([p["source"], p["target"]]) @ p["weight"]
    domains = torch.tensor([0.0, 0, 0, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(domain_loss(p), binary_cross_entropy_with_logits(logits, domains))
    assert_load_bearing(lambda: domain_loss(p), REVERSED)


def test_higher_derivatives_alternate_in_sign():
    """The reversal acts on every derivative that is taken through it: twice reversed is not reversed."""
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(reverse_gradient(x).sin(), x, create_graph=True)
    assert slope.item() == pytest.approx(-x.cos().item())
    assert torch.autograd.grad(slope, x)[0].item() == pytest.approx(-x.sin().item())


@pytest.mark.keeps_its_sums
def test_compiled_and_vectorised():
    x = torch.tensor([[0.3, -1.2], [0.8, 0.5]], dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: reverse_gradient(x, 0.5), backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full_like(x, -0.5))
    slopes = torch.func.vmap(torch.func.grad(lambda row: reverse_gradient(row, 0.5).sum()))(x.detach())
    assert torch.equal(slopes, torch.full_like(x, -0.5))


@pytest.mark.parametrize("scale", [-1.0, float("inf"), "much"])
def test_a_scale_that_is_negative_or_not_finite_is_refused(scale):
    with pytest.raises(ValueError, match="`scale` should be finite and not negative"):
        reverse_gradient(torch.ones(2), scale)


@pytest.mark.skipif(not importlib.util.find_spec("pytorch_revgrad"), reason="pytorch_revgrad is not installed")
def test_the_reversal_of_pytorch_revgrad():
    from pytorch_revgrad import RevGrad

    p = features()
    (expected,) = torch.autograd.grad(RevGrad(alpha=0.7)(p["source"]).sin().sum(), p["source"])
    (found,) = torch.autograd.grad(reverse_gradient(p["source"], 0.7).sin().sum(), p["source"])
    torch.testing.assert_close(found, expected)
