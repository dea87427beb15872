"""Products with a Hessian and the natural gradient, against dense matrices."""

import pytest
import torch
from folders import ROOT
from values import draw

from toolkit import unblock
from toolkit.curvature import HELD_POLICY, hessian_product, kl_from_held, natural_gradient
from toolkit.runner._zoo import read_programs

FEATURES, LABELS = draw(1, 12, 4), torch.randint(3, (12,), generator=torch.Generator().manual_seed(2))


def setting():
    """Return the parameters of a softmax regression, its loss, its divergence, its gradient and its Fisher matrix."""
    weight, bias = draw(3, 4, 3).requires_grad_(), draw(4, 3).requires_grad_()
    logits = FEATURES @ weight + bias
    loss = torch.nn.functional.cross_entropy(logits, LABELS)
    p = logits.detach().softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    extended = torch.cat([FEATURES, torch.ones(12, 1)], 1)
    fisher = torch.einsum("ni,nj,ncd->icjd", extended, extended, middle).reshape(15, 15) / 12
    gradient = torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, [weight, bias], retain_graph=True)])
    return [weight, bias], loss, kl_from_held(logits, logits).mean(), gradient, fisher


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_the_product_is_that_with_the_fisher_matrix():
    parameters, _, divergence, _, fisher = setting()
    vector = [draw(5, 4, 3), draw(6, 3)]
    torch.testing.assert_close(flat(hessian_product(divergence, parameters, vector)), fisher @ flat(vector))


def test_the_natural_gradient_solves_with_the_damped_matrix():
    parameters, loss, divergence, gradient, fisher = setting()
    found = natural_gradient(loss, divergence, parameters, damping=0.01, iterations=60)
    expected = torch.linalg.solve(fisher + 0.01 * torch.eye(15), gradient)
    torch.testing.assert_close(flat(found), expected, rtol=1e-6, atol=1e-7)
    assert not flat(found).requires_grad


def test_the_radius_is_the_divergence_to_second_order():
    parameters, loss, divergence, _, fisher = setting()
    direction = flat(natural_gradient(loss, divergence, parameters, damping=0.1, radius=0.02))
    assert (direction @ fisher @ direction / 2).item() == pytest.approx(0.02)


def test_without_the_block_it_is_the_gradient_over_the_damping():
    with unblock(HELD_POLICY):
        parameters, loss, divergence, gradient, _ = setting()
        found = natural_gradient(loss, divergence, parameters, damping=0.1)
        torch.testing.assert_close(flat(found), gradient / 0.1)
        assert flat(natural_gradient(loss, divergence, parameters, damping=0.0)).tolist() == [0.0] * 15


def test_it_does_not_depend_on_the_parametrisation():
    """The natural gradient of half the logits' scale is the natural gradient, carried over: a gradient is not."""
    w = draw(7, 4, 3)
    steps = []
    for scale in (1.0, 10.0):
        v = (w / scale).requires_grad_()
        logits = FEATURES @ (scale * v)
        # The logits of a class may all move together, which is no change: a small damping in the scaled units.
        found = natural_gradient(
            torch.nn.functional.cross_entropy(logits, LABELS),
            kl_from_held(logits, logits).mean(),
            [v],
            damping=1e-9 * scale**2,
            iterations=200,
        )
        steps.append(scale * found[0])
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-5, atol=1e-7)


def test_a_linear_value_has_a_product_of_zero():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    unused = torch.ones(3, requires_grad=True)
    found = hessian_product(w.sum(), [w, unused], [torch.ones(2), torch.ones(3)])
    assert [tensor.tolist() for tensor in found] == [[0, 0], [0, 0, 0]]


def test_at_a_minimum_nothing_moves():
    w = torch.zeros(2, requires_grad=True)
    metric = (w - w.detach()).square().sum() / 2
    assert natural_gradient(w.square().sum(), metric, [w], radius=0.1)[0].tolist() == [0, 0]


def test_wrong_arguments_are_refused():
    parameters, loss, divergence, _, _ = setting()
    with pytest.raises(ValueError, match=r"`vector` should have the shapes \[\(4, 3\), \(3,\)\]"):
        hessian_product(divergence, parameters, [torch.ones(4, 3)])
    for call in (lambda w: hessian_product(loss, w, [w]), lambda w: natural_gradient(loss, divergence, w)):
        with pytest.raises(ValueError, match=r"`parameters` should be a list of tensors. Found a tensor, \(4, 3\)"):
            call(parameters[0])
    for name, value in {"damping": -1.0, "iterations": 0, "tolerance": -1.0, "radius": 0.0}.items():
        with pytest.raises(ValueError, match=f"`{name}` should be"):
            natural_gradient(loss, divergence, parameters, **{name: value})


def test_the_trust_region_of_the_zoo_by_hand():
    """Held, its program has the Fisher product as its gradient; not held, zero, although the values are the same."""
    (program,) = (p for p in read_programs(ROOT / "docs" / "zoo") if p.path.stem == "trust_region_that_follows")
    torch.manual_seed(0)
    networks, states, vector = program.module.setup()
    logits = networks["policy"](states)
    parameters = list(networks["policy"].parameters())
    expected = flat(hessian_product(kl_from_held(logits, logits).mean(), parameters, vector))
    torch.testing.assert_close(flat(program.audit("fixed").blocked.values()), expected.to(torch.get_default_dtype()))
    assert flat(program.audit("buggy").blocked.values()).abs().max() < 1e-7 < expected.abs().max()


@pytest.mark.parametrize("radius", [None, 0.1])
@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_size_of_a_gradient_does_not_matter(size, radius):
    """Its square is 0 or infinite in float32."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    metric = ((w - w.detach()).square() * torch.tensor([1.0, 4.0])).sum() / 2
    (found,) = natural_gradient(size * (w**2).sum(), metric, [w], damping=0.0, radius=radius)
    (expected,) = natural_gradient((w**2).sum(), metric, [w], damping=0.0, radius=radius)
    torch.testing.assert_close(found / (size if radius is None else 1), expected)
