r"""The EM map of many parsimonious mixtures of the same data, side by side.

The mixtures differ in model and number of components. A joint step takes one pass over the data for each number of
components, and one M-step for each model, so that the mixtures share the overhead of calls. On a CPU all but the pass
is in NumPy, whose calls take a fraction of the time of torch's.

N samples, D features, K components, R mixtures, B fits, P coordinates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toolkit._data import as_tensor, library
from toolkit.em.covariance import Structure, soft_counts
from toolkit.em.covariance.models import Model, ParsimoniousCovariances
from toolkit.em.covariance.orientations import upper_factor
from toolkit.em.covariance.structure import identity_like, singular
from toolkit.em.engine.fused import Expansion, accumulate, error_of_distance, expanded_sums, loses_digits
from toolkit.em.engine.samples import prepare
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.models.parsimonious import INNER_STEPS_OF_EM, ParsimoniousParameters

__all__ = ["Cell", "Fits", "Pass", "problem_of"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]

# The most log-joints that are computed at once, and up to which mixtures of several sizes are.
_LOG_JOINTS = 2**18
_PADDED = 2**16


@dataclass(frozen=True)
class Cell:
    """One model with one number of components, and its starts."""

    model: Model
    n_components: int
    starts: Sequence[GaussianParameters]


@dataclass(frozen=True)
class _Mixtures:
    """Several mixtures (R, ...); those of fewer than K components have log-weights of minus infinity.

    `log_weights` (R, K), `means` (R, K, D); `factor`: factors of the precisions, of K components or of 1, shaped by
    the structure of the pass; `log_determinants` of these.
    """

    log_weights: Tensor
    means: Tensor
    factor: Tensor
    log_determinants: Tensor


@dataclass(frozen=True)
class _Statistics:
    """The sums over samples from which the M-step is made, of R mixtures: counts of 0 mark absent components.

    `scatter` (R, K, D, D) or (R, K, D); `value` (R,): log-likelihoods in nats per sample; `error` (R,): bounds of their
    rounding errors.
    """

    counts: Tensor
    means: Tensor
    scatter: Tensor
    value: Tensor
    error: Tensor

    def __getitem__(self, which: Any) -> _Statistics:
        return _Statistics(*(value[which] for value in vars(self).values()))


class Pass:
    """The E-step of many mixtures, full or diag, on data that are prepared once.

    Attributes:
        structure: Full or diag.
        prepared: The data.
    """

    def __init__(
        self, x: Tensor, structure: Structure, most: int, sample_weight: Tensor | None, reg_covar: float
    ) -> None:
        self.structure, self.reg_covar = structure, reg_covar
        self.prepared = prepare(x, structure.name, most, sample_weight=sample_weight)
        self._scatter, self._scale = _native(self.prepared.scatter), _native(self.prepared.scale)
        chunks = list(itertools.islice(self.prepared.chunks(), 2))
        length = chunks[0][0].shape[1]
        self._length = length
        # Data of one chunk are expanded only once.
        self._expansion = Expansion(structure, x.shape[1], length, like=x) if len(chunks) == 1 else None

    def statistics(self, mixtures: _Mixtures, sizes: _Ints) -> _Statistics:
        """Return the statistics of mixtures of `sizes` (R,) components; not finite where a mixture overflows."""
        data, structure, of = self.prepared, self.structure, library(mixtures.means)
        (n_mixtures, n_components, n_features), present = mixtures.means.shape, _present(sizes, mixtures.means)
        factor, means = _by(data.factor_to_frame, mixtures.factor), _by(data.to_frame, mixtures.means)
        quadratic, linear = structure.coefficients(factor, means)
        constant = mixtures.log_weights + mixtures.log_determinants - 0.5 * n_features * math.log(2 * math.pi)
        quadratic = of.broadcast_to(quadratic, (n_mixtures, n_components, quadratic.shape[-1]))
        theta = of.concatenate([quadratic, linear, (constant - 0.5 * (linear * means).sum(-1))[..., None]], -1)
        distances = structure.squared_distances(factor, self._scatter)
        distances = of.broadcast_to(distances, (n_mixtures, n_components))
        farthest = of.amax(of.where(present, distances, 0.0), 1)
        finite = of.isfinite(of.where(present[..., None], theta, 0.0)).reshape(n_mixtures, -1).all(1)
        finite, lossy = _array(finite), np.array([loses_digits(distance) for distance in farthest.tolist()])
        sums, total = of.zeros_like(theta), of.full_like(farthest, math.nan)
        for size, which in self._passes(sizes, (finite & ~lossy).nonzero()[0], n_components):
            own, highest = as_tensor(theta[which, :size]), constant[which, :size].max()
            found = expanded_sums(structure, own, highest, data, torch.float64, self._expansion)
            sums[which, :size], total[which] = found if of is torch else (value.numpy() for value in found)
        seen = of.where(present, soft_counts(sums[..., -1]), 0.0)[..., None]
        # An empty component is put at the centre.
        moved = sums[..., -n_features - 1 : -1] / of.where(present[..., None], seen, 1.0)
        moved = of.where(sums[..., -1:] < seen, 0.0, moved)
        scatter = structure.second_moments(sums[..., : -n_features - 1], n_features)
        scatter = scatter - structure.products(seen * moved, moved)
        value, error = total / data.total_weight, error_of_distance(farthest, torch.float64)
        for row in (finite & lossy).nonzero()[0].tolist():
            self._put_about_means(row, mixtures, int(sizes[row]), seen, moved, scatter, value)
            error[row] = 0.0
        if self._scale is not None:
            scatter = self._scale @ scatter @ self._scale.mT
        if self.reg_covar:
            added = structure.regularise(of.zeros_like(scatter), self.reg_covar)
            scatter = scatter + structure.totals(of.broadcast_to(seen, moved.shape)) * added
        return _Statistics(seen[..., 0], _by(data.from_frame, moved), scatter, value, error)

    def _passes(self, sizes: _Ints, rows: _Ints, most: int) -> Iterator[tuple[int, _Ints]]:
        """Yield a number of components and the mixtures of one pass, absent components included where they are few."""
        if len(rows) * most * self._length <= _PADDED:
            if len(rows):
                yield most, rows
            return
        for size in np.unique(sizes[rows]).tolist():
            some = rows[sizes[rows] == size]
            step = max(1, _LOG_JOINTS // (size * self._length))
            yield from ((size, some[i : i + step]) for i in range(0, len(some), step))

    def _put_about_means(self, row: int, mixtures: _Mixtures, size: int, *into: Tensor) -> None:
        """Write the statistics of one mixture, from differences from its means: its expansion would lose digits."""
        seen, moved, scatter, value = map(as_tensor, into)  # the same memory
        factor = as_tensor(mixtures.factor[row])
        factor = factor.expand(len(mixtures.means[row]), *factor.shape[1:])[:size]
        one = GaussianParameters(
            log_weights=as_tensor(mixtures.log_weights[row, :size]),
            means=as_tensor(mixtures.means[row, :size]),
            precisions_cholesky=upper_factor(factor) if self.structure.is_matrix else factor,
            covariance_type=self.structure.name,
        )
        moments = accumulate(one, self.prepared)
        counts = soft_counts(moments.counts)
        shifts = moments.first / counts[:, None]
        seen[row, :size, 0], value[row] = counts, moments.log_likelihood
        moved[row, :size] = torch.where((moments.counts < counts)[:, None], 0.0, moments.origins + shifts)
        scatter[row, :size] = moments.second - self.structure.products(counts[:, None] * shifts, shifts)


class _Form:
    """The coordinates of the mixtures of one model with at most K components; absent ones have coordinates of 0."""

    def __init__(self, model: Model, n_components: int, like: Tensor) -> None:
        self.model, (k, d) = model, (n_components, like.shape[1])
        volumes, shapes, axes = ({"V": k}.get(letter, 1) for letter in model.name)
        self._template = ParsimoniousCovariances(
            model=model.name,
            log_volumes=_native(like.new_zeros(volumes)),
            log_shapes=_native(like.new_zeros(shapes, d)),
            axes=_native(torch.eye(d, dtype=like.dtype, device=like.device).repeat(axes, 1, 1)),
        )
        leaves = {
            "log_weights": like.new_zeros(k),
            "means": like.new_zeros(k, d),
            **self._template.unconstrained(),
        }
        self._shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()]).tolist()
        self._slices = [slice(*ends) for ends in itertools.pairwise([0, *ends])]
        self.n_coordinates = ends[-1]

    def pack(self, statistics: _Statistics, structure: ParsimoniousCovariances) -> Tensor:
        """Return the coordinates (R, P) of the mixtures after an M-step."""
        of, counts = library(statistics.counts), statistics.counts
        absent = counts == 0
        log_weights = of.log(of.where(absent, 1.0, counts) / counts.sum(1)[:, None])
        log_weights = of.where(absent, 0.0, log_weights)
        means = of.where(absent[..., None], 0.0, statistics.means)
        leaves = (log_weights, means, *structure.unconstrained().values())
        packed: Tensor = of.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)
        return packed

    def unpack(self, positions: Tensor, sizes: _Ints) -> tuple[Tensor, Tensor, ParsimoniousCovariances]:
        """Return log-weights, means and covariances (R, ...) of coordinates (R, at least P)."""
        of, n = library(positions), len(positions)
        values = {
            name: positions[:, part].reshape(n, *shape)
            for part, (name, shape) in zip(self._slices, self._shapes.items(), strict=True)
        }
        one, means = self._template, values["means"]
        structure = ParsimoniousCovariances(
            model=one.model,
            log_volumes=values["log_volumes"],
            log_shapes=of.broadcast_to(one.log_shapes, (n, *one.log_shapes.shape)),
            axes=of.broadcast_to(one.axes, (n, *one.axes.shape)),
        )
        log_weights = of.where(_present(sizes, means), values["log_weights"], -math.inf)
        log_weights = log_weights - of.amax(log_weights, 1, keepdims=True)
        log_weights = log_weights - of.log(of.exp(log_weights).sum(1))[:, None]
        return log_weights, means, structure.with_unconstrained(values)

    def mixtures(self, positions: Tensor, sizes: _Ints) -> tuple[_Mixtures, ParsimoniousCovariances]:
        """Return the mixtures at these coordinates, for a pass, and their covariances."""
        log_weights, means, structure = self.unpack(positions, sizes)
        full = self.model.structure.is_matrix
        k, d = means.shape[1:]
        of = library(means)
        factor = structure.factors if full else of.exp(-0.5 * structure.log_variances)
        factor = of.broadcast_to(factor, (len(means), k, *factor.shape[2:]))
        log_determinants = of.broadcast_to(-0.5 * d * structure.log_volumes, (len(means), k))
        return _Mixtures(log_weights, means, factor, log_determinants), structure


class Fits:
    """B fits, one from each start of each cell, in the order of the cells' models.

    Attributes:
        cells: The cells.
        rows: The fits of each cell.
        reg_covar: The number that was added to every variance.
        start: (B, P): the coordinates at which the fits start, NaN where the first M-step fails.
        problems: The error of each fit's last failed M-step.
    """

    def __init__(self, cells: Sequence[Cell], passes: Mapping[Structure, Pass], like: Tensor) -> None:
        self.cells, self._passes, self._like = cells, passes, like
        self.reg_covar = max(run.reg_covar for run in passes.values())
        most = max(cell.n_components for cell in cells)
        models = list(dict.fromkeys(cell.model for cell in cells))
        self._forms = [_Form(model, most, like) for model in models]
        self._n_coordinates = max(form.n_coordinates for form in self._forms)
        n_starts = np.array([len(cell.starts) for cell in cells])
        model_of_cell = np.array([models.index(cell.model) for cell in cells])
        # Fits of one model stand side by side.
        order = np.argsort(model_of_cell, kind="stable")
        self._model = np.repeat(model_of_cell[order], n_starts[order])
        self._size = np.repeat([cells[i].n_components for i in order], n_starts[order])
        first = np.empty(len(cells), np.int64)
        first[order] = n_starts[order].cumsum() - n_starts[order]
        self.rows = [np.arange(i, i + n) for i, n in zip(first, n_starts, strict=True)]
        self.problems: dict[int, str] = {}
        self.start = self._first([start for i in order for start in cells[i].starts])

    @np.errstate(all="ignore")
    def _first(self, starts: Sequence[GaussianParameters]) -> _Floats:
        """Return the coordinates after one M-step from each start."""
        found = np.full((len(starts), self._n_coordinates), np.nan)
        for structure, run in self._passes.items():
            forms = [i for i, form in enumerate(self._forms) if form.model.structure.wide is structure]
            rows = np.isin(self._model, forms).nonzero()[0]
            # The models of one kind share their starts.
            once = {id(starts[row]): row for row in rows.tolist()}
            if not once:
                continue
            mixtures = [self._padded(starts[row].as_type(structure.name)) for row in once.values()]
            leaves = (_native(torch.stack(leaf)) for leaf in zip(*mixtures, strict=True))
            statistics = run.statistics(_Mixtures(*leaves), self._size[list(once.values())])
            places = {key: place for place, key in enumerate(once)}
            for i in forms:
                mine = (self._model == i).nonzero()[0]
                chosen = np.array([places[id(starts[row])] for row in mine.tolist()])
                found[mine] = self._maximised(mine, self._forms[i], statistics[chosen], None)
        return found

    @np.errstate(all="ignore")
    def em(self, fits: _Ints, positions: _Floats) -> tuple[_Floats, _Floats, _Floats]:
        """Return the points after an EM step, the log-likelihoods before it, and bounds of their rounding errors."""
        images, values, errors = np.full(positions.shape, np.nan), np.full(len(fits), np.nan), np.zeros(len(fits))
        finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(positions).all(1))
        points = self._points(np.where(finite[:, None], positions, 0.0))
        models = self._model[fits]
        for structure, run in self._passes.items():
            parts = [
                (form, (models == i).nonzero()[0])
                for i, form in enumerate(self._forms)
                if form.model.structure.wide is structure
            ]
            parts = [(form, places) for form, places in parts if len(places)]
            if not parts:
                continue
            found = [form.mixtures(points[places], self._size[fits[places]]) for form, places in parts]
            leaves = zip(*(vars(mixtures).values() for mixtures, _ in found), strict=True)
            every = np.concatenate([places for _, places in parts])
            mixtures = _Mixtures(*(library(points).concatenate(leaf) for leaf in leaves))
            statistics = run.statistics(mixtures, self._size[fits[every]])
            values[every], errors[every] = _array(statistics.value), _array(statistics.error)
            first = 0
            for (form, places), (_, before) in zip(parts, found, strict=True):
                some = statistics[first : first + len(places)]
                images[places] = self._maximised(fits[places], form, some, before)
                first += len(places)
        values[~finite] = np.nan
        return images, values, errors

    def _points(self, positions: _Floats) -> Tensor:
        """Return coordinates as a tensor on the device of the samples, or as they are on a CPU."""
        points: Tensor = _native(torch.from_numpy(positions).to(self._like.device))
        return points

    def allows(self, fits: _Ints, positions: _Floats) -> npt.NDArray[np.bool_]:
        """Say which points (b, P) a jump may lead to (see `Structure.check_least`)."""
        allowed = np.ones(len(fits), bool)
        for place, model in enumerate(self._model[fits].tolist()):
            form = self._forms[model]
            if form.model.keeps_variances:
                point = self._points(positions[place : place + 1])
                mixtures, _ = form.mixtures(point, self._size[fits[place : place + 1]])
                factor = _tensor(mixtures.factor[0, : self._size[fits[place]]])
                allowed[place] = form.model.structure.wide.has_least(factor, self.reg_covar)
        return allowed

    def _maximised(
        self, fits: _Ints, form: _Form, statistics: _Statistics, before: ParsimoniousCovariances | None
    ) -> _Floats:
        """Return the coordinates (b, P) after the M-step of fits of one model, NaN where it fails."""
        counts, scatter, n = statistics.counts, statistics.scatter, len(fits)
        of = library(counts)
        finite = of.isfinite(scatter).reshape(n, -1).all(1) & of.isfinite(counts).all(1) & of.isfinite(statistics.value)
        if not bool(finite.all()):
            usual = of.ones_like(scatter)
            if scatter.ndim == 4:
                usual = usual * identity_like(scatter)
            present = counts != 0
            usual = usual * present.reshape(*present.shape, *[1] * (scatter.ndim - 2))
            keep = finite.reshape(-1, *[1] * (scatter.ndim - 1))
            statistics = dataclasses.replace(
                statistics,
                counts=of.where(finite[:, None], counts, 1.0 * present),
                scatter=of.where(keep, scatter, usual),
            )
        steps = (4 if before is None else 1) * INNER_STEPS_OF_EM
        structure, sound = form.model.m_step(statistics.counts, statistics.scatter, before, steps)
        packed = form.pack(statistics, structure)
        whole: npt.NDArray[np.bool_] = _array(finite & sound.all(1))
        for place in np.flatnonzero(~whole).tolist():
            one = as_tensor(sound[place])[: self._size[fits[place]]] if bool(finite[place]) else None
            self.problems[int(fits[place])] = problem_of(one)
        images = np.full((n, self._n_coordinates), np.nan)
        images[:, : form.n_coordinates] = _array(packed)
        images[:, form.n_coordinates :] = 0.0
        images[~whole] = np.nan
        return images

    def mixture(self, fit: int, position: _Floats) -> ParsimoniousParameters:
        """Return the mixture of one fit at these coordinates (P,)."""
        size, form = int(self._size[fit]), self._forms[self._model[fit]]
        found = form.unpack(self._points(position[None]), self._size[fit : fit + 1])
        structure = {name: _tensor(value[0, :size]) for name, value in vars(found[2]).items() if name != "model"}
        return ParsimoniousParameters(
            log_weights=as_tensor(found[0][0, :size]),
            means=as_tensor(found[1][0, :size]),
            structure=ParsimoniousCovariances(model=form.model.name, **structure),
        )

    def _padded(self, start: GaussianParameters) -> tuple[Tensor, ...]:
        """Return the leaves of a full or diag start as `_Mixtures` have them, in float64."""
        k = start.n_components
        missing = max(cell.n_components for cell in self.cells) - k
        start = start.to(torch.float64)
        log_determinants, factor = start.log_determinants, start.precisions_cholesky
        return (
            torch.cat([start.log_weights, start.log_weights.new_full((missing,), -math.inf)]),
            torch.cat([start.means, start.means.new_zeros(missing, start.n_features)]),
            torch.cat([factor, factor[:1].expand(missing, *factor.shape[1:])]),
            torch.cat([log_determinants, log_determinants[:1].expand(missing)]),
        )

    def narrowest(self, fits: _Ints, positions: _Floats) -> _Floats:
        """Return the least variance of a component in any direction, in units of the components' average: (b,)."""
        found = np.empty(len(fits))
        for i, form in enumerate(self._forms):
            places = (self._model[fits] == i).nonzero()[0]
            if len(places):
                sizes = self._size[fits[places]]
                mixtures, _ = form.mixtures(self._points(positions[places]), sizes)
                weights, factor = _tensor(mixtures.log_weights).exp(), _tensor(mixtures.factor)
                least = _array(form.model.structure.wide.narrowest(weights, factor))
                found[places] = np.where(_array(_present(sizes, mixtures.means)), least, math.inf).min(1)
        return found


def _present(sizes: _Ints, means: Tensor) -> Tensor:
    """Return the mask (R, K) of the components of mixtures of so many (R,)."""
    present: Any = np.arange(means.shape[1]) < sizes[:, None]
    return present if library(means) is np else torch.from_numpy(present).to(means.device)


def _native(values: Any) -> Any:
    """Return a tensor of a CPU, or None, as an array; a tensor of another device unchanged."""
    return values.numpy() if values is not None and values.device.type == "cpu" else values


def _array(values: Any) -> Any:
    """Return a tensor or an array as an array."""
    return values if library(values) is np else values.cpu().numpy()


def _tensor(values: Any) -> Tensor:
    """Return a tensor or an array, which may be a view that cannot be written to, as a tensor on its device."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values.copy())


def _by(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return a function of a tensor; an array for an array."""
    return function(values) if isinstance(values, Tensor) else function(torch.from_numpy(values)).numpy()


def problem_of(sound: Tensor | None) -> str:
    """Return the error of a failed M-step, from the mask of sound covariances, or None after an overflow."""
    if sound is None:
        return "The covariances should be finite and positive. Found some that overflow."
    return singular(sound[0] if len(sound) == 1 else sound, "covariances", "model")
