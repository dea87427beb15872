"""Fits side by side: each beside its twin, a fit alone, and a mixture beside mixtures of more components."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from values import seeded

from toolkit.em.covariance.models import COVARIANCE_MODELS, ParsimoniousCovariances, model_of
from toolkit.em.engine import fused
from toolkit.em.engine.acceleration import MEMORY, ClimbOptions, climb
from toolkit.em.engine.starts import start
from toolkit.em.engine.together import climb_together
from toolkit.em.models import _fits
from toolkit.em.models import search as search_module
from toolkit.em.models._fits import Fits, Pass
from toolkit.em.models.parsimonious import Climber
from toolkit.em.models.search import Cell, search

F64 = torch.float64
every_model = pytest.mark.parametrize("model", COVARIANCE_MODELS)


def _samples(n: int = 90, d: int = 2, k: int = 3) -> Tensor:
    g = seeded()
    centres = 3 * torch.randn(k, d, generator=g, dtype=F64)
    widths = 0.5 + torch.rand(k, d, generator=g, dtype=F64)
    labels = torch.arange(n) % k
    return centres[labels] + widths[labels] * torch.randn(n, d, generator=g, dtype=F64)


def _statistics(k: int, d: int) -> tuple[Tensor, Tensor]:
    g = seeded(k)
    roots = torch.randn(k, d, d + 2, generator=g, dtype=F64)
    return 1 + 9 * torch.rand(k, generator=g, dtype=F64), roots @ roots.mT


def _options(accelerate: str = "anderson", tol: float = 1e-6, max_iter: int = 1000) -> ClimbOptions:
    return ClimbOptions(accelerate=accelerate, tol=tol, max_iter=max_iter)


# --- climbs ----------------------------------------------------------------------------------------------------------

# A smooth likelihood of two coordinates, of which the second is slow and curved; each fit has its own rate.
RATES = (0.5, 0.05, 0.005, 0.9)


def _one(rate: float):
    def em(point: Tensor) -> tuple[Tensor, float]:
        u, v = point.tolist()
        slopes = torch.tensor([-u, -rate * math.tanh(v - 1)], dtype=F64)
        return point + slopes, -0.5 * u * u - rate * float(np.logaddexp(v - 1, 1 - v))

    return em


@pytest.mark.parametrize("accelerate", ["none", "squarem", "anderson"])
@pytest.mark.parametrize(("tol", "limit"), [(1e-6, 1000), (1e-10, 300), (0.0, 12), (1e-6, 5), (1e-6, 1), (1e-6, 0)])
def test_a_climb_among_others_is_that_alone(accelerate, tol, limit):
    starts = torch.tensor([[3.0, 9.0], [-2.0, 4.0], [1.0, -8.0], [0.0, 1.0]], dtype=F64)
    maps = [_one(rate) for rate in RATES]

    def em(fits, points):
        images, values = zip(*(maps[i](torch.from_numpy(p)) for i, p in zip(fits, points, strict=True)), strict=True)
        return np.stack([image.numpy() for image in images]), np.array(values), np.zeros(len(fits))

    limits = np.array([limit, limit, limit, 3 * limit])
    found = climb_together(em, starts.numpy(), accelerate=accelerate, tol=tol, limits=limits)
    for i, one in enumerate(maps):
        alone = climb(
            one,
            starts[i],
            pack=lambda v: v,
            unpack=lambda v: v,
            accelerate=accelerate,
            tol=tol,
            max_iter=int(limits[i]),
        )
        # Only the algebra of Anderson's jumps differs, by rounding that its condition number magnifies.
        assert np.abs(found.positions[i] - alone.parameters.numpy()).max() < 1e-5
        assert found.log_likelihood(i) == pytest.approx(alone.log_likelihood, abs=1e-9)
        assert (bool(found.converged[i]), int(found.n_iter[i])) == (alone.converged, alone.n_iter)
        assert found.histories[i] == pytest.approx(alone.history, abs=1e-6)


@pytest.mark.parametrize("accelerate", ["none", "squarem", "anderson"])
@pytest.mark.parametrize(("tol", "limit"), [(1e-6, 900), (0.0, 40), (1e-6, 3)])
def test_a_fit_over_a_valley_is_that_alone(accelerate, tol, limit):
    """From below a valley, from inside it, from beyond it, and to a point that lies lower than others on the way."""

    def em(fits, points):
        u, end = points[:, 0], np.where(fits == 3, 4.6, 10.0)
        values = -((u - 10) ** 2) / 100 - 0.5 * np.exp(-2 * (u - 5) ** 2)
        return points + 0.02 * (end - u)[:, None], values, np.zeros(len(fits))

    starts, limits = np.array([[4.2], [4.9], [7.0], [3.5]]), np.full(4, limit)
    found = climb_together(em, starts, accelerate=accelerate, tol=tol, limits=limits)
    for i in range(4):

        def one(point, i=i):
            image, value, _ = em(np.array([i]), point.numpy()[None])
            return torch.from_numpy(image[0]), float(value[0])

        alone = climb(
            one,
            torch.from_numpy(starts[i]),
            pack=lambda v: v,
            unpack=lambda v: v,
            accelerate=accelerate,
            tol=tol,
            max_iter=limit,
        )
        assert (bool(found.converged[i]), int(found.n_iter[i])) == (alone.converged, alone.n_iter)
        assert found.histories[i] == pytest.approx(alone.history, abs=1e-6)
        assert found.positions[i, 0] == pytest.approx(float(alone.parameters), abs=1e-5)


def test_a_fit_whose_step_fails_leaves_alone():
    def em(fits, points):
        images = np.where((fits == 1)[:, None] & (points < 5), np.nan, points - 0.3 * points)
        return images, -0.5 * (points**2).sum(1), np.zeros(len(fits))

    found = climb_together(em, np.full((3, 1), 9.0), accelerate="none", tol=1e-9, limits=np.full(3, 100))
    assert found.failed.tolist() == [False, True, False]
    assert found.converged.tolist() == [True, False, True]
    assert abs(found.positions[0, 0]) < 1e-3


def test_a_referee_ends_fits_and_begins_others_that_climb_as_alone():
    starts = np.array([[3.0, 9.0], [-2.0, 4.0], [1.0, -8.0], [0.0, 1.0]])
    maps = [_one(rate) for rate in RATES]

    def em(fits, points):
        images, values = zip(*(maps[i](torch.from_numpy(p)) for i, p in zip(fits, points, strict=True)), strict=True)
        return np.stack([image.numpy() for image in images]), np.array(values), np.zeros(len(fits))

    class Referee:
        def __init__(self):
            self.ended = []

        def finish(self, fits, found):
            first = not self.ended
            self.ended += fits.tolist()
            return np.array([1] if first else [], np.int64)

        def drops(self, fits, positions):
            return fits == 2

    limits, referee = np.full(4, 300), Referee()
    found = climb_together(
        em, starts, accelerate="none", tol=1e-10, limits=limits, first=np.array([0, 2]), referee=referee
    )
    alone = climb_together(em, starts, accelerate="none", tol=1e-10, limits=limits)
    assert sorted(referee.ended) == [0, 1, 2]
    assert found.n_iter[2] == MEMORY
    assert not found.converged[2]
    for fit in (0, 1):
        assert found.histories[fit] == alone.histories[fit]
        assert found.n_iter[fit] == alone.n_iter[fit]
    assert math.isnan(found.log_likelihood(3))


def test_the_method_is_one_of_three():
    with pytest.raises(ValueError, match="`accelerate` should be one of 'none', 'squarem', 'anderson'"):
        climb_together(lambda *_: None, np.zeros((1, 1)), accelerate="newton", tol=0.0, limits=np.ones(1, int))


# --- M-steps ---------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize(("d", "unit"), [(1, 1.0), (3, 1.0), (3, 1e-10)])
def test_an_m_step_beside_others_is_that_alone(model, d, unit):
    """Two mixtures of three components and one of two, whose third is absent; an absent one has no scale."""
    chosen = model_of(model)
    sizes = (3, 2, 3)
    whole = [_statistics(3, d), _statistics(2, d), _statistics(3, d)]
    whole[2] = 2 * whole[2][0], whole[2][1].flip(0)
    counts, scatter = torch.zeros(3, 3, dtype=F64), torch.zeros(3, 3, d, d, dtype=F64)
    for i, (own, moments) in enumerate(whole):
        counts[i, : sizes[i]], scatter[i, : sizes[i]] = own, unit**2 * moments
    before = None
    for _ in range(2):  # from no start, and from the result
        together, sound = chosen.m_step(counts, scatter, before, 50)
        assert bool(sound.all())
        for i, (own, moments) in enumerate(whole):
            first = None if before is None else _slice(before, i, sizes[i])
            alone, _ = chosen.m_step(own, unit**2 * moments, first, 50)
            mine = _slice(together, i, sizes[i])
            torch.testing.assert_close(mine.covariances, alone.covariances, rtol=1e-9, atol=1e-11 * unit**2)
            for letter, value in zip(model, (together.log_volumes, together.log_shapes), strict=False):
                assert letter != "V" or bool((value[i, sizes[i] :] == 0).all())
        before = together


def _slice(covariances: ParsimoniousCovariances, row: int, size: int) -> ParsimoniousCovariances:
    return ParsimoniousCovariances(
        model=covariances.model,
        log_volumes=covariances.log_volumes[row, :size],
        log_shapes=covariances.log_shapes[row, :size],
        axes=covariances.axes[row, :size],
    )


@pytest.mark.parametrize("model", ["VII", "VEI", "VVI", "VEE", "VVE", "VEV", "EVV", "VVV", "EVI"])
def test_an_unsound_component_is_marked_in_its_mixture(model):
    counts, scatter = _statistics(3, 3)
    narrow = scatter.clone()
    narrow[1] *= 1e-30
    if model[:2] == "EV":
        narrow[1] = torch.diag(torch.tensor([1.0, 2.0, 1e-30], dtype=F64))
    _, sound = model_of(model).m_step(counts.repeat(2, 1), torch.stack([scatter, narrow]), None, 50)
    assert sound.tolist() == [[True, True, True], [True, False, True]]


# --- EM steps and searches -------------------------------------------------------------------------------------------


def _fits_of(x, models, numbers, reg_covar=0.0, sample_weight=None):
    starts = {
        (k, kind): [
            start(x, k, covariance_type=kind, init="k-means++", reg_covar=reg_covar, generator=seeded(seed))
            for seed in range(2)
        ]
        for k in numbers
        for kind in ("spherical", "diag", "tied")
    }
    cells = [Cell(model_of(model), k, starts[k, model_of(model).start.name]) for k in numbers for model in models]
    passes = {
        s: Pass(x, s, max(numbers), sample_weight, reg_covar)
        for s in dict.fromkeys(cell.model.structure.wide for cell in cells)
    }
    return Fits(cells, passes, x)


@pytest.mark.parametrize(
    "option",
    ["", "weighted", "ridge", "about means", "few at once", "by torch", "by torch about means", "by torch ridge"],
)
def test_a_step_among_others_is_that_alone(option, monkeypatch):
    x = _samples()
    weight = torch.rand(len(x), generator=seeded(5), dtype=F64) if option == "weighted" else None
    reg_covar = 0.1 if option.endswith("ridge") else 0.0
    if option.endswith("about means"):
        monkeypatch.setattr(fused, "_EXPANDED", {F64: 0.0})
    if option == "few at once":
        monkeypatch.setattr(_fits, "_LOG_JOINTS", 1)
        monkeypatch.setattr(_fits, "_PADDED", 0)
    if option.startswith("by torch"):  # as on a device
        monkeypatch.setattr(_fits, "_native", lambda values: values)
    fits = _fits_of(x, COVARIANCE_MODELS, (1, 2, 3), reg_covar, weight)
    every = np.arange(len(fits.start))
    images, values, _ = fits.em(every, fits.start)
    for cell, rows in zip(fits.cells, fits.rows, strict=True):
        climber = Climber(x, cell.n_components, cell.model.name, reg_covar, weight)
        for row, first in zip(rows.tolist(), cell.starts, strict=True):
            before, _ = climber.step(first)
            after, value = climber.step(before)
            here, there = fits.mixture(row, fits.start[row]), fits.mixture(row, images[row])
            for found, expected in ((here, before), (there, after)):
                torch.testing.assert_close(found.weights, expected.weights, rtol=1e-8, atol=1e-10)
                torch.testing.assert_close(found.means, expected.means, rtol=1e-8, atol=1e-8)
                torch.testing.assert_close(found.covariances, expected.covariances, rtol=1e-7, atol=1e-9)
            assert values[row] == pytest.approx(value, abs=1e-10)


def test_a_search_in_parts_is_that_at_once(monkeypatch):
    x = _samples()
    fits = _fits_of(x, ("EII", "VVE", "VVV"), (1, 2, 3))

    def run():
        found = search(x, fits.cells, _options(), reg_covar=0.0, sample_weight=None)
        return [one.best.log_likelihood for one in found]

    at_once = run()
    monkeypatch.setattr(search_module, "_SAMPLES", 1)
    # Both stop within `tol` of the same maxima.
    assert run() == pytest.approx(at_once, abs=1e-6)


@pytest.mark.slow
def test_a_search_ends_as_high_as_a_fit_from_its_best_start():
    x = _samples()
    fits = _fits_of(x, COVARIANCE_MODELS, (2, 3))
    for cell, found in zip(
        fits.cells, search(x, fits.cells, _options(), reg_covar=0.0, sample_weight=None), strict=True
    ):
        climber = Climber(x, cell.n_components, cell.model.name, 0.0)
        alone = max(climber.climb(first, _options()).log_likelihood for first in cell.starts)
        assert found.best.log_likelihood > alone - 1e-6, (cell.model.name, cell.n_components)
