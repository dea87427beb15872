"""Each covariance structure beside its matrices: density, M-step, coordinates, and the features of the fast pass.

A new structure is asked all of this as soon as `COVARIANCE_TYPES` has its name.
"""

import pytest
import torch
from torch.distributions import MultivariateNormal
from values import seeded

from toolkit.em import COVARIANCE_TYPES, GaussianParameters
from toolkit.em.covariance import structure_of

F64 = torch.float64
K, D, N = 3, 4, 50

STRUCTURES = [structure_of(name) for name in COVARIANCE_TYPES]
pytestmark = pytest.mark.parametrize("structure", STRUCTURES, ids=COVARIANCE_TYPES)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=F64)


def factor_of(structure, seed=0):
    return structure.unpack(0.5 * draw(*packed_shape(structure), seed=seed), D)


def packed_shape(structure):
    one = (structure.n_parameters_of_one(D),) if structure.shape_of_one(D) else ()
    return one if structure.is_shared else (K, *one)


def matrices(structure, factor):
    """Return covariances as (K, D, D)."""
    wide = structure.to_matrices(factor, K, D)
    return torch.linalg.inv(wide @ wide.mT)


def test_shapes_and_free_coordinates(structure):
    factor = factor_of(structure)
    assert factor.shape == structure.shape(K, D)
    assert structure.pack(factor).numel() == structure.n_parameters(K, D)
    torch.testing.assert_close(structure.unpack(structure.pack(factor), D), factor)
    torch.testing.assert_close(structure.from_matrices(structure.to_matrices(factor, K, D)), factor)


def test_factor_is_that_of_the_inverse_covariances(structure):
    factor = factor_of(structure)
    covariances = structure.covariances(factor)
    torch.testing.assert_close(structure.factor(covariances), factor)
    torch.testing.assert_close(structure.factor_or_nan(covariances, torch.zeros(())), factor)
    found, sound = structure.factor_of_precisions(structure.precisions(factor))
    torch.testing.assert_close(found, factor)
    assert bool(sound.all())


def test_density_is_that_of_the_matrices(structure):
    factor, means, x = factor_of(structure), draw(K, D, seed=1), draw(N, D, seed=2)
    mixture = GaussianParameters(
        log_weights=torch.zeros(K, dtype=F64), means=means, precisions_cholesky=factor, covariance_type=structure.name
    )
    expected = MultivariateNormal(means, matrices(structure, factor)).log_prob(x[:, None])
    torch.testing.assert_close(mixture.log_joint(x), expected)


def test_quadratic_features_are_the_squared_distance(structure):
    """Up to a quadratic form that shared covariances leave out."""
    factor, means, x = factor_of(structure), draw(K, D, seed=1), draw(N, D, seed=2)
    groups = structure.quadratics(D, 320)
    features = x.new_empty(sum(group.size for group in groups), N)
    begin = 0
    for group in groups:
        group.write(x.mT, features[begin : begin + group.size])
        begin += group.size
    quadratic, linear = structure.coefficients(factor, means)
    found = quadratic @ features + linear @ x.mT - 0.5 * (linear * means).sum(-1, keepdim=True)
    if structure.is_shared:
        found = found - 0.5 * (factor.mT @ x.mT).square().sum(0)
    whitened = structure.whiten(factor, x.mT - means[..., None])
    torch.testing.assert_close(found, -0.5 * whitened.square().sum(1))
    if not structure.is_shared:
        sums = structure.second_moments(features.sum(1).expand(K, -1), D)
        torch.testing.assert_close(sums, structure.moments(x.mT.expand(K, -1, -1), x.mT.expand(K, -1, -1)))


def test_estimate_is_the_maximum_of_the_expected_log_density(structure):
    """No coordinate of the M-step's covariances has a slope."""
    x, shares = draw(N, D, seed=2), draw(N, K, seed=3).softmax(1).mT
    means = shares @ x / shares.sum(1, keepdim=True)
    differences = x.mT - means[..., None]
    scatter = structure.moments(shares[:, None] * differences, differences)
    wide = structure.wide.moments(shares[:, None] * differences, differences)
    torch.testing.assert_close(structure.pool(wide), scatter)
    products = structure.products(shares.mT[..., None] * differences.movedim(-1, 0), differences.movedim(-1, 0))
    torch.testing.assert_close(products.sum(0), scatter)
    covariances = structure.estimate(scatter, shares.sum(1, keepdim=True).expand(K, D))

    def expected(coordinates):
        factor = structure.unpack(coordinates, D)
        whitened = structure.whiten(factor, differences).square().sum(1)
        return (shares * (structure.log_determinants(factor, D).view(-1, 1) - 0.5 * whitened)).sum()

    at = structure.pack(structure.factor(covariances)).requires_grad_()
    (slope,) = torch.autograd.grad(expected(at), at)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-10)
    assert expected(at).item() > expected(at + 0.01).item()


def test_regularised_covariances_are_wider_by_that(structure):
    covariances = structure.covariances(factor_of(structure))
    wider = structure.factor(structure.regularise(covariances, 0.5))
    expected = matrices(structure, structure.factor(covariances)) + 0.5 * torch.eye(D, dtype=F64)
    torch.testing.assert_close(matrices(structure, wider), expected)


def test_coloured_noise_has_the_covariances(structure):
    factor, labels = factor_of(structure), torch.arange(K).repeat_interleave(D)
    roots = structure.colour(factor, torch.eye(D, dtype=F64).repeat(K, 1), labels).view(K, D, D)
    torch.testing.assert_close(roots.mT @ roots, matrices(structure, factor))


def test_narrowest_and_largest_are_those_of_the_matrices(structure):
    factor, weights = factor_of(structure), draw(K, seed=4).softmax(0)
    covariances = matrices(structure, factor)
    average = torch.linalg.cholesky((weights[:, None, None] * covariances).sum(0))
    relative = torch.linalg.solve(average, torch.linalg.solve(average, covariances).mT)
    torch.testing.assert_close(structure.narrowest(weights, factor), torch.linalg.eigvalsh(relative)[:, 0])
    largest = float(1 / torch.linalg.eigvalsh(covariances).min())
    assert structure.exceeds(factor, 0.999 * largest)
    assert not structure.exceeds(factor, 1.001 * largest)


def test_mean_squared_distances_are_traces(structure):
    factor, x = factor_of(structure), draw(N, D, seed=2)
    second = x.mT @ x / N if structure.is_matrix else x.square().mean(0)
    distances = structure.whiten(factor, x.mT.expand(K, -1, -1)).square().sum(1).mean(1)
    found = structure.squared_distances(factor, second).expand(K)
    torch.testing.assert_close(found, distances)


def test_one_covariance_for_all_components(structure):
    matrix = torch.cov(draw(D, N))
    one = structure.restrict(matrix)
    assert one.shape == structure.shape_of_one(D)
    assert structure.repeat(one, K).shape == structure.shape(K, D)
    traces = matrices(structure, structure.factor(structure.repeat(one, K))).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(traces, matrix.trace().expand(K))


def test_singular_covariances_are_named_or_nan(structure):
    covariances = structure.covariances(factor_of(structure))
    broken = torch.zeros_like(covariances) if structure.is_shared else covariances.index_fill(0, torch.tensor(1), 0.0)
    with pytest.raises(ValueError, match="singular one:" if structure.is_shared else "singular one of component 1:"):
        structure.factor(broken)
    assert bool(structure.factor_or_nan(broken, torch.zeros(())).isnan().any())
