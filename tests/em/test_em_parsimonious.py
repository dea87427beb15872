"""Parsimonious Gaussian mixtures: M-steps beside a numerical optimiser, Fisher's identity, scikit-learn's types."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from contract import BlockCase, relative_error
from scipy.optimize import minimize
from test_em import gradient_of, samples
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal
from torch.func import grad, jacrev, vmap
from values import seeded

from toolkit import datasets
from toolkit.em import RESPONSIBILITIES, GaussianParameters, e_step, em_step, log_likelihood, m_step, start, surrogate
from toolkit.em.covariance import models as steps
from toolkit.em.covariance import orientations
from toolkit.em.engine.acceleration import maximise_likelihood
from toolkit.em.models.parsimonious import (
    COVARIANCE_MODELS,
    Climber,
    ParsimoniousCovariances,
    ParsimoniousParameters,
    covariances_from_scatter,
    n_free_parameters,
)
from toolkit.em.models.search import fit_parsimonious

F64 = torch.float64
every_model = pytest.mark.parametrize("model", COVARIANCE_MODELS)
TRIANGULAR = ("EEE", "VEE", "EVV", "VVV")
ITERATIVE = ("VEI", "VEE", "EVE", "VVE", "VEV")
TWINS = {"VVV": "full", "EEE": "tied", "VVI": "diag", "VII": "spherical"}


def start_type(model):
    return steps.model_of(model).start.name


def statistics(k: int = 3, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return counts (K,) and scatter (K, D, D) that have nothing in common."""
    g = seeded(seed)
    counts = 5 + 40 * torch.rand(k, generator=g, dtype=F64)
    roots = torch.randn(k, d, d + 2, generator=g, dtype=F64) * (0.3 + torch.rand(k, d, 1, generator=g, dtype=F64))
    return counts, counts[:, None, None] * roots @ roots.mT


def responsibilities(n: int = 60, k: int = 3, seed: int = 5) -> Tensor:
    return (2 * torch.randn(n, k, generator=seeded(seed), dtype=F64)).softmax(-1)


def orthogonal(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=seeded(seed), dtype=F64)).Q


def sizes(model: str, k: int, d: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all coordinates of a model, from its letters alone."""
    volume, shape, orientation = ({"E": 1, "V": k}.get(letter, 0) for letter in model)
    shapes = {"log_weights": (k,), "means": (k, d), "log_volumes": (volume,)}
    if shape:
        shapes["log_shapes"] = (shape, d - 1)
    if orientation:
        shapes["axes"] = (orientation, d * (d - 1) // 2)
    return shapes


def template(model: str, k: int = 3, d: int = 3) -> ParsimoniousParameters:
    counts, scatter = statistics(k, d)
    return ParsimoniousParameters(
        log_weights=(counts / counts.sum()).log(),
        means=torch.zeros(k, d, dtype=F64),
        structure=covariances_from_scatter(model, counts, scatter),
    )


def coordinates(model: str, k: int = 3, d: int = 3, seed: int = 1) -> dict[str, Tensor]:
    """Draw coordinates that are symmetric in nothing."""
    g = seeded(seed)
    scales = {"log_weights": 1.0, "means": 1.5, "log_volumes": 0.5, "log_shapes": 0.4, "axes": 0.7}
    return {
        name: scales[name] * torch.randn(shape, generator=g, dtype=F64) for name, shape in sizes(model, k, d).items()
    }


def mixture(model: str, k: int = 3, d: int = 3, seed: int = 1) -> ParsimoniousParameters:
    return template(model, k, d).with_unconstrained(coordinates(model, k, d, seed))


def leaves_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in values.items()}


# --- witnesses: the decomposition as it is on paper, in torch.distributions ------------------------------------------


def square(entries: Tensor, d: int) -> Tensor:
    """Return matrices with these entries above the diagonal, row by row."""
    rows, columns = torch.triu_indices(d, d, 1)
    upper = torch.zeros(len(entries), d, d, dtype=entries.dtype)
    return upper.index_put((torch.arange(len(entries))[:, None], rows[None], columns[None]), entries)


def covariances_on_paper(model: str, values: Mapping[str, Tensor], k: int, d: int) -> Tensor:
    identity = torch.eye(d, dtype=F64)
    shapes = torch.zeros(1, d, dtype=F64)
    if "log_shapes" in values:
        shapes = torch.cat([values["log_shapes"], -values["log_shapes"].sum(1, keepdim=True)], 1)
    variances = (values["log_volumes"][:, None] + shapes).exp()
    if "axes" not in values:
        covariances = torch.diag_embed(variances)
    elif model in TRIANGULAR:
        axes = identity + square(values["axes"], d)
        covariances = torch.linalg.inv(axes @ torch.diag_embed(1 / variances) @ axes.mT)
    else:
        skew = square(values["axes"], d) - square(values["axes"], d).mT
        axes = (identity - skew) @ torch.linalg.inv(identity + skew)
        covariances = axes @ torch.diag_embed(variances) @ axes.mT
    return covariances.expand(k, d, d)


def distribution(model: str, values: Mapping[str, Tensor]) -> MixtureSameFamily:
    k, d = values["means"].shape
    components = MultivariateNormal(values["means"], covariances_on_paper(model, values, k, d))
    return MixtureSameFamily(Categorical(logits=values["log_weights"]), components)


def log_joint_on_paper(model: str, x: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    mixed = distribution(model, values)
    return mixed.mixture_distribution.logits + mixed.component_distribution.log_prob(x[:, None])


def likelihood_gradient(model: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    return lambda leaves: gradient_of(lambda values: distribution(model, values).log_prob(samples()).mean(), leaves)


def leaky_gradient(model: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return the gradient of likelihood minus entropy, which the surrogate has without the block."""

    def objective(values: Mapping[str, Tensor]) -> Tensor:
        a = log_joint_on_paper(model, samples(), values)
        return a.logsumexp(-1).mean() - torch.special.entr(a.softmax(-1)).sum(-1).mean()

    return lambda leaves: gradient_of(objective, leaves)


BLOCK_CASES: list[BlockCase] = [
    BlockCase(
        id=f"em.surrogate-{model}",
        block=RESPONSIBILITIES,
        parameters=lambda model=model: leaves_of(coordinates(model)),
        loss=lambda leaves, model=model: surrogate(template(model).with_unconstrained(leaves), samples()),
        blocked=likelihood_gradient(model),
        opened=leaky_gradient(model),
        tolerance=1e-12,
    )
    for model in COVARIANCE_MODELS
]


@every_model
@pytest.mark.parametrize("stage", [0, 3, 60])
def test_fishers_identity_on_iris(stage, model):
    x = datasets.iris().inputs.double()
    climber = Climber(x, 3, model, 0.0)
    parameters, _ = climber.step(start(x, 3, covariance_type=start_type(model), generator=seeded()))
    for _ in range(stage):
        parameters, _ = climber.step(parameters)
    leaves = parameters.unconstrained()
    blocked = gradient_of(lambda values: surrogate(parameters.with_unconstrained(values), x), leaves)
    expected = gradient_of(lambda values: log_likelihood(parameters.with_unconstrained(values), x), leaves)
    # At the maximum both are rounding: the scale is that of one sample's gradient.
    scale = max(1.0, *(float(value.norm()) for value in expected.values()))
    assert all(torch.allclose(blocked[name], expected[name], rtol=1e-12, atol=1e-12 * scale) for name in expected)
    if stage == 60 and model in ("VVI", "VEV", "VVV"):
        assert max(float(value.norm()) for value in expected.values()) < 1e-3


# --- parameters ------------------------------------------------------------------------------------------------------


@every_model
def test_log_joint_is_that_of_the_decomposition_on_paper(model):
    values = coordinates(model)
    found = template(model).with_unconstrained(values)
    assert torch.allclose(found.log_joint(samples()), log_joint_on_paper(model, samples(), values), rtol=1e-12)
    assert torch.allclose(found.covariances, covariances_on_paper(model, values, 3, 3), rtol=1e-12, atol=1e-14)


@every_model
@pytest.mark.parametrize("d", [1, 2, 5])
def test_coordinates_round_trip_and_are_as_many_as_free_parameters(d, model):
    parameters = mixture(model, 4, d)
    leaves = parameters.unconstrained()
    assert {name: tuple(leaf.shape) for name, leaf in leaves.items()} == sizes(model, 4, d)
    # The log-weights are free up to a constant.
    assert sum(leaf.numel() for leaf in leaves.values()) == parameters.n_parameters + 1
    again = parameters.with_unconstrained(leaves)
    assert torch.allclose(again.covariances, parameters.covariances, rtol=1e-12, atol=1e-13)
    assert torch.allclose(again.log_joint(samples(d=d)), parameters.log_joint(samples(d=d)), rtol=1e-12)


def test_free_parameters_are_those_of_the_literature():
    """Celeux & Govaert 1995, table 1, for K = 3 and D = 4: 14 for weights and means, and these."""
    counts = (1, 3, 4, 6, 10, 12, 10, 12, 16, 18, 22, 24, 28, 30)
    expected = dict(zip(COVARIANCE_MODELS, counts, strict=True))
    assert {model: n_free_parameters(model, 3, 4) - 14 for model in COVARIANCE_MODELS} == expected


@every_model
def test_what_is_shared_is_shared(model):
    parameters = template(model, 4, 3)
    covariances = parameters.covariances
    values, _vectors = torch.linalg.eigh(covariances)
    volumes = values.prod(-1) ** (1 / 3)
    shapes = values / volumes[:, None]

    def equal(items: Tensor) -> bool:
        return bool(torch.allclose(items, items[:1].expand_as(items), rtol=1e-10, atol=1e-12))

    commute = covariances[0] @ covariances[1:] - covariances[1:] @ covariances[0]
    assert equal(volumes) == (model[0] == "E")
    assert equal(shapes) == (model[1] != "V")
    assert torch.allclose(shapes, torch.ones(()).double()) == (model[1] == "I")
    assert bool(commute.abs().max() < 1e-10 * covariances.abs().max() ** 2) == (model[2] != "V")
    diagonal = torch.diag_embed(covariances.diagonal(dim1=-2, dim2=-1))
    assert torch.equal(covariances, diagonal) == (model[2] == "I")


@every_model
def test_decomposition_multiplies_to_the_covariance(model):
    parameters = mixture(model)
    volumes, shapes, orientations = parameters.structure.decomposed()
    assert torch.allclose(shapes.prod(-1), torch.ones((), dtype=F64), rtol=1e-12)
    assert torch.allclose(orientations @ orientations.mT, torch.eye(3, dtype=F64), atol=1e-13)
    assert [len(part) for part in (volumes, shapes, orientations)] == [3 if letter == "V" else 1 for letter in model]
    whole = volumes[:, None, None] * orientations @ torch.diag_embed(shapes) @ orientations.mT
    assert torch.allclose(whole.expand(3, 3, 3), parameters.covariances, rtol=1e-12, atol=1e-14)


@every_model
def test_gaussian_parameters_are_the_same_mixture(model):
    parameters = mixture(model)
    gaussian = parameters.to_gaussian()
    expected = {"EEE": "tied", "EII": "spherical", "VII": "spherical"}.get(model, "diag" if model[2] == "I" else "full")
    assert gaussian.covariance_type == expected
    assert torch.allclose(gaussian.log_joint(samples()), parameters.log_joint(samples()), rtol=1e-12)
    if expected in ("full", "tied"):
        factor = gaussian.precisions_cholesky
        assert not factor.tril(-1).any()
        assert (factor.diagonal(dim1=-2, dim2=-1) > 0).all()


@pytest.mark.parametrize("d", [1, 2, 3, 6])
def test_every_orthogonal_matrix_has_coordinates(d):
    """Also those with eigenvalue -1, reflections, and permutations; columns may change their sign."""
    identity = torch.eye(d, dtype=F64)
    matrices = [orthogonal(d, seed) for seed in range(20)]
    matrices += [
        identity,
        -identity,
        identity.flip(0),
        identity.roll(1, 0),
        torch.diag((-1.0) ** torch.arange(d)).double(),
    ]
    for axes in matrices:
        skew = orientations.to_skew(axes[None])[0]
        back = orientations.cayley(skew)
        assert torch.equal(skew, -skew.mT)
        assert torch.allclose((back.mT @ axes).abs(), identity, atol=1e-12)
        signed = axes * orientations._signs(axes)
        # Sylvester: the product of pivots that are each at least 1.
        assert torch.linalg.det(identity + signed) >= 1 - 1e-12


@pytest.mark.parametrize("model", ["EVE", "VVE"])
def test_a_rotation_of_common_axes_never_raises_the_misfit(model):
    """Of forty orientations at once, of which some turn in full and others only in part."""
    generator = torch.Generator().manual_seed(0)
    units = 10.0 ** torch.arange(4, dtype=F64)
    factors = torch.randn(40, 3, 4, 4, generator=generator, dtype=F64)
    scatter = factors @ factors.mT * units * units[:, None]
    counts = torch.rand(40, 3, generator=generator, dtype=F64) + 0.1
    axes = torch.linalg.qr(torch.randn(40, 1, 4, 4, generator=generator, dtype=F64)).Q

    def misfit(axes):
        return orientations._misfit(model, counts, orientations._spread_along(scatter, axes))[0]

    for _ in range(12):
        moved, _ = orientations._rotate(model, counts, scatter, axes)
        # A fall is at least one of 0, up to the slack of the line search and the errors of the sums.
        assert (misfit(moved) <= misfit(axes) + 1e-11).all()
        one = [orientations._rotate(model, *(leaf[i] for leaf in (counts, scatter, axes)))[0] for i in range(40)]
        torch.testing.assert_close(moved, torch.stack(one), rtol=0, atol=1e-12)
        axes = moved


# --- M-steps ---------------------------------------------------------------------------------------------------------


def misfit(covariances: Tensor, counts: Tensor, scatter: Tensor) -> Tensor:
    """Return what the M-step minimises, by its definition."""
    covariances = covariances.expand(len(counts), *covariances.shape[1:])
    traces = torch.linalg.solve(covariances, scatter).diagonal(dim1=-2, dim2=-1).sum(-1)
    return (counts * torch.logdet(covariances) + traces).sum()


def best_by_optimiser(first: ParsimoniousCovariances, counts: Tensor, scatter: Tensor) -> float:
    """Return the least misfit that scipy's BFGS finds from these covariances within their model.

    Orientations turn by exponentials of skew-symmetric matrices. In coordinates of Cayley half a turn is at infinity,
    and a line search goes there or not by the last bit.
    """
    leaves = first.unconstrained()
    cayley = leaves.get("axes")
    turns = cayley is not None and first.model not in TRIANGULAR
    if turns:
        leaves["axes"] = torch.zeros_like(cayley)
    lengths = [leaf.numel() for leaf in leaves.values()]

    def covariances(flat: Tensor) -> Tensor:
        parts = zip(leaves.items(), flat.split(lengths), strict=True)
        values = {name: part.view(leaf.shape) for (name, leaf), part in parts}
        if not turns:
            return first.with_unconstrained(values).covariances
        upper = square(values["axes"], first.n_features)
        found = first.with_unconstrained({**values, "axes": cayley})
        return dataclasses.replace(found, axes=first.axes @ torch.matrix_exp(upper - upper.mT)).covariances

    def evaluate(flat: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(flat.copy()).requires_grad_()
        value = misfit(covariances(leaf), counts, scatter)
        (slope,) = torch.autograd.grad(value, leaf)
        return value.item(), slope.numpy()

    flat = torch.cat([leaf.reshape(-1) for leaf in leaves.values()]).numpy()
    return float(minimize(evaluate, flat, jac=True, method="BFGS", options={"gtol": 1e-7, "maxiter": 500}).fun)


@every_model
@pytest.mark.parametrize("seed", [0, 1])
def test_m_step_is_what_a_numerical_optimiser_finds(seed, model):
    counts, scatter = statistics(3, 3, seed)
    structure = covariances_from_scatter(model, counts, scatter)
    reached = float(misfit(structure.covariances, counts, scatter))
    assert best_by_optimiser(structure, counts, scatter) > reached - 1e-9 * abs(reached)
    starts = [structure.with_unconstrained(coordinates(model, seed=draw)) for draw in range(4)]
    others = [best_by_optimiser(first, counts, scatter) for first in starts]
    assert min(others) == pytest.approx(reached, rel=1e-8)


@every_model
def test_m_step_is_stationary(model):
    counts, scatter = statistics(4, 4, 7)
    structure = covariances_from_scatter(model, counts, scatter)
    slopes = gradient_of(
        lambda values: misfit(structure.with_unconstrained(values).covariances, counts, scatter),
        structure.unconstrained(),
    )
    assert max(float(slope.abs().max()) for slope in slopes.values()) < 1e-9 * float(counts.sum())


@every_model
def test_m_step_of_samples_maximises_the_surrogate(model):
    x, r = samples(), responsibilities()
    found = mixture(model).m_step(x, r)
    slopes = gradient_of(
        lambda values: (r * found.with_unconstrained(values).log_joint(x)).sum() / len(x), found.unconstrained()
    )
    assert max(float(slope.abs().max()) for slope in slopes.values()) < 1e-9
    assert torch.allclose(found.means, r.mT @ x / r.sum(0)[:, None], rtol=1e-13)
    assert torch.allclose(found.weights, r.mean(0), rtol=1e-13)


NESTED = [
    *("EII<VII", "EII<EEI", "VII<VEI", "EEI<VEI", "EEI<EVI", "VEI<VVI", "EVI<VVI", "EEI<EEE", "VEI<VEE", "EVI<EVE"),
    *("VVI<VVE", "EEE<VEE", "EEE<EVE", "EEE<EEV", "VEE<VVE", "VEE<VEV", "EVE<VVE", "EVE<EVV", "EEV<VEV", "EEV<EVV"),
    *("VEV<VVV", "EVV<VVV", "VVE<VVV"),
]


@pytest.mark.parametrize("pair", NESTED)
def test_larger_model_fits_better(pair):
    small, large = pair.split("<")
    for seed in range(5):
        counts, scatter = statistics(3, 4, seed)
        one, other = (
            float(misfit(covariances_from_scatter(model, counts, scatter).covariances, counts, scatter))
            for model in (small, large)
        )
        assert other < one - 1e-3


@pytest.mark.parametrize("model", TWINS)
def test_four_models_are_scikit_learns_types(model):
    x, r, kind = samples(), responsibilities(), TWINS[model]
    found, expected = mixture(model).m_step(x, r).to_gaussian(), m_step(x, r, covariance_type=kind)
    assert found.covariance_type == kind
    assert torch.allclose(found.precisions_cholesky, expected.precisions_cholesky, rtol=1e-10, atol=1e-12)
    assert torch.allclose(found.log_joint(x), expected.log_joint(x), rtol=1e-12)


@pytest.mark.parametrize("reg_covar", [0.0, 0.03])
@pytest.mark.parametrize("model", TWINS)
def test_four_models_climb_as_scikit_learns_types_do(model, reg_covar):
    x, kind = datasets.iris().inputs.double(), TWINS[model]
    gaussian = parameters = start(x, 3, covariance_type=kind, generator=seeded())
    if kind == "full":
        parameters = start(x, 3, covariance_type="tied", generator=seeded())  # the same covariance, once
    climber = Climber(x, 3, model, reg_covar)
    for _ in range(20):
        gaussian, expected = em_step(gaussian, x, reg_covar=reg_covar)
        parameters, value = climber.step(parameters)
        assert abs(value - float(expected)) < 1e-11
    assert torch.allclose(parameters.to_gaussian().covariances, gaussian.covariances, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("model", ["EVE", "VVE"])
def test_common_orientation_of_scatters_that_have_one(model):
    counts, _ = statistics(3, 5)
    axes = orthogonal(5, 3)
    variances = torch.tensor([[1.0, 2, 3, 4, 5], [9.0, 1, 4, 2, 8], [2.0, 7, 1, 5, 3]], dtype=F64)
    scatter = counts[:, None, None] * axes @ torch.diag_embed(variances) @ axes.mT
    found = covariances_from_scatter(model, counts, scatter).axes[0]
    assert torch.allclose((axes.mT @ found).abs().amax(0), torch.ones(5, dtype=F64), atol=1e-10)
    # From a start far from it as well.
    elsewhere = dataclasses.replace(covariances_from_scatter(model, counts, scatter), axes=orthogonal(5, 8)[None])
    again = covariances_from_scatter(model, counts, scatter, start=elsewhere).axes[0]
    assert torch.allclose((axes.mT @ again).abs().amax(0), torch.ones(5, dtype=F64), atol=1e-10)


@pytest.mark.parametrize("model", ["VEI", "VEE", "VEV", "VVE", "VVV"])
def test_multiples_of_one_matrix_are_found_exactly(model):
    """Where the data obey a model, its M-step is each component's own covariance."""
    counts, scatter = statistics(4, 3)
    factors = torch.tensor([0.3, 1.0, 7.0, 40.0], dtype=F64)
    own = factors[:, None, None] * scatter[0] / counts[0]
    if model == "VEI":
        own = torch.diag_embed(own.diagonal(dim1=-2, dim2=-1))
    found = covariances_from_scatter(model, counts, counts[:, None, None] * own).covariances
    assert torch.allclose(found, own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("model", [model for model in COVARIANCE_MODELS if model[1:] == "II" or model[2] != "I"])
def test_rotated_data_have_rotated_covariances(model):
    counts, scatter = statistics(3, 4, 2)
    turn = orthogonal(4, 9)
    found = covariances_from_scatter(model, counts, turn @ scatter @ turn.mT).covariances
    expected = turn @ covariances_from_scatter(model, counts, scatter).covariances @ turn.mT
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("model", [model for model in COVARIANCE_MODELS if model[1] == model[2] or model[2] == "I"])
def test_features_may_have_any_unit(model):
    counts, scatter = statistics(3, 4, 2)
    units = torch.tensor([1e-3, 1.0, 50.0, 2e4], dtype=F64)
    if model[1:] == "II":
        units = torch.full_like(units, 1e-3)  # they know one unit only
    found = covariances_from_scatter(model, counts, units[:, None] * scatter * units).covariances
    expected = units[:, None] * covariances_from_scatter(model, counts, scatter).covariances * units
    scale = expected.diagonal(dim1=-2, dim2=-1).sqrt()
    assert torch.allclose(
        found / scale[..., None, :] / scale[..., None], expected / scale[..., None, :] / scale[..., None]
    )


@pytest.mark.parametrize("model", TRIANGULAR)
def test_any_linear_map_of_the_data_maps_the_covariances(model):
    counts, scatter = statistics(3, 4, 2)
    linear = torch.randn(4, 4, generator=seeded(4), dtype=F64)
    found = covariances_from_scatter(model, counts, linear @ scatter @ linear.mT).covariances
    expected = linear @ covariances_from_scatter(model, counts, scatter).covariances @ linear.mT
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("inner_steps", [1, 2, 5])
@pytest.mark.parametrize("model", ITERATIVE)
def test_few_inner_steps_never_end_below_their_start(model, inner_steps):
    for seed in range(20):
        before = mixture(model, seed=seed).structure
        counts, scatter = statistics(3, 3, seed)
        after = covariances_from_scatter(model, counts, scatter, start=before, inner_steps=inner_steps)
        reached, first = misfit(after.covariances, counts, scatter), misfit(before.covariances, counts, scatter)
        assert reached <= first + 1e-10 * abs(first)


@pytest.mark.parametrize("model", ["EVE", "VVE"])
def test_rotations_that_overshoot_are_shortened(model):
    """Ellipsoids that are long in unlike directions: a few of the full quasi-Newton steps here raise the misfit."""
    lengths = torch.linspace(0, 6, 6, dtype=F64).exp()
    for seed in range(60):
        counts, _ = statistics(2, 6, seed)
        turns = torch.stack([orthogonal(6, 100 + 7 * seed + k) for k in range(2)])
        scatter = counts[:, None, None] * turns @ torch.diag_embed(torch.stack([lengths, lengths.roll(1)])) @ turns.mT
        first = covariances_from_scatter(model, counts, scatter, inner_steps=1)
        first = dataclasses.replace(first, axes=orthogonal(6, seed)[None])
        now = covariances_from_scatter(model, counts, scatter, start=first, inner_steps=0)
        before = misfit(now.covariances, counts, scatter)
        for _ in range(5):
            now = covariances_from_scatter(model, counts, scatter, start=now, inner_steps=1)
            value = misfit(now.covariances, counts, scatter)
            assert value <= before + 1e-10 * abs(before)
            before = value


@pytest.mark.parametrize("model", [model for model in COVARIANCE_MODELS if model[2] == "I"])
def test_diagonals_are_enough_for_axis_aligned_models(model):
    counts, scatter = statistics()
    found = covariances_from_scatter(model, counts, scatter.diagonal(dim1=-2, dim2=-1))
    assert torch.allclose(found.covariances, covariances_from_scatter(model, counts, scatter).covariances, rtol=1e-13)


def test_the_sum_is_enough_for_one_covariance():
    counts, scatter = statistics()
    found = covariances_from_scatter("EEE", counts, scatter.sum(0, keepdim=True))
    assert torch.allclose(found.covariances[0], scatter.sum(0) / counts.sum(), rtol=1e-13)


# --- derivatives -----------------------------------------------------------------------------------------------------


@every_model
def test_under_torch_func(model):
    x, leaves = samples(12), coordinates(model)
    found = grad(lambda values: surrogate(template(model).with_unconstrained(values), x))(leaves)
    expected = gradient_of(lambda values: distribution(model, values).log_prob(x).mean(), leaves)
    assert relative_error(found, expected) < 1e-12
    base = template(model)
    per_sample = vmap(
        grad(lambda values, row: surrogate(base.with_unconstrained(values), row[None])), in_dims=(None, 0)
    )(leaves, x)
    assert relative_error({name: value.mean(0) for name, value in per_sample.items()}, found) < 1e-12


@every_model
def test_m_step_is_differentiable_and_batched(model):
    """The derivative of the EM map, also through iterations, against central differences; and vmap against a loop."""
    x, r = samples(30, 2, 2), responsibilities(30, 2)
    base = mixture(model, 2, 2)
    direction = torch.randn(30, 2, generator=seeded(3), dtype=F64)

    def covariances(t: Tensor) -> Tensor:
        return base.m_step(x, (r.log() + t * direction).softmax(-1)).covariances

    zero, h = torch.zeros((), dtype=F64), 1e-5
    numerical = (covariances(zero + h) - covariances(zero - h)) / (2 * h)
    leaf = zero.clone().requires_grad_()
    rows = covariances(leaf).reshape(-1)
    found = torch.stack([torch.autograd.grad(row, leaf, retain_graph=True)[0] for row in rows]).view(2, 2, 2)
    assert torch.allclose(found, numerical, rtol=1e-6, atol=1e-7)
    assert torch.allclose(jacrev(covariances)(zero), numerical, rtol=1e-6, atol=1e-7)
    times = torch.tensor([-0.3, 0.0, 0.4], dtype=F64)
    looped = torch.stack([covariances(t) for t in times])
    assert torch.allclose(vmap(covariances)(times), looped, rtol=1e-8, atol=1e-10)


# --- EM --------------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("shape", [(80, 3, 3), (60, 1, 2), (150, 9, 2), (200, 2, 7)], ids=str)
def test_fast_step_is_its_plain_twin(shape, model):
    n, d, k = shape
    x = samples(n, d, k)
    before, _ = Climber(x, k, model, 0.0).step(start(x, k, covariance_type=start_type(model), generator=seeded()))
    found, value = Climber(x, k, model, 0.0).step(before)
    r, expected_value = e_step(before, x)
    counts, means = r.sum(0), r.mT @ x / r.sum(0)[:, None]
    differences = x - means[:, None]
    scatter = torch.einsum("nk,kni,knj->kij", r, differences, differences)
    expected = covariances_from_scatter(model, counts, scatter, start=before.structure, inner_steps=3)
    assert abs(value - float(expected_value)) < 1e-12 * max(1.0, abs(value))
    assert torch.allclose(found.means, means, rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.weights, r.mean(0), rtol=1e-11)
    assert torch.allclose(found.structure.covariances, expected.covariances, rtol=1e-7, atol=1e-9)


@every_model
def test_likelihood_never_falls(model):
    """Fifteen random problems for each of fourteen models."""
    for seed in range(15):
        k, d = 1 + seed % 4, 1 + (seed * 7) % 5
        x = samples(25 * k + 20 * d, d, k, seed)
        climber = Climber(x, k, model, 0.0)
        parameters, _ = climber.step(start(x, k, covariance_type=start_type(model), generator=seeded(seed)))
        before = -math.inf
        for _ in range(12):
            try:
                parameters, value = climber.step(parameters)
            except ValueError:  # a spike: singular in the end, and named
                break
            assert value >= before - 1e-12 * abs(value)
            before = value


@every_model
@pytest.mark.parametrize("accelerate", ["anderson", "squarem"])
def test_acceleration_ends_where_em_does(accelerate, model):
    x = samples(150, 3, 2, seed=4)
    first, _ = Climber(x, 2, model, 0.0).step(start(x, 2, covariance_type=start_type(model), generator=seeded()))
    plain = fit_parsimonious(x, 2, model, init=first, accelerate="none", tol=1e-13, max_iter=3000)
    fast = fit_parsimonious(x, 2, model, init=first, accelerate=accelerate, tol=1e-13)
    assert plain.converged
    assert fast.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-8)
    assert fast.log_likelihood == pytest.approx(float(log_likelihood(fast.parameters, x)), abs=1e-12)
    assert fast.n_iter <= plain.n_iter + 5
    assert all(b >= a for a, b in itertools.pairwise(fast.history))


@pytest.mark.parametrize("model", ["VEI", "EVE", "VEV", "EVV"])
def test_generic_driver_finds_the_same(model):
    x = samples(150, 3, 2, seed=4)
    first, _ = Climber(x, 2, model, 0.0).step(start(x, 2, covariance_type=start_type(model), generator=seeded()))
    generic = maximise_likelihood(first, x, tol=1e-12)
    assert generic.log_likelihood == pytest.approx(
        fit_parsimonious(x, 2, model, init=first, tol=1e-12).log_likelihood, abs=1e-9
    )


@every_model
def test_gradient_vanishes_at_the_maximum(model):
    x = samples(120, 2, 2, seed=1)
    found = fit_parsimonious(x, 2, model, tol=1e-14, generator=seeded()).parameters
    leaves = found.unconstrained()
    slopes = gradient_of(lambda values: log_likelihood(found.with_unconstrained(values), x), leaves)
    assert max(float(slope.abs().max()) for slope in slopes.values()) < 1e-5


@every_model
@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_offset_of_the_data_costs_nothing(offset, model):
    x = samples(100, 2, 2)
    near = fit_parsimonious(x, 2, model, tol=1e-9, generator=seeded())
    moved = (x + offset) - offset
    near = fit_parsimonious(moved, 2, model, tol=1e-9, generator=seeded())
    far = fit_parsimonious(moved + offset, 2, model, tol=1e-9, generator=seeded())
    assert far.log_likelihood == pytest.approx(near.log_likelihood, abs=1e-8)


@every_model
def test_float32_keeps_its_type_and_the_likelihood(model):
    x = samples(200, 3, 2)
    first, _ = Climber(x, 2, model, 0.0).step(start(x, 2, covariance_type=start_type(model), generator=seeded()))
    found = fit_parsimonious(x.float(), 2, model, init=first, tol=1e-10)
    exact = fit_parsimonious(x, 2, model, init=first, tol=1e-10)
    assert found.parameters.means.dtype == found.parameters.structure.axes.dtype == torch.float32
    assert found.log_likelihood == pytest.approx(exact.log_likelihood, abs=1e-5)


@pytest.mark.parametrize("model", ["VII", "EVI", "EEE", "VVE", "VEV"])
def test_weights_are_repetitions(model):
    x = samples(50, 2, 2)
    counts = torch.randint(0, 4, (50,), generator=seeded(1))
    first, _ = Climber(x, 2, model, 0.0).step(start(x, 2, covariance_type=start_type(model), generator=seeded()))
    weighted = fit_parsimonious(x, 2, model, init=first, sample_weight=counts.double(), tol=1e-12)
    repeated = fit_parsimonious(x.repeat_interleave(counts, 0), 2, model, init=first, tol=1e-12)
    assert weighted.log_likelihood == pytest.approx(repeated.log_likelihood, abs=1e-10)
    unweighted = fit_parsimonious(x, 2, model, init=first, tol=1e-12)
    assert abs(unweighted.log_likelihood - weighted.log_likelihood) > 1e-3


@every_model
def test_one_component_is_the_covariance_of_the_data(model):
    x = samples(80, 3)
    found = fit_parsimonious(x, 1, model)
    covariance = torch.cov(x.mT, correction=0)
    expected = covariance
    if model[1] == "I":
        expected = covariance.trace() / 3 * torch.eye(3, dtype=F64)
    elif model[2] == "I":
        expected = torch.diag(covariance.diagonal())
    assert torch.allclose(found.parameters.covariances[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("model", ["EII", "VII", "EEI", "VVI", "EEE", "VVE", "EEV", "VVV"])
def test_no_jump_leads_below_the_regularisation(model):
    for seed in range(6):  # components collapse onto repeated rows, where the likelihood rises without a bound
        random = np.random.default_rng(seed)
        for x in (random.integers(0, 2, (60, 3)), random.normal(size=(8, 3)).repeat(10, 0)):
            found = fit_parsimonious(
                torch.from_numpy(x.astype(float)), 3, model=model, reg_covar=1e-6, generator=seeded(seed)
            )
            assert float(torch.linalg.eigvalsh(found.parameters.covariances).min()) > 1e-6 * (1 - 2e-6)


@every_model
def test_regularisation_keeps_what_is_shared(model):
    """With a constant feature and duplicates there is no maximum of the likelihood; the prior gives one."""
    x = torch.cat([samples(40, 2), torch.full((40, 1), 3.0, dtype=F64)], 1)
    found = fit_parsimonious(x, 3, model, reg_covar=1e-2, generator=seeded()).parameters
    assert found.covariances.isfinite().all()
    volumes, shapes, _ = found.structure.decomposed()
    assert (len(volumes), len(shapes)) == (3 if model[0] == "V" else 1, 3 if model[1] == "V" else 1)
    assert torch.linalg.eigvalsh(found.covariances).min() >= (0.999e-2 if model[:2] == "VV" else 1e-3)


@pytest.mark.slow
def test_restarts_keep_the_best():
    x = samples(100, 2, 5, seed=3)
    single = [
        fit_parsimonious(x, 5, "EEI", init="random_from_data", generator=seeded(seed)).log_likelihood
        for seed in range(6)
    ]
    many = fit_parsimonious(x, 5, "EEI", init="random_from_data", n_init=12, generator=seeded(0)).log_likelihood
    assert max(single) > min(single) + 1e-3
    assert many >= np.median(single)


def test_randomness_is_the_generators_alone():
    x = samples()
    one, other = (fit_parsimonious(x, 3, "VEI", generator=seeded(4), n_init=3) for _ in range(2))
    assert one.history == other.history
    assert torch.equal(one.parameters.means, other.parameters.means)


def test_inputs_are_not_changed():
    x = samples()
    copy, counts = x.clone(), torch.ones(len(x), dtype=F64)
    fit_parsimonious(x, 2, "VVE", sample_weight=counts, generator=seeded())
    assert torch.equal(x, copy)
    assert bool((counts == 1).all())


# --- what cannot be ---------------------------------------------------------------------------------------------------


@every_model
def test_constant_feature_is_named(model):
    x = torch.cat([samples(40, 2), torch.full((40, 1), 0.1, dtype=F64)], 1)
    if model[1] == "I":  # a sphere has the width that its other features have
        assert fit_parsimonious(x, 2, model, generator=seeded()).converged
        return
    with pytest.raises(ValueError, match=r"positive definite"):
        fit_parsimonious(x, 2, model, generator=seeded())
    first = dataclasses.replace(template(model, 2, 3))
    with pytest.raises(ValueError, match=r"constant feature .* Found 2, counted from 0"):
        fit_parsimonious(x, 2, model, init=first)


@pytest.mark.parametrize("model", ["VII", "VEI", "VVI", "VEE", "VVE", "VEV", "EVV", "VVV", "EVI"])
def test_singular_component_is_named(model):
    counts, scatter = statistics(3, 3)
    scatter[1] = 1e-30 * scatter[0]
    if model[:2] == "EV":
        scatter[1] = torch.diag(torch.tensor([1.0, 2.0, 1e-30], dtype=F64))
    with pytest.raises(
        ValueError, match=r"^`covariances` should be positive definite\. Found a singular one of component 1:"
    ):
        covariances_from_scatter(model, counts, scatter)


@pytest.mark.parametrize("model", ["EII", "EEI", "EEE", "EEV", "VVI", "VVV"])
def test_no_scatter_at_all_is_singular(model):
    with pytest.raises(ValueError, match=r"^`covariances` should be positive definite\. Found a singular one"):
        covariances_from_scatter(model, torch.ones(2, dtype=F64), torch.zeros(2, 2, 2, dtype=F64))


@every_model
def test_a_start_that_collapses_is_an_error_that_says_so(model):
    x = torch.tensor([[0.0, 0.0], [5.0, 5.0]], dtype=F64).repeat(5, 1)
    with pytest.raises(ValueError, match=r"positive definite|singular"):
        fit_parsimonious(x, 2, model, generator=seeded())


BAD_ARGUMENTS = {
    "model": ({"model": "VIV"}, ValueError, "`model` should be one of 'EII', 'VII'"),
    "n_components": ({"n_components": -3}, ValueError, r"`n_components` should be a positive integer\. Found -3\."),
    "too many": ({"n_components": 61}, ValueError, "`n_components` should be at most 60"),
    "n_init": ({"n_init": 0}, ValueError, r"`n_init` should be a positive integer\. Found 0\."),
    "tol": ({"tol": -1.0}, ValueError, "`tol` should be finite and not negative"),
    "max_iter": ({"max_iter": -1}, ValueError, "`max_iter` should be an integer from 0"),
    "accelerate": ({"accelerate": "newton"}, ValueError, "`accelerate` should be one of 'none', 'squarem', 'anderson'"),
    "reg_covar": ({"reg_covar": -1.0}, ValueError, "`reg_covar` should be finite and not negative"),
    "init": ({"init": "best"}, ValueError, "`init` should be kmeans"),
    "start": ({"init": template("VVV")}, ValueError, "`init` should be of the model VEV, 3 components and 3 features"),
    "integers": ({"x": torch.ones(4, 2, dtype=torch.long)}, TypeError, "`x` should be a float32 or float64 tensor"),
    "an array": ({"x": np.ones((4, 2))}, TypeError, "Found ndarray"),
    "one row": ({"x": torch.ones(4)}, ValueError, r"`x` should have shape \(N, D\)"),
    "infinite": ({"x": torch.tensor([[1.0], [math.inf]])}, ValueError, r"Found \[inf\] in row 1"),
    "weights": ({"sample_weight": -torch.ones(60)}, ValueError, "`sample_weight` should be finite, not negative"),
    "weight shape": ({"sample_weight": torch.ones(3)}, ValueError, r"should have shape \(60,\). Found \(3,\)"),
    "weight type": ({"sample_weight": [1.0] * 60}, TypeError, "`sample_weight` should be a tensor or None"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name):
    changes, error, message = BAD_ARGUMENTS[name]
    arguments = {"x": samples(), "n_components": 3, "model": "VEV", **changes}
    with pytest.raises(error, match=message):
        fit_parsimonious(**arguments)


def test_shapes_that_do_not_fit_together():
    counts, scatter = statistics()
    good = template("VEV")
    other = {"log_weights": good.log_weights, "means": good.means, "structure": good.structure}
    with pytest.raises(ValueError, match=r"`log_weights` should have shape \(3,\). Found \(2,\)"):
        ParsimoniousParameters(**{**other, "log_weights": good.log_weights[:2]})
    with pytest.raises(ValueError, match=r"`means` should have shape \(K, D\)"):
        ParsimoniousParameters(**{**other, "means": good.means[0]})
    with pytest.raises(ValueError, match=r"`structure` should be of 3 components and 3 features. Found 3 and 2"):
        ParsimoniousParameters(**{**other, "structure": template("VEV", 3, 2).structure})
    with pytest.raises(ValueError, match=r"`structure` should be of 3 components and 3 features. Found 4 and 3"):
        ParsimoniousParameters(**{**other, "structure": template("VEV", 4, 3).structure})
    with pytest.raises(ValueError, match=r"`log_volumes` of EEV should have shape \(1\). Found \(3,\)"):
        dataclasses.replace(good.structure, model="EEV")
    with pytest.raises(ValueError, match=r"`counts` and `scatter` should have shapes \(K,\) and \(K, D, D\)"):
        covariances_from_scatter("VVV", counts, scatter[0])
    with pytest.raises(ValueError, match=r"`scatter` should be of 3 components, as `counts` are. Found 2"):
        covariances_from_scatter("VVV", counts, scatter[:2])
    with pytest.raises(ValueError, match=r"`start` should be of the model EVE. Found VEV"):
        covariances_from_scatter("EVE", counts, scatter, start=good.structure)
    with pytest.raises(ValueError, match=r"`x` should have shape \(N, 3\). Found \(4, 2\)"):
        good.log_joint(torch.zeros(4, 2, dtype=F64))
    with pytest.raises(ValueError, match=r"shapes \(N, 3\) and \(N, 3\). Found \(60, 3\) and \(60, 2\)"):
        good.m_step(samples(), responsibilities(60, 2))
    with pytest.raises(ValueError, match=r"`axes` should have 3 entries in its last dimension for 3 features"):
        good.with_unconstrained({**good.unconstrained(), "axes": torch.zeros(3, 2, dtype=F64)})


def test_gaussian_and_parsimonious_starts_agree():
    x = samples()
    gaussian = start(x, 3, covariance_type="tied", generator=seeded())
    assert isinstance(gaussian, GaussianParameters)
    first, value = Climber(x, 3, "VVE", 0.0).step(gaussian)
    assert value == pytest.approx(float(log_likelihood(gaussian, x)), abs=1e-12)
    assert first.model == "VVE"
