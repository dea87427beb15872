"""The machines as a user meets them: rows of any kind, exact scores, units of the data, hostile input."""

import copy
import functools
import math
import pickle
import re
import weakref

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from each import each
from scipy import sparse
from scipy.special import expit
from scipy.stats import norm
from sklearn import datasets as bundled
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import BernoulliRBM as Theirs
from values import binary_states

from toolkit.rbm import (
    RBM,
    DivergenceError,
    likelihood_gradient,
    linear_decay,
)
from toolkit.rbm.estimators import BernoulliRBM, GaussianRBM, _base, _rows
from toolkit.rbm.estimators._trainer import ExactTrainer

every_machine = pytest.mark.parametrize("machine", [BernoulliRBM, GaussianRBM], ids=lambda machine: machine.__name__)
PLAIN = {"offset_rate": None, "weight_decay": 0.0, "schedule": "constant"}
DEVICES = [
    "cpu",
    pytest.param(
        ACCELERATOR,
        marks=pytest.mark.gpu,
    ),
]
every_device = pytest.mark.parametrize("device", DEVICES)


def patterns(n=60, d=6, seed=0):
    """Draw zeros and ones, features of different frequencies and correlated."""
    rng = np.random.default_rng(seed)
    common = rng.random((n, 1)) < 0.4
    return (common ^ (rng.random((n, d)) < np.linspace(0.1, 0.4, d))).astype(float)


def reals(n=60, d=4, seed=0):
    """Draw real numbers in units of their own."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)) + 2 * rng.integers(0, 2, (n, 1)) * np.linspace(-1, 2, d)
    return 100 * np.arange(1, d + 1) + x * np.logspace(-1, 1, d)


def rows_of(machine):
    return reals() if machine is GaussianRBM else patterns()


def trained(machine, x=None, **options):
    x = rows_of(machine) if x is None else x
    return machine(**{"n_components": 3, "n_iter": 20, "random_state": 0, "n_chains": None, **options}).fit(x), x


# --- how much each row counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 10, 11, 1000])
def test_update_of_a_batch_of_any_size_is_a_mean_over_its_rows(n):
    """scikit-learn's sums the chains and divides by the rows: its biases move by 5 instead of 0.5 for one row."""
    x = np.tile(patterns(3), (334, 1))[:n]
    machine = BernoulliRBM(2, learning_rate=1.0, batch_size=10, n_chains=20_000, random_state=0, **PLAIN)
    machine.partial_fit(patterns())
    before = machine.intercept_visible_.copy()
    hidden = machine.h_samples_
    expected = x.mean(0) - expit(hidden @ machine.components_ + before).mean(0)
    machine.partial_fit(x)
    assert np.abs(machine.intercept_visible_ - before - expected).max() < 4 * 0.5 / math.sqrt(20_000)


@every_machine
@pytest.mark.parametrize("n", [1, 7, 25])
def test_update_of_a_batch_is_the_gradient_of_its_mean_likelihood(machine, n):
    found, x = trained(machine, method="exact", learning_rate=0.1, batch_size=10, **PLAIN)
    rbm = found.rbm_ if machine is BernoulliRBM else standardised(found)
    rows = torch.from_numpy(x[:n] if machine is BernoulliRBM else (x[:n] - found.mean_) / found.scale_)
    gradient = likelihood_gradient(rbm, rows)
    expected = {name: value.detach() - 0.1 * gradient[name] for name, value in rbm.named_parameters()}
    found.partial_fit(x[:n])
    after = found.rbm_ if machine is BernoulliRBM else standardised(found)
    for name, value in after.named_parameters():
        assert torch.allclose(value, expected[name], rtol=1e-10, atol=1e-12)


def standardised(found):
    """Return the machine of standardised data by its definition, from the attributes in the units of the data."""
    rbm = RBM(*found.components_.T.shape, visible="gaussian", dtype=torch.float64)
    s = found.scale_
    with torch.no_grad():
        rbm.weights.copy_(torch.from_numpy((found.components_ / s).T))
        rbm.visible_bias.copy_(torch.from_numpy((found.intercept_visible_ - found.mean_) / s))
        rbm.visible_log_variance.copy_(torch.from_numpy(np.log(found.variance_ / s**2)))
        shift = found.components_ @ (found.mean_ / found.variance_)
        rbm.hidden_bias.copy_(torch.from_numpy(found.intercept_hidden_ + shift))
    return rbm


def test_exact_step_in_centred_coordinates_with_decay_by_autograd():
    """The penalty and the gradient are those of W and of biases b + W lambda and c + W^T mu, offsets held."""
    generator = torch.Generator().manual_seed(0)
    rbm, x = RBM(6, 3, generator=generator, dtype=torch.float64), torch.from_numpy(patterns())
    with torch.no_grad():
        for value in rbm.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
        visible, hidden = x.mean(0), rbm.hidden_mean(x).mean(0)
        w = rbm.weights.clone().requires_grad_()
        b = (rbm.visible_bias + rbm.weights @ hidden).requires_grad_()
        c = (rbm.hidden_bias + rbm.weights.mT @ visible).requires_grad_()
    joint = RBM(6, 3, dtype=torch.float64)
    plain = {"weights": w, "visible_bias": b - w @ hidden, "hidden_bias": c - w.mT @ visible}
    likelihood = torch.func.functional_call(Likelihood(joint), {f"rbm.{k}": v for k, v in plain.items()}, (x,))
    (-likelihood + 0.2 * w.square().sum() / 2).backward()
    w, b, c = (value.detach() - 0.3 * value.grad for value in (w, b, c))
    ExactTrainer(rbm, batch_size=60, offset_rate=1.0, weight_decay=0.2).step(x, learning_rate=0.3)
    assert torch.allclose(rbm.weights, w, rtol=1e-11)
    assert torch.allclose(rbm.visible_bias, b - w @ hidden, rtol=1e-11)
    assert torch.allclose(rbm.hidden_bias, c - w.mT @ visible, rtol=1e-11)


class Likelihood(torch.nn.Module):
    """The mean log-likelihood as a function of the parameters."""

    def __init__(self, rbm):
        super().__init__()
        self.rbm = rbm

    def forward(self, x):
        return self.rbm.log_likelihood(x).mean()


def test_last_smaller_batch_of_an_epoch_counts_as_what_it_is():
    """13 equal rows in batches of 10: two steps, both with the gradient of that row."""
    x = np.tile([[1.0, 0.0, 1.0]], (13, 1))
    machine = BernoulliRBM(2, method="exact", n_iter=0, batch_size=10, learning_rate=0.3, random_state=5, **PLAIN).fit(
        x
    )
    rbm = machine.rbm_
    for _ in range(2):
        gradient = likelihood_gradient(rbm, torch.from_numpy(x[:1]))
        with torch.no_grad():
            for name, value in rbm.named_parameters():
                value -= 0.3 * gradient[name]
    found = machine.set_params(n_iter=1).fit(x)
    assert np.allclose(found.components_, rbm.weights.detach().mT, rtol=1e-10)
    assert np.allclose(found.intercept_visible_, rbm.visible_bias.detach(), rtol=1e-10)


def test_many_rows_at_once_do_not_saturate_the_hidden_units():
    """200 calls with all rows leave scikit-learn's hidden means at 1."""
    x = bundled.load_digits().data[:500] / 16
    machine = BernoulliRBM(16, random_state=0)
    for _ in range(200):
        machine.partial_fit(x)
    assert 0.1 < machine.transform(x).mean() < 0.9
    assert np.abs(machine.components_).max() < 5


def test_learning_rate_falls_to_zero_only_if_asked():
    x = np.tile([[1.0, 0.0, 1.0]], (10, 1))
    options = {"method": "exact", "n_iter": 4, "learning_rate": 0.01, "random_state": 5, "offset_rate": None}
    changes = {}
    for schedule in ("constant", "linear"):
        seen = []
        BernoulliRBM(
            2,
            **options,
            schedule=schedule,
            callback=lambda epoch, rbm, seen=seen: seen.append(rbm.visible_bias.tolist()),
        ).fit(x)
        changes[schedule] = np.abs(np.diff(np.array(seen), axis=0)[:, 0])
    ratio = changes["linear"] / changes["constant"]
    assert np.allclose(ratio, [0.75, 0.5, 0.25], rtol=0.1)


# --- what is learned -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pcd", "cd", "fpcd", "tempering", "exact"])
@every_machine
def test_every_method_learns_more_than_independent_features(machine, method):
    x = reals(300) if machine is GaussianRBM else patterns(300)
    rate = 0.1 if machine is GaussianRBM else 0.5
    options = {"n_iter": 60, "batch_size": 20, "n_chains": 50, "learning_rate": rate, "random_state": 0}
    found = machine(4, method=method, **options).fit(x)
    assert found.log_likelihood(x).mean() > independent(machine, x, x).mean() + 0.2
    assert hasattr(found, "h_samples_") == (method not in ("cd", "exact"))


def independent(machine, train, x):
    """Return the log-likelihood of features that have nothing to do with each other."""
    if machine is GaussianRBM:
        return norm(train.mean(0), train.std(0)).logpdf(x).sum(1)
    p = (train.sum(0) + 1) / (len(train) + 2)
    return (x * np.log(p) + (1 - x) * np.log1p(-p)).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer"])
def test_real_numbers_in_their_own_units_out_of_the_box(name):
    x = getattr(bundled, f"load_{name}")().data
    x = x[np.random.RandomState(0).permutation(len(x))]
    train, held_out = x[: len(x) * 4 // 5], x[len(x) * 4 // 5 :]
    found = GaussianRBM(random_state=0).fit(train)
    assert found.score(held_out) > independent(GaussianRBM, train, held_out).mean() + 1.5
    assert ((found.variance_ > 0) & (found.variance_ < 1.5 * train.var(0))).all()


def test_training_starts_at_the_frequencies_of_the_data_but_at_zero_in_few_epochs(monkeypatch):
    x = patterns()
    assert not BernoulliRBM(2, n_iter=0).fit(x).intercept_visible_.any()
    monkeypatch.setattr(BernoulliRBM, "_epochs", lambda self, n_batches: 0)
    for found in (BernoulliRBM(2).fit(x), BernoulliRBM(2, learning_rate=1e-14).partial_fit(x)):
        assert np.allclose(expit(found.intercept_visible_), (x.sum(0) + 1) / (len(x) + 2), rtol=1e-12)
    x = reals()
    found = GaussianRBM(2, n_iter=0).fit(x)
    assert np.allclose(found.intercept_visible_, x.mean(0), rtol=1e-12)
    assert np.allclose(found.variance_, x.var(0), rtol=1e-10)


def test_parameters_can_be_the_mean_of_the_last_ones():
    seen = []
    found, _ = trained(
        BernoulliRBM,
        n_iter=6,
        average_from=0.5,
        batch_size=60,
        callback=lambda _, rbm: seen.append(rbm.weights.tolist()),
    )
    assert np.allclose(found.components_.T, np.mean(seen[3:], 0), rtol=1e-10)


@every_machine
def test_interrupted_training_goes_on_from_its_checkpoint_with_the_same_bits(machine, tmp_path):
    def stop(epoch, rbm):
        if epoch == 3:
            raise KeyboardInterrupt

    options = {"n_iter": 6, "batch_size": 10}
    whole, x = trained(machine, **options)
    found = machine(3, random_state=0, n_chains=None, **options, checkpoint=tmp_path / "progress")
    found.set_params(callback=stop)
    with pytest.raises(KeyboardInterrupt):
        found.fit(x)
    found.set_params(callback=None).fit(x)
    assert np.array_equal(found.components_, whole.components_)


def halved(x):
    return [x[: len(x) // 2], x[len(x) // 2 :]]


def loaded(x):
    own = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(torch.from_numpy(x), batch_size=7, shuffle=True, generator=own)


READ = {"array": np.asarray, "sparse": sparse.csr_array, "chunks": halved, "DataLoader": loaded}


@every_machine
@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("random_state", [0, None], ids="random state {}".format)
def test_every_kind_of_rows_goes_on_from_its_checkpoint(machine, read, random_state, tmp_path):
    """With the same bits where there is a seed; without one the file decides."""

    def stop(epoch, rbm):
        if epoch == 3:
            raise KeyboardInterrupt

    x, options = rows_of(machine), {"n_iter": 6, "batch_size": 10, "n_chains": None}
    found = machine(3, random_state=random_state, **options, checkpoint=tmp_path / "c", callback=stop)
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        found.fit(read(x))
    torch.manual_seed(2)
    found.set_params(callback=None).fit(read(x))
    assert found.n_iter_ == 6
    if random_state is not None:
        torch.manual_seed(1)
        whole = machine(3, random_state=random_state, **options).fit(read(x))
        assert np.array_equal(found.components_, whole.components_)


OTHER = {
    "data": ({}, "other data"),
    "random_state": ({"random_state": 1}, "`random_state` 0 in .*, where it is 1 now"),
    "weight_decay": ({"weight_decay": 0.5}, "`weight_decay` .*, where it is 0.5 now"),
    "gibbs_steps": ({"gibbs_steps": 2}, "`gibbs_steps` 1 in .*, where it is 2 now"),
    "average_from": ({"average_from": 0.5}, "`average_from` None in .*, where it is 0.5 now"),
    "learning_rate": ({"learning_rate": 0.01}, "`learning_rate` .*, where it is 0.01 now"),
    "method": ({"method": "exact"}, "`method` pcd in .*, where it is exact now"),
    "n_components": ({"n_components": 4}, "`n_components` 3 in .*, where it is 4 now"),
    "n_iter": ({"n_iter": 3}, "no more epochs .* Found 4 in .*, where it is 3 now"),
}


@every_machine
@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize(("others", "message"), OTHER.values(), ids=OTHER)
def test_checkpoint_of_another_fit_is_refused(machine, others, message, read, tmp_path):
    x, options = rows_of(machine), {"n_components": 3, "n_iter": 4, "random_state": 0, "checkpoint": tmp_path / "c"}
    machine(**options).fit(read(x))
    with pytest.raises(ValueError, match=f"`checkpoint` should be of .*{message}"):
        machine(**options | others).fit(read(x if others else 1 - x))


@every_machine
def test_checkpoint_of_a_shorter_fit_goes_on(machine, tmp_path, capsys):
    seen = []
    options = {"n_components": 3, "random_state": 0, "checkpoint": tmp_path / "c", "batch_size": 10}
    machine(**options, n_iter=2).fit(rows_of(machine))
    machine(**options, n_iter=5, verbose=1, callback=lambda epoch, rbm: seen.append(epoch)).fit(rows_of(machine))
    assert seen == [3, 4, 5]
    assert "  goes on from update 12 of 30" in capsys.readouterr().out.splitlines()


# --- scores ----------------------------------------------------------------------------------------------------------


def test_likelihood_and_pseudo_likelihood_of_zeros_and_ones_by_enumeration():
    found, x = trained(BernoulliRBM, n_iter=100)
    states = binary_states(6)
    hidden = binary_states(3)
    joint = (
        states @ found.intercept_visible_[:, None]
        + (hidden @ found.intercept_hidden_)[None]
        + states @ found.components_.T @ hidden.T
    )
    log_p = np.logaddexp.reduce(joint, 1)
    assert math.isclose(found.log_partition_, np.logaddexp.reduce(log_p), rel_tol=1e-12)
    log_p -= np.logaddexp.reduce(log_p)
    where = x @ 2 ** np.arange(5, -1, -1)
    assert np.allclose(found.log_likelihood(x), log_p[where.astype(int)], rtol=1e-11)
    table = log_p.reshape([2] * 6)
    expected = [
        sum(table[tuple(row)] - np.logaddexp.reduce(table[(*row[:i], slice(None), *row[i + 1 :])]) for i in range(6))
        for row in x.astype(int)
    ]
    assert np.allclose(found.score_samples(x), expected, rtol=1e-10)
    assert math.isclose(found.score(x), np.mean(expected), rel_tol=1e-10)


def test_grey_values_have_the_expected_score_of_scikit_learn():
    found, x = trained(BernoulliRBM, 0.9 * patterns() + 0.03)
    energy = lambda v: found.rbm_.free_energy(torch.from_numpy(v)).detach().numpy()  # noqa: E731
    expected = 0
    for i in range(x.shape[1]):
        flipped = x.copy()
        flipped[:, i] = 1 - x[:, i]
        expected = expected - np.logaddexp(0, energy(x) - energy(flipped))
    assert np.allclose(found.score_samples(x), expected, rtol=1e-10)


def test_density_of_real_numbers_is_that_of_the_mixture():
    """2^H Gaussians with means b + W h, in the units of the data."""
    found, x = trained(GaussianRBM, reals(200), n_iter=60)
    hidden = binary_states(3)
    means = found.intercept_visible_ + hidden @ found.components_
    # The weight of h: the integral over v of e^-E.
    b, variance = found.intercept_visible_, found.variance_
    weights = hidden @ found.intercept_hidden_ + ((means**2 - b**2) / (2 * variance)).sum(1)
    weights -= np.logaddexp.reduce(weights)
    parts = norm(means, np.sqrt(variance)).logpdf(x[:, None]).sum(-1) + weights
    assert np.allclose(found.score_samples(x), np.logaddexp.reduce(parts, 1), rtol=1e-6)
    assert math.isclose(found.score(x), found.log_likelihood(x).mean(), rel_tol=1e-12)


def test_score_is_the_same_each_time_and_follows_the_attributes():
    found, x = trained(BernoulliRBM)
    first = found.log_likelihood(x)
    assert np.array_equal(first, found.log_likelihood(x))
    found.intercept_visible_ = found.intercept_visible_ + 1
    assert not np.allclose(first, found.log_likelihood(x))
    total = np.exp(found.log_likelihood(binary_states(6))).sum()
    assert math.isclose(total, 1, rel_tol=1e-10)


def test_log_partition_follows_attributes_whose_values_only_change_places():
    found, _ = trained(BernoulliRBM)
    found.components_ = np.arange(18.0).reshape(3, 6) / 8 - 1  # every sum of them is exact
    found.intercept_visible_ = np.arange(6.0) / 2
    for _ in range(2):
        assert math.isclose(np.exp(found.log_likelihood(binary_states(6))).sum(), 1, rel_tol=1e-10)
        found.components_ = found.components_[:, ::-1].copy()


@every_machine
def test_log_partition_that_cannot_be_enumerated_is_estimated(machine, monkeypatch):
    found, _ = trained(machine)
    exact = found.log_partition_
    found._log_partition = None
    monkeypatch.setattr(_base, "ENUMERABLE_UNITS", 0)
    assert 0 < abs(found.log_partition_ - exact) < 0.05


# --- draws and means -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_machine
@pytest.mark.parametrize("exactly", [True, False], ids=["exactly", "by chains"])
def test_draws_have_the_moments_of_the_model(machine, exactly, monkeypatch):
    x = reals(400) if machine is GaussianRBM else patterns(400)
    found, _ = trained(machine, x, n_iter=30, learning_rate=0.05, batch_size=20)
    if not exactly:
        monkeypatch.setattr(_base, "_TABLED_UNITS", 0)
    draws = found.sample(4000, steps=50)
    if machine is BernoulliRBM:
        states = binary_states(6)
        p = np.exp(found.log_likelihood(states))
        assert np.abs(draws.mean(0) - p @ states).max() < 4 * 0.5 / math.sqrt(4000)
        assert np.abs(draws.T @ draws / 4000 - states.T @ (p[:, None] * states)).max() < 4 * 0.5 / math.sqrt(4000)
    else:
        # Entropy as drawn, and as the density says of other draws: the same where draws are right.
        assert np.abs((draws.mean(0) - x.mean(0)) / x.std(0)).max() < 0.25
        assert abs(found.score(draws) - found.score(found.sample(4000))) < 0.15


def test_reconstruction_is_the_mean_given_the_mean():
    found, x = trained(BernoulliRBM)
    hidden = expit(x @ found.components_.T + found.intercept_hidden_)
    assert np.allclose(found.transform(x), hidden, rtol=1e-12)
    expected = expit(hidden @ found.components_ + found.intercept_visible_)
    assert np.allclose(found.reconstruct(x), expected, rtol=1e-12)
    found, x = trained(GaussianRBM)
    hidden = expit((x / found.variance_) @ found.components_.T + found.intercept_hidden_)
    assert np.allclose(found.transform(x), hidden, rtol=1e-7)
    expected = hidden @ found.components_ + found.intercept_visible_
    assert np.allclose(found.reconstruct(x), expected, rtol=1e-9)


def test_gibbs_step_of_real_numbers_has_the_noise_of_the_model():
    found, x = trained(GaussianRBM, reals(200), n_iter=60)
    rows = np.repeat(x[:1], 20_000, 0)
    p = found.transform(x[:1])[0]
    moved = found.gibbs(rows)
    mean = p @ found.components_ + found.intercept_visible_
    variance = found.variance_ + (p * (1 - p)) @ found.components_**2
    assert np.abs((moved.mean(0) - mean) / np.sqrt(variance)).max() < 4 / math.sqrt(20_000)
    assert np.abs(moved.var(0) / variance - 1).max() < 0.1


@every_machine
def test_module_is_the_same_machine_and_a_copy(machine):
    found, x = trained(machine)
    rbm = found.rbm_
    likelihood = rbm.log_likelihood(torch.from_numpy(x)).detach().numpy()
    assert np.allclose(likelihood, found.log_likelihood(x), rtol=1e-6)
    with torch.no_grad():
        rbm.weights.zero_()
    assert np.abs(found.components_).max() > 0
    assert found.rbm_.weights.requires_grad


# --- units of real numbers -----------------------------------------------------------------------------------------


def test_change_of_units_changes_nothing_else():
    x = reals()
    a, b = np.array([0.01, 3.0, -2.0, 1000.0]), np.array([5.0, -7.0, 0.0, 1e4])
    one, other = trained(GaussianRBM, x)[0], trained(GaussianRBM, a * x + b)[0]
    # Signs of the random start are not turned with those of a feature.
    keep = [0, 1, 3]
    one, other = trained(GaussianRBM, x[:, keep])[0], trained(GaussianRBM, (a * x + b)[:, keep])[0]
    scale = a[keep]
    assert np.allclose(other.components_, one.components_ * scale, rtol=1e-6)
    assert np.allclose(other.variance_, one.variance_ * scale**2, rtol=1e-6)
    assert np.allclose(other.transform((a * x + b)[:, keep]), one.transform(x[:, keep]), atol=1e-6)
    shift = np.log(np.abs(scale)).sum()
    assert np.allclose(other.score_samples((a * x + b)[:, keep]), one.score_samples(x[:, keep]) - shift, atol=1e-5)


def test_offset_far_beyond_the_spread():
    x = np.random.default_rng(0).standard_normal((100, 3))
    near, far = trained(GaussianRBM, x)[0], trained(GaussianRBM, x + 1e7)[0]
    assert np.allclose(near.score_samples(x), far.score_samples(x + 1e7), atol=1e-4)
    assert np.allclose(near.transform(x), far.transform(x + 1e7), atol=1e-5)


@pytest.mark.slow
def test_feature_that_is_constant_or_a_copy_keeps_a_variance():
    x = reals(100)
    x = np.column_stack([x, np.full(100, 7.0), x[:, 0]])
    found = GaussianRBM(8, random_state=0, learning_rate=0.05).fit(x)
    assert (found.variance_ >= 1e-3 * found.scale_**2 * (1 - 1e-9)).all()
    held = GaussianRBM(8, random_state=0, learning_rate=0.05, min_variance=0.5).fit(x)
    assert math.isclose((held.variance_ / held.scale_**2).min(), 0.5, rel_tol=1e-9)
    assert np.isfinite(found.score_samples(x)).all()
    assert found.scale_[4] == 1
    assert abs(found.sample(100)[:, 4].mean() - 7) < 0.1


@pytest.mark.slow
def test_rectified_units_learn_real_numbers():
    x = reals(200)
    found = GaussianRBM(4, hidden="rectified", learning_rate=0.02, n_iter=50, random_state=0).fit(x)
    assert found.transform(x).max() > 1
    assert np.isfinite(found.reconstruct(x)).all()
    assert np.square((found.reconstruct(x) - x) / x.std(0)).mean() < 0.9
    assert np.isfinite(found.sample(5, steps=10)).all()


# --- rows of any kind ------------------------------------------------------------------------------------------------


@every_machine
@every_device
def test_tensors_give_tensors_and_the_same_machine(machine, device):
    x = rows_of(machine)
    options = {"n_components": 3, "n_iter": 3, "random_state": 0}
    array, tensor = machine(**options).fit(x), machine(**options).fit(torch.from_numpy(x).to(device))
    rows = torch.from_numpy(x).to(device)
    answers = (
        tensor.components_,
        tensor.transform(rows),
        tensor.gibbs(rows),
        tensor.sample(2),
        tensor.score_samples(rows),
    )
    assert all(isinstance(value, torch.Tensor) and value.device.type == device for value in answers)
    if device == "cpu":
        assert np.array_equal(tensor.components_.numpy(), array.components_)
    assert np.allclose(tensor.transform(x), tensor.transform(rows).cpu(), rtol=1e-9)
    assert isinstance(tensor.transform(x), np.ndarray)
    assert not any(value.requires_grad for value in answers)
    tensor.partial_fit(rows[:5]).partial_fit(x[5:10])
    assert tensor.components_.device.type == device


def test_gradient_of_the_rows_is_left_alone():
    rows = torch.from_numpy(patterns()).requires_grad_()
    found = BernoulliRBM(2, n_iter=2, random_state=0).fit(rows)
    assert rows.grad is None
    assert not found.transform(rows).requires_grad


class Loader:
    """Batches with labels, as a data loader gives them."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return ([torch.from_numpy(part), torch.zeros(len(part))] for part in np.array_split(self.x, 3))


CHUNKED = {
    "list": lambda x: list(np.array_split(x, 3)),
    "tensors": lambda x: tuple(torch.from_numpy(part) for part in np.array_split(x, 3)),
    "function": lambda x: lambda: iter(np.array_split(x, 3)),
    "loader": Loader,
    "sparse": lambda x: [sparse.csr_array(part) for part in np.array_split(x, 3)],
    "with an empty one": lambda x: [x[:20], x[:0], x[20:]],
}


@pytest.mark.slow
@every_machine
@pytest.mark.parametrize("kind", CHUNKED)
def test_chunks_are_learned_as_the_whole_is(machine, kind):
    x = reals(300) if machine is GaussianRBM else patterns(300)
    rate = 0.1 if machine is GaussianRBM else 0.5
    options = {"n_components": 3, "n_iter": 60, "batch_size": 20, "learning_rate": rate, "random_state": 0}
    options["n_chains"] = 100
    whole, parts = machine(**options).fit(x), machine(**options).fit(CHUNKED[kind](x))
    assert abs(whole.score(x) - parts.score(x)) < 0.1
    assert whole.score(x) - machine(**options).set_params(n_iter=0).fit(x).score(x) > 0.2
    assert np.allclose(parts.transform(CHUNKED[kind](x)), parts.transform(x), rtol=1e-10)
    again = machine(**options).fit(CHUNKED[kind](x))
    assert np.array_equal(again.components_, parts.components_)


@every_machine
def test_only_one_chunk_is_held(machine):
    x = rows_of(machine)
    alive, most = [], 0

    def chunks():
        nonlocal most
        for part in np.array_split(x, 6):
            copied = part.copy()
            alive.append(weakref.ref(copied))
            most = max(most, sum(ref() is not None for ref in alive))
            yield copied
            del copied

    machine(2, n_iter=2, random_state=0, n_chains=5).fit(chunks)
    assert most <= 2


def test_large_memory_mapped_array_is_read_in_blocks(tmp_path, monkeypatch):
    x = patterns(3000)
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=x.shape)
    mapped[:] = x
    mapped.flush()
    read = []
    take = np.memmap.__getitem__
    monkeypatch.setattr(_rows, "_MAPPED", 100)
    monkeypatch.setattr(_rows, "_BLOCK_BYTES", 6 * 4 * 500)
    monkeypatch.setattr(
        np.memmap, "__getitem__", lambda self, where: (read.append(where), take(self, where))[1], raising=True
    )
    options = {"n_iter": 2, "random_state": 0, "n_components": 2}
    found = BernoulliRBM(**options).fit(np.lib.format.open_memmap(tmp_path / "x.npy", mode="r"))
    starts = [where.start for where in read if isinstance(where, slice) and where.start is not None]
    assert (
        max(where.stop - where.start for where in read if isinstance(where, slice) and where.start is not None) == 500
    )
    assert starts[:6] == [0, 500, 1000, 1500, 2000, 2500]
    assert sorted(starts[-6:]) == starts[:6] != starts[-6:]  # in another order in each epoch
    assert found.components_.dtype == np.float32
    assert abs(found.score(x) - BernoulliRBM(**options).fit(x.astype(np.float32)).score(x)) < 0.2


def test_sparse_matrix_is_never_made_dense_as_a_whole(monkeypatch):
    x = sparse.random_array((4000, 50), density=0.05, rng=np.random.default_rng(0), format="csr")
    x.data[:] = 1
    monkeypatch.setattr(_rows, "_BLOCK_BYTES", 8 * 50 * 64)
    longest, dense = [], sparse.csr_array.toarray
    monkeypatch.setattr(
        sparse.csr_array, "toarray", lambda self, *a, **k: (longest.append(self.shape[0]), dense(self, *a, **k))[1]
    )
    found = BernoulliRBM(4, n_iter=2, batch_size=10, random_state=0).fit(x)
    found.transform(x), found.score_samples(x)
    assert max(longest) <= 64
    assert sum(longest) >= 4000 * 5


def test_bytes_stay_bytes(monkeypatch):
    x = patterns().astype(np.uint8)
    seen = []
    shuffled = _rows._Dense.shuffled
    monkeypatch.setattr(
        _rows._Dense,
        "shuffled",
        lambda self, *a: (seen.append(self.x.dtype), seen.append(self.x.data_ptr()), shuffled(self, *a))[2],
    )
    found = BernoulliRBM(3, n_iter=2, random_state=0).fit(x)
    assert seen[:2] == [torch.uint8, x.ctypes.data]
    same = BernoulliRBM(3, n_iter=2, random_state=0).fit(x.astype(float))
    assert np.array_equal(found.components_, same.components_)


@every_machine
def test_rows_are_read_from_any_layout_and_left_as_they_were(machine):
    x = rows_of(machine)
    base = trained(machine, x, n_iter=2)[0].components_
    read_only = x.copy()
    read_only.flags.writeable = False
    wide = np.repeat(x, 2, 1)
    for rows in (np.asfortranarray(x), wide[:, ::2], x[::-1][::-1], read_only, x.tolist(), x.astype(object)):
        before = copy.deepcopy(rows)
        # Sums over rows round otherwise in another layout.
        assert np.allclose(trained(machine, rows, n_iter=2)[0].components_, base, rtol=1e-9)
        assert np.array_equal(np.asarray(rows), np.asarray(before))


def test_values_are_binarised_where_asked():
    x = bundled.load_digits().data[:100]
    one = BernoulliRBM(4, n_iter=3, random_state=0, binarize=7.5).fit(x)
    other = BernoulliRBM(4, n_iter=3, random_state=0).fit((x > 7.5).astype(float))
    assert np.array_equal(one.components_, other.components_)
    assert np.array_equal(one.transform(x), other.transform(x > 7.5))
    assert np.array_equal(one.score_samples(x), other.score_samples(x > 7.5))


# --- randomness and state ------------------------------------------------------------------------------------------


@every_machine
def test_seed_decides_and_no_global_generator_is_touched(machine):
    x = rows_of(machine)
    torch_state, numpy_state = torch.get_rng_state(), np.random.mtrand._rand.get_state()[1].copy()
    one, two = (machine(3, n_iter=2, random_state=7).fit(x) for _ in range(2))
    assert np.array_equal(one.components_, two.components_)
    assert np.array_equal(one.sample(3), two.sample(3))
    assert not np.array_equal(machine(3, n_iter=2, random_state=8).fit(x).components_, one.components_)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.mtrand._rand.get_state()[1])


def test_generator_of_the_user_goes_on():
    x, generator = patterns(), torch.Generator().manual_seed(3)
    machine = BernoulliRBM(3, n_iter=1, random_state=generator)
    once, twice = machine.fit(x).components_, machine.fit(x).components_
    assert not np.array_equal(once, twice)


@every_machine
def test_partial_fit_goes_on_from_fit(machine):
    found, x = trained(machine, n_iter=200)  # weights far larger than one step
    before, chains = found.components_.copy(), found.h_samples_.copy()
    found.partial_fit(x[:10])
    assert 0 < np.abs((found.components_ - before) / np.abs(before).max()).max() < 0.2
    assert found.h_samples_.shape == chains.shape
    assert found.partial_fit(x[:1]) is found
    # An attribute that a user sets is where it goes on from.
    found.components_ = 0 * found.components_
    found.partial_fit(x[:1])
    assert np.abs(found.components_ / (found.scale_ if machine is GaussianRBM else 1)).max() < 0.2


@every_machine
def test_chunks_are_the_batches_of_partial_fit(machine):
    x = rows_of(machine)
    one, other = machine(3, random_state=0), machine(3, random_state=0)
    one.partial_fit(part for part in np.array_split(x, 5))
    for part in np.array_split(x, 5):
        other.partial_fit(part)
    assert np.array_equal(one.components_, other.components_)


def test_fit_forgets_what_came_before():
    x = patterns()
    used = BernoulliRBM(3, n_iter=2, random_state=0).partial_fit(x).fit(x)
    assert np.array_equal(used.components_, BernoulliRBM(3, n_iter=2, random_state=0).fit(x).components_)


@every_machine
def test_copy_shares_nothing(machine):
    found, x = trained(machine)
    other = copy.deepcopy(found)
    before = found.components_.copy()
    other.partial_fit(x)
    assert np.array_equal(found.components_, before)
    assert len(pickle.dumps(found)) < 40_000


@every_machine
def test_callback_sees_every_epoch_and_ends_training_by_raising(machine):
    seen = []
    trained(machine, n_iter=3, callback=lambda epoch, rbm: seen.append((epoch, type(rbm))))
    assert seen == [(1, RBM), (2, RBM), (3, RBM)]

    def stop(epoch, rbm):
        raise StopIteration("enough")

    with pytest.raises((StopIteration, RuntimeError), match="enough"):
        trained(machine, callback=stop)


@every_machine
@pytest.mark.parametrize("verbose", [1, 2, True])
def test_progress_in_lines(machine, verbose, capsys):
    trained(machine, n_iter=2, verbose=verbose)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0] == f"{machine.__name__}: 60 rows, 2 epochs"
    assert (lines[1][-1] == "s") == (verbose == 2) or machine is GaussianRBM
    trained(machine, n_iter=2)
    assert capsys.readouterr().out == ""


@every_machine
def test_a_long_fit_shows_at_most_a_hundred_and_one_lines(machine, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(machine, "_show", lambda self, rbm, visible: float(len(shown.append(1) or shown)))
    trained(machine, n_iter=777, batch_size=60, verbose=1)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [f"  epoch {epoch}" for epoch in [*range(8, 777, 8), 777]]
    assert len(shown) == len(lines)


# --- hostile input ---------------------------------------------------------------------------------------------------


HOSTILE = {
    "empty": (np.empty((0, 3)), ValueError, "0 sample"),
    "no features": (np.empty((5, 0)), ValueError, "0 feature"),
    "a vector": (np.ones(5), ValueError, "Expected 2D array"),
    "three dimensions": (np.ones((2, 3, 4)), ValueError, "dim 3|3 dim"),
    "not a number": (np.array([[1.0, np.nan], [1.0, 0.0]]), ValueError, "NaN"),
    "infinite": (np.array([[1.0, np.inf], [1.0, 0.0]]), ValueError, "infinity"),
    "complex": (np.ones((5, 2)) * 1j, ValueError, "Complex"),
    "words": (np.array([["a", "b"], ["c", "d"]]), ValueError, "could not convert|dtype|numeric"),
    "nothing": (None, ValueError, "Expected 2D array|dtype|NoneType"),
    "ragged": ([[1.0], [1.0, 0.0]], ValueError, "inhomogeneous|sequence|array"),
    "sparse, not a number": (sparse.csr_array([[0.0, np.nan], [1.0, 0.0]]), ValueError, "NaN"),
    "tensor: empty": (torch.empty(0, 3), ValueError, r"`X` should have shape \(N, D\)"),
    "tensor: no features": (torch.empty(5, 0), ValueError, r"`X` should have shape \(N, D\)"),
    "tensor: a vector": (torch.ones(5), ValueError, r"`X` should have shape \(N, D\).*Found \(5,\)"),
    "tensor: infinite": (torch.tensor([[1.0], [torch.inf]]), ValueError, "`X` should be finite. Found inf"),
    "tensor: complex": (torch.ones(5, 2, dtype=torch.complex64), TypeError, "real numbers"),
    "tensor: sparse": (torch.eye(5).to_sparse(), TypeError, "dense tensor"),
    "chunks: none": (lambda: iter([]), ValueError, "at least 1 row. Found 0 in all chunks"),
    "chunks: read once": (iter([np.ones((2, 2))]), TypeError, "read again for each epoch"),
    "chunks: other features": ([np.ones((2, 2)), np.ones((2, 3))], ValueError, "3 features"),
    "chunks: not a number": ([np.ones((2, 2)), np.full((2, 2), np.nan)], ValueError, "NaN"),
}
OUT_OF_RANGE = {
    "negative": (np.array([[0.0, -0.5]]), "Found -0.5"),
    "above 1": (np.array([[0.0, 1.5]]), "Found 1.5"),
    "bytes": (np.array([[0, 255]], dtype=np.uint8), "Found 255"),
    "sparse": (sparse.csr_array([[0.0, 3.0]]), "Found 3.0"),
    "tensor": (torch.tensor([[0, 2]]), "Found 2"),
    "second chunk": ([np.ones((1, 2)), np.full((1, 2), 7.0)], "Found 7.0"),
}


@every_machine
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@each("name", HOSTILE)
def test_hostile_input_gives_one_clear_error(machine, how, name):
    x, kind, message = HOSTILE[name]
    if how == "partial_fit" and name in ("chunks: none", "chunks: read once"):
        return  # batches may be none, and an iterator
    with pytest.raises(kind, match=message):
        getattr(machine(2, n_iter=1, random_state=0), how)(x)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@each("name", OUT_OF_RANGE)
def test_training_data_out_of_range(how, name):
    x, found = OUT_OF_RANGE[name]
    with pytest.raises(ValueError, match=rf"`X` should be between 0 and 1\. {found}"):
        getattr(BernoulliRBM(2, n_iter=1, random_state=0), how)(x)


def test_rounding_beyond_one_is_one_and_answers_take_any_number():
    x = patterns()
    scaled = x * (1 + 3e-16)
    assert scaled.max() > 1
    one, other = (BernoulliRBM(2, n_iter=2, random_state=0).fit(rows) for rows in (x, scaled))
    assert np.array_equal(one.components_, other.components_)
    assert np.isfinite(one.transform(3 * x - 1)).all()
    assert np.allclose(one.score_samples(scaled), one.score_samples(x))


@each("name", OUT_OF_RANGE)
@pytest.mark.parametrize("answer", ["log_likelihood", "score_samples", "score"])
def test_what_no_unit_can_be_has_no_likelihood(answer, name):
    """Its free energy has no lower bound, so that the better the machine, the less its score would mean."""
    x, found = OUT_OF_RANGE[name]
    machine = BernoulliRBM(2, n_iter=1, random_state=0).fit(np.eye(2))
    with pytest.raises(ValueError, match=rf"between 0 and 1\. {found}.*MinMaxScaler\(clip=True\)"):
        getattr(machine, answer)(x)
    machine = BernoulliRBM(2, n_iter=1, binarize=0.5, random_state=0).fit(np.eye(2))
    assert torch.as_tensor(getattr(machine, answer)(x)).isfinite().all()


@every_machine
@pytest.mark.parametrize("kind", [">f8", ">f4", ">i2"])
def test_bytes_in_the_order_of_another_processor(machine, kind):
    x = rows_of(machine).round().astype(kind)
    found, expected = (machine(2, n_iter=2, random_state=0).fit(rows) for rows in (x, x.astype(kind.replace(">", "="))))
    assert np.array_equal(found.components_, expected.components_)
    assert found.components_.dtype == expected.components_.dtype
    assert np.array_equal(found.transform(x), expected.transform(x.astype(kind.replace(">", "="))))


@every_machine
@pytest.mark.parametrize("n", [60, 150])
def test_a_batch_of_all_rows_allocates_no_more(machine, n):
    """A size beyond all memory is that of all rows; of chains there are as many, or 100."""
    x = np.tile(rows_of(machine), (3, 1))[:n]
    found = [machine(3, batch_size=size, n_iter=3, n_chains=None, random_state=0) for size in (10**9, max(n, 100))]
    one, other = (estimator.fit(x) for estimator in found)
    assert np.array_equal(one.components_, other.components_)
    assert one.h_samples_.shape == (max(n, 100), 3)
    assert one.partial_fit(x).h_samples_.shape == (max(n, 100), 3)
    assert machine(3, batch_size=10**9, n_chains=None, random_state=0).partial_fit(x).h_samples_.shape == (10_000, 3)


def test_numbers_whose_variance_is_infinite_are_refused():
    x = reals()
    x[:, 2] *= 1e200
    for how in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=r"variances torch.float64 can hold\. Found inf in column 2"):
            getattr(GaussianRBM(2, random_state=0), how)(x)
    with pytest.raises(ValueError, match=r"variances torch.float64 can hold\. Found inf in column 2"):
        GaussianRBM(2, random_state=0).fit(halved(x))
    for scale in (1e-25, 1e25):
        with pytest.raises(ValueError, match=r"variances torch.float32 can hold\. Found .* in column 0"):
            GaussianRBM(2, random_state=0).fit((scale * reals()).astype(np.float32))
        assert np.isfinite(GaussianRBM(2, n_iter=1, random_state=0).fit(scale * reals()).score(scale * reals()))


BAD_PARAMETERS = {
    "n_components": [0, -3, 1.5, "2", True, None],
    "learning_rate": [0, -0.1, math.nan, math.inf, "a"],
    "batch_size": [0, 1.5],
    "n_iter": [-1, 2.5],
    "verbose": [-1, "loud"],
    "gibbs_steps": [0, 1.5],
    "n_chains": [0, 2.0],
    "n_temperatures": [1, 2.5],
    "fast_rate": [0, -1.0],
    "offset_rate": [0, 1.5, "a"],
    "weight_decay": [-1e-3, math.nan, None],
    "average_from": [-0.1, 1, "a"],
    "method": ["pcd-1", None],
    "schedule": ["cosine", 1],
    "callback": ["foo"],
}


@pytest.mark.parametrize("name", ["learning_rate", "batch_size", "n_iter", "schedule"])
def test_only_a_machine_of_zeros_and_ones_chooses_its_training(name):
    with pytest.raises(ValueError, match=rf"`{name}` should be .*Found None"):
        GaussianRBM(2, **{name: None}).fit(rows_of(GaussianRBM))


@pytest.mark.parametrize(("n_features", "rate"), [(16, 0.4), (64, 0.4), (256, 0.2)])
def test_default_learning_rate_and_length(n_features, rate):
    """30,000 updates or 10 epochs; the rate falls with the root of the features, and is a quarter in `partial_fit`."""
    x = (np.random.default_rng(0).random((20, n_features)) < 0.5).astype(float)
    assert BernoulliRBM()._rate(n_features) == rate
    for how, expected in (("fit", 0.1), ("partial_fit", rate / 4)):
        one, other = BernoulliRBM(2, random_state=0), BernoulliRBM(2, random_state=0, learning_rate=expected)
        given = {"batch_size": 5, "n_iter": 2, "schedule": "linear"}
        found = [getattr(m.set_params(**given), how)(x).components_ for m in (one, other)]
        assert np.array_equal(*found), how
    assert BernoulliRBM()._epochs(1) == 30_000
    assert BernoulliRBM()._epochs(7000) == 10
    assert BernoulliRBM(n_iter=3)._epochs(1) == 3


@pytest.mark.parametrize(
    ("given", "rate", "batch_size", "n_iter"),
    [
        ({"learning_rate": 0.2}, 2 * 0.2, 10, 10),
        ({"batch_size": 5}, 2 * 0.1, 5, 10),
        ({"n_iter": 3}, 2 * 0.1, 10, 3),
        ({"learning_rate": 0.2, "batch_size": 5, "n_iter": 4}, 2 * 0.2, 5, 4),
    ],
    ids=str,
)
def test_an_argument_of_scikit_learn_gives_a_fit_of_its_length(given, rate, batch_size, n_iter):
    """Half of it at the same rate, and the rest at a rate that falls to zero."""
    x = (np.random.default_rng(0).random((60, 16)) < 0.5).astype(float)
    fitted = BernoulliRBM(3, random_state=0, **given).fit(x)
    assert fitted.n_iter_ == n_iter
    literal = BernoulliRBM(
        3,
        learning_rate=rate,
        batch_size=batch_size,
        n_iter=n_iter,
        schedule="constant",
        offset_rate=None,
        random_state=0,
    )
    literal._rates = lambda found: linear_decay(found, hold=0.5)
    assert np.array_equal(fitted.components_, literal.fit(x).components_)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"n_iter": 10}, "grey"),
        ({"n_iter": 10}, "binary"),
        ({"learning_rate": 0.06}, "grey"),
        ({"learning_rate": 0.3}, "binary"),
        ({"n_iter": 30}, "binary"),
        ({"batch_size": 50}, "grey"),
    ],
    ids=str,
)
def test_with_arguments_of_scikit_learn_features_and_likelihood_are_no_worse(given, values):
    """Of three seeds, on held-out digits; a mean accuracy has a standard error of 0.008, a likelihood of 0.2 nats."""
    x, y = bundled.load_digits(return_X_y=True)
    x = x / 16 if values == "grey" else (x >= 8).astype(float)
    order = np.random.RandomState(0).permutation(len(x))
    train, held_out = order[:1348], order[1348:]
    accuracy, likelihood = {}, {}
    for machine in (BernoulliRBM, Theirs):
        found = [machine(64, random_state=seed, **given).fit(x[train]) for seed in range(3)]
        classifiers = [LogisticRegression(max_iter=300).fit(m.transform(x[train]), y[train]) for m in found]
        scores = [c.score(m.transform(x[held_out]), y[held_out]) for c, m in zip(classifiers, found, strict=True)]
        accuracy[machine] = np.mean(scores)
        small = [machine(12, random_state=seed, **given).fit(x[train]) for seed in range(3)]
        likelihood[machine] = np.mean([exact_mean_of(m, x[held_out]) for m in small])
    assert accuracy[BernoulliRBM] > accuracy[Theirs] - 0.008
    assert likelihood[BernoulliRBM] > likelihood[Theirs]


def exact_mean_of(machine, x):
    """Return the exact mean log-likelihood of a machine of ours or of scikit-learn's."""
    holder = BernoulliRBM(machine.n_components, random_state=0)
    for name in ("components_", "intercept_hidden_", "intercept_visible_", "n_features_in_"):
        setattr(holder, name, getattr(machine, name))
    return holder.log_likelihood(x).mean()


def test_a_long_fit_says_once_how_long_it_takes(monkeypatch, capsys):
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    x = rows_of(BernoulliRBM)[:10]
    BernoulliRBM(2, n_iter=20, random_state=0).fit(x)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"BernoulliRBM: \d+ of 20 epochs in \d s, about \d+ s to go\. `n_iter` sets the epochs", line)
    BernoulliRBM(2, n_iter=20, random_state=0, verbose=0).fit(x)
    assert capsys.readouterr().err == ""


def test_the_same_random_state_gives_nearby_machines_in_both_precisions():
    """Until rounding decides a draw: weights of up to 0.7 are within 1e-5 in 7 of 7 seeds at this rate.

    From biases of zero at a rate of 0.1 or more, the units part so fast that rounding decides some draw.
    """
    x = (bundled.load_digits().data[:600] >= 8).astype(np.float64)
    distances = []
    for seed in range(5):
        machines = [
            BernoulliRBM(8, learning_rate=0.05, random_state=seed).fit(x.astype(kind))
            for kind in (np.float32, np.float64)
        ]
        distances.append(np.abs(machines[0].components_ - machines[1].components_).max())
    assert np.median(distances) < 1e-3


@pytest.mark.slow
def test_defaults_know_digits_as_well_as_the_exact_gradient_does():
    """Of 22 seeds 20 end above -17.95 on rows held out; scikit-learn's at -22.9, its best settings at -18.37.

    Draws are in float32, and part at the first one that rounding decides: another machine draws other seeds.
    """
    pixels = (bundled.load_digits().data >= 8).astype(np.float32)
    order = np.random.RandomState(0).permutation(len(pixels))
    train, held_out = pixels[order[:1437]], pixels[order[1437:]]

    @functools.cache
    def is_good(seed):
        return BernoulliRBM(16, random_state=seed).fit(train).log_likelihood(held_out).mean() > -18.05

    # Two of three seeds; the third is asked only if the first two disagree.
    assert (is_good(0) and (is_good(1) or is_good(2))) or (is_good(1) and is_good(2))


@every_machine
@each(("name", "value"), [(name, value) for name in BAD_PARAMETERS for value in BAD_PARAMETERS[name]])
def test_parameter_out_of_range(machine, name, value):
    for how in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=rf"`{name}` should be .*Found {value!r}"):
            getattr(machine(**{"n_components": 2, name: value}), how)(rows_of(machine))


@pytest.mark.parametrize(
    ("machine", "name", "value"),
    [
        (BernoulliRBM, "binarize", "a"),
        (BernoulliRBM, "binarize", True),
        (GaussianRBM, "hidden", "gaussian"),
        (GaussianRBM, "min_variance", 0),
        (GaussianRBM, "min_variance", 1.5),
    ],
)
def test_own_parameter_out_of_range(machine, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` should be .*Found {value!r}"):
        machine(2, **{name: value}).fit(rows_of(machine))


@every_machine
def test_least_of_an_integer_is_named(machine):
    with pytest.raises(ValueError, match=r"`n_temperatures` should be an integer from 2. Found 1\."):
        machine(2, n_temperatures=1).fit(rows_of(machine))


@every_machine
@pytest.mark.parametrize(("value", "message"), [(3, "a path, or None"), (".", "a file, not a folder")])
def test_checkpoint_that_is_no_file(machine, value, message):
    with pytest.raises(ValueError, match=f"`checkpoint` should be {message}"):
        machine(2, checkpoint=value).fit(rows_of(machine))


@pytest.mark.parametrize("name", ["n_samples", "steps"])
def test_draws_that_cannot_be_had(name):
    found, _ = trained(BernoulliRBM)
    with pytest.raises(ValueError, match=rf"`{name}` should be a positive integer\. Found 0"):
        found.sample(**{name: 0})


def test_training_that_leaves_the_finite_numbers_says_so():
    x = reals(100)
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match="not finite"):
        GaussianRBM(4, learning_rate=1e30, n_iter=50, random_state=0).fit(x)
    machine = GaussianRBM(4, random_state=0).partial_fit(x)
    machine.set_params(learning_rate=1e300)
    with pytest.raises(DivergenceError, match="the attributes keep their last values"):
        machine.partial_fit(part for part in [x] * 50)
    assert np.isfinite(machine.components_).all()


def test_features_are_remembered_and_compared():
    found, x = trained(BernoulliRBM)
    with pytest.raises(ValueError, match="X has 2 features, but BernoulliRBM is expecting 6"):
        found.transform(x[:, :2])
    with pytest.raises(ValueError, match="X has 2 features, but BernoulliRBM is expecting 6"):
        found.partial_fit(torch.from_numpy(x[:, :2]))
