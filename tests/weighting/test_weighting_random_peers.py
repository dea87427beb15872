"""Random transport problems beside POT and a schedule of geomloss that converges."""

import pytest
import torch
from values import seeded

from toolkit.weighting import sinkhorn_loss

SEEDS = pytest.mark.parametrize("seed", range(10))


class Problem:
    """Weighted points x and y in D dimensions; the strength of the entropy is a share of the largest cost."""

    def __init__(self, seed):
        generator = seeded(seed)

        def integer(most):
            return int(torch.randint(1, most, (), generator=generator))

        n, m, d = integer(6), integer(6), integer(4)
        size = 10 ** (4 * torch.rand((), generator=generator).item() - 2)

        def points(count):
            return (size * torch.randn(count, d, generator=generator, dtype=torch.float64)).requires_grad_()

        def weights(count):
            return torch.randn(count, generator=generator, dtype=torch.float64).softmax(0).requires_grad_()

        self.x, self.y, self.a, self.b = points(n), points(m), weights(n), weights(m)
        largest = self.cost().max().item()
        self.epsilon = largest * (0.1 + torch.rand((), generator=generator).item())

    def cost(self):
        return 0.5 * (self.x[:, None] - self.y).square().sum(-1)

    def ours(self):
        return sinkhorn_loss(self.cost(), self.a, self.b, epsilon=self.epsilon, iterations=1000)

    def slopes(self, loss):
        """Return gradients, those by weights less their mean: the sum of the weights is not free."""
        of_points = torch.autograd.grad(loss, (self.x, self.y), retain_graph=True)
        of_weights = torch.autograd.grad(loss, (self.a, self.b))
        return [*of_points, *(slope - slope.mean() for slope in of_weights)]


def assert_same(problem, theirs):
    ours = problem.ours()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    largest = problem.x.abs().max().item()
    for found, expected in zip(problem.slopes(ours), problem.slopes(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * largest)


@SEEDS
def test_geomloss_that_stays_at_the_last_strength_agrees(seed):
    """A hundred updates at strengths that differ by less than a part in a million, in place of a few shrinking ones."""
    geomloss, problem = pytest.importorskip("geomloss"), Problem(seed)
    blur = problem.epsilon**0.5
    loss = geomloss.SamplesLoss(
        "sinkhorn",
        p=2,
        blur=blur,
        diameter=blur * (1 + 2e-7),
        scaling=1 - 1e-9,
        debias=False,
        backend="tensorized",
    )
    assert_same(problem, loss(problem.a, problem.x, problem.b, problem.y))


@SEEDS
def test_pot_agrees(seed):
    pot, problem = pytest.importorskip("ot"), Problem(seed)
    theirs = pot.solve(
        problem.cost(), problem.a, problem.b, reg=problem.epsilon, grad="autodiff", tol=1e-15, max_iter=1000
    ).value
    assert_same(problem, theirs)
