"""What an EM step costs beside scikit-learn's, and what the block saves in gradient EM."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from benchmarks._measure import Row, timed_pair
from toolkit import unblock
from toolkit.em import RESPONSIBILITIES, CovarianceType, GaussianParameters, from_unconstrained, surrogate
from toolkit.em import fit as fit_mixture

_STEPS = 5
_CELLS: tuple[tuple[CovarianceType, int, int, int], ...] = (
    ("full", 100_000, 2, 10),
    ("full", 50_000, 16, 10),
    ("full", 50_000, 16, 50),
    ("full", 20_000, 64, 10),
    ("diag", 100_000, 2, 10),
    ("diag", 50_000, 16, 50),
    ("tied", 50_000, 16, 10),
    ("spherical", 50_000, 16, 10),
)


def rows() -> Iterator[Row]:
    """Measure whole fits of a fixed number of steps from the same start, float64, and one gradient."""
    for cell in _CELLS:
        yield _steps(*cell)
    yield _gradient(10_000, 8, 10)


def _steps(kind: CovarianceType, n_samples: int, n_features: int, n_components: int) -> Row:
    x, start = _problem(kind, n_samples, n_features, n_components)
    array = x.numpy()

    def ours() -> None:
        fit_mixture(x, n_components, covariance_type=kind, init=start, tol=0, max_iter=_STEPS)

    def theirs() -> None:
        model = GaussianMixture(
            n_components,
            covariance_type=kind,
            max_iter=_STEPS,
            tol=0,
            weights_init=start.weights.numpy(),
            means_init=start.means.numpy(),
            precisions_init=start.precisions.numpy(),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged
            model.fit(array)

    ratio, seconds, their_seconds = timed_pair(ours, theirs, repeats=3)
    return Row(
        f"EM, {_STEPS} steps / scikit-learn, {kind}, {n_samples} x {n_features}, {n_components} components",
        ratio,
        "below 1",
        f"{seconds * 1e3:.0f} ms against {their_seconds * 1e3:.0f} ms, set-up and last E-step included",
    )


def _gradient(n_samples: int, n_features: int, n_components: int) -> Row:
    x, start = _problem("full", n_samples, n_features, n_components)
    size = n_features * (n_features + 1) // 2
    leaves = {
        "log_weights": start.log_weights.clone(),
        "means": start.means.clone(),
        "log_cholesky": torch.zeros(n_components, size, dtype=torch.float64),
    }
    for leaf in leaves.values():
        leaf.requires_grad_()

    def blocked() -> None:
        loss = -surrogate(from_unconstrained(leaves, "full"), x)
        torch.autograd.grad(loss, list(leaves.values()))

    def opened() -> None:
        with unblock(RESPONSIBILITIES):
            blocked()

    ratio, seconds, open_seconds = timed_pair(blocked, opened)
    return Row(
        f"gradient EM: blocked / open, full, {n_samples} x {n_features}, {n_components} components",
        ratio,
        "",
        f"{seconds * 1e3:.3g} ms against {open_seconds * 1e3:.3g} ms, forward + backward",
    )


def _problem(
    kind: CovarianceType, n_samples: int, n_features: int, n_components: int
) -> tuple[Tensor, GaussianParameters]:
    """Return overlapping unit clusters, and a start near their centres."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    centres = 2 * torch.randn(n_components, n_features, **options)
    labels = torch.randint(n_components, (n_samples,), generator=generator)
    x = centres[labels] + torch.randn(n_samples, n_features, **options)
    eye = torch.eye(n_features, dtype=torch.float64)
    covariances = {
        "full": eye.repeat(n_components, 1, 1),
        "tied": eye,
        "diag": torch.ones(n_components, n_features, dtype=torch.float64),
        "spherical": torch.ones(n_components, dtype=torch.float64),
    }
    start = GaussianParameters.from_covariances(
        weights=torch.full((n_components,), 1 / n_components, dtype=torch.float64),
        means=centres + 0.5 * torch.randn(n_components, n_features, **options),
        covariances=covariances[kind],
        covariance_type=kind,
    )
    return x, start
