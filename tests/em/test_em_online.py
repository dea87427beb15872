"""Online and incremental EM: one batch is one EM step, the free energy never falls, offsets cost nothing."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_em import (
    COVARIANCE_TYPES,
    F64,
    difference,
    every_type,
    mixture,
    samples,
)
from torch import Tensor
from values import seeded

from toolkit.em import GaussianParameters, e_step, em_step, log_likelihood, m_step, start
from toolkit.em.engine import samples as samples_module
from toolkit.em.models.online import (
    IncrementalState,
    OnlineState,
    Statistics,
    incremental_start,
    incremental_step,
    online_start,
    online_step,
)
from toolkit.em.models.prior import Prior


def by_definition(x: Tensor, responsibilities: Tensor, kind: str) -> Statistics:
    """Return the statistics of samples as they are written in a book."""
    counts = responsibilities.sum(0)
    means = responsibilities.mT @ x / counts[:, None]
    differences = x[:, None] - means
    full = torch.einsum("nk,nki,nkj->kij", responsibilities, differences, differences)
    scatter = {
        "full": full,
        "tied": full.sum(0),
        "diag": full.diagonal(dim1=1, dim2=2),
        "spherical": full.diagonal(dim1=1, dim2=2).sum(1),
    }[kind]
    return Statistics(counts=counts, means=means, scatter=scatter, covariance_type=kind)


def assert_same(one: Statistics, other: Statistics, rtol: float = 1e-12) -> None:
    for name in ("counts", "means", "scatter"):
        assert torch.allclose(getattr(one, name), getattr(other, name), rtol=rtol, atol=1e-13), name


def run(state: OnlineState, x: Tensor, size: int, weights: Tensor | None = None) -> OnlineState:
    for i in range(0, len(x), size):
        state = online_step(state, x[i : i + size], sample_weight=None if weights is None else weights[i : i + size])
    return state


# --- statistics ------------------------------------------------------------------------------------------------------


@every_type
def test_merged_statistics_are_those_of_all_samples(kind):
    x, r = samples(50, 3, 3), e_step(mixture(kind), samples(50, 3, 3))[0]
    parts = [by_definition(x[a:b], r[a:b], kind) for a, b in ((0, 7), (7, 40), (40, 50))]
    assert_same(parts[0].merged(parts[1]).merged(parts[2]), by_definition(x, r, kind))
    assert_same(parts[0].scaled(3).merged(parts[1]), parts[0].merged(parts[1]).merged(parts[0]).merged(parts[0]))


@every_type
def test_m_step_of_statistics(kind):
    x, before = samples(), mixture(kind)
    r = e_step(before, x)[0]
    found = by_definition(x, r, kind).maximise(reg_covar=1e-3)
    assert difference(found, m_step(x, r, covariance_type=kind, reg_covar=1e-3)) < 1e-12


@every_type
def test_statistics_of_parameters_give_them_back(kind):
    there = mixture(kind)
    statistics = Statistics.implied_by(there)
    assert math.isclose(statistics.counts.sum(), 1.0, rel_tol=1e-14)
    assert difference(statistics.maximise(), there) < 1e-12


@every_type
def test_expected_log_joint_is_the_sum_over_the_samples(kind):
    x, r, there = samples(), e_step(mixture(kind, seed=3), samples())[0], mixture(kind)
    found = by_definition(x, r, kind).expected_log_joint(there)
    assert math.isclose(found, (r * there.log_joint(x)).sum(), rel_tol=1e-12)


@every_type
def test_a_component_without_samples_is_merged_as_nothing(kind):
    x = samples()
    whole = by_definition(x, torch.tensor([[0.4, 0.6, 0.0]], dtype=F64).expand(60, 3).clone(), kind)
    nothing = dataclasses.replace(whole, means=torch.where(whole.means.isnan(), 7.0, whole.means))
    scatter = torch.where(nothing.scatter.isnan(), 0.0, nothing.scatter)
    if kind == "tied":
        scatter = by_definition(x, torch.tensor([[0.4, 0.6]], dtype=F64).expand(60, 2).clone(), kind).scatter
    nothing = dataclasses.replace(nothing, scatter=scatter)
    other = by_definition(x, torch.tensor([[0.2, 0.3, 0.5]], dtype=F64).expand(60, 3).clone(), kind)
    for merged in (nothing.merged(other), other.merged(nothing)):
        assert torch.allclose(merged.means[2], other.means[2], rtol=1e-14)
        assert all(value.isfinite().all() for value in (merged.counts, merged.means, merged.scatter))
    assert nothing.expected_log_joint(mixture(kind)).isfinite()


# --- online EM -------------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
def test_first_batch_without_offset_is_one_em_step(exponent, weighted, kind):
    x, before = samples(200), mixture(kind)
    w = 0.1 + torch.rand(200, generator=seeded(2), dtype=F64) if weighted else torch.ones(200, dtype=F64)
    state = online_start(before, exponent=exponent, offset=0, reg_covar=1e-3)
    after = online_step(state, x, sample_weight=w if weighted else None)
    responsibilities, value = e_step(before, x, w)
    plain = m_step(x, responsibilities * w[:, None], covariance_type=kind, reg_covar=1e-3)
    assert difference(after.parameters, plain) < 1e-12
    assert math.isclose(after.log_likelihood, value, rel_tol=1e-12)
    assert math.isclose(after.total_weight, w.sum(), rel_tol=1e-12)


@every_type
def test_steps_by_definition(kind):
    # The recursion in raw moments, as it is published.
    x, before = samples(150), mixture(kind)
    state, now = online_start(before, exponent=0.7, offset=1.5, reg_covar=0), before
    d, weights = 3, before.weights
    dense = {
        "full": lambda p: p.covariances,
        "tied": lambda p: p.covariances.expand(3, 3, 3),
        "diag": lambda p: torch.diag_embed(p.covariances),
        "spherical": lambda p: p.covariances[:, None, None] * torch.eye(3, dtype=F64),
    }[kind]
    outer = before.means[:, :, None] * before.means[:, None]
    s = [weights, weights[:, None] * before.means, weights[:, None, None] * (dense(before) + outer)]
    for t, batch in enumerate(x.split(30), 1):
        state = online_step(state, batch)
        r = e_step(now, batch)[0]
        new = [r.mean(0), r.mT @ batch / 30, torch.einsum("nk,ni,nj->kij", r, batch, batch) / 30]
        gamma = (t + 1.5) ** -0.7
        s = [(1 - gamma) * old + gamma * fresh for old, fresh in zip(s, new, strict=True)]
        means = s[1] / s[0][:, None]
        covariances = s[2] / s[0][:, None, None] - means[:, :, None] * means[:, None]
        covariances = {
            "full": lambda c=covariances: c,
            "tied": lambda c=covariances, w=s[0]: torch.einsum("k,kij->ij", w, c),
            "diag": lambda c=covariances: c.diagonal(dim1=1, dim2=2),
            "spherical": lambda c=covariances: c.diagonal(dim1=1, dim2=2).mean(1),
        }[kind]()
        now = GaussianParameters.from_covariances(
            weights=s[0], means=means, covariances=covariances, covariance_type=kind
        )
        assert difference(state.parameters, now) < 1e-9, d
    assert (state.n_steps, state.total_weight) == (5, 150.0)


@every_type
def test_weights_are_repetitions(kind):
    x, before = samples(90), mixture(kind)
    w = torch.arange(90) % 3
    state = run(online_start(before), x, 30, w.to(F64))
    again = run(online_start(before), x.repeat_interleave(w, 0), 30)
    assert state.total_weight == again.total_weight == 90
    assert difference(state.parameters, again.parameters) < 1e-11
    scaled = run(online_start(before), x, 30, 2.5 * w)
    assert difference(state.parameters, scaled.parameters) < 1e-11


def test_a_small_batch_counts_less_and_an_empty_one_nothing():
    x, before = samples(400), mixture("full")
    state = run(online_start(before), x, 100)
    assert online_step(state, x[:0]) is state
    assert online_step(state, x[:9], sample_weight=torch.zeros(9, dtype=F64)) is state
    far = x[:1] + 30.0
    moved = online_step(state, far)
    rho = 5 / 401  # its weight over the average of five batches
    gamma = 1 - (1 - 6**-0.6) ** rho
    assert moved.statistics.counts.sum() == pytest.approx(1.0)
    mean = (state.statistics.counts[:, None] * state.statistics.means).sum(0)
    expected = (1 - gamma) * mean + gamma * far[0]
    assert torch.allclose((moved.statistics.counts[:, None] * moved.statistics.means).sum(0), expected)


@every_type
@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_offset_costs_nothing(offset, kind):
    x = (samples(400, 3, 2) * 2**20).round() / 2**20
    first = mixture(kind, 3, 2)
    first = dataclasses.replace(first, means=(first.means * 2**20).round() / 2**20)
    moved = dataclasses.replace(first, means=first.means + offset)
    here, there = run(online_start(first), x, 40), run(online_start(moved), x + offset, 40)
    assert torch.allclose(there.parameters.means - offset, here.parameters.means, rtol=0, atol=1e-14 * offset)
    assert torch.allclose(there.parameters.covariances, here.parameters.covariances, rtol=1e-9, atol=1e-9)
    assert abs(here.log_likelihood - there.log_likelihood) < 1e-8


@every_type
def test_however_a_batch_is_chunked(kind, monkeypatch):
    x, before = samples(3000), mixture(kind)
    whole = run(online_start(before), x, 1500)
    monkeypatch.setattr(samples_module, "_CHUNK_BYTES", {"cpu": 1})
    cut = run(online_start(before), x, 1500)
    assert difference(whole.parameters, cut.parameters) < 1e-11
    assert math.isclose(whole.log_likelihood, cut.log_likelihood, rel_tol=1e-12)


@every_type
def test_averaging(kind):
    x, before = samples(300), mixture(kind)
    state, seen = online_start(before, average_from=4), []
    for batch in x.split(30):
        state = online_step(state, batch)
        seen.append(state.parameters)
        if len(seen) <= 4:
            assert state.averaged is None
            assert state.estimate is state.parameters
    assert state.n_averaged == 6
    for name in ("weights", "means", "covariances"):
        expected = torch.stack([getattr(one, name) for one in seen[4:]]).mean(0)
        assert torch.allclose(getattr(state.estimate, name), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_averaging_takes_the_noise_away():
    # One component, whose maximum is known: the mean of the stream.
    errors = {"last": 0.0, "averaged": 0.0}
    for seed in range(10):
        x = torch.randn(4000, 1, generator=seeded(seed), dtype=F64)
        one = GaussianParameters.from_covariances(
            weights=torch.ones(1, dtype=F64),
            means=torch.ones(1, 1, dtype=F64),
            covariances=torch.ones(1, dtype=F64),
            covariance_type="spherical",
        )
        state = run(online_start(one, average_from=50), x, 20)
        errors["last"] += float(state.parameters.means.square())
        errors["averaged"] += float(state.estimate.means.square())
    assert errors["averaged"] < 0.5 * errors["last"]


def test_burn_in_keeps_the_parameters_while_the_statistics_move():
    x, before = samples(200), mixture("full")
    state = run(online_start(before, burn_in=150), x[:120], 40)
    assert difference(state.parameters, before) == 0
    assert (state.statistics.means - before.means).abs().max() > 0.01
    state = online_step(state, x[120:160])
    assert difference(state.parameters, before) > 0.01


@pytest.mark.slow
@every_type
def test_one_sample_at_a_time(kind):
    x, before = samples(600, 2, 2), mixture(kind, 2, 2)
    state = run(online_start(before, burn_in=40), x, 1)
    batch = before
    for _ in range(5):
        batch, value = em_step(batch, x, reg_covar=1e-6)
    assert log_likelihood(state.parameters, x) > value - 0.05
    assert log_likelihood(state.parameters, x) > log_likelihood(before, x) + 0.2


@pytest.mark.parametrize("seed", range(1, 4))
def test_one_pass_is_worth_many_batch_passes(seed):
    """Of 12 seeds all do: by 0.008 nats at least, 0.1 in the median."""
    x = samples(20000, 4, 5, seed)
    x = x[torch.randperm(len(x), generator=seeded())]
    first = start(x[:1000], 5, covariance_type="full", generator=seeded())
    state = run(online_start(first), x, 250)
    online, batch, values = float(log_likelihood(state.parameters, x)), first, []
    for _ in range(8):
        batch, value = em_step(batch, x, reg_covar=1e-6)
        values.append(float(value))
    assert online > values[-1]
    assert online > values[0] + 0.1


def test_a_least_step_follows_a_drift():
    g = seeded(1)
    before = GaussianParameters.from_covariances(
        weights=torch.tensor([0.5, 0.5], dtype=F64),
        means=torch.tensor([[0.0], [10.0]], dtype=F64),
        covariances=torch.ones(2, dtype=F64),
        covariance_type="spherical",
    )
    drifting = online_start(before, least_step=0.2)
    steady = online_start(before, exponent=1.0)
    for t in range(200):
        labels = torch.randint(2, (50, 1), generator=g)
        batch = 10.0 * labels + 0.05 * t + torch.randn(50, 1, generator=g, dtype=F64)
        drifting, steady = online_step(drifting, batch), online_step(steady, batch)
    truth = torch.tensor([[10.0], [20.0]], dtype=F64)
    assert (drifting.parameters.means - truth).abs().max() < 0.7
    assert (steady.parameters.means - truth).abs().max() > 3


@every_type
def test_with_a_prior(kind):
    x, before = samples(200), mixture(kind)
    prior = Prior.default(x, 3, kind)
    after = online_step(online_start(before, offset=0, prior=prior, reg_covar=0), x).parameters
    r = e_step(before, x)[0]
    statistics = by_definition(x, r, kind)
    weights, means, covariances = prior.maximise(statistics.counts, statistics.means, statistics.scatter, kind)
    assert torch.allclose(after.weights, weights, rtol=1e-12)
    assert torch.allclose(after.means, means, rtol=1e-11)
    assert torch.allclose(after.covariances, covariances, rtol=1e-10, atol=1e-13)


def test_prior_fades_as_samples_come():
    x = samples(3000, 2, 1)
    prior = dataclasses.replace(Prior.default(x, 1, "full"), mean=torch.full((2,), 100.0, dtype=F64), shrinkage=5.0)
    state = online_start(mixture("full", 2, 1), prior=prior)
    early = online_step(state, x[:30]).parameters.means
    late = run(state, x, 30).parameters.means
    assert (early > 5).all()
    assert (late < 1.5 + x.mean(0)).all()


def test_single_precision():
    x, before = samples(400), mixture("full")
    single = run(online_start(before.to(torch.float32)), x.float(), 50)
    double = run(online_start(before), x, 50)
    assert single.parameters.means.dtype == F64
    assert torch.allclose(single.parameters.means, double.parameters.means, atol=1e-4)


def test_a_state_is_not_changed_by_its_steps():
    x, state = samples(100), online_start(mixture("full"))
    kept = [value.clone() for value in (state.statistics.means, state.statistics.scatter, state.parameters.means)]
    one, other = online_step(state, x), online_step(state, x)
    assert difference(one.parameters, other.parameters) == 0
    for value, before in zip(
        (state.statistics.means, state.statistics.scatter, state.parameters.means), kept, strict=True
    ):
        assert torch.equal(value, before)
    assert math.isnan(state.log_likelihood)


# --- incremental EM --------------------------------------------------------------------------------------------------


@every_type
def test_one_batch_is_one_em_step(kind):
    x, before = samples(200), mixture(kind)
    state = incremental_step(incremental_start(before, reg_covar=1e-3), 0, x)
    assert difference(state.parameters, m_step(x, e_step(before, x)[0], covariance_type=kind, reg_covar=1e-3)) < 1e-12


def free_energy_by_definition(after: GaussianParameters, parts: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Return expected complete-data log-likelihood plus entropy, from (samples, weights, responsibilities)."""
    total, weight = 0.0, 0.0
    for x, w, r in parts:
        terms = r * after.log_joint(x) + torch.special.entr(r)
        total += float((w[:, None] * terms).sum())
        weight += float(w.sum())
    return total / weight


@every_type
def test_free_energy_by_definition(kind):
    x, state = samples(180), incremental_start(mixture(kind))
    w = 0.1 + torch.rand(180, generator=seeded(2), dtype=F64)
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for i in (0, 1, 2, 1, 0):
        rows = slice(60 * i, 60 * i + 60)
        parts[i] = (x[rows], w[rows], e_step(state.parameters, x[rows])[0])
        state = incremental_step(state, i, x[rows], sample_weight=w[rows])
        expected = free_energy_by_definition(state.parameters, list(parts.values()))
        assert math.isclose(state.free_energy, expected, rel_tol=1e-11)
    assert math.isclose(state.total_weight, w.sum(), rel_tol=1e-12)
    assert state.free_energy < log_likelihood(state.parameters, x, w)
    prior = Prior.default(x, 3, kind)
    believing = incremental_step(incremental_start(mixture(kind), prior=prior), 0, x)
    expected = free_energy_by_definition(
        believing.parameters, [(x, torch.ones(180, dtype=F64), e_step(mixture(kind), x)[0])]
    )
    expected += float(prior.log_density(believing.parameters)) / 180
    assert math.isclose(believing.free_energy, expected, rel_tol=1e-11)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(COVARIANCE_TYPES),
    d=st.integers(1, 4),
    k=st.integers(1, 4),
    with_prior=st.booleans(),
)
def test_free_energy_never_falls(seed, kind, d, k, with_prior):
    x = samples(80, d, k, seed)
    prior = Prior.default(x, k, kind) if with_prior else None
    state, batches = incremental_start(mixture(kind, d, k, seed), prior=prior), x.split(17)
    values: list[float] = []
    for _ in range(4):
        for key, batch in enumerate(batches):
            try:
                state = incremental_step(state, key, batch)
            except ValueError:  # a spike: the likelihood has no upper bound
                assert prior is None
                return
            if len(state.batches) == len(batches):
                values.append(state.free_energy)
    assert all(after >= before - 1e-9 for before, after in pairwise(values))


@pytest.mark.slow
@every_type
def test_incremental_em_arrives_where_em_does(kind):
    x = samples(200, 2, 2, seed=3)
    state: IncrementalState = incremental_start(start(x, 2, covariance_type=kind, generator=seeded()))
    for _ in range(150):
        for key, batch in enumerate(x.split(70)):
            state = incremental_step(state, key, batch)
    again, value = em_step(state.parameters, x)
    assert difference(again, state.parameters) < 1e-4
    assert math.isclose(state.free_energy, value, abs_tol=1e-7)


@pytest.mark.parametrize("seed", range(1, 5))
def test_incremental_em_is_faster_per_pass(seed):
    """Of 12 seeds all are: by 0.07 nats in the median, and where both have arrived by nothing."""
    x = samples(2000, 3, 3, seed)
    first = start(x, 3, covariance_type="full", init="random_from_data", generator=seeded())
    state, batch = incremental_start(first), first
    for _ in range(5):
        for key, part in enumerate(x.split(200)):
            state = incremental_step(state, key, part)
        batch, _ = em_step(batch, x)
    assert log_likelihood(state.parameters, x) > log_likelihood(batch, x) + 0.01


def test_burn_in_waits_for_enough_samples():
    x, before = samples(90), mixture("full")
    state = incremental_start(before, burn_in=80)
    for key, batch in enumerate(x.split(10)[:7]):
        state = incremental_step(state, key, batch)
        assert difference(state.parameters, before) == 0
    assert math.isclose(state.free_energy, log_likelihood(before, x[:70]), rel_tol=1e-12)
    state = incremental_step(state, 7, x[70:80])
    assert difference(state.parameters, em_step(before, x[:80])[0]) < 1e-11


def test_batches_of_no_weight_are_left_out():
    state = incremental_start(mixture("full"))
    assert incremental_step(state, 0, samples(9)[:0]) is state
    assert incremental_step(state, 0, samples(9), sample_weight=torch.zeros(9, dtype=F64)) is state


# --- refusals --------------------------------------------------------------------------------------------------------

X = samples()
BAD = {
    "nan": (X.index_fill(0, torch.tensor([7]), math.nan), None, ValueError, r"`x` should be finite.*row 7"),
    "integers": (X.long(), None, TypeError, r"`x` should be a float32 or float64 tensor. Found torch.int64."),
    "numpy": (X.numpy(), None, TypeError, r"Found ndarray"),
    "features": (X[:, :2], None, ValueError, r"`x` should have shape \(N, 3\). Found \(60, 2\)."),
    "vector": (X[0], None, ValueError, r"`x` should have shape \(N, 3\). Found \(3,\)."),
    "weights": (X, torch.ones(59), ValueError, r"`sample_weight` should have shape \(60,\). Found \(59,\)."),
    "negative": (X, -torch.ones(60), ValueError, r"`sample_weight` should be finite and not negative"),
    "not finite": (X, torch.full((60,), math.inf), ValueError, r"`sample_weight` should be finite"),
    "list": (X, [1.0] * 60, TypeError, r"`sample_weight` should be a tensor or None. Found list."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches(name):
    x, weights, error, message = BAD[name]
    with pytest.raises(error, match=message):
        online_step(online_start(mixture("full")), x, sample_weight=weights)
    with pytest.raises(error, match=message):
        incremental_step(incremental_start(mixture("full")), 0, x, sample_weight=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exponent": 1.5}, r"`exponent` should be from 0 to 1. Found 1.5."),
        ({"least_step": -0.1}, r"`least_step` should be from 0 to 1. Found -0.1."),
        ({"exponent": math.nan}, r"`exponent` should be from 0 to 1. Found nan."),
        ({"offset": -1.0}, r"`offset` should be finite and not negative. Found -1.0."),
        ({"burn_in": math.inf}, r"`burn_in` should be finite and not negative. Found inf."),
        ({"reg_covar": -1.0}, r"`reg_covar` should be finite and not negative. Found -1.0."),
        ({"average_from": -1}, r"`average_from` should be an integer from 0. Found -1."),
        ({"average_from": 1.5}, r"`average_from` should be an integer from 0. Found 1.5."),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        online_start(mixture("full"), **options)


def test_bad_options_of_incremental_em():
    with pytest.raises(ValueError, match=r"`reg_covar` should be finite and not negative. Found nan."):
        incremental_start(mixture("full"), reg_covar=math.nan)
    with pytest.raises(ValueError, match=r"`burn_in` should be finite and not negative. Found -1."):
        incremental_start(mixture("full"), burn_in=-1)


def test_a_component_that_collapses_is_named():
    state = online_start(mixture("full", 3, 1), offset=0, reg_covar=0)
    with pytest.raises(ValueError, match="positive definite"):
        online_step(state, X[:1].expand(20, 3))
