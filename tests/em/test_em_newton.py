"""Newton's method of small Gaussian mixtures: its model beside autograd, its fits beside those of EM."""

import dataclasses

import numpy as np
import pytest
import torch
from test_em import samples
from values import seeded

from toolkit.em import GaussianMixture, fit, log_likelihood
from toolkit.em.covariance import structure_of
from toolkit.em.engine import ascent as ascent_module
from toolkit.em.engine import newton as newton_module
from toolkit.em.engine.newton import _Point, _solved, climb_by_newton
from toolkit.em.engine.samples import prepare
from toolkit.em.engine.small import SmallData, SmallMixture
from toolkit.em.engine.starts import choose_starts
from toolkit.em.gaussian import GaussianParameters

kinds = pytest.mark.parametrize("kind", ["full", "diag"])
F64 = torch.float64


def _data(x, kind="full", weights=None, ridge=0.0):
    """Return samples in their own coordinates."""
    weights = None if weights is None else torch.from_numpy(weights)
    framed = prepare(x, kind, 3, sample_weight=weights).as_samples()
    data = dataclasses.replace(framed, chunks=lambda: iter([(x.mT, weights)]))
    return SmallData(data, structure_of(kind), 3, ridge)


def _point(kind, weights=None, ridge=0.0):
    x = samples(40)
    (first,) = choose_starts(x, None, 3, 1, covariance_type=kind, init="kmeans", reg_covar=0.1, generator=seeded(1))
    data = _data(x, kind, weights, ridge)
    return x, first, data, _Point(data, SmallMixture.of(first))


def _moved(first, a, b, c):
    """Return the mixture at natural coordinates (see `_Point`), by the definition of an exponential family."""
    factor = first._structure.to_matrices(first.precisions_cholesky, *first.means.shape)
    d = first.n_features
    i, j = torch.triu_indices(d, d) if first.covariance_type == "full" else torch.arange(d).expand(2, d)
    change = torch.zeros(len(c), d, d, dtype=F64)
    change = change.index_put((torch.arange(len(c))[:, None], i, j), c)
    precision = torch.eye(d, dtype=F64) - change - change.mT
    means = first.means + torch.linalg.solve(factor.mT, torch.linalg.solve(precision, b))
    covariance = torch.linalg.inv(factor @ precision @ factor.mT)
    x_of = torch.distributions.MultivariateNormal(means, covariance)
    return lambda x: ((first.log_weights + a).log_softmax(0) + x_of.log_prob(x[:, None])).logsumexp(1)


@kinds
@pytest.mark.parametrize("weighted", [False, True])
def test_the_model_is_the_gradient_and_the_hessian_of_the_log_likelihood(kind, weighted):
    weights = torch.rand(40, generator=seeded(2), dtype=F64) if weighted else torch.ones(40, dtype=F64)
    x, first, _, point = _point(kind, weights.numpy() if weighted else None)
    k, d = first.means.shape
    n_products = d * (d + 1) // 2 if kind == "full" else d
    sizes = [1, d, n_products]

    def total(position):
        a, b, c = position.view(k, -1).split(sizes, 1)
        return weights @ _moved(first, a[:, 0], b, c)(x)

    origin = torch.zeros(k * sum(sizes), dtype=F64)
    gradient = torch.autograd.functional.jacobian(total, origin)
    hessian = torch.autograd.functional.hessian(total, origin)
    # The model leaves out the one direction in which the weights do not change.
    shares = torch.zeros(k, sum(sizes), dtype=F64)
    shares[:, 0] = first.log_weights.exp()
    hessian = hessian - weights.sum() * torch.outer(shares.ravel(), shares.ravel())
    information, found = point.model()
    scale = torch.from_numpy(point._scale)
    torch.testing.assert_close(torch.from_numpy(found), gradient * scale, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.from_numpy(information), -hessian * torch.outer(scale, scale), rtol=1e-8, atol=1e-9
    )
    assert point.value == pytest.approx(float(total(origin) / weights.sum()), abs=1e-12)


@kinds
def test_a_short_step_gains_the_product_with_the_gradient(kind):
    _, _, data, point = _point(kind)
    _, gradient = point.model()
    direction = torch.randn(len(gradient), generator=seeded(3), dtype=F64).numpy()
    ahead, back = (_Point(data, point.moved(sign * 1e-4 * direction)).value for sign in (1, -1))
    assert (ahead - back) / 2e-4 == pytest.approx(float(direction @ gradient) / data.total_weight, rel=1e-5, abs=1e-7)


@kinds
def test_a_step_of_large_damping_is_a_short_step_of_em(kind):
    _, _, _, point = _point(kind)
    information, gradient = point.model()
    step = _solved(information, gradient, 1e8)
    np.testing.assert_allclose(1e8 * step, gradient, rtol=1e-5, atol=1e-6)


@kinds
@pytest.mark.parametrize("seed", range(6))
def test_a_fit_ends_at_a_maximum_that_em_does_not_raise(kind, seed):
    x = torch.randn(300, 2, generator=seeded(seed), dtype=F64) * torch.tensor([1.0, 3.0])
    found = fit(x, 3, covariance_type=kind, generator=seeded(seed), reg_covar=0.0)
    assert found.converged
    assert all(b >= a for a, b in zip(found.history, found.history[1:], strict=False))
    assert float(log_likelihood(found.parameters, x)) == pytest.approx(found.log_likelihood, abs=1e-10)
    further = fit(x, 3, covariance_type=kind, init=found.parameters, accelerate="anderson", tol=1e-10, reg_covar=0.0)
    # A model that predicts at most `tol`, and its error.
    assert further.log_likelihood - found.log_likelihood <= 2e-6


def test_a_fit_is_at_least_as_high_as_plain_em_from_its_start():
    for seed in range(10):
        x = torch.randn(200, 2, generator=seeded(seed), dtype=F64)
        (first,) = choose_starts(
            x, None, 4, 1, covariance_type="full", init="kmeans", reg_covar=1e-6, generator=seeded(seed)
        )
        plain = fit(x, 4, init=first, accelerate="none", tol=1e-3)
        assert fit(x, 4, init=first).log_likelihood >= plain.log_likelihood - 1e-9


@kinds
def test_weights_count_samples(kind):
    x = samples(150)
    counts = torch.randint(1, 4, (150,), generator=seeded(4))
    (first,) = choose_starts(x, None, 3, 1, covariance_type=kind, init="kmeans", reg_covar=1e-6, generator=seeded(1))
    weighted = fit(x, 3, covariance_type=kind, init=first, sample_weight=counts.double(), tol=1e-9)
    repeated = fit(x.repeat_interleave(counts, 0), 3, covariance_type=kind, init=first, tol=1e-9)
    assert weighted.log_likelihood == pytest.approx(repeated.log_likelihood, abs=1e-9)


def test_the_last_step_is_a_whole_one(monkeypatch):
    """Of a model that predicts at most `tol`, also where earlier steps were damped: a short one would end too low."""
    damped, solved = [], newton_module._solved
    monkeypatch.setattr(newton_module, "_solved", lambda *given: damped.append(given[-1]) or solved(*given))
    for seed in range(6):
        x = torch.randn(60, 2, generator=seeded(seed), dtype=F64)
        (first,) = choose_starts(
            x, None, 3, 1, covariance_type="full", init="kmeans", reg_covar=1e-2, generator=seeded(seed)
        )
        damped.clear()
        data = _data(x)
        options = {"tol": 0.1, "max_iter": 100, "rounding": 1e-13, "allows": lambda _: True}
        assert climb_by_newton(data, SmallMixture.of(first), **options).converged
        assert max(damped) > 0
        assert damped[-1] == 0


def test_listeners_hear_every_evaluation_once():
    told = []
    x = samples(200)
    found = GaussianMixture(3, random_state=0, callback=lambda n, value: told.append((n, value))).fit(x)
    assert [n for n, _ in told] == list(range(found.n_iter_ + 1))
    assert max(value for _, value in told) == pytest.approx(found.lower_bound_, abs=1e-9)
    limited = GaussianMixture(3, random_state=0, max_iter=9, tol=0).fit(x)
    assert limited.n_iter_ <= 9


def _impossible(*_, **__):
    raise AssertionError


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    ("options", "n"),
    [({"accelerate": "anderson"}, 200), ({"max_iter": 7}, 200), ({"covariance_type": "tied"}, 200), ({}, 30_000)],
)
def test_other_fits_take_no_newton_steps(options, n, monkeypatch):
    monkeypatch.setattr(ascent_module, "climb_by_newton", _impossible)
    GaussianMixture(3, random_state=0, **options).fit(samples(n))


def test_where_the_model_does_not_hold_the_fit_goes_on_without_it():
    x = samples(60)
    (first,) = choose_starts(x, None, 2, 1, covariance_type="full", init="kmeans", reg_covar=1e-6, generator=seeded(1))
    empty = dataclasses.replace(first, log_weights=torch.tensor([0.0, -torch.inf], dtype=F64))
    everywhere = {"tol": 1e-6, "max_iter": 50, "rounding": 1e-13, "allows": lambda _: True}
    for mixture, ridge in ((empty, 0.0), (first, 1.0)):
        data = _data(x, ridge=ridge)
        found = climb_by_newton(data, SmallMixture.of(mixture), **everywhere)
        assert (found.converged, found.n_iter) == (False, 0)
    data = _data(x)
    found = climb_by_newton(data, SmallMixture.of(first), **{**everywhere, "tol": 0.0, "allows": lambda _: False})
    assert not found.converged
    assert found.log_likelihood == found.history[0]
    whole = fit(x, 2, init=GaussianParameters(**vars(first)), reg_covar=1.0)
    plain = fit(x, 2, init=first, reg_covar=1.0, accelerate="anderson")
    assert whole.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-5)
