"""The machines beside scikit-learn: its checks of estimators, its tools around them, what it asks of its own RBM."""

import math
import pickle

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.special import expit
from sklearn import datasets as bundled
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import BernoulliRBM as Theirs
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from toolkit.rbm.estimators import BernoulliRBM, GaussianRBM

SPARSE = {"csr": sparse.csr_array, "csc": sparse.csc_array, "csr matrix": sparse.csr_matrix, "lil": sparse.lil_array}
every_machine = pytest.mark.parametrize("machine", [BernoulliRBM, GaussianRBM], ids=lambda machine: machine.__name__)


@pytest.fixture(scope="module")
def digits():
    """Grey values between 0 and 1, the first 600."""
    return bundled.load_digits().data[:600] / 16


def exact_mean(machine, x):
    return machine.log_likelihood(x).mean()


# --- scikit-learn's own checks -----------------------------------------------------------------------------------


@parametrize_with_checks(
    [
        BernoulliRBM(n_iter=5, binarize=0.0),
        BernoulliRBM(5, n_iter=2, binarize=0.0, method="exact", verbose=1),
        BernoulliRBM(n_iter=2, binarize=0.0, method="tempering", gibbs_steps=2, offset_rate=None, schedule="constant"),
        GaussianRBM(16, n_iter=5),
        GaussianRBM(16, n_iter=2, method="cd", average_from=0.5),
    ]
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_estimator_checks(estimator, check):
    check(estimator)


@parametrize_with_checks([BernoulliRBM(n_iter=5)])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_of_the_default_but_for_the_range_of_their_data(estimator, check, monkeypatch):
    """Their data are real numbers, which are no data of zeros and ones: without that refusal all checks pass."""
    monkeypatch.setattr(BernoulliRBM, "_check_values", lambda self, block: None)
    monkeypatch.setattr(BernoulliRBM, "_to_training", lambda self, block: block.clamp(0, 1))
    check(estimator)


# --- scikit-learn's tools ------------------------------------------------------------------------------------------


def test_every_parameter_of_scikit_learn_is_ours():
    ours, theirs = BernoulliRBM().get_params(), Theirs().get_params()
    assert theirs.keys() <= ours.keys()
    keywords = {"n_components": 7, "learning_rate": 0.06, "batch_size": 5, "n_iter": 3, "verbose": 0, "random_state": 1}
    assert keywords.keys() == theirs.keys()
    x = (bundled.load_digits().data[:50] > 7).astype(float)
    mine, other = BernoulliRBM(**keywords).fit(x), Theirs(**keywords).fit(x)
    for name in ("components_", "intercept_hidden_", "intercept_visible_", "h_samples_"):
        assert getattr(mine, name).shape == getattr(other, name).shape
        assert getattr(mine, name).dtype == getattr(other, name).dtype
    assert mine.n_features_in_ == other.n_features_in_


@every_machine
def test_clone_is_a_fit_from_the_beginning(machine, digits):
    first = machine(4, random_state=torch.Generator().manual_seed(3), n_iter=2, gibbs_steps=2).fit(digits)
    second = clone(first)
    assert not hasattr(second, "components_")
    assert second.gibbs_steps == 2
    once, twice = (machine(4, random_state=1, n_iter=2).fit(digits) for _ in range(2))
    assert np.array_equal(once.components_, twice.components_)
    assert np.array_equal(clone(once).fit(digits).components_, once.components_)


@pytest.mark.slow
def test_features_of_a_pipeline_serve_a_classifier():
    x, y = bundled.load_digits(return_X_y=True)
    pipeline = make_pipeline(
        MinMaxScaler(), BernoulliRBM(64, n_iter=400, random_state=0), LogisticRegression(max_iter=300)
    )
    # Held-out rows are scaled to beyond 0 and 1, and are answered.
    assert cross_val_score(pipeline, x[:800], y[:800], cv=2).min() > 0.7


def test_grid_search_by_the_likelihood():
    x = (bundled.load_digits().data[:400] >= 8).astype(float)
    search = GridSearchCV(
        BernoulliRBM(batch_size=20, random_state=0),
        {"n_components": [1, 12], "n_iter": [1, 30]},
        scoring=lambda machine, rows, y=None: exact_mean(machine, rows),
        cv=2,
    ).fit(x)
    assert search.best_params_ == {"n_components": 12, "n_iter": 30}
    assert math.isfinite(GridSearchCV(BernoulliRBM(4, random_state=0), {"n_iter": [1, 2]}, cv=2).fit(x).best_score_)


@every_machine
@pytest.mark.parametrize("as_tensor", [False, True], ids=["array", "tensor"])
@pytest.mark.parametrize("method", ["pcd", "fpcd", "tempering", "exact"])
def test_pickled_and_read_again_it_goes_on_as_it_would_have(machine, as_tensor, method, digits):
    x = torch.from_numpy(digits[:40, :12]) if as_tensor else digits[:40, :12]
    first = machine(3, random_state=0, n_iter=2, method=method).fit(x)
    second = pickle.loads(pickle.dumps(first))
    for found in (first, second):
        found.partial_fit(x[:7]).partial_fit(x[7:20])
    assert np.array_equal(first.components_, second.components_)
    assert np.array_equal(first.gibbs(x), second.gibbs(x))


@every_machine
def test_names_of_the_features_that_come_out(machine, digits):
    for method in ("fit", "partial_fit"):
        found = getattr(machine(3, n_iter=1), method)(digits[:20])
        prefix = machine.__name__.lower()
        assert found.get_feature_names_out().tolist() == [f"{prefix}0", f"{prefix}1", f"{prefix}2"]


def test_table_out_of_a_pipeline(digits):
    pandas = pytest.importorskip("pandas")
    machine = BernoulliRBM(3, n_iter=1).set_output(transform="pandas")
    assert isinstance(machine.fit_transform(digits), pandas.DataFrame)


@every_machine
@pytest.mark.parametrize(
    "method", ["transform", "reconstruct", "gibbs", "score_samples", "score", "log_likelihood", "sample"]
)
def test_what_is_not_fitted_gives_no_answer(machine, method):
    with pytest.raises(NotFittedError):
        getattr(machine(), method)(*([] if method == "sample" else [np.zeros((2, 3))]))
    with pytest.raises(NotFittedError):
        _ = machine().rbm_
    with pytest.raises(NotFittedError):
        _ = machine().log_partition_


# --- what scikit-learn asks of its own machine, asked again ---------------------------------------------------------


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_digits_are_learned_at_least_as_well_as_by_scikit_learn(how, digits):
    options = {"learning_rate": 0.1, "batch_size": 10, "n_iter": 7, "random_state": 9}
    mine, theirs = BernoulliRBM(16, **options), Theirs(16, **options)
    before = digits.copy()
    for found in (mine, theirs):
        if how == "fit":
            found.fit(digits)
        else:
            for _ in range(7):
                for first in range(0, len(digits), 10):
                    found.partial_fit(digits[first : first + 10])
    other = BernoulliRBM(16, random_state=0)
    other.components_, other.n_features_in_ = theirs.components_, 64
    other.intercept_hidden_, other.intercept_visible_ = theirs.intercept_hidden_, theirs.intercept_visible_
    assert exact_mean(mine, digits) > exact_mean(other, digits)
    assert mine.score(digits) > other.score(digits)
    # That score is the expectation of theirs, which looks at one feature of each row.
    draws = [theirs.set_params(random_state=seed).score_samples(digits).mean() for seed in range(100)]
    assert abs(np.mean(draws) - other.score(digits)) < 4 * np.std(draws) / 10
    assert np.array_equal(digits, before)


def test_hidden_means_are_those_of_scikit_learn(digits):
    theirs = Theirs(5, random_state=0).fit(digits)
    mine = BernoulliRBM(5)
    for name in ("components_", "intercept_hidden_", "intercept_visible_", "n_features_in_"):
        setattr(mine, name, getattr(theirs, name))
    assert np.allclose(mine.transform(digits), theirs.transform(digits), rtol=1e-12)
    assert np.allclose(
        mine.rbm_.free_energy(torch.from_numpy(digits)).tolist(), theirs._free_energy(digits), rtol=1e-12
    )


@pytest.mark.parametrize("layout", SPARSE)
@every_machine
def test_sparse_rows_are_what_dense_ones_are(layout, machine, digits):
    x = np.where(digits > 0.5, digits, 0)[:50]
    dense, found = (machine(6, n_iter=3, random_state=0).fit(rows) for rows in (x, SPARSE[layout](x)))
    assert np.array_equal(dense.components_, found.components_)
    for method in ("transform", "score_samples", "reconstruct", "gibbs"):
        assert np.array_equal(getattr(dense, method)(x), getattr(found, method)(SPARSE[layout](x)))
    dense, found = (machine(6, random_state=0).partial_fit(rows) for rows in (x, SPARSE[layout](x)))
    assert np.array_equal(dense.components_, found.components_)


def test_gibbs_step_draws_from_the_conditionals():
    machine = BernoulliRBM(2, random_state=0)
    machine.components_ = np.array([[1.5, -1.0, 0.3], [-0.5, 2.0, 0.0]])
    machine.intercept_hidden_, machine.intercept_visible_ = np.array([0.2, -0.4]), np.array([-0.3, 0.1, 1.0])
    machine.n_features_in_ = 3
    x = np.repeat([[1.0, 0.0, 1.0]], 40_000, 0)
    p = expit(machine.components_ @ x[0] + machine.intercept_hidden_)
    expected = 0.0
    for h in np.array([[0, 0], [0, 1], [1, 0], [1, 1]]):
        weight = np.prod(np.where(h == 1, p, 1 - p))
        expected = expected + weight * expit(h @ machine.components_ + machine.intercept_visible_)
    once, twice = machine.gibbs(x), machine.gibbs(x)
    assert np.isin(once, [0.0, 1.0]).all()
    assert np.abs(once.mean(0) - expected).max() < 4 * 0.5 / 200
    assert (once != twice).any()  # each call goes on drawing


@pytest.mark.slow
def test_memory_of_two_rows_that_are_each_others_opposite():
    """One Gibbs step from what was learned leads back to it, with a probability near 1."""
    x = np.array([[0.0], [1.0]]).repeat(6, 1)
    options = {"learning_rate": 0.5, "batch_size": 2, "method": "exact", "n_iter": 1000, "random_state": 42}
    for rows in (x, sparse.csc_array(x)):
        machine = BernoulliRBM(2, **options).fit(rows)
        moved = np.concatenate([machine.gibbs(rows) for _ in range(200)])
        assert (moved == np.tile(x, (200, 1))).mean() > 0.95
        assert exact_mean(machine, x) > -0.9  # the best is log 1/2


def test_pseudo_likelihood_is_not_clipped():
    x = np.vstack([np.zeros(1000), np.ones(1000)])
    machine = BernoulliRBM(10, n_iter=0, random_state=42).fit(x)
    machine.components_ = 0 * machine.components_
    assert np.allclose(machine.score_samples(x), 1000 * math.log(0.5), rtol=1e-12)
    machine.components_ = machine.components_ + 100
    assert np.isfinite(machine.score_samples(x)).all()
    assert machine.score_samples(x)[0] < -30_000


def test_a_search_needs_no_checkpoint(digits, tmp_path):
    """Each fold and each parameter would go on from the machine of the one before."""
    machine = BernoulliRBM(4, n_iter=2, random_state=0, checkpoint=tmp_path / "progress")
    search = GridSearchCV(machine, {"weight_decay": [0, 0.1]}, cv=2, error_score="raise", refit=False)
    with pytest.raises(ValueError, match="`checkpoint` should be of the same machine, trainer and data"):
        search.fit(digits)
    machine = clone(machine).set_params(checkpoint=None)
    scores = GridSearchCV(machine, {"weight_decay": [0, 0.1]}, cv=2, refit=False).fit(digits).cv_results_
    assert len(set(scores["mean_test_score"])) == 2


def test_progress_of_sparse_rows(capsys):
    BernoulliRBM(2, batch_size=2, n_iter=2, random_state=42, verbose=True).fit(sparse.csc_array([[0.0], [1.0]]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "BernoulliRBM: 2 rows, 2 epochs"
    assert [line.split(":")[0] for line in lines[1:]] == ["  epoch 1", "  epoch 2"]
    assert "nats per sample of pseudo-log-likelihood" in lines[1]


@every_machine
@pytest.mark.parametrize(
    ("given", "expected"),
    [(np.float32, "float32"), (np.float64, "float64"), (np.float16, "float64"), (int, "float64"), (bool, "float64")],
    ids=str,
)
def test_type_of_floating_point_numbers_is_kept(machine, given, expected, digits):
    x = (digits[:60] > 0.5).astype(given)
    found = machine(4, n_iter=2, random_state=0).fit(x)
    for value in (found.components_, found.transform(x), found.gibbs(x), found.score_samples(x), found.sample(3)):
        assert value.dtype == expected


@pytest.mark.portable
def test_float32_learns_what_float64_does(digits):
    x = (digits >= 0.5).astype(np.float64)
    found = [
        BernoulliRBM(8, n_iter=30, batch_size=10, random_state=42).fit(x.astype(kind))
        for kind in (np.float32, np.float64)
    ]
    means = [exact_mean(machine, x) for machine in found]
    # Their draws part at the first one that rounding decides. Of 10 seeds the difference has a standard deviation of
    # 0.13; the machine before training is some seven nats lower.
    assert abs(means[0] - means[1]) < 0.6
