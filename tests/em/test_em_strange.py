"""Strange data, drawn by seed: a fit is right by densities of extended precision, or refused in one sentence."""

import math
import warnings

import numpy as np
import pytest
import torch
from values import seeded

from toolkit import em
from toolkit.em import GaussianHMM, GaussianMixture

pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = ("full", "tied", "diag", "spherical")
FORMS = {
    "float64": lambda x: x,
    "float32": lambda x: x.astype(np.float32),
    "float16": lambda x: x.astype(np.float16),
    "integers": lambda x: np.clip(np.nan_to_num(x), -1e15, 1e15).astype(np.int64),
    "booleans": lambda x: x > 0,
    "list": lambda x: x.tolist(),
    "columns": np.asfortranarray,
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
    "tensor": lambda x: torch.from_numpy(x.copy()),
    "tensor of float32": lambda x: torch.from_numpy(x.astype(np.float32)),
    "tensor of float16": lambda x: torch.from_numpy(x.astype(np.float16)),
}
# Words of errors that torch, NumPy or LAPACK raise about arrays of which the user knows nothing.
RAW = ("linalg", "tensor a", "size mismatch", "must match", "not implemented for", "cholesky", "LAPACK", "broadcast")


def strange(draw):
    """Return samples (N, D), spoilt in up to three ways, and the name of the form that they come in."""
    n, d = int(draw.choice([1, 2, 3, 5, 8, 20, 60, 200])), int(draw.choice([1, 1, 2, 3, 5]))
    x = draw.normal(size=(n, d))
    column, row = draw.integers(d), draw.integers(n)
    spoil = {
        "clusters": lambda: 0.1 * x + 10 * draw.integers(0, 3, (n, 1)),
        "repeated": lambda: x[draw.integers(0, max(1, n // 4), n)],
        "huge": lambda: x * 10.0 ** draw.integers(100, 151),
        "tiny": lambda: x * 10.0 ** -draw.integers(100, 151),
        "offset": lambda: x + 10.0 ** draw.integers(3, 17),
        "units": lambda: x * 10.0 ** draw.integers(-12, 13, d),
        "rounded": lambda: np.round(3 * x),
        "binary": lambda: np.where(x > 0, 1.0, 0.0),
        "tails": lambda: x / (draw.random((n, 1)) ** 3 + 1e-3),
        "dependent": lambda: np.c_[x[:, :1], 2 * x[:, :1], x[:, 2:]][:, :d],
        "constant": lambda: _with(x, (slice(None), column), draw.choice([0.0, 1.0, 1e10, -3.3])),
        "nearly constant": lambda: _with(x, (slice(None), column), 1 + 1e-14 * x[:, 0]),
        "outlier": lambda: _with(x, row, 10.0 ** draw.integers(3, 40)),
        "missing": lambda: _with(x, (row, column), draw.choice([np.nan, 0.0, 0.0])),
        "infinite": lambda: _with(x, (row, column), draw.choice([np.inf, 0.0, 0.0])),
    }
    for name in draw.choice(list(spoil), draw.integers(0, 4)):
        x = spoil[name]()
    return x, str(draw.choice(list(FORMS)))


def _with(x, place, value):
    x = x.copy()
    x[place] = value
    return x


def made(x, form):
    with np.errstate(all="ignore"):
        return FORMS[form](x)


def as_float64(values):
    return np.asarray(values, dtype=np.float64)


def check_error(error):
    assert isinstance(error, ValueError | TypeError), repr(error)
    assert not any(word in str(error) for word in RAW), str(error)


def log_joint(x, weights, means, factors):
    """Return the log-joint (K, N) in extended precision from factors (K, D, D) of the precisions."""
    wide = np.longdouble
    x, weights, means, factors = (np.asarray(values, wide) for values in (x, weights, means, factors))
    with np.errstate(all="ignore"):
        return np.stack(
            [
                np.log(weight) + np.log(np.diag(one)).sum() - (((x - mean) @ one) ** 2).sum(1) / 2
                for weight, mean, one in zip(weights, means, factors, strict=True)
            ]
        ) - wide(x.shape[1]) / 2 * np.log(2 * wide(np.pi))


def log_sum(values):
    highest = values.max(0)
    highest = np.where(np.isfinite(highest), highest, 0)
    with np.errstate(all="ignore"):
        return highest + np.log(np.exp(values - highest).sum(0))


def rounding(x, factors, form):
    """Return the relative error of a density, and the terms that cancel in a distance, in roundoffs of the samples."""
    single = "32" in form or "16" in form
    terms = max(float((np.abs(x).max(0) * np.abs(one).sum(1)).max()) for one in factors)
    lost = 1e-5 * terms if single else 1e-13 * terms
    return (1e-4 if single else 1e-8), lost + lost**2  # a distance is squared


def fit_mixture(seed):
    draw = np.random.default_rng(seed)
    x, form = strange(draw)
    given, kind, k = made(x, form), str(draw.choice(TYPES)), int(draw.choice([1, 2, 3, 5, 9]))
    weights = None
    if draw.random() < 0.3:
        weights = draw.random(len(x)) * 10.0 ** draw.integers(-3, 4) * draw.integers(0, 2, len(x))
    options = {
        "reg_covar": float(draw.choice([0, 1e-6, 1e-6, 1e-12])),
        "accelerate": str(draw.choice(["auto", "none", "anderson"])),
        "n_init": int(draw.choice([1, 1, 3])),
        "init_params": str(draw.choice(["kmeans", "k-means++", "random", "random_from_data"])),
    }
    try:
        found = GaussianMixture(k, covariance_type=kind, random_state=0, **options).fit(given, sample_weight=weights)
        answers = [as_float64(f(given)) for f in (found.score_samples, found.predict, found.predict_proba)]
    except Exception as error:
        return check_error(error)
    x, factors = as_float64(given), _matrices(kind, as_float64(found.precisions_cholesky_), k, x.shape[1])
    joint = log_joint(x, as_float64(found.weights_), as_float64(found.means_), factors)
    expected, (relative, lost) = log_sum(joint).astype(float), rounding(x, factors, form)
    bound = relative * (1 + np.abs(expected)) + lost
    densities, labels, shares = answers
    assert (np.abs(densities - expected) <= bound).all()
    assert (joint.max(0) - joint[labels.astype(int), np.arange(len(x))] <= bound).all()
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-5)
    count = np.ones(len(x)) if weights is None else weights
    mean = float(count @ np.where(count > 0, expected, 0) / count.sum())
    assert abs(found.lower_bound_ - mean) <= 100 * relative * (1 + abs(mean)) + lost
    assert (np.diff(found.history_) >= 0).all()
    return None


def _matrices(kind, factor, k, d):
    """Return factors of any type as matrices (K, D, D)."""
    if kind in ("full", "tied"):
        return np.broadcast_to(factor, (k, d, d))
    return np.stack([np.diag(np.broadcast_to(one, d)) for one in factor])


def fit_chain(seed):
    draw = np.random.default_rng(seed)
    x, form = strange(draw)
    given, kind, k = made(x, form), str(draw.choice(TYPES)), int(draw.choice([1, 2, 3]))
    lengths = [len(x) // 2, len(x) - len(x) // 2] if draw.random() < 0.3 and len(x) > 3 else None
    try:
        found = GaussianHMM(k, covariance_type=kind, random_state=0, max_iter=30).fit(given, lengths)
        score, decoded = found.score(given, lengths), found.decode(given, lengths)[0]
    except Exception as error:
        return check_error(error)
    emissions = found.parameters_.emissions
    x = as_float64(given)
    factors = _matrices(kind, as_float64(emissions.precisions_cholesky), k, x.shape[1])
    joint = log_joint(x, np.ones(k), as_float64(found.means_), factors)
    with np.errstate(all="ignore"):
        first, moves = (np.log(as_float64(values)) for values in (found.startprob_, found.transmat_))
    total = best = np.longdouble(0)
    for part in np.split(joint, np.cumsum(lengths)[:-1], axis=1) if lengths else [joint]:
        forward, highest = first + part[:, 0], first + part[:, 0]
        for now in part.T[1:]:
            forward = log_sum(forward[:, None] + moves) + now
            highest = (highest[:, None] + moves).max(0) + now
        total, best = total + log_sum(forward), best + highest.max()
    relative, lost = rounding(x, factors, form)
    for answer, expected in ((score, float(total)), (decoded, float(best))):
        assert abs(answer - expected) <= 100 * relative * (len(x) + abs(expected)) + len(x) * lost
    return None


def select_model(seed):
    draw = np.random.default_rng(seed)
    x, _ = strange(draw)
    x = torch.from_numpy(x[:60])
    try:
        found = em.select(x, range(1, min(3, len(x)) + 1), n_init=1, max_iter=50, generator=seeded(0))
    except Exception as error:
        return check_error(error)
    assert str(found)
    for one in found.ranked:
        value = float(em.log_likelihood(one.parameters.to_gaussian(), x))
        assert math.isfinite(one.bic)
        _, lost = rounding(x.numpy(), as_float64(one.parameters.to_gaussian().as_type("full").precisions_cholesky), "")
        # Where rounding of the samples matters more, the fit is refused.
        lost = min(lost, 0.1 * (1 + abs(one.log_likelihood)))
        assert abs(value - one.log_likelihood) <= 1e-6 * (1 + abs(value)) + lost
    return None


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_mixtures(first):
    for seed in range(first, first + 10):
        fit_mixture(seed)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_chains(first):
    for seed in range(first, first + 10):
        fit_chain(seed)


def test_selections():
    for seed in range(2):
        select_model(seed)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "n"), [(fit_mixture, 400), (fit_chain, 200), (select_model, 30)])
def test_many(program, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(1000, 1000 + n):
            program(seed)
