"""Time of EM and of scikit-learn: one step, a whole fit, many starts; and the savings of the block."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture
from torch import Tensor

from benchmarks._measure import Row, timed_pair, timed_row
from toolkit import unblock
from toolkit.em import RESPONSIBILITIES, CovarianceType, GaussianParameters, from_unconstrained, start, surrogate
from toolkit.em import fit as fit_mixture

__all__ = ["Cell", "cells", "measure", "problem", "product_limit", "rows", "summaries"]

STEPS = 10


@dataclass(frozen=True)
class Cell:
    """One size of problem, with its seconds for `STEPS` steps, set-up and last E-step included."""

    kind: CovarianceType
    n_samples: int
    n_features: int
    n_components: int
    dtype: torch.dtype
    ours: float = math.nan
    theirs: float = math.nan
    difference: float = math.nan

    @property
    def ratio(self) -> float:
        """Ours / theirs."""
        return self.ours / self.theirs

    def __str__(self) -> str:
        size = f"{self.n_samples} x {self.n_features}, {self.n_components} components"
        return f"{self.kind}, {size}, {str(self.dtype).removeprefix('torch.')}"


def cells(n_samples: int) -> Iterator[Cell]:
    """Return the grid of sizes for this many samples."""
    grid = itertools.product(("full", "diag"), (2, 16, 64), (3, 10, 50), (torch.float32, torch.float64))
    for kind, n_features, n_components, dtype in grid:
        yield Cell(kind, n_samples, n_features, n_components, dtype)  # type: ignore[arg-type]


def rows() -> Iterator[Row]:
    """Measure whole fits of a fixed number of steps from the same start over the grid of sizes, and the rest."""
    measured = []
    for cell in cells(100_000):
        measured.append(measure(cell))
        yield row_of(measured[-1])
    yield from summaries(measured)
    yield from _ways_to_the_maximum()
    yield _many_starts()
    yield _without_cache()
    yield _gradient(10_000, 8, 10)


def row_of(cell: Cell) -> Row:
    """Return the line of one cell."""
    note = f"{cell.ours * 1e3:.0f} ms against {cell.theirs * 1e3:.0f} ms"
    if math.isnan(cell.theirs):
        return Row(f"EM, {STEPS} steps, {cell}", math.nan, "", f"{cell.ours * 1e3:.0f} ms; scikit-learn raises")
    return Row(
        f"EM, {STEPS} steps / scikit-learn, {cell}",
        cell.ratio,
        "below 1",
        f"{note}; log-likelihoods differ by {cell.difference:.0e}",
    )


def measure(cell: Cell) -> Cell:
    """Return the cell with its times: the median of pairs that run in turn, fewer if they take long."""
    x, first = problem(cell)
    array = x.numpy()
    theirs_model: list[GaussianMixture] = []
    found = []

    def ours() -> None:
        found[:] = [
            fit_mixture(
                x,
                cell.n_components,
                covariance_type=cell.kind,
                init=first,
                tol=0,
                max_iter=STEPS,
                accelerate="none",
            )
        ]

    def theirs() -> None:
        model = GaussianMixture(
            cell.n_components,
            covariance_type=cell.kind,
            max_iter=STEPS,
            tol=0,
            weights_init=first.weights.to(cell.dtype).numpy(),
            means_init=first.means.to(cell.dtype).numpy(),
            precisions_init=first.precisions.to(cell.dtype).numpy(),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged
            theirs_model[:] = [model.fit(array)]

    begin = time.perf_counter()
    try:
        theirs()
        assert theirs_model[0].n_iter_ == STEPS
    except ValueError:
        ours()
        begin = time.perf_counter()
        ours()
        return Cell(*_key(cell), ours=time.perf_counter() - begin)
    repeats = max(1, min(5, round(4 / (time.perf_counter() - begin))))
    _, seconds, their_seconds = timed_pair(ours, theirs, repeats=repeats)
    # Where rounding in float32 ended ours early, as if it had taken all steps.
    seconds *= (STEPS + 1) / (found[0].n_iter + 1)
    difference = abs(found[0].log_likelihood - float(theirs_model[0].score(array)))
    return Cell(*_key(cell), ours=seconds, theirs=their_seconds, difference=difference)


def _key(cell: Cell) -> tuple[CovarianceType, int, int, int, torch.dtype]:
    return cell.kind, cell.n_samples, cell.n_features, cell.n_components, cell.dtype


def summaries(measured: list[Cell]) -> Iterator[Row]:
    """Return geometric means over parts of the grid, and the worst cell."""
    comparable = [cell for cell in measured if not math.isnan(cell.ratio)]
    parts: list[tuple[str, str, Callable[[Cell], bool]]] = [
        ("all cells", "1/5 = 0.20", lambda _: True),
        ("D = 2, full", "1/15 = 0.067", lambda cell: (cell.kind, cell.n_features) == ("full", 2)),
        ("D = 16, K = 50, full", "1/10 = 0.10", lambda cell: _is(cell, "full", 16, 50)),
        ("D = 64, K = 50, full", "1/3.5 = 0.29", lambda cell: _is(cell, "full", 64, 50)),
    ]
    for name, goal, belongs in parts:
        ratios = [cell.ratio for cell in comparable if belongs(cell)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield Row(f"geometric mean of {len(ratios)}: {name}", mean, goal, f"{1 / mean:.1f} times as fast")
    worst = max(comparable, key=lambda cell: cell.ratio)
    yield Row(f"slowest cell: {worst}", worst.ratio, "below 1", "")
    for cell in measured:
        if _is(cell, "full", 64, 50):
            limit = STEPS * product_limit(cell)
            yield Row(
                f"{STEPS} steps / their matrix products, {cell}",
                cell.ours / limit,
                "1.4",
                f"{cell.ours * 1e3:.0f} ms against {limit * 1e3:.0f} ms; set-up and last E-step included",
            )


def _is(cell: Cell, kind: str, n_features: int, n_components: int) -> bool:
    return (cell.kind, cell.n_features, cell.n_components) == (kind, n_features, n_components)


def product_limit(cell: Cell) -> float:
    """Return the seconds that the matrix products of one step take at the speed of large square ones."""
    size = 2048
    a, b = (torch.randn(size, size, dtype=cell.dtype) for _ in range(2))
    torch.mm(a, b)
    times = []
    for _ in range(5):
        begin = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
        torch.mm(a, b)
        end = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
        times.append(end - begin)
    n_expanded = (cell.n_features + 1) * (cell.n_features + 2) // 2
    return sorted(times)[2] * 2 * cell.n_samples * cell.n_components * n_expanded / size**3


def _ways_to_the_maximum() -> Iterator[Row]:
    """Overlapping problems: ours to within 1e-9 nats of the maximum, scikit-learn to where it stops by default."""
    for name, x, n_components in (("2-D, K = 2, separation 2", *_overlapping(2)), ("4-D, K = 5", *_overlapping(5))):
        first = start(x, n_components, covariance_type="full", generator=torch.Generator().manual_seed(1))
        options = {"init": first, "reg_covar": 0, "max_iter": 20_000}
        best = fit_mixture(x, n_components, tol=0, **options).log_likelihood
        found: list[float] = []
        model = GaussianMixture(
            n_components,
            max_iter=1000,
            weights_init=first.weights.numpy(),
            means_init=first.means.numpy(),
            precisions_init=first.precisions.numpy(),
        )

        def ours(x: Tensor = x, k: int = n_components, options: dict = options, found: list[float] = found) -> None:
            found[:] = [fit_mixture(x, k, tol=1e-9, **options).log_likelihood]

        def theirs(x: Tensor = x, model: GaussianMixture = model) -> None:
            model.fit(x.numpy())

        ratio, seconds, their_seconds = timed_pair(ours, theirs, repeats=5)
        theirs_gap = best - float(model.score(x.numpy()))
        yield Row(
            f"to the maximum / scikit-learn to its default stop, {name}, {len(x)} samples",
            ratio,
            "1",
            f"{seconds * 1e3:.0f} ms, {best - found[0]:.0e} nats short, against {their_seconds * 1e3:.0f} ms, "
            f"{theirs_gap:.0e} short",
        )


def _overlapping(n_components: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(0)
    if n_components == 2:
        x = torch.randn(50_000, 2, generator=generator, dtype=torch.float64)
        x[:, 0] += 2.0 * (torch.rand(len(x), generator=generator) < 0.5)
        return x, 2
    centres = 1.5 * torch.randn(n_components, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(n_components, (50_000,), generator=generator)
    return centres[labels] + torch.randn(50_000, 4, generator=generator, dtype=torch.float64), n_components


def _many_starts() -> Row:
    """Fifty starts on iris, a hundred steps each."""
    x = torch.from_numpy(load_iris().data)
    found: list[float] = []

    def ours() -> None:
        generator = torch.Generator().manual_seed(0)
        fitted = fit_mixture(x, 3, n_init=50, tol=0, max_iter=100, accelerate="none", generator=generator)
        found[:] = [fitted.log_likelihood]

    model = GaussianMixture(3, n_init=50, max_iter=100, tol=0, random_state=0)

    def theirs() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(x.numpy())

    ratio, seconds, their_seconds = timed_pair(ours, theirs, repeats=5)
    note = f"log-likelihoods {found[0]:.6f} and {float(model.score(x.numpy())):.6f}"
    return Row(
        "50 starts, 100 steps each / scikit-learn, iris, K = 3",
        ratio,
        "1/30 = 0.033",
        f"{seconds * 1e3:.0f} ms against {their_seconds * 1e3:.0f} ms; {note}",
    )


def _without_cache() -> Row:
    cell = Cell("full", 100_000, 64, 50, torch.float64)
    x, first = problem(cell)

    def fit(cache: bool) -> None:
        fit_mixture(x, 50, init=first, tol=0, max_iter=1, accelerate="none", cache=cache)

    what = f"2 passes without / with the transposed copy, {cell}"
    return timed_row(what, lambda: fit(False), lambda: fit(True), "1.15", repeats=3)


def _gradient(n_samples: int, n_features: int, n_components: int) -> Row:
    x, first = problem(Cell("full", n_samples, n_features, n_components, torch.float64))
    size = n_features * (n_features + 1) // 2
    leaves = {
        "log_weights": first.log_weights.clone(),
        "means": first.means.clone(),
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

    size = f"full, {n_samples} x {n_features}, {n_components} components"
    return timed_row(f"gradient EM: blocked / open, {size}", blocked, opened)


def problem(cell: Cell) -> tuple[Tensor, GaussianParameters]:
    """Return unit clusters that overlap as much in any number of dimensions, and a start near their centres.

    So no fit has converged when its steps are done: all of them are taken.
    """
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    k, d = cell.n_components, cell.n_features
    centres = 2 / math.sqrt(d) * torch.randn(k, d, **options)
    x = torch.empty(cell.n_samples, d, dtype=cell.dtype)
    for part in x.split(100_000):
        labels = torch.randint(k, (len(part),), generator=generator)
        part.copy_(centres[labels] + torch.randn(len(part), d, **options))
    eye = torch.eye(d, dtype=torch.float64)
    covariances = {
        "full": eye.repeat(k, 1, 1),
        "tied": eye,
        "diag": torch.ones(k, d, dtype=torch.float64),
        "spherical": torch.ones(k, dtype=torch.float64),
    }
    first = GaussianParameters.from_covariances(
        weights=torch.full((k,), 1 / k, dtype=torch.float64),
        means=centres + 0.5 / math.sqrt(d) * torch.randn(k, d, **options),
        covariances=covariances[cell.kind],
        covariance_type=cell.kind,
    )
    return x, first
