"""Surrogates of contrastive divergence for all pairs of units: expected energies, centring, fast weights.

The witnesses are written in NumPy, without autograd and without the code under test.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase, finite_differences, relative_error
from each import each
from scipy.special import entr, expit
from torch import Tensor, nn
from values import binary_states, seeded

from toolkit import compare, unblock
from toolkit.rbm import (
    CENTERED_COORDINATES,
    CENTERING_OFFSETS,
    FAST_WEIGHTS,
    HIDDEN_POSTERIORS,
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    RBM,
    BernoulliRBM,
    Offsets,
    cd_gradient,
    centered,
    centered_contrastive_divergence,
    centered_gradient,
    centering_offsets,
    contrastive_divergence,
    expected_energy,
    fast_persistent_contrastive_divergence,
    gibbs,
    likelihood_gradient,
    persistent_contrastive_divergence,
    train,
    updated_fast_weights,
)

PAIRS = [
    f"{visible}-{hidden}"
    for visible, hidden in itertools.product(("bernoulli", "gaussian", "categorical"), ("bernoulli", "rectified"))
]
DEVICES = ["cpu", pytest.param(ACCELERATOR, marks=pytest.mark.gpu)]
Tree = Mapping[str, Tensor]


# --- machines, data -----------------------------------------------------------------------------------------------


def _new(pair: str) -> RBM:
    visible, hidden = pair.split("-")
    units, categories = (2, 3) if visible == "categorical" else (4, None)
    return RBM(units, 3, visible=visible, hidden=hidden, categories=categories, dtype=torch.float64)


def _parameters(pair: str = "bernoulli-bernoulli") -> dict[str, nn.Parameter]:
    """Parameters without any symmetry: a transposed or swapped formula gives another number."""
    generator, scale = seeded(0), 0.4 if "gaussian" in pair else 1.0
    return {
        name: nn.Parameter(scale * torch.randn(value.shape, generator=generator, dtype=torch.float64))
        for name, value in _new(pair).named_parameters()
    }


def _machine(parameters: Tree, pair: str = "bernoulli-bernoulli") -> RBM:
    rbm = _new(pair)
    for name, parameter in parameters.items():
        setattr(rbm, name, parameter if isinstance(parameter, nn.Parameter) else nn.Parameter(parameter))
    return rbm


def _rows(pair: str, n: int, seed: int = 7) -> Tensor:
    generator = seeded(seed)
    match pair.split("-")[0]:
        case "bernoulli":
            return (torch.rand(n, 4, generator=generator, dtype=torch.float64) < 0.4).double()
        case "gaussian":
            return 1.5 * torch.randn(n, 4, generator=generator, dtype=torch.float64) - 0.5
        case _:
            states = torch.tensor([0.5, 0.2, 0.3]).multinomial(2 * n, replacement=True, generator=generator)
            return nn.functional.one_hot(states, 3).reshape(n, 6).double()


DATA = {pair: _rows(pair, 6) for pair in PAIRS}
STARTS = {pair: _rows(pair, 5, seed=8) for pair in PAIRS}  # persistent chains: not as many as data
OFFSETS = {
    pair: Offsets(torch.linspace(-0.3, 0.9, DATA[pair].shape[1]).double(), torch.tensor([0.2, 0.7, -0.4]).double())
    for pair in PAIRS
}
FAST = {pair: {name: 0.3 * value.detach().cos() for name, value in _parameters(pair).items()} for pair in PAIRS}


def _gradient(loss: Tensor, parameters: Tree) -> dict[str, Tensor]:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def _negative(rbm: RBM, start: Tensor, steps: int, fast: Tree | None = None) -> np.ndarray:
    """Run the chain step by step, with the draws of the machine's own layers."""
    generator, visible = seeded(1), start
    with torch.no_grad():
        joint = rbm.joint if fast is None else rbm.joint.shifted(fast)
        for _ in range(steps):
            visible = joint.sample_visible(joint.sample_hidden(visible, generator), generator)
    return visible.numpy()


# --- witnesses ----------------------------------------------------------------------------------------------------


def _numpy(parameters: Tree) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def _hidden_moments(x: np.ndarray, pair: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the hidden units given their input, from the definition of their weights."""
    if pair.endswith("bernoulli"):
        mean = expit(x)
        return mean, mean * (1 - mean)
    n = np.arange(60.0)
    ways = np.cumsum(np.log1p(-np.exp(-n[1:])))
    log_weight = x[..., None] * n - n**2 / 2 - np.concatenate([[0.0], ways])
    weight = np.exp(log_weight - log_weight.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    mean = weight @ n
    return mean, (weight * (n - mean[..., None]) ** 2).sum(-1)


def _input(parameters: Tree, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The visible units' statistic, and the input of the hidden ones with their bias."""
    p = _numpy(parameters)
    statistic = visible * np.exp(-p.get("visible_log_variance", np.zeros(visible.shape[1])))
    return statistic, statistic @ p["weights"] + p["hidden_bias"]


def _pull_back(parameters: Tree, visible: np.ndarray, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Pull a cotangent of the hidden units' inputs back to the parameters."""
    p, (statistic, _) = _numpy(parameters), _input(parameters, visible)
    pulled = {
        "weights": statistic.T @ cotangent,
        "visible_bias": np.zeros_like(p["visible_bias"]),
        "hidden_bias": cotangent.sum(0),
    }
    if "visible_log_variance" in p:
        pulled["visible_log_variance"] = -(statistic * (cotangent @ p["weights"].T)).sum(0)
    return pulled


def _free_energy_gradient(parameters: Tree, visible: np.ndarray, pair: str) -> dict[str, np.ndarray]:
    """Gradient of the mean free energy by the parameters."""
    p, (_, x) = _numpy(parameters), _input(parameters, visible)
    mean, _ = _hidden_moments(x, pair)
    found = _pull_back(parameters, visible, -mean / len(visible))
    if "visible_log_variance" in p:
        distance, precision = visible - p["visible_bias"], np.exp(-p["visible_log_variance"])
        found["visible_bias"] = -(distance * precision).mean(0)
        found["visible_log_variance"] = found["visible_log_variance"] - (distance**2 * precision / 2).mean(0)
    else:
        found["visible_bias"] = -visible.mean(0)
    return found


def _add(*trees: Mapping[str, np.ndarray], signs: tuple[float, ...] = (1, 1, 1, 1)) -> dict[str, np.ndarray]:
    return {name: sum(sign * tree[name] for sign, tree in zip(signs, trees, strict=False)) for name in trees[0]}


def _tensors(tree: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tree.items()}


def _cd_witness(parameters: Tree, data: np.ndarray, negative: np.ndarray, pair: str) -> dict[str, np.ndarray]:
    parts = (_free_energy_gradient(parameters, rows, pair) for rows in (data, negative))
    return _add(*parts, signs=(1, -1))


def _centred_witness(plain: dict[str, np.ndarray], mu: np.ndarray, lam: np.ndarray) -> dict[str, np.ndarray]:
    """Centre a gradient by its definition, one number after the other."""
    w, b, c = plain["weights"].copy(), plain["visible_bias"].copy(), plain["hidden_bias"].copy()
    for i, j in np.ndindex(w.shape):
        w[i, j] -= plain["visible_bias"][i] * lam[j] + mu[i] * plain["hidden_bias"][j]
    for i, j in np.ndindex(w.shape):
        b[i] -= w[i, j] * lam[j]
        c[j] -= w[i, j] * mu[i]
    return {**plain, "weights": w, "visible_bias": b, "hidden_bias": c}


def _own_offsets(parameters: Tree, data: np.ndarray, pair: str) -> tuple[np.ndarray, np.ndarray]:
    statistic, x = _input(parameters, data)
    return statistic.mean(0), _hidden_moments(x, pair)[0].mean(0)


# --- the block contract -------------------------------------------------------------------------------------------


def _posterior_case(pair: str) -> BlockCase:
    def negative(parameters: Tree) -> np.ndarray:
        return _negative(_machine(parameters, pair), DATA[pair], 2)

    def loss(parameters: Tree) -> Tensor:
        rbm = _machine(parameters, pair)
        return contrastive_divergence(rbm, DATA[pair], steps=2, energy="expected", generator=seeded(1))

    def blocked(parameters: Tree) -> dict[str, Tensor]:
        return _tensors(_cd_witness(parameters, DATA[pair].numpy(), negative(parameters), pair))

    def entropy_gradient(parameters: Tree, visible: np.ndarray) -> dict[str, np.ndarray]:
        _, x = _input(parameters, visible)
        return _pull_back(parameters, visible, -x * _hidden_moments(x, pair)[1] / len(visible))

    def opened(parameters: Tree) -> dict[str, Tensor]:
        parts = (entropy_gradient(parameters, rows) for rows in (DATA[pair].numpy(), negative(parameters)))
        return _tensors(_add(_numpy(blocked(parameters)), *parts, signs=(1, 1, -1)))

    return BlockCase(
        id=f"expected-energy-{pair}",
        block=HIDDEN_POSTERIORS,
        parameters=lambda: _parameters(pair),
        loss=loss,
        blocked=blocked,
        opened=opened,
        tolerance=1e-12,
    )


def _centred_cases(pair: str) -> list[BlockCase]:
    data = DATA[pair].numpy()

    def plain(parameters: Tree) -> dict[str, np.ndarray]:
        return _cd_witness(parameters, data, _negative(_machine(parameters, pair), DATA[pair], 2), pair)

    def loss(parameters: Tree) -> Tensor:
        rbm = _machine(parameters, pair)
        return centered_contrastive_divergence(rbm, DATA[pair], steps=2, generator=seeded(1))

    def blocked(parameters: Tree) -> dict[str, Tensor]:
        return _tensors(_centred_witness(plain(parameters), *_own_offsets(parameters, data, pair)))

    def with_offsets_open(parameters: Tree) -> dict[str, Tensor]:
        """With the biases of the centred machine held, its plain biases move with the offsets: -W dlambda, -W^T dmu."""
        p, gradient, (statistic, x) = _numpy(parameters), plain(parameters), _input(parameters, data)
        through_hidden = -(gradient["visible_bias"] @ p["weights"]) * _hidden_moments(x, pair)[1] / len(data)
        leak = _pull_back(parameters, data, through_hidden)
        if "visible_log_variance" in p:
            leak["visible_log_variance"] += (p["weights"] @ gradient["hidden_bias"]) * statistic.mean(0)
        return _tensors(_add(_numpy(blocked(parameters)), leak))

    common = {"parameters": lambda: _parameters(pair), "loss": loss, "blocked": blocked, "tolerance": 1e-12}
    return [
        BlockCase(id=f"offsets-{pair}", block=CENTERING_OFFSETS, opened=with_offsets_open, **common),
        BlockCase(
            id=f"coordinates-{pair}",
            block=CENTERED_COORDINATES,
            opened=lambda parameters: _tensors(plain(parameters)),
            **common,
        ),
    ]


RATE, DECAY = 0.3, 0.8


def _fast_updates(parameters: Tree, chain: str = "sampled") -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Two updates: their losses, their negative samples, and the fast weights after them, with all their graphs."""
    rbm, generator, data, chains = _machine(parameters), seeded(1), DATA[PAIRS[0]], STARTS[PAIRS[0]]
    fast, losses, negatives = {name: torch.zeros_like(value) for name, value in parameters.items()}, [], []
    for _ in range(2):
        loss, chains = fast_persistent_contrastive_divergence(
            rbm, fast, data, chains, steps=1, chain=chain, generator=generator
        )
        found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        gradients = dict(zip(parameters, found, strict=True))
        fast = updated_fast_weights(fast, gradients, learning_rate=RATE, decay=DECAY)
        losses.append(loss)
        negatives.append(chains)
    return losses, negatives, fast


def _fast_loss(parameters: Tree, chain: str = "sampled") -> Tensor:
    """Both surrogates, and how the overlaid machine sees the data: a user's own monitor."""
    losses, _, fast = _fast_updates(parameters, chain)
    return losses[0] + losses[1] + _machine(parameters).joint.shifted(fast).free_energy(DATA[PAIRS[0]]).mean()


def _fast_blocked(parameters: Tree) -> dict[str, Tensor]:
    _, negatives, fast = _fast_updates(parameters)
    data, shifted = DATA[PAIRS[0]].numpy(), {name: parameters[name] + fast[name] for name in parameters}
    parts = [_cd_witness(parameters, data, negative.detach().numpy(), PAIRS[0]) for negative in negatives]
    return _tensors(_add(*parts, _free_energy_gradient(shifted, data, PAIRS[0])))


def _slope_along(parameters: Tree, visible: np.ndarray, along: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradient of the inner product of `along` with the gradient of the mean free energy: Hessian times vector."""
    _, x = _input(parameters, visible)
    _, variance = _hidden_moments(x, PAIRS[0])
    reach = visible @ along["weights"] + along["hidden_bias"]
    return _pull_back(parameters, visible, -reach * variance / len(visible))


def _fast_opened(parameters: Tree) -> dict[str, Tensor]:
    _, negatives, fast = _fast_updates(parameters)
    data, shifted = DATA[PAIRS[0]].numpy(), {name: parameters[name] + fast[name] for name in parameters}
    slope = _free_energy_gradient(shifted, data, PAIRS[0])
    total = _numpy(_fast_blocked(parameters))
    for share, negative in zip((-RATE * DECAY, -RATE), negatives, strict=True):
        parts = (_slope_along(parameters, rows, slope) for rows in (data, negative.detach().numpy()))
        total = _add(total, *parts, signs=(1, share, -share))
    return _tensors(total)


LEAKY_PAIRS = ["bernoulli-bernoulli", "gaussian-rectified", "categorical-bernoulli"]

BLOCK_CASES: list[BlockCase] = [
    *(_posterior_case(pair) for pair in LEAKY_PAIRS),
    *(case for pair in LEAKY_PAIRS for case in _centred_cases(pair)),
    BlockCase(
        id="fast-weights",
        block=FAST_WEIGHTS,
        parameters=_parameters,
        loss=_fast_loss,
        blocked=_fast_blocked,
        opened=_fast_opened,
        tolerance=1e-12,
    ),
]


# --- every surrogate, every pair of units -------------------------------------------------------------------------


def _surrogates(pair: str) -> dict[str, tuple[Callable[..., Tensor], str, bool]]:
    """Name -> the surrogate of a machine on a device; where its chains start, and whether they see fast weights."""

    def put(rows: Tensor, device: str) -> Tensor:
        return rows.to(device)

    def cd(rbm, device, generator, **options):
        return contrastive_divergence(rbm, put(DATA[pair], device), steps=2, generator=generator, **options)

    def pcd(rbm, device, generator, **options):
        rows = put(DATA[pair], device), put(STARTS[pair], device)
        return persistent_contrastive_divergence(rbm, *rows, steps=2, generator=generator, **options)[0]

    def fast(rbm, device, generator, **options):
        overlay = {name: value.to(device) for name, value in FAST[pair].items()}
        rows = put(DATA[pair], device), put(STARTS[pair], device)
        return fast_persistent_contrastive_divergence(rbm, overlay, *rows, steps=2, generator=generator, **options)[0]

    return {"cd": (cd, DATA[pair], False), "pcd": (pcd, STARTS[pair], False), "fast": (fast, STARTS[pair], True)}


@pytest.mark.parametrize("energy", ["free", "expected"])
@pytest.mark.parametrize("coordinates", ["plain", "centred"])
@pytest.mark.parametrize("surrogate", ["cd", "pcd", "fast"])
@each("pair", PAIRS)
def test_blocked_gradient_is_the_closed_form(pair, surrogate, coordinates, energy):
    parameters = _parameters(pair)
    rbm = _machine(parameters, pair)
    loss, start, overlaid = _surrogates(pair)[surrogate]
    negative = _negative(rbm, start, 2, FAST[pair] if overlaid else None)
    offsets = OFFSETS[pair]
    machine = centered(rbm, offsets) if coordinates == "centred" else rbm
    found = _gradient(loss(machine, "cpu", seeded(1), energy=energy), parameters)
    closed = cd_gradient(rbm, DATA[pair], torch.from_numpy(negative))
    expected = _cd_witness(parameters, DATA[pair].numpy(), negative, pair)
    if coordinates == "centred":
        closed = centered_gradient(closed, offsets)
        expected = _centred_witness(expected, offsets.visible.numpy(), offsets.hidden.numpy())
    assert relative_error(found, _tensors(expected)) < 1e-12
    assert relative_error(closed, _tensors(expected)) < 1e-12


@pytest.mark.portable
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_closed_form_holds_on_devices_and_in_types(pair, dtype, device):
    rbm = _machine(_parameters(pair), pair).to(device, dtype)
    data = DATA[pair].to(device, dtype)
    loss = centered_contrastive_divergence(rbm, data, steps=1, generator=seeded(1, device=device))
    found = _gradient(loss, dict(rbm.named_parameters()))
    with torch.no_grad():
        generator = seeded(1, device=device)
        negative = rbm.sample_visible(rbm.sample_hidden(data, generator=generator), generator=generator)
    expected = centered_gradient(cd_gradient(rbm, data, negative), centering_offsets(rbm, data))
    assert all(value.dtype == dtype and value.device.type == device for value in expected.values())
    # Two means, up to three times as large as their difference, of sums of some ten terms: up to 13 eps were found.
    assert relative_error(found, expected) < 500 * torch.finfo(dtype).eps


@pytest.mark.parametrize("surrogate", ["cd", "pcd", "fast"])
def test_chains_may_be_of_any_kind(surrogate):
    """Relaxed draws for the surrogate and for the closed form; they do leak, so that their gradient is not the same."""
    pair = PAIRS[0]
    parameters, relaxed = _parameters(pair), {"chain": "concrete", "temperature": 0.5}
    rbm = _machine(parameters, pair)
    loss, start, overlaid = _surrogates(pair)[surrogate]
    with torch.no_grad():
        joint = rbm.joint.shifted(FAST[pair]) if overlaid else rbm.joint
        negative = gibbs(joint, start, steps=2, generator=seeded(1), **relaxed)
    expected = centered_gradient(cd_gradient(rbm, DATA[pair], negative), OFFSETS[pair])

    def gradient() -> dict[str, Tensor]:
        return _gradient(loss(centered(rbm, OFFSETS[pair]), "cpu", seeded(1), **relaxed), parameters)

    assert relative_error(gradient(), expected) < 1e-12
    with unblock(NEGATIVE_SAMPLES):
        assert relative_error(gradient(), expected) > 0.1


# --- expected energies --------------------------------------------------------------------------------------------


def test_expected_energy_is_the_free_energy_and_the_entropy():
    rbm, data = _machine(_parameters()), DATA[PAIRS[0]]
    mean = expit(_input(dict(rbm.named_parameters()), data.numpy())[1])
    entropy = (entr(mean) + entr(1 - mean)).sum(1)
    difference = (expected_energy(rbm, data) - rbm.free_energy(data)).detach().numpy()
    np.testing.assert_allclose(difference, entropy, rtol=1e-13)
    energy = rbm.energy(data, torch.from_numpy(mean)).detach()
    np.testing.assert_allclose(expected_energy(rbm, data).detach(), energy, rtol=1e-13)


@pytest.mark.parametrize("pair", PAIRS)
def test_expected_energy_has_the_free_energys_slope_in_the_units_too(pair):
    rbm, data = _machine(_parameters(pair), pair), DATA[pair].clone().requires_grad_()
    found, expected = (torch.autograd.grad(f(data).sum(), data)[0] for f in (lambda v: expected_energy(rbm, v), rbm))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_open_posteriors_point_elsewhere():
    """The leak is no rounding: at this point it turns the update by more than ten degrees."""
    parameters = _parameters()
    comparison = compare(
        lambda: contrastive_divergence(
            _machine(parameters), DATA[PAIRS[0]], steps=1, energy="expected", generator=seeded(1)
        ),
        parameters,
    )
    effect = {each.name: each for each in comparison.effects}[HIDDEN_POSTERIORS.name]
    assert effect.cosine < 0.985
    assert effect.verdict.kind == "partial"


# --- centring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_centred_machine_is_the_same_bit_for_bit(pair):
    rbm = _machine(_parameters(pair), pair)
    joint, same = rbm.joint, centered(rbm, OFFSETS[pair])
    assert torch.equal(same.weights, joint.weights)
    assert torch.equal(same.visible.bias, joint.visible.bias)
    assert torch.equal(same.hidden.bias, joint.hidden.bias)
    assert torch.equal(same.free_energy(DATA[pair]), joint.free_energy(DATA[pair]))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_centred_step_is_a_step_of_a_machine_with_offsets_in_its_energy(pair):
    """Descend on (W, b', c') of E = -b'v - c'h - (s(v) - mu)' W (h - lambda), and come back to (W, b, c)."""
    parameters, offsets, rate = _parameters(pair), OFFSETS[pair], 0.1
    rbm = _machine(parameters, pair)
    negative = torch.from_numpy(_negative(rbm, DATA[pair], 1))
    mu, lam = offsets.visible, offsets.hidden
    with torch.no_grad():
        leaves = {name: value.clone() for name, value in parameters.items()}
        leaves["visible_bias"] += leaves["weights"] @ lam
        leaves["hidden_bias"] += leaves["weights"].mT @ mu
    leaves = {name: value.requires_grad_() for name, value in leaves.items()}

    def back(centred: Tree) -> dict[str, Tensor]:
        b = centred["visible_bias"] - centred["weights"] @ lam
        return {**centred, "visible_bias": b, "hidden_bias": centred["hidden_bias"] - centred["weights"].mT @ mu}

    def free_energy(visible: Tensor) -> Tensor:
        own = {name: parameter.detach() for name, parameter in parameters.items()}
        shift = {name: value - own[name] for name, value in back(leaves).items()}
        return rbm.joint.shifted(shift).free_energy(visible).mean()

    gradient = _gradient(free_energy(DATA[pair]) - free_energy(negative), leaves)
    after = back({name: leaves[name].detach() - rate * gradient[name] for name in leaves})
    step = centered_gradient(cd_gradient(rbm, DATA[pair], negative), offsets)
    assert relative_error({name: value - rate * step[name] for name, value in parameters.items()}, after) < 1e-12


def _step(parameters: Tree, data: Tensor, negative: Tensor, centre: bool, pair: str) -> dict[str, Tensor]:
    rbm = _machine(parameters, pair)
    gradient = cd_gradient(rbm, data, negative)
    return centered_gradient(gradient, centering_offsets(rbm, data)) if centre else gradient


FLIPPED = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)


def _flip_visible(parameters: Tree) -> dict[str, Tensor]:
    """The parameters with which the flipped units have the old distribution."""
    sign, w, b, c = 1 - 2 * FLIPPED, *(parameters[name] for name in ("weights", "visible_bias", "hidden_bias"))
    return {"weights": sign[:, None] * w, "visible_bias": sign * b, "hidden_bias": c + FLIPPED @ w}


def _flip_hidden(parameters: Tree) -> dict[str, Tensor]:
    flipped = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    sign, w, b, c = 1 - 2 * flipped, *(parameters[name] for name in ("weights", "visible_bias", "hidden_bias"))
    return {"weights": w * sign, "visible_bias": b + w @ flipped, "hidden_bias": sign * c}


SHIFT = torch.tensor([3.0, -1.0, 0.0, 2.0], dtype=torch.float64)


def _shift(parameters: Tree) -> dict[str, Tensor]:
    precision = (-parameters["visible_log_variance"]).exp()
    c = parameters["hidden_bias"] - (SHIFT * precision) @ parameters["weights"]
    return {**parameters, "visible_bias": parameters["visible_bias"] + SHIFT, "hidden_bias": c}


INVARIANCES = {
    "visible-flipped": ("bernoulli-bernoulli", _flip_visible, lambda v: FLIPPED + (1 - 2 * FLIPPED) * v),
    "hidden-flipped": ("bernoulli-bernoulli", _flip_hidden, lambda v: v),
    "gaussian-shifted": ("gaussian-bernoulli", _shift, lambda v: v + SHIFT),
    "gaussian-shifted-rectified": ("gaussian-rectified", _shift, lambda v: v + SHIFT),
}


@pytest.mark.parametrize("name", INVARIANCES)
def test_only_the_centred_update_commutes_with_flips_and_shifts(name):
    """Change the data and update, or update and change the machine: the machines are the same."""
    pair, change, change_rows = INVARIANCES[name]
    parameters = {key: value.detach() for key, value in _parameters(pair).items()}
    data, negative = DATA[pair], torch.from_numpy(_negative(_machine(parameters, pair), DATA[pair], 2))
    outcomes = {}
    for centre in (True, False):
        step = _step(parameters, data, negative, centre, pair)
        first = change({key: parameters[key] - 0.2 * step[key] for key in parameters})
        changed = change(parameters)
        step = _step(changed, change_rows(data), change_rows(negative), centre, pair)
        second = {key: changed[key] - 0.2 * step[key] for key in changed}
        # The variance's step is the uncentred one, and its coordinate is bound to the biases when these are shifted.
        outcomes[centre] = relative_error(
            {key: first[key] for key in ("weights", "visible_bias")},
            {key: second[key] for key in ("weights", "visible_bias")},
        )
    assert outcomes[True] < 1e-13
    assert outcomes[False] > 0.01


def test_sliding_offsets():
    rbm, data, previous = _machine(_parameters()), DATA[PAIRS[0]], OFFSETS[PAIRS[0]]
    mu, lam = _own_offsets(dict(rbm.named_parameters()), data.numpy(), PAIRS[0])
    found = centering_offsets(rbm, data, previous=previous, rate=0.25)
    np.testing.assert_allclose(found.visible, 0.75 * previous.visible.numpy() + 0.25 * mu, rtol=1e-14)
    np.testing.assert_allclose(found.hidden, 0.75 * previous.hidden.numpy() + 0.25 * lam, rtol=1e-14)
    assert not found.hidden.requires_grad


def test_centred_exact_gradient_is_that_of_the_likelihood_through_the_centred_machine():
    parameters, offsets = _parameters(), OFFSETS[PAIRS[0]]
    rbm, data = _machine(parameters), DATA[PAIRS[0]]
    states = torch.from_numpy(binary_states(4))
    machine = centered(rbm, offsets)
    loss = machine.free_energy(data).mean() + (-machine.free_energy(states)).logsumexp(0)
    expected = centered_gradient(likelihood_gradient(rbm, data), offsets)
    assert relative_error(_gradient(loss, parameters), expected) < 1e-13


# --- fast weights -------------------------------------------------------------------------------------------------


def test_without_fast_weights_it_is_persistent_contrastive_divergence():
    parameters, pair = _parameters(), PAIRS[0]
    rbm, rows = _machine(parameters), (DATA[pair], STARTS[pair])
    plain, chains = persistent_contrastive_divergence(rbm, *rows, steps=3, generator=seeded(1))
    for fast in ({}, {name: torch.zeros_like(value) for name, value in parameters.items()}):
        loss, moved = fast_persistent_contrastive_divergence(rbm, fast, *rows, steps=3, generator=seeded(1))
        assert torch.equal(loss, plain)
        assert torch.equal(moved, chains)


def test_fast_weights_raise_the_energy_where_the_chains_are():
    parameters, pair = _parameters(), PAIRS[0]
    rbm, fast = _machine(parameters), {name: torch.zeros_like(value) for name, value in parameters.items()}
    chains = torch.ones(5, 4, dtype=torch.float64)
    gradient = cd_gradient(rbm, DATA[pair], chains)
    after = updated_fast_weights(fast, gradient, learning_rate=0.5)

    def gap(overlay: Tree) -> float:
        joint = rbm.joint.shifted(overlay)
        return (joint.free_energy(chains).mean() - joint.free_energy(DATA[pair]).mean()).item()

    assert gap(after) > gap(fast) + 0.1
    forgotten = updated_fast_weights(after, fast, learning_rate=0.5)  # a gradient of zero
    assert relative_error(forgotten, {name: 0.95 * value for name, value in after.items()}) < 1e-15


def test_everything_open_is_the_whole_derivative_through_fast_weights():
    """Mean-field chains overlaid by what the first update taught: finite differences of the whole program."""

    def loss(parameters: Tree) -> Tensor:
        with torch.enable_grad():  # its inner gradients need a graph also where finite differences need none
            return _fast_loss({name: nn.Parameter(value) for name, value in parameters.items()}, "mean_field")

    with unblock(NEGATIVE_SAMPLES, PERSISTENT_CHAINS, FAST_WEIGHTS):
        parameters = _parameters()
        found = _gradient(_fast_loss(parameters, "mean_field"), parameters)
        numerical = finite_differences(loss, _parameters())
    assert relative_error(found, numerical) < 1e-8
    with unblock(NEGATIVE_SAMPLES, PERSISTENT_CHAINS):
        parameters = _parameters()
        assert relative_error(_gradient(_fast_loss(parameters, "mean_field"), parameters), numerical) > 0.01


def test_open_fast_weights_keep_the_graph_of_every_update():
    def nodes_after(updates: int) -> int:
        parameters = _parameters()
        rbm, fast = _machine(parameters), {name: torch.zeros_like(value) for name, value in parameters.items()}
        for _ in range(updates):
            loss = contrastive_divergence(rbm, DATA[PAIRS[0]], steps=1, generator=seeded(1))
            found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            fast = updated_fast_weights(fast, dict(zip(parameters, found, strict=True)), learning_rate=0.1)
        stack, seen = [value.grad_fn for value in fast.values()], set()
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [following for following, _ in node.next_functions]
        return len(seen)

    assert nodes_after(3) == 0
    with unblock(FAST_WEIGHTS):
        one, two, three = (nodes_after(updates) for updates in (1, 2, 3))
    assert three - two == two - one > 5


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (
            lambda rbm, data: contrastive_divergence(rbm, data, steps=1, energy="mean"),
            ValueError,
            "`energy` should be one of 'free', 'expected'. Found 'mean'.",
        ),
        (
            lambda rbm, data: contrastive_divergence(rbm.joint, data[:, :2], steps=1),
            ValueError,
            "`data` should have shape (N, 4) with N > 0. Found (6, 2).",
        ),
        *(
            (
                lambda rbm, data, wrong=wrong, attempt=attempt: attempt(rbm.joint, wrong(data)),
                error,
                f"`{argument}` should {message}",
            )
            for argument, attempt in (
                ("data", lambda joint, data: contrastive_divergence(joint, data, steps=1)),
                ("visible", lambda joint, visible: gibbs(joint, visible, steps=1)),
                ("visible", expected_energy),
            )
            for wrong, error, message in (
                (lambda data: data.float(), TypeError, "have the parameters' type torch.float64. Found torch.float32."),
                (lambda data: data.numpy(), TypeError, "be a tensor. Found ndarray."),
                (lambda data: data[:, :2], ValueError, "have shape ("),
            )
        ),
        (
            lambda rbm, data: expected_energy(rbm, data[:, :2]),
            ValueError,
            "`visible` should have shape (*, 4). Found (6, 2).",
        ),
        (
            lambda rbm, data: centering_offsets(rbm, data, rate=1.5),
            ValueError,
            "`rate` should be from 0 to 1. Found 1.5.",
        ),
        (
            lambda rbm, data: centered(rbm, Offsets(torch.zeros(4), torch.zeros(4))),
            ValueError,
            "`offsets.hidden` should have shape (3,). Found (4,).",
        ),
        (
            lambda rbm, data: centered_contrastive_divergence(rbm, data.float(), steps=1),
            TypeError,
            "`data` should have the parameters' type torch.float64. Found torch.float32.",
        ),
        (
            lambda rbm, data: fast_persistent_contrastive_divergence(
                rbm, {"weight": torch.zeros(4, 3)}, data, data, steps=1
            ),
            ValueError,
            "`fast` should have names of parameters, weights, visible_bias, hidden_bias. Found weight.",
        ),
        (
            lambda rbm, data: updated_fast_weights({}, {}, learning_rate=0.1, decay=-0.1),
            ValueError,
            "`decay` should be from 0 to 1. Found -0.1.",
        ),
    ],
)
def test_a_clear_error(attempt, error, message):
    with pytest.raises(error) as raised:
        attempt(_machine(_parameters()), DATA[PAIRS[0]])
    assert message in str(raised.value)


def test_gradients_are_not_small_where_they_are_compared():
    """Relative errors below 1e-12 say something only if the gradients are of ordinary size."""
    for pair in PAIRS:
        rbm = _machine(_parameters(pair), pair)
        gradient = cd_gradient(rbm, DATA[pair], torch.from_numpy(_negative(rbm, DATA[pair], 2)))
        assert all(0.01 < math.sqrt(float(value.square().sum())) < 100 for value in gradient.values())


def test_an_object_in_place_of_a_machine_or_a_trainer_is_named():
    with pytest.raises(TypeError, match=r"`rbm` should be an RBM or a Joint. Found an object of type BernoulliRBM."):
        contrastive_divergence(BernoulliRBM(3), torch.rand(5, 6), steps=1)
    with pytest.raises(TypeError, match=r"`trainer` should be a FusedTrainer. Found an object of type RBM."):
        train(RBM(6, 3), torch.rand(5, 6), epochs=1, learning_rate=0.1, generator=None)


def test_sparse_data_are_refused():
    rbm, data = RBM(3, 2), torch.eye(3)
    for call in (contrastive_divergence, partial(persistent_contrastive_divergence, chains=data)):
        with pytest.raises(TypeError, match=r"`data` should be a dense tensor. Found torch.sparse_coo"):
            call(rbm, data=data.to_sparse(), steps=1)


@pytest.mark.parametrize(
    ("value", "message"), [(2.0, "between 0 and 1. Found 2"), (-0.5, "between 0 and 1"), (math.nan, "finite")]
)
def test_data_that_binary_units_cannot_have_are_refused(value, message):
    rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
    data = torch.tensor([[0.0, 1.0, value], [1.0, 0.5, 0.0]])
    for machine in (rbm, rbm.joint):
        with pytest.raises(ValueError, match=f"^`data` should be {message}"):
            contrastive_divergence(machine, data, steps=1)
        with pytest.raises(ValueError, match=f"^`data` should be {message}"):
            persistent_contrastive_divergence(machine, data, torch.zeros(2, 3), steps=1)
