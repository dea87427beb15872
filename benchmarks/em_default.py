"""Default fits and predictions beside scikit-learn's on thirty data sets: time, and the likelihood reached."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator

import numpy as np
from sklearn import datasets
from sklearn.mixture import GaussianMixture as Peer

from benchmarks._measure import Row, readable, timed_pair, timed_row
from toolkit.em import GaussianMixture

__all__ = ["ON_REQUEST", "problems", "rows"]

ON_REQUEST = True


def problems() -> dict[str, tuple[np.ndarray, int]]:
    """Return samples and numbers of components: scikit-learn's own sets, and drawn ones of many sizes and shapes."""
    random = np.random.default_rng(0)
    found = {
        name: (_standardised(getattr(datasets, f"load_{name}")().data), k)
        for name, k in (("iris", 3), ("wine", 3), ("breast_cancer", 2), ("diabetes", 3), ("linnerud", 2))
    }
    digits = _standardised(datasets.load_digits().data)
    found["digits, 8 directions"] = (digits @ np.linalg.svd(digits, full_matrices=False)[2][:8].T, 10)
    sizes = ((100, 1, 2), (200, 2, 3), (1000, 2, 8), (1000, 16, 5), (2000, 64, 3), (10_000, 8, 10), (100_000, 4, 5))
    for n, d, k in sizes:
        for name, spread in (("blobs", 1.0), ("overlapping", 5.0)):
            x = datasets.make_blobs(n, d, centers=k, cluster_std=spread, random_state=1)[0]
            found[f"{name}, {n} x {d}, K = {k}"] = (x, k)
    for n, d, k in ((300, 1, 2), (1000, 3, 4), (10_000, 8, 5)):
        found[f"heavy tails, {n} x {d}, K = {k}"] = (random.standard_t(3, (n, d)), k)
        found[f"uniform, {n} x {d}, K = {k}"] = (random.random((n, d)), k)
    found["moons, 500 x 2, K = 6"] = (datasets.make_moons(500, noise=0.1, random_state=0)[0], 6)
    found["circles, 500 x 2, K = 8"] = (datasets.make_circles(500, noise=0.07, factor=0.5, random_state=0)[0], 8)
    found["swiss roll, 1000 x 3, K = 10"] = (datasets.make_swiss_roll(1000, noise=0.3, random_state=0)[0], 10)
    found["gamma, 1000 x 1, K = 3"] = (random.gamma(2, size=(1000, 1)), 3)
    return found


def rows() -> Iterator[Row]:
    """Measure a default fit of every set, then the median over the sets, and predictions on iris."""
    ratios, as_high = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (x, k) in problems().items():
            ours, theirs = GaussianMixture(k, random_state=0), Peer(k, random_state=0)
            ratios.append(_fits(f"default fit / scikit-learn's, {name}", x, ours, theirs, "at most 2", repeats=3))
            yield ratios[-1]
            what, ours = f"fit to scikit-learn's likelihood / scikit-learn's, {name}", _reaching(theirs.score(x), x, k)
            as_high.append(_fits(what, x, ours, theirs, repeats=3))
            yield as_high[-1]
        for what, measured in (("default fit", ratios), ("fit to scikit-learn's likelihood", as_high)):
            middle = statistics.median(row.ratio for row in measured)
            yield Row(f"{what}, median of the sets", middle, "at most 1", f"{len(measured)} sets")
        for name in ("iris", "wine"):
            x, k = problems()[name]
            ours, theirs = (one(k, n_init=10, random_state=0) for one in (GaussianMixture, Peer))
            yield _fits(f"fit with n_init=10 / scikit-learn's, {name}", x, ours, theirs, "at most 1", repeats=5)
        x, k = problems()["iris"]
        ours, theirs = GaussianMixture(k, random_state=0).fit(x), Peer(k, random_state=0).fit(x)
        for count in (1, len(x)):
            yield timed_row(
                f"predict {count} of iris / scikit-learn's",
                lambda n=count: ours.predict(x[:n]),
                lambda n=count: theirs.predict(x[:n]),
                "at most 1",
            )


def _fits(what: str, x: np.ndarray, ours: GaussianMixture, theirs: Peer, goal: str = "", *, repeats: int) -> Row:
    """Return the row of two fits of one set, with the difference of the likelihoods that they reach."""
    ratio, seconds, their_seconds = timed_pair(lambda: ours.fit(x), lambda: theirs.fit(x), repeats)
    gain, tol = ours.score(x) - theirs.score(x), f"tol={ours.tol:g}"
    return Row(what, ratio, goal, f"{readable(seconds)} with {tol} against {readable(their_seconds)}, {gain:+.1e} nats")


def _reaching(log_likelihood: float, x: np.ndarray, k: int) -> GaussianMixture:
    """Return the mixture with the largest power of ten as `tol` whose fit is as high, to 1e-6 nats per sample."""
    for exponent in range(1, 6):
        found = GaussianMixture(k, random_state=0, tol=10.0**-exponent)
        if found.fit(x).score(x) >= log_likelihood - 1e-6:
            return found
    return GaussianMixture(k, random_state=0)


def _standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1.0)
