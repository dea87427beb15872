"""Solvers: dense solves, scipy, and honesty about convergence."""

import math
import re

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse.linalg
import torch

from toolkit.bilevel import conjugate_gradient, fixed_point, neumann_series


def _affine(n_samples=3, n_features=6, radius=0.9, seed=0):
    """Return an affine contraction for each sample, and its fixed points."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n_samples, n_features, n_features, generator=generator, dtype=torch.float64)
    matrix = radius * matrix / torch.linalg.matrix_norm(matrix, 2)[:, None, None]
    b = torch.randn(n_samples, n_features, generator=generator, dtype=torch.float64)
    eye = torch.eye(n_features, dtype=torch.float64)
    return lambda z: (matrix @ z[..., None]).squeeze(-1) + b, torch.linalg.solve(eye - matrix, b)


@pytest.mark.parametrize("memory", [0, 1, 5])
def test_fixed_points_are_found(memory):
    function, expected = _affine()
    found = fixed_point(function, torch.zeros(3, 6).double(), memory=memory, max_steps=400)
    assert found.converged.all()
    torch.testing.assert_close(found.value, expected, rtol=1e-9, atol=1e-9)
    assert (found.residual <= 3.7e-11 * (1 + expected.norm(dim=1))).all()


def test_enough_memory_solves_an_affine_map_in_as_many_steps_as_it_has_dimensions():
    """As GMRES does, which Anderson's acceleration is equivalent to; rounding costs a few steps more."""
    function, _ = _affine()
    found = fixed_point(function, torch.zeros(3, 6).double(), memory=6)
    assert found.converged.all()
    assert found.steps.max() <= 6 + 4


def test_acceleration_takes_fewer_steps_than_plain_iteration():
    rates, start = torch.linspace(0, 0.99, 20).double(), torch.zeros(1, 20).double()
    fast, slow = (fixed_point(lambda z: rates * z + 1, start, memory=memory, max_steps=4000) for memory in (5, 0))
    assert fast.converged.all()
    assert slow.converged.all()
    assert 5 * fast.steps < slow.steps


def test_a_fixed_point_that_repels_plain_iteration_is_found():
    function = lambda z: -1.5 * z + 1  # noqa: E731
    assert not fixed_point(function, torch.zeros(1, 3).double(), memory=0).converged
    found = fixed_point(function, torch.zeros(1, 3).double())
    torch.testing.assert_close(found.value, torch.full((1, 3), 0.4).double())


def test_a_nonlinear_fixed_point_is_that_of_scipy():
    function = lambda z: np.cos(z) + 0.1 * z[::-1]  # noqa: E731
    expected = scipy.optimize.fixed_point(function, np.array([0.2, 0.9]), xtol=1e-13)
    found = fixed_point(lambda z: z.cos() + 0.1 * z.flip(-1), torch.tensor([[0.2, 0.9]]).double())
    torch.testing.assert_close(found.value[0], torch.from_numpy(expected))


def test_samples_do_not_depend_on_each_other():
    function, _ = _affine()
    start = torch.zeros(3, 6).double()
    alone = [
        fixed_point(lambda z, n=n: function(z.expand(3, 6))[n : n + 1], start[n : n + 1]).value[0] for n in range(3)
    ]
    torch.testing.assert_close(fixed_point(function, start).value, torch.stack(alone))


def test_one_sample_diverges_and_the_others_converge():
    rate = torch.tensor([[0.5], [math.nan], [0.3]])
    found = fixed_point(lambda z: rate * z + 1, torch.zeros(3, 2))
    assert found.converged.tolist() == [True, False, True]
    assert found.value[[0, 2], 0].tolist() == pytest.approx([2, 1 / 0.7], rel=1e-4)


def test_a_sample_that_converged_is_not_changed_any_more():
    rates, seen = torch.tensor([[0.0], [0.9]]).double(), []

    def function(z):
        seen.append(z.clone())
        return rates * z + torch.ones_like(z)

    start = torch.tensor([[1.0 + 1e-12], [0.0]], dtype=torch.float64)
    fixed_point(function, start, memory=0, max_steps=20)
    assert {z[0].item() for z in seen} == {1.0 + 1e-12}
    assert len({z[1].item() for z in seen}) == 20


def test_the_best_iterate_is_returned():
    """From here on plain iteration only gets worse."""
    found = fixed_point(lambda z: 2 * z, torch.full((1, 1), 0.5), memory=0, max_steps=10)
    assert (found.value.item(), found.residual.item(), found.steps.item()) == (0.5, 0.5, 1)


def test_a_start_that_is_a_fixed_point_stays():
    found = fixed_point(lambda z: z, torch.full((2, 3), 0.5))
    assert found.converged.all()
    assert found.steps.tolist() == [1, 1]
    assert torch.equal(found.value, torch.full((2, 3), 0.5))


def test_samples_keep_their_shape():
    found = fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 3, 4))
    torch.testing.assert_close(found.value, torch.full((2, 3, 4), 2.0), rtol=1e-4, atol=0)


def test_no_samples_need_no_steps():
    found = fixed_point(torch.cos, torch.zeros(0, 2))
    assert found.value.shape == (0, 2)
    assert found.converged.all()


@pytest.mark.parametrize("start", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), [[0.0]]])
def test_a_start_that_is_no_batch_is_refused(start):
    with pytest.raises(ValueError, match="`start` should be a floating-point tensor"):
        fixed_point(lambda z: z, start)


@pytest.mark.parametrize(
    ("name", "solve"),
    {
        "function": lambda change: fixed_point(change, torch.ones(3, 2)),
        "operator": lambda change: conjugate_gradient(change, torch.ones(3, 2)),
        "operator of a series": lambda change: neumann_series(change, torch.ones(3, 2), steps=2, step_size=0.1),
    }.items(),
)
@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda z: z.sum(1, keepdim=True), "(3, 1) and torch.float32"), (torch.Tensor.half, "(3, 2) and torch.float16")],
)
def test_a_function_that_changes_shape_or_dtype_is_refused(name, solve, change, found):
    error = (
        f"`{name.split()[0]}` should return the shape and dtype of its input, (3, 2) and torch.float32. Found {found}."
    )
    with pytest.raises(ValueError, match=re.escape(error)):
        solve(change)


def _positive(n=8, seed=1):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T + 0.1 * torch.eye(n).double(), torch.arange(1.0, n + 1, dtype=torch.float64)


def test_conjugate_gradients_solve_a_positive_definite_equation():
    matrix, b = _positive()
    found = conjugate_gradient(lambda x: (matrix @ x.flatten()).view(2, 4), b.view(2, 4))
    assert found.converged
    torch.testing.assert_close(found.value.flatten(), torch.linalg.solve(matrix, b))


def test_iterates_of_conjugate_gradients_are_those_of_scipy():
    matrix, b = _positive()
    expected, _ = scipy.sparse.linalg.cg(matrix.numpy(), b.numpy(), maxiter=3, rtol=0)
    found = conjugate_gradient(lambda x: matrix @ x, b, max_steps=3)
    assert not found.converged
    assert found.steps == 3
    torch.testing.assert_close(found.value, torch.from_numpy(expected))


FAR_FROM_ONE = [(torch.float16, 1e-4), (torch.float32, 1e-25), (torch.float32, 1e25), (torch.float64, 1e-200)]


@pytest.mark.parametrize(("dtype", "size"), FAR_FROM_ONE)
def test_the_size_of_a_right_side_does_not_matter(dtype, size):
    """Squares of the entries are 0 or infinite in their type."""
    diagonal, b = torch.tensor([1.0, 2.0, 4.0], dtype=dtype), torch.tensor([1.0, 2.0, 3.0], dtype=dtype) * size
    found = conjugate_gradient(lambda x: diagonal * x, b)
    assert found.converged
    torch.testing.assert_close(found.value / b, 1 / diagonal, rtol=2 * torch.finfo(dtype).eps ** (2 / 3), atol=0)


def test_conjugate_gradients_of_zero_are_zero():
    found = conjugate_gradient(lambda x: 2 * x, torch.zeros(3))
    assert found.converged
    assert found.value.tolist() == [0, 0, 0]


def test_a_matrix_that_is_not_positive_definite_is_noticed():
    assert not conjugate_gradient(lambda x: x * torch.tensor([1.0, -2.0]), torch.ones(2)).converged


@pytest.mark.parametrize("steps", [1, 4])
def test_the_neumann_series_is_its_sum(steps):
    matrix, b = _positive()
    eye = torch.eye(8).double()
    expected = 0.02 * sum(torch.linalg.matrix_power(eye - 0.02 * matrix, j) @ b for j in range(steps))
    found = neumann_series(lambda x: matrix @ x, b, steps=steps, step_size=0.02)
    torch.testing.assert_close(found.value, expected)
    torch.testing.assert_close(found.residual, (matrix @ expected - b).norm())


def test_a_series_that_diverges_is_warned_of():
    """The eigenvalue of I - A is -2."""
    series = neumann_series(lambda x: 3 * x, torch.ones(1), steps=20, step_size=1.0)
    assert not series.converged
    assert neumann_series(lambda x: 0.5 * x, torch.ones(1), steps=2, step_size=1.0).converged
