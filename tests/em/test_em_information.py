"""Information matrices and standard errors: Louis' identity, EM's rate, closed forms, the bootstrap, and coverage."""

import math
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.func import hessian
from values import seeded

from toolkit.em import (
    COVARIANCE_TYPES,
    GaussianParameters,
    em_step,
    from_unconstrained,
    log_likelihood,
    start,
    surrogate,
    to_unconstrained,
)
from toolkit.em.engine.acceleration import maximise_likelihood
from toolkit.em.information import (
    complete_information,
    em_jacobian,
    louis_information,
    missing_information,
    missing_information_rate,
    observed_information,
    standard_errors,
)
from toolkit.em.mixture import Family
from toolkit.em.models import BernoulliMixture, CategoricalMixture, PoissonMixture, StudentMixture

F64 = torch.float64
F = TypeVar("F", bound=Family)
every_type = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def clusters(n: int = 150, d: int = 2, distance: float = 3.0, seed: int = 1) -> Tensor:
    """Draw two clusters of unequal size and shape, `distance` apart on the first axis."""
    g = seeded(seed)
    x = torch.randn(n, d, generator=g, dtype=F64)
    second = torch.rand(n, generator=g) < 0.35
    x[second] = 0.7 * x[second] + 0.3 * x[second].roll(1, 1)
    x[second, 0] += distance
    return x


def best_from(first: F, x: Tensor, weight: Tensor | None = None) -> F:
    """Return the fixed point that EM arrives at: the likelihood, which ends a climb, sees only half of its digits."""
    best = maximise_likelihood(first, x, sample_weight=weight, tol=1e-12).parameters
    weight = torch.ones(len(x), dtype=F64) if weight is None else weight
    for _ in range(60):
        best = best.m_step(x, weight[:, None] * best.log_joint(x).softmax(-1))
    return best


def fitted(x: Tensor, k: int = 2, kind: str = "full", weight: Tensor | None = None) -> GaussianParameters:
    return best_from(start(x, k, covariance_type=kind, generator=seeded()), x, weight)


def anywhere(kind: str, k: int = 3, d: int = 2) -> GaussianParameters:
    """Return a mixture that is at no maximum, with log-weights that sum to 1 only after normalisation."""
    g = seeded(7)
    shapes = {"full": (k, d * (d + 1) // 2), "tied": (d * (d + 1) // 2,), "diag": (k, d), "spherical": (k,)}
    leaves = {"log_weights": (k,), "means": (k, d), "log_cholesky": shapes[kind]}
    return from_unconstrained(
        {name: 0.6 * torch.randn(shape, generator=g, dtype=F64) for name, shape in leaves.items()}, kind
    )


def flat(mixture) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in mixture.unconstrained().values()])


def unflat(position: Tensor, like):
    leaves = like.unconstrained()
    parts = position.split([leaf.numel() for leaf in leaves.values()])
    return like.with_unconstrained(
        {name: part.view(leaf.shape) for (name, leaf), part in zip(leaves.items(), parts, strict=True)}
    )


def differences(function, at: Tensor, step: float = 1e-4) -> Tensor:
    """Return the Jacobian of a vector function by central differences of fourth order."""
    columns = []
    for i in range(len(at)):
        e = torch.zeros_like(at)
        e[i] = step
        ends = [function(at + c * e) for c in (-2, -1, 1, 2)]
        columns.append((ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * step))
    return torch.stack(columns, 1)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


G = seeded(3)
COUNTS = torch.poisson(torch.where(torch.rand(90, 1, generator=G) < 0.4, 6.0, 1.5).repeat(1, 2), generator=G).double()
BITS = (torch.rand(90, 4, generator=G) < torch.where(torch.rand(90, 1, generator=G) < 0.4, 0.8, 0.25)).double()
FAMILIES = {
    **{kind: (anywhere(kind), clusters(40)) for kind in COVARIANCE_TYPES},
    "poisson": (PoissonMixture.start(COUNTS, 2, generator=seeded()), COUNTS),
    "bernoulli": (BernoulliMixture.start(BITS, 2, generator=seeded()), BITS),
    "categorical": (CategoricalMixture.start(BITS.long(), 2, generator=seeded()), BITS.long()),
}
every_family = pytest.mark.parametrize("family", FAMILIES)

# --- the matrices ----------------------------------------------------------------------------------------------------


@every_family
def test_observed_information_is_the_curvature_of_the_likelihood(family):
    mixture, x = FAMILIES[family]
    weight = (torch.arange(len(x), dtype=F64) % 4) / 2

    def slope(position: Tensor) -> Tensor:
        leaf = position.clone().requires_grad_()
        (weight.sum() * log_likelihood(unflat(leaf, mixture), x, weight)).backward()
        return leaf.grad

    found = observed_information(mixture, x, weight)
    assert close(found, -differences(slope, flat(mixture)), 1e-8)
    assert close(found, found.mT, 1e-12)


@every_family
def test_louis_identity(family):
    mixture, x = FAMILIES[family]
    weight = (torch.arange(len(x), dtype=F64) % 4) / 2
    observed = observed_information(mixture, x, weight)
    assert close(louis_information(mixture, x, weight), observed, 1e-10)
    missing = missing_information(mixture, x, weight)
    assert missing.norm() > 0.01 * observed.norm()
    assert torch.linalg.eigvalsh(missing).min() > -1e-10 * missing.norm()


@every_family
def test_complete_information_is_the_curvature_of_the_blocked_surrogate(family):
    mixture, x = FAMILIES[family]
    expected = -len(x) * hessian(lambda position: surrogate(unflat(position, mixture), x))(flat(mixture))
    assert close(complete_information(mixture, x), expected, 1e-12)


@every_type
def test_parts_of_the_samples_add_up(kind, monkeypatch):
    mixture, x = anywhere(kind), clusters(40)
    matrices = (observed_information, complete_information, missing_information)
    whole = [matrix(mixture, x) for matrix in matrices]
    error = standard_errors(fitted(x, 1, kind), x, method="sandwich")
    monkeypatch.setattr("toolkit.em.information._BATCH_NUMBERS", 700)
    for matrix, expected in zip(matrices, whole, strict=True):
        assert close(matrix(mixture, x), expected, 1e-12)
    assert close(standard_errors(fitted(x, 1, kind), x, method="sandwich")["means"], error["means"], 1e-12)


@every_type
def test_jacobian_is_that_of_the_em_map(kind):
    mixture, x = anywhere(kind), clusters(40)
    expected = differences(lambda position: flat(em_step(unflat(position, mixture), x)[0]), flat(mixture))
    assert close(em_jacobian(mixture, x), expected, 1e-8)


@pytest.mark.portable
@pytest.mark.parametrize("family", ["diag", "tied", "poisson", "bernoulli"])
def test_fractions_of_missing_information_are_the_rate_of_em(family):
    mixture, x = FAMILIES[family]
    if family in COVARIANCE_TYPES:
        x, mixture = clusters(150, distance=2.5), start(clusters(150, distance=2.5), 2, covariance_type=family)
    weight = 1 + torch.arange(len(x), dtype=F64) % 2
    best = best_from(mixture, x, weight)
    rates = missing_information_rate(best, x, weight)
    jacobian = em_jacobian(best, x, weight)
    eigenvalues = torch.linalg.eigvals(jacobian).real.sort(descending=True).values[: len(rates)]
    assert torch.allclose(rates, eigenvalues, atol=1e-5)
    complete, observed = complete_information(best, x, weight), observed_information(best, x, weight)
    assert close(complete - complete @ jacobian, observed, 1e-5)
    # Observed: how the distance to the fixed point shrinks, once the slowest direction is left.
    at = flat(best)
    point, distances = unflat(at + 1e-3 * torch.arange(1.0, 1 + len(at), dtype=F64), best), []
    for _ in range(30):
        point = point.m_step(x, weight[:, None] * point.log_joint(x).softmax(-1))
        distances.append(float((flat(point) - flat(best)).norm()))
    assert 0.1 < rates[0] < 1
    assert distances[-1] / distances[-2] == pytest.approx(float(rates[0]), abs=5e-3)


# --- standard errors: closed forms -----------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("method", ["louis", "sem"])
def test_one_gaussian(kind, method):
    x = clusters(80, 3, 2.0)
    one = fitted(x, 1, kind)
    covariance = (x - x.mean(0)).mT @ (x - x.mean(0)) / 80
    variances = covariance.diagonal()
    expected = {
        "full": ((variances[:, None] * variances + covariance.square()) / 80).sqrt()[None],
        "tied": ((variances[:, None] * variances + covariance.square()) / 80).sqrt(),
        "diag": (variances * math.sqrt(2 / 80))[None],
        "spherical": variances.mean()[None] * math.sqrt(2 / (80 * 3)),
    }[kind]
    found = standard_errors(one, x, method=method)
    assert torch.allclose(found["covariances"], expected, rtol=1e-8)
    spread = variances.mean().expand(3) if kind == "spherical" else variances
    assert torch.allclose(found["means"], (spread / 80).sqrt(), rtol=1e-8)
    assert found["weights"].tolist() == [0.0]
    assert list(found) == ["weights", "means", "covariances"]


def test_sandwich_of_one_gaussian():
    x = clusters(80, 1, 4.0)
    centred = x - x.mean()
    variance = centred.square().mean()
    found = standard_errors(fitted(x, 1, "diag"), x, method="sandwich")
    assert float(found["means"]) == pytest.approx(math.sqrt(variance / 80), rel=1e-8)
    expected = ((centred**4).mean() - variance**2) / 80
    assert float(found["covariances"]) == pytest.approx(math.sqrt(expected), rel=1e-8)
    assert abs(found["covariances"] / standard_errors(fitted(x, 1, "diag"), x)["covariances"] - 1) > 0.1


@pytest.mark.parametrize("method", ["louis", "sem", "sandwich"])
def test_components_far_apart_are_estimated_as_if_labelled(method):
    x = clusters(100, 2, 500.0)
    second = x[:, 0] > 250
    two = fitted(x)
    order = two.means[:, 0].argsort()
    found = {name: value[order] for name, value in standard_errors(two, x, method=method).items()}
    share = float(second.double().mean())
    assert found["weights"].tolist() == pytest.approx([math.sqrt(share * (1 - share) / 100)] * 2, rel=1e-6)
    for i, part in enumerate((x[~second], x[second])):
        assert torch.allclose(found["means"][i], part.std(0, correction=0) / math.sqrt(len(part)), rtol=1e-6)


@pytest.mark.parametrize("family", ["poisson", "bernoulli", *COVARIANCE_TYPES])
def test_methods_agree_at_a_maximum(family):
    mixture, x = FAMILIES[family]
    if family in COVARIANCE_TYPES:
        x = clusters(150)
        mixture = start(x, 2, covariance_type=family, generator=seeded())
    weight = 1 + torch.arange(len(x), dtype=F64) % 2
    best = best_from(mixture, x, weight)
    louis, sem = (standard_errors(best, x, method=method, sample_weight=weight) for method in ("louis", "sem"))
    inverse = torch.linalg.pinv(observed_information(best, x, weight), hermitian=True, rtol=1e-9)
    for name, value in louis.items():
        assert torch.allclose(sem[name], value, rtol=1e-4)
        slopes = differences(lambda position, n=name: getattr(unflat(position, best), n).reshape(-1), flat(best))
        expected = (slopes @ inverse @ slopes.mT).diagonal().sqrt().reshape(value.shape)
        assert torch.allclose(value, expected, rtol=1e-6)


# --- standard errors: what they promise ------------------------------------------------------------------------------


@pytest.mark.slow
def test_bootstrap():
    x = clusters(300, 1, 4.0)
    best = fitted(x, kind="diag")
    order = best.means[:, 0].argsort()
    found = standard_errors(best, x)
    g, draws = seeded(), []
    for _ in range(150):
        again = x[torch.randint(300, (300,), generator=g)]
        two = maximise_likelihood(best, again, tol=1e-8).parameters
        order = two.means[:, 0].argsort()
        draws.append(torch.cat([two.weights[order][:1], two.means[order, 0], two.covariances[order, 0]]))
    order = best.means[:, 0].argsort()
    expected = torch.stack(draws).std(0)
    ours = torch.cat([found["weights"][order][:1], found["means"][order, 0], found["covariances"][order, 0]])
    assert (ours / expected).log().abs().max() < math.log(1.35)


@pytest.mark.slow
def test_intervals_cover_the_truth():
    """Of intervals of two standard errors, 95.4 % should hold the truth; 200 x 5 of them are counted."""
    share, centres, deviations = 0.4, torch.tensor([0.0, 3.5], dtype=F64), torch.tensor([1.0, 0.8], dtype=F64)
    truth = GaussianParameters.from_covariances(
        weights=torch.tensor([1 - share, share], dtype=F64),
        means=centres[:, None],
        covariances=deviations[:, None].square(),
        covariance_type="diag",
    )
    g, inside = seeded(), []
    for _ in range(200):
        labels = (torch.rand(400, generator=g) < share).long()
        x = (centres[labels] + deviations[labels] * torch.randn(400, generator=g, dtype=F64))[:, None]
        found = maximise_likelihood(truth, x, tol=1e-7).parameters
        errors = standard_errors(found, x)
        pairs = [(name, getattr(found, name), getattr(truth, name)) for name in ("weights", "means", "covariances")]
        inside.append(torch.cat([((v - t).abs() < 2 * errors[n]).reshape(-1) for n, v, t in pairs])[1:])
    covered = torch.stack(inside).double().mean(0)
    assert abs(covered.mean() - 0.945) < 0.02  # of the variances, a little less: their estimates are skewed
    assert (covered > 0.90).all()


def test_sandwich_is_near_where_the_model_is_true():
    x = clusters(5000, 1, 4.0, seed=5)
    best = fitted(x, kind="diag")
    louis, sandwich = (standard_errors(best, x, method=method) for method in ("louis", "sandwich"))
    for name in louis:
        assert (sandwich[name] / louis[name]).log().abs().max() < 0.1


def test_a_weight_is_a_number_of_copies():
    x, weight = clusters(100), torch.arange(100) % 4
    best = fitted(x, weight=weight)
    for method in ("louis", "sem", "sandwich"):
        weighted = standard_errors(best, x, method=method, sample_weight=weight)
        copied = standard_errors(best, x.repeat_interleave(weight, 0), method=method)
        assert all(torch.allclose(weighted[name], copied[name], rtol=1e-6) for name in copied)


@pytest.mark.parametrize("method", ["louis", "sem", "sandwich"])
def test_the_redundant_constant_and_the_units_do_not_matter(method):
    x = clusters(120)
    best = fitted(x)
    found = standard_errors(best, x, method=method)
    leaves = to_unconstrained(best)
    shifted = GaussianParameters(
        log_weights=leaves["log_weights"] + 5.0,
        means=best.means,
        precisions_cholesky=best.precisions_cholesky,
        covariance_type="full",
    )
    again = standard_errors(shifted, x, method=method)
    assert all(torch.allclose(again[name], found[name], rtol=1e-7) for name in found)
    units = torch.tensor([1e-4, 1e5], dtype=F64)
    scaled = GaussianParameters.from_covariances(
        weights=best.weights,
        means=best.means * units,
        covariances=best.covariances * units * units[:, None],
        covariance_type="full",
    )
    again = standard_errors(scaled, x * units, method=method)
    assert torch.allclose(again["means"] / units, found["means"], rtol=1e-5)
    assert torch.allclose(again["weights"], found["weights"], rtol=1e-5)


def test_parameters_of_ones_own():
    x = clusters(150)
    best = fitted(x)
    errors = standard_errors(best, x, natural=lambda two: {"odds": two.weights[0] / two.weights[1]})
    weights = standard_errors(best, x)["weights"]
    expected = weights[0] / best.weights[1].square()  # d(w / (1 - w)) = dw / (1 - w)^2
    assert errors["odds"].shape == ()
    assert float(errors["odds"]) == pytest.approx(float(expected), rel=1e-9)


def test_categorical_probabilities_have_one_name_for_each_feature():
    _, x = FAMILIES["categorical"]
    # One component: a table of frequencies.
    found = standard_errors(best_from(CategoricalMixture.start(x, 1), x), x)
    share = x.double().mean(0)
    for d in range(4):
        expected = math.sqrt(float(share[d] * (1 - share[d])) / len(x))
        assert found[f"probabilities[{d}]"].reshape(-1).tolist() == pytest.approx([expected] * 2, rel=1e-8)


def test_no_graph_is_built_and_single_precision_is_computed_in_double():
    x = clusters(100)
    best = fitted(x)
    leaves = {name: leaf.float().requires_grad_() for name, leaf in to_unconstrained(best).items()}
    single = from_unconstrained(leaves, "full")
    found = standard_errors(single, x.float())
    assert all(value.dtype == F64 and not value.requires_grad for value in found.values())
    assert torch.allclose(found["means"], standard_errors(best, x)["means"], rtol=1e-3)
    assert leaves["means"].grad is None


def test_an_m_step_that_guesses_more_than_the_components_is_no_witness():
    x = clusters(200, 3)
    first = StudentMixture.start(x, 2, degrees_of_freedom=4.0, generator=seeded())
    student = best_from(first, x)
    assert close(louis_information(student, x), observed_information(student, x), 1e-10)
    found = standard_errors(student, x)
    assert found["scatters"].shape == (2, 3, 3)
    assert not found["degrees_of_freedom"].any()
    with pytest.raises(ValueError, match=r"`method` should be 'louis' or 'sandwich' here\. Found 'sem'"):
        standard_errors(student, x, method="sem")


# --- refusals --------------------------------------------------------------------------------------------------------


X = clusters(60)
TWO = fitted(X)
DEAD = GaussianParameters(
    log_weights=torch.tensor([0.0, -math.inf], dtype=F64),
    means=TWO.means,
    precisions_cholesky=TWO.precisions_cholesky,
    covariance_type="full",
)
BAD = {
    "method": ({"method": "wald"}, ValueError, "`method` should be one of 'sem', 'louis', 'sandwich'. Found 'wald'."),
    "numpy": ({"x": X.numpy()}, TypeError, "`x` should be a tensor. Found ndarray."),
    "weight": ({"sample_weight": X[:5, 0]}, ValueError, r"`sample_weight` should have shape \(60,\). Found \(5,\)."),
    "edge": ({"mixture": DEAD}, ValueError, "`mixture` should have finite coordinates. Found infinite ones in log_w"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        standard_errors(**{"mixture": TWO, "x": X, **options})


@pytest.mark.parametrize("method", ["louis", "sem", "sandwich"])
def test_no_standard_error_where_the_likelihood_is_flat_or_a_saddle(method):
    # Two equal components: nothing tells which of them is which.
    twice = GaussianParameters.from_covariances(
        weights=torch.tensor([0.5, 0.5], dtype=F64),
        means=X.mean(0).expand(2, 2),
        covariances=((X - X.mean(0)).mT @ (X - X.mean(0)) / 60).expand(2, 2, 2),
        covariance_type="full",
    )
    with pytest.raises(ValueError, match="`mixture` should be at a maximum of the likelihood that is not flat"):
        standard_errors(twice, X, method=method)


@pytest.mark.portable
def test_no_standard_error_where_the_model_is_not_identified():
    # Two components of two bits have five parameters; the four frequencies they are fitted to have three.
    _, x = FAMILIES["bernoulli"]
    best = best_from(BernoulliMixture.start(x[:, :2], 2, generator=seeded()), x[:, :2])
    with pytest.raises(ValueError, match=r"Found a fraction of missing information of (1|0\.999999999)"):
        standard_errors(best, x[:, :2])
