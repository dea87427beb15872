"""A scaled gradient: the same bits, a share of the gradient; with the block open, all of it."""

import pytest
import torch
from contract import BlockCase

from toolkit import unblock
from toolkit.curvature import PARTIAL, scale_gradient

X = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
WEIGHT = torch.tensor([0.6, -1.1, 0.4], dtype=torch.float64)


def slope(factor):
    def witness(p):
        x = p["x"].detach()
        return {"x": factor * WEIGHT * (WEIGHT @ x).cos() + 2 * x}

    return witness


def partly_scaled(x, weight):
    return (weight.to(x) * scale_gradient(x, 0.3)).sum().sin() + x.square().sum()


BLOCK_CASES = [
    BlockCase(
        id="curvature-scaled-gradient",
        block=PARTIAL,
        parameters=lambda: {"x": X.clone().requires_grad_()},
        loss=lambda p: partly_scaled(p["x"], WEIGHT),
        blocked=slope(0.3),
        opened=slope(1.0),
    )
]

PEER_CASES = {"scaled_gradient": ({"x": X}, {"weight": WEIGHT}, lambda p, c: partly_scaled(p["x"], c["weight"]))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.3, 0.7, 1.0, 5.0])
def test_the_value_is_the_input_bit_for_bit(scale, dtype):
    x = torch.tensor([0.1, -3.0, 1e-7, 6e4], dtype=dtype, requires_grad=True)
    y = scale_gradient(x, scale)
    assert torch.equal(y, x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, scale))
    with unblock(PARTIAL):
        y = scale_gradient(x, scale)
        assert torch.equal(y, x)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_half_the_gradient_at_every_step_of_an_unrolled_model():
    """The k-th step behind it is reached by the k-th power of the scale, as in MuZero's dynamics."""
    state = start = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        state = 1.5 * scale_gradient(state, 0.5)
    assert torch.autograd.grad(state, start)[0].item() == pytest.approx((1.5 * 0.5) ** 3)


@pytest.mark.keeps_its_sums
def test_compiled_and_vectorised():
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: scale_gradient(x, 0.25), backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full_like(x, 0.25))
    slopes = torch.func.vmap(torch.func.grad(lambda v: scale_gradient(v, 0.25).sin()))(X)
    torch.testing.assert_close(slopes, 0.25 * X.cos())


def test_a_scale_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="`scale` should be a finite number"):
        scale_gradient(X, float("nan"))


def test_integers_have_no_gradient_to_scale():
    with pytest.raises(ValueError, match=r"`input` should be a floating-point tensor\. Found torch.int64"):
        scale_gradient(X.long(), 0.5)
