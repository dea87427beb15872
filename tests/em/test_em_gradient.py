"""Generalised EM by optimisers: EM's optimum with the block, another without it, and nobody else's gradients."""

import math
from functools import partial

import pytest
import torch
from test_em_acceleration import first_of
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, Optimizer
from values import seeded

from experiments.em import principal_components
from experiments.em_separation import population
from toolkit import datasets, unblock
from toolkit.em import (
    RESPONSIBILITIES,
    GaussianParameters,
    e_step,
    from_unconstrained,
    log_likelihood,
    surrogate,
    to_unconstrained,
)
from toolkit.em.engine.acceleration import maximise_likelihood
from toolkit.em.gradient import gradient_em
from toolkit.em.models import PoissonMixture

F64 = torch.float64


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def overlapping(n: int = 400, seed: int = 1) -> Tensor:
    return datasets.two_gaussians(n, separation=2.0, generator=seeded(seed)).inputs


DATA = {
    "iris": (standardised(datasets.iris().inputs), 3, "full"),
    "wine": (standardised(principal_components(datasets.wine().inputs, 4)), 3, "tied"),
    "digits": (standardised(principal_components(datasets.digits().inputs, 5)), 4, "diag"),
    "overlapping": (overlapping(), 2, "full"),
}
# Optimiser, E-steps, steps for each of them.
OPTIMISERS = {
    "Adam": (partial(Adam, lr=0.02), 600, 1),
    "SGD": (partial(SGD, lr=0.05, momentum=0.95), 700, 1),
    "L-BFGS": (partial(LBFGS, line_search_fn="strong_wolfe", max_iter=8), 150, 1),
    "Adam, three inner steps": (partial(Adam, lr=0.02), 250, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "name"), [("iris", name) for name in OPTIMISERS] + [(data, "Adam") for data in DATA if data != "iris"]
)
def test_optimisers_arrive_where_em_does(data, name):
    x, k, kind = DATA[data]
    optimizer, steps, inner_steps = OPTIMISERS[name]
    first = first_of(x, k, kind)
    if data == "digits":  # between two maxima, in which two methods may end: five steps of EM decide for one
        first = maximise_likelihood(first, x, accelerate="none", tol=0, max_iter=5).parameters
    em = maximise_likelihood(first, x, tol=1e-9)
    found = gradient_em(first, x, optimizer=optimizer, steps=steps, inner_steps=inner_steps)
    assert abs(found.log_likelihood - em.log_likelihood) < 1e-4
    assert found.log_likelihood > log_likelihood(first, x) + 1e-3
    assert float(log_likelihood(found.parameters, x)) == pytest.approx(found.log_likelihood, abs=1e-12)


def test_first_step_goes_along_the_gradient_of_the_likelihood():
    x, k, kind = DATA["iris"]
    first, weight = first_of(x, k, kind), torch.arange(150, dtype=F64)
    found = gradient_em(first, x, optimizer=partial(SGD, lr=0.01), steps=1, sample_weight=weight)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in to_unconstrained(first).items()}
    log_likelihood(from_unconstrained(leaves, kind), x, weight).backward()
    expected = from_unconstrained({name: leaf + 0.01 * leaf.grad for name, leaf in leaves.items()}, kind)
    for attribute in ("log_weights", "means", "precisions_cholesky"):
        assert torch.allclose(getattr(found.parameters, attribute), getattr(expected, attribute), rtol=1e-12)
    assert found.log_likelihood > found.history[0]


def test_inner_steps_hold_the_responsibilities():
    x, k, kind = DATA["iris"]
    first = first_of(x, k, kind)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in to_unconstrained(first).items()}
    owner = SGD(list(leaves.values()), lr=0.05)
    held = e_step(first, x)[0]
    for _ in range(4):
        owner.zero_grad()
        (-(held * from_unconstrained(leaves, kind).log_joint(x)).sum(-1).mean()).backward()
        owner.step()
    found = gradient_em(first, x, optimizer=partial(SGD, lr=0.05), steps=1, inner_steps=4)
    assert torch.allclose(found.parameters.means, leaves["means"], rtol=1e-12)
    renewed = gradient_em(first, x, optimizer=partial(SGD, lr=0.05), steps=4)
    assert not torch.allclose(found.parameters.means, renewed.parameters.means, rtol=1e-6)


def test_lbfgs_to_the_end_is_the_m_step():
    x, k, kind = DATA["iris"]
    first = first_of(x, k, kind)
    lbfgs = partial(LBFGS, line_search_fn="strong_wolfe", max_iter=1000, tolerance_grad=1e-10, tolerance_change=0)
    found = gradient_em(first, x, optimizer=lbfgs, steps=2)
    expected = maximise_likelihood(first, x, accelerate="none", tol=0, max_iter=2)
    assert found.history == pytest.approx(expected.history, abs=1e-7)
    assert torch.allclose(found.parameters.means, expected.parameters.means, atol=1e-3)


def test_lbfgs_forgets_the_curvature_of_the_last_objective():
    x, k, kind = DATA["iris"]
    first, lbfgs = first_of(x, k, kind), partial(LBFGS, lr=0.1, max_iter=2)
    twice = gradient_em(first, x, optimizer=lbfgs, steps=2)
    once = gradient_em(first, x, optimizer=lbfgs, steps=1)
    again = gradient_em(once.parameters, x, optimizer=lbfgs, steps=1)
    assert twice.history == pytest.approx((*once.history, again.history[1]), abs=1e-12)
    assert twice.history[0] < twice.history[1] < twice.history[2]


def weakest(optimizer: Optimizer) -> float:
    """Return the smallest weight among the leaves of an optimiser, whose first are the log-weights."""
    return float(optimizer.param_groups[0]["params"][0].detach().softmax(0).min())


@pytest.mark.portable
@pytest.mark.parametrize("name", ["Adam", "L-BFGS"])
def test_without_the_block_an_overlapping_component_dies(name):
    """Of all samples that there could be, by quadrature: which of a few samples lose one depends on the draw."""
    data, owners = population([2.0], 241), []
    x, weight = data.points[0], data.probabilities[0]

    def optimizer(leaves: list[Tensor]) -> Optimizer:
        made = Adam(leaves, lr=0.05) if name == "Adam" else LBFGS(leaves, max_iter=20, line_search_fn="strong_wolfe")
        owners.append(made)
        return made

    aside = GaussianParameters.from_covariances(  # equal components would stay equal
        weights=torch.tensor([0.5, 0.5], dtype=F64),
        means=torch.tensor([[-1.1], [0.9]], dtype=F64),
        covariances=torch.ones(2, dtype=F64),
        covariance_type="spherical",
    )
    best = maximise_likelihood(aside, x, sample_weight=weight, tol=1e-12).log_likelihood
    options = {"optimizer": optimizer, "steps": 200 if name == "Adam" else 60, "sample_weight": weight}
    blocked = gradient_em(aside, x, **options)
    seen: list[float] = []
    with unblock(RESPONSIBILITIES):
        # The best point is one on the way; where it ends is what the callback sees last.
        found = gradient_em(aside, x, callback=lambda _, value: seen.append(value), **options)
    assert best - blocked.log_likelihood < 1e-4
    assert weakest(owners[0]) > 0.1
    assert weakest(owners[1]) < 0.01
    # What is left is one Gaussian as wide as both.
    single = -0.5 * math.log(2 * math.pi * math.e * 2)
    assert best - seen[-1] == pytest.approx(best - single, rel=0.2)
    assert best - found.log_likelihood > 1e-3


def test_open_gradient_is_that_of_the_open_surrogate():
    x, k, kind = DATA["iris"]
    first, weight = first_of(x, k, kind), torch.arange(150, dtype=F64)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in to_unconstrained(first).items()}
    seen = {}

    def optimizer(params: list[Tensor]) -> Optimizer:
        seen["leaves"] = params
        return SGD(params, lr=0.0)

    with unblock(RESPONSIBILITIES):
        surrogate(from_unconstrained(leaves, kind), x, weight).backward()
        gradient_em(first, x, optimizer=optimizer, steps=1, inner_steps=2, sample_weight=weight)
    for found, expected in zip(seen["leaves"], leaves.values(), strict=True):
        assert torch.allclose(-found.grad, expected.grad, rtol=1e-11, atol=1e-14)


# --- minibatches -----------------------------------------------------------------------------------------------------


def test_minibatches_come_near_the_optimum():
    x, k, kind = DATA["digits"]
    first = first_of(x, k, kind)
    em = maximise_likelihood(first, x, tol=1e-9)
    told: list[tuple[int, float]] = []
    found = gradient_em(
        first,
        x,
        optimizer=partial(Adam, lr=0.02, betas=(0.9, 0.99)),
        steps=15 * 40,  # after 30 epochs it still rises by a hundredth of a nat an epoch
        batch_size=120,
        generator=seeded(),
        callback=lambda n, value: told.append((n, value)),
    )
    assert [n for n, _ in told] == list(range(0, 601, 15))  # 1797 samples are 15 batches, the last of 117
    assert found.history == tuple(value for _, value in told)
    assert em.log_likelihood - found.log_likelihood < 0.01
    assert found.log_likelihood > found.history[0] + 0.05


def test_mean_gradient_of_the_batches_is_the_gradient():
    x, k, kind = DATA["iris"]
    first, weight = first_of(x, k, kind), torch.arange(150, dtype=F64) % 7
    total: dict[int, Tensor] = {}

    class Recorder(Optimizer):
        """Adds up the gradients it is given."""

        def __init__(self, leaves: list[Tensor]) -> None:
            super().__init__(leaves, {})

        def step(self, closure):
            with torch.enable_grad():
                closure()
            for i, leaf in enumerate(self.param_groups[0]["params"]):
                total[i] = total.get(i, 0.0) + leaf.grad

    options = {"optimizer": Recorder, "sample_weight": weight, "generator": seeded()}
    gradient_em(first, x, steps=15, batch_size=10, **options)
    parts, total = {i: slope / 15 for i, slope in total.items()}, {}
    gradient_em(first, x, steps=1, **options)
    assert all(torch.allclose(parts[i], total[i], rtol=1e-10, atol=1e-13) for i in total)


def test_batches_are_the_generators():
    x, k, kind = DATA["iris"]
    state = torch.get_rng_state()
    options = {"optimizer": partial(Adam, lr=0.05), "steps": 12, "batch_size": 40}
    one, same, other = (
        gradient_em(first_of(x, k, kind), x, generator=seeded(seed), **options).history for seed in (3, 3, 4)
    )
    assert one == same
    assert one != other
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_of_all_is_no_batch():
    x, k, kind = DATA["iris"]
    first, options = first_of(x, k, kind), {"optimizer": partial(SGD, lr=0.05), "steps": 5}
    whole, batch = (gradient_em(first, x, batch_size=size, generator=seeded(), **options) for size in (None, 150))
    assert batch.history == pytest.approx(whole.history, abs=1e-12)
    assert (batch.n_iter, len(batch.history)) == (5, 6)


# --- what it leaves alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 50])
def test_gradients_of_the_owner_are_left_alone(batch_size):
    x, k, kind = DATA["iris"]
    x = x.clone().requires_grad_()
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in to_unconstrained(first_of(x, k, kind)).items()}
    leaves["means"].grad = torch.ones_like(leaves["means"])
    values = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    found = gradient_em(
        from_unconstrained(leaves, kind), x, optimizer=partial(SGD, lr=0.1), steps=3, batch_size=batch_size
    )
    assert x.grad is None
    assert leaves["log_weights"].grad is None
    assert torch.equal(leaves["means"].grad, torch.ones_like(leaves["means"]))
    assert all(torch.equal(leaves[name], values[name]) for name in leaves)
    assert not found.parameters.means.requires_grad


def test_it_differentiates_where_nothing_is_recorded():
    x, k, kind = DATA["iris"]
    options = {"optimizer": partial(SGD, lr=0.1), "steps": 3}
    with torch.no_grad():
        found = gradient_em(first_of(x, k, kind), x, **options)
    assert found.history == gradient_em(first_of(x, k, kind), x, **options).history
    assert found.history[0] < found.history[1] < found.history[2]


def test_the_best_point_is_returned():
    x, k, kind = DATA["iris"]
    found = gradient_em(first_of(x, k, kind), x, optimizer=partial(SGD, lr=0.15), steps=40)
    assert found.history[-1] < max(found.history)
    assert found.log_likelihood == max(found.history)
    assert float(log_likelihood(found.parameters, x)) == pytest.approx(max(found.history), abs=1e-12)
    none = gradient_em(found.parameters, x, optimizer=partial(SGD, lr=0.15), steps=0)
    assert (none.n_iter, none.converged) == (0, False)
    assert none.history == pytest.approx([found.log_likelihood], abs=1e-12)


def test_another_family():
    x = torch.poisson(torch.tensor([[1.0, 6.0]], dtype=F64).repeat(80, 1), generator=seeded())
    x[:30] = torch.poisson(torch.tensor([[5.0, 2.0]], dtype=F64).repeat(30, 1), generator=seeded(1))
    first = PoissonMixture.start(x, 2, generator=seeded())
    em = maximise_likelihood(first, x, tol=1e-10)
    found = gradient_em(first, x, optimizer=partial(Adam, lr=0.05), steps=400)
    assert abs(found.log_likelihood - em.log_likelihood) < 1e-6


def test_steps_that_are_too_long_are_reported():
    x, k, kind = DATA["iris"]
    with pytest.raises(
        ValueError, match=r"The log-likelihood should be finite\. Found (nan|-inf) after \d+ steps; short"
    ):
        gradient_em(first_of(x, k, kind), x, optimizer=partial(SGD, lr=1e4), steps=50)


X = overlapping(20)
BAD = {
    "steps": ({"steps": -1}, ValueError, "`steps` should be an integer from 0. Found -1."),
    "inner": ({"inner_steps": 0}, ValueError, "`inner_steps` should be a positive integer. Found 0."),
    "batch": ({"batch_size": 2.0}, ValueError, "`batch_size` should be a positive integer. Found 2.0."),
    "numpy": ({"x": X.numpy()}, TypeError, "`x` should be a tensor. Found ndarray."),
    "weight": ({"sample_weight": -X[:, 0].abs()}, ValueError, "`sample_weight` should be finite, not negative"),
    "infinite": ({"x": X / 0}, ValueError, "The log-likelihood should be finite"),
    "L-BFGS": ({"optimizer": LBFGS, "batch_size": 5}, ValueError, "`batch_size` should be None for L-BFGS.*Found 5."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        gradient_em(first_of(X, 2), **{"x": X, "optimizer": partial(Adam, lr=0.1), "steps": 3, **options})
    assert math.isfinite(float(X.sum()))


def test_an_optimizer_of_other_leaves_is_a_clear_error():
    x = torch.tensor([[0.0], [1.0], [8.0]])
    start = GaussianParameters.from_covariances(
        weights=torch.ones(1), means=x[:1], covariances=torch.ones(1), covariance_type="spherical"
    )
    with pytest.raises(TypeError, match=r"`optimizer` should be a function of the leaves.*type SGD"):
        gradient_em(start, x, optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1), steps=1)
