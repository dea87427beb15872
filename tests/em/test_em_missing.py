"""Mixtures of samples with missing values: scipy's marginals, Fisher's identity, EM beside the complete-data step."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from contract import BlockCase, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from scipy.special import logsumexp
from test_em import (
    COVARIANCE_TYPES,
    F64,
    difference,
    every_type,
    gradient_of,
    mixture,
    samples,
    unconstrained,
)
from torch import Tensor
from torch.func import grad, hessian, jacrev, vmap
from values import seeded

from toolkit import datasets, unblock
from toolkit.em import (
    RESPONSIBILITIES,
    GaussianParameters,
    e_step,
    em_step,
    evidence_lower_bound,
    from_unconstrained,
    log_likelihood,
    m_step,
    surrogate,
    to_unconstrained,
)
from toolkit.em.engine.acceleration import maximise_likelihood
from toolkit.em.models import _patterns, missing
from toolkit.em.models.missing import (
    MissingGaussian,
    draw_missing,
    em_step_missing,
    fit_missing,
    impute,
    marginal_log_joint,
    start_missing,
    surrogate_missing,
)
from toolkit.em.models.prior import Prior

NAN = math.nan


def hide(x: Tensor, share: float, seed: int = 0, *, keep_a_value: bool = False) -> Tensor:
    """Return the samples with a share of the values missing completely at random."""
    missing = torch.rand(x.shape, generator=seeded(seed), dtype=F64) < share
    if keep_a_value:
        missing[missing.all(1), 0] = False
    return x.masked_fill(missing, NAN)


def incomplete(n: int = 60, d: int = 3, k: int = 3, seed: int = 0, share: float = 0.3) -> Tensor:
    """Return samples of which some are whole, and one has no value."""
    x = hide(samples(n, d, k, seed), share, seed)
    x[n // 2] = NAN
    return x


def dense_covariances(parameters: GaussianParameters) -> np.ndarray:
    k, d = parameters.n_components, parameters.n_features
    covariances = parameters.covariances
    return {
        "full": lambda: covariances,
        "tied": lambda: covariances.expand(k, d, d),
        "diag": lambda: torch.diag_embed(covariances),
        "spherical": lambda: covariances[:, None, None] * torch.eye(d, dtype=F64),
    }[parameters.covariance_type]().numpy()


def by_definition(parameters: GaussianParameters, x: Tensor) -> np.ndarray:
    """Return the log-joints (N, K) by scipy, one sub-vector at a time."""
    covariances, means = dense_covariances(parameters), parameters.means.numpy()
    found = np.tile(parameters.log_weights.numpy(), (len(x), 1))
    for n, row in enumerate(x.numpy()):
        o = ~np.isnan(row)
        for k in range(len(means)):
            if o.any():
                found[n, k] += stats.multivariate_normal.logpdf(row[o], means[k][o], covariances[k][np.ix_(o, o)])
    return found


def moments_by_definition(
    parameters: GaussianParameters, x: Tensor, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return counts, means and covariances (K, D, D) of the M-step of Ghahramani & Jordan, one sample at a time."""
    covariances, means = dense_covariances(parameters), parameters.means.numpy()
    a = by_definition(parameters, x)
    r = weights[:, None] * np.exp(a - logsumexp(a, 1, keepdims=True))
    n, k, d = *a.shape, x.shape[1]
    completed, extra = np.empty((n, k, d)), np.zeros((n, k, d, d))
    for i, row in enumerate(x.numpy()):
        o, m = ~np.isnan(row), np.isnan(row)
        r[i] *= o.any()
        for j in range(k):
            s = covariances[j]
            gain = s[np.ix_(m, o)] @ np.linalg.inv(s[np.ix_(o, o)])
            completed[i, j, o] = row[o]
            completed[i, j, m] = means[j][m] + gain @ (row[o] - means[j][o])
            extra[i, j][np.ix_(m, m)] = s[np.ix_(m, m)] - gain @ s[np.ix_(o, m)]
    counts = r.sum(0)
    new = np.einsum("nk,nki->ki", r, completed) / counts[:, None]
    centred = completed - new
    scatter = np.einsum("nk,nki,nkj->kij", r, centred, centred) + np.einsum("nk,nkij->kij", r, extra)
    return counts, new, scatter / counts[:, None, None]


# --- the block -------------------------------------------------------------------------------------------------------


def marginal_likelihood(kind: str, x: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
    """Return the log-likelihood of what was seen by torch's densities of sub-vectors, one sample at a time."""
    there = from_unconstrained(leaves, kind)
    k, d = there.n_components, there.n_features
    covariances = there.covariances
    dense = {
        "full": lambda: covariances,
        "tied": lambda: covariances.expand(k, d, d),
        "diag": lambda: torch.diag_embed(covariances),
        "spherical": lambda: covariances[:, None, None] * torch.eye(d, dtype=F64),
    }[kind]()
    values = []
    for row in x:
        o = ~row.isnan()
        joint = there.log_weights
        if bool(o.any()):
            component = torch.distributions.MultivariateNormal(there.means[:, o], dense[:, o][:, :, o])
            joint = joint + component.log_prob(row[o])
        values.append(joint.logsumexp(0))
    return torch.stack(values).mean()


def held_out(kind: str, leaves: Mapping[str, Tensor]) -> Tensor:
    """Return something that an M-step goes into: its density of other samples, and the likelihood before it."""
    before = MissingGaussian(from_unconstrained(leaves, kind))
    after = before.m_step(TRAINING, e_step(before, TRAINING)[0])
    return log_likelihood(before, FEW) + 0.3 * log_likelihood(after, OTHER)


FEW, TRAINING, OTHER = incomplete(12, seed=5), incomplete(14, seed=4), samples(10, seed=6)
LOSSES: dict[str, Callable[[str, Mapping[str, Tensor]], Tensor]] = {
    "surrogate_missing": lambda kind, leaves: surrogate_missing(from_unconstrained(leaves, kind), FEW),
    "evidence_lower_bound": lambda kind, leaves: evidence_lower_bound(
        MissingGaussian(from_unconstrained(leaves, kind)), FEW
    ),
    "m_step": held_out,
}


def case(kind: str, name: str) -> BlockCase:
    def likelihood_gradient(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return gradient_of(lambda values: marginal_likelihood(kind, FEW, values), leaves)

    return BlockCase(
        id=f"em.missing.{name}-{kind}",
        block=RESPONSIBILITIES,
        parameters=lambda: {n: v.requires_grad_() for n, v in to_unconstrained(mixture(kind, 3, 2)).items()},
        loss=lambda leaves: LOSSES[name](kind, leaves),
        blocked=likelihood_gradient,
        opened=likelihood_gradient if name == "evidence_lower_bound" else None,
        tolerance=1e-12,
    )


BLOCK_CASES: list[BlockCase] = [
    *(case(kind, "surrogate_missing") for kind in COVARIANCE_TYPES),
    case("tied", "evidence_lower_bound"),
    case("tied", "m_step"),
    case("spherical", "m_step"),
]


@every_type
@pytest.mark.parametrize("stage", [0, 20])
def test_fishers_identity_on_real_data(stage, kind):
    x = hide(datasets.iris().inputs, 0.25)
    parameters = start_missing(x, 3, covariance_type=kind, generator=seeded())
    for _ in range(stage):
        parameters, _ = em_step_missing(parameters, x, reg_covar=1e-6)
    leaves = to_unconstrained(parameters)
    blocked = gradient_of(lambda values: surrogate_missing(from_unconstrained(values, kind), x), leaves)
    expected = gradient_of(lambda values: marginal_likelihood(kind, x, values), leaves)
    scale = max(1.0, *(float(value.norm()) for value in expected.values()))
    assert all(torch.allclose(blocked[name], expected[name], rtol=1e-12, atol=1e-12 * scale) for name in expected)


@every_type
def test_without_the_block_the_surrogate_has_another_gradient(kind):
    x, leaves = incomplete(), unconstrained(kind)
    with unblock(RESPONSIBILITIES):
        found = gradient_of(lambda values: surrogate_missing(from_unconstrained(values, kind), x), leaves)
    assert relative_error(found, gradient_of(lambda values: marginal_likelihood(kind, x, values), leaves)) > 0.01


@every_type
def test_weights_in_the_surrogate(kind):
    x, leaves = incomplete(), unconstrained(kind)
    w = torch.arange(60, dtype=F64) % 4
    found = gradient_of(lambda values: surrogate_missing(from_unconstrained(values, kind), x, w), leaves)
    again = x.repeat_interleave(w.long(), 0)
    expected = gradient_of(lambda values: marginal_likelihood(kind, again, values), leaves)
    assert relative_error(found, expected) < 1e-12


@every_type
def test_surrogate_of_whole_samples_is_the_usual_one_with_its_curvature(kind):
    x = samples(12)
    sizes = {name: value.shape for name, value in unconstrained(kind).items()}

    def of(flat: Tensor) -> GaussianParameters:
        parts = flat.split([shape.numel() for shape in sizes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}
        return from_unconstrained(values, kind)

    flat = torch.cat([value.detach().reshape(-1) for value in unconstrained(kind).values()])
    assert math.isclose(surrogate_missing(of(flat), x), surrogate(of(flat), x), rel_tol=1e-13)
    found = hessian(lambda flat: surrogate_missing(of(flat), x))(flat)
    assert torch.allclose(found, hessian(lambda flat: surrogate(of(flat), x))(flat), rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_jacobian_of_the_open_em_map_is_the_rate_of_convergence():
    x = hide(samples(200, 2, 1), 0.4, keep_a_value=True)
    there = from_unconstrained(unconstrained("tied"), "tied")
    one = GaussianParameters(
        log_weights=torch.zeros(1, dtype=F64),
        means=there.means[:1, :2],
        precisions_cholesky=torch.eye(2, dtype=F64),
        covariance_type="tied",
    )
    for _ in range(400):
        one, _ = em_step_missing(one, x)
    fixed = torch.cat([value.reshape(-1) for value in to_unconstrained(one).values()])

    def em_map(flat: Tensor) -> Tensor:
        values = {"log_weights": flat[:1], "means": flat[1:3].view(1, 2), "log_cholesky": flat[3:]}
        now = MissingGaussian(from_unconstrained(values, "tied"))
        after = now.m_step(x, e_step(now, x)[0]).unconstrained()
        return torch.cat([value.reshape(-1) for value in after.values()])

    assert not torch.autograd.functional.jacobian(em_map, fixed).any()
    with unblock(RESPONSIBILITIES):
        jacobian = torch.autograd.functional.jacobian(em_map, fixed)
    rate = torch.linalg.eigvals(jacobian).abs().max()
    point, distances = fixed + 1e-3 * torch.arange(1.0, 7.0, dtype=F64), []
    for _ in range(15):
        point = em_map(point).detach()
        distances.append((point - fixed)[1:].norm())
    assert 0.2 < rate < 0.8  # with one component, all that is missing are the values
    assert abs(distances[-1] / distances[-2] - rate) < 1e-3


# --- the density -----------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("d", [1, 2, 5])
def test_log_joint_is_that_of_sub_vectors(d, kind):
    x, there = incomplete(80, d, 3, share=0.4), mixture(kind, d)
    found = marginal_log_joint(there, x)
    assert np.allclose(found.numpy(), by_definition(there, x), rtol=1e-12, atol=1e-12)
    assert torch.allclose(found[40], there.log_weights, rtol=1e-13)
    assert torch.equal(MissingGaussian(there).log_joint(x), found)


@every_type
def test_gradient_of_the_log_joint(kind):
    x, leaves = incomplete(), unconstrained(kind)

    def likelihood(values: Mapping[str, Tensor]) -> Tensor:
        return log_likelihood(MissingGaussian(from_unconstrained(values, kind)), x)

    expected = gradient_of(lambda values: marginal_likelihood(kind, x, values), leaves)
    assert relative_error(gradient_of(likelihood, leaves), expected) < 1e-12
    assert relative_error(grad(likelihood)(dict(leaves)), expected) < 1e-12


@every_type
def test_each_sample_under_vmap(kind):
    x, there = incomplete(20), mixture(kind)
    found = vmap(lambda row: marginal_log_joint(there, row[None])[0])(x)
    assert torch.allclose(found, marginal_log_joint(there, x), rtol=1e-13)
    by_sample = vmap(
        grad(lambda values, row: marginal_log_joint(from_unconstrained(values, kind), row[None]).logsumexp(1).sum()),
        in_dims=(None, 0),
    )({name: value.detach() for name, value in unconstrained(kind).items()}, x)
    whole = gradient_of(lambda values: marginal_likelihood(kind, x, values), unconstrained(kind))
    assert relative_error({name: value.mean(0) for name, value in by_sample.items()}, whole) < 1e-12


@pytest.mark.portable
def test_gradient_by_the_samples_is_nothing_where_they_are_missing():
    x, there = incomplete(20), mixture("full")
    slopes = jacrev(lambda x: marginal_log_joint(there, x).logsumexp(1).sum())(x)
    leaf = x.clone().requires_grad_()
    (again,) = torch.autograd.grad(marginal_log_joint(there, leaf).logsumexp(1).sum(), leaf)
    assert torch.allclose(slopes, again, rtol=1e-13, atol=1e-15)
    assert not slopes[x.isnan()].any()
    assert (slopes[~x.isnan()] != 0).all()


@every_type
def test_whole_samples_have_their_usual_density(kind):
    x, there = samples(300), mixture(kind)
    assert torch.allclose(marginal_log_joint(there, x), there.log_joint(x), rtol=1e-13)


@every_type
@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_offset_costs_nothing(offset, kind):
    x = ((incomplete(200) * 2**20).round() / 2**20).double()
    first = start_missing(x, 2, covariance_type=kind, generator=seeded())
    moved = start_missing(x + offset, 2, covariance_type=kind, generator=seeded())
    options = {"covariance_type": kind, "accelerate": "none", "max_iter": 20, "tol": 0.0}
    here = fit_missing(x, 2, init=first, **options)
    there = fit_missing(x + offset, 2, init=moved, **options)
    assert abs(here.log_likelihood - there.log_likelihood) < 1e-10
    completed = impute(here.parameters, x)
    assert torch.allclose(impute(there.parameters, x + offset) - offset, completed, rtol=0, atol=1e-8)


# --- the step --------------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("d", "k"), [(1, 2), (3, 3), (9, 2)])
def test_step_of_whole_samples_is_the_usual_step(d, k, weighted, kind):
    x, before = samples(200, d, k), mixture(kind, d, k)
    w = 0.1 + torch.rand(200, generator=seeded(3), dtype=F64) if weighted else torch.ones(200, dtype=F64)
    found, value = em_step_missing(before, x, sample_weight=w if weighted else None, reg_covar=1e-3)
    responsibilities, expected = e_step(before, x, w)
    assert math.isclose(value, expected, rel_tol=1e-13)
    plain = m_step(x, responsibilities * w[:, None], covariance_type=kind, reg_covar=1e-3)
    assert difference(found, plain) < 1e-12


@every_type
def test_step_by_definition(kind):
    x, before = incomplete(80), mixture(kind)
    w = 0.1 + torch.rand(80, generator=seeded(3), dtype=F64)
    found, value = em_step_missing(before, x, sample_weight=w)
    a = logsumexp(by_definition(before, x), 1)
    assert math.isclose(value, (w.numpy() * a).sum() / w.sum(), rel_tol=1e-13)
    counts, means, covariances = moments_by_definition(before, x, w.numpy())
    assert np.allclose(found.weights, counts / counts.sum(), rtol=1e-12)
    if kind in ("full", "tied"):
        if kind == "tied":
            covariances = np.einsum("k,kij->ij", counts / counts.sum(), covariances)
        assert np.allclose(found.means, means, rtol=1e-11)
        assert np.allclose(found.covariances, covariances, rtol=1e-11, atol=1e-13)
    else:  # averages of what was seen
        r = torch.from_numpy(np.exp(by_definition(before, x) - a[:, None])) * w[:, None]
        seen, filled = (~x.isnan()).to(F64), x.nan_to_num(0.0)
        means = (r.mT @ filled) / (r.mT @ seen)
        squares = torch.einsum("nk,nd,nkd->kd", r, seen, (filled[:, None] - means).square())
        sums = r.mT @ seen
        expected = squares / sums if kind == "diag" else squares.sum(1) / sums.sum(1)
        assert torch.allclose(found.means, means, rtol=1e-11)
        assert torch.allclose(found.covariances, expected, rtol=1e-11)


@every_type
def test_step_is_a_stationary_maximum_of_its_surrogate(kind):
    x, before = incomplete(), mixture(kind)
    after = MissingGaussian(before).m_step(x, e_step(MissingGaussian(before), x)[0]).parameters
    assert difference(em_step_missing(before, x)[0], after) < 1e-12
    moments = missing._expected_moments(before, x, e_step(MissingGaussian(before), x)[0])
    leaves = to_unconstrained(after)

    def expected_log_joint(values: Mapping[str, Tensor]) -> Tensor:
        now = from_unconstrained(values, kind)
        shifts = now.means - moments.origins
        if kind in ("full", "tied"):
            second = moments.second - 2 * moments.first[..., None] * shifts[:, None]
            second = second + moments.counts[:, None, None] * shifts[..., None] * shifts[:, None]
            spread = moments.counts * now.log_determinants - 0.5 * (second * now.precisions).sum((-1, -2))
        else:
            factor = now.precisions_cholesky.view(3, -1)
            second = moments.second - 2 * moments.first * shifts + moments.seen * shifts.square()
            spread = (moments.seen * factor.log() - 0.5 * second * factor.square()).sum(-1)
        return (moments.counts * now.log_weights + spread).sum()

    assert all(slope.abs().max() < 1e-11 for slope in gradient_of(expected_log_joint, leaves).values())
    g = seeded(5)
    for _ in range(20):
        nearby = {n: v + 0.05 * torch.randn(v.shape, generator=g, dtype=F64) for n, v in leaves.items()}
        assert expected_log_joint(nearby) < expected_log_joint(leaves)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(COVARIANCE_TYPES),
    d=st.integers(1, 4),
    k=st.integers(1, 4),
    share=st.sampled_from([0.05, 0.3, 0.6]),
    with_prior=st.booleans(),
)
def test_likelihood_never_falls(seed, kind, d, k, share, with_prior):
    x, parameters = incomplete(80, d, k, seed, share), mixture(kind, d, k, seed)
    prior = Prior.default(x, k, kind) if with_prior else None
    values = []
    for _ in range(15):
        before = parameters
        try:
            parameters, value = em_step_missing(parameters, x, prior=prior)
        except ValueError:  # a spike: the likelihood has no upper bound
            assert prior is None
            break
        values.append(float(value) + (float(prior.log_density(before)) / len(x) if prior is not None else 0.0))
    assert all(after >= before - 1e-10 for before, after in pairwise(values))


@every_type
def test_gradient_of_the_likelihood_is_zero_at_the_fixed_point(kind):
    x = incomplete(120, 3, 2)
    found = fit_missing(x, 2, covariance_type=kind, reg_covar=0, tol=0, max_iter=500, generator=seeded())
    leaves = to_unconstrained(found.parameters)
    slopes = gradient_of(lambda values: marginal_likelihood(kind, x, values), leaves)
    assert all(slope.abs().max() < 1e-6 for slope in slopes.values())
    assert math.isclose(marginal_likelihood(kind, x, leaves), found.log_likelihood, rel_tol=1e-12)
    moved = {name: value + 0.1 for name, value in leaves.items()}
    slopes = gradient_of(lambda values: marginal_likelihood(kind, x, values), moved)
    assert max(slope.abs().max() for slope in slopes.values()) > 1e-2


@pytest.mark.slow
def test_one_component_is_at_the_maximum_that_bfgs_finds():
    x = incomplete(60, 3, 1)
    found = fit_missing(x, 1, reg_covar=0, tol=1e-14, generator=seeded())

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        vector = torch.from_numpy(flat)
        leaves = {
            "log_weights": torch.zeros(1, dtype=F64),
            "means": vector[:3].view(1, 3),
            "log_cholesky": vector[3:].view(1, 6),
        }
        slopes = gradient_of(lambda values: marginal_likelihood("full", x, values), leaves)
        value = -marginal_likelihood("full", x, leaves)
        return value.item(), -torch.cat([slopes["means"].view(-1), slopes["log_cholesky"].view(-1)]).numpy()

    direct = optimize.minimize(loss, np.zeros(9), jac=True, method="BFGS", options={"gtol": 1e-8})
    assert abs(-direct.fun - found.log_likelihood) < 1e-10
    assert np.allclose(direct.x[:3], found.parameters.means[0], atol=1e-5)


@every_type
def test_order_of_rows_and_columns_does_not_matter(kind):
    x, before = incomplete(), mixture(kind)
    rows = torch.randperm(60, generator=seeded(1))
    columns = torch.tensor([2, 0, 1])
    expected, value = em_step_missing(before, x)
    found, again = em_step_missing(before, x[rows])
    assert difference(found, expected) < 1e-12
    assert math.isclose(value, again, rel_tol=1e-13)
    covariances = before.covariances
    if kind in ("full", "tied"):
        covariances = covariances[..., columns, :][..., columns]
    elif kind == "diag":
        covariances = covariances[:, columns]
    moved = GaussianParameters.from_covariances(
        weights=before.weights, means=before.means[:, columns], covariances=covariances, covariance_type=kind
    )
    found, again = em_step_missing(moved, x[:, columns])
    assert math.isclose(value, again, rel_tol=1e-13)
    assert torch.allclose(found.means, expected.means[:, columns], rtol=1e-11)


@every_type
def test_weights_are_repetitions(kind):
    x, before = incomplete(), mixture(kind)
    w = torch.arange(60) % 3
    found, value = em_step_missing(before, x, sample_weight=w.to(F64))
    expected, again = em_step_missing(before, x.repeat_interleave(w, 0))
    assert math.isclose(value, again, rel_tol=1e-13)
    assert difference(found, expected) < 1e-12


@every_type
def test_samples_without_a_value_only_count(kind):
    x, before = hide(samples(), 0.3, keep_a_value=True), mixture(kind)
    with_nothing = torch.cat([x, torch.full((30, 3), NAN, dtype=F64)])
    expected, value = em_step_missing(before, x)
    found, diluted = em_step_missing(before, with_nothing)
    assert difference(found, expected) < 1e-13
    assert math.isclose(diluted, value * 60 / 90, rel_tol=1e-13)


@every_type
@pytest.mark.parametrize("size", [1, 40, 2**21])
def test_however_the_patterns_are_batched(size, kind, monkeypatch):
    x, before = incomplete(300, 4, 3, share=0.4), mixture(kind, 4)
    expected, value = em_step_missing(before, x)
    density = marginal_log_joint(before, x)
    monkeypatch.setattr(_patterns, "_CHUNK_BYTES", size)
    monkeypatch.setattr(_patterns, "_LONGEST", 7)
    found, again = em_step_missing(before, x)
    assert difference(found, expected) < 1e-12
    assert math.isclose(value, again, rel_tol=1e-13)
    assert torch.allclose(marginal_log_joint(before, x), density, rtol=1e-13)


def test_patterns_of_many_features():
    x = torch.zeros(7, 70, dtype=F64)
    for row, columns in enumerate([[], [0], [69], [0, 69], [31], [0], [30]]):
        x[row, columns] = NAN
    assert _patterns._codes(x.isnan()).unique().tolist() == list(range(6))
    same = _patterns._codes(x.isnan())
    assert same[1] == same[5]


def test_features_that_a_component_never_saw_stay_as_they_were():
    x = torch.cat([samples(30, 2, 1), samples(30, 2, 1, seed=1) + 1e3])
    x[:30, 1] = NAN
    before = GaussianParameters.from_covariances(
        weights=torch.tensor([0.5, 0.5], dtype=F64),
        means=torch.tensor([[0.0, 7.0], [1e3, 1e3]], dtype=F64),
        covariances=torch.tensor([[1.0, 4.0], [1.0, 1.0]], dtype=F64),
        covariance_type="diag",
    )
    found, _ = em_step_missing(before, x)
    assert found.means[0, 1] == 7.0
    assert math.isclose(found.covariances[0, 1], 4.0, rel_tol=1e-12)
    assert torch.allclose(found.means[0, 0], x[:30, 0].mean())


# --- the fit ---------------------------------------------------------------------------------------------------------


@every_type
def test_parameters_are_recovered(kind):
    d, n = 3, 6000
    truth = mixture(kind, d, 2, seed=4)
    g = seeded(2)
    labels = torch.multinomial(truth.weights, n, replacement=True, generator=g)
    roots = torch.linalg.cholesky(torch.from_numpy(dense_covariances(truth).copy()))
    noise = torch.randn(n, d, 1, generator=g, dtype=F64)
    x = hide(truth.means[labels] + (roots[labels] @ noise)[..., 0], 0.25, seed=3)
    found = fit_missing(x, 2, covariance_type=kind, init=truth, tol=1e-9, reg_covar=0)
    assert found.converged
    assert torch.allclose(found.parameters.weights, truth.weights, atol=0.05)
    assert torch.allclose(found.parameters.means, truth.means, atol=0.15)
    wide = np.abs(dense_covariances(truth)).max()
    assert np.abs(dense_covariances(found.parameters) - dense_covariances(truth)).max() < 0.1 * wide
    assert found.log_likelihood >= log_likelihood(MissingGaussian(truth), x)


def test_fit_beats_what_is_done_without_it():
    # Whole rows alone lose most of the data, means in the place of values most of the correlation.
    g = seeded()
    common = torch.randn(2000, 1, generator=g, dtype=F64)
    x = common * torch.tensor([1.0, -1.0, 2.0, 0.5]) + 0.3 * torch.randn(2000, 4, generator=g, dtype=F64)
    gone = hide(x, 0.4, keep_a_value=True)
    truth = torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=F64)
    covariance = torch.outer(truth, truth) + 0.09 * torch.eye(4, dtype=F64)
    found = fit_missing(gone, 1, generator=seeded()).parameters.covariances[0]
    filled = torch.where(gone.isnan(), gone.nanmean(0), gone).mT.cov()
    whole = gone[~gone.isnan().any(1)].mT.cov()
    error = (found - covariance).norm()
    assert error < 0.1 * (filled - covariance).norm()
    assert error < (whole - covariance).norm()
    guess = impute(
        GaussianParameters.from_covariances(
            weights=torch.ones(1, dtype=F64),
            means=gone.nanmean(0)[None],
            covariances=found[None],
            covariance_type="full",
        ),
        gone,
    )
    assert (guess - x).square().mean() < 0.2 * (torch.where(gone.isnan(), gone.nanmean(0), gone) - x).square().mean()


@pytest.mark.portable
@pytest.mark.parametrize("accelerate", ["squarem", "anderson"])
def test_acceleration_arrives_where_em_does(accelerate):
    x = incomplete(150, 2, 2)
    first = start_missing(x, 2, covariance_type="full", generator=seeded())
    options = {"init": first, "reg_covar": 0, "tol": 1e-13, "max_iter": 4000}
    slow = fit_missing(x, 2, accelerate="none", **options)
    fast = fit_missing(x, 2, accelerate=accelerate, **options)
    assert abs(slow.log_likelihood - fast.log_likelihood) < 1e-9
    assert fast.n_iter < slow.n_iter / 2
    assert all(after >= before - 1e-12 for before, after in pairwise(fast.history))


def test_generic_driver_takes_the_family():
    x = incomplete(150, 2, 2)
    first = start_missing(x, 2, covariance_type="tied", generator=seeded())
    one = maximise_likelihood(MissingGaussian(first), x, tol=1e-12)
    other = fit_missing(x, 2, covariance_type="tied", init=first, reg_covar=0, tol=1e-12)
    assert abs(one.log_likelihood - other.log_likelihood) < 1e-9


def test_fit_with_a_prior_reports_the_likelihood_alone():
    x = incomplete(40, 3, 3)
    prior = Prior.default(x, 3, "full")
    found = fit_missing(x, 3, prior=prior, tol=1e-12, generator=seeded())
    alone = log_likelihood(MissingGaussian(found.parameters), x)
    assert math.isclose(found.log_likelihood, alone, rel_tol=1e-12)
    assert math.isclose(found.history[-1], alone + prior.log_density(found.parameters) / 40, rel_tol=1e-12)
    leaves = to_unconstrained(found.parameters)

    def objective(values: Mapping[str, Tensor]) -> Tensor:
        now = from_unconstrained(values, "full")
        return marginal_likelihood("full", x, values) + prior.log_density(now) / 40

    assert all(slope.abs().max() < 1e-4 for slope in gradient_of(objective, leaves).values())


@every_type
def test_fit_of_whole_samples_is_the_usual_fit(kind):
    x = datasets.iris().inputs
    first = start_missing(x, 3, covariance_type=kind, generator=seeded())
    found = fit_missing(x, 3, covariance_type=kind, init=first, accelerate="none", max_iter=10, tol=0, reg_covar=1e-6)
    parameters = first
    for _ in range(10):
        parameters, _ = em_step(parameters, x, reg_covar=1e-6)
    assert abs(found.log_likelihood - log_likelihood(parameters, x)) < 1e-11
    assert found.n_iter == 10


@every_type
@pytest.mark.parametrize("init", ["kmeans", "k-means++", "random_from_data"])
def test_starts(init, kind):
    x = torch.cat([samples(60, 2, 1, seed) + 100 * seed for seed in range(3)])
    x = hide(x, 0.3)
    first, again = (
        start_missing(x, 3, covariance_type=kind, init=init, reg_covar=0, generator=seeded(3)) for _ in range(2)
    )
    assert difference(first, again) == 0
    assert math.isclose(first.weights.sum(), 1.0, rel_tol=1e-12)
    if init == "kmeans":
        centres = torch.stack([part.nanmean(0) for part in x.split(60)])
        assert torch.allclose(first.means.sort(0).values, centres, atol=1e-9)
        parts = [part - part.nanmean(0) for part in x.split(60)]
        variances = torch.cat(parts).square().nanmean(0)
        dense = torch.from_numpy(dense_covariances(first).copy())[1].diagonal()
        assert torch.allclose(dense, variances.mean() if kind == "spherical" else variances, rtol=1e-9)


@pytest.mark.parametrize("init", ["kmeans", "random_from_data"])
def test_start_leaves_out_samples_without_a_value_or_weight(init):
    x = hide(samples(), 0.3, keep_a_value=True)
    more = torch.cat([x, torch.full((30, 3), NAN, dtype=F64), samples(5) + 100])
    w = torch.cat([torch.ones(90, dtype=F64), torch.zeros(5, dtype=F64)])
    options = {"covariance_type": "full", "init": init}
    found = start_missing(more, 3, sample_weight=w, generator=seeded(), **options)
    assert difference(found, start_missing(x, 3, generator=seeded(), **options)) == 0


def test_single_precision_and_its_type():
    x = incomplete(200)
    first = start_missing(x, 2, covariance_type="full", generator=seeded())
    found = fit_missing(x.float(), 2, init=first, max_iter=20)
    expected = fit_missing(x, 2, init=first, max_iter=20)
    assert found.parameters.means.dtype == torch.float32
    assert abs(found.log_likelihood - expected.log_likelihood) < 1e-5
    assert impute(found.parameters, x.float()).dtype == torch.float32
    step, _ = em_step_missing(first.to(torch.float32), x.float())
    assert step.means.dtype == torch.float32
    assert marginal_log_joint(first.to(torch.float32), x.float()).dtype == torch.float32


@pytest.mark.portable
def test_restarts_keep_the_best_and_callback_is_told():
    x = incomplete(100, 2, 4)
    options = {"covariance_type": "diag", "init": "random_from_data", "max_iter": 20}
    g, told = seeded(1), []
    alone = [fit_missing(x, 4, generator=g, **options).log_likelihood for _ in range(3)]
    best = fit_missing(x, 4, n_init=3, generator=seeded(1), callback=lambda i, v: told.append(v), **options)
    assert max(alone) > min(alone) + 1e-6
    # Of starts that end equally high the first is kept.
    assert best.log_likelihood == pytest.approx(max(alone), abs=1e-9)
    assert max(told) == pytest.approx(best.log_likelihood, abs=1e-9)


def test_nothing_is_changed_in_place():
    x = incomplete()
    kept, w = x.clone(), torch.ones(60, dtype=F64)
    fit_missing(x, 2, sample_weight=w, max_iter=3, generator=seeded())
    impute(mixture("full"), x)
    assert torch.equal(x.nan_to_num(-1e9), kept.nan_to_num(-1e9))
    assert (w == 1).all()


# --- imputation ------------------------------------------------------------------------------------------------------


@every_type
def test_imputed_values_are_conditional_means(kind):
    x, there = incomplete(), mixture(kind)
    a = by_definition(there, x)
    r = np.exp(a - logsumexp(a, 1, keepdims=True))
    covariances, means = dense_covariances(there), there.means.numpy()
    expected = np.zeros((60, 3))
    for i, row in enumerate(x.numpy()):
        o, m = ~np.isnan(row), np.isnan(row)
        expected[i, o] = row[o]
        for k in range(3):
            s = covariances[k]
            shift = s[np.ix_(m, o)] @ np.linalg.inv(s[np.ix_(o, o)]) @ (row[o] - means[k][o])
            expected[i, m] += r[i, k] * (means[k][m] + shift)
    found = impute(there, x)
    assert np.allclose(found, expected, rtol=1e-11)
    assert torch.equal(found[~x.isnan()], x[~x.isnan()])


@every_type
def test_draws_have_the_conditional_moments(kind):
    there, n = mixture(kind, 3, 2), 40000
    row = torch.tensor([0.3, NAN, NAN], dtype=F64)
    draws = draw_missing(there, row.expand(n, 3), 1, generator=seeded(1))[0]
    mean = impute(there, row[None])[0]
    assert torch.equal(draws[:, 0], torch.full((n,), 0.3, dtype=F64))
    assert torch.allclose(draws.mean(0), mean, atol=0.04)
    a = by_definition(there, row[None])[0]
    r = np.exp(a - logsumexp(a))
    covariances, means = dense_covariances(there), there.means.numpy()
    second = np.zeros((2, 2))
    for k in range(2):
        s = covariances[k]
        inner = means[k][1:] + s[1:, 0] / s[0, 0] * (0.3 - means[k][0])
        second += r[k] * (s[1:, 1:] - np.outer(s[1:, 0], s[0, 1:]) / s[0, 0] + np.outer(inner, inner))
    expected = second - np.outer(mean[1:], mean[1:])
    assert np.allclose(draws[:, 1:].mT.cov(), expected, atol=0.05 * np.abs(expected).max())


def test_draws_are_the_generators_and_differ():
    x, there = incomplete(), mixture("full")
    one, other = (draw_missing(there, x, 3, generator=seeded(7)) for _ in range(2))
    assert one.shape == (3, 60, 3)
    assert torch.equal(one, other)
    assert (one[0] != one[1])[x.isnan()].all()
    assert torch.equal(one[1][~x.isnan()], x[~x.isnan()])


# --- refusals --------------------------------------------------------------------------------------------------------

X = incomplete()
BAD = {
    "empty column": (X.index_fill(1, torch.tensor([1]), NAN), {}, ValueError, "Found none of feature 1."),
    "empty column by weight": (
        torch.cat([X.index_fill(1, torch.tensor([2]), NAN), samples(1)]),
        {"sample_weight": torch.tensor([1.0] * 60 + [0.0], dtype=F64)},
        ValueError,
        "`x` should have at least one value of every feature. Found none of feature 2.",
    ),
    "inf": (X.index_fill(0, torch.tensor([7]), math.inf), {}, ValueError, "`x` should be finite, or NaN .* row 7"),
    "integers": (torch.ones(5, 2, dtype=torch.long), {}, TypeError, "float32 or float64 tensor. Found torch.int64"),
    "numpy": (X.numpy(), {}, TypeError, "Found ndarray"),
    "vector": (X[:, 0], {}, ValueError, r"`x` should have shape \(N, D\)"),
    "too many": (X, {"n_components": 61}, ValueError, "`n_components` should be an integer from 1 to 60"),
    "too many with a value": (
        torch.cat([X[:2], torch.full((4, 3), NAN, dtype=F64)]),
        {"n_components": 5},
        ValueError,
        "the number of samples with a value. Found 5.",
    ),
    "none": (X, {"n_components": 0}, ValueError, "`n_components` should be an integer from 1 to 60. Found 0."),
    "type": (X, {"covariance_type": "tide"}, ValueError, "`covariance_type` should be one of"),
    "reg": (X, {"reg_covar": -1.0}, ValueError, "`reg_covar` should be finite and not negative. Found -1.0."),
    "tol": (X, {"tol": -1.0}, ValueError, "`tol` should be"),
    "init": (X, {"init": "kmean"}, ValueError, "`init` should be .*Found 'kmean'"),
    "start": (X, {"init": mixture("full", 2)}, ValueError, r"`init` should have .*Found \(3, 2, 'full'\)"),
    "prior": (X, {"prior": Prior.default(X, 2, "full")}, ValueError, "`concentration` and `mean` of the prior"),
    "weights": (X, {"sample_weight": torch.ones(59)}, ValueError, r"`sample_weight` should have shape \(60,\)"),
    "negative": (X, {"sample_weight": -torch.ones(60)}, ValueError, "`sample_weight` should be finite, not negative"),
    "zeros": (X, {"sample_weight": torch.zeros(60)}, ValueError, "`sample_weight` should be .* not all 0"),
    "list": (X, {"sample_weight": [1.0] * 60}, TypeError, "`sample_weight` should be a tensor or None. Found list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    x, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        fit_missing(x, **{"n_components": 3, "generator": seeded(), **options})


def test_shapes_that_do_not_fit_together():
    there = mixture("full")
    for program in (marginal_log_joint, em_step_missing, impute, surrogate_missing):
        with pytest.raises(ValueError, match=r"`x` should have shape \(N, 3\). Found \(60, 1\)."):
            program(there, X[:, :1])
    with pytest.raises(ValueError, match=r"`responsibilities` should have shape \(60, 3\). Found \(60, 2\)"):
        MissingGaussian(there).m_step(X, torch.ones(60, 2, dtype=F64))
    with pytest.raises(ValueError, match="`n_draws` should be a positive integer"):
        draw_missing(there, X, 0)


def test_values_too_large_for_a_variance_are_refused():
    x = 1e160 * torch.randn(60, 3, generator=seeded(), dtype=torch.float64)
    x[3, 1] = math.nan
    with pytest.raises(ValueError, match=r"`x` should have a finite covariance.*too large"):
        fit_missing(x, 2, covariance_type="full", generator=seeded())
