"""EM of small data by NumPy: each step and each fit beside its twin, the pass of torch."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from test_em import (
    difference,
    mixture,
    samples,
)
from values import seeded

from toolkit.em import COVARIANCE_TYPES, GaussianMixture, GaussianParameters, fit
from toolkit.em.covariance import structure_of
from toolkit.em.engine import ascent as ascent_module
from toolkit.em.engine import fused
from toolkit.em.engine.acceleration import ClimbOptions
from toolkit.em.engine.ascent import GaussianEngine
from toolkit.em.engine.coordinates import flat
from toolkit.em.engine.fused import accumulate, maximise
from toolkit.em.engine.samples import prepare
from toolkit.em.engine.small import SmallData, SmallMixture, is_small
from toolkit.em.engine.starts import choose_starts

every_type = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def _small(kind, x, weights=None, ridge=0.0):
    data = prepare(x, kind, 3, sample_weight=weights).as_samples()
    return data, SmallData(data, structure_of(kind), 3, ridge)


def _framed(kind, weights=(0.2, 0.5, 0.3)):
    """Return an asymmetric mixture near the origin, as data in the coordinates of the pass are."""
    one = mixture(kind)
    return GaussianParameters(
        log_weights=torch.tensor(weights, dtype=torch.float64).log(),
        means=one.means - one.means.mean(0),
        precisions_cholesky=one.precisions_cholesky,
        covariance_type=kind,
    )


@every_type
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("weights", [(0.2, 0.5, 0.3), (0.4, 0.6, 0.0)], ids=["", "one-empty"])
def test_a_step_is_that_of_the_pass(kind, weighted, weights):
    x = samples(300)
    sample_weight = torch.rand(300, generator=seeded(2), dtype=torch.float64) if weighted else None
    data, small = _small(kind, x, sample_weight, ridge=1e-3)
    before = _framed(kind, weights)
    moments = accumulate(before, data)
    moved, value = small.em(SmallMixture.of(before))
    # Sums of 300 terms in another order, over variances that are no smaller than a thousandth.
    assert difference(moved.as_gaussian(), maximise(moments, data, kind, 1e-3)) < 1e-10
    assert math.isclose(value, moments.log_likelihood, rel_tol=1e-12)


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_a_ridge_may_be_a_matrix(kind):
    x = samples(300)
    ridge = torch.arange(1.0, x.shape[1] + 1, dtype=torch.float64).diag() / 10
    data, small = _small(kind, x, ridge=ridge)
    moved, _ = small.em(SmallMixture.of(_framed(kind)))
    assert difference(moved.as_gaussian(), maximise(accumulate(_framed(kind), data), data, kind, ridge)) < 1e-10


@every_type
def test_coordinates_are_those_of_the_mixture(kind):
    before = SmallMixture.of(_framed(kind))
    packed = before.pack()
    assert torch.equal(packed, flat(before.as_gaussian().unconstrained()))
    shifted = packed + torch.where(torch.arange(len(packed)) < 3, 5.0, 0.1)  # log-weights are free up to a constant
    expected = before.as_gaussian().with_unconstrained(_leaves(before, shifted))
    assert difference(before.unpack(shifted).as_gaussian(), expected) < 1e-13


def _leaves(like, position):
    leaves = like.as_gaussian().unconstrained()
    parts = position.split([leaf.numel() for leaf in leaves.values()])
    return {name: part.view(leaf.shape) for (name, leaf), part in zip(leaves.items(), parts, strict=True)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_jump_to_no_number_is_refused_and_one_to_no_weight_is_not(bad):
    before = SmallMixture.of(_framed("diag"))
    packed = before.pack()
    packed[1] = -math.inf
    assert before.unpack(packed).as_gaussian().weights[1] == 0
    packed[4] = bad
    with pytest.raises(ValueError, match="finite coordinates"):
        before.unpack(packed)


@every_type
def test_where_the_expansion_loses_digits_the_pass_is_asked(kind, monkeypatch):
    _, small = _small(kind, samples(300))
    near, value = small.em(SmallMixture.of(_framed(kind)))
    monkeypatch.setattr(fused, "_EXPANDED", {torch.float64: 0.0})
    called = []
    monkeypatch.setattr("toolkit.em.engine.small.accumulate", lambda *a: called.append(1) or accumulate(*a))
    about_means, same = small.em(SmallMixture.of(_framed(kind)))
    assert called
    assert difference(near.as_gaussian(), about_means.as_gaussian()) < 1e-10
    assert math.isclose(value, same, rel_tol=1e-12)


@every_type
def test_a_singular_covariance_names_its_component(kind):
    x = torch.ones_like(samples(60))  # whose sums are exact in any order: rounding would be a covariance, too
    _, small = _small(kind, x)
    with pytest.raises(ValueError, match="positive definite"):
        small.em(SmallMixture.of(_framed(kind)))


@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fit_is_that_of_the_pass(kind, dtype, monkeypatch):
    x = samples(300).to(dtype)
    quick = fit(x, 3, covariance_type=kind, tol=1e-12, generator=seeded())
    used = []
    monkeypatch.setattr(ascent_module, "is_small", lambda *_: used.append(1))
    slow = fit(x, 3, covariance_type=kind, tol=1e-12, generator=seeded())
    assert used
    # Both stop where eight steps gain nothing but rounding.
    assert abs(quick.log_likelihood - slow.log_likelihood) < (1e-9 if dtype == torch.float64 else 3e-6)
    assert quick.parameters.means.dtype == dtype


def test_a_narrow_jump_is_not_taken():
    """A sharp component at the bound of `reg_covar`: its variance never falls below it."""
    x = torch.cat([torch.zeros(40, 1, dtype=torch.float64), samples(200)[:, :1]])
    found = fit(x, 2, reg_covar=1e-3, generator=seeded())
    assert float(found.parameters.covariances.min()) >= 1e-3 * (1 - 1e-6)


# --- several at once -------------------------------------------------------------------------------------------------


def _several(kind):
    """Return three mixtures: an ordinary one, one whose third component is empty, and one of narrow components."""
    narrow = _framed(kind)
    narrow = dataclasses.replace(narrow, precisions_cholesky=3e3 * narrow.precisions_cholesky)
    return [SmallMixture.of(one) for one in (_framed(kind), _framed(kind, (0.4, 0.6, 0.0)), narrow)]


@every_type
@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_of_several_is_that_of_each(kind, weighted):
    sample_weight = torch.rand(300, generator=seeded(2), dtype=torch.float64) if weighted else None
    _, small = _small(kind, samples(300), sample_weight, ridge=1e-3)
    mixtures = _several(kind)
    positions, values, errors = small.em_of_several(SmallMixture.stack(mixtures))
    for i, one in enumerate(mixtures):
        moved, value = small.em(one)
        found = one.at(positions[i])
        np.testing.assert_allclose(found.means, moved.means, atol=1e-10)
        np.testing.assert_allclose(found.factor, moved.factor, rtol=1e-9, atol=1e-9)
        assert values[i] == pytest.approx(value, rel=1e-12)
        assert errors[i] == pytest.approx(small.error(one), rel=1e-12)


@every_type
def test_a_singular_covariance_among_several_is_no_number(kind):
    x = samples(60)
    x[:20] = x[0]
    _, small = _small(kind, x)
    spiked = _framed(kind)
    z = next(small._prepared.chunks())[0][:, 0]
    spiked.means[0] = z
    wide = 1 if kind == "tied" else torch.tensor([1e2, 1.0, 1.0]).view(-1, *[1] * (spiked.precisions_cholesky.ndim - 1))
    spiked = dataclasses.replace(spiked, precisions_cholesky=wide * spiked.precisions_cholesky)
    mixtures = [SmallMixture.of(one) for one in (_framed(kind), spiked)]
    for _ in range(30):
        positions, values, _ = small.em_of_several(SmallMixture.stack(mixtures))
        if np.isnan(positions[1]).any():
            break
        mixtures = [one.at(position) for one, position in zip(mixtures, positions, strict=True)]
    assert np.isfinite(positions[0]).all()
    assert np.isfinite(values[0])
    if kind != "tied":
        assert np.isnan(positions[1]).all()
        with pytest.raises(ValueError, match="positive definite"):
            small.em(mixtures[1])


@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("accelerate", ["squarem", "anderson"])
def test_fits_side_by_side_are_those_alone(kind, dtype, accelerate):
    x = samples(300).to(dtype)
    data = prepare(x, kind, 3)
    settings = {"covariance_type": kind, "reg_covar": 1e-6}
    starts = choose_starts(x, None, 3, 5, init="random_from_data", generator=seeded(1), **settings)
    options = ClimbOptions(accelerate=accelerate, tol=1e-6, max_iter=100)
    limits = [100, 3, 100, 0, 100]
    engine = GaussianEngine(data, 1e-6, None)
    taken = [options.max_iter - limit for limit in limits]
    found = engine.climb_side_by_side(list(zip(starts, taken, strict=True)), options)
    for first, limit, one in zip(starts, limits, found, strict=True):
        only = dataclasses.replace(options, max_iter=limit)
        alone = engine.climb(first, only)
        # Rounding, which jumps multiply, may decide the last evaluations.
        assert abs(one.n_iter - alone.n_iter) <= (8 if dtype == torch.float32 else 3)
        assert one.log_likelihood == pytest.approx(alone.log_likelihood, abs=1e-9 if dtype == torch.float64 else 2e-6)
        assert one.history[0] == pytest.approx(alone.history[0], abs=1e-9)
        if dtype == torch.float64:
            assert difference(one.parameters, alone.parameters) < 1e-5
            assert one.converged == alone.converged


def test_large_data_listeners_and_priors_leave_fits_to_themselves():
    x = samples(300)
    settings = {"covariance_type": "full", "reg_covar": 1e-6}
    starts = choose_starts(x, None, 3, 2, init="kmeans", generator=seeded(), **settings)
    options = ClimbOptions(accelerate="anderson", tol=1e-6, max_iter=5)
    points, engine = [(first, 0) for first in starts], GaussianEngine(prepare(x, "full", 3), 1e-6, None)
    assert None not in engine.climb_side_by_side(points, options)
    listened = dataclasses.replace(options, callback=lambda *_: None)
    assert engine.climb_side_by_side(points, listened) == [None, None]
    assert engine.climb_side_by_side(points[:1], options) == [None]
    large = dataclasses.replace(engine, prepared=prepare(x.repeat(9, 1), "full", 3))
    assert large.climb_side_by_side(points, options) == [None, None]
    assert dataclasses.replace(engine, prior=object()).climb_side_by_side(points, options) == [None, None]


@every_type
def test_several_starts_are_the_best_of_fits_alone(kind):
    x = samples(200)
    options = {"covariance_type": kind, "init_params": "random_from_data", "random_state": 3, "n_init": 6}
    together = GaussianMixture(3, **options).fit(x)
    told = []
    alone = GaussianMixture(3, callback=lambda *step: told.append(step), **options).fit(x)  # one after the other
    assert told
    assert together.lower_bound_ == pytest.approx(alone.lower_bound_, abs=1e-9)
    torch.testing.assert_close(together.means_, alone.means_, atol=1e-5, rtol=0)
    assert together.converged_ == alone.converged_
    assert abs(together.n_iter_ - alone.n_iter_) <= 3


def test_only_one_chunk_in_memory_is_small():
    x, full = samples(300), structure_of("full")
    assert is_small(prepare(x, "full", 3), full, 3)
    assert not is_small(prepare(x, "full", 3, cache=False), full, 3)
    assert not is_small(prepare(x.repeat(400, 1), "full", 3), full, 3)
    assert not is_small(prepare(x, "full", 3), full, 300)


def test_the_start_is_not_changed():
    first = _framed("full")
    kept = first.means.clone(), first.precisions_cholesky.clone()
    fit(samples(300), 3, init=first)
    assert torch.equal(first.means, kept[0])
    assert torch.equal(first.precisions_cholesky, kept[1])
