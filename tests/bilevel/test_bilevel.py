"""Adaptation and implicit steps: closed forms on quadratic problems, dense solves, finite differences."""

import warnings
from functools import partial

import pytest
import torch
from contract import BlockCase, finite_differences
from torch import nn
from values import doubles

from toolkit import compare, unblock
from toolkit.bilevel import (
    ADAPTED,
    INNER_GRADIENT,
    JACOBIAN,
    SOLUTION,
    ConvergenceWarning,
    adapt,
    conjugate_gradient,
    implicit_adapt,
    implicit_minimum,
    implicit_root,
    neumann_series,
    newton_step,
    reptile_loss,
    unroll,
)
from toolkit.gradients.field import field_jacobian

# Inner loss (w - a)^T A (w - a) / 2, outer loss (w - b)^T B (w - b) / 2.
A, B = doubles(2, 0.5, 0.5, 0.7).view(2, 2), doubles(1, -0.2, -0.2, 1.5).view(2, 2)
INNER, OUTER = doubles(1, -0.3), doubles(-0.4, 0.8)
RATE, STRENGTH = 0.3, 1.5


def _start():
    return {"w": doubles(0.6, 0.9).requires_grad_()}


def _quadratic(matrix, centre, w):
    return 0.5 * (w - centre) @ matrix @ (w - centre)


def _inner(p):
    return _quadratic(A, INNER, p["w"])


def _outer(p):
    return _quadratic(B, OUTER, p["w"])


def _descended(w, steps):
    for _ in range(steps):
        w = w - RATE * A @ (w - INNER)
    return w


def _maml(p, steps=3):
    return _outer(adapt(_inner, p, steps=steps, step_size=RATE))


def _maml_slope(steps, power):
    def witness(p):
        slope = B @ (_descended(p["w"].detach(), steps) - OUTER)
        return {"w": torch.linalg.matrix_power(torch.eye(2).double() - RATE * A, power) @ slope}

    return witness


def _reptile(p):
    return reptile_loss(p, adapt(_inner, p, steps=3, step_size=RATE), step_size=RATE)


MINIMISE = partial(adapt, steps=60, step_size=RATE)


def _imaml(p):
    return _outer(implicit_adapt(_inner, p, strength=STRENGTH, minimise=MINIMISE))


def _imaml_slope(p):
    eye = torch.eye(2).double()
    adapted = torch.linalg.solve(A + STRENGTH * eye, A @ INNER + STRENGTH * p["w"].detach())
    return {"w": torch.linalg.solve(eye + A / STRENGTH, B @ (adapted - OUTER))}


# Ridge regression: the validation loss by the logarithm of the penalty.
X, Y = doubles(1, 0.2, 0.3, -1, 0.5, 0.7).view(3, 2), doubles(0.4, -0.9, 1.1)
X_VAL, Y_VAL = doubles(0.8, -0.5, -0.2, 1.2).view(2, 2), doubles(0.3, 0.6)


def _penalty():
    return {"log_penalty": torch.tensor(0.25, dtype=torch.float64, requires_grad=True)}


def _ridge(w, log_penalty):
    return 0.5 * (X @ w - Y).square().sum() + 0.5 * log_penalty.exp() * w.square().sum()


def _validation(w):
    return 0.5 * (X_VAL @ w - Y_VAL).square().sum()


def _fitted(log_penalty, steps=200):
    step = lambda w: w - RATE * torch.func.grad(_ridge)(w, log_penalty)  # noqa: E731
    return unroll(step, torch.zeros(2).double(), steps=steps, attached=steps)


def _hypergradient(p):
    penalty = p["log_penalty"].detach().exp()
    hessian = X.T @ X + penalty * torch.eye(2).double()
    w = torch.linalg.solve(hessian, X.T @ Y)
    slope = X_VAL.T @ (X_VAL @ w - Y_VAL)
    return {"log_penalty": -slope @ torch.linalg.solve(hessian, penalty * w)}


def _implicit(p):
    return _validation(implicit_minimum(_ridge, _fitted(p["log_penalty"]), p["log_penalty"]))


def _newton(p):
    slope = lambda w: torch.func.grad(_ridge)(w, p["log_penalty"])  # noqa: E731
    return _validation(newton_step(slope, _fitted(p["log_penalty"])))


# A step towards the root of a w^2 + w - b from a point that is none.
UNFINISHED = doubles(0.5, -1.4)


def _coefficients():
    return {"a": doubles(1.2, 0.7).requires_grad_(), "b": doubles(0.9, 0.4).requires_grad_()}


def _unfinished(p):
    return newton_step(lambda w: p["a"] * w**2 + w - p["b"], UNFINISHED).square().sum()


def _unfinished_slope(p):
    a, b, w = p["a"].detach(), p["b"].detach(), UNFINISHED
    slope = 2 * a * w + 1
    step = w - (a * w**2 + w - b) / slope
    return {"a": -2 * step * w**2 / slope, "b": 2 * step / slope}


REDUNDANT = "Opening it changes nothing."

BLOCK_CASES = [
    BlockCase(
        id="maml",
        block=INNER_GRADIENT,
        parameters=_start,
        loss=_maml,
        blocked=_maml_slope(3, 0),
        opened=_maml_slope(3, 3),
    ),
    BlockCase(
        id="reptile",
        block=ADAPTED,
        parameters=_start,
        loss=_reptile,
        blocked=lambda p: {"w": (p["w"] - _descended(p["w"], 3)).detach() / RATE},
        opened=lambda p: {"w": torch.zeros(2).double()},
    ),
    BlockCase(
        id="implicit_maml",
        block=SOLUTION,
        parameters=_start,
        loss=_imaml,
        blocked=_imaml_slope,
        opened=_imaml_slope,
        without_peer=REDUNDANT,
    ),
    BlockCase(
        id="hypergradient",
        block=SOLUTION,
        parameters=_penalty,
        loss=_implicit,
        blocked=_hypergradient,
        opened=_hypergradient,
        without_peer=REDUNDANT,
    ),
    BlockCase(
        id="newton_step",
        block=SOLUTION,
        parameters=_penalty,
        loss=_newton,
        blocked=_hypergradient,
        opened=_hypergradient,
        without_peer=REDUNDANT,
    ),
    BlockCase(
        id="matrix_of_an_unfinished_step",
        block=JACOBIAN,
        parameters=_coefficients,
        loss=_unfinished,
        blocked=_unfinished_slope,
    ),
]


def _peers_maml(p, c):
    w = adapt(lambda q: _quadratic(c["A"], c["a"], q["w"]), p, steps=2, step_size=RATE)["w"]
    return _quadratic(c["B"], c["b"], w)


def _peers_reptile(p, c):
    adapted = adapt(lambda q: _quadratic(c["A"], c["a"], q["w"]), p, steps=2, step_size=RATE)
    return reptile_loss(p, adapted, step_size=RATE)


PEER_CASES = {
    "maml": ({"w": doubles(0.6, 0.9)}, {"A": A, "B": B, "a": INNER, "b": OUTER}, _peers_maml),
    "reptile": ({"w": doubles(0.6, 0.9)}, {"A": A, "a": INNER}, _peers_reptile),
    "newton_step": (
        {"a": doubles(1.2, 0.7), "b": doubles(0.9, 0.4)},
        {"w": UNFINISHED},
        lambda p, c: newton_step(lambda w: p["a"] * w**2 + w - p["b"], c["w"]).square().sum(),
    ),
}


def _gradient(loss, p, *opened):
    with unblock(*opened):
        return torch.autograd.grad(loss(p), list(p.values()))[0]


# --- adaptation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "blocked", "opened"),
    [
        (1, [1.0784, -0.35], [0.48386, -0.43826]),
        (3, [1.23552944, -0.8129102], [0.2601608985, -0.6450623839]),
    ],
)
def test_maml_has_the_known_gradients(steps, blocked, opened):
    loss = partial(_maml, steps=steps)
    assert _gradient(loss, _start()).tolist() == pytest.approx(blocked, abs=1e-10)
    assert _gradient(loss, _start(), INNER_GRADIENT).tolist() == pytest.approx(opened, abs=1e-10)


def test_reptile_and_implicit_maml_have_the_known_gradients():
    assert _gradient(_reptile, _start()).tolist() == pytest.approx([-0.52674, 1.625124], abs=1e-10)
    assert _gradient(_imaml, _start()).tolist() == pytest.approx([0.5616247016, -0.4968762668], abs=1e-10)


def test_implicit_adaptation_keeps_the_dtype_of_each_parameter():
    p = {"w": torch.ones(2, requires_grad=True), "bias": torch.ones(1, dtype=torch.float64, requires_grad=True)}
    inner = lambda p: p["w"].square().sum() + p["bias"].square().sum()  # noqa: E731
    adapted = implicit_adapt(inner, p, strength=2.0, minimise=MINIMISE)
    assert {name: value.dtype for name, value in adapted.items()} == {"w": torch.float32, "bias": torch.float64}
    slopes = torch.autograd.grad(sum(value.sum() for value in adapted.values()), list(p.values()))
    assert [slope.dtype for slope in slopes] == [torch.float32, torch.float64]
    for slope in slopes:  # lambda / (lambda + 2)
        torch.testing.assert_close(slope, torch.full_like(slope, 0.5))


def test_reptile_with_both_blocks_open_is_the_gradient_of_the_distance():
    p = _start()
    found = _gradient(_reptile, p, ADAPTED, INNER_GRADIENT)
    assert found == pytest.approx(finite_differences(_reptile, p)["w"], abs=1e-9)


def _network(generator):
    model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    values = {n: torch.randn(v.shape, generator=generator, dtype=torch.float64) for n, v in model.named_parameters()}
    x = torch.randn(2, 4, 1, generator=generator, dtype=torch.float64)

    def loss(p, x):
        return (torch.func.functional_call(model, p, (x,)) - x.sin()).square().mean()

    return values, loss, x


def test_maml_of_a_network_is_the_derivative_through_the_steps():
    """Here the Hessian changes on the way, and finite differences see through the block."""
    values, loss, (support, query) = _network(torch.Generator().manual_seed(1))
    p = {name: value.requires_grad_() for name, value in values.items()}

    def outer(p):
        return loss(adapt(lambda q: loss(q, support), p, steps=3, step_size=0.2), query)

    with unblock(INNER_GRADIENT):
        found = torch.autograd.grad(outer(p), list(p.values()))
    for slope, expected in zip(found, finite_differences(outer, p).values(), strict=True):
        torch.testing.assert_close(slope, expected, rtol=1e-7, atol=1e-9)


def test_a_batch_of_tasks_is_a_loop_over_them():
    values, loss, x = _network(torch.Generator().manual_seed(2))

    def outer(p, x):
        return loss(adapt(lambda q: loss(q, x[:2]), p, steps=2, step_size=0.2), x[2:])

    for opened in ((), (INNER_GRADIENT,)):
        p = {name: value.clone().requires_grad_() for name, value in values.items()}
        with unblock(*opened):
            found = torch.autograd.grad(torch.func.vmap(outer, (None, 0))(p, x).sum(), list(p.values()))
            expected = torch.autograd.grad(sum(outer(p, task) for task in x), list(p.values()))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_adaptation_works_without_recording(mode):
    start = _start()
    with mode():
        assert adapt(_inner, start, steps=3, step_size=RATE)["w"].tolist() == _descended(start["w"], 3).tolist()


def test_a_loss_without_parameters_adapts_nothing():
    p = _start()
    assert torch.equal(adapt(lambda p: torch.zeros(()), p, steps=2, step_size=RATE)["w"], p["w"])


def test_the_graph_of_blocked_steps_is_not_kept():
    assert adapt(_inner, _start(), steps=1, step_size=RATE)["w"].grad_fn.next_functions[1][0] is None


@pytest.mark.parametrize("opened", [(), (INNER_GRADIENT,)])
def test_learned_step_sizes_have_a_gradient(opened):
    p, rates = _start(), {"w": doubles(0.3, 0.1).requires_grad_()}
    with unblock(*opened):
        value = _outer(adapt(_inner, p, steps=1, step_size=rates))
        (found,) = torch.autograd.grad(value, rates["w"])
    w, slope = p["w"].detach(), A @ (p["w"].detach() - INNER)
    adapted = w - rates["w"].detach() * slope
    torch.testing.assert_close(found, -slope * (B @ (adapted - OUTER)))


def test_first_order_maml_is_the_gradient_of_no_loss():
    """The Jacobian of its field, B (I - rate A)^k, is symmetric only where A and B commute."""
    p, steep = _start(), doubles(1, 0.9, 0.9, 1.5).view(2, 2)

    def loss():
        return _quadratic(steep, OUTER, adapt(_inner, p, steps=3, step_size=RATE)["w"])

    jacobian = steep @ torch.linalg.matrix_power(torch.eye(2).double() - RATE * A, 3)
    field = field_jacobian(loss, p)
    torch.testing.assert_close(field.jacobian, jacobian)
    assert not field.is_gradient_field
    p = _start()
    assert field_jacobian(lambda: _maml(p, 0), p).is_gradient_field  # nothing is adapted, nothing blocked


@pytest.mark.slow
@pytest.mark.keeps_its_sums
def test_adaptation_compiles():
    compiled = torch.compile(lambda w: _maml({"w": w}), backend="aot_eager", fullgraph=True)
    for opened in ((), (INNER_GRADIENT,), ()):
        p = _start()
        with unblock(*opened):
            (found,) = torch.autograd.grad(compiled(p["w"]), p["w"])
            (expected,) = torch.autograd.grad(_maml(p), p["w"])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: adapt(_inner, _start(), steps=-1, step_size=0.1), "`steps` should be an integer from 0"),
        (lambda: adapt(_inner, _start(), steps=1, step_size=0), "`step_size` should be positive"),
        (lambda: adapt(_inner, _start(), steps=1, step_size={}), r"`step_size` should .* Found none for \['w'\]"),
        (lambda: adapt(_inner, _start(), steps=1, step_size={"w": -1}), r"`step_size\['w'\]` should be positive"),
        (
            lambda: adapt(_inner, _start(), steps=1, step_size=torch.full((2, 1), 0.1)),
            r"^`step_size` should broadcast to the shape \(2,\) of its parameter. Found \(2, 1\)",
        ),
        (
            lambda: adapt(_inner, _start(), steps=1, step_size={"w": torch.ones(3)}),
            r"`step_size\['w'\]` should broadcast to the shape \(2,\) of its parameter. Found \(3,\)",
        ),
        (lambda: reptile_loss(_start(), {}, step_size=1), r"`adapted` should have the names and shapes .* Found {}"),
        (
            lambda: reptile_loss(_start(), {"w": torch.zeros(2, 1)}, step_size=1),
            r"`adapted` should have the names and shapes .* Found {'w': \(2, 1\)}",
        ),
        (lambda: adapt(lambda p: p["w"], _start(), steps=1, step_size=1), r"`loss` should return a scalar. .* \(2,\)"),
        (lambda: implicit_minimum(torch.sin, torch.ones(2)), r"`loss` should return a scalar. Found shape \(2,\)"),
        (lambda: newton_step(torch.sin, torch.zeros(2, 2)), r"`solution` should be a vector .* Found shape \(2, 2\)"),
        (
            lambda: implicit_adapt(_inner, _start(), strength=0, minimise=MINIMISE),
            "`strength` should be positive",
        ),
    ],
    ids=[
        *("steps", "step_size", "missing", "sign", "column", "length", "names", "shapes"),
        *("loss", "minimum", "vector", "strength"),
    ],
)
def test_wrong_arguments_are_refused(call, error):
    with pytest.raises(ValueError, match=error):
        call()


# --- implicit ----------------------------------------------------------------------------------------------------


def test_the_hypergradient_is_the_known_one():
    for loss in (_implicit, _newton):
        assert _gradient(loss, _penalty()).item() == pytest.approx(-0.0595941247, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [_implicit, _newton, _imaml], ids=["implicit", "newton", "implicit_maml"])
def test_the_solution_is_redundant(loss):
    p = _start() if loss is _imaml else _penalty()
    assert compare(lambda: loss(p), p)[SOLUTION.name].verdict.kind in ("redundant", "noise")


def test_an_implicit_gradient_does_not_depend_on_the_graph_of_the_solver():
    p = _penalty()
    with_graph = _gradient(_implicit, p)
    without = _gradient(
        lambda p: _validation(implicit_minimum(_ridge, _fitted(p["log_penalty"]).detach(), p["log_penalty"])), p
    )
    assert torch.equal(with_graph, without)


def _root_of(x):
    """Return the known solution of w^3 + w = x, and its first three derivatives by the theorem's own recursion."""
    w = torch.tensor(0.0, dtype=torch.float64)
    for _ in range(60):
        w = w - (w**3 + w - x) / (3 * w**2 + 1)
    slope = 3 * w**2 + 1
    first = 1 / slope
    second = -6 * w * first**3
    third = -6 * first**4 - 18 * w * first**2 * second
    return w, first, second, third


def test_derivatives_of_every_order_are_right():
    x = torch.tensor([2.3], dtype=torch.float64, requires_grad=True)
    w, *expected = _root_of(x.detach()[0])
    value = implicit_root(lambda w, x: w**3 + w - x, w[None], x, solver=conjugate_gradient)
    for order in expected:
        (value,) = torch.autograd.grad(value, x, create_graph=True)
        torch.testing.assert_close(value[0], order)


def test_the_second_derivative_of_a_hypergradient_is_that_of_the_closed_form():
    p = _penalty()["log_penalty"]

    def validation(log_penalty):
        hessian = X.T @ X + log_penalty.exp() * torch.eye(2).double()
        return _validation(torch.linalg.solve(hessian, X.T @ Y))

    found = torch.autograd.functional.hessian(lambda q: _implicit({"log_penalty": q}), p)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(validation, p))


def test_torch_func_differentiates_an_implicit_gradient():
    p = _penalty()
    found = torch.func.grad(lambda q: _implicit({"log_penalty": q}))(p["log_penalty"].detach())
    torch.testing.assert_close(found, _hypergradient(p)["log_penalty"])


def _cubic(a):
    """Return the root of ``w + w^3 = a`` by Newton's method, which may be differentiated."""
    w = torch.zeros_like(a)
    for _ in range(40):
        w = w - (w + w**3 - a) / (1 + 3 * w**2)
    return w


def _implicit_cubic(a):
    return implicit_minimum(lambda w, a: (w**2 / 2 + w**4 / 4 - a * w).sum(), _cubic(a.detach()), a)


def test_an_implicit_gradient_is_mapped():
    """Mapped cotangents, mapped arguments, and both under a second derivative, against the differentiated method."""
    a = torch.tensor([0.5, -2.0, 1.25], dtype=torch.float64)
    batch = torch.stack([a, 2 * a, a.flip(0)])
    for answer in (
        lambda f: torch.func.jacrev(f)(a),
        lambda f: torch.func.jacrev(torch.func.jacrev(lambda a: f(a).square().sum()))(a),
        lambda f: torch.func.vmap(torch.func.grad(lambda a, c: (f(a) * c).sum()), (None, 0))(a, batch),
        lambda f: torch.func.vmap(f)(batch),
        lambda f: torch.func.vmap(torch.func.jacrev(f))(batch),
    ):
        torch.testing.assert_close(answer(_implicit_cubic), answer(_cubic))


def test_a_mapped_tensor_that_would_be_lost_is_refused():
    a, scales = torch.tensor([0.5, -2.0]), torch.tensor([1.0, 2.0])

    def scaled(scale, a):
        return implicit_minimum(lambda w, a: (scale * w**2 / 2 - a * w).sum(), a.detach() / scale, a)

    with pytest.raises(ValueError, match=r"tensor of the function that `torch\.func\.vmap` maps over"):
        torch.func.vmap(scaled, (0, None))(scales, a)
    with pytest.raises(ValueError, match=r"tensor of the function that `torch\.func\.vmap` maps over"):
        torch.func.vmap(torch.func.jacrev(scaled, argnums=1), (0, None))(scales, a)


def test_modes_without_an_implicit_gradient_are_refused():
    a = torch.tensor([0.5, -2.0], requires_grad=True)
    with pytest.raises(NotImplementedError, match="no forward mode"):
        torch.func.jvp(_implicit_cubic, (a.detach(),), (torch.ones(2),))
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(_implicit_cubic(a), a, torch.eye(2), is_grads_batched=True)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_the_neumann_series_is_the_gradient_through_the_last_steps_at_a_minimum(steps):
    p = _penalty()
    w = _fitted(p["log_penalty"], 300).detach()
    solver = partial(neumann_series, steps=steps, step_size=RATE)
    found = _gradient(lambda p: _validation(implicit_minimum(_ridge, w, p["log_penalty"], solver=solver)), p)
    step = lambda w: w - RATE * torch.func.grad(_ridge)(w, p["log_penalty"])  # noqa: E731
    expected = _gradient(lambda p: _validation(unroll(step, w, steps=steps, attached=steps)), p)
    torch.testing.assert_close(found, expected)


def test_a_gradient_that_would_be_lost_is_refused():
    p = _penalty()
    with pytest.raises(ValueError, match="`args` should have every tensor with a gradient"):
        implicit_minimum(lambda w: _ridge(w, p["log_penalty"]), torch.zeros(2).double())
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="`args` should have every tensor with a gradient"):
        implicit_adapt(lambda q: scale * _inner(q), _start(), strength=1, minimise=MINIMISE)


def test_a_saddle_is_no_minimum_and_says_so():
    a = doubles(1.0, 2.0).requires_grad_()
    w = implicit_minimum(lambda w, a: ((w - a) ** 2 * doubles(-1, -3)).sum(), doubles(1, 2), a)
    with pytest.warns(ConvergenceWarning, match="The linear solver of an implicit gradient did not converge"):
        w.sum().backward()


def test_no_gradient_is_asked_for_and_none_is_prepared():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        w = implicit_minimum(_ridge, torch.zeros(2).double(), _penalty()["log_penalty"])
    assert not w.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_implicit_step_keeps_the_dtype(dtype):
    a = torch.tensor([3.0], dtype=dtype, requires_grad=True)
    w = implicit_minimum(lambda w, a: ((w - a) ** 2 + w**2).sum(), torch.tensor([1.5], dtype=dtype), a)
    (found,) = torch.autograd.grad(w, a)
    torch.testing.assert_close(found, torch.tensor([0.5], dtype=dtype))
