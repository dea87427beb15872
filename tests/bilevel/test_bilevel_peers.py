"""Adaptation beside higher and torchopt, with the options of theirs that lose a gradient in silence."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from toolkit import unblock
from toolkit.bilevel import INNER_GRADIENT, adapt, implicit_minimum

A = torch.tensor([[2.0, 0.5], [0.5, 0.7]], dtype=torch.float64)
B = torch.tensor([[1.0, -0.2], [-0.2, 1.5]], dtype=torch.float64)
INNER, OUTER = (torch.tensor(values, dtype=torch.float64) for values in ((1, -0.3), (-0.4, 0.8)))
STEPS, RATE = 3, 0.3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.6, 0.9], dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.w


def _loss(matrix: Tensor, centre: Tensor, w: Tensor) -> Tensor:
    return 0.5 * (w - centre) @ matrix @ (w - centre) + 0.1 * w.sin().sum()


_inner, _outer = partial(_loss, A, INNER), partial(_loss, B, OUTER)


def _ours(*opened: object) -> tuple[Tensor, Tensor]:
    w = Model().w
    with unblock(*opened):
        value = _outer(adapt(lambda p: _inner(p["w"]), {"w": w}, steps=STEPS, step_size=RATE)["w"])
        return value, torch.autograd.grad(value, w)[0]


def _higher(model: Model, *, copy_initial_weights: bool = False, track_higher_grads: bool = True, **options: object):
    higher = pytest.importorskip("higher")
    context = higher.innerloop_ctx(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        copy_initial_weights=copy_initial_weights,
        track_higher_grads=track_higher_grads,
    )
    with context as (copy, optimizer):
        for _ in range(STEPS):
            optimizer.step(_inner(copy()), **options)
        value = _outer(copy())
        value.backward()
    return value


def test_higher_finds_the_gradient_of_maml():
    model = Model()
    torch.testing.assert_close((_higher(model), model.w.grad), _ours(INNER_GRADIENT))


def test_higher_with_detached_gradients_is_first_order():
    model = Model()
    value = _higher(model, grad_callback=lambda slopes: [slope.detach() for slope in slopes])
    torch.testing.assert_close((value, model.w.grad), _ours())


@pytest.mark.parametrize("options", [{"track_higher_grads": False}, {"copy_initial_weights": True}], ids=str)
def test_two_options_of_higher_lose_the_gradient_in_silence(options):
    """The second one is the default; both are taken for first-order MAML."""
    model = Model()
    _higher(model, **options)
    assert model.w.grad is None


def _torchopt(*, create_graph: bool) -> tuple[Tensor, Tensor]:
    torchopt = pytest.importorskip("torchopt")
    w = Model().w
    optimizer, p = torchopt.sgd(RATE), (w,)
    state = optimizer.init(p)
    for _ in range(STEPS):
        slopes = torch.autograd.grad(_inner(p[0]), p, create_graph=create_graph)
        updates, state = optimizer.update(slopes, state, inplace=False)
        p = torchopt.apply_updates(p, updates, inplace=False)
    value = _outer(p[0])
    return value, torch.autograd.grad(value, w)[0]


@pytest.mark.parametrize(("create_graph", "opened"), [(True, (INNER_GRADIENT,)), (False, ())])
def test_torchopt_finds_the_gradients_of_maml_and_of_its_first_order_form(create_graph, opened):
    torch.testing.assert_close(_torchopt(create_graph=create_graph), _ours(*opened))


@pytest.mark.filterwarnings("ignore:We've integrated functorch:FutureWarning")
def test_torchopt_finds_the_implicit_gradient():
    torchopt = pytest.importorskip("torchopt")

    def proximal(w, theta):
        return _inner(w) + 0.75 * (w - theta).square().sum()

    def minimum(theta):
        w = theta.detach()
        for _ in range(200):
            w = w - 0.2 * torch.func.grad(proximal)(w, theta.detach())
        return w

    solve = torchopt.linear_solve.solve_normal_cg(maxiter=20, atol=0)
    root = torchopt.diff.implicit.custom_root(torch.func.grad(proximal), argnums=1, solve=solve)
    theta = Model().w
    theirs = torch.autograd.grad(_outer(root(lambda start, theta: minimum(theta))(minimum(theta), theta)), theta)
    found = torch.autograd.grad(_outer(implicit_minimum(proximal, minimum(theta), theta)), theta)
    torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-9)
