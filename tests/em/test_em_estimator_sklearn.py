"""The estimators beside scikit-learn: its checks of an estimator, its tools around one, and its Gaussian mixture."""

import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import datasets as bundled
from sklearn.base import clone
from sklearn.covariance import EmpiricalCovariance
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture as Theirs
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from toolkit.em import COVARIANCE_TYPES, GaussianParameters, m_step
from toolkit.em.estimators.mixture import CollapseWarning, GaussianMixture

every_type = pytest.mark.parametrize("kind", COVARIANCE_TYPES)
every_start = pytest.mark.parametrize("start", ["kmeans", "k-means++", "random", "random_from_data"])


def clusters(n=300, d=3, k=3, spread=6.0, seed=0):
    """Draw clusters of different sizes and shapes, and say which sample is of which."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(k, n, p=np.arange(1, k + 1) / (k * (k + 1) / 2))
    centres = spread * rng.standard_normal((k, d))
    mixing = 0.6 * rng.standard_normal((k, d, d)) + np.eye(d)
    return centres[labels] + np.einsum("nij,nj->ni", mixing[labels], rng.standard_normal((n, d))), labels


def start_of(x, kind, k, seed=0):
    """Return a start that all can be given: weights, means, precisions."""
    rng = np.random.default_rng(seed)
    d = x.shape[1]
    widths = x.var(0) * np.linspace(0.5, 1.5, k)[:, None]
    precisions = {
        "full": np.stack([np.linalg.inv(np.diag(width) + 0.1 * np.outer(width, width) ** 0.5) for width in widths]),
        "tied": np.linalg.inv(np.cov(x.T).reshape(d, d) + 0.1 * np.diag(x.var(0))),
        "diag": 1 / widths,
        "spherical": 1 / widths.mean(1),
    }[kind]
    weights = np.arange(1.0, k + 1)
    return {
        "weights_init": weights / weights.sum(),
        "means_init": x[rng.choice(len(x), k, replace=False)],
        "precisions_init": precisions,
    }


def quiet(estimator, *arguments, **named):
    """Fit an estimator that is stopped early on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(*arguments, **named)


# --- scikit-learn's own checks -----------------------------------------------------------------------------------


def known_failures(estimator):
    """Two starts drawn at random differ, so that a sample of weight 2 and a sample given twice do too."""
    check = "check_sample_weight_equivalence_on_dense_data"
    return {check: "the start is drawn among the samples"} if estimator.n_components > 1 else {}


@parametrize_with_checks(
    [
        GaussianMixture(),
        GaussianMixture(2, n_init=2, max_iter=5, init_params="random", covariance_type="tied"),
        GaussianMixture(covariance_type="spherical", accelerate="none", warm_start=True),
        GaussianMixture(missing=True, prior="default"),
        GaussianMixture(covariance_type="VEV"),
    ],
    expected_failed_checks=known_failures,
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_estimator_checks(estimator, check):
    check(estimator)


# --- scikit-learn's tools ------------------------------------------------------------------------------------------


def test_clone_is_a_fit_from_the_beginning():
    x, _ = clusters()
    first = GaussianMixture(3, random_state=torch.Generator().manual_seed(3), covariance_type="diag").fit(x)
    second = clone(first)
    assert not hasattr(second, "means_")
    assert second.covariance_type == "diag"
    once, twice = clone(GaussianMixture(3, random_state=1)).fit(x), GaussianMixture(3, random_state=1).fit(x)
    assert np.array_equal(once.means_, twice.means_)


def test_in_a_pipeline_and_a_grid_search():
    x, labels = clusters()
    pipeline = make_pipeline(StandardScaler(), GaussianMixture(random_state=0))
    search = GridSearchCV(
        pipeline,
        {
            "gaussianmixture__n_components": np.arange(1, 6),
            "gaussianmixture__covariance_type": ["full", "spherical"],
        },
        cv=3,
    ).fit(x)
    assert search.best_params_["gaussianmixture__n_components"] == 3
    assert search.best_params_["gaussianmixture__covariance_type"] == "full"
    assert adjusted_rand_score(labels, search.predict(x)) > 0.95
    assert np.isfinite(cross_val_score(pipeline, x, cv=3)).all()


def test_bic_finds_the_number_of_components():
    x, _ = clusters()
    fits = {k: GaussianMixture(k, random_state=0, n_init=3).fit(x) for k in range(1, 6)}
    assert min(fits, key=lambda k: fits[k].bic(x)) == 3
    assert min(fits, key=lambda k: fits[k].icl(x)) == 3


@pytest.mark.parametrize("as_tensor", [False, True], ids=["array", "tensor"])
def test_pickled_and_read_again(as_tensor):
    x, _ = clusters()
    x = torch.from_numpy(x) if as_tensor else x
    before = GaussianMixture(3, random_state=torch.Generator().manual_seed(1)).fit(x)
    after = pickle.loads(pickle.dumps(before))
    assert (after.predict(x) == before.predict(x)).all()
    assert (after.sample(5)[0] == before.sample(5)[0]).all()


def test_representation_names_what_was_changed():
    assert repr(GaussianMixture(3, tol=0.1)) == "GaussianMixture(n_components=3, tol=0.1)"


# --- scikit-learn's mixture ------------------------------------------------------------------------------------------


def problems():
    yield "iris", bundled.load_iris().data, 3
    yield "wine", bundled.load_wine().data[:, [0, 1, 6, 9, 12]], 3
    yield "digits", PCA(6, random_state=0).fit_transform(bundled.load_digits().data)[:500], 5
    yield "overlapping", clusters(800, 2, 3, spread=1.0, seed=4)[0], 3
    yield "narrow", clusters(400, 1, 2, spread=30.0, seed=5)[0], 2


PROBLEMS = {name: (x, k) for name, x, k in problems()}


@pytest.mark.portable
@every_type
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("reg_covar", [0.0, 1e-6])
def test_same_steps_as_scikit_learn(name, kind, reg_covar):
    x, k = PROBLEMS[name]
    options = {"covariance_type": kind, "reg_covar": reg_covar, "max_iter": 12, "tol": 0, **start_of(x, kind, k)}
    ours = quiet(GaussianMixture(k, accelerate="none", **options), x)
    theirs = quiet(Theirs(k, **options), x)
    # At a maximum ours may stop: `reg_covar` lowers the likelihood there, and so may rounding, of narrow components.
    n_iter = len(ours.history_) - 1
    assert n_iter == 12 or ours.converged_
    assert abs(ours.score(x) - theirs.score(x)) < 1e-10
    assert np.array_equal(ours.predict(x), theirs.predict(x))
    # Theirs is a step behind.
    assert np.allclose(ours.history_[:-1], theirs.lower_bounds_[:n_iter], rtol=0, atol=1e-10)
    assert abs(ours.lower_bound_ - theirs.score(x)) < 1e-10
    for attribute in ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_"):
        found, expected = getattr(ours, attribute), getattr(theirs, attribute)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert np.allclose(found, expected, rtol=1e-7, atol=1e-9 * np.abs(expected).max()), attribute


@every_type
def test_same_answers_as_scikit_learn(kind):
    x, k = PROBLEMS["iris"]
    theirs = quiet(Theirs(k, covariance_type=kind, random_state=0, n_init=2), x)
    ours = GaussianMixture(
        k,
        covariance_type=kind,
        max_iter=0,
        weights_init=theirs.weights_,
        means_init=theirs.means_,
        precisions_init=theirs.precisions_,
    ).fit(x)
    new = x[::3] + 0.1
    assert np.allclose(ours.predict_proba(new), theirs.predict_proba(new), rtol=1e-9, atol=1e-15)
    assert np.allclose(ours.score_samples(new), theirs.score_samples(new), rtol=1e-11)
    assert math.isclose(ours.bic(new), theirs.bic(new), rel_tol=1e-11)
    assert math.isclose(ours.aic(new), theirs.aic(new), rel_tol=1e-11)
    assert ours._n_parameters() == theirs._n_parameters()


@every_type
def test_start_by_kmeans_is_scikit_learns(kind):
    x, _ = clusters(spread=15.0)
    ours = GaussianMixture(3, covariance_type=kind, max_iter=0, random_state=0).fit(x)
    theirs = Theirs(3, covariance_type=kind, max_iter=0, random_state=0).fit(x)
    mine, yours = ours.weights_.argsort(), theirs.weights_.argsort()
    assert np.allclose(ours.weights_[mine], theirs.weights_[yours], rtol=1e-12)
    assert np.allclose(ours.means_[mine], theirs.means_[yours], rtol=1e-9)
    if kind == "tied":
        assert np.allclose(ours.covariances_, theirs.covariances_, rtol=1e-9)
    else:
        assert np.allclose(ours.covariances_[mine], theirs.covariances_[yours], rtol=1e-9)


@pytest.mark.portable
@every_type
@pytest.mark.parametrize("name", ["iris", "overlapping"])
@pytest.mark.parametrize("accelerate", ["anderson", "squarem"])
def test_acceleration_gets_further_than_many_plain_steps(name, kind, accelerate):
    x, k = PROBLEMS[name]
    options = {"covariance_type": kind, "reg_covar": 0.0, **start_of(x, kind, k, seed=1)}
    ours = GaussianMixture(k, tol=1e-9, accelerate=accelerate, **options).fit(x)
    theirs = quiet(Theirs(k, tol=1e-9, max_iter=3000, **options), x)
    assert ours.score(x) > theirs.score(x) - 1e-7
    # Ours ends after eight evaluations that gain nothing, theirs after one.
    assert ours.n_iter_ <= theirs.n_iter_ + 8


# --- what scikit-learn's mixture is tested for, asked of ours ---------------------------------------------------


BAD_STARTS = {
    "weights of another shape": ({"weights_init": [0.5, 0.5]}, r"`weights_init` should have shape \(3,\)"),
    "weights above 1": ({"weights_init": [1.5, -0.2, -0.3]}, "`weights_init` should be not negative and sum to 1"),
    "weights that sum to more": ({"weights_init": [0.5, 0.5, 0.1]}, "which sum to 1.1"),
    "means of another shape": ({"means_init": np.ones((3, 2))}, r"`means_init` should have shape \(3, 3\)"),
    "means that are not finite": ({"means_init": np.full((3, 3), np.nan)}, "`means_init` should be finite"),
    "precisions of another shape": ({"precisions_init": np.eye(3)}, r"`precisions_init` should have shape \(3, 3, 3\)"),
    "precisions that are not symmetric": (
        {"precisions_init": np.eye(3) + [[[0, 0.1, 0], [0, 0, 0], [0, 0, 0]]] * 3},
        "`precisions_init` should be symmetric and positive definite. Found one that is not, of component 0",
    ),
    "precisions that are not positive definite": (
        {"precisions_init": np.stack([np.eye(3), np.eye(3), -np.eye(3)])},
        "of component 2",
    ),
    "a tied precision that is not positive definite": (
        {"precisions_init": np.diag([1.0, 1.0, 0.0]), "covariance_type": "tied"},
        "`precisions_init` should be symmetric and positive definite",
    ),
    "diagonal precisions that are not positive": (
        {"precisions_init": -np.ones((3, 3)), "covariance_type": "diag"},
        "`precisions_init` should be positive. Found -1",
    ),
    "spherical precisions that are not positive": (
        {"precisions_init": np.array([1.0, 0.0, 2.0]), "covariance_type": "spherical"},
        "`precisions_init` should be positive. Found 0",
    ),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_start_that_cannot_be_used(name):
    parameters, message = BAD_STARTS[name]
    with pytest.raises(ValueError, match=message):
        GaussianMixture(3, **parameters).fit(clusters()[0])


@every_type
def test_one_component_is_the_empirical_covariance(kind):
    x, _ = clusters()
    found = GaussianMixture(1, covariance_type=kind, reg_covar=0).fit(x)
    expected = EmpiricalCovariance().fit(x).covariance_
    if kind == "full":
        expected = expected[None]
    elif kind == "diag":
        expected = expected.diagonal()[None]
    elif kind == "spherical":
        expected = expected.diagonal().mean()[None]
    assert np.allclose(found.means_, x.mean(0)[None], rtol=1e-12)
    assert np.allclose(found.covariances_, expected, rtol=1e-11)


def test_covariances_are_those_of_the_samples_by_responsibility():
    x, _ = clusters(spread=2.0)
    before = quiet(GaussianMixture(3, max_iter=3, random_state=0, reg_covar=0, accelerate="none"), x)
    start = {
        "weights_init": before.weights_,
        "means_init": before.means_,
        "precisions_init": before.precisions_,
    }
    after = quiet(GaussianMixture(3, max_iter=1, reg_covar=0, accelerate="none", **start), x)
    responsibilities = before.predict_proba(x)
    for k in range(3):
        mean = np.average(x, axis=0, weights=responsibilities[:, k])
        covariance = np.cov(x.T, aweights=responsibilities[:, k], ddof=0)
        assert np.allclose(after.means_[k], mean, rtol=1e-10)
        assert np.allclose(after.covariances_[k], covariance, rtol=1e-9)
    by_type = {kind: m_step(*map(torch.from_numpy, (x, responsibilities)), covariance_type=kind) for kind in ("tied",)}
    within = np.einsum("k,kij->ij", after.weights_, after.covariances_)
    assert np.allclose(by_type["tied"].covariances.numpy(), within, rtol=1e-9)


@every_type
def test_log_density_by_scipy(kind):
    x, _ = clusters()
    found = quiet(GaussianMixture(3, covariance_type=kind, random_state=0, max_iter=5), x)
    covariances = {
        "full": lambda: found.covariances_,
        "tied": lambda: [found.covariances_] * 3,
        "diag": lambda: [np.diag(variances) for variances in found.covariances_],
        "spherical": lambda: [variance * np.eye(3) for variance in found.covariances_],
    }[kind]()
    joint = np.stack(
        [
            np.log(weight) + stats.multivariate_normal(mean, covariance).logpdf(x)
            for weight, mean, covariance in zip(found.weights_, found.means_, covariances, strict=True)
        ],
        1,
    )
    density = np.logaddexp.reduce(joint, axis=1)
    assert np.allclose(found.score_samples(x), density, rtol=1e-10)
    assert np.allclose(found.predict_proba(x), np.exp(joint - density[:, None]), rtol=1e-8, atol=1e-14)
    assert math.isclose(found.score(x), density.mean(), rel_tol=1e-12)


@every_type
def test_responsibilities_sum_to_one_and_their_largest_is_predicted(kind):
    x, _ = clusters(spread=2.0)
    found = quiet(GaussianMixture(4, covariance_type=kind, random_state=0, max_iter=10), x)
    shares = found.predict_proba(x)
    assert np.allclose(shares.sum(1), 1, rtol=1e-12)
    assert np.array_equal(shares.argmax(1), found.predict(x))


@pytest.mark.parametrize(
    "method", ["predict", "predict_proba", "score", "score_samples", "aic", "bic", "icl", "impute"]
)
def test_what_is_not_fitted_gives_no_answer(method):
    with pytest.raises(NotFittedError):
        getattr(GaussianMixture(2), method)(clusters()[0])
    with pytest.raises(NotFittedError):
        GaussianMixture(2).sample()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("max_iter", "tol"), [(1, 1e-12), (2, 0.1), (300, 1e-7)], ids=["one", "loose", "strict"])
@pytest.mark.parametrize("n_init", [1, 5])
@every_type
def test_fit_predict_is_fit_and_predict(seed, max_iter, tol, n_init, kind):
    x, labels = clusters(200, spread=15.0)
    options = {"n_init": n_init, "max_iter": max_iter, "tol": tol, "random_state": seed, "covariance_type": kind}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        together = GaussianMixture(3, **options).fit_predict(x)
        apart = GaussianMixture(3, **options).fit(x).predict(x)
    assert np.array_equal(together, apart)
    assert adjusted_rand_score(labels, together) > 0.95


def test_parameters_are_recovered():
    rng = np.random.default_rng(0)
    weights, means = np.array([0.2, 0.5, 0.3]), np.array([[0.0, 0.0], [6.0, 1.0], [-2.0, 7.0]])
    factors = np.array([[[1.0, 0.0], [0.8, 0.5]], [[2.0, 0.0], [-0.5, 0.7]], [[0.4, 0.0], [0.0, 1.5]]])
    labels = rng.choice(3, 20_000, p=weights)
    x = means[labels] + np.einsum("nij,nj->ni", factors[labels], rng.standard_normal((20_000, 2)))
    found = GaussianMixture(3, n_init=3, random_state=0, reg_covar=0).fit(x)
    order = [int(np.linalg.norm(found.means_ - mean, axis=1).argmin()) for mean in means]
    assert sorted(order) == [0, 1, 2]
    assert np.allclose(found.weights_[order], weights, rtol=0.03)
    assert np.allclose(found.means_[order], means, atol=0.05)
    assert np.allclose(found.covariances_[order], factors @ factors.swapaxes(1, 2), atol=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_more_starts_never_find_less(seed):
    x, _ = clusters(150, spread=2.0, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        one, five = (
            GaussianMixture(4, n_init=n, random_state=seed, init_params="random_from_data").fit(x) for n in (1, 5)
        )
    assert bool(len(one.collapsed_)) or five.lower_bound_ >= one.lower_bound_ - 1e-5


@pytest.mark.parametrize("accelerate", ["anderson", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_best_start_is_kept(seed, accelerate):
    x, _ = clusters(150, spread=2.0, seed=7)
    options = {"init_params": "random", "accelerate": accelerate, "covariance_type": "diag"}
    state = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        apart = [GaussianMixture(3, random_state=state, **options).fit(x) for _ in range(4)]
        together = GaussianMixture(3, random_state=seed, n_init=4, **options).fit(x)
    best = max(found.lower_bound_ for found in apart if not len(found.collapsed_))
    if accelerate == "none":
        assert abs(together.lower_bound_ - best) < 1e-9
    # The first steps together are plain, which may lead to another maximum than a jump does.
    assert together.lower_bound_ > best - 1e-4


def test_fit_that_stops_early_says_so_and_keeps_what_it_has():
    x, _ = clusters(spread=1.0)
    with pytest.warns(ConvergenceWarning, match="did not converge in 2 steps") as caught:
        found = GaussianMixture(3, max_iter=2, tol=0, random_state=0).fit(x)
    assert caught[0].filename == __file__
    assert not found.converged_
    assert found.n_iter_ == 2
    assert math.isclose(found.score(x), found.lower_bound_, rel_tol=1e-12)
    assert found.covariances_.shape == (3, 3, 3)


@pytest.mark.parametrize(("kind", "count"), [("spherical", 13), ("diag", 21), ("tied", 26), ("full", 41)])
def test_number_of_parameters(kind, count):
    x, _ = clusters(50, d=5, k=2)
    found = quiet(GaussianMixture(2, covariance_type=kind, random_state=0, max_iter=2), x)
    assert found._n_parameters() == count


def test_all_types_are_the_same_for_one_component_of_one_feature():
    x = clusters(100, d=1)[0]
    found = [GaussianMixture(1, covariance_type=kind).fit(x).bic(x) for kind in COVARIANCE_TYPES]
    assert np.ptp(found) < 1e-9


def test_criteria_are_near_the_entropy_of_a_normal_distribution():
    n, d = 5000, 3
    x = np.random.default_rng(0).standard_normal((n, d)) * [1.0, 2.0, 0.5]
    found = GaussianMixture(1, covariance_type="diag").fit(x)
    expected = 2 * n * stats.multivariate_normal(np.zeros(d), np.diag([1.0, 4.0, 0.25])).entropy()
    bound = 5 * math.sqrt(2 * d * n)
    assert abs(found.aic(x) - expected) < bound
    assert abs(found.bic(x) - expected) < bound


@pytest.mark.parametrize("seed", range(3))
def test_warm_start_goes_on(seed):
    x, _ = clusters(spread=2.0, seed=seed)
    options = {"random_state": seed, "tol": 0, "accelerate": "none", "reg_covar": 0}
    twice = GaussianMixture(3, max_iter=1, warm_start=True, **options)
    first = quiet(twice, x).score(x)
    second = quiet(twice, x).score(x)
    once = quiet(GaussianMixture(3, max_iter=2, **options), x)
    assert first < second
    assert math.isclose(second, once.score(x), rel_tol=1e-12)
    assert np.allclose(twice.means_, once.means_, rtol=1e-10)


@pytest.mark.portable
@pytest.mark.parametrize("max_iter", [1, 2, 7, 8, 50])
def test_warm_start_ends(max_iter):
    x, _ = clusters(spread=2.0)
    found = GaussianMixture(3, max_iter=max_iter, warm_start=True, tol=1e-6, random_state=0)
    for _ in range(1000):
        if quiet(found, x).converged_:
            break
    assert found.converged_
    assert abs(found.score(x) - GaussianMixture(3, random_state=0, tol=1e-9).fit(x).score(x)) < 1e-3


def test_warm_start_of_another_size():
    x, _ = clusters()
    found = GaussianMixture(3, warm_start=True, random_state=0).fit(x)
    with pytest.raises(ValueError, match="`warm_start` should go on with the last fit's n_components=3"):
        found.set_params(n_components=2).fit(x)


@every_type
def test_score_is_the_mean_over_samples_and_is_raised_by_a_fit(kind):
    x, _ = clusters(spread=2.0)
    early = quiet(GaussianMixture(3, covariance_type=kind, max_iter=1, random_state=0), x)
    late = GaussianMixture(3, covariance_type=kind, random_state=0).fit(x)
    assert math.isclose(early.score(x), early.score_samples(x).mean(), rel_tol=1e-12)
    assert late.score(x) > early.score(x)


@every_type
@pytest.mark.parametrize("accelerate", ["none", "anderson", "squarem"])
def test_likelihood_never_falls(kind, accelerate):
    x, _ = clusters(spread=1.0)
    found = GaussianMixture(3, covariance_type=kind, max_iter=600, tol=0, reg_covar=0, random_state=0)
    found.set_params(accelerate=accelerate)
    quiet(found, x)
    assert len(found.history_) > 5
    assert (np.diff(found.history_) >= -1e-13).all()
    assert found.lower_bounds_ == found.history_[1:].tolist()
    assert math.isclose(found.history_[-1], found.score(x), rel_tol=1e-12)


@every_type
def test_degenerate_samples(kind):
    x = np.repeat(np.random.default_rng(0).standard_normal((2, 3)), 3, axis=0)
    with pytest.raises(ValueError, match="singular"):
        GaussianMixture(6, covariance_type=kind, reg_covar=0, random_state=0).fit(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = GaussianMixture(6, covariance_type=kind, reg_covar=1e-6, random_state=0).fit(x)
    assert np.isfinite(found.score_samples(x)).all()


@every_type
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_precisions_are_the_inverse_covariances(kind, dtype):
    x = clusters()[0].astype(dtype)
    found = quiet(GaussianMixture(3, covariance_type=kind, random_state=0, max_iter=10), x)
    tolerance = 1e-4 if dtype == np.float32 else 1e-10
    if kind in ("full", "tied"):
        product = found.covariances_ @ found.precisions_
        assert np.allclose(product, np.broadcast_to(np.eye(3), product.shape), atol=tolerance)
        assert np.allclose(
            found.precisions_, found.precisions_cholesky_ @ found.precisions_cholesky_.swapaxes(-1, -2), rtol=tolerance
        )
    else:
        assert np.allclose(found.covariances_ * found.precisions_, 1, atol=tolerance)
        assert np.allclose(found.precisions_, found.precisions_cholesky_**2, rtol=tolerance)


@every_type
def test_draws_have_the_moments_of_the_components(kind):
    x, _ = clusters(d=2)
    found = quiet(GaussianMixture(3, covariance_type=kind, random_state=0, max_iter=10), x)
    drawn, labels = found.sample(40_000)
    assert drawn.shape == (40_000, 2)
    assert np.array_equal(labels, np.sort(labels))
    assert np.allclose(np.bincount(labels) / 40_000, found.weights_, atol=0.01)
    for k in range(3):
        mine = drawn[labels == k]
        expected = {
            "full": lambda k=k: found.covariances_[k],
            "tied": lambda: found.covariances_,
            "diag": lambda k=k: np.diag(found.covariances_[k]),
            "spherical": lambda k=k: found.covariances_[k] * np.eye(2),
        }[kind]()
        assert np.allclose(mine.mean(0), found.means_[k], atol=5 * math.sqrt(expected.max() / len(mine)))
        assert np.allclose(np.cov(mine.T), expected, atol=0.06 * expected.max())
    assert all(found.sample(n)[0].shape == (n, 2) and len(found.sample(n)[1]) == n for n in range(1, 100))
    with pytest.raises(ValueError, match=r"`n_samples` should be a positive integer\. Found 0"):
        found.sample(0)


@every_start
@every_type
def test_starts_lie_among_the_samples(start, kind):
    x, _ = clusters(40)
    for seed in range(10):
        found = GaussianMixture(4, init_params=start, max_iter=0, random_state=seed, covariance_type=kind).fit(x)
        assert len(np.unique(found.means_, axis=0)) == 4
        assert ((found.means_ >= x.min(0) - 1e-12) & (found.means_ <= x.max(0) + 1e-12)).all()
        assert math.isclose(found.weights_.sum(), 1, rel_tol=1e-12)
        if start in ("k-means++", "random_from_data"):
            assert all((np.abs(x - mean).max(1) < 1e-12).any() for mean in found.means_)


@every_start
def test_start_is_returned_where_no_step_is_taken(start):
    x, _ = clusters()
    found = GaussianMixture(3, init_params=start, max_iter=0, random_state=0).fit(x)
    assert (found.n_iter_, found.converged_, len(found.history_)) == (0, False, 1)
    assert math.isclose(found.lower_bound_, found.score(x), rel_tol=1e-12)
    given = GaussianMixture(3, max_iter=0, means_init=x[:3], weights_init=[0.1, 0.2, 0.7], init_params=start).fit(x)
    assert np.allclose(given.means_, x[:3], rtol=1e-15)
    assert np.allclose(given.weights_, [0.1, 0.2, 0.7], rtol=1e-15)


@every_type
@pytest.mark.parametrize("seed", range(3))
def test_start_by_its_own_precisions_is_the_same_fit(kind, seed):
    x, _ = clusters(spread=2.0)
    options = {"covariance_type": kind, "random_state": seed, "accelerate": "none", "tol": 1e-4}
    start = GaussianMixture(3, max_iter=0, **options).fit(x)
    free = GaussianMixture(3, **options).fit(x)
    given = GaussianMixture(3, precisions_init=start.precisions_, **options).fit(x)
    assert free.n_iter_ == given.n_iter_
    assert np.allclose(free.means_, given.means_, rtol=1e-7)


@every_type
def test_one_component_of_three_samples(kind):
    x = np.array([[0.0, 1.0, 5.0], [1.0, -1.0, 2.0], [3.0, 0.5, 2.5]])
    found = GaussianMixture(1, covariance_type=kind).fit(x)
    assert np.allclose(found.means_, x.mean(0)[None])
    assert not len(found.collapsed_)


def test_nothing_is_estimated_where_all_is_given(monkeypatch):
    x, _ = clusters()
    start = start_of(x, "full", 3)

    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(GaussianMixture, "_makers", refuse)
    assert GaussianMixture(3, **start).fit(x).converged_
    with pytest.raises(AssertionError):
        GaussianMixture(3, means_init=start["means_init"]).fit(x)


def test_given_start_is_left_alone():
    x, _ = clusters()
    start = start_of(x, "full", 3)
    copies = {name: value.copy() for name, value in start.items()}
    found = GaussianMixture(3, **start).fit(x)
    assert all(getattr(found, name) is start[name] and np.array_equal(start[name], copies[name]) for name in start)


@pytest.mark.parametrize("data", [np.array([[0.0], [1.0], [3.0], [4.0]])])
def test_two_pairs_of_samples(data):
    found = GaussianMixture(2, random_state=0, tol=1e-3, accelerate="none").fit(data)
    assert np.allclose(np.sort(found.means_.ravel()), [0.5, 3.5], atol=1e-3)
    assert found.converged_
    assert found.n_iter_ <= 3


def test_parameters_that_a_user_sets_are_used():
    found = GaussianMixture(2)
    mixture = GaussianParameters.from_covariances(
        weights=torch.tensor([0.3, 0.7]),
        means=torch.tensor([[0.0], [5.0]]),
        covariances=torch.tensor([[1.0], [4.0]]),
        covariance_type="diag",
    )
    found.covariance_type = "diag"
    found.weights_, found.means_ = mixture.weights.numpy(), mixture.means.numpy()
    found.precisions_cholesky_ = mixture.precisions_cholesky.numpy()
    found.n_features_in_ = 1
    expected = np.log(0.3 * stats.norm(0, 1).pdf(1.0) + 0.7 * stats.norm(5, 2).pdf(1.0))
    assert math.isclose(found.score(np.array([[1.0]])), expected, rel_tol=1e-6)
