"""How often one start misses a cluster: every kind of mixture beside scikit-learn, on blobs with their true number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture as Peer

from benchmarks._measure import Row
from toolkit import em

__all__ = ["SIZES", "misses", "programs", "rows"]

ON_REQUEST = True

# Components and features.
SIZES = ((3, 2), (4, 5), (6, 4), (8, 8), (12, 8))
_REPEATS = 40

Program = Callable[[np.ndarray, int], np.ndarray]


def rows() -> Iterator[Row]:
    """Count the data sets of 500 samples in which a fit from one start misses the clusters."""
    for k, d in SIZES:
        theirs = misses(_peer, k, d, _REPEATS)
        for name, program in programs().items():
            ours = misses(program, k, d, _REPEATS)
            yield Row(
                f"clusters missed / scikit-learn, {name}, {k} blobs in {d} dimensions",
                (ours + 1) / (theirs + 1),
                "at most 1",
                f"{ours} against {theirs} of {_REPEATS} data sets; the ratio has 1 added to both",
            )


def misses(program: Program, n_components: int, n_features: int, n_sets: int) -> int:
    """Return in how many data sets the labels of a program have an adjusted Rand index below 0.9."""
    missed = 0
    for seed in range(n_sets):
        x, truth = make_blobs(500, n_features, centers=n_components, random_state=seed, center_box=(-20, 20))
        try:
            missed += adjusted_rand_score(truth, program(x, n_components)) < 0.9
        except ValueError:  # a singular covariance
            missed += 1
    return missed


def programs() -> dict[str, Program]:
    """Return fits from one start, by name; each takes samples and the number of components to labels."""
    return {
        "em.fit": lambda x, k: _labels(em.fit(torch.from_numpy(x), k, generator=_generator()), x),
        "GaussianMixture": lambda x, k: em.GaussianMixture(k, random_state=0).fit_predict(x),
        "VEV": lambda x, k: em.GaussianMixture(k, covariance_type="VEV", random_state=0).fit_predict(x),
        # Labels of the complete samples: an observed value alone may not tell two clusters apart, from any fit.
        "GaussianMixture, a tenth missing": lambda x, k: (
            em.GaussianMixture(k, missing=True, random_state=0).fit(_with_holes(x)).predict(x)
        ),
        "GaussianHMM": lambda x, k: em.GaussianHMM(k, random_state=0).fit(x).predict(x),
        "StudentMixture": lambda x, k: _family(em.StudentMixture, x, k),
        "FactorAnalysers": lambda x, k: _family(em.FactorAnalysers, x, k, n_factors=1),
        "select": _selected,
    }


def _peer(x: np.ndarray, k: int) -> np.ndarray:
    return Peer(k, random_state=0).fit_predict(x)


def _with_holes(x: np.ndarray) -> np.ndarray:
    holes = x.copy()
    holes[np.random.default_rng(0).random(x.shape) < 0.1] = np.nan
    return holes


def _family(family: type, x: np.ndarray, k: int, **options: object) -> np.ndarray:
    return _labels(em.fit_family(family, torch.from_numpy(x), k, generator=_generator(), **options), x)


def _selected(x: np.ndarray, k: int) -> np.ndarray:
    found = em.select(torch.from_numpy(x), [k], ["VVV"], n_init=1, generator=_generator())
    return em.e_step(found.best.parameters.to_gaussian(), torch.from_numpy(x))[0].argmax(1).numpy()


def _labels(found: em.Fit, x: np.ndarray) -> np.ndarray:
    return em.e_step(found.parameters, torch.from_numpy(x))[0].argmax(1).numpy()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
