"""Equilibrium models: dense solves, unrolling, finite differences, and torchdeq where it is right."""

import warnings
from functools import partial

import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase
from torch import nn
from values import doubles

from toolkit import unblock
from toolkit.bilevel import FIXED_POINT, ConvergenceWarning, equilibrium, fixed_point, phantom
from toolkit.gradients.field import field_jacobian
from toolkit.gradients.memory import measure_memory

# z = tanh(W z + b) for two samples, each with its own b; the loss is c z + z^2 / 2.
C = doubles(1, -2)
START = torch.zeros(2, 2).double()
TIGHT = partial(fixed_point, tolerance=1e-14, max_steps=60)
PLAIN = partial(fixed_point, tolerance=0, max_steps=60, memory=0)


def _parameters():
    return {
        "W": doubles(0.5, -0.3, 0.2, 0.4).view(2, 2).requires_grad_(),
        "b": doubles(0.3, -0.6, -0.1, 0.8).view(2, 2).requires_grad_(),
    }


def _layer(z, W, b):
    return torch.tanh(z @ W.T + b)


def _loss(z):
    return (z @ C).sum() + 0.5 * z.square().sum()


def _quiet(loss):
    """A tolerance of the last bit is not always reached."""

    def run(p):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return loss(p)

    return run


def _implicit(p):
    return _loss(equilibrium(_layer, START, p["W"], p["b"], solver=TIGHT).value)


def _phantom(steps, damping):
    def loss(p):
        found = phantom(lambda z: _layer(z, p["W"], p["b"]), START, steps=steps, damping=damping, solver=PLAIN)
        return _loss(found.value)

    return _quiet(loss)


def _slopes(inverse):
    """Return the gradient with ``inverse(J)`` in place of ``(I - J)^-1``, sample by sample."""

    def witness(p):
        W, b = p["W"].detach(), p["b"].detach()
        z = START
        for _ in range(200):
            z = _layer(z, W, b)
        found = {"W": torch.zeros_like(W), "b": torch.zeros_like(b)}
        for n in range(len(z)):
            slope = 1 - z[n] ** 2
            u = inverse(slope[:, None] * W).T @ (C + z[n])
            found["W"] += torch.outer(slope * u, z[n])
            found["b"][n] = slope * u
        return found

    return witness


def _series(steps, damping):
    eye = torch.eye(2).double()
    return lambda J: (
        damping * sum(torch.linalg.matrix_power((1 - damping) * eye + damping * J, j) for j in range(steps))
    )


EXACT = _slopes(lambda J: torch.linalg.inv(torch.eye(2).double() - J))

BLOCK_CASES = [
    BlockCase(
        id="one_step",
        block=FIXED_POINT,
        parameters=_parameters,
        loss=_phantom(1, 1.0),
        blocked=_slopes(_series(1, 1.0)),
        opened=EXACT,
    ),
    BlockCase(
        id="phantom",
        block=FIXED_POINT,
        parameters=_parameters,
        loss=_phantom(5, 0.5),
        blocked=_slopes(_series(5, 0.5)),
        opened=EXACT,
    ),
    BlockCase(
        id="equilibrium",
        block=FIXED_POINT,
        parameters=_parameters,
        loss=_implicit,
        blocked=EXACT,
        opened=EXACT,
    ),
]


def _peers_one_step(p, c):
    few = partial(fixed_point, memory=0, tolerance=0, max_steps=5)
    return _loss(phantom(lambda z: _layer(z, p["W"], p["b"]), c["start"], solver=few).value)


PEER_CASES = {
    "one_step_equilibrium": (
        {name: value.detach() for name, value in _parameters().items()},
        {"start": START, "c": C},
        lambda p, c: _quiet(lambda p: _peers_one_step(p, c))(p),
    ),
}


def _gradients(loss, p, *opened):
    with unblock(*opened):
        return dict(zip(p, torch.autograd.grad(loss(p), list(p.values())), strict=True))


KNOWN = {
    (1, 1.0): [0.6153678231, -0.5557145706, -1.1069892373, 0.9996786076],
    (2, 1.0): [0.6622853987, -0.5980839947, -1.5009469449, 1.3554463778],
    (5, 1.0): [0.6045586112, -0.5459531948, -1.6317658342, 1.4735837912],
    (5, 0.5): [0.6152413123, -0.5556003236, -1.4504441454, 1.3098392783],
    None: [0.6017412452, -0.5434089419, -1.6296562393, 1.4716786987],
}


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_gradients_of_one_sample_are_the_known_ones(case):
    p = _parameters()
    b = p["b"][:1].detach()
    if case is None:
        z = equilibrium(_layer, START[:1], p["W"], b, solver=TIGHT).value
    else:
        z = phantom(lambda z: _layer(z, p["W"], b), START[:1], steps=case[0], damping=case[1], solver=TIGHT).value
    (found,) = torch.autograd.grad(_loss(z), p["W"])
    assert found.flatten().tolist() == pytest.approx(KNOWN[case], abs=1e-9)


def _unrolled(p):
    z = START
    for _ in range(200):
        z = _layer(z, p["W"], p["b"])
    return _loss(z)


def _directional(loss, p, order):
    """Return the `order`-th derivative of a loss along a direction, and of it the gradient."""
    leaves = list(p.values())
    value = loss(p)
    for _ in range(order):
        slopes = torch.autograd.grad(value, leaves, create_graph=True)
        value = sum(
            (slope * (k + torch.arange(slope.numel()).view(slope.shape))).sum() for k, slope in enumerate(slopes)
        )
    return torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("order", [1, 2])
def test_second_and_third_derivatives_are_those_of_unrolling(order):
    p = _parameters()
    torch.testing.assert_close(_directional(_implicit, p, order), _directional(_unrolled, p, order))


def test_the_one_step_field_is_the_gradient_of_no_loss_and_the_implicit_one_of_the_unrolled_loss():
    p = _parameters()
    assert field_jacobian(lambda: _phantom(1, 1.0)(p), p).asymmetry == pytest.approx(0.785, abs=1e-3)
    field = field_jacobian(lambda: _implicit(p), p)
    assert field.is_gradient_field
    flat = torch.cat([value.detach().flatten() for value in p.values()])
    unrolled = lambda v: _unrolled({"W": v[:4].view(2, 2), "b": v[4:].view(2, 2)})  # noqa: E731
    torch.testing.assert_close(field.jacobian, torch.autograd.functional.hessian(unrolled, flat))


def test_a_module_is_passed_by_its_parameters():
    torch.manual_seed(0)
    module = nn.Linear(3, 3).double()
    parameters = dict(module.named_parameters())
    x = torch.randn(4, 3).double()

    def function(z, x, *values):
        return torch.tanh(
            0.5 * torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (z,)) + x
        )

    z = equilibrium(function, torch.zeros_like(x), x, *parameters.values(), solver=TIGHT).value
    found = torch.autograd.grad(z.square().sum(), list(parameters.values()))
    z = torch.zeros_like(x)
    for _ in range(100):
        z = function(z, x, *parameters.values())
    torch.testing.assert_close(found, torch.autograd.grad(z.square().sum(), list(parameters.values())))


def test_a_closed_over_parameter_is_refused():
    p = _parameters()
    with pytest.raises(ValueError, match="`args` should have every tensor with a gradient"):
        equilibrium(lambda z, b: _layer(z, p["W"], b), START, p["b"])


def test_arguments_without_a_gradient_pass():
    p = _parameters()
    sign = torch.tensor([[1], [-1]])
    z = equilibrium(lambda z, W, s: torch.tanh(z @ W.T + 0.3 * s), START, p["W"], sign, solver=TIGHT).value
    assert torch.autograd.grad(z.sum(), p["W"])[0].isfinite().all()


def test_a_cotangent_of_any_size_is_solved_to_the_same_digits():
    """Tolerances are relative to the cotangent of each sample, else a small one would end the search at its start."""
    p = _parameters()
    z = equilibrium(_layer, START, p["W"], p["b"]).value
    (large,) = torch.autograd.grad(_loss(z), p["W"], retain_graph=True)
    (small,) = torch.autograd.grad(1e-12 * _loss(z), p["W"])
    torch.testing.assert_close(1e12 * small, large, rtol=1e-9, atol=0)


def test_the_graph_does_not_grow_with_the_iterations():
    p = _parameters()
    for run in (
        lambda n: equilibrium(_layer, START, p["W"], p["b"], solver=partial(PLAIN, max_steps=n)).value.sum(),
        lambda n: phantom(lambda z: _layer(z, p["W"], p["b"]), START, solver=partial(PLAIN, max_steps=n)).value.sum(),
    ):
        kept = _quiet(lambda n, run=run: measure_memory(lambda: run(n)).graph)
        blocked = [kept(n) for n in (5, 50)]
        with unblock(FIXED_POINT):
            opened = [kept(n) for n in (5, 50)]
        assert blocked[0] == blocked[1]
        assert opened[1] > 3 * opened[0]


def test_unfinished_searches_warn_forward_and_backward():
    p = _parameters()
    short = partial(fixed_point, max_steps=3)
    with pytest.warns(ConvergenceWarning, match="search for a fixed point did not converge for 2 of 2 samples"):
        found = equilibrium(_layer, START, p["W"], p["b"], solver=short)
    assert found.converged.tolist() == [False, False]
    with pytest.warns(ConvergenceWarning, match="The linear solver of an implicit gradient did not converge"):
        found.value.sum().backward()
    with pytest.warns(ConvergenceWarning, match="the largest residual is"):
        phantom(lambda z: z + 1, START)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_lower_precision_is_close_to_float64(dtype, bound):
    p = _parameters()
    values = {name: value.detach().to(dtype).requires_grad_() for name, value in p.items()}
    found = equilibrium(_layer, START.to(dtype), values["W"], values["b"])
    assert found.value.dtype == dtype
    (slope,) = torch.autograd.grad(_loss(found.value.double()), values["W"])
    assert (slope.double() - EXACT(p)["W"]).norm() <= bound * EXACT(p)["W"].norm()


@pytest.mark.gpu
def test_equilibria_on_a_gpu_have_the_gradients_of_the_cpu():
    p = _parameters()
    moved = {name: value.detach().to(ACCELERATOR).requires_grad_() for name, value in p.items()}
    z = equilibrium(_layer, START.to(ACCELERATOR), moved["W"], moved["b"], solver=TIGHT).value
    found = torch.autograd.grad((z @ C.to(ACCELERATOR)).sum() + 0.5 * z.square().sum(), list(moved.values()))
    for slope, expected in zip(found, EXACT(p).values(), strict=True):
        torch.testing.assert_close(slope.cpu(), expected)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"steps": 0}, "`steps` should be a positive integer"),
        ({"damping": 1.5}, "`damping` should be above 0 and at most 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        phantom(torch.tanh, START, **arguments)


# --- torchdeq ----------------------------------------------------------------------------------------------------


def _torchdeq(p, **options):
    torchdeq = pytest.importorskip("torchdeq")
    deq = torchdeq.get_deq(
        f_solver="fixed_point_iter", f_max_iter=200, f_tol=1e-14, b_max_iter=200, b_tol=1e-14, **options
    )
    deq.train()
    zs, _ = deq(lambda z: _layer(z, p["W"], p["b"]), START)
    return _loss(zs[-1])


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"grad": 1}, _phantom(1, 1.0)),
        ({"grad": 5}, _phantom(5, 1.0)),
        ({"grad": 5, "tau": 0.5}, _phantom(5, 0.5)),
        ({"ift": True}, _implicit),
    ],
    ids=["one_step", "five_steps", "damped", "implicit"],
)
def test_torchdeq_finds_the_same_gradients(options, ours):
    p = _parameters()
    theirs, found = _gradients(lambda p: _torchdeq(p, **options), p), _gradients(ours, p)
    for name in p:
        torch.testing.assert_close(found[name], theirs[name], rtol=1e-6, atol=1e-9)


def test_the_second_derivative_of_torchdeq_is_wrong_and_ours_right():
    p = _parameters()
    right = _directional(_unrolled, p, 1)[0]
    theirs = _directional(lambda p: _torchdeq(p, ift=True), p, 1)[0]
    torch.testing.assert_close(_directional(_implicit, p, 1)[0], right)
    assert (theirs - right).norm() > 0.5 * right.norm()


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_gradient_is_linear_in_cotangents_far_from_one(size):
    """The squares of these are 0 or infinite in float32."""
    a = torch.tensor([0.5, 0.2, 0.1], requires_grad=True)
    value = equilibrium(lambda z, a: a * z + 1, torch.zeros(1, 3), a).value
    (found,) = torch.autograd.grad(value, a, size * torch.ones_like(value))
    torch.testing.assert_close(found / size, 1 / (1 - a.detach()).square(), rtol=1e-4, atol=0)
