"""Units of all kinds against their definition, sums over all states, and the leak of each kind of chain.

The witnesses are tables of e^-E over a grid of both layers, written in NumPy from the definition of the energy: all
states of units that have finitely many, counts up to a negligible probability, and the trapezoidal rule for real
numbers, which is exact to rounding for integrands with the tails of a normal density.
"""

import copy
import functools
import io
import itertools
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase, finite_differences, relative_error
from scipy import stats
from scipy.special import expit, logsumexp
from torch import Tensor, nn
from values import binary_states, seeded, summed

from toolkit import stop_gradient, unblock
from toolkit.rbm import (
    NEGATIVE_SAMPLES,
    RBM,
    STRAIGHT_THROUGH,
    Bernoulli,
    Categorical,
    Gaussian,
    Joint,
    Rectified,
    base_rate_bias,
    exact_samples,
    gibbs,
    likelihood_gradient,
)
from toolkit.rbm.chains.units import (
    UNITS,
)
from toolkit.rbm.machine import layers as layers_module
from toolkit.rbm.machine.enumeration import (
    _enumerated,
    _States,
    _twin,
    log_partition,
    model_statistics,
)

DEVICES = ["cpu", pytest.param(ACCELERATOR, marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# --- machines and witnesses ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """The units of both layers, and sizes at which a table of both is small."""

    visible: str
    hidden: str
    n_visible: int
    n_hidden: int
    categories: int | None = None

    def __str__(self) -> str:
        return f"{self.visible}-{self.hidden}"

    @property
    def options(self) -> dict:
        return {"visible": self.visible, "hidden": self.hidden, "categories": self.categories}


PAIRS = [
    Pair("bernoulli", "bernoulli", 4, 3),
    Pair("gaussian", "bernoulli", 2, 3),
    Pair("categorical", "bernoulli", 2, 3, 3),
    Pair("bernoulli", "rectified", 4, 2),
    Pair("gaussian", "rectified", 1, 2),
    Pair("categorical", "rectified", 2, 2, 3),
]
ENUMERABLE = [pair for pair in PAIRS if str(pair) != "gaussian-rectified"]
FINITE = [pair for pair in PAIRS if pair.visible != "gaussian"]
LARGEST_COUNT = 40

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)
each_enumerable_pair = pytest.mark.parametrize("pair", ENUMERABLE, ids=str)


def _parameters(pair: Pair, scale: float = 0.5, seed: int = 0) -> dict[str, nn.Parameter]:
    generator, columns = seeded(seed), pair.n_visible * (pair.categories or 1)
    shapes = {"weights": (columns, pair.n_hidden), "visible_bias": (columns,), "hidden_bias": (pair.n_hidden,)}
    if pair.visible == "gaussian":
        shapes["visible_log_variance"] = (pair.n_visible,)
    return {
        name: nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in shapes.items()
    }


def _machine(parameters: Mapping[str, Tensor], pair: Pair) -> RBM:
    rbm = RBM(pair.n_visible, pair.n_hidden, dtype=torch.float64, **pair.options)
    for name, parameter in parameters.items():
        setattr(rbm, name, parameter)
    return rbm


def _rbm(pair: Pair, **kwargs) -> RBM:
    return _machine(_parameters(pair, **kwargs), pair)


def _arrays(parameters: Mapping[str, Tensor]) -> tuple[np.ndarray, ...]:
    """Return W, b, c and the variances, 1 where there are none."""
    w, b, c = (parameters[name].detach().numpy() for name in ("weights", "visible_bias", "hidden_bias"))
    z = parameters.get("visible_log_variance")
    return w, b, c, np.ones(len(b)) if z is None else np.exp(z.detach().numpy())


@functools.cache
def _log_ways() -> np.ndarray:
    """Log of the sum, over the ways in which n of infinitely many copies are on, of e^(sum of their biases)."""
    polynomial = np.zeros(LARGEST_COUNT + 1)
    polynomial[0] = 1
    for m in range(1, 800):  # prod over m of (1 + t e^-(m - 1/2)), whose n-th coefficient it is
        polynomial[1:] += polynomial[:-1] * math.exp(-(m - 0.5))
    return np.log(polynomial, out=np.full(len(polynomial), -np.inf), where=polynomial > 0)


def _grid(kind: str, n: int, categories: int | None, bias: np.ndarray, variance: np.ndarray) -> tuple:
    """Return states (S, C), and the log-weight of each: the volume of its cell, and what depends on it alone."""
    if kind == "bernoulli":
        states = binary_states(n)
        return states, states @ bias
    if kind == "categorical":
        states = np.array([np.concatenate(rows) for rows in itertools.product(np.eye(categories), repeat=n)])
        return states, states @ bias
    if kind == "rectified":
        states = np.array(list(itertools.product(range(LARGEST_COUNT + 1), repeat=n)), dtype=float)
        return states, states @ bias + _log_ways()[states.astype(int)].sum(1)
    points = np.linspace(-16, 16, 257)
    states = np.array(list(itertools.product(points, repeat=n)))
    cell = math.log(points[1] - points[0])
    return states, n * cell - ((states - bias) ** 2 / (2 * variance)).sum(1)


@dataclass(frozen=True)
class Table:
    """Log-weights of all pairs of states, (S, T), from the definition."""

    v: np.ndarray
    h: np.ndarray
    log_weight: np.ndarray

    @property
    def p(self) -> np.ndarray:
        return np.exp(self.log_weight - logsumexp(self.log_weight))

    @property
    def log_cell(self) -> float:
        """What the volume of a cell is in the log-weight of visible states."""
        return 0.0 if set(np.unique(self.v)) <= {0.0, 1.0} else self.v.shape[1] * math.log(32 / 256)


def _table(rbm: RBM, pair: Pair) -> Table:
    w, b, c, variance = _arrays(dict(rbm.named_parameters()))
    v, of_v = _grid(pair.visible, pair.n_visible, pair.categories, b, variance)
    h, of_h = _grid(pair.hidden, pair.n_hidden, None, c, variance)
    return Table(v, h, of_v[:, None] + of_h + (v / variance) @ w @ h.T)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=torch.float64)


def _near(found: Tensor, expected: np.ndarray, rtol: float = 1e-11, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=rtol, atol=atol)


def _gradient(value: Tensor, rbm: RBM, **kwargs) -> dict[str, Tensor]:
    names, parameters = zip(*rbm.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters, **kwargs), strict=True))


def _data(pair: Pair, n: int = 6, seed: int = 7) -> Tensor:
    """Visible units that any machine of this kind has an energy for."""
    generator = seeded(seed)
    if pair.visible == "gaussian":
        return torch.randn(n, pair.n_visible, generator=generator, dtype=torch.float64)
    if pair.visible == "bernoulli":
        return (torch.rand(n, pair.n_visible, generator=generator) < 0.4).double()
    digits = torch.randint(pair.categories, (n, pair.n_visible), generator=generator)
    return nn.functional.one_hot(digits, pair.categories).flatten(1).double()


# --- the definition -----------------------------------------------------------------------------------------------


@each_pair
class TestDefinition:
    def test_energy(self, pair):
        rbm = _rbm(pair)
        table = _table(rbm, pair)
        some_v, some_h = np.arange(0, len(table.v), 7), np.arange(0, min(len(table.h), 200), 3)
        found = rbm.energy(_tensor(table.v[some_v])[:, None], _tensor(table.h[some_h]))
        expected = -table.log_weight[np.ix_(some_v, some_h)] + table.log_cell
        finite = np.isfinite(expected)
        np.testing.assert_allclose(found.detach()[finite], expected[finite], rtol=1e-11, atol=1e-11)

    def test_free_energy_sums_the_hidden_units_out(self, pair):
        rbm = _rbm(pair)
        table = _table(rbm, pair)
        _near(rbm.free_energy(_tensor(table.v)), -logsumexp(table.log_weight, 1) + table.log_cell, atol=1e-11)

    def test_hidden_free_energy_sums_or_integrates_the_visible_units_out(self, pair):
        rbm = _rbm(pair)
        table = _table(rbm, pair)
        near = (table.h < 6).all(1)  # beyond, the grid of real numbers ends
        _near(rbm.joint.hidden_free_energy(_tensor(table.h[near])), -logsumexp(table.log_weight[:, near], 0))

    def test_conditional_means(self, pair):
        rbm = _rbm(pair)
        table = _table(rbm, pair)
        given_v = np.exp(table.log_weight - logsumexp(table.log_weight, 1, keepdims=True))
        _near(rbm.hidden_mean(_tensor(table.v)), given_v @ table.h, rtol=1e-10)
        near = (table.h < 6).all(1)
        log_weight = table.log_weight[:, near]
        given_h = np.exp(log_weight - logsumexp(log_weight, 0))
        _near(rbm.visible_mean(_tensor(table.h[near])), given_h.T @ table.v, rtol=1e-10)

    def test_samples_have_the_conditional_means_and_variances(self, pair):
        """A peer's Gaussian units have the right mean and no variance."""
        rbm, n = _rbm(pair), 50_000
        table, generator = _table(rbm, pair), seeded(1)
        i, j = len(table.v) // 3, 3
        with torch.no_grad():
            draws = {
                "hidden": rbm.sample_hidden(_tensor(table.v[i]).expand(n, -1), generator=generator),
                "visible": rbm.sample_visible(_tensor(table.h[j]).expand(n, -1), generator=generator),
            }
        for name, states, log_weight in (
            ("hidden", table.h, table.log_weight[i]),
            ("visible", table.v, table.log_weight[:, j]),
        ):
            p, draw = np.exp(log_weight - logsumexp(log_weight)), draws[name].numpy()
            mean = p @ states
            variance, fourth = p @ (states - mean) ** 2, p @ (states - mean) ** 4
            assert (abs(draw.mean(0) - mean) < 4.5 * np.sqrt(variance / n)).all()
            spread = abs(((draw - mean) ** 2).mean(0) - variance)
            assert (spread < 4.5 * np.sqrt((fourth - variance**2) / n) + 1e-12).all()
            assert (variance > 0.05).any(), "the test would not see a draw that is a mean"

    def test_samples_have_the_conditional_distribution(self, pair):
        rbm, n = _rbm(pair), 20_000
        table, generator = _table(rbm, pair), seeded(2)
        i, j = len(table.v) // 3, 3
        with torch.no_grad():
            hidden = rbm.sample_hidden(_tensor(table.v[i]).expand(n, -1), generator=generator).numpy()
            visible = rbm.sample_visible(_tensor(table.h[j]).expand(n, -1), generator=generator).numpy()
        p = np.exp(table.log_weight[i] - logsumexp(table.log_weight[i]))
        assert _distance(hidden, table.h, p) < 2 * _floor(p, n)
        if pair.visible == "gaussian":
            _, b, _, variance = _arrays(dict(rbm.named_parameters()))
            mean = b + _arrays(dict(rbm.named_parameters()))[0] @ table.h[j]
            for unit in range(pair.n_visible):
                law = stats.norm(mean[unit], math.sqrt(variance[unit]))
                assert stats.kstest(visible[:, unit], law.cdf).pvalue > 1e-4
        else:
            p = np.exp(table.log_weight[:, j] - logsumexp(table.log_weight[:, j]))
            assert _distance(visible, table.v, p) < 2 * _floor(p, n)

    def test_statistics_are_minus_the_slope_of_the_free_energy(self, pair):
        rbm, data = _rbm(pair), _data(pair)
        share = torch.rand(len(data), generator=seeded(1), dtype=torch.float64)
        assert relative_error(rbm.statistics(data), _gradient(-rbm.free_energy(data).mean(), rbm)) < 1e-13
        found = rbm.statistics(data, share)
        assert relative_error(found, _gradient(-(share * rbm.free_energy(data)).sum(), rbm)) < 1e-13
        assert list(found) == [name for name, _ in rbm.named_parameters()]

    def test_annealing_is_linear_in_the_energy(self, pair):
        rbm, data = _rbm(pair), _data(pair)
        hidden = rbm.sample_hidden(data, generator=seeded(1)).detach()
        for reference in (None, rbm.visible_bias.detach() * 0.3 + 0.1):
            zero, half, one = (rbm.joint.annealed(beta, reference) for beta in (0.0, 0.3, 1.0))
            energies = [machine.energy(data, hidden) for machine in (zero, half, one)]
            torch.testing.assert_close(energies[2], rbm.energy(data, hidden), rtol=1e-13, atol=1e-13)
            between = 0.7 * energies[0] + 0.3 * energies[2]
            if pair.visible == "gaussian" and reference is not None:
                squares = ((rbm.visible_bias - reference).square() / rbm.visible_log_variance.exp()).sum()
                between = between - 0.7 * 0.3 * squares / 2
            torch.testing.assert_close(energies[1], between, rtol=1e-12, atol=1e-12)
            difference = rbm.joint.annealed_difference(data, hidden, reference)
            torch.testing.assert_close(difference, energies[2] - energies[0], rtol=1e-12, atol=1e-12)
            assert not zero.weights.any()

    def test_machines_side_by_side_are_those_alone(self, pair):
        rbm, data, betas = _rbm(pair), _data(pair), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
        both = rbm.joint.annealed(betas)
        hidden = both.hidden_mean(data)
        for i, beta in enumerate(betas.tolist()):
            alone = rbm.joint.annealed(beta)
            for found, expected in (
                (hidden[i], alone.hidden_mean(data)),
                (both.free_energy(data)[i], alone.free_energy(data)),
                (both.visible_mean(hidden)[i], alone.visible_mean(hidden[i])),
                (both.energy(data, hidden)[i], alone.energy(data, hidden[i])),
                (both.hidden_free_energy(hidden)[i], alone.hidden_free_energy(hidden[i])),
            ):
                torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
        assert both.sample_visible(both.sample_hidden(data, None), None).shape == (3, *data.shape)

    def test_shifted_parameters_are_added(self, pair):
        rbm, data = _rbm(pair), _data(pair)
        by = {name: torch.full_like(parameter, 0.1) for name, parameter in rbm.named_parameters()}
        other = _machine({name: nn.Parameter(value + 0.1) for name, value in rbm.named_parameters()}, pair)
        assert torch.equal(rbm.joint.shifted(by).free_energy(data), other.free_energy(data))
        some = rbm.joint.shifted({"hidden_bias": by["hidden_bias"]})
        assert torch.equal(some.visible.bias, rbm.visible_bias)
        assert torch.equal(some.hidden.bias, rbm.hidden_bias + 0.1)

    def test_base_rates_are_those_of_the_data(self, pair):
        rbm, data = _rbm(pair), _data(pair, 50)
        with torch.no_grad():
            rbm.weights.zero_()
        rbm.start_at_base_rates(data)
        mean = rbm.visible_mean(torch.zeros(pair.n_hidden).double())
        states = 1 if pair.visible == "gaussian" else pair.categories or 2
        expected = data.mean(0) if pair.visible == "gaussian" else (data.sum(0) + 1) / (50 + states)
        torch.testing.assert_close(mean.detach(), expected, rtol=1e-13, atol=1e-13)
        if pair.visible == "gaussian":
            expected = data.var(0, correction=0)
            torch.testing.assert_close(rbm.visible_log_variance.exp().detach(), expected, rtol=1e-13, atol=0)
            rbm.start_at_base_rates(torch.full((3, pair.n_visible), 2.0).double())
            assert not rbm.visible_log_variance.any()


def _distance(draws: np.ndarray, states: np.ndarray, p: np.ndarray) -> float:
    """Total variation between the frequencies of draws, (N, C), and a distribution over states, (S, C)."""
    places = {tuple(state): place for place, state in enumerate(states.tolist())}
    counts = np.bincount([places[tuple(draw)] for draw in draws.tolist()], minlength=len(states))
    return 0.5 * np.abs(counts / len(draws) - p).sum()


def _floor(p: np.ndarray, n: int) -> float:
    """What that total variation is on average if the draws are from the distribution."""
    return 0.5 * np.minimum(np.sqrt(2 * p * (1 - p) / (math.pi * n)), 2 * p).sum()


# --- layers -------------------------------------------------------------------------------------------------------

LAYERS = {
    "bernoulli": lambda bias: Bernoulli(bias),
    "gaussian": lambda bias: Gaussian(bias, (bias.roll(1) / 3).detach().requires_grad_()),
    "categorical": lambda bias: Categorical(bias, 3),
    "rectified": lambda bias: Rectified(bias),
}
BIAS = [0.3, -1.2, 0.8, 2.1, -0.4, 0.05]
each_layer = pytest.mark.parametrize("kind", LAYERS)


def _layer(kind: str, dtype: torch.dtype = torch.float64):
    return LAYERS[kind](torch.tensor(BIAS, dtype=dtype).requires_grad_())


def _inputs(n: int = 5, scale: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return scale * torch.randn(n, len(BIAS), generator=seeded(3), dtype=torch.float64).to(dtype)


def _valid(units: Tensor, kind: str) -> bool:
    """Say whether draws are states of their units."""
    if kind == "gaussian":
        return bool(units.isfinite().all())
    if kind == "rectified":
        return bool(((units >= 0) & (units == units.round()) & units.isfinite()).all())
    binary = bool(((units == 0) | (units == 1)).all())
    return binary and (kind == "bernoulli" or bool((units.unflatten(-1, (-1, 3)).sum(-1) == 1).all()))


@each_layer
class TestLayer:
    def test_parameter_gradients(self, kind):
        layer, x = _layer(kind), _inputs()
        units = layer.sample(x, seeded(1)).detach()
        share = torch.rand(len(x), generator=seeded(4), dtype=torch.float64)
        value = (share * (layer.log_weight(units) + (x * layer.statistic(units)).sum(-1))).sum()
        self._check(layer, value, layer.parameter_gradients(units, x, share))

    def test_normaliser_gradients(self, kind):
        layer, x = _layer(kind), _inputs()
        share = torch.rand(len(x), generator=seeded(4), dtype=torch.float64)
        value = (share * layer.log_normaliser(x)).sum()
        self._check(layer, value, layer.normaliser_gradients(x, share))

    @staticmethod
    def _check(layer, value, found):
        names = ["bias", *layer.more_parameters]
        expected = torch.autograd.grad(value, [getattr(layer, name) for name in names])
        assert list(found) == names
        assert relative_error(found, dict(zip(names, expected, strict=True))) < 1e-13

    def test_the_mean_is_the_slope_of_the_normaliser_by_the_input(self, kind):
        layer, x = _layer(kind), _inputs().requires_grad_()
        (slope,) = torch.autograd.grad(layer.log_normaliser(x).sum(), x)
        torch.testing.assert_close(slope, layer.statistic(layer.mean(x)), rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
    def test_extreme_inputs(self, kind, dtype, size):
        layer = _layer(kind, dtype)
        x = torch.tensor([-1.0, 1.0, 0.5, -0.5, 0.0, 0.25], dtype=dtype) * size
        mean, exact = layer.mean(x), _layer(kind).mean(x.double()).detach()
        # The sum of input and bias is rounded to the type: by so much the mean may be off.
        tolerance = 4 * torch.finfo(dtype).eps * max(1.0, exact.abs().max().item())
        assert mean.dtype == dtype
        if kind in ("bernoulli", "categorical"):
            tolerance = max(tolerance, 2 * torch.finfo(dtype).eps * 4 * max(BIAS) * min(size, 10))
        torch.testing.assert_close(mean.double(), exact, rtol=0, atol=tolerance)
        draw = layer.sample(x.expand(100, -1), seeded(1))
        assert draw.dtype == dtype
        assert _valid(draw, kind)
        if dtype in (torch.float64, torch.float32):  # in half precision its square does not fit
            value = layer.log_normaliser(x)
            expected = _layer(kind).log_normaliser(x.double()).item()
            assert value.item() == pytest.approx(expected, rel=20 * torch.finfo(dtype).eps)
            slopes = torch.autograd.grad(value, layer.bias)[0]
            assert slopes.isfinite().all()

    def test_a_draw_carries_what_it_says(self, kind):
        layer, x = _layer(kind), _inputs(50).requires_grad_()
        (slope,) = torch.autograd.grad(layer.sample(x, seeded(1)).sum(), x)
        assert torch.equal(slope, torch.full_like(x, float(layer.draws_carry_gradients)))

    def test_a_draw_has_the_same_bits_without_a_graph_and_leaves_its_input_alone(self, kind):
        layer, x = _layer(kind), _inputs(50)
        before, (relaxed, units) = x.clone(), (kind != "rectified", [layer.sample(x, seeded(1))])
        with torch.no_grad():
            units.append(layer.sample(x, seeded(1)))
        assert torch.equal(units[0].detach().view(torch.int64), units[1].view(torch.int64))
        if relaxed:
            units = [layer.relaxed_sample(x, 0.5, seeded(1))]
            with torch.no_grad():
                units.append(layer.relaxed_sample(x, 0.5, seeded(1)))
            assert torch.equal(units[0].detach(), units[1])
        assert torch.equal(x, before)

    def test_not_a_number_stays_one(self, kind):
        x = _inputs()
        x[0, 0] = torch.nan
        assert _layer(kind).mean(x)[0, 0].isnan()
        assert _layer(kind).log_normaliser(x)[0].isnan()
        assert _layer(kind).log_normaliser(x)[1:].isfinite().all()

    def test_what_is_not_finite_is_refused(self, kind):
        layer = _layer(kind)
        units = layer.sample(_inputs(), seeded(1)).detach()
        layer.check(units, "data")
        for bad in (torch.nan, torch.inf):
            wrong = units.clone()
            wrong[3, 2] = bad
            with pytest.raises(ValueError, match=rf"`data` should be finite. Found {bad}"):
                layer.check(wrong, "data")


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("bernoulli", 1.5, "`data` should be between 0 and 1. Found 1.5."),
        ("bernoulli", -0.25, "`data` should be between 0 and 1. Found -0.25."),
        ("categorical", 0.5, "`data` should have one 1 in each group of 3. Found [0.5, 0.0, 0.0]."),
        ("categorical", -1.0, "`data` should have one 1 in each group of 3. Found [-1.0, 0.0, 0.0]."),
        ("rectified", 0.5, "`data` should be counts 0, 1, 2, ... Found 0.5."),
        ("rectified", -1.0, "`data` should be counts 0, 1, 2, ... Found -1.0."),
    ],
)
def test_states_that_units_do_not_have_are_refused(kind, value, message):
    units = torch.zeros(4, 6, dtype=torch.float64)
    if kind == "categorical":
        units[:, [0, 3]] = 1
    units[2, 0] = value
    with pytest.raises(ValueError) as raised:
        _layer(kind).check(units, "data")
    assert str(raised.value) == message


@pytest.mark.parametrize("x", [-800.0, -9.0, 0.0, 9.0, 9.5, 10.0, 10.5, 47.0, 300.0])
def test_rectified_units_are_infinitely_many_copies(x):
    """Against the copies themselves, also where a formula that switches at 10 is off by 4.5e-5."""
    layer, x_ = Rectified(torch.zeros(1, dtype=torch.float64)), torch.tensor([x], dtype=torch.float64)
    copies = x - np.arange(1000) - 0.5
    assert layer.log_normaliser(x_).item() == pytest.approx(np.logaddexp(0, copies).sum(), rel=1e-14, abs=1e-15)
    assert layer.mean(x_).item() == pytest.approx(expit(copies).sum(), rel=1e-13, abs=1e-300)
    (variance,) = torch.autograd.grad(layer.mean(x_.requires_grad_()), x_)
    assert variance.item() == pytest.approx((expit(copies) * expit(-copies)).sum(), rel=1e-11, abs=1e-300)
    if abs(x) < 100:
        draws = layer.sample(x_.detach().expand(20_000, 1), seeded(1))
        spread = math.sqrt((expit(copies) * expit(-copies)).sum() / 20_000)
        assert abs(draws.mean().item() - expit(copies).sum()) < 4.5 * spread + 1e-12


def test_rectified_units_in_half_precision_add_their_bias_in_single():
    """At 100 a step of bfloat16 is 1/2: the bias would be lost, and the counts be a quarter too low."""
    layer, n = Rectified(torch.tensor([0.25], dtype=torch.bfloat16)), 20_000
    draws = layer.sample(torch.full((n, 1), 100.0, dtype=torch.bfloat16), seeded(1))
    assert draws.double().mean().item() == pytest.approx(100.25, abs=4.5 / math.sqrt(n))


def test_rectified_means_are_close_to_the_smooth_rectifier():
    x = torch.linspace(-5, 12, 200, dtype=torch.float64)[:, None]
    difference = Rectified(torch.zeros(1, dtype=torch.float64)).mean(x) - nn.functional.softplus(x)
    assert 0.005 < difference.abs().max() < 0.02


def test_a_gaussian_machine_with_rectified_units_has_a_distribution_only_while_its_weights_are_small():
    """Its energy is a quadratic form, whose mixed part is W / sigma: below 1 the free energy has a least value."""
    pair = Pair("gaussian", "rectified", 1, 1)
    far = torch.tensor([[1e3], [1e4]], dtype=torch.float64)
    for weight, falls in ((0.9, False), (1.1, True)):
        rbm = RBM(1, 1, dtype=torch.float64, **pair.options)
        with torch.no_grad():
            rbm.weights.fill_(2 * weight)
            rbm.visible_log_variance.fill_(math.log(4))
            near, further = rbm.free_energy(far).tolist()
        assert (further < near < 0) is falls


# --- sums over all states -----------------------------------------------------------------------------------------


@each_enumerable_pair
class TestEnumeration:
    def test_log_partition_and_statistics(self, pair):
        rbm = _rbm(pair)
        table = _table(rbm, pair)
        assert rbm.log_partition().item() == pytest.approx(logsumexp(table.log_weight), rel=1e-12)
        p, (_, b, _, variance) = table.p, _arrays(dict(rbm.named_parameters()))
        expected = {
            "weights": _tensor((table.v / variance).T @ p @ table.h),
            "visible_bias": _tensor(p.sum(1) @ ((table.v - b) / variance if pair.visible == "gaussian" else table.v)),
            "hidden_bias": _tensor(p.sum(0) @ table.h),
        }
        if pair.visible == "gaussian":
            w = _arrays(dict(rbm.named_parameters()))[0]
            mixed = (p @ table.h) @ w.T * table.v
            slope = p.sum(1) @ ((table.v - b) ** 2 / (2 * variance)) - mixed.sum(0) / variance
            expected["visible_log_variance"] = _tensor(slope)
        assert relative_error(rbm.model_statistics(), expected) < 1e-12
        assert relative_error(_gradient(rbm.log_partition(), rbm), expected) < 1e-12

    def test_the_exact_trainer_has_the_gradient_of_the_likelihood(self, pair):
        rbm, data = _rbm(pair), _data(pair)
        autograd = _gradient(-rbm.log_likelihood(data).mean(), rbm)
        plain = _gradient(rbm.free_energy(data).mean() + _twin(rbm.joint, _enumerated(rbm.joint)), rbm)
        model, empirical = rbm.model_statistics(), rbm.statistics(data)
        difference = {name: model[name] - empirical[name] for name in model}
        assert relative_error(autograd, plain) < 1e-12
        assert relative_error(likelihood_gradient(rbm, data), autograd) < 1e-12
        assert relative_error(difference, autograd) < 1e-12
        numerical = finite_differences(
            lambda parameters: -_machine(parameters, pair).log_likelihood(data).mean(), dict(rbm.named_parameters())
        )
        assert relative_error(autograd, numerical) < 1e-8

    def test_likelihoods_add_up_to_one(self, pair):
        rbm = _rbm(pair)
        table = _table(rbm, pair)
        total = torch.logsumexp(rbm.log_likelihood(_tensor(table.v)) + table.log_cell, 0)
        assert total.item() == pytest.approx(0, abs=1e-11)

    def test_second_derivatives(self, pair):
        """Of log Z: the covariance of the statistics; here by autograd through both, and through `torch.func`."""
        rbm = _rbm(pair)
        directions = {
            name: torch.randn(p.shape, generator=seeded(5), dtype=torch.float64) for name, p in rbm.named_parameters()
        }
        second = []
        for value in (rbm.log_partition(), _twin(rbm.joint, _enumerated(rbm.joint))):
            first = _gradient(value, rbm, create_graph=True)
            second.append(_gradient(sum((first[name] * directions[name]).sum() for name in first), rbm))
        assert relative_error(second[0], second[1]) < 1e-12
        parameters = {name: parameter.detach() for name, parameter in rbm.named_parameters()}

        def value(parameters):
            return log_partition(_joint_with(rbm, parameters))

        found = torch.func.grad(value)(parameters)
        assert relative_error(found, rbm.model_statistics()) < 1e-12
        _, tangent = torch.func.jvp(value, (parameters,), (directions,))
        expected = sum((found[name] * directions[name]).sum() for name in found)
        assert tangent.item() == pytest.approx(expected.item(), rel=1e-11)

    def test_annealed_machines_side_by_side(self, pair):
        rbm, betas = _rbm(pair), torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
        found = log_partition(rbm.joint.annealed(betas))
        expected = [log_partition(rbm.joint.annealed(beta)) for beta in betas.tolist()]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-14, atol=0)
        for beta, value in zip(betas.tolist(), expected, strict=True):
            table = _table(_with_joint(rbm, rbm.joint.annealed(beta)), pair)
            assert value.item() == pytest.approx(logsumexp(table.log_weight), rel=1e-12)
        (slope,) = torch.autograd.grad(found.sum(), rbm.weights)
        assert slope.isfinite().all()
        assert slope.any()

    @pytest.mark.parametrize("n", [1, 20_000])
    def test_exact_samples_have_the_joint_distribution(self, pair, n):
        rbm = _rbm(pair)
        visible, hidden = rbm.sample_exactly(n, generator=seeded(2))
        again = exact_samples(rbm.joint, n, seeded(2))
        assert torch.equal(visible, again[0])
        assert torch.equal(hidden, again[1])
        assert (visible.shape, hidden.shape) == ((n, rbm.n_columns), (n, rbm.n_hidden))
        assert not visible.requires_grad
        if n > 1:
            _check_joint_distribution(visible, hidden, rbm, pair)


def _joint_with(rbm: RBM, parameters: Mapping[str, Tensor]) -> Joint:
    joint = rbm.joint
    visible = type(joint.visible)(
        parameters["visible_bias"],
        *([parameters["visible_log_variance"]] if isinstance(joint.visible, Gaussian) else []),
        *([joint.visible.categories] if isinstance(joint.visible, Categorical) else []),
    )
    return Joint(parameters["weights"], visible, type(joint.hidden)(parameters["hidden_bias"]))


def _with_joint(rbm: RBM, joint: Joint) -> RBM:
    """Return a machine with the parameters of a joint."""
    other = copy.deepcopy(rbm)
    other.weights = nn.Parameter(joint.weights.detach())
    other.visible_bias = nn.Parameter(joint.visible.bias.detach())
    other.hidden_bias = nn.Parameter(joint.hidden.bias.detach())
    return other


def _check_joint_distribution(visible: Tensor, hidden: Tensor, rbm: RBM, pair: Pair, times: float = 2.0) -> None:
    """Compare draws of both layers with the table: total variation, or that of hidden units and a test of real ones."""
    table, n = _table(rbm, pair), len(visible)
    if pair.visible != "gaussian":
        states = np.array([np.concatenate(both) for both in itertools.product(table.v, table.h)])
        draws = torch.cat([visible, hidden], 1).numpy()
        assert _distance(draws, states, table.p.flatten()) < times * _floor(table.p.flatten(), n)
        return
    assert _distance(hidden.numpy(), table.h, table.p.sum(0)) < times * _floor(table.p.sum(0), n)
    w, b, _, variance = _arrays(dict(rbm.named_parameters()))
    weight, means = table.p.sum(0), b + table.h @ w.T
    for unit in range(pair.n_visible):

        def law(x, unit=unit):
            standard = (np.asarray(x)[:, None] - means[:, unit]) / math.sqrt(variance[unit])
            return stats.norm.cdf(standard) @ weight

        assert stats.kstest(visible[:, unit].numpy(), law).pvalue > 1e-4
    # A pair of statistics that depends on both layers.
    product = visible[:, 0].numpy() * hidden[:, 0].numpy()
    mean = (table.v[:, :1] * table.h[:, 0] * table.p).sum()
    square = ((table.v[:, :1] * table.h[:, 0]) ** 2 * table.p).sum()
    assert abs(product.mean() - mean) < 4.5 * math.sqrt((square - mean**2) / n)


SIZES = [
    pytest.param(Pair("bernoulli", "bernoulli", 20, 12), id="hidden"),
    pytest.param(Pair("bernoulli", "bernoulli", 11, 17), id="visible"),
    pytest.param(Pair("gaussian", "bernoulli", 6, 11), id="gaussian"),
    pytest.param(Pair("categorical", "bernoulli", 9, 11, 4), id="categorical-summed-out"),
    pytest.param(Pair("categorical", "bernoulli", 7, 13, 3), id="categorical-enumerated"),
    pytest.param(Pair("bernoulli", "rectified", 9, 5), id="rectified"),
]


@pytest.mark.portable
@pytest.mark.parametrize("pair", SIZES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_fast_sums_are_those_of_their_twin(pair, scale, dtype, monkeypatch):
    """Products in groups, no exponentials of single states: as exact as the plain formula, at any size of weights."""
    monkeypatch.setattr("toolkit.rbm.machine.enumeration._CACHE", 2**13)  # many blocks, of few states
    monkeypatch.setattr("toolkit.rbm.machine.enumeration._BLOCK", 3)
    rbm = _rbm(pair, scale=scale)
    if pair.visible == "gaussian":
        with torch.no_grad():
            rbm.visible_log_variance.mul_(0.5 / scale)
    rbm = rbm.to(dtype)
    exact = _twin(rbm.double().joint, _enumerated(rbm.joint))  # at the rounded parameters
    expected = _gradient(exact, rbm)
    rbm = rbm.to(dtype)
    eps = torch.finfo(dtype).eps
    assert rbm.log_partition().item() == pytest.approx(exact.item(), rel=40 * eps)
    found = {name: value.double() for name, value in rbm.model_statistics().items()}
    # Weights of states are as exact as their exponents are.
    assert relative_error(found, expected) < 40 * eps * max(1.0, abs(exact.item()))


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
@pytest.mark.parametrize(
    ("scale", "dtype", "groups"),
    [
        pytest.param(0.1, torch.float64, 1, id="one group"),
        pytest.param(5.0, torch.float32, 2, id="several groups"),
        pytest.param(200.0, torch.float32, 0, id="plain"),
        pytest.param(torch.nan, torch.float64, 0, id="nan"),
    ],
)
def test_products_are_in_groups_that_cannot_overflow(kind, scale, dtype, groups):
    pair = Pair(kind, "bernoulli", 30, 6, 3 if kind == "categorical" else None)
    rbm = _rbm(pair, scale=scale).to(dtype)
    summed = _States(rbm.joint, "hidden").summed
    found = len(summed.product.ends) if hasattr(summed, "product") else 0
    assert (min(found, 2), torch.isnan(rbm.log_partition()).item()) == (groups, math.isnan(scale))


def test_two_to_the_25_states_are_summed_in_bounded_memory():
    """Independent units: the sum is known. A chunk is 1 MiB, all states would be 128 MiB for each unit."""
    rbm = RBM(26, 25, dtype=torch.float32)
    with torch.no_grad():
        rbm.weights.zero_()
        rbm.hidden_bias.copy_(torch.linspace(-3, 2, 25))
        rbm.visible_bias.copy_(torch.linspace(-1, 4, 26))
    expected = np.logaddexp(0, np.linspace(-3, 2, 25)).sum() + np.logaddexp(0, np.linspace(-1, 4, 26)).sum()
    status = Path("/proc/self/status")
    if status.exists():
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory from now on
        before = _kibibytes(status, "VmRSS")
    found = rbm.log_partition().item()
    assert found == pytest.approx(expected, rel=1e-6)
    assert not status.exists() or _kibibytes(status, "VmHWM") - before < 32 * 1024


def _kibibytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))


@pytest.mark.parametrize("pair", SIZES[:1] + SIZES[3:5])
def test_exact_samples_from_many_blocks(pair, monkeypatch):
    """Each draw's first units belong to its own other units: frequencies of pairs of units, one of each part."""
    monkeypatch.setattr("toolkit.rbm.machine.enumeration._CACHE", 2**11)
    monkeypatch.setattr("toolkit.rbm.machine.enumeration._BLOCK", 3)
    rbm, n = _rbm(pair, scale=0.7), 20_000
    visible, hidden = rbm.sample_exactly(n, generator=seeded(3))
    expected = rbm.model_statistics()
    found = visible.T @ hidden / n
    spread = (expected["weights"] * (1 - expected["weights"]) / n).sqrt()
    assert ((found - expected["weights"]).abs() < 5 * spread + 1e-9).all()
    own = hidden if _enumerated(rbm.joint) == "hidden" else visible
    correlation = torch.corrcoef(own.T)
    joint = rbm.joint.hidden_free_energy if _enumerated(rbm.joint) == "hidden" else rbm.free_energy
    states = _States(rbm.joint, _enumerated(rbm.joint))
    every = torch.cat(
        [
            torch.cat([states.first(torch.arange(states.length)), last.expand(states.length, -1)], 1)
            for block in states.blocks()
            for last in block
        ]
    )
    p = (-joint(every) - rbm.log_partition()).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    centred = every - p @ every
    covariance = centred.T @ (centred * p[:, None])
    scale = covariance.diagonal().sqrt()
    assert (correlation - covariance / scale / scale[:, None]).abs().max() < 5 / math.sqrt(n)


def test_exact_samples_from_machines_side_by_side():
    pair = PAIRS[0]
    rbm = _rbm(pair, scale=1.0)
    betas = torch.tensor([0.2, 1.0], dtype=torch.float64)
    visible, hidden = exact_samples(rbm.joint.annealed(betas), 20_000, seeded(1))
    assert (visible.shape, hidden.shape) == ((2, 20_000, 4), (2, 20_000, 3))
    for i, beta in enumerate(betas.tolist()):
        _check_joint_distribution(visible[i], hidden[i], _with_joint(rbm, rbm.joint.annealed(beta)), pair)


def test_exact_samples_draw_from_their_generator_alone():
    rbm, before = _rbm(PAIRS[0]), torch.get_rng_state()
    rbm.sample_exactly(10, generator=seeded(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: _rbm(PAIRS[0]).sample_exactly(0), "`n` should be a positive integer. Found 0."),
        (lambda: _rbm(PAIRS[0], scale=math.nan).sample_exactly(1), "The parameters should be finite. Found"),
        (
            lambda: _rbm(Pair("gaussian", "rectified", 2, 2)).log_partition(),
            "Found hidden units without number and visible units without number.",
        ),
        (
            lambda: model_statistics(_rbm(Pair("categorical", "rectified", 17, 2, 3)).joint),
            "Found hidden units without number and 2^26.94 visible states.",
        ),
    ],
)
def test_what_cannot_be_enumerated_is_refused(attempt, message):
    with pytest.raises(ValueError) as raised:
        attempt()
    assert message in str(raised.value)


def test_parameters_that_change_in_place_before_the_backward_pass_are_noticed():
    rbm = _rbm(PAIRS[0])
    value = rbm.log_partition()
    with torch.no_grad():
        rbm.weights.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_machine_in_half_precision_is_summed_in_single(dtype):
    rbm = _rbm(PAIRS[0]).to(dtype)
    exact = copy.deepcopy(rbm).double()
    assert rbm.log_partition().dtype == torch.float32
    assert rbm.log_partition().item() == pytest.approx(exact.log_partition().item(), rel=1e-6)
    statistics = rbm.model_statistics()
    assert {value.dtype for value in statistics.values()} == {dtype}
    rbm.log_partition().backward()
    assert torch.equal(rbm.weights.grad, statistics["weights"])
    start = torch.zeros(200, 4, dtype=dtype)
    for chain in ("sampled", "straight_through", "mean_field"):
        end = gibbs(rbm, start, steps=3, chain=chain, generator=seeded(1))
        assert end.dtype == dtype
        assert end.isfinite().all()
    visible, hidden = rbm.sample_exactly(10)
    assert visible.dtype == hidden.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_enumerable_pair
def test_transforms_of_a_machine_in_half_precision_sum_in_single(pair, dtype):
    rbm = _rbm(pair).to(dtype)
    exact = copy.deepcopy(rbm).double()
    tensors = rbm.joint.tensors

    def value(weights):
        return log_partition(rbm.joint.with_tensors({**tensors, "weights": weights}))

    gradient, found = torch.func.grad_and_value(value)(rbm.weights)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact.log_partition().item(), rel=1e-5)
    expected = exact.model_statistics()["weights"]
    torch.testing.assert_close(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@each_enumerable_pair
def test_autocast_does_not_reach_the_sums(pair):
    rbm = _rbm(pair).float()
    exact = rbm.log_partition()
    gradient, statistics = _gradient(exact, rbm), rbm.model_statistics()
    draws = rbm.sample_exactly(5, generator=seeded(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rbm.log_partition()
        assert found.dtype == torch.float32
        assert torch.equal(found, exact)
        for name, value in _gradient(found, rbm).items():
            assert torch.equal(value, gradient[name])
            assert torch.equal(rbm.model_statistics()[name], statistics[name])
        for units, expected in zip(rbm.sample_exactly(5, generator=seeded(1)), draws, strict=True):
            assert torch.equal(units, expected)
        parameters = {name: value.detach() for name, value in rbm.named_parameters()}
        # A backward pass of torch's own formulas has the types of what is around it: look at the value alone.
        twin = torch.func.grad_and_value(lambda some: log_partition(rbm.joint.with_tensors(parameters | some)))
        assert twin({"weights": parameters["weights"]})[1].item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@each_enumerable_pair
def test_devices(pair, device):
    rbm = _rbm(pair).to(device)
    value = rbm.log_partition()
    assert value.item() == pytest.approx(_rbm(pair).log_partition().item(), rel=1e-12)
    found = {name: gradient.cpu() for name, gradient in _gradient(value, rbm).items()}
    assert relative_error(found, _rbm(pair).model_statistics()) < 1e-12
    visible, hidden = rbm.sample_exactly(50, generator=seeded(1, device=device))
    for chain, temperature in (("sampled", None), ("mean_field", None), ("concrete", 0.5)):
        if chain != "concrete" or pair.hidden != "rectified":
            end = gibbs(rbm, visible, steps=2, chain=chain, temperature=temperature, generator=seeded(1, device))
            assert end.device.type == hidden.device.type == device
            assert end.isfinite().all()


# --- the machine as a module --------------------------------------------------------------------------------------


@each_pair
class TestModule:
    def test_copies_have_the_same_bits(self, pair):
        rbm, data, buffer = _rbm(pair), _data(pair), io.BytesIO()
        loaded = RBM(pair.n_visible, pair.n_hidden, dtype=torch.float64, **pair.options)
        torch.save(rbm.state_dict(), buffer)
        buffer.seek(0)
        loaded.load_state_dict(torch.load(buffer))
        for other in (loaded, copy.deepcopy(rbm), pickle.loads(pickle.dumps(rbm))):
            assert repr(other) == repr(rbm)
            assert torch.equal(other.free_energy(data), rbm.free_energy(data))
            assert all(a is not b for a, b in zip(other.parameters(), rbm.parameters(), strict=True))

    def test_a_change_of_type_and_back(self, pair):
        rbm, data = _rbm(pair).float(), _data(pair)
        single = copy.deepcopy(rbm)
        assert rbm.free_energy(data.float()).dtype == torch.float32
        torch.testing.assert_close(
            rbm.double().free_energy(data).float(), single.free_energy(data.float()), rtol=1e-5, atol=1e-5
        )
        half = single.to(torch.bfloat16)
        assert half.sample_hidden(data.bfloat16(), generator=seeded(1)).dtype == torch.bfloat16

    def test_functional_calls_and_machines_side_by_side(self, pair):
        rbm, data = _rbm(pair), _data(pair)
        machines = [{name: p.detach() for name, p in _parameters(pair, seed=seed).items()} for seed in range(3)]

        def mean_free_energy(parameters):
            return torch.func.functional_call(rbm, parameters, (data,)).mean()

        stacked = {name: torch.stack([parameters[name] for parameters in machines]) for name in machines[0]}
        values = torch.func.vmap(mean_free_energy)(stacked)
        slopes = torch.func.vmap(torch.func.grad(mean_free_energy))(stacked)
        for i, parameters in enumerate(machines):
            other = _machine({name: nn.Parameter(value) for name, value in parameters.items()}, pair)
            expected = other.statistics(data)
            torch.testing.assert_close(values[i], other.free_energy(data).mean().detach(), rtol=1e-13, atol=1e-13)
            found = {name: -value[i] for name, value in slopes.items()}
            assert relative_error(found, expected) < 1e-12


def test_machines_that_were_saved_before_there_were_other_units_load():
    old = {"weights": torch.randn(4, 3), "visible_bias": torch.randn(4), "hidden_bias": torch.randn(3)}
    rbm = RBM(4, 3)
    rbm.load_state_dict(old)
    assert list(rbm.state_dict()) == list(old)
    assert torch.equal(rbm.weights, old["weights"])


# --- chains -------------------------------------------------------------------------------------------------------


@each_enumerable_pair
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_chains_from_exact_draws_stay_there(pair, steps, beta):
    rbm = _rbm(pair, scale=0.9, seed=5)
    joint = rbm.joint.annealed(beta)
    start, _ = exact_samples(joint, 20_000, seeded(2))
    with torch.no_grad():
        end = gibbs(joint, start, steps=steps, generator=seeded(3))
        hidden = joint.sample_hidden(end, seeded(4))
    assert not torch.equal(start, end)
    _check_joint_distribution(end, hidden, _with_joint(rbm, joint), pair)


TEMPERATURE = 0.6


def _runs(chain: str, pair: Pair) -> bool:
    if chain == "concrete":
        return pair.hidden != "rectified"
    return chain != "noisy_rectified" or pair.hidden == "rectified"


CHAINS = [(chain, pair) for chain in UNITS for pair in PAIRS if _runs(chain, pair)]


@dataclass(frozen=True)
class Passed:
    """What a layer passed on, and how a cotangent of it comes back."""

    value: np.ndarray
    slope: np.ndarray | None  # by what was passed in, unit by unit; None: zero
    table: np.ndarray | None = None  # for categorical units the probabilities or relaxed units that couple a group
    of_log_variance: np.ndarray | float = 0.0

    def pull(self, cotangent: np.ndarray) -> np.ndarray:
        if self.slope is None:
            return np.zeros_like(cotangent)
        if self.table is not None:
            inner = (cotangent * self.table).reshape(*cotangent.shape[:-1], -1, 3).sum(-1)
            return self.slope * (cotangent - np.repeat(inner, 3, -1))
        return self.slope * cotangent


def _pass_on(kind: str, chain: str, a: np.ndarray, variance: np.ndarray, generator: torch.Generator) -> Passed:
    """Pass on units whose input and bias are a, drawing as the chain does."""

    def numbers(how: str, *shape: int) -> np.ndarray:
        return getattr(torch.empty(shape or a.shape, dtype=torch.float64), how)(generator=generator).numpy()

    if kind == "gaussian":
        noise = 0.0 if chain == "mean_field" else numbers("normal_") * np.sqrt(variance)
        return Passed(a + noise, np.ones_like(a), of_log_variance=noise / 2)
    if kind == "bernoulli":
        p = expit(a)
        if chain == "concrete":
            uniform = numbers("uniform_")
            relaxed = expit((a + np.log(uniform) - np.log1p(-uniform)) / TEMPERATURE)
            return Passed(relaxed, relaxed * (1 - relaxed) / TEMPERATURE)
        value = p
        if chain != "mean_field":
            drawn = torch.empty(a.shape, dtype=torch.float32).uniform_(generator=generator)
            value = (drawn.double().numpy() < p).astype(float)
        return Passed(value, p * (1 - p) if chain in ("mean_field", "straight_through") else None)
    if kind == "categorical":
        groups = a.reshape(*a.shape[:-1], -1, 3)
        if chain == "concrete":
            groups = (groups - np.log(numbers("exponential_").reshape(groups.shape))) / TEMPERATURE
            relaxed = np.exp(groups - logsumexp(groups, -1, keepdims=True)).reshape(a.shape)
            return Passed(relaxed, relaxed / TEMPERATURE, relaxed)
        p = np.exp(groups - logsumexp(groups, -1, keepdims=True))
        value = p
        if chain != "mean_field":
            below = np.cumsum(p, -1)
            state = (below <= numbers("uniform_", *groups.shape[:-1], 1) * below[..., -1:]).sum(-1)
            value = np.eye(3)[state]
        p, value = p.reshape(a.shape), value.reshape(a.shape)
        return Passed(value, p if chain in ("mean_field", "straight_through") else None, p)
    if chain == "noisy_rectified":
        noise, s = numbers("normal_"), expit(a)
        value = np.maximum(0, a + noise * np.sqrt(s))
        return Passed(value, (value > 0) * (1 + noise * np.sqrt(s) * (1 - s) / 2))
    copies = a[..., None] - np.arange(80) - 0.5
    mean, slope = expit(copies).sum(-1), (expit(copies) * expit(-copies)).sum(-1)
    if chain == "mean_field":
        return Passed(mean, slope)
    log_weight = a[..., None] * np.arange(LARGEST_COUNT + 1) + _log_ways()
    below = np.cumsum(np.exp(log_weight - logsumexp(log_weight, -1, keepdims=True)), -1)
    count = (below <= numbers("uniform_", *a.shape, 1) * below[..., -1:]).sum(-1).astype(float)
    return Passed(count, slope if chain == "straight_through" else None)


def _hidden_mean(a: np.ndarray, kind: str) -> np.ndarray:
    return expit(a) if kind == "bernoulli" else expit(a[..., None] - np.arange(80) - 0.5).sum(-1)


def _free_energy_gradient(parameters: Mapping[str, Tensor], pair: Pair, v: np.ndarray) -> dict[str, Tensor]:
    """Gradient of the mean free energy by the parameters."""
    w, b, c, variance = _arrays(parameters)
    n, h = len(v), _hidden_mean(v / variance @ w + c, pair.hidden)
    gradient = {"weights": -(v / variance).T @ h / n, "hidden_bias": -h.mean(0)}
    if pair.visible == "gaussian":
        gradient["visible_bias"] = -((v - b) / variance).mean(0)
        slope = -((v - b) ** 2) / 2 + v * (h @ w.T)
        gradient["visible_log_variance"] = (slope / variance).mean(0)
    else:
        gradient["visible_bias"] = -v.mean(0)
    return {name: _tensor(value) for name, value in gradient.items()}


def _free_energy_slope(parameters: Mapping[str, Tensor], pair: Pair, v: np.ndarray) -> np.ndarray:
    """Derivative of the mean free energy by the visible units."""
    w, b, c, variance = _arrays(parameters)
    coupling = _hidden_mean(v / variance @ w + c, pair.hidden) @ w.T
    slope = (v - b - coupling) / variance if pair.visible == "gaussian" else -b - coupling
    return slope / len(v)


Trace = list[tuple[np.ndarray, Passed, Passed]]


def _run(parameters: Mapping[str, Tensor], pair: Pair, chain: str, start: np.ndarray, steps: int = 2) -> Trace:
    w, b, c, variance = _arrays(parameters)
    generator, trace, v = seeded(1), [], start
    for _ in range(steps):
        hidden = _pass_on(pair.hidden, chain, v / variance @ w + c, variance, generator)
        visible = _pass_on(pair.visible, chain, hidden.value @ w.T + b, variance, generator)
        trace.append((v, hidden, visible))
        v = visible.value
    return trace


def _pull_back(parameters: Mapping[str, Tensor], pair: Pair, trace: Trace, cotangent: np.ndarray) -> dict[str, Tensor]:
    """Pull a cotangent of the last visible units back through the chain to the parameters."""
    w, _, _, variance = _arrays(parameters)
    bar = {name: np.zeros(parameter.shape) for name, parameter in parameters.items()}
    for v, hidden, visible in reversed(trace):
        if pair.visible == "gaussian":
            bar["visible_log_variance"] += (cotangent * visible.of_log_variance).sum(0)
        at_visible = visible.pull(cotangent)
        at_hidden = hidden.pull(at_visible @ w)
        bar["weights"] += at_visible.T @ hidden.value + (v / variance).T @ at_hidden
        bar["visible_bias"] += at_visible.sum(0)
        bar["hidden_bias"] += at_hidden.sum(0)
        cotangent = at_hidden @ w.T / variance
        if pair.visible == "gaussian":
            bar["visible_log_variance"] -= (cotangent * v).sum(0)
    return {name: _tensor(value) for name, value in bar.items()}


def _temperature(chain: str) -> float | None:
    return TEMPERATURE if chain == "concrete" else None


def _chain_case(chain: str, pair: Pair) -> BlockCase:
    """The surrogate of contrastive divergence, whose negative samples come from a chain of some kind."""
    data = _data(pair)

    def loss(parameters):
        rbm = _machine(parameters, pair)
        moved = gibbs(rbm, data, steps=2, chain=chain, temperature=_temperature(chain), generator=seeded(1))
        return rbm.free_energy(data).mean() - rbm.free_energy(stop_gradient(moved, NEGATIVE_SAMPLES)).mean()

    def blocked(parameters):
        end = _run(parameters, pair, chain, data.numpy())[-1][-1].value
        positive, negative = (_free_energy_gradient(parameters, pair, v) for v in (data.numpy(), end))
        return {name: positive[name] - negative[name] for name in positive}

    def opened(parameters):
        trace = _run(parameters, pair, chain, data.numpy())
        slope = _free_energy_slope(parameters, pair, trace[-1][-1].value)
        return summed(blocked(parameters), _pull_back(parameters, pair, trace, -slope))

    return BlockCase(
        id=f"{chain}-{pair}",
        block=NEGATIVE_SAMPLES,
        parameters=lambda: _parameters(pair),
        loss=loss,
        blocked=blocked,
        opened=opened,
    )


def _straight_through_case(pair: Pair) -> BlockCase:
    """The mean free energy at the end of a straight-through chain, which has the leak of a sampled one if opened."""
    data = _data(pair)

    def loss(parameters):
        rbm = _machine(parameters, pair)
        return rbm.free_energy(gibbs(rbm, data, steps=2, chain="straight_through", generator=seeded(1))).mean()

    def witness(parameters, chain):
        trace = _run(parameters, pair, chain, data.numpy())
        end = trace[-1][-1].value
        slope = _free_energy_slope(parameters, pair, end)
        return summed(_free_energy_gradient(parameters, pair, end), _pull_back(parameters, pair, trace, slope))

    return BlockCase(
        id=f"straight-through-{pair}",
        block=STRAIGHT_THROUGH,
        parameters=lambda: _parameters(pair),
        loss=loss,
        blocked=lambda parameters: witness(parameters, "straight_through"),
        opened=lambda parameters: witness(parameters, "sampled"),
    )


BLOCK_CASES: list[BlockCase] = [
    *(_chain_case(chain, pair) for chain, pair in CHAINS),
    *(_straight_through_case(pair) for pair in PAIRS),
]


def _leak(chain: str, pair: Pair) -> float:
    """Return how large the leak is, relative to the blocked gradient."""
    closed = _slopes(_chain_case(chain, pair))
    with unblock(NEGATIVE_SAMPLES):
        opened = _slopes(_chain_case(chain, pair))
    return relative_error(opened, closed)


def _slopes(case: BlockCase) -> dict[str, Tensor]:
    parameters = case.parameters()
    slopes = torch.autograd.grad(case.loss(parameters), list(parameters.values()))
    return dict(zip(parameters, slopes, strict=True))


@pytest.mark.parametrize(("chain", "pair"), CHAINS, ids=lambda value: str(value))
def test_which_chains_leak(chain, pair):
    """Draws of zeros and ones, categories and counts leak exactly nothing; all that has a slope does."""
    leak = _leak(chain, pair)
    if chain == "sampled" and pair.visible != "gaussian":
        assert leak == 0
    elif chain == "noisy_rectified" and pair.visible != "gaussian":
        assert leak == 0, "its last units are draws, and so the whole chain leaks nothing"
    else:
        assert leak > 0.05


@pytest.mark.parametrize("hidden", ["bernoulli", "rectified"])
def test_a_chain_of_real_units_leaks_through_its_last_step_alone(hidden):
    """The hidden draw before it has no derivative: however long the chain, the leak is that of one half step."""
    pair = next(pair for pair in PAIRS if (pair.visible, pair.hidden) == ("gaussian", hidden))
    data, parameters = _data(pair), _parameters(pair)
    rbm = _machine(parameters, pair)

    def leak(start, steps, generator):
        moved = gibbs(rbm, start, steps=steps, generator=generator)
        slope = torch.autograd.grad(rbm.free_energy(moved).mean(), moved, retain_graph=True)[0]
        return moved, torch.autograd.grad(moved, list(rbm.parameters()), slope)

    generator = seeded(1)
    _, long = leak(data, 6, generator)
    generator = seeded(1)
    with torch.no_grad():
        near = gibbs(rbm, data, steps=5, generator=generator)
    _, last = leak(near, 1, generator)
    assert all(torch.equal(a, b) for a, b in zip(long, last, strict=True))
    assert not last[2].any(), "hidden biases have no part in it"
    assert last[0].any()


def test_a_chain_of_torch_bernoulli_leaks_exactly_nothing():
    """It is in the graph, as our draws are, and its derivative is zero."""
    pair = PAIRS[0]
    rbm, data = _rbm(pair), _data(pair)

    def gradient():
        torch.manual_seed(0)
        v = data
        for _ in range(3):
            v = torch.bernoulli(rbm.visible_mean(torch.bernoulli(rbm.hidden_mean(v))))
        assert v.requires_grad
        return _gradient(rbm.free_energy(data).mean() - rbm.free_energy(stop_gradient(v, NEGATIVE_SAMPLES)).mean(), rbm)

    blocked = gradient()
    with unblock(NEGATIVE_SAMPLES):
        opened = gradient()
    assert all(torch.equal(blocked[name], opened[name]) for name in blocked)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.hidden == "bernoulli"], ids=str)
def test_concrete_leaks_are_the_rest_of_a_true_derivative(pair):
    """Nothing blocked, the surrogate of a concrete chain is a smooth function of the parameters for fixed noise."""
    case = _chain_case("concrete", pair)
    with unblock(NEGATIVE_SAMPLES):
        found = _slopes(case)
    assert relative_error(found, finite_differences(case.loss, case.parameters())) < 1e-8


def test_concrete_units_become_draws_as_they_cool():
    layers = (Bernoulli(torch.tensor([0.3, -1.0]).double()), Categorical(torch.tensor([0.3, -1.0, 0.5]).double(), 3))
    for layer in layers:
        x, n = torch.zeros(50_000, layer.n_columns).double(), 50_000
        cold, warm = (layer.relaxed_sample(x, temperature, seeded(1)) for temperature in (1e-3, 1.0))
        mean = layer.mean(x[:1])
        assert ((cold.mean(0) - mean).abs() < 4.5 * (mean * (1 - mean) / n).sqrt()).all()
        assert ((cold - cold.round()).abs() > 0.01).double().mean() < 0.01
        assert ((warm - warm.round()).abs() > 0.01).double().mean() > 0.9
        assert ((warm > 0) & (warm < 1)).all()
        # Which is largest, or above 1/2, does not depend on the temperature.
        assert torch.equal(cold.round(), warm.round()) or layer.n_columns == 3
        assert layer.n_columns != 3 or torch.equal(cold.argmax(-1), warm.argmax(-1))


def _noisy_transition(rbm: RBM) -> np.ndarray:
    """Return how noisy rectified units between two Bernoulli layers lead from state to state, by quadrature."""
    w, b, c, _ = _arrays(dict(rbm.named_parameters()))
    v = _grid("bernoulli", len(b), None, b, b)[0]
    noise = np.linspace(-8, 8, 401)
    weight = stats.norm.pdf(noise)
    weight /= weight.sum()
    transition = np.zeros((len(v), len(v)))
    for i, a in enumerate(v @ w + c):
        h = np.maximum(0, a[:, None] + np.sqrt(expit(a))[:, None] * noise)  # (2, points)
        x = b + h[0][:, None, None] * w[:, 0] + h[1][None, :, None] * w[:, 1]
        for j, state in enumerate(v):
            probability = np.where(state == 1, expit(x), expit(-x)).prod(-1)
            transition[i, j] = weight @ probability @ weight
    return transition


@pytest.mark.slow
def test_noisy_rectified_units_have_another_stationary_distribution():
    """A finding: the approximation of a draw moves the chain's distribution, by as much as quadrature predicts."""
    pair = Pair("bernoulli", "rectified", 3, 2)
    rbm, n = _rbm(pair, scale=1.0), 20_000
    transition = _noisy_transition(rbm)
    values, vectors = np.linalg.eig(transition.T)
    stationary = np.real(vectors[:, values.real.argmax()])
    stationary /= stationary.sum()
    exact = _table(rbm, pair).p.sum(1)
    states = _table(rbm, pair).v
    off = 0.5 * abs(stationary - exact).sum()
    with torch.no_grad():
        start, _ = rbm.sample_exactly(n, generator=seeded(2))
        end = gibbs(rbm, start, steps=15, chain="noisy_rectified", generator=seeded(3)).numpy()
    assert _distance(end, states, stationary) < 2 * _floor(stationary, n)
    assert _distance(end, states, exact) > 0.8 * off
    assert 10 * _floor(exact, n) < off < 0.2


@pytest.mark.parametrize(("a", "off"), [(-1.0, 0.30), (0.0, 0.40), (2.0, 0.117), (8.0, 0.0)])
def test_noisy_rectified_units_have_the_mean_of_counts_only_where_that_is_large(a, off):
    layer, n = Rectified(torch.zeros(1, dtype=torch.float64)), 200_000
    draw = layer.noisy_sample(torch.full((n, 1), a, dtype=torch.float64), seeded(1)).numpy()
    noise, spread = stats.norm, math.sqrt(expit(a))
    mean = a * noise.cdf(a / spread) + spread * noise.pdf(a / spread)  # of a rectified normal number
    square = (a**2 + spread**2) * noise.cdf(a / spread) + a * spread * noise.pdf(a / spread)
    assert abs(draw.mean() - mean) < 4.5 * math.sqrt((square - mean**2) / n)
    assert draw.var() == pytest.approx(square - mean**2, rel=0.05)
    assert layer.mean(torch.tensor([a]).double()).item() - mean == pytest.approx(off, abs=0.002)


@pytest.mark.parametrize(
    ("options", "units", "message"),
    [
        (
            {"chain": "concrete"},
            {},
            "`temperature` should be positive and finite. Found None.",
        ),
        (
            {"chain": "concrete", "temperature": 0.0},
            {},
            "`temperature` should be positive and finite. Found 0.0.",
        ),
        (
            {"chain": "sampled", "temperature": 0.5},
            {},
            "`temperature` should be None unless `chain` is 'concrete'. Found `chain` 'sampled'.",
        ),
        (
            {"chain": "concrete", "temperature": 0.5},
            {"hidden": "rectified"},
            "`chain` should not be 'concrete' for rectified units. Found 'concrete'.",
        ),
        (
            {"chain": "noisy_rectified"},
            {"visible": "gaussian"},
            "`chain` should be 'noisy_rectified' only for rectified units. Found Gaussian and Bernoulli units.",
        ),
    ],
)
def test_chains_that_units_do_not_have_are_refused(options, units, message):
    with pytest.raises(ValueError) as raised:
        gibbs(RBM(3, 2, **units), torch.zeros(2, 3), steps=1, **options)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"visible": "real"}, "`visible` should be one of 'bernoulli', 'gaussian', 'categorical'. Found 'real'."),
        ({"hidden": "gaussian"}, "`hidden` should be one of 'bernoulli', 'rectified'. Found 'gaussian'."),
        (
            {"categories": 3},
            "`categories` should be None unless units are categorical. Found 'bernoulli'.",
        ),
        ({"visible": "categorical"}, "`categories` should be an integer from 2. Found None."),
        ({"visible": "categorical", "categories": 1}, "`categories` should be an integer from 2. Found 1."),
    ],
)
def test_machines_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError) as raised:
        RBM(3, 2, **options)
    assert str(raised.value) == message


@pytest.mark.parametrize("size", [True, 0, 2.0, "3", None], ids=repr)
def test_sizes_that_are_no_numbers_of_units_are_refused(size):
    for argument, sizes in (("n_visible", (size, 2)), ("n_hidden", (2, size))):
        with pytest.raises(ValueError) as raised:
            RBM(*sizes)
        assert str(raised.value) == f"`{argument}` should be a positive integer. Found {size!r}."


def test_integers_of_numpy_are_sizes():
    rbm = RBM(np.int64(6), np.int32(4), visible="categorical", categories=np.int64(3))
    assert rbm.weights.shape == (18, 4)
    assert type(rbm.n_visible) is type(rbm.categories) is int


def test_what_is_no_tensor_is_called_so():
    rbm, array = RBM(3, 2), np.zeros((4, 3), dtype=np.float32)
    programs = {
        "visible": [rbm.free_energy, rbm.log_likelihood, rbm.statistics],
        "data": [rbm.start_at_base_rates, base_rate_bias],
    }
    for argument, attempts in programs.items():
        for attempt in attempts:
            with pytest.raises(TypeError) as raised:
                attempt(array)
            assert str(raised.value) == f"`{argument}` should be a tensor. Found ndarray."


# --- no rows, many rows -------------------------------------------------------------------------------------------


@each_pair
def test_functions_of_no_rows_have_none(pair):
    rbm = _rbm(pair)
    visible, hidden = torch.zeros(0, rbm.n_columns).double(), torch.zeros(0, pair.n_hidden).double()
    assert rbm.free_energy(visible).shape == rbm.energy(visible, hidden).shape == (0,)
    assert rbm.joint.hidden_free_energy(hidden).shape == (0,)
    for found in (rbm.hidden_mean(visible), rbm.sample_hidden(visible)):
        assert found.shape == hidden.shape
    for found in (rbm.visible_mean(hidden), rbm.sample_visible(hidden)):
        assert found.shape == visible.shape
    assert gibbs(rbm, visible, steps=2).shape == visible.shape
    if pair.hidden == "bernoulli" or pair.visible != "gaussian":
        assert rbm.log_likelihood(visible).shape == (0,)
    rbm.joint.visible.check(visible, "visible")
    with pytest.raises(ValueError, match=rf"`visible` should have shape \(N, {rbm.n_columns}\) with N > 0."):
        rbm.statistics(visible)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["bernoulli", "gaussian", "categorical"])
def test_base_rates_in_half_precision_count_every_row(kind, dtype):
    generator = seeded(1)
    rate = torch.tensor([0.001, 0.5, 0.999])
    data = (torch.rand(100_000, 3, generator=generator) < rate).double()
    if kind == "gaussian":
        data = (100 + torch.randn(100_000, 3, generator=generator)).double()
    elif kind == "categorical":
        state = torch.multinomial(rate, 100_000, replacement=True, generator=generator)
        data = nn.functional.one_hot(state, 3).double()
    data = data.to(dtype).double()  # the same numbers in both
    options = {"visible": kind} | ({"categories": 3} if kind == "categorical" else {})
    found, expected = (
        RBM(1 if kind == "categorical" else 3, 2, dtype=each, **options) for each in (dtype, torch.double)
    )
    found.start_at_base_rates(data.to(dtype))
    expected.start_at_base_rates(data)
    for name, parameter in expected.named_parameters():
        if name.startswith("visible"):
            rounded = parameter.to(dtype)
            assert rounded.any()
            torch.testing.assert_close(getattr(found, name), rounded, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_base_rate_bias_counts_in_float64(dtype):
    data = torch.ones(1000, 2, dtype=dtype)
    data[0] = 0
    found = base_rate_bias(data)
    assert found.dtype == dtype
    assert found[0].item() == pytest.approx(math.log(1000 / 2), rel=torch.finfo(dtype).eps)
    # More than float32 can count.
    many = base_rate_bias(torch.ones(1, 1, dtype=dtype).expand(2**24 + 2**20, 1))
    assert many.item() == pytest.approx(math.log(2**24 + 2**20 + 1), rel=torch.finfo(dtype).eps)
    assert base_rate_bias(data.bool()).tolist() == pytest.approx([math.log(1000 / 2)] * 2)


def test_variances_of_real_units_far_from_zero_are_theirs(monkeypatch):
    data = 1000 + torch.randn(500, 3, generator=seeded(1))
    expected = data.double().var(0, correction=0).log()
    for size in (2**22, 100):
        monkeypatch.setattr(layers_module, "_ROWS", size)
        rbm = RBM(3, 2, visible="gaussian")
        rbm.start_at_base_rates(data)
        torch.testing.assert_close(rbm.visible_log_variance.double(), expected, rtol=1e-6, atol=1e-6)
    rbm.start_at_base_rates(torch.full((7, 3), 0.1))  # a mean of equal numbers is not always that number
    assert not rbm.visible_log_variance.any()


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("bernoulli", 16.0, "`data` should be between 0 and 1. Found 16.0."),
        ("bernoulli", math.nan, "`data` should be finite. Found nan."),
        ("gaussian", math.inf, "`data` should be finite. Found inf."),
        ("categorical", 1.0, "`data` should have one 1 in each group of 3. Found [1.0, 1.0, 1.0]."),
    ],
)
def test_base_rates_of_impossible_data_are_refused(kind, value, message):
    rbm = RBM(3, 2, visible=kind, categories=3 if kind == "categorical" else None)
    data = torch.full((4, rbm.n_columns), value)
    before = copy.deepcopy(rbm.state_dict())
    with pytest.raises(ValueError) as raised:
        rbm.start_at_base_rates(data)
    assert str(raised.value) == message
    for name, parameter in rbm.named_parameters():
        assert torch.equal(parameter, before[name])
    if kind == "bernoulli":
        with pytest.raises(ValueError) as raised:
            base_rate_bias(data)
        assert str(raised.value) == message


def test_base_rates_of_no_rows_are_refused():
    with pytest.raises(ValueError) as raised:
        base_rate_bias(torch.zeros(0, 3))
    assert str(raised.value) == "`data` should have shape (N, V) with N > 0. Found (0, 3)."
