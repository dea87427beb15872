"""Divergences from a held point: their slope, their Hessian against explicit matrices, their third derivatives."""

import importlib.util

import pytest
import torch
from contract import BlockCase
from torch.func import hessian, jacrev
from values import draw, leaves

from toolkit import unblock
from toolkit.curvature import (
    HELD_OUTPUTS,
    HELD_POLICY,
    LINEAR_PART,
    gauss_newton_loss,
    gaussian_kl_from_held,
    held_divergence,
    hessian_product,
    kl_from_held,
    kl_to_held,
)

# --- a network with two weights, whose derivatives are written by hand ------------------------------------------------

X = torch.tensor([[1, 0.5], [-0.4, 2], [0.8, -1.5]], dtype=torch.float64)
Y = torch.tensor([0.2, -0.5, 0.9], dtype=torch.float64)
W = torch.tensor([0.3, -0.7], dtype=torch.float64)
DIRECTION = torch.tensor([0.8, -0.3], dtype=torch.float64)


def network(w):
    return (X.to(w) @ w).tanh() * w[0]


def half_squares(f):
    return (f - Y.to(f)).square().sum() / 2


def matrices(w):
    """Return the residuals, the Jacobian of the network, and the second derivatives of each output."""
    t = (X @ w).tanh()
    e = torch.tensor([1.0, 0.0], dtype=torch.float64)
    jacobian = w[0] * (1 - t**2)[:, None] * X + t[:, None] * e
    cross = (1 - t**2)[:, None, None] * (X[:, :, None] * e + e[:, None] * X[:, None, :])
    second = w[0] * (-2 * t * (1 - t**2))[:, None, None] * X[:, :, None] * X[:, None, :] + cross
    return network(w) - Y, jacobian, second


def gauss_newton(w):
    _, jacobian, _ = matrices(w)
    return jacobian.T @ jacobian


def full(w):
    residuals, _, second = matrices(w)
    return gauss_newton(w) + torch.einsum("n,nij->ij", residuals, second)


def along(model):
    """Return the derivative of a model along a direction: its gradient is a Hessian product."""

    def loss(p):
        (slope,) = torch.autograd.grad(model(p["w"]), p["w"], create_graph=True)
        return slope @ DIRECTION.to(slope)

    return loss


def product(matrix):
    return lambda p: {"w": matrix(p["w"].detach()) @ DIRECTION}


def own_divergence(w):
    return held_divergence(half_squares, network(w), network(w))


def quadratic_model(w):
    return gauss_newton_loss(half_squares, network(w), [w])


def cross_entropy(f):
    return -torch.log_softmax(f, -1)[torch.arange(2), torch.tensor([2, 0])].sum()


OUTPUTS, HELD = draw(1, 2, 3), draw(2, 2, 3)
GAUSSIAN = {"mean": draw(3, 2, 3), "log_std": 0.3 * draw(4, 3), "held_mean": draw(5, 2, 3), "held_log_std": draw(6, 3)}


def bregman(opened):
    def witness(p):
        f, h = p["outputs"].detach(), p["held"].detach()
        p_f, p_h = f.softmax(-1), h.softmax(-1)
        d = f - h
        moved = p_h * (d - (p_h * d).sum(-1, keepdim=True))
        return {"outputs": p_f - p_h, "held": -moved if opened else torch.zeros_like(h)}

    return witness


def of_logits(slope, leak):
    def witness(opened):
        def found(p):
            log_p, log_q = (p[name].detach().log_softmax(-1) for name in ("logits", "held"))
            zero = torch.zeros_like(log_p)
            return {"logits": slope(log_p, log_q), "held": leak(log_p, log_q) if opened else zero}

        return found

    return witness


def centred(log_p, log_q):
    """Return ``p (log p - log q - KL)``."""
    p, ratio = log_p.exp(), log_p - log_q
    return p * (ratio - (p * ratio).sum(-1, keepdim=True))


from_held = of_logits(lambda p, q: p.exp() - q.exp(), lambda p, q: centred(q, p))
to_held = of_logits(centred, lambda p, q: q.exp() - p.exp())


def gaussian(opened):
    def witness(p):
        mean, log_std, held_mean, held_log_std = (value.detach() for value in p.values())
        variance, held_variance = (2 * log_std).exp(), (2 * held_log_std).exp()
        d = mean - held_mean
        leak = {"held_mean": -d / variance, "held_log_std": (held_variance / variance - 1) * len(mean)}
        return {
            "mean": d / variance,
            "log_std": (1 - (held_variance + d**2) / variance).sum(0),
            **(leak if opened else {name: torch.zeros_like(value) for name, value in leak.items()}),
        }

    return witness


BLOCK_CASES = [
    BlockCase(
        id="curvature-bregman",
        block=HELD_OUTPUTS,
        parameters=leaves(outputs=OUTPUTS, held=HELD),
        loss=lambda p: held_divergence(cross_entropy, p["outputs"], p["held"]),
        blocked=bregman(opened=False),
        opened=bregman(opened=True),
    ),
    BlockCase(
        id="curvature-gauss-newton-matrix",
        block=HELD_OUTPUTS,
        parameters=leaves(w=W),
        loss=along(own_divergence),
        blocked=product(gauss_newton),
        opened=lambda p: {"w": torch.zeros_like(p["w"])},
    ),
    BlockCase(
        id="curvature-gauss-newton-loss",
        block=LINEAR_PART,
        parameters=leaves(w=W),
        loss=along(quadratic_model),
        blocked=product(gauss_newton),
        opened=product(lambda w: full(w) + gauss_newton(w)),
    ),
    BlockCase(
        id="curvature-gauss-newton-loss-first-order",
        block=LINEAR_PART,
        parameters=leaves(w=W),
        loss=lambda p: quadratic_model(p["w"]),
        blocked=lambda p: {"w": matrices(p["w"].detach())[1].T @ matrices(p["w"].detach())[0]},
        opened=lambda p: {"w": matrices(p["w"].detach())[1].T @ matrices(p["w"].detach())[0]},
    ),
    BlockCase(
        id="curvature-kl-from-held",
        block=HELD_POLICY,
        parameters=leaves(logits=OUTPUTS, held=HELD),
        loss=lambda p: kl_from_held(p["logits"], p["held"]).sum(),
        blocked=from_held(False),
        opened=from_held(True),
    ),
    BlockCase(
        id="curvature-kl-to-held",
        block=HELD_POLICY,
        parameters=leaves(logits=OUTPUTS, held=HELD),
        loss=lambda p: kl_to_held(p["logits"], p["held"]).sum(),
        blocked=to_held(False),
        opened=to_held(True),
    ),
    BlockCase(
        id="curvature-gaussian-kl",
        block=HELD_POLICY,
        parameters=leaves(**GAUSSIAN),
        loss=lambda p: gaussian_kl_from_held(**p).sum(),
        blocked=gaussian(opened=False),
        opened=gaussian(opened=True),
    ),
]

PEER_CASES = {
    "gauss_newton_product": ({"w": W}, {"x": X, "y": Y, "direction": DIRECTION}, lambda p, c: along(own_divergence)(p)),
    "gauss_newton_model": ({"w": W}, {"x": X, "y": Y, "direction": DIRECTION}, lambda p, c: along(quadratic_model)(p)),
    "trust_region": (
        {"logits": OUTPUTS, "held": HELD, **GAUSSIAN},
        {},
        lambda p, c: (
            (kl_from_held(p["logits"], p["held"]) + 0.3 * kl_to_held(p["logits"], p["held"])).sum()
            + gaussian_kl_from_held(*(p[name] for name in GAUSSIAN)).sum()
        ),
    ),
}


def exact(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def dense_hessian(function, w):
    return torch.autograd.functional.hessian(function, w)


def test_the_hessian_of_the_divergence_is_the_gauss_newton_matrix():
    expected = exact(1.7763739824, -0.1685614244, -0.1685614244, 0.0472108291).view(2, 2)
    torch.testing.assert_close(dense_hessian(own_divergence, W), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(dense_hessian(quadratic_model, W), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(hessian(lambda w: half_squares(network(w)))(W), full(W))
    w = W.clone().requires_grad_()
    assert own_divergence(w).item() == 0
    assert torch.autograd.grad(own_divergence(w), w)[0].tolist() == [0, 0]


def test_the_quadratic_model_has_value_and_gradient_of_the_loss():
    w = W.clone().requires_grad_()
    assert torch.equal(quadratic_model(w), half_squares(network(w)))
    expected = exact(-0.8571341296, 0.0673028427)
    torch.testing.assert_close(torch.autograd.grad(quadratic_model(w), w)[0], expected, rtol=0, atol=1e-10)
    with torch.no_grad():
        assert torch.equal(quadratic_model(w), half_squares(network(w)))


def test_each_open_block_of_the_quadratic_model_has_its_own_hessian():
    for blocks, expected in (
        ([HELD_OUTPUTS], torch.zeros(2, 2).double()),
        ([LINEAR_PART], full(W) + gauss_newton(W)),
        ([LINEAR_PART, HELD_OUTPUTS], full(W)),
    ):
        with unblock(*blocks):
            torch.testing.assert_close(dense_hessian(quadratic_model, W), expected)


def test_the_shorter_surrogate_has_the_full_hessian():
    """Holding the residuals alone keeps the second derivatives of the network: a common mistake."""

    def surrogate(w):
        f = network(w)
        return ((f - Y).detach() * f).sum() + (f - f.detach()).square().sum() / 2

    expected = exact(1.0991571072, -0.0687665316, -0.0687665316, 0.3271182308).view(2, 2)
    torch.testing.assert_close(dense_hessian(surrogate, W), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(full(W), expected, rtol=0, atol=1e-10)


def test_the_matrix_of_cross_entropy_is_that_of_the_divergence_of_policies():
    weight = draw(7, 4, 3)
    features = draw(8, 2, 4)

    def logits(w):
        return (features @ w).tanh()

    def of_loss(w):
        return held_divergence(cross_entropy, logits(w), logits(w))

    p = logits(weight).softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    jacobian = jacrev(logits)(weight).flatten(2)
    expected = torch.einsum("nci,ncd,ndj->ij", jacobian, middle, jacobian)
    for function in (of_loss, *(lambda w, d=d: d(logits(w), logits(w)).sum() for d in (kl_from_held, kl_to_held))):
        torch.testing.assert_close(dense_hessian(function, weight).view(12, 12), expected)


@pytest.mark.parametrize(("divergence", "third"), [(kl_from_held, 0.0909075492), (kl_to_held, 0.1818150984)])
def test_both_divergences_agree_to_second_order_and_not_to_third(divergence, third):
    theta = exact(0.2, -0.5, 1.0)
    first = torch.tensor([1.0, 0, 0], dtype=torch.float64)

    def moved(s):
        return divergence(theta + s * first, theta)

    s = torch.zeros((), dtype=torch.float64, requires_grad=True)
    derivatives, value = [], moved(s)
    for _ in range(3):
        (value,) = torch.autograd.grad(value, s, create_graph=True)
        derivatives.append(value.item())
    assert derivatives == pytest.approx([0, 0.1964834908, third], abs=1e-10)


@pytest.mark.parametrize("divergence", [kl_from_held, kl_to_held])
def test_without_the_block_there_is_no_trust_region(divergence):
    """The value is that of the divergence, and its derivatives of every order are zero: no step is limited."""
    theta = exact(0.2, -0.5, 1.0)
    with unblock(HELD_POLICY):
        found = dense_hessian(lambda t: divergence(t, t), theta)
    torch.testing.assert_close(found, torch.zeros(3, 3).double(), rtol=0, atol=1e-15)
    torch.testing.assert_close(
        dense_hessian(lambda t: divergence(t, t), theta),
        torch.diag(theta.softmax(0)) - torch.outer(theta.softmax(0), theta.softmax(0)),
    )


def test_the_hessian_of_a_gaussian():
    point = torch.stack([torch.tensor(0.4), torch.tensor(0.8).log()]).double()
    found = dense_hessian(lambda p: gaussian_kl_from_held(p[:1], p[1:], p[:1], p[1:]), point)
    torch.testing.assert_close(found, torch.diag(exact(1.5625, 2.0)), rtol=0, atol=1e-6)


def test_a_loss_may_have_parameters_of_its_own():
    """Of a square with a learned weight a, the divergence is ``a |f - h|^2``."""
    a = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    divergence = held_divergence(lambda f: a * f.square().sum(), OUTPUTS, HELD)
    torch.testing.assert_close(torch.autograd.grad(divergence, a)[0], (OUTPUTS - HELD).square().sum())


def test_values_are_those_of_torch_distributions():
    from torch.distributions import Categorical, Normal, kl_divergence

    p, q = Categorical(logits=OUTPUTS), Categorical(logits=HELD)
    torch.testing.assert_close(kl_from_held(OUTPUTS, HELD), kl_divergence(q, p))
    torch.testing.assert_close(kl_to_held(OUTPUTS, HELD), kl_divergence(p, q))
    p = Normal(GAUSSIAN["mean"], GAUSSIAN["log_std"].exp())
    q = Normal(GAUSSIAN["held_mean"], GAUSSIAN["held_log_std"].exp())
    torch.testing.assert_close(gaussian_kl_from_held(**GAUSSIAN), kl_divergence(q, p).sum(-1))


@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_neighbouring_policies_have_a_divergence_in_single_precision(size):
    """The sum of ``p (log p - log q)`` alone is a rounding, of either sign; it has to be the square of the distance."""
    logits = draw(23, 50, 6).float()
    held = logits + size * draw(24, 50, 6).float()
    # A logarithm is rounded to 2^-22; its difference from the other counts by the size of both.
    rtol = 2**-20 / size
    for divergence in (kl_from_held, kl_to_held):
        found = divergence(logits, held)
        assert (found > 0).all()
        torch.testing.assert_close(found.double(), divergence(logits.double(), held.double()), rtol=rtol, atol=0)
    pairs = [draw(25, 50, 1).float(), 0.1 * draw(26, 50, 1).float()]
    pairs += [pairs[0], pairs[1] + size * draw(27, 50, 1).float()]
    found, expected = gaussian_kl_from_held(*pairs), gaussian_kl_from_held(*(pair.double() for pair in pairs))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("divergence", [kl_from_held, kl_to_held])
def test_impossible_actions_and_saturated_logits(divergence):
    """An action that is impossible in both adds nothing; a probability of 1 gives no NaN in value or gradient."""
    logits = torch.tensor([[0.3, -torch.inf, 1.0], [800.0, 0.0, -800.0]], dtype=torch.float64, requires_grad=True)
    held = torch.tensor([[0.1, -torch.inf, 0.4], [800.0, 0.0, -800.0]], dtype=torch.float64)
    value = divergence(logits, held)
    possible = divergence(logits[0, [0, 2]], held[0, [0, 2]])
    torch.testing.assert_close(value, torch.stack([possible, torch.zeros_like(possible)]))
    (slope,) = torch.autograd.grad(value.sum(), logits)
    assert slope.isfinite().all()
    assert slope[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """Neighbouring policies: rounded logarithms would make some divergences negative."""
    logits = draw(21, 200, 16)
    logits, held = logits.to(dtype), (logits + 0.02 * draw(22, 200, 16)).to(dtype)
    for divergence in (kl_from_held, kl_to_held):
        found, expected = divergence(logits, held), divergence(logits.double(), held.double())
        assert found.dtype == torch.float32
        # 16 differences of logarithms around 3, each rounded to 2^-24 of it, weighted by probabilities.
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    found = gaussian_kl_from_held(*(value.to(dtype) for value in GAUSSIAN.values()))
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: held_divergence(half_squares, OUTPUTS, OUTPUTS[..., :1]), "`held` should have the shape of `outputs`"),
        (lambda: kl_from_held(OUTPUTS, OUTPUTS[..., :1]), "`held` should have the shape of `logits`"),
        (lambda: kl_to_held(OUTPUTS[..., None, :], OUTPUTS), "`held` should have the shape of `logits`"),
        (
            lambda: gaussian_kl_from_held(*torch.zeros(2, 3, 1), *torch.zeros(2, 3, 1)[:, :1]),
            r"`held_mean` should have the shape of `mean`, \(3, 1\).* Found \(1, 1\)",
        ),
        (
            lambda: gaussian_kl_from_held(torch.zeros(3, 1), torch.zeros(3), torch.zeros(3, 1), torch.zeros(3)),
            r"`log_std` should have shape \(3, 1\) or \(1,\). Found \(3,\).",
        ),
        (lambda: gauss_newton_loss(half_squares, network(W), W), r"`parameters` should be a list of tensors. Found"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(not importlib.util.find_spec("backpack"), reason="backpack is not installed")
def test_the_products_of_backpack():
    from backpack.hessianfree.ggnvp import ggn_vector_product

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 4)).double()
    x, labels = draw(9, 5, 3), torch.tensor([0, 3, 1, 2, 2])
    parameters = list(net.parameters())
    vector = [draw(10 + i, *parameter.shape) for i, parameter in enumerate(parameters)]
    logits = net(x)
    expected = ggn_vector_product(torch.nn.functional.cross_entropy(logits, labels), logits, net, vector)
    found = hessian_product(kl_from_held(logits, logits).mean(), parameters, vector)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-6, atol=1e-12)
