"""Sinkhorn's held potentials: right first derivatives at convergence, wrong second ones."""

import pytest
import torch
from contract import BlockCase
from values import doubles, gradients, leaves, values_of, witness

from toolkit import unblock
from toolkit.gradients import compare, field_jacobian
from toolkit.weighting import POTENTIALS, sinkhorn_loss, sinkhorn_potentials

POINTS = leaves(x=((0.1, 0.2), (0.9, -0.3), (0.4, 1.1)))
Y = doubles((0, 0.5), (1.2, 0.3))
A, B, EPSILON = doubles(0.5, 0.2, 0.3), doubles(0.35, 0.65), 0.3
MEASURES = leaves(cost=((0.1, 0.7), (0.9, 0.2), (0.4, 1.3)), a=(0.5, 0.2, 0.3), b=(0.35, 0.65))


def cost_of(x):
    return 0.5 * (x[:, None] - Y).square().sum(-1)


def _loss(iterations):
    return lambda p: sinkhorn_loss(cost_of(p["x"]), A, B, epsilon=EPSILON, iterations=iterations)


def _plan(cost, a, b, iterations):
    """Return the plan and the scalings by updates of the kernel, without logarithms."""
    kernel, v = (-cost / EPSILON).exp(), torch.ones_like(b)
    for _ in range(iterations):
        u = 1 / (kernel @ (b * v))
        v = 1 / (kernel.T @ (a * u))
    return (a * u)[:, None] * kernel * (b * v), u, v


def _by_points(iterations):
    def formula(x):
        plan, _, _ = _plan(cost_of(x), A, B, iterations)
        return {"x": (plan[..., None] * (x[:, None] - Y)).sum(1)}

    return witness(formula)


def _by_measures(cost, a, b):
    plan, u, v = _plan(cost, a, b, 3)
    return {
        "cost": plan,
        "a": EPSILON * (u.log() - plan.sum(1) / a),
        "b": EPSILON * (v.log() - plan.sum(0) / b),
    }


BLOCK_CASES = [
    BlockCase(
        id="weighting potentials of points",
        block=POTENTIALS,
        parameters=POINTS,
        loss=_loss(3),
        blocked=_by_points(3),
    ),
    BlockCase(
        id="weighting potentials at convergence",
        block=POTENTIALS,
        parameters=POINTS,
        loss=_loss(200),
        blocked=_by_points(200),
        opened=_by_points(200),
    ),
    BlockCase(
        id="weighting potentials of measures",
        block=POTENTIALS,
        parameters=MEASURES,
        loss=lambda p: sinkhorn_loss(p["cost"], p["a"], p["b"], epsilon=EPSILON, iterations=3),
        blocked=witness(_by_measures),
    ),
]

PEER_CASES = {"sinkhorn": (values_of(POINTS()), {"y": Y, "a": A, "b": B}, lambda p, c: _loss(3)(p))}


def test_numbers():
    p = POINTS()
    loss = _loss(500)(p)
    assert loss.item() == pytest.approx(0.3952690278, abs=1e-10)
    expected = doubles((-0.2590566143, -0.0984905643), (-0.0535776415, -0.1210703931), (-0.1173657442, 0.2195609574))
    torch.testing.assert_close(gradients(loss, p)["x"], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("iterations", "blocked", "opened"),
    [
        (1, -0.1788286272, -0.1942286579),
        (3, -0.2570968464, -0.2589699249),
        (10, -0.2590566129, -0.2590566143),
    ],
)
def test_numbers_of_few_iterations(iterations, blocked, opened):
    p = POINTS()
    assert gradients(_loss(iterations)(p), p)["x"][0, 0].item() == pytest.approx(blocked, abs=1e-9)
    with unblock(POTENTIALS):
        assert gradients(_loss(iterations)(p), p)["x"][0, 0].item() == pytest.approx(opened, abs=1e-9)


def test_open_error_is_the_square_of_the_blocked_one():
    """The value is stationary in the potentials: after k updates their error r^k counts as r^k, and open as k r^2k."""
    p = POINTS()
    exact = gradients(_loss(500)(p), p)["x"]
    rates = {}
    for name, opened in (("blocked", []), ("open", [POTENTIALS])):
        with unblock(*opened):
            errors = [(gradients(_loss(k)(p), p)["x"] - exact).norm().item() for k in (4, 6)]
        rates[name] = errors[1] / errors[0]
    assert rates["open"] == pytest.approx(6 / 4 * rates["blocked"] ** 2, rel=0.05)


def test_the_block_is_redundant_at_convergence():
    p = POINTS()
    (effect,) = compare(lambda: _loss(200)(p), p).effects
    assert effect.verdict.kind == "redundant"


@pytest.mark.slow
def test_second_derivatives_are_wrong_with_the_block():
    def hessian():
        return torch.autograd.functional.hessian(lambda x: _loss(200)({"x": x}), POINTS()["x"]).reshape(6, 6)

    blocked = hessian()
    with unblock(POTENTIALS):
        opened = hessian()
    assert blocked[0, 0].item() == pytest.approx(-0.5468553810, abs=1e-8)
    assert opened[0, 0].item() == pytest.approx(0.2796456185, abs=1e-8)
    p = POINTS()
    field = field_jacobian(lambda: _loss(200)(p), p)
    torch.testing.assert_close(field.jacobian, opened)
    assert field.is_gradient_field


def test_plan_has_the_weights_as_margins():
    m = MEASURES()
    f, g = sinkhorn_potentials(m["cost"], m["a"], m["b"], epsilon=EPSILON, iterations=300)
    plan = m["a"][:, None] * m["b"] * ((f[:, None] + g - m["cost"]) / EPSILON).exp()
    torch.testing.assert_close(plan.sum(1), m["a"])
    torch.testing.assert_close(plan.sum(0), m["b"])
    value = (plan * m["cost"]).sum() + EPSILON * (plan * (plan / (m["a"][:, None] * m["b"])).log()).sum()
    found = sinkhorn_loss(m["cost"], m["a"], m["b"], epsilon=EPSILON, iterations=300)
    torch.testing.assert_close(found, value)


def test_no_weights_are_uniform_and_batches_are_problems():
    cost = torch.rand(4, 2, 3, 5, dtype=torch.float64)
    found = sinkhorn_loss(cost, epsilon=0.1)
    assert found.shape == (4, 2)
    one = sinkhorn_loss(cost[1, 1], torch.full((3,), 1 / 3).double(), torch.full((5,), 0.2).double(), epsilon=0.1)
    torch.testing.assert_close(found[1, 1], one, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.func.vmap(lambda m: sinkhorn_loss(m, epsilon=0.1))(cost[0]), found[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    cost = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    a = torch.full((6,), 1 / 6).to(dtype)
    torch.testing.assert_close(
        sinkhorn_loss(cost, a, epsilon=0.05), sinkhorn_loss(cost.float(), a.float(), epsilon=0.05)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_of_no_weight_and_small_epsilon(dtype):
    a = torch.tensor([0.0, 0.5, 0.5], dtype=dtype, requires_grad=True)
    cost = torch.rand(3, 4, dtype=dtype, requires_grad=True)
    loss = sinkhorn_loss(cost, a, epsilon=1e-3)
    by_cost, by_a = torch.autograd.grad(loss, (cost, a))
    assert loss.isfinite()
    assert by_cost[0].eq(0).all()
    assert by_cost.isfinite().all()
    f, _ = sinkhorn_potentials(cost, a, epsilon=1e-3)
    torch.testing.assert_close(by_a, f - 1e-3, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(loss, sinkhorn_loss(cost[1:], a[1:], epsilon=1e-3))


def test_two_distant_points_of_no_weight():
    """Their density is beyond all numbers, and their plan 0."""
    x = doubles(0, 1, 9).requires_grad_()
    a, y, b = doubles(0.5, 0.5, 0).requires_grad_(), doubles(0, 1, 9), doubles(0.4, 0.6, 0).requires_grad_()
    loss = sinkhorn_loss((x[:, None] - y).square(), a, b, epsilon=1e-2, iterations=50)
    found = torch.autograd.grad(loss, (x, a, b))
    assert loss.isfinite()
    assert all(slope.isfinite().all() for slope in found)
    assert found[0][2] == 0


@pytest.mark.keeps_its_sums
def test_compiled_is_eager():
    p = POINTS()
    compiled = torch.compile(lambda x: sinkhorn_loss(cost_of(x), epsilon=0.3, iterations=3), backend="eager")
    torch.testing.assert_close(compiled(p["x"]), sinkhorn_loss(cost_of(p["x"]), epsilon=0.3, iterations=3))


def test_errors_name_the_argument():
    cost = torch.zeros(2, 3)
    for function in (sinkhorn_loss, sinkhorn_potentials):
        with pytest.raises(ValueError, match=r"`a` should have 2 entries, as `cost` has. Found \(3,\)"):
            function(cost, torch.ones(3), epsilon=1)
        with pytest.raises(ValueError, match=r"`b` should sum to 1. Found \[3.0\]"):
            function(cost, torch.tensor([0.5, 0.5]), torch.ones(1, 3), epsilon=1)
        with pytest.raises(ValueError, match="`epsilon` should be positive and finite"):
            function(cost, epsilon=0)
        with pytest.raises(ValueError, match="`iterations` should be a positive integer"):
            function(cost, epsilon=1, iterations=0)
        with pytest.raises(ValueError, match=r"`cost` should have shape \(..., N, M\)"):
            function(torch.zeros(3), epsilon=1)


# --- POT and geomloss ------------------------------------------------------------------------------------------------


@pytest.fixture
def pot():
    return pytest.importorskip("ot")


def _theirs(pot, x, grad):
    return pot.solve(cost_of(x), A, B, reg=EPSILON, grad=grad, tol=1e-14, max_iter=1000).value


@pytest.mark.parametrize("grad", ["envelope", "autodiff"])
def test_pot_has_the_same_value_and_gradient(pot, grad):
    p = POINTS()
    theirs, ours = _theirs(pot, p["x"], grad), _loss(500)(p)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(ours, p)["x"], gradients(theirs, p)["x"], rtol=1e-6, atol=1e-9)


def test_pots_last_step_is_another_gradient(pot):
    p = POINTS()
    found = gradients(_theirs(pot, p["x"], "last_step"), p)["x"]
    assert found[0, 0].item() == pytest.approx(-0.5340289906, abs=1e-8)


def test_pots_envelope_is_wrong_by_the_weights(pot):
    """For its own value, along a direction that keeps the sum of the weights."""
    along, cost = doubles(1, -1, 0), cost_of(POINTS()["x"].detach())

    def slope(value):
        a = A.clone().requires_grad_()
        return (gradients(value(a), {"a": a})["a"] @ along).item()

    def theirs(grad):
        return lambda a: pot.solve(cost, a, B, reg=EPSILON, grad=grad, tol=1e-14, max_iter=2000).value

    def ours(a):
        return sinkhorn_loss(cost, a, B, epsilon=EPSILON, iterations=500)

    ends = [ours(A + step * along).item() for step in (-1e-5, 1e-5)]
    assert slope(ours) == pytest.approx((ends[1] - ends[0]) / 2e-5, abs=1e-7)
    assert slope(theirs("autodiff")) == pytest.approx(slope(ours), abs=1e-7)
    assert slope(theirs("envelope")) == pytest.approx(0.4690, abs=1e-4)
    assert slope(ours) == pytest.approx(0.1941, abs=1e-4)


def test_geomlosss_gradient_is_not_that_of_its_value():
    loss = pytest.importorskip("geomloss").SamplesLoss(
        "sinkhorn", p=2, blur=EPSILON**0.5, debias=False, backend="tensorized"
    )
    p = POINTS()
    found = gradients(loss(A, p["x"], B, Y), p)["x"][0, 0].item()
    step = torch.zeros(3, 2, dtype=torch.float64)
    step[0, 0] = 1e-4
    ends = [loss(A, p["x"].detach() + move, B, Y).item() for move in (-step, step)]
    numerical = (ends[1] - ends[0]) / 2e-4
    assert found == pytest.approx(-0.2267685393, abs=1e-8)
    assert numerical == pytest.approx(-0.2594358099, abs=1e-7)


def test_geomloss_nears_the_same_value_as_its_schedule_gets_slower():
    geomloss, p = pytest.importorskip("geomloss"), POINTS()
    ours = _loss(500)(p)
    errors = []
    for scaling in (0.5, 0.9, 0.99):
        loss = geomloss.SamplesLoss(
            "sinkhorn", p=2, blur=EPSILON**0.5, scaling=scaling, debias=False, backend="tensorized"
        )
        errors.append(abs(loss(A, p["x"], B, Y) - ours).item() / ours.item())
    torch.testing.assert_close(ours, _loss(1000)(p), rtol=1e-12, atol=0)  # converged
    assert errors[0] > errors[1] > errors[2] > 0
