"""Two Gaussians moved apart: the population's leaky solutions by quadrature, against integrals and closed forms."""

import math

import numpy as np
import pytest
import torch
from contract import relative_error
from folders import CONFIGS
from scipy.integrate import quad
from scipy.optimize import minimize

from experiments.em_separation import Config, log_likelihoods, population, run
from toolkit import unblock
from toolkit.em import GaussianParameters, to_unconstrained
from toolkit.runner._config import ConfigError, load_config
from toolkit.runner._training import train

BLOCK = "em.responsibilities"

LOST = "log-likelihood lost (nats per sample)"
ENTROPY = "entropy of the responsibilities (nats per sample)"
WEIGHT = "smallest weight"
DISTANCE = "distance of the means, over the true one"
WIDTH = "standard deviation of the heavier component, along the first axis"
ERROR = "error of the quadrature (nats per sample)"


def config(name: str, **values: object) -> Config:
    return load_config(CONFIGS / f"em_{name}.toml").config.model_copy(update=values)


def swept(config: Config, *opened: str, seed: int = 0) -> dict[str, list[float]]:
    with unblock(*opened):
        return train(run(config, seed), config).sweep


def density(x: float, d: float) -> float:
    return (math.exp(-((x - d / 2) ** 2) / 2) + math.exp(-((x + d / 2) ** 2) / 2)) / math.sqrt(8 * math.pi)


def integral(function, d: float) -> float:
    return quad(lambda x: density(x, d) * function(x), -d / 2 - 12, d / 2 + 12, epsabs=1e-14, limit=400)[0]


def truth_log_likelihood(d: float) -> float:
    return integral(lambda x: math.log(density(x, d)), d)


def truth_entropy(d: float) -> float:
    def entropy(x: float) -> float:
        r = 1 / (1 + math.exp(-abs(d * x)))
        return -r * math.log(r) - (1 - r) * (math.log1p(-r) if r < 1 else 0.0)

    return integral(entropy, d)


def single(d: float) -> float:
    """Return the best log-likelihood of one Gaussian: its variance is the data's, its entropy nothing."""
    return -0.5 * math.log(2 * math.pi * math.e * (1 + d**2 / 4))


def symmetric_solution(d: float) -> tuple[float, float, float, float]:
    """Return mean, deviation, log-likelihood and entropy where likelihood minus entropy is highest among equal pairs.

    Gauss-Legendre nodes and scipy: no node, no optimiser and no formula is shared with the experiment.
    """
    nodes, weights = np.polynomial.legendre.leggauss(400)
    x = nodes * (d / 2 + 10)
    p = weights * (d / 2 + 10) * np.vectorize(density)(x, d)

    def parts(mean: float, deviation: float) -> tuple[float, float]:
        a = np.array([-(((x - side * mean) / deviation) ** 2) / 2 for side in (-1, 1)])
        a -= math.log(2 * deviation * math.sqrt(2 * math.pi))
        normaliser = np.logaddexp(*a)
        entropy = -(np.exp(a - normaliser) * (a - normaliser)).sum(0)
        return float(p @ normaliser), float(p @ entropy)

    found = minimize(lambda t: parts(*t)[1] - parts(*t)[0], [d / 2, 1.0], method="BFGS", options={"gtol": 1e-9})
    return (*found.x, *parts(*found.x))


@pytest.fixture(scope="module")
def leaky() -> dict[float, dict[str, float]]:
    values = config("population")
    curves = swept(values, BLOCK)
    return {d: {name: curve[i] for name, curve in curves.items()} for i, d in enumerate(values.separations)}


@pytest.fixture(scope="module")
def blocked() -> dict[float, dict[str, float]]:
    values = config("population")
    curves = swept(values)
    return {d: {name: curve[i] for name, curve in curves.items()} for i, d in enumerate(values.separations)}


# --- the table of leaky solutions ------------------------------------------------------------------------------------


TABLE = {  # separation: entropy, log-likelihood lost, deviation, per cent by which the means are too far apart
    1.0: (".5817", "1.5e-04", "1.118", None),
    2.0: (".3563", "9.7e-03", "1.414", None),
    2.5: (".2515", "3.4e-02", "0.800", "11"),
    3.0: (".1664", "2.1e-02", "0.852", "6"),
    4.0: (".0604", "5.2e-03", "0.929", "1.7"),
    6.0: (".0038", "4.8e-05", "0.993", "0.07"),
}


@pytest.mark.slow
@pytest.mark.parametrize("d", TABLE)
def test_table_to_its_printed_digits(d, leaky, blocked):
    entropy, lost, width, outwards = TABLE[d]
    assert f"{blocked[d][ENTROPY]:.4f}"[1:] == entropy
    assert f"{leaky[d][LOST]:.1e}" == lost
    assert f"{leaky[d][WIDTH]:.3f}" == width
    if outwards is None:
        assert leaky[d][WEIGHT] < 5e-5
        assert math.isnan(leaky[d][DISTANCE])
    else:
        assert leaky[d][WEIGHT] == pytest.approx(0.5, abs=1e-4)
        decimals = len(outwards.partition(".")[2])
        assert f"{100 * (leaky[d][DISTANCE] - 1):.{decimals}f}" == outwards


@pytest.mark.parametrize("d", TABLE)
def test_blocked_training_returns_the_truth(d, blocked):
    row = blocked[d]
    expected = {WEIGHT: 0.5, DISTANCE: 1.0, WIDTH: 1.0, LOST: 0.0}
    assert {name: round(row[name], 4) for name in expected} == expected
    assert row[ENTROPY] == pytest.approx(truth_entropy(d), abs=2e-6)


@pytest.mark.parametrize("d", [1.0, 2.0])
def test_what_collapses_is_one_gaussian_in_closed_form(d, leaky):
    assert leaky[d][LOST] == pytest.approx(truth_log_likelihood(d) - single(d), abs=1e-6)
    assert leaky[d][WIDTH] == pytest.approx(math.sqrt(1 + d**2 / 4), abs=1e-5)


@pytest.mark.parametrize("d", [2.5, 3.0, 4.0, 6.0])
def test_what_survives_is_the_maximum_of_likelihood_minus_entropy(d, leaky):
    mean, deviation, likelihood, entropy = symmetric_solution(d)
    row = leaky[d]
    assert row[DISTANCE] == pytest.approx(2 * mean / d, abs=1e-6)
    assert row[WIDTH] == pytest.approx(deviation, abs=1e-6)
    assert row[ENTROPY] == pytest.approx(entropy, abs=1e-7)
    assert row[LOST] == pytest.approx(truth_log_likelihood(d) - likelihood, abs=1e-7)


@pytest.mark.parametrize(("d", "one", "two"), [(2.5, "-1.889", "-2.039"), (3.0, "-2.008", "-2.074")])
def test_the_best_leaky_model_is_a_single_cluster(d, one, two):
    _, _, likelihood, entropy = symmetric_solution(d)
    assert (f"{single(d):.3f}", f"{likelihood - entropy:.3f}") == (one, two)
    assert single(d) > likelihood - entropy


def test_at_four_the_best_leaky_model_has_two_clusters():
    _, _, likelihood, entropy = symmetric_solution(4.0)
    assert single(4.0) < likelihood - entropy


@pytest.mark.parametrize(("d", "stable"), [(2.05, False), (2.10, True)])
def test_between_these_separations_the_leaky_pair_becomes_stable(d, stable):
    """The symmetric stationary point of likelihood minus entropy is a saddle before, a maximum after."""
    mean, deviation, _, _ = symmetric_solution(d)
    data = population([d], 241)
    pair = GaussianParameters.from_covariances(
        weights=torch.tensor([0.5, 0.5], dtype=torch.float64),
        means=torch.tensor([[-mean], [mean]], dtype=torch.float64),
        covariances=torch.full((2, 1, 1), deviation**2, dtype=torch.float64),
        covariance_type="full",
    )
    leaves = {name: value[None] for name, value in to_unconstrained(pair).items()}
    sizes = [value.numel() for value in leaves.values()]
    start = torch.cat([value.flatten() for value in leaves.values()])

    def objective(flat: torch.Tensor) -> torch.Tensor:
        parts = zip(leaves.items(), flat.split(sizes), strict=True)
        likelihood, entropy = log_likelihoods({name: part.view_as(value) for (name, value), part in parts}, data)
        return (likelihood - entropy).sum()

    assert torch.func.grad(objective)(start).norm() < 1e-6
    # Six coordinates, one of which (a shift of both log-weights) changes nothing.
    curvatures = torch.linalg.eigvalsh(torch.func.hessian(objective)(start)).sort().values
    assert curvatures.abs().min() < 1e-9
    assert int((curvatures > 1e-4).sum()) == (0 if stable else 1)


# --- the quadrature --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", TABLE)
def test_quadrature_is_exact_to_rounding(d, leaky, blocked):
    data = population([d], 241)
    x = data.points[..., 0]
    for function, expected in ((torch.ones_like(x), 1.0), (x, 0.0), (x**2, 1 + d**2 / 4), (x.sin() * x, None)):
        value = data.expectation(function).item()
        exact = integral(lambda x: x * math.sin(x), d) if expected is None else expected
        assert value == pytest.approx(exact, abs=1e-13)
    assert blocked[d][ERROR] < 1e-14
    assert leaky[d][ERROR] < 1e-9


def test_the_error_of_a_coarse_rule_is_seen():
    curves = swept(config("population", n_nodes=15, steps=1, separations=[6.0]))
    assert curves[ERROR][0] > 1e-4


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [("population", 1), ("separation", 1), ("separation", 3)], ids=str)
def test_target_is_independent_and_the_gradient(values):
    name, d = values
    short = config(name, n_features=d, n_samples=60, separations=[1.5, 3.0], steps=3, nudge=0.1)
    one = run(short, seed=1)
    for _ in range(3):
        target = one.target()
        found = dict(zip(one.parameters, torch.autograd.grad(one.loss(), list(one.parameters.values())), strict=True))
        assert relative_error(found, target) < 1e-12
        one.optimizer.zero_grad()
        one.loss().backward()
        one.optimizer.step()


@pytest.mark.parametrize("opened", [(), (BLOCK,)], ids=["blocked", "open"])
def test_separations_are_trained_as_if_alone(opened):
    short = {"n_samples": 80, "steps": 40}
    together = swept(config("separation", separations=[1.5, 2.5, 4.0], **short), *opened, seed=3)
    alone = swept(config("separation", separations=[2.5], **short), *opened, seed=3)
    for name, curve in alone.items():
        assert together[name][1] == pytest.approx(curve[0], rel=1e-8, abs=1e-10, nan_ok=True)


@pytest.mark.slow
def test_a_component_dies_when_clusters_are_close_and_only_without_the_block():
    short = config("separation", separations=[1.5, 4.0], n_samples=500, steps=150)
    open_close, open_apart = swept(short, BLOCK, seed=1)[WEIGHT]
    assert open_close < 0.01
    assert open_apart > 0.3
    with_block = swept(short, seed=1)
    assert min(with_block[WEIGHT]) > 0.05
    assert abs(with_block[LOST][1]) < 1e-9


@pytest.mark.slow
def test_seeds_draw_other_samples_and_other_starts():
    assert swept(config("separation", steps=2), seed=0) != swept(config("separation", steps=2), seed=1)
    first, second = (run(config("population"), seed).parameters["means"] for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, run(config("population"), 0).parameters["means"])


BAD = {
    "n_features=2": "n_features should be 1 for the population",
    "separations=[]": "at least 1 item",
    "separations=[2.0, 0.0]": "greater than 0",
    "n_nodes=2": "greater than or equal to 3",
    "nudge=-1.0": "greater than or equal to 0",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_values_are_refused_in_one_line(override):
    with pytest.raises(ConfigError, match=BAD[override]) as caught:
        load_config(CONFIGS / "em_population.toml", [override])
    assert len(str(caught.value).splitlines()) == 1
