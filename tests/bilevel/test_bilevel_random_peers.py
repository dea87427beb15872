"""Equilibria, adaptation and implicit minima of random problems beside torchdeq, higher and torchopt."""

import math

import pytest
import torch
from values import seeded

from toolkit import unblock
from toolkit.bilevel import INNER_GRADIENT, adapt, equilibrium, implicit_minimum, phantom

SEEDS = pytest.mark.parametrize("seed", range(8))


class Draws:
    """Random settings and float64 leaves from one seed."""

    def __init__(self, seed):
        self.generator = seeded(seed)

    def real(self, least, most):
        return least + (most - least) * torch.rand((), generator=self.generator).item()

    def choice(self, *options):
        return options[torch.randint(len(options), (), generator=self.generator)]

    def leaf(self, *shape, size=1.0):
        return (size * torch.randn(shape, generator=self.generator, dtype=torch.float64)).requires_grad_()


def assert_same(ours, theirs, leaves):
    """Compare two values, and the gradients of a weighted sum of them."""
    weights = torch.linspace(-1, 1.5, ours.numel(), dtype=torch.float64).view(ours.shape)
    found = [
        (value, *torch.autograd.grad(value, leaves, weights, allow_unused=True, materialize_grads=True))
        for value in (ours, theirs)
    ]
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8 * (1 + other.abs().max().item()), msg=f"{index}")


# --- torchdeq --------------------------------------------------------------------------------------------------------


@SEEDS
@pytest.mark.parametrize("gradient", ["phantom", "implicit"])
def test_torchdeq_finds_the_same_equilibria_and_gradients(seed, gradient):
    torchdeq = pytest.importorskip("torchdeq")
    draws = Draws(seed)
    n, d = draws.choice(1, 2, 5), draws.choice(1, 3, 6)
    slope = draws.choice(torch.tanh, torch.sin, torch.nn.functional.softplus, lambda x: x)  # none is above 1
    w, b, x = draws.leaf(d, d), draws.leaf(d, size=10 ** draws.real(-3, 2)), draws.leaf(n, d)
    w = (draws.real(0.0, 0.8) * w / torch.linalg.matrix_norm(w, 2)).detach().requires_grad_()
    leaves = (w, b, x)
    start = draws.leaf(n, d, size=10 ** draws.real(-1, 2)).detach()

    def layer(z, w, b, x):
        return slope(z @ w.T + b + x)

    solver = {"f_solver": "fixed_point_iter", "f_max_iter": 300, "f_tol": 1e-15, "b_max_iter": 300, "b_tol": 1e-15}
    if gradient == "implicit":
        ours = equilibrium(layer, start, *leaves).value
        options = {"ift": True}
    else:
        steps, damping = draws.choice(1, 2, 7), draws.choice(1.0, 0.5, draws.real(0.05, 1))
        ours = phantom(lambda z: layer(z, *leaves), start, steps=steps, damping=damping).value
        options = {"grad": steps, "tau": damping}
    deq = torchdeq.get_deq(**solver, **options)
    deq.train()
    theirs = deq(lambda z: layer(z, *leaves), start.clone())[0][-1]
    assert_same(ours, theirs, leaves)


# --- higher and torchopt ---------------------------------------------------------------------------------------------


class Problem:
    """A network with an inner and an outer task, a number of steps, and a step size for each parameter."""

    def __init__(self, seed):
        draws = Draws(seed)
        inputs, width, n = draws.choice(1, 3), draws.choice(1, 4), draws.choice(1, 5)
        self.steps, self.first_order = draws.choice(0, 1, 2, 4), draws.choice(False, True)
        shapes = {"in": (width, inputs), "bias": (width,), "out": (1, width), "unused": (2,)}
        self.start = {name: draws.leaf(*shape) for name, shape in shapes.items()}
        self.rates = {
            name: torch.tensor(10 ** draws.real(-4, -0.5), dtype=torch.float64, requires_grad=True) for name in shapes
        }
        self.tasks = [(draws.leaf(n, inputs).detach(), draws.leaf(n, 1).detach()) for _ in range(2)]
        self.leaves = [*self.start.values(), *self.rates.values()]

    def loss(self, p, task):
        x, y = self.tasks[task]
        return ((x @ p["in"].T + p["bias"]).tanh() @ p["out"].T - y).square().mean() + 0 * p["unused"].sum()

    def ours(self):
        with unblock(*[] if self.first_order or not self.steps else [INNER_GRADIENT]):
            p = adapt(lambda p: self.loss(p, 0), self.start, steps=self.steps, step_size=self.rates)
            return self.loss(p, 1)


class Network(torch.nn.Module):
    """Parameters by name. `higher` differentiates by the module that it copies."""

    def __init__(self, start):
        super().__init__()
        self.p = torch.nn.ParameterDict({name: value.detach().clone() for name, value in start.items()})

    def forward(self):
        return dict(self.p.items())


@SEEDS
def test_higher_adapts_random_networks_in_the_same_way(seed):
    higher, problem = pytest.importorskip("higher"), Problem(seed)
    model = Network(problem.start)
    groups = [{"params": [model.p[name]], "lr": 1.0} for name in problem.start]
    with higher.innerloop_ctx(
        model,
        torch.optim.SGD(groups),
        copy_initial_weights=False,
        override={"lr": list(problem.rates.values())},
    ) as (copy, optimizer):
        first_order = {"grad_callback": lambda slopes: [slope.detach() for slope in slopes]}
        for _ in range(problem.steps):
            optimizer.step(problem.loss(copy(), 0), **first_order if problem.first_order else {})
        theirs = problem.loss(copy(), 1)
    of_theirs = [model.p[name] for name in problem.start] + list(problem.rates.values())
    slopes = [
        torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        for value, leaves in ((problem.ours(), problem.leaves), (theirs, of_theirs))
    ]
    torch.testing.assert_close(problem.ours(), theirs, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-10)


@SEEDS
def test_torchopt_adapts_random_networks_in_the_same_way(seed):
    torchopt, problem = pytest.importorskip("torchopt"), Problem(seed)
    rate = math.exp(Draws(seed + 100).real(-6, -1))
    problem.rates = dict.fromkeys(problem.start, rate)
    optimizer, p = torchopt.sgd(rate), dict(problem.start)
    state = optimizer.init(p)
    for _ in range(problem.steps):
        loss = problem.loss(p, 0)
        slopes = torch.autograd.grad(loss, list(p.values()), create_graph=not problem.first_order)
        updates, state = optimizer.update(dict(zip(p, slopes, strict=True)), state, inplace=False)
        p = torchopt.apply_updates(p, updates, inplace=False)
    assert_same(problem.ours(), problem.loss(p, 1), list(problem.start.values()))


@SEEDS
@pytest.mark.filterwarnings("ignore:We've integrated functorch:FutureWarning")
def test_torchopt_finds_the_same_implicit_gradients(seed):
    torchopt, draws = pytest.importorskip("torchopt"), Draws(seed)
    d = draws.choice(1, 3, 6)
    factor, size = draws.leaf(d, d).detach(), 10 ** draws.real(-2, 2)
    theta, centre = draws.leaf(d, size=size), draws.leaf(d, size=size)

    def loss(w, theta, centre):
        spread = factor.T @ (w - centre)
        return 0.5 * spread @ spread + (size * (w / size).cosh()).sum() + (w - theta).square().sum()

    w, slope, curvature = theta.detach(), torch.func.grad(loss), torch.func.hessian(loss)
    with torch.no_grad():
        for _ in range(60):  # Newton's method
            w = w - torch.linalg.solve(curvature(w, theta, centre), slope(w, theta, centre))
    solve = torchopt.linear_solve.solve_normal_cg(maxiter=100, rtol=1e-12, atol=0)
    root = torchopt.diff.implicit.custom_root(slope, argnums=(1, 2), solve=solve)
    theirs = root(lambda start, theta, centre: start)(w, theta, centre)
    assert_same(implicit_minimum(loss, w, theta, centre), theirs, (theta, centre))
