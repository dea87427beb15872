"""The estimators on tensors, weights, chunks, missing values and hostile input, and their lines of progress."""

import io
import itertools
import math
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from scipy import sparse, stats
from sklearn import datasets as bundled
from sklearn.exceptions import ConvergenceWarning
from test_em_engine import far_and_narrow
from torch.utils.data import DataLoader, TensorDataset
from values import Frame, seeded

import toolkit
from toolkit._data import choose, generator_of
from toolkit._progress import Progress
from toolkit.em import COVARIANCE_TYPES, GaussianHMM, GaussianParameters, e_step, fit, log_likelihood
from toolkit.em.engine.ascent import collapsed_components
from toolkit.em.estimators import _density as density
from toolkit.em.estimators.base_mixture import BaseMixture
from toolkit.em.estimators.mixture import CollapseWarning, GaussianMixture
from toolkit.em.models.parsimonious import COVARIANCE_MODELS, n_free_parameters
from toolkit.em.models.prior import Prior

every_type = pytest.mark.parametrize("kind", COVARIANCE_TYPES)
ATTRIBUTES = ["weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_"]


def clusters(n=200, d=3, k=3, spread=3.0, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.choice(k, n, p=np.arange(1, k + 1) / (k * (k + 1) / 2))
    centres = spread * rng.standard_normal((k, d))
    mixing = 0.6 * rng.standard_normal((k, d, d)) + np.eye(d)
    return centres[labels] + np.einsum("nij,nj->ni", mixing[labels], rng.standard_normal((n, d)))


def given(x, k=3):
    """Return a start that does not depend on how the samples are handed in."""
    return {"means_init": x[:k], "weights_init": np.full(k, 1 / k)}


# --- arrays and tensors ------------------------------------------------------------------------------------------


@every_type
def test_tensor_is_fitted_as_the_array_is(kind):
    x = clusters()
    array = GaussianMixture(3, covariance_type=kind, random_state=0).fit(x)
    tensor = GaussianMixture(3, covariance_type=kind, random_state=0).fit(torch.from_numpy(x))
    for name in ATTRIBUTES:
        assert isinstance(getattr(array, name), np.ndarray)
        assert isinstance(getattr(tensor, name), torch.Tensor)
        assert np.array_equal(getattr(array, name), getattr(tensor, name).numpy()), name
    for method in ("predict", "predict_proba", "score_samples"):
        of_array, of_tensor = getattr(array, method)(x), getattr(tensor, method)(torch.from_numpy(x))
        assert isinstance(of_tensor, torch.Tensor)
        assert np.array_equal(of_array, of_tensor.numpy())
        # The form of an answer is that of the question.
        assert isinstance(getattr(tensor, method)(x), np.ndarray)
    assert array.score(x) == tensor.score(torch.from_numpy(x)) == tensor.score(x)
    assert np.array_equal(array.sample(9)[0], tensor.sample(9)[0].numpy())


@every_type
@pytest.mark.parametrize("as_tensor", [False, True], ids=["array", "tensor"])
@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [("float32", "float32"), ("float64", "float64"), ("int64", "float64"), ("float16", "float64"), ("bool", "float64")],
)
def test_type_is_kept_and_integers_become_float64(kind, as_tensor, given_dtype, expected):
    x = (np.round(4 * clusters(60)) > 0 if given_dtype == "bool" else np.round(4 * clusters(60))).astype(given_dtype)
    if as_tensor:
        x = torch.from_numpy(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (CollapseWarning, ConvergenceWarning))
        found = GaussianMixture(2, covariance_type=kind, random_state=0, max_iter=5, reg_covar=0.1).fit(x)
    for name in ATTRIBUTES:
        assert str(getattr(found, name).dtype).removeprefix("torch.") == expected
    assert str(found.score_samples(x).dtype).removeprefix("torch.") == expected
    assert str(found.predict(x).dtype).removeprefix("torch.") == "int64"
    assert str(found.sample(3)[0].dtype).removeprefix("torch.") == expected


@every_type
def test_float32_is_as_good_as_its_digits(kind):
    x = clusters() + 1000.0
    single = GaussianMixture(3, covariance_type=kind, random_state=0, **given(x)).fit(x.astype(np.float32))
    double = GaussianMixture(3, covariance_type=kind, random_state=0, **given(x)).fit(x)
    assert abs(single.lower_bound_ - double.lower_bound_) < 2e-4
    assert (single.predict(x) == double.predict(x)).mean() > 0.99


@every_type
@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_offset_of_the_samples_changes_nothing_else(kind, offset):
    x = np.round(clusters() * 2**10) / 2**10
    here = GaussianMixture(3, covariance_type=kind, reg_covar=0, random_state=0).fit(x)
    there = GaussianMixture(3, covariance_type=kind, reg_covar=0, random_state=0).fit(x + offset)
    assert abs(here.lower_bound_ - there.lower_bound_) < 1e-9
    assert np.allclose(here.means_, there.means_ - offset, atol=1e-5)


def test_gradient_and_thread_of_the_samples_are_left_alone():
    x = torch.from_numpy(clusters()).requires_grad_()
    before = x.detach().clone()
    found = GaussianMixture(2, random_state=0).fit(x)
    assert x.grad is None
    assert torch.equal(x, before)
    assert not any(getattr(found, name).requires_grad for name in ATTRIBUTES)
    assert not found.score_samples(x).requires_grad


def test_a_tensor_with_a_pending_sign_is_read():
    x = torch.from_numpy(clusters())
    pending = torch.complex(x, -x).conj().imag
    assert pending.is_neg()
    mixture = GaussianMixture(2, random_state=0).fit(x)
    assert torch.equal(mixture.predict(pending), mixture.predict(x))


def test_attributes_share_no_memory():
    x = clusters()
    found = GaussianMixture(2, covariance_type="diag", random_state=0, weights_init=[0.5, 0.5]).fit(x)
    before = found.score(x)
    found.covariances_[:] = 0.0
    found.precisions_[:] = 0.0
    assert found.score(x) == before


def test_given_start_shares_no_memory_with_the_attributes():
    x, means = torch.from_numpy(clusters()), torch.eye(3, dtype=torch.float64)[:2]
    before = means.clone()
    found = GaussianMixture(2, max_iter=0, means_init=means).fit(x)
    assert torch.equal(found.means_, means)
    found.means_.zero_()
    assert torch.equal(means, before)


@pytest.mark.gpu
@every_type
def test_device_is_kept(kind):
    x = clusters()
    there = GaussianMixture(3, covariance_type=kind, random_state=0, **given(x)).fit(
        torch.from_numpy(x).to(ACCELERATOR)
    )
    here = GaussianMixture(3, covariance_type=kind, random_state=0, **given(x)).fit(x)
    assert all(getattr(there, name).device.type == ACCELERATOR for name in ATTRIBUTES)
    assert there.predict(torch.from_numpy(x).to(ACCELERATOR)).device.type == ACCELERATOR
    assert abs(there.lower_bound_ - here.lower_bound_) < 1e-9
    assert there.sample(5)[0].device.type == ACCELERATOR


def test_many_samples_are_answered_in_batches(monkeypatch):
    x = clusters()
    found = GaussianMixture(3, random_state=0).fit(x)
    whole = found.predict_proba(x), found.score_samples(x), found.bic(x), found.icl(x)
    monkeypatch.setattr("toolkit.em.estimators.base_mixture._BATCH", 64)
    parts = found.predict_proba(x), found.score_samples(x), found.bic(x), found.icl(x)
    assert all(np.allclose(a, b, rtol=1e-13) for a, b in zip(whole, parts, strict=True))


# --- randomness --------------------------------------------------------------------------------------------------


def test_seed_decides_and_torchs_own_generator_is_left_alone():
    x = clusters()
    before = torch.random.get_rng_state()
    one, two, other = (
        GaussianMixture(3, init_params="random_from_data", max_iter=0, random_state=seed).fit(x).means_
        for seed in (1, 1, 2)
    )
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)
    GaussianMixture(3).fit(x).sample(5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_a_seed_numpys_global_state_decides():
    x = clusters()

    def means():
        return GaussianMixture(3, init_params="random_from_data", max_iter=0).fit(x).means_

    np.random.seed(5)  # noqa: NPY002 - what users of scikit-learn do
    one, two = means(), means()
    np.random.seed(5)  # noqa: NPY002 - what users of scikit-learn do
    again = means()
    assert np.array_equal(one, again)
    assert not np.array_equal(one, two)


def test_states_go_on():
    x = clusters()
    for state in (np.random.RandomState(0), torch.Generator().manual_seed(0)):
        found = GaussianMixture(3, init_params="random_from_data", max_iter=0, random_state=state)
        assert not np.array_equal(found.fit(x).means_, found.fit(x).means_)
    assert generator_of(np.int64(3)).initial_seed() == 3


@pytest.mark.parametrize("state", [-1, 1.5, "0", True, np.random.default_rng(0)], ids=str)
def test_random_state_that_is_none(state):
    with pytest.raises(ValueError, match="`random_state` should be an integer from 0"):
        GaussianMixture(random_state=state).fit(clusters())


# --- weights -----------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("start", ["given", "random"])
def test_weight_is_how_often_a_sample_counts(kind, start):
    x = clusters(80)
    weights = np.random.default_rng(1).integers(0, 4, len(x))
    options = {"covariance_type": kind, "random_state": 0, "tol": 1e-12, **(given(x) if start == "given" else {})}
    k = 3 if start == "given" else 1
    weighed = GaussianMixture(k, **options).fit(x, sample_weight=weights)
    repeated = GaussianMixture(k, **options).fit(np.repeat(x, weights, axis=0))
    assert math.isclose(weighed.lower_bound_, repeated.lower_bound_, rel_tol=1e-12)
    assert np.allclose(weighed.means_, repeated.means_, rtol=1e-5)
    assert np.allclose(weighed.covariances_, repeated.covariances_, rtol=1e-5, atol=1e-6)
    for criterion in ("score", "aic", "bic", "icl"):
        arguments = {"y": None} if criterion == "score" else {}
        of_weighed = getattr(weighed, criterion)(x, sample_weight=weights, **arguments)
        assert math.isclose(of_weighed, getattr(repeated, criterion)(np.repeat(x, weights, axis=0)), rel_tol=1e-7)


@pytest.mark.portable
@every_type
def test_scale_of_the_weights_and_samples_without_any_do_not_matter(kind):
    x = clusters(80)
    weights = np.random.default_rng(1).uniform(0.1, 2.0, len(x))
    weights[::7] = 0.0
    options = {"covariance_type": kind, "random_state": 0}
    one = GaussianMixture(2, **options).fit(x, sample_weight=weights)
    thousand = GaussianMixture(2, **options).fit(x, sample_weight=1000 * weights)
    without = GaussianMixture(2, **options).fit(x[weights > 0], sample_weight=weights[weights > 0])
    assert np.array_equal(one.means_, without.means_)  # they are left out before anything is added up
    assert abs(one.lower_bound_ - thousand.lower_bound_) < one.tol
    # Jumps multiply rounding errors, which may end the fit a step sooner. Of so many plain steps, 20 scales of the
    # weights changed the means by 8e-14.
    steps = {**options, "accelerate": "none", "tol": 0, "max_iter": 20}
    with pytest.warns(ConvergenceWarning):
        few, many = (GaussianMixture(2, **steps).fit(x, sample_weight=scale * weights) for scale in (1, 1000))
    assert np.allclose(few.means_, many.means_, rtol=1e-11)
    assert few.n_iter_ == many.n_iter_ == 20
    assert not np.allclose(one.means_, GaussianMixture(2, **options).fit(x).means_, rtol=1e-3)


def test_weighted_fit_is_a_maximum_of_the_weighted_likelihood():
    x = torch.from_numpy(clusters(100, 2))
    weights = torch.linspace(0.1, 3.0, len(x), dtype=torch.float64)
    found = GaussianMixture(2, random_state=0, reg_covar=0, tol=1e-12).fit(x, sample_weight=weights)
    leaves = {name: leaf.requires_grad_() for name, leaf in found._parameters().unconstrained().items()}
    value = log_likelihood(found._parameters().with_unconstrained(leaves), x, weights)
    slopes = torch.autograd.grad(value, list(leaves.values()))
    assert all(slope.abs().max() < 1e-5 for slope in slopes)
    assert math.isclose(value.item(), found.lower_bound_, rel_tol=1e-12)


BAD_WEIGHTS = {
    "too few": (np.ones(3), r"`sample_weight` should have shape \(200,\). Found \(3,\)"),
    "a matrix": (np.ones((200, 2)), r"should have shape \(200,\). Found \(200, 2\)"),
    "negative": (np.r_[np.ones(199), -1.0], r"finite and not negative. Found -1.0 in row 199"),
    "not a number": (np.r_[np.nan, np.ones(199)], r"finite and not negative. Found nan in row 0"),
    "zero": (np.zeros(200), "should have a positive entry"),
    "words": (["a"] * 200, "`sample_weight` should be numbers"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_are_none(name):
    weights, message = BAD_WEIGHTS[name]
    with pytest.raises(ValueError, match=message):
        GaussianMixture(2).fit(clusters(), sample_weight=weights)


# --- chunks ------------------------------------------------------------------------------------------------------


def chunked(x, form):
    parts = np.split(x, [17, 17, 90])
    tensors = [torch.from_numpy(part) for part in parts]
    return {
        "arrays": parts,
        "tuple": tuple(parts),
        "tensors": tensors,
        "function": lambda: iter(parts),
        "loader": DataLoader(TensorDataset(torch.from_numpy(x)), batch_size=33),
        "dataset": DataLoader(torch.from_numpy(x), batch_size=33),
    }[form]


@every_type
@pytest.mark.parametrize("form", ["arrays", "tuple", "tensors", "function", "loader", "dataset"])
def test_chunks_are_fitted_as_the_whole_is(kind, form):
    x = clusters()
    whole = GaussianMixture(3, covariance_type=kind, random_state=0, **given(x)).fit(x)
    parts = GaussianMixture(3, covariance_type=kind, random_state=0, **given(x)).fit(chunked(x, form))
    assert isinstance(parts.means_, torch.Tensor) == (form in ("tensors", "loader", "dataset"))
    assert math.isclose(whole.lower_bound_, parts.lower_bound_, rel_tol=1e-12)
    for name in ATTRIBUTES:
        assert np.allclose(getattr(whole, name), np.asarray(getattr(parts, name)), rtol=1e-8)
    assert math.isclose(parts.score(chunked(x, form)), whole.score(x), rel_tol=1e-12)
    assert np.array_equal(np.asarray(parts.predict(chunked(x, form))), whole.predict(x))


@pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
def test_few_chunked_samples_all_count_for_the_start(init):
    x = clusters(spread=20.0)
    found = GaussianMixture(3, random_state=0, init_params=init, max_iter=0).fit([x[:50], x[50:]])
    assert found.means_.shape == (3, 3)
    if init == "kmeans":
        whole = GaussianMixture(3, random_state=0, init_params=init, max_iter=0).fit(x)
        assert np.allclose(np.sort(found.means_, axis=0), np.sort(whole.means_, axis=0), rtol=1e-9)


def test_start_of_many_chunked_samples_is_drawn_among_them(monkeypatch):
    monkeypatch.setattr("toolkit.em.estimators.mixture._SAMPLED", 40)
    x = clusters(400, spread=20.0)
    x[:200] = x[:200][np.argsort(x[:200, 0])]
    found = GaussianMixture(3, random_state=0).fit([x[i : i + 30] for i in range(0, 400, 30)])
    whole = GaussianMixture(3, random_state=0).fit(x)
    assert math.isclose(found.lower_bound_, whole.lower_bound_, rel_tol=1e-6)


def test_chunks_of_weight_zero_do_not_crowd_out_the_start(monkeypatch):
    monkeypatch.setattr("toolkit.em.estimators.mixture._SAMPLED", 60)
    x = clusters(200, spread=20.0)
    weights = np.zeros(200)
    weights[150:] = 1.0
    parts = GaussianMixture(3, random_state=0).fit([x[:100], x[100:]], sample_weight=weights)
    assert np.allclose(parts.means_, GaussianMixture(3, random_state=0).fit(x[150:]).means_, rtol=1e-6)


def test_samples_for_a_start_are_drawn_by_weight():
    x = torch.arange(2000.0)[:, None]
    weights = torch.where(x[:, 0] < 1000, 1.0, 9.0).double()
    drawn, rest = choose(x, weights, 200, torch.Generator().manual_seed(0))
    assert rest is None
    assert len(drawn.unique()) == 200
    assert torch.equal(drawn, drawn.sort(0).values)
    # Somewhat under 0.9: what is drawn is not put back.
    assert 0.8 < (drawn >= 1000).double().mean() < 0.95
    everything, same = choose(x, weights, 2000, torch.Generator())
    assert everything is x
    assert same is weights


def test_chunks_with_weights():
    x = clusters(80)
    weights = np.random.default_rng(1).integers(0, 4, len(x)).astype(float)
    whole = GaussianMixture(3, random_state=0, **given(x)).fit(x, sample_weight=weights)
    pairs = [(x[:30], weights[:30]), (x[30:], weights[30:])]
    for source, sample_weight in (
        (pairs, None),
        (lambda: iter(pairs), None),
        ([x[:30], x[30:]], weights),
        (DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(weights)), batch_size=7), None),
    ):
        found = GaussianMixture(3, random_state=0, **given(x)).fit(source, sample_weight=sample_weight)
        assert math.isclose(found.lower_bound_, whole.lower_bound_, rel_tol=1e-12)
        assert np.allclose(np.asarray(found.means_), whole.means_, rtol=1e-9)


def test_memory_mapped_array(tmp_path):
    x = clusters()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = GaussianMixture(3, random_state=0).fit(mapped)
    assert type(found.means_) is np.ndarray
    assert np.array_equal(found.means_, GaussianMixture(3, random_state=0).fit(x).means_)


def test_large_memory_mapped_array_is_read_in_chunks(tmp_path, monkeypatch):
    x = clusters()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    monkeypatch.setattr("toolkit.em.estimators.mixture._MAPPED", 1)
    found = GaussianMixture(3, random_state=0, **given(x)).fit(mapped)
    assert type(found.means_) is np.ndarray
    whole = GaussianMixture(3, random_state=0, **given(x)).fit(x)
    assert math.isclose(found.lower_bound_, whole.lower_bound_, rel_tol=1e-12)


BAD_CHUNKS = {
    "an iterator": (lambda x: iter([x]), TypeError, "can be read again"),
    "a generator": (lambda x: (part for part in [x]), TypeError, "Found generator"),
    "no chunk": (lambda x: lambda: iter([]), ValueError, "at least one sample. Found no chunk"),
    "only empty chunks": (lambda x: [x[:0], x[:0]], ValueError, "at least one sample. Found no chunk"),
    "other features": (lambda x: [x, x[:, :2]], ValueError, "X has 2 features, but GaussianMixture is expecting 3"),
    "not finite": (lambda x: [x, x * np.nan], ValueError, "NaN"),
    "one sample": (lambda x: [x[:1]], ValueError, "`X` should have at least 2 samples. Found 1"),
    "too few samples": (lambda x: [x[:2]], ValueError, "`n_components` should be at most 2"),
    "three things": (lambda x: [[x, x, x]], ValueError, "a pair of samples and weights. Found 3 parts"),
    "weights of a part": (lambda x: [[x, np.ones(2)]], ValueError, r"`sample_weight` should have shape \(200,\)"),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_chunks_that_cannot_be_fitted(name):
    source, kind, message = BAD_CHUNKS[name]
    with pytest.raises(kind, match=message):
        GaussianMixture(3).fit(source(clusters()))


def test_weights_of_all_chunks_are_counted():
    x = clusters()
    with pytest.raises(ValueError, match=r"`sample_weight` should have shape"):
        GaussianMixture(2).fit([x, x], sample_weight=np.ones(len(x)))
    with pytest.raises(ValueError, match=r"`sample_weight` should have shape \(200,\). Found \(300,\)"):
        GaussianMixture(2).fit([x], sample_weight=np.ones(300))


# --- online ------------------------------------------------------------------------------------------------------


@every_type
def test_batches_come_near_to_the_whole(kind):
    x = clusters(6000, spread=6.0)
    whole = GaussianMixture(3, covariance_type=kind, random_state=0, n_init=5).fit(x)
    online = GaussianMixture(3, covariance_type=kind, random_state=0)
    for batch in np.split(x, 30):
        assert online.partial_fit(batch) is online
    assert online.n_iter_ == len(online.history_) == 30
    assert whole.score(x) - 0.02 < online.score(x) <= whole.score(x) + 1e-9
    assert np.isfinite(online.history_).all()
    assert type(online.means_) is np.ndarray


def test_batches_by_hand_and_as_chunks():
    x = clusters(300)
    weights = np.linspace(0.5, 2.0, 300)
    one, other = (GaussianMixture(2, random_state=0) for _ in range(2))
    for i in range(0, 300, 60):
        one.partial_fit(torch.from_numpy(x[i : i + 60]), sample_weight=weights[i : i + 60])
    other.partial_fit([torch.from_numpy(x[i : i + 60]) for i in range(0, 300, 60)], sample_weight=weights)
    assert torch.equal(one.means_, other.means_)
    assert not np.allclose(one.means_, GaussianMixture(2, random_state=0).partial_fit(x).means_)


def test_online_goes_on_from_a_fit_and_is_forgotten_by_one():
    x = clusters(400)
    found = GaussianMixture(3, random_state=0).fit(x[:200])
    before = found.means_.copy()
    after = found.partial_fit(x[200:]).means_.copy()
    assert 0 < np.abs(after - before).max() < 2.0
    assert found.n_iter_ == 1
    again = found.fit(x[:200])
    assert np.array_equal(again.means_, before)
    assert np.array_equal(again.partial_fit(x[200:]).means_, after)


def test_drift_is_followed_by_a_constant_step():
    rng = np.random.default_rng(0)
    steady, following = (
        GaussianMixture(1, learning_decay=decay, learning_offset=offset) for decay, offset in ((1.0, 1.0), (0.3, 20.0))
    )
    for place in range(60):
        batch = rng.standard_normal((50, 1)) + 0.2 * place
        steady.partial_fit(batch)
        following.partial_fit(batch)
    assert abs(following.means_[0, 0] - 12.0) < 1.5
    assert abs(steady.means_[0, 0] - 12.0) > 4.0


def test_one_component_with_decreasing_steps_is_the_mean():
    x = clusters(500)
    found = GaussianMixture(1, learning_decay=1.0, learning_offset=0.0, reg_covar=0.0)
    for batch in np.split(x, 10):
        found.partial_fit(batch)
    assert np.allclose(found.means_[0], x.mean(0), rtol=1e-9)
    assert np.allclose(found.covariances_[0], np.cov(x.T, ddof=0), rtol=1e-9)


def test_what_cannot_be_learned_online_is_said():
    x = clusters()
    for parameters in ({"covariance_type": "VEV"}, {"missing": True}):
        with pytest.raises(AttributeError, match="partial_fit") as caught:
            GaussianMixture(2, **parameters).partial_fit(x)
        assert "`partial_fit` is there for the types full, tied, diag, spherical" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match=r"`n_components` should be at most 2, .* of the first batch"):
        GaussianMixture(3).partial_fit(x[:2])
    with pytest.raises(ValueError, match="X has 2 features"):
        GaussianMixture(2, random_state=0).partial_fit(x).partial_fit(x[:, :2])
    with pytest.raises(ValueError, match="`learning_decay` should be finite and not negative"):
        GaussianMixture(2, learning_decay=-1).partial_fit(x)


# --- missing values ----------------------------------------------------------------------------------------------


def with_holes(x, share=0.2, seed=0):
    holed = x.copy()
    holed[np.random.default_rng(seed).random(x.shape) < share] = np.nan
    return holed


@every_type
def test_missing_changes_nothing_where_nothing_is_missing(kind):
    x = clusters()
    plain = GaussianMixture(3, covariance_type=kind, random_state=0).fit(x)
    allowed = GaussianMixture(3, covariance_type=kind, random_state=0, missing=True).fit(x)
    assert np.array_equal(plain.means_, allowed.means_)
    assert np.array_equal(plain.score_samples(x), allowed.score_samples(x))


@every_type
@pytest.mark.parametrize("init", ["kmeans", "random", "means"])
def test_fit_of_what_is_seen_is_a_maximum_of_its_likelihood(kind, init):
    x = with_holes(clusters(150, spread=8.0))
    options = {"means_init": np.nan_to_num(x[:2])} if init == "means" else {"init_params": init}
    found = GaussianMixture(2, covariance_type=kind, random_state=0, missing=True, reg_covar=0, tol=1e-11, **options)
    found.fit(x)
    assert np.allclose(found.predict_proba(x).sum(1), 1)
    # By hand: the log-density of a sample is that of the features it has.
    covariances = {
        "full": lambda: found.covariances_,
        "tied": lambda: [found.covariances_] * 2,
        "diag": lambda: [np.diag(variances) for variances in found.covariances_],
        "spherical": lambda: [variance * np.eye(3) for variance in found.covariances_],
    }[kind]()
    for row in (0, 5, 11):
        seen = ~np.isnan(x[row])
        density = sum(
            weight * stats.multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).pdf(x[row, seen])
            for weight, mean, covariance in zip(found.weights_, found.means_, covariances, strict=True)
        )
        assert math.isclose(found.score_samples(x[row : row + 1])[0], math.log(density), rel_tol=1e-9)
    assert math.isclose(found.score(x), found.lower_bound_, rel_tol=1e-12)
    rng = np.random.default_rng(3)
    for _ in range(10):
        other = GaussianMixture(2, covariance_type=kind, missing=True)
        other.__dict__.update({name: getattr(found, name) for name in (*ATTRIBUTES, "n_features_in_")})
        other.means_ = found.means_ + 1e-3 * rng.standard_normal(found.means_.shape)
        assert other.score(x) < found.score(x)


def test_missing_values_are_imputed_better_than_by_the_mean():
    x = clusters(400, spread=8.0)
    holed = with_holes(x)
    found = GaussianMixture(3, missing=True, random_state=0).fit(torch.from_numpy(holed))
    filled = found.impute(holed)
    seen = ~np.isnan(holed)
    assert np.array_equal(filled[seen], x[seen])
    error = np.square(filled - x)[~seen].mean()
    assert error < 0.3 * np.square(np.where(seen, holed, np.nanmean(holed, 0)) - x)[~seen].mean()
    assert isinstance(found.impute(torch.from_numpy(holed)), torch.Tensor)


def test_missing_values_are_refused_unless_asked_for():
    x = with_holes(clusters())
    with pytest.raises(ValueError, match="NaN"):
        GaussianMixture(2).fit(x)
    with pytest.raises(ValueError, match=r"`X` should be finite.*`missing=True` fits the observed values"):
        GaussianMixture(2).fit(torch.from_numpy(x))
    with pytest.raises(ValueError, match="`missing` should be False for samples that come in chunks"):
        GaussianMixture(2, missing=True).fit([x, x])
    with pytest.raises(ValueError, match=r"infinity|finite"):
        GaussianMixture(2, missing=True).fit(np.where(np.isnan(x), np.inf, x))
    with pytest.raises(ValueError, match="feature"):
        GaussianMixture(2, missing=True).fit(np.where(np.arange(3) == 1, np.nan, x))


# --- priors and models -------------------------------------------------------------------------------------------


@every_type
def test_prior_draws_the_estimate_and_its_bound_is_the_posterior(kind):
    x = clusters(60)
    prior = Prior.default(torch.from_numpy(x), 3, kind)
    free = GaussianMixture(3, covariance_type=kind, random_state=0, reg_covar=0, **given(x)).fit(x)
    drawn = GaussianMixture(3, covariance_type=kind, random_state=0, reg_covar=0, prior=prior, **given(x)).fit(x)
    default = GaussianMixture(3, covariance_type=kind, random_state=0, reg_covar=0, prior="default", **given(x)).fit(x)
    assert np.array_equal(drawn.means_, default.means_)
    assert drawn.score(x) < free.score(x)
    expected = drawn.score(x) + float(prior.log_density(drawn._parameters())) / len(x)
    assert math.isclose(drawn.lower_bound_, expected, rel_tol=1e-10)
    at_free = free.score(x) + float(prior.log_density(free._parameters())) / len(x)
    assert drawn.lower_bound_ > at_free
    assert (np.diff(drawn.history_) >= -1e-13).all()


def test_prior_of_one_component_has_its_closed_form():
    x = clusters(40, 2)
    n, d = x.shape
    prior = Prior.default(torch.from_numpy(x), 1, "full")
    found = GaussianMixture(1, reg_covar=0, prior=prior, tol=1e-13).fit(x)
    scatter = (x - x.mean(0)).T @ (x - x.mean(0))
    expected = (prior.scale.numpy() + scatter) / (prior.degrees_of_freedom + n + d + 2)
    assert np.allclose(found.means_, x.mean(0)[None], rtol=1e-10)
    assert np.allclose(found.covariances_, expected[None], rtol=1e-9)


def test_weights_of_a_prior_empty_no_component():
    x = clusters(40, 2, k=1)
    prior = Prior.default(torch.from_numpy(x), 4, "diag")
    many = Prior(
        concentration=torch.full((4,), 30.0, dtype=torch.float64),
        mean=prior.mean,
        shrinkage=prior.shrinkage,
        degrees_of_freedom=prior.degrees_of_freedom,
        scale=prior.scale,
    )
    options = {"covariance_type": "diag", "random_state": 0, "max_iter": 5000}
    few = GaussianMixture(4, prior=prior, **options).fit(x)
    even = GaussianMixture(4, prior=many, **options).fit(x)
    assert np.ptp(even.weights_) < np.ptp(few.weights_)
    assert abs(even.weights_ - 0.25).max() < 0.1


def test_prior_changes_with_the_units():
    x = clusters(60)
    one = GaussianMixture(2, prior="default", reg_covar=0, random_state=0, **given(x, 2)).fit(x)
    other = GaussianMixture(2, prior="default", reg_covar=0, random_state=0, **given(7 * x + 5, 2)).fit(7 * x + 5)
    assert np.allclose(7 * one.means_ + 5, other.means_, rtol=1e-5)
    assert np.allclose(49 * one.covariances_, other.covariances_, rtol=1e-4)


def test_masked_weights_parameters_and_chunks_are_refused():
    x = np.random.default_rng(0).normal(size=(60, 3))
    weights, masked = np.ma.masked_array(np.ones(60), mask=np.arange(60) < 5), np.ma.masked_array(x, mask=x > 1)
    found, hidden = "should have no masked values. Found", int((x > 1).sum())
    model = GaussianMixture(2, random_state=0)
    with pytest.raises(ValueError, match=f"`sample_weight` {found} 5"):
        model.fit(x, sample_weight=weights)
    with pytest.raises(ValueError, match=f"`sample_weight` {found} 5"):
        model.fit([(x[:30], weights[:30]), (x[30:], weights[30:])])
    with pytest.raises(ValueError, match=f"`means_init` {found} 1"):
        GaussianMixture(2, means_init=np.ma.masked_array(x[:2], mask=np.arange(6).reshape(2, 3) == 4)).fit(x)
    with pytest.raises(ValueError, match=f"`sequence_weight` {found} 1"):
        GaussianHMM(2).fit(x, [30, 30], sequence_weight=np.ma.masked_array([1.0, 1.0], mask=[0, 1]))
    with pytest.raises(ValueError, match=f"`x` {found} {hidden}"):
        fit([masked], 2)
    with pytest.raises(ValueError, match=f"`sample_weight` {found} 5"):
        fit([(x, weights)], 2)


def test_masked_values_are_missing_or_refused():
    """The numbers under a mask are no samples."""
    x = bundled.load_iris().data.astype(np.float32)
    hidden = np.random.default_rng(0).random(x.shape) < 0.1
    masked = np.ma.masked_array(x, mask=hidden)
    with pytest.raises(ValueError, match=rf"^`X` should have no masked values\. Found {hidden.sum()}\. `missing=True`"):
        GaussianMixture(2, random_state=0).fit(masked)
    found = GaussianMixture(2, random_state=0, missing=True).fit(masked)
    expected = GaussianMixture(2, random_state=0, missing=True).fit(np.where(hidden, np.float32(np.nan), x))
    np.testing.assert_array_equal(found.means_, expected.means_)
    whole = GaussianMixture(2, random_state=0).fit(np.ma.masked_array(x))
    np.testing.assert_array_equal(whole.means_, GaussianMixture(2, random_state=0).fit(x).means_)


@pytest.mark.parametrize("prior", ["weak", 1.0, object()], ids=["name", "number", "object"])
def test_prior_that_is_none(prior):
    with pytest.raises(ValueError, match="`prior` should be a Prior, 'default' or None"):
        GaussianMixture(2, prior=prior).fit(clusters())


ALIASES = {"VVV": "full", "EEE": "tied", "VVI": "diag", "VII": "spherical"}


@pytest.mark.parametrize("model", COVARIANCE_MODELS)
def test_every_model_is_fitted_and_used(model):
    x = clusters(150, 2)
    found = GaussianMixture(2, covariance_type=model, random_state=0, reg_covar=0).fit(x)
    assert found.covariances_.shape == found.precisions_.shape == (2, 2, 2)
    assert math.isclose(found.score(x), found.lower_bound_, rel_tol=1e-10)
    assert found._n_parameters() == n_free_parameters(model, 2, 2)
    assert np.allclose(found.covariances_ @ found.precisions_, np.eye(2), atol=1e-9)
    volumes = np.linalg.det(found.covariances_)
    assert np.isclose(*volumes, rtol=1e-9) == (model[0] == "E")
    if model[1] == "I":
        assert np.allclose(found.covariances_, volumes[:, None, None] ** 0.5 * np.eye(2), rtol=1e-9)
    if model[2] == "I":
        assert np.allclose(found.covariances_[:, 0, 1], 0.0)
    if model in ALIASES:
        same = GaussianMixture(2, covariance_type=ALIASES[model], random_state=0, reg_covar=0).fit(x)
        assert math.isclose(found.lower_bound_, same.lower_bound_, rel_tol=1e-12)
    if model not in ALIASES:
        with pytest.raises(ValueError, match=r"`covariance_type` should be one of full.* in chunks\. Found"):
            GaussianMixture(2, covariance_type=model).fit([x[:99], x[99:]])
    before = found.lower_bound_
    again = found.set_params(warm_start=True).fit(x)
    assert again.lower_bound_ >= before - 1e-9


def test_weights_of_samples_in_a_model():
    x = clusters(80, 2)
    weights = np.random.default_rng(1).integers(0, 4, len(x))
    options = {"covariance_type": "VEV", "random_state": 0, **given(x, 2)}
    weighed = GaussianMixture(2, **options).fit(x, sample_weight=weights)
    repeated = GaussianMixture(2, **options).fit(np.repeat(x, weights, axis=0))
    assert abs(weighed.lower_bound_ - repeated.lower_bound_) < 1e-9


def test_published_values_of_iris():
    x = bundled.load_iris().data
    published = {("VEV", 2): -561.7285, ("VVV", 2): -574.0178, ("EEE", 3): -632.9647, ("VVI", 2): -857.5515}
    for (model, k), expected in published.items():
        found = GaussianMixture(k, covariance_type=model, random_state=0, reg_covar=0, n_init=3, tol=1e-8).fit(x)
        assert -0.001 < -found.bic(x) - expected < 0.03


@pytest.mark.parametrize(
    ("name", "value"), [("prior", "default"), ("missing", True), ("precisions_init", np.ones((2, 3, 3)))]
)
def test_what_models_cannot_do_is_said(name, value):
    with pytest.raises(ValueError, match=f"`{name}` should be (None|False) for the covariance model VEV"):
        GaussianMixture(2, covariance_type="VEV", **{name: value}).fit(clusters())


# --- collapse ----------------------------------------------------------------------------------------------------


def spiky_start(x, seed):
    """Return the start of narrow components at samples, from which spikes are found."""
    rng = np.random.default_rng(seed)
    return {
        "weights_init": np.full(3, 1 / 3),
        "means_init": x[rng.choice(len(x), 3, replace=False)],
        "precisions_init": np.broadcast_to(1e4 * np.eye(4), (3, 4, 4)).copy(),
    }


# No maximum of three components is above; what is higher is a spike.
HIGHEST_ON_IRIS = -1.18


def test_spikes_on_iris_are_reported():
    x = bundled.load_iris().data
    spikes = []
    for seed, accelerate in itertools.product(range(12), ("auto", "anderson")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = GaussianMixture(3, accelerate=accelerate, **spiky_start(x, seed)).fit(x)
        reported = any(issubclass(warning.category, CollapseWarning) for warning in caught)
        assert reported == bool(len(found.collapsed_))
        if found.lower_bound_ > HIGHEST_ON_IRIS:
            spikes.append(reported)
    assert spikes
    assert all(spikes)


@pytest.mark.filterwarnings("ignore::toolkit.em.estimators.mixture.CollapseWarning")
@pytest.mark.parametrize("accelerate", ["anderson", "none"])
def test_spike_is_not_preferred(monkeypatch, accelerate):
    x = bundled.load_iris().data
    jumps = {"accelerate": "anderson"}  # Newton's steps from these starts do not lead to spikes
    spiky = next(
        seed
        for seed in range(12)
        if GaussianMixture(3, max_iter=300, **jumps, **spiky_start(x, seed)).fit(x).lower_bound_ > HIGHEST_ON_IRIS
    )
    narrow = GaussianMixture(3, **jumps, **spiky_start(x, spiky)).fit(x)._parameters()
    usual = GaussianMixture._makers

    def with_a_spike(*arguments):
        makers = usual(*arguments)
        assert len(makers) == 4
        return [makers[0], lambda: narrow, *makers[2:]]

    monkeypatch.setattr(GaussianMixture, "_makers", with_a_spike)
    found = GaussianMixture(3, random_state=0, n_init=4, accelerate=accelerate, tol=1e-8).fit(x)
    assert not len(found.collapsed_)
    assert abs(found.lower_bound_ * len(x) - -180.1855) < 0.01


def test_spike_is_named_with_its_place():
    x = np.r_[clusters(60, 2, spread=1.0), np.full((4, 2), 30.0)]
    start = {
        "means_init": np.array([[0.0, 0.0], [30.0, 30.0]]),
    }
    with pytest.warns(CollapseWarning, match="Component 1 collapsed: it has too few distinct samples") as caught:
        found = GaussianMixture(2, **start).fit(x)
    assert caught[0].filename == __file__
    assert found.collapsed_.tolist() == [1]
    drawn = GaussianMixture(2, prior="default", **start).fit(x)
    assert not len(drawn.collapsed_)


def test_constant_features_and_narrow_clusters_are_no_spikes():
    x = clusters()
    x[:, 1] = 3.0
    found = GaussianMixture(3, random_state=0).fit(x)
    assert not len(found.collapsed_)
    narrow = np.r_[0.01 * clusters(100), 5.0 + clusters(100)]
    assert not len(GaussianMixture(2, random_state=0, reg_covar=1e-9).fit(narrow).collapsed_)


def test_empty_component_has_collapsed():
    mixture = GaussianParameters.from_covariances(
        weights=torch.tensor([1.0, 0.0], dtype=torch.float64),
        means=torch.tensor([[0.0], [1.0]], dtype=torch.float64),
        covariances=torch.tensor([1.0, 1.0], dtype=torch.float64),
        covariance_type="spherical",
    )
    assert collapsed_components(mixture, 0.0) == [1]


@pytest.mark.parametrize("accelerate", ["none", "anderson"])
def test_a_start_that_together_is_lost_to_rounding_goes_on_alone(accelerate, monkeypatch):
    x, starts = far_and_narrow()
    monkeypatch.setattr(GaussianMixture, "_makers", lambda *_: [lambda: starts[0], lambda: starts[1]])
    found = GaussianMixture(2, n_init=2, accelerate=accelerate).fit(x.numpy())
    expected = fit(x, 2, init=starts[1], accelerate=accelerate)
    assert found.lower_bound_ == pytest.approx(expected.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(found.covariances_, expected.parameters.covariances, rtol=1e-6)


def test_starts_that_become_singular_do_not_count():
    x = np.r_[clusters(50, 2, spread=1.0), np.full((3, 2), 8.0)]
    with pytest.warns(CollapseWarning, match=r"\d of 8 starts ended in a singular covariance"):
        found = GaussianMixture(2, reg_covar=0, n_init=8, init_params="random_from_data", random_state=1).fit(x)
    assert np.isfinite(found.lower_bound_)


# --- standard errors ---------------------------------------------------------------------------------------------


@every_type
def test_standard_errors_of_one_component_have_their_closed_form(kind):
    x = clusters(300)
    found = GaussianMixture(1, covariance_type=kind, reg_covar=0).fit(x)
    errors = found.standard_errors(x)
    assert {name: value.shape for name, value in errors.items()} == {
        "weights": (1,),
        "means": (1, 3),
        "covariances": found.covariances_.shape,
    }
    variances = {
        "full": lambda: found.covariances_[0].diagonal(),
        "tied": lambda: found.covariances_.diagonal(),
        "diag": lambda: found.covariances_[0],
        "spherical": lambda: np.repeat(found.covariances_, 3),
    }[kind]()
    assert np.allclose(errors["means"][0], np.sqrt(variances / len(x)), rtol=1e-8)
    if kind == "diag":
        assert np.allclose(errors["covariances"][0], variances * np.sqrt(2 / len(x)), rtol=1e-8)
    assert np.allclose(errors["weights"], 0.0)


def test_standard_errors_shrink_with_the_weights_and_grow_with_what_is_missing():
    x = clusters(200, 2, 2, spread=6.0)
    options = {"covariance_type": "diag", "random_state": 0, "reg_covar": 0, "tol": 1e-12}
    one = GaussianMixture(2, **options).fit(x)
    once = one.standard_errors(torch.from_numpy(x))
    four = one.standard_errors(x, sample_weight=np.full(len(x), 4.0))
    assert isinstance(once["means"], torch.Tensor)
    assert np.allclose(2 * four["means"], once["means"].numpy(), rtol=1e-9)
    holed = with_holes(x, 0.3)
    partly = GaussianMixture(2, missing=True, **options).fit(holed).standard_errors(holed)
    assert partly["means"].sum() > 1.1 * once["means"].sum().item()
    sem = one.standard_errors(x, method="sem")
    assert np.allclose(sem["means"], once["means"].numpy(), rtol=1e-3)


def test_standard_errors_that_cannot_be_had():
    x = clusters(100, 2)
    with pytest.raises(ValueError, match="`standard_errors` should be asked of the types"):
        GaussianMixture(2, covariance_type="VEV", random_state=0).fit(x).standard_errors(x)
    with pytest.raises(ValueError, match="`method` should be one of"):
        GaussianMixture(2, random_state=0).fit(x).standard_errors(x, method="bootstrap")


# --- hostile input -----------------------------------------------------------------------------------------------


HOSTILE = {
    "empty": (np.empty((0, 3)), ValueError, "0 sample"),
    "no features": (np.empty((5, 0)), ValueError, "0 feature"),
    "one sample": (np.ones((1, 3)), ValueError, "minimum of 2"),
    "a vector": (np.ones(5), ValueError, "Expected 2D array"),
    "three dimensions": (np.ones((2, 3, 4)), ValueError, "dim 3|3 dim"),
    "not a number": (np.array([[1.0, np.nan], [1.0, 2.0], [3.0, 1.0]]), ValueError, "NaN"),
    "infinite": (np.array([[1.0, np.inf], [1.0, 2.0], [3.0, 1.0]]), ValueError, "infinity"),
    "complex": (np.ones((5, 2)) * 1j, ValueError, "Complex"),
    "words": (np.array([["a", "b"], ["c", "d"]]), ValueError, "could not convert|dtype"),
    "a word": ("samples", ValueError, "could not convert string"),
    "nothing": (None, ValueError, "Expected 2D array|dtype|NoneType"),
    "sparse": (sparse.eye_array(5).tocsr(), TypeError, "[Ss]parse"),
    "fewer samples than components": (np.random.default_rng(0).random((3, 2)), ValueError, "at most 3.*Found 4"),
    "ragged": ([[1.0], [1.0, 2.0]], ValueError, "inhomogeneous|sequence|array"),
    "tensor: empty": (torch.empty(0, 3), ValueError, r"`X` should have shape \(N, D\)"),
    "tensor: no features": (torch.empty(5, 0), ValueError, r"`X` should have shape \(N, D\)"),
    "tensor: a vector": (torch.ones(5), ValueError, r"`X` should have shape \(N, D\).*Found \(5,\)"),
    "tensor: infinite": (torch.tensor([[1.0], [torch.inf], [2.0]]), ValueError, r"finite. Found \[inf\] in row 1"),
    "tensor: complex": (torch.ones(5, 2, dtype=torch.complex64), TypeError, "real numbers"),
    "tensor: sparse": (torch.eye(5).to_sparse(), TypeError, "dense tensor"),
    "tensor: fewer samples than components": (torch.eye(3), ValueError, "at most 3.*Found 4"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_gives_one_clear_error(name):
    x, kind, message = HOSTILE[name]
    with pytest.raises(kind, match=message):
        GaussianMixture(4, random_state=0).fit(x)


BAD_PARAMETERS = {
    "n_components": [0, -3, 1.5, "2", True, None],
    "covariance_type": ["round", "vev", None],
    "tol": [-1e-3, math.nan, math.inf, "a"],
    "reg_covar": [-1e-6, math.nan, None],
    "max_iter": [-1, 1.5],
    "n_init": [0, 2.0],
    "init_params": ["points", None],
    "verbose": [-1, "loud"],
    "verbose_interval": [0],
    "accelerate": ["fast", None],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in BAD_PARAMETERS for value in BAD_PARAMETERS[name]]
)
def test_parameter_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` should be .*Found {value!r}"):
        GaussianMixture(**{name: value}).fit(clusters())


@every_type
def test_duplicates_and_more_components_than_distinct_samples(kind):
    x = np.repeat([[0.0, 1.0], [5.0, 2.0]], 10, axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        two = GaussianMixture(2, covariance_type=kind, random_state=0).fit(x)
        four = GaussianMixture(4, covariance_type=kind, random_state=0).fit(x)
    assert np.allclose(np.sort(two.means_[:, 0]), [0.0, 5.0], atol=1e-6)
    assert np.isfinite(four.lower_bound_)
    assert math.isclose(four.weights_.sum(), 1.0, rel_tol=1e-9)


@every_type
def test_constant_feature(kind):
    x = clusters()
    x[:, 2] = -7.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        found = GaussianMixture(2, covariance_type=kind, random_state=0).fit(x)
    assert np.allclose(found.means_[:, 2], -7.0)
    assert np.isfinite(found.score(x))
    if kind != "spherical":
        with pytest.raises(ValueError, match="singular"):
            GaussianMixture(2, covariance_type=kind, random_state=0, reg_covar=0).fit(x)


def test_names_of_features_are_remembered_and_compared():
    x = clusters()
    found = GaussianMixture(2, random_state=0).fit(x)
    assert found.n_features_in_ == 3
    assert not hasattr(found, "feature_names_in_")
    with pytest.raises(ValueError, match="X has 2 features, but GaussianMixture is expecting 3"):
        found.predict(x[:, :2])
    with pytest.raises(ValueError, match="X has 2 features, but GaussianMixture is expecting 3"):
        found.predict(torch.from_numpy(x[:, :2]))
    assert np.allclose(GaussianMixture(2, random_state=0).fit(Frame(x, "abc")).means_, found.means_)


def test_layouts_of_memory():
    x = clusters()
    expected = GaussianMixture(2, random_state=0).fit(x).means_
    for same in (np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], x.tolist(), x.astype(">f8")):
        assert np.allclose(GaussianMixture(2, random_state=0).fit(same).means_, expected, rtol=1e-9)
    backwards = x[::-1][:, ::-1]
    assert GaussianMixture(2, random_state=0).fit(backwards).means_.shape == (2, 3)
    read_only = x.copy()
    read_only.flags.writeable = False
    assert np.array_equal(GaussianMixture(2, random_state=0).fit(read_only).means_, expected)


# --- progress ----------------------------------------------------------------------------------------------------


def test_silent_unless_asked(capsys):
    GaussianMixture(2, random_state=0).fit(clusters())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("verbose", [1, 2, True])
def test_progress_in_lines(capsys, verbose):
    x = clusters(spread=1.0)
    options = {"random_state": 0, "n_init": 2, "verbose_interval": 3, "max_iter": 50, "accelerate": "none", "tol": 1e-4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = GaussianMixture(3, verbose=verbose, **options).fit(x)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["2 starts together", "Finalist 1 of 1"]
    assert sum(bool(re.match("  (not )?converged at ", line)) for line in lines) == 1
    steps = [line for line in lines if line.startswith("  step ")]
    assert steps[0].startswith("  step 3: ")
    assert all(bool(re.search(r", \d+\.\d\d s$", line)) == (verbose == 2) for line in steps)
    assert any(f"{found.lower_bound_:.6f} nats per sample" in line for line in lines)


def test_progress_in_a_terminal(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", screen)
    with Progress(verbose=1, interval=1, callback=None) as progress:
        progress.begin("Start 1 of 1")
        for n in range(40):
            progress(n, -2.0 + n / 100)
        progress.end("converged", -1.61)
    drawn = screen.getvalue()
    assert "converged at -1.610000 nats per sample" in drawn
    # Steps are drawn over each other: the cursor is hidden, and comes back.
    assert drawn.count("\n") < 20
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l") >= 0


def test_callback_sees_each_step():
    seen = []
    found = GaussianMixture(3, random_state=0, callback=lambda n, value: seen.append((n, value)), accelerate="none")
    found.fit(clusters(spread=1.0))
    assert [n for n, _ in seen[:3]] == [0, 1, 2]
    assert np.allclose([value for _, value in seen][: len(found.history_)], found.history_, rtol=1e-13)


def test_callback_that_raises_ends_the_fit():
    def stop(n, value):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GaussianMixture(3, random_state=0, callback=stop, verbose=1).fit(clusters())


# --- the base of other mixtures ----------------------------------------------------------------------------------


class ExponentialMixture(BaseMixture):
    """As thin as an estimator of another family can be."""

    def __init__(self, n_components=2, *, random_state=None):
        self.n_components = n_components
        self.random_state = random_state

    def fit(self, X, y=None, sample_weight=None):
        self.weights_, self.rates_, self.n_features_in_ = np.array([0.25, 0.75]), np.array([0.5, 4.0]), 1
        return self

    def _mixture(self):
        return self

    def log_joint(self, x):
        weights, rates = torch.from_numpy(self.weights_), torch.from_numpy(self.rates_)
        return (weights * rates).log() - rates * x

    def _n_parameters(self):
        return 3

    def _draw(self, labels, generator):
        draws = torch.rand(len(labels), 1, generator=generator, dtype=torch.float64)
        return -draws.log() / torch.from_numpy(self.rates_)[labels, None]


def test_base_answers_for_any_family():
    found = ExponentialMixture(random_state=0).fit(None)
    x = np.array([[0.1], [0.7], [3.0]])
    density = 0.25 * 0.5 * np.exp(-0.5 * x) + 0.75 * 4.0 * np.exp(-4.0 * x)
    share = 0.25 * 0.5 * np.exp(-0.5 * x) / density
    assert np.allclose(found.score_samples(x), np.log(density[:, 0]))
    assert np.allclose(found.predict_proba(x), np.c_[share, 1 - share])
    assert found.predict(x).tolist() == [1, 1, 0]
    assert found.fit_predict(x).tolist() == [1, 1, 0]
    total, entropy = np.log(density).sum(), -(share * np.log(share) + (1 - share) * np.log(1 - share)).sum()
    assert math.isclose(found.aic(x), -2 * total + 6)
    assert math.isclose(found.bic(x), -2 * total + 3 * math.log(3))
    assert math.isclose(found.icl(x), -2 * total + 3 * math.log(3) + 2 * entropy)
    drawn, labels = found.sample(20_000)
    assert abs(drawn[labels == 0].mean() - 2.0) < 0.1
    assert abs(labels.mean() - 0.75) < 0.02


def test_base_asks_for_its_hooks():
    class Bare(BaseMixture):
        pass

    with pytest.raises(NotImplementedError):
        Bare().fit(clusters())
    bare = Bare()
    bare.weights_, bare.random_state, bare.n_components = np.ones(1), 0, 1
    with pytest.raises(NotImplementedError):
        bare.predict(clusters())
    with pytest.raises(NotImplementedError):
        bare.sample(1)


def test_estimator_and_functions_agree():
    x = clusters()
    found = GaussianMixture(3, random_state=0).fit(x)
    responsibilities, value = e_step(found._parameters(), torch.from_numpy(x))
    assert np.allclose(found.predict_proba(x), responsibilities.numpy(), rtol=1e-12)
    assert math.isclose(found.score(x), float(value), rel_tol=1e-13)


# --- what a new user ran into ------------------------------------------------------------------------------------


def test_labels_of_a_data_loader_are_no_weights():
    x, y = bundled.load_iris(return_X_y=True)
    loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=50)
    with pytest.raises(TypeError, match=r"floating-point numbers, not labels. Found torch.int64"):
        GaussianMixture(3, random_state=0).fit(loader)


def test_scores_of_chunks_are_weighed_as_the_fit_was():
    x = clusters()
    weight = np.random.default_rng(0).random(200) + 0.5
    chunks = [(x[:70], weight[:70]), (x[70:], weight[70:])]
    model = GaussianMixture(2, random_state=0).fit(chunks)
    assert model.score(chunks) == pytest.approx(model.lower_bound_, abs=1e-9)
    for criterion in ("aic", "bic", "icl"):
        assert getattr(model, criterion)(chunks) == pytest.approx(getattr(model, criterion)(x, weight), rel=1e-12)
    assert model.score(chunks) != pytest.approx(model.score(x), abs=1e-6)


def test_a_batch_after_a_fit_counts_as_what_it_is():
    x = clusters(n=5000)
    model = GaussianMixture(3, random_state=0).fit(x)
    before = model.means_.copy()
    model.partial_fit(x[:50] + 0.5)
    moved = np.abs(model.means_ - before).max()
    assert 0 < moved < 0.05
    alone = GaussianMixture(3, random_state=0).fit(x[:50])
    alone.partial_fit(x[:50] + 0.5)
    assert np.abs(alone.means_ - GaussianMixture(3, random_state=0).fit(x[:50]).means_).max() > 4 * moved


def test_fitted_mixture_is_one_for_the_functions():
    x = clusters()
    model = GaussianMixture(3, random_state=0).fit(x)
    assert isinstance(model.parameters_, GaussianParameters)
    value = float(log_likelihood(model.parameters_, torch.from_numpy(x)))
    assert value == pytest.approx(model.score(x), abs=1e-12)
    assert model.parameters_.n_parameters == n_free_parameters("VVV", 3, 3)


def test_warm_start_with_another_type_is_refused():
    x = clusters(d=3)
    model = GaussianMixture(3, covariance_type="diag", warm_start=True, random_state=0).fit(x)
    with pytest.raises(ValueError, match=r"last fit's covariance_type='diag'. Found 'tied'"):
        model.set_params(covariance_type="tied").fit(x)


def test_missing_values_name_the_parameter_that_fits_them():
    x = clusters()
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match="`missing=True` fits the observed values"):
        GaussianMixture(2).fit(x)


@every_type
def test_no_variance_is_below_the_regularisation(kind):
    x = bundled.load_iris().data
    for seed in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = GaussianMixture(20, covariance_type=kind, random_state=seed).fit(x)
        covariances = model.parameters_.covariances
        least = torch.linalg.eigvalsh(covariances) if kind in ("full", "tied") else covariances
        assert float(least.min()) > 0.999e-6


@pytest.mark.parametrize(
    "model", [GaussianHMM(3, max_iter=2, random_state=0), GaussianMixture(3, max_iter=2, random_state=0)]
)
def test_a_warning_of_a_fit_names_the_line_that_fits(model):
    x = np.random.default_rng(0).normal(size=(200, 2))
    with pytest.warns(ConvergenceWarning) as caught:
        model.fit(x)
    assert {warning.filename for warning in caught} == {__file__}


def test_identical_rows_are_degenerate():
    with pytest.warns(CollapseWarning, match="Component 0, 1 collapsed"):
        found = GaussianMixture(2, random_state=0).fit(np.ones((50, 3)))
    assert found.collapsed_.tolist() == [0, 1]


@pytest.mark.parametrize("form", [np.asarray, torch.as_tensor])
def test_errors_recommend_only_what_a_class_has(form):
    holes = form(np.array([[1.0, np.nan], [2.0, 3.0], [4.0, 5.0]]))
    for learn in (
        GaussianMixture(1, covariance_type="VEV").fit,
        GaussianMixture(1).partial_fit,
        GaussianHMM(1).fit,
    ):
        with pytest.raises(ValueError, match=r"NaN|finite") as error:
            learn(holes)
        assert "missing" not in str(error.value)
    with pytest.raises(ValueError, match="`missing=True` fits the observed values"):
        GaussianMixture(1).fit(holes)
    apart = np.array([[0.0, 0.0], [0.0, 1.0], [9.0, 0.0]])
    with pytest.warns(CollapseWarning) as warned:
        GaussianMixture(2, covariance_type="VEV", random_state=0).fit(apart)
    assert not any("prior" in str(one.message) for one in warned)


@pytest.mark.parametrize("max_iter", [1, 2, 7])
def test_a_warm_start_again_and_again_converges(max_iter):
    """Three blobs converge in tens of plain steps; at most 250 leave room for another start."""
    x = bundled.make_blobs(300, 2, centers=3, random_state=0)[0]
    model = GaussianMixture(3, warm_start=True, max_iter=max_iter, random_state=0)
    for _ in range(250):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x)
        if model.converged_:
            break
    assert model.converged_
    # Single steps end as plain EM does, with tol * rate / (1 - rate) left; the rate is 0.92 here.
    assert model.lower_bound_ == pytest.approx(GaussianMixture(3, random_state=0).fit(x).lower_bound_, abs=2e-5)


@every_type
@pytest.mark.parametrize("offset", [0.0, 1e7])
@pytest.mark.parametrize("n_samples", [1, 20, 3000])
def test_fast_log_joints_equal_those_of_the_mixture(kind, offset, n_samples):
    """Few samples, products, and where products would cancel."""
    x = offset + clusters(300)
    model = GaussianMixture(3, covariance_type=kind, random_state=0).fit(x)
    new = np.resize(x, (n_samples, 3)) * (1 + 1e-8)
    mixture, points = model.parameters_, torch.from_numpy(new)
    expected = mixture.log_joint(points)
    # The bound of the expansion, and the rounding of differences at this offset.
    options = {"rtol": 0, "atol": 1e-9 + 1e-6 * (offset > 0)}
    torch.testing.assert_close(density.log_joint(mixture, points), expected, **options)
    torch.testing.assert_close(torch.from_numpy(model.score_samples(new)), expected.logsumexp(1), **options)
    assert (model.predict(new) == expected.argmax(1).numpy()).all()


def test_samples_far_away_are_not_expanded():
    model = GaussianMixture(2, covariance_type="diag", random_state=0).fit(clusters(300, 2, 2))
    x = torch.tensor([[1e9, 1e9], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(density.log_joint(model.parameters_, x), model.parameters_.log_joint(x))


@pytest.mark.parametrize(
    ("dtype", "outlier"), [(torch.float32, 1e10), (torch.float32, 1e20), (torch.float64, 1e20), (torch.float64, 1e30)]
)
@pytest.mark.parametrize("kind", ["tied", "diag", "spherical"])
def test_an_outlier_that_hides_the_other_samples(kind, dtype, outlier):
    x = torch.randn(60, 3, generator=seeded(), dtype=dtype)
    hidden = torch.cat([x, torch.full((1, 3), outlier, dtype=dtype)])
    with pytest.raises(ValueError, match=r"no outlier beside which|should be positive definite"):
        fit(hidden, 2, covariance_type=kind, generator=seeded())
    with pytest.raises(ValueError, match=r"no outlier beside which|should be positive definite"):
        GaussianMixture(2, covariance_type=kind, random_state=0).fit(hidden)
    repeated = 1e3 * x[:6].repeat(10, 1)  # components as narrow, of which rounding hides nothing
    with pytest.warns(CollapseWarning):
        GaussianMixture(6, covariance_type=kind, random_state=0).fit(repeated)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@every_type
def test_attributes_that_float32_cannot_hold_are_refused(kind, scale):
    x = scale * np.random.default_rng(0).standard_normal((50, 2))
    estimator = GaussianMixture(2, covariance_type=kind, reg_covar=0, random_state=0)
    with pytest.raises(ValueError, match=r"`X` should have a scale near 1, or be float64. Found `\w+_` up to"):
        estimator.fit(x.astype(np.float32))
    assert not hasattr(estimator, "means_")
    found = estimator.fit(x)
    assert all(np.isfinite(value).all() for value in (found.covariances_, found.precisions_))


@pytest.mark.parametrize("kind", ["full", "diag"])
@pytest.mark.parametrize("n", [20, 20_000])
def test_the_first_of_equal_components_is_predicted(kind, n):
    x = np.random.default_rng(0).normal(size=(n, 3))
    model = GaussianMixture(3, covariance_type=kind, max_iter=0, random_state=0).fit(x)
    for name in ("weights_", "means_", "precisions_cholesky_"):
        values = getattr(model, name)
        setattr(model, name, np.stack([values[0], values[1], values[1]]))
    model.weights_ = np.array([0.0, 0.5, 0.5])
    assert (model.predict(x) == 1).all()


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    ("n", "options"),
    [(150, {}), (150, {"covariance_type": "diag"}), (150, {"n_init": 3}), (40_000, {"max_iter": 3})],
    ids=["few", "diag", "starts", "many"],
)
def test_samples_pass_through_six_files(n, options):
    """Who follows `X` through a fit opens few files: those of functions that take or name samples."""
    x = torch.randn(n, 7, generator=seeded(), dtype=torch.float64).numpy()
    folder, files = str(Path(toolkit.__file__).parent), set()

    def holds(value):
        if isinstance(value, tuple | list):
            return any(map(holds, value))
        is_array = isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 2
        return is_array and 7 in value.shape and max(value.shape) > 100

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(folder):
            files.update({path} if any(map(holds, list(frame.f_locals.values()))) else ())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        GaussianMixture(3, random_state=0, **options).fit(x)
    finally:
        sys.setprofile(before)
    assert 4 <= len(files) <= 6, sorted(files)
