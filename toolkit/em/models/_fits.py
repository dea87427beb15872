r"""The EM map of many parsimonious mixtures of the same data, side by side.

The mixtures differ in model and number of components. A joint step takes one pass over the data for each number of
components, and one M-step for each model, so that the mixtures share the overhead of calls.

N samples, D features, K components, R mixtures, B fits, P coordinates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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

# The most log-joints that are computed at once.
_LOG_JOINTS = 2**18


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
        chunks = list(itertools.islice(self.prepared.chunks(), 2))
        length = chunks[0][0].shape[1]
        self._length = length
        # Data of one chunk are expanded only once.
        self._expansion = Expansion(structure, x.shape[1], length, like=x) if len(chunks) == 1 else None

    def statistics(self, mixtures: _Mixtures, sizes: _Ints) -> _Statistics:
        """Return the statistics of mixtures of `sizes` (R,) components; not finite where a mixture overflows."""
        data, structure, means = self.prepared, self.structure, mixtures.means
        (n_mixtures, n_components, n_features), present = means.shape, _present(sizes, means)
        factor, means = data.factor_to_frame(mixtures.factor), data.to_frame(means.flatten(0, 1)).view_as(means)
        quadratic, linear = structure.coefficients(factor, means)
        constant = mixtures.log_weights + mixtures.log_determinants - 0.5 * n_features * math.log(2 * math.pi)
        theta = torch.cat(
            [
                quadratic.expand(n_mixtures, n_components, -1),
                linear,
                (constant - 0.5 * (linear * means).sum(-1))[..., None],
            ],
            -1,
        )
        distances = structure.squared_distances(factor, data.scatter).expand(n_mixtures, n_components)
        farthest = torch.where(present, distances, 0.0).amax(1)
        finite = torch.where(present[..., None], theta, 0.0).isfinite().flatten(1).all(1)
        lossy = torch.tensor([loses_digits(distance) for distance in farthest.tolist()], device=farthest.device)
        sound = finite & ~lossy
        sums, total = torch.zeros_like(theta), torch.full_like(farthest, math.nan)
        for size in np.unique(sizes).tolist():
            some = torch.from_numpy((sizes == size).nonzero()[0]).to(sound.device)
            some = some[sound[some]]
            for which in some.split(max(1, _LOG_JOINTS // (size * self._length))) if len(some) else ():
                own = theta[which, :size]
                highest = constant[which, :size].max()
                sums[which, :size], total[which] = expanded_sums(
                    structure, own, highest, data, torch.float64, self._expansion
                )
        quadratic, first, counts = sums.split([sums.shape[2] - n_features - 1, n_features, 1], 2)
        seen = torch.where(present, soft_counts(counts[..., 0]), 0.0)[..., None]
        # An empty component is put at the centre.
        moved = torch.where(counts < seen, 0.0, first / torch.where(present[..., None], seen, 1.0))
        scatter = structure.second_moments(quadratic, n_features) - structure.products(seen * moved, moved)
        value, error = total / data.total_weight, error_of_distance(farthest, torch.float64)
        for row in (finite & lossy).nonzero().ravel().tolist():
            self._put_about_means(row, mixtures, int(sizes[row]), seen, moved, scatter, value)
            error[row] = 0.0
        if data.scale is not None:
            scatter = data.scale @ scatter @ data.scale.mT
        if self.reg_covar:
            added = structure.regularise(torch.zeros_like(scatter), self.reg_covar)
            scatter = scatter + structure.totals(seen.expand_as(moved)) * added
        return _Statistics(seen[..., 0], data.from_frame(moved), scatter, value, error)

    def _put_about_means(
        self, row: int, mixtures: _Mixtures, size: int, seen: Tensor, moved: Tensor, scatter: Tensor, value: Tensor
    ) -> None:
        """Write the statistics of one mixture, from differences from its means: its expansion would lose digits."""
        factor = mixtures.factor[row].expand(len(mixtures.means[row]), *mixtures.factor.shape[2:])[:size]
        one = GaussianParameters(
            log_weights=mixtures.log_weights[row, :size],
            means=mixtures.means[row, :size],
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
            log_volumes=like.new_zeros(volumes),
            log_shapes=like.new_zeros(shapes, d),
            axes=torch.eye(d, dtype=like.dtype, device=like.device).expand(axes, d, d),
        )
        leaves = {
            "log_weights": like.new_zeros(k),
            "means": like.new_zeros(k, d),
            **self._template.unconstrained(),
        }
        self._shapes = {name: leaf.shape for name, leaf in leaves.items()}
        self._sizes = [leaf.numel() for leaf in leaves.values()]
        self.n_coordinates = sum(self._sizes)

    def pack(self, statistics: _Statistics, structure: ParsimoniousCovariances) -> Tensor:
        """Return the coordinates (R, P) of the mixtures after an M-step."""
        counts = statistics.counts
        absent = counts == 0
        log_weights = (torch.where(absent, 1.0, counts) / counts.sum(1, keepdim=True)).log().masked_fill(absent, 0.0)
        means = statistics.means.masked_fill(absent[..., None], 0.0)
        leaves = (log_weights, means, *structure.unconstrained().values())
        return torch.cat([leaf.flatten(1) for leaf in leaves], 1)

    def unpack(self, positions: Tensor, sizes: _Ints) -> tuple[Tensor, Tensor, ParsimoniousCovariances]:
        """Return log-weights, means and covariances (R, ...) of coordinates (R, at least P)."""
        parts = positions[:, : self.n_coordinates].split(self._sizes, 1)
        values = {
            name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)
        }
        one, n, means = self._template, len(positions), values["means"]
        structure = ParsimoniousCovariances(
            model=one.model,
            log_volumes=values["log_volumes"],
            log_shapes=one.log_shapes.expand(n, *one.log_shapes.shape),
            axes=one.axes.expand(n, *one.axes.shape),
        )
        log_weights = values["log_weights"].masked_fill(~_present(sizes, means), -math.inf).log_softmax(1)
        return log_weights, means, structure.with_unconstrained(values)

    def mixtures(self, positions: Tensor, sizes: _Ints) -> tuple[_Mixtures, ParsimoniousCovariances]:
        """Return the mixtures at these coordinates, for a pass, and their covariances."""
        log_weights, means, structure = self.unpack(positions, sizes)
        full = self.model.structure.is_matrix
        k, d = means.shape[1:]
        factor = structure.factors if full else (-0.5 * structure.log_variances).exp()
        factor = factor.expand(len(means), k, *factor.shape[2:])
        log_determinants = (-0.5 * d * structure.log_volumes).expand(len(means), k)
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
            leaves = (torch.stack(leaf) for leaf in zip(*mixtures, strict=True))
            statistics = run.statistics(_Mixtures(*leaves), self._size[list(once.values())])
            places = {key: place for place, key in enumerate(once)}
            for i in forms:
                mine = (self._model == i).nonzero()[0]
                chosen = torch.tensor([places[id(starts[row])] for row in mine.tolist()], device=self._like.device)
                found[mine] = self._maximised(mine, self._forms[i], statistics[chosen], None)
        return found

    def em(self, fits: _Ints, positions: _Floats) -> tuple[_Floats, _Floats, _Floats]:
        """Return the points after an EM step, the log-likelihoods before it, and bounds of their rounding errors."""
        images, values, errors = np.full(positions.shape, np.nan), np.full(len(fits), np.nan), np.zeros(len(fits))
        finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(positions).all(1))
        points = torch.from_numpy(np.where(finite[:, None], positions, 0.0)).to(self._like.device)
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
            statistics = run.statistics(_Mixtures(*(torch.cat(leaf) for leaf in leaves)), self._size[fits[every]])
            values[every], errors[every] = statistics.value.cpu().numpy(), statistics.error.cpu().numpy()
            first = 0
            for (form, places), (_, before) in zip(parts, found, strict=True):
                some = statistics[first : first + len(places)]
                images[places] = self._maximised(fits[places], form, some, before)
                first += len(places)
        values[~finite] = np.nan
        return images, values, errors

    def allows(self, fits: _Ints, positions: _Floats) -> npt.NDArray[np.bool_]:
        """Say which points (b, P) a jump may lead to (see `Structure.check_least`)."""
        allowed = np.ones(len(fits), bool)
        for place, model in enumerate(self._model[fits].tolist()):
            form = self._forms[model]
            if form.model.keeps_variances:
                point = torch.from_numpy(positions[place : place + 1]).to(self._like.device)
                mixtures, _ = form.mixtures(point, self._size[fits[place : place + 1]])
                factor = mixtures.factor[0, : self._size[fits[place]]]
                allowed[place] = form.model.structure.wide.has_least(factor, self.reg_covar)
        return allowed

    def _maximised(
        self, fits: _Ints, form: _Form, statistics: _Statistics, before: ParsimoniousCovariances | None
    ) -> _Floats:
        """Return the coordinates (b, P) after the M-step of fits of one model, NaN where it fails."""
        counts, scatter = statistics.counts, statistics.scatter
        finite = scatter.flatten(1).isfinite().all(1) & counts.isfinite().all(1) & statistics.value.isfinite()
        if not bool(finite.all()):
            usual = torch.ones_like(scatter) if scatter.ndim == 3 else identity_like(scatter).expand_as(scatter)
            present = counts != 0
            usual = usual * present.view(*present.shape, *[1] * (scatter.ndim - 2))
            keep = finite.view(-1, *[1] * (scatter.ndim - 1))
            statistics = dataclasses.replace(
                statistics,
                counts=torch.where(finite[:, None], counts, present.to(counts)),
                scatter=torch.where(keep, scatter, usual),
            )
        steps = (4 if before is None else 1) * INNER_STEPS_OF_EM
        structure, sound = form.model.m_step(statistics.counts, statistics.scatter, before, steps)
        packed = form.pack(statistics, structure)
        whole: npt.NDArray[np.bool_] = (finite & sound.all(1)).cpu().numpy()
        for place in np.flatnonzero(~whole).tolist():
            one = sound[place][: self._size[fits[place]]] if bool(finite[place]) else None
            self.problems[int(fits[place])] = problem_of(one)
        images = np.full((len(fits), self._n_coordinates), np.nan)
        images[:, : form.n_coordinates] = packed.cpu().numpy()
        images[:, form.n_coordinates :] = 0.0
        images[~whole] = np.nan
        return images

    def mixture(self, fit: int, position: _Floats) -> ParsimoniousParameters:
        """Return the mixture of one fit at these coordinates (P,)."""
        size = int(self._size[fit])
        log_weights, means, structure = self._forms[self._model[fit]].unpack(
            torch.from_numpy(position[None]).to(self._like.device), self._size[fit : fit + 1]
        )
        return ParsimoniousParameters(
            log_weights=log_weights[0, :size],
            means=means[0, :size],
            structure=dataclasses.replace(
                structure,
                log_volumes=structure.log_volumes[0, :size],
                log_shapes=structure.log_shapes[0, :size],
                axes=structure.axes[0, :size],
            ),
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
                mixtures, _ = form.mixtures(torch.from_numpy(positions[places]).to(self._like.device), sizes)
                least = form.model.structure.wide.narrowest(mixtures.log_weights.exp(), mixtures.factor)
                least = torch.where(_present(sizes, mixtures.means), least, math.inf)
                found[places] = least.amin(1).cpu().numpy()
        return found


def _present(sizes: _Ints, means: Tensor) -> Tensor:
    """Return the mask (R, K) of the components of mixtures of so many (R,)."""
    every = torch.arange(means.shape[1], device=means.device)
    return every < torch.from_numpy(sizes).to(means.device)[:, None]


def problem_of(sound: Tensor | None) -> str:
    """Return the error of a failed M-step, from the mask of sound covariances, or None after an overflow."""
    if sound is None:
        return "The covariances should be finite and positive. Found some that overflow."
    return singular(sound[0] if len(sound) == 1 else sound, "covariances", "model")
