"""The conjugate prior of Gaussian mixtures: scipy's densities, closed forms, and MAP EM that never falls."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from contract import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from test_em import (
    COVARIANCE_TYPES,
    F64,
    every_type,
    gradient_of,
    mixture,
    samples,
)
from torch import Tensor
from torch.func import grad
from values import seeded

from toolkit import datasets
from toolkit.em import (
    CovarianceType,
    GaussianParameters,
    e_step,
    em_step_missing,
    fit,
    from_unconstrained,
    log_likelihood,
    m_step,
    surrogate,
    to_unconstrained,
)
from toolkit.em.models.prior import Prior


def prior(kind: CovarianceType, d: int = 3, k: int = 3, seed: int = 2) -> Prior:
    """Return a prior that is symmetric in nothing."""
    g = seeded(seed)
    root = torch.randn(d, d, generator=g, dtype=F64)
    scales = {"diag": 0.5 + torch.rand(d, generator=g, dtype=F64), "spherical": torch.tensor(1.7, dtype=F64)}
    return Prior(
        concentration=1 + torch.arange(k, dtype=F64),
        mean=torch.randn(d, generator=g, dtype=F64),
        shrinkage=0.7,
        degrees_of_freedom=d + 1.5,
        scale=scales.get(kind, root @ root.mT + 0.3 * torch.eye(d, dtype=F64)),
    )


def map_step(
    parameters: GaussianParameters, x: Tensor, belief: Prior, sample_weight: Tensor | None = None
) -> tuple[GaussianParameters, float]:
    """Return the parameters after one step of MAP EM, by definition, and the objective before it."""
    kind = parameters.covariance_type
    responsibilities, value = e_step(parameters, x, sample_weight)
    weights = torch.ones(len(x), dtype=F64) if sample_weight is None else sample_weight
    r = responsibilities * weights[:, None]
    counts = r.sum(0)
    means = torch.where(counts[:, None] > 0, r.mT @ x / counts[:, None], 0.0)
    differences = x[:, None] - means
    full = torch.einsum("nk,nki,nkj->kij", r, differences, differences)
    scatter = {
        "full": full,
        "tied": full.sum(0),
        "diag": full.diagonal(dim1=1, dim2=2),
        "spherical": full.diagonal(dim1=1, dim2=2).sum(1),
    }[kind]
    names = ("weights", "means", "covariances")
    found = dict(zip(names, belief.maximise(counts, means, scatter, kind), strict=True))
    objective = value + belief.log_density(parameters) / weights.sum()
    return GaussianParameters.from_covariances(**found, covariance_type=kind), float(objective)


# --- the density -----------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("d", [1, 3])
def test_density_is_that_of_scipy(d, kind):
    belief, there = prior(kind, d), mixture(kind, d)
    nu, scale = belief.degrees_of_freedom, belief.scale.numpy()
    covariances = there.covariances.numpy()
    expected = stats.dirichlet.logpdf(there.weights.numpy(), belief.concentration.numpy())
    dense = {
        "full": lambda k: covariances[k],
        "tied": lambda k: covariances,
        "diag": lambda k: np.diag(covariances[k]),
        "spherical": lambda k: covariances[k] * np.eye(d),
    }[kind]
    for k in range(3):
        expected += stats.multivariate_normal.logpdf(
            there.means[k].numpy(), belief.mean.numpy(), dense(k) / belief.shrinkage
        )
    if kind in ("full", "tied"):
        shared = covariances if kind == "full" else [covariances]
        expected += sum(np.sum(stats.invwishart.logpdf(one, nu, scale)) for one in shared)
    else:
        expected += stats.invgamma.logpdf(covariances, nu / 2, scale=scale / 2).sum()
    assert math.isclose(belief.log_density(there), expected, rel_tol=1e-12)


@every_type
def test_density_under_torch_func(kind):
    belief, leaves = prior(kind), to_unconstrained(mixture(kind))
    found = grad(lambda values: belief.log_density(from_unconstrained(values, kind)))(leaves)
    expected = gradient_of(lambda values: belief.log_density(from_unconstrained(values, kind)), leaves)
    assert relative_error(found, expected) < 1e-14
    assert all(value.any() for value in expected.values())


def test_a_weight_of_zero_is_allowed_where_the_prior_does_not_mind():
    whole = mixture("full")
    log_weights = torch.tensor([0.0, -math.inf, -math.inf], dtype=F64, requires_grad=True)
    dead = dataclasses.replace(whole, log_weights=log_weights)
    flat = dataclasses.replace(prior("full"), concentration=torch.ones(3, dtype=F64))
    value = flat.log_density(dead)
    (slope,) = torch.autograd.grad(value, log_weights)
    assert value.isfinite()
    assert not slope.any()
    assert prior("full").log_density(dead) == -math.inf


# --- the M-step ------------------------------------------------------------------------------------------------------


@every_type
def test_one_component_is_at_the_mode_of_its_posterior(kind):
    x, belief = samples(20, 3, 1), prior(kind, 3, 1)
    n, d = x.shape
    found, _ = map_step(mixture(kind, 3, 1), x, belief)
    deviation = x.mean(0) - belief.mean
    mean = (n * x.mean(0) + belief.shrinkage * belief.mean) / (n + belief.shrinkage)
    squares = (x - x.mean(0)).mT @ (x - x.mean(0)) + n * belief.shrinkage / (n + belief.shrinkage) * torch.outer(
        deviation, deviation
    )
    nu = belief.degrees_of_freedom
    expected = {
        "full": lambda: (belief.scale + squares) / (nu + n + d + 2),
        "tied": lambda: (belief.scale + squares) / (nu + n + d + 2),
        "diag": lambda: (belief.scale + squares.diag()) / (nu + n + 3),
        "spherical": lambda: (belief.scale + squares.trace()) / (nu + n * d + d + 2),
    }[kind]()
    assert torch.allclose(found.means[0], mean, rtol=1e-13)
    assert torch.allclose(found.covariances.reshape(expected.shape), expected, rtol=1e-12, atol=1e-14)


@every_type
@pytest.mark.parametrize("weighted", [False, True])
def test_step_is_a_stationary_maximum_of_surrogate_and_prior(weighted, kind):
    x, before, belief = samples(), mixture(kind), prior(kind)
    w = 0.2 + 3 * torch.rand(60, generator=seeded(9), dtype=F64) if weighted else torch.ones(60, dtype=F64)
    responsibilities = e_step(before, x)[0]
    after, _ = map_step(before, x, belief, w)

    def objective(values: dict[str, Tensor]) -> Tensor:
        now = from_unconstrained(values, kind)
        return (w[:, None] * responsibilities * now.log_joint(x)).sum() + belief.log_density(now)

    leaves = to_unconstrained(after)
    # The density is one of covariances: the maximum is the same in any coordinates.
    assert all(slope.abs().max() < 1e-11 for slope in gradient_of(objective, leaves).values())
    g = seeded(5)
    for _ in range(20):
        nearby = {n: v + 0.05 * torch.randn(v.shape, generator=g, dtype=F64) for n, v in leaves.items()}
        assert objective(nearby) < objective(leaves)


@every_type
def test_a_component_without_samples_is_at_the_mode_of_the_prior(kind):
    belief, d = prior(kind), 3
    counts = torch.tensor([5.0, 0.0, 7.0], dtype=F64)
    means = torch.randn(3, d, generator=seeded(), dtype=F64)
    shapes = {"full": (3, d, d), "tied": (d, d), "diag": (3, d), "spherical": (3,)}
    scatter = torch.zeros(shapes[kind], dtype=F64)
    weights, found, covariances = belief.maximise(counts, means, scatter, kind)
    assert torch.equal(found[1], belief.mean)
    assert torch.allclose(weights, torch.tensor([5.0, 1.0, 9.0], dtype=F64) / 15)
    nu = belief.degrees_of_freedom
    if kind != "tied":
        mode = belief.scale / {"full": nu + d + 2, "diag": nu + 3, "spherical": nu + d + 2}[kind]
        assert torch.allclose(covariances[1], mode, rtol=1e-14)


@every_type
def test_batches_of_restarts(kind):
    belief = prior(kind)
    g = seeded(8)
    shapes = {"full": (4, 3, 3, 3), "tied": (4, 3, 3), "diag": (4, 3, 3), "spherical": (4, 3)}
    counts = torch.rand(4, 3, generator=g, dtype=F64)
    means = torch.randn(4, 3, 3, generator=g, dtype=F64)
    scatter = torch.rand(shapes[kind], generator=g, dtype=F64)
    together = belief.maximise(counts, means, scatter, kind)
    for i in range(4):
        alone = belief.maximise(counts[i], means[i], scatter[i], kind)
        for found, expected in zip(together, alone, strict=True):
            assert torch.allclose(found[i], expected, rtol=1e-14)


@pytest.mark.parametrize("kind", ["diag", "spherical"])
def test_counts_of_features_that_are_all_there_change_nothing(kind):
    belief, g = prior(kind), seeded(8)
    counts, means = torch.rand(3, generator=g, dtype=F64), torch.randn(3, 3, generator=g, dtype=F64)
    scatter = torch.rand((3, 3) if kind == "diag" else (3,), generator=g, dtype=F64)
    whole = belief.maximise(counts, means, scatter, kind)
    counted = belief.maximise(counts, means, scatter, kind, feature_counts=counts[:, None].expand(3, 3))
    assert all(torch.allclose(a, b, rtol=1e-14) for a, b in zip(whole, counted, strict=True))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(COVARIANCE_TYPES),
    d=st.integers(1, 4),
    k=st.integers(1, 5),
    n=st.sampled_from([1, 3, 10, 80]),
    weighted=st.booleans(),
)
def test_objective_never_falls(seed, kind, d, k, n, weighted):
    x, belief, parameters = samples(n, d, k, seed), prior(kind, d, k, seed), mixture(kind, d, k, seed)
    weights = torch.rand(n, generator=seeded(seed), dtype=F64) + 0.01 if weighted else None
    values = []
    for _ in range(15):
        parameters, value = map_step(parameters, x, belief, weights)
        values.append(value)
    assert all(after >= before - 1e-11 * max(1, abs(before)) for before, after in pairwise(values))


@pytest.mark.slow
@every_type
def test_gradient_of_the_objective_is_zero_at_the_fixed_point(kind):
    x, parameters, belief = samples(), mixture(kind), prior(kind)
    for _ in range(3000):
        parameters, _ = map_step(parameters, x, belief)

    def objective(values: dict[str, Tensor]) -> Tensor:
        now = from_unconstrained(values, kind)
        return log_likelihood(now, x) + belief.log_density(now) / len(x)

    leaves = to_unconstrained(parameters)
    assert all(slope.abs().max() < 1e-7 for slope in gradient_of(objective, leaves).values())
    moved = {name: value + 0.1 for name, value in leaves.items()}
    assert max(slope.abs().max() for slope in gradient_of(objective, moved).values()) > 1e-2


@every_type
def test_surrogate_with_the_prior_has_the_gradient_of_the_objective(kind):
    x, belief, leaves = samples(), prior(kind), to_unconstrained(mixture(kind))

    def with_prior(fit, values: dict[str, Tensor]) -> Tensor:
        now = from_unconstrained(values, kind)
        return fit(now, x) + belief.log_density(now) / len(x)

    found = gradient_of(lambda values: with_prior(surrogate, values), leaves)
    assert relative_error(found, gradient_of(lambda values: with_prior(log_likelihood, values), leaves)) < 1e-12


# --- the default -----------------------------------------------------------------------------------------------------


def test_default_is_that_of_fraley_and_raftery():
    x = samples(40, 3, 2)
    covariance = torch.from_numpy(np.cov(x.mT.numpy(), bias=True))
    expected = {
        "full": covariance,
        "tied": covariance,
        "diag": covariance.diag(),
        "spherical": covariance.diag().mean(),
    }
    for kind, scale in expected.items():
        found = Prior.default(x, 5, kind)
        assert torch.allclose(found.scale, scale / 5 ** (2 / 3), rtol=1e-12)
        assert torch.allclose(found.mean, x.mean(0), rtol=1e-12)
        assert torch.equal(found.concentration, torch.ones(5, dtype=F64))
        assert (found.shrinkage, found.degrees_of_freedom) == (0.01, 5.0)


@every_type
def test_default_of_weighted_samples_is_that_of_repeated_ones(kind):
    x = samples(20, 3, 2)
    repeats = torch.arange(20) % 4
    one = Prior.default(x, 2, kind, sample_weight=repeats.to(F64))
    other = Prior.default(x.repeat_interleave(repeats, 0), 2, kind)
    assert torch.allclose(one.scale, other.scale, rtol=1e-12)
    assert torch.allclose(one.mean, other.mean, rtol=1e-12)


@every_type
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_default_leaves_missing_values_out(offset, kind):
    x = samples(40, 3, 2)
    x[::3, 1] = math.nan
    x[0] = math.nan
    found = Prior.default(x + offset, 2, kind)
    values = [x[:, i][~x[:, i].isnan()] for i in range(3)]
    variances = torch.stack([value.var(correction=0) for value in values]) / 2 ** (2 / 3)
    assert torch.allclose(found.mean - offset, torch.stack([value.mean() for value in values]), rtol=0, atol=1e-9)
    diagonal = found.scale.diagonal() if kind in ("full", "tied") else found.scale
    assert torch.allclose(diagonal, variances.mean() if kind == "spherical" else variances, rtol=1e-8)
    if kind == "full":
        assert found.scale[0, 2].abs() > 0.01


@pytest.mark.parametrize("n", [2, 3, 40])
def test_default_of_features_that_depend_on_each_other_is_diagonal(n):
    x = samples(n, 3, 1)
    if n > 3:
        x[:, 2] = x[:, 0] + x[:, 1]
    found = Prior.default(x, 1, "full")
    assert torch.allclose(found.scale, x.var(0, correction=0).diag(), rtol=1e-12)


@pytest.mark.slow
def test_spikes_on_iris_are_gone_with_the_prior():
    # Started at two sets of six flowers and the rest, some maximum-likelihood fits end on flowers that share a plane.
    x, g = datasets.iris().inputs, seeded()
    belief, spikes, narrowest = Prior.default(x, 3, "full"), 0, math.inf
    for _ in range(12):
        labels = torch.ones(150, dtype=torch.long).index_fill(0, torch.randperm(150, generator=g)[:12], 0)
        labels[(labels == 0).nonzero()[:6, 0]] = 2
        first = m_step(x, torch.nn.functional.one_hot(labels, 3).to(F64), covariance_type="full")
        plain = first
        try:
            for _ in range(200):
                plain = m_step(x, e_step(plain, x)[0], covariance_type="full")
            spikes += bool(torch.linalg.eigvalsh(plain.covariances).min() < 1e-5)
        except ValueError:
            spikes += 1
        for _ in range(200):
            first, _ = map_step(first, x, belief)
        narrowest = min(narrowest, float(torch.linalg.eigvalsh(first.covariances).min()))
    assert spikes >= 2
    assert narrowest > 5e-4


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concentration": torch.tensor([1.0, 0.5, 1.0])}, r"`concentration` should be .* at least 1 each"),
        ({"concentration": torch.tensor(1.0)}, "`concentration` should be"),
        ({"mean": torch.tensor([0.0, math.nan, 0.0])}, r"`mean` should be \(D,\) finite numbers"),
        ({"mean": torch.zeros(2, 3)}, "`mean` should be"),
        ({"shrinkage": 0.0}, r"`shrinkage` should be positive and finite. Found 0.0"),
        ({"degrees_of_freedom": 2.0}, r"`degrees_of_freedom` should be finite and above 2. Found 2.0"),
        ({"degrees_of_freedom": math.nan}, r"`degrees_of_freedom` should be finite"),
        ({"scale": torch.ones(3, 3)}, "`scale` should be positive"),
        ({"scale": torch.eye(3) + 0.3 * torch.eye(3)[[1, 2, 0]]}, "`scale` should be positive, and symmetric"),
        ({"scale": torch.ones(2)}, r"`scale` should have shape \(3, 3\), \(3,\) or \(\). Found \(2,\)"),
        ({"scale": torch.tensor([1.0, 0.0, 1.0])}, "`scale` should be positive"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_beliefs_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(prior("full"), **changes)


def test_beliefs_of_another_mixture():
    with pytest.raises(ValueError, match=r"should have lengths \(3, 3\)\. Found \(2, 3\)"):
        prior("full", 3, 2).log_density(mixture("full"))
    with pytest.raises(ValueError, match=r"`scale` of the prior should have 1 dimensions for diag covariances"):
        prior("full").log_density(mixture("diag"))
    with pytest.raises(ValueError, match=r"`covariance_type` should be one of"):
        Prior.default(samples(), 2, "tide")


@pytest.mark.parametrize(
    ("x", "feature"),
    [
        (torch.cat([samples(), torch.full((60, 1), 0.1 + 1e6, dtype=F64)], 1), 3),
        (torch.cat([torch.full((60, 1), math.nan, dtype=F64), samples()], 1), 0),
        (samples(1), 0),
        (samples().index_fill(1, torch.tensor([1]), math.inf), 1),
    ],
    ids=["constant", "missing", "one sample", "infinite"],
)
@every_type
def test_features_that_say_nothing(x, feature, kind):
    with pytest.raises(ValueError, match=rf"`x` should have finite values that differ .* Found none in {feature}"):
        Prior.default(x, 2, kind)


@every_type
def test_in_single_precision(kind):
    belief, there = prior(kind), mixture(kind)
    single = belief.to(torch.float32)
    assert single.scale.dtype == torch.float32
    assert math.isclose(single.log_density(there.to(torch.float32)), belief.log_density(there), rel_tol=1e-5)
    assert single.log_density(there).dtype == F64
    assert belief.log_density(there.to(torch.float32)).dtype == F64


@every_type
def test_reg_covar_is_added_to_a_mode_of_incomplete_samples_too(kind):
    x, belief, first = samples(), prior(kind), mixture(kind)
    expected = fit(x, 3, covariance_type=kind, init=first, prior=belief, reg_covar=0.3, accelerate="none", max_iter=1)
    found, _ = em_step_missing(first, x, prior=belief, reg_covar=0.3)
    torch.testing.assert_close(found.covariances, expected.parameters.covariances)
