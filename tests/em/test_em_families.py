"""Mixtures of other families: one contract for all, with torch.distributions and a quadrature as witnesses."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from contract import BlockCase, relative_error
from test_em import gradient_of
from torch import Tensor
from torch import distributions as dist
from torch.func import grad, jacrev, vmap
from values import seeded

from toolkit import unblock
from toolkit.em import RESPONSIBILITIES, e_step, evidence_lower_bound, log_density, log_likelihood, surrogate
from toolkit.em.engine.acceleration import maximise_likelihood
from toolkit.em.models import (
    BernoulliMixture,
    CategoricalMixture,
    DistributionMixture,
    FactorAnalysers,
    PoissonMixture,
    StudentMixture,
    fit_family,
)

F64 = torch.float64
NAN, INF = math.nan, math.inf
Leaves = Mapping[str, Tensor]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=seeded(seed), dtype=F64)


def flat(leaves: Leaves) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves.values()])


def unflat(vector: Tensor, like: Leaves) -> dict[str, Tensor]:
    parts = vector.split([leaf.numel() for leaf in like.values()])
    return {name: part.view(leaf.shape) for (name, leaf), part in zip(like.items(), parts, strict=True)}


# --- problems: a mixture that is symmetric in nothing, samples, and the log-joint by another way ----------------------


@dataclass(frozen=True)
class Problem:
    """A family, one of its mixtures, samples that overlap, and a witness of the log-joint in terms of coordinates."""

    id: str
    mixture: object
    x: Tensor
    conditional: Callable[[Leaves, Tensor], Tensor]  # log f_k(x_n), (N, K)
    options: dict[str, object] = field(default_factory=dict)

    def witness(self, leaves: Leaves, x: Tensor | None = None) -> Tensor:
        weights = leaves["log_weights"] - leaves["log_weights"].logsumexp(0)
        return weights + self.conditional(leaves, self.x if x is None else x)

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {name: value.detach().clone().requires_grad_() for name, value in self.mixture.unconstrained().items()}


def weights_of(k: int, seed: int = 9) -> Tensor:
    return normal(k, seed=seed).log_softmax(0)


def counts_of(rate: float, n: int, d: int, seed: int) -> Tensor:
    return torch.poisson(torch.full((n, d), rate, dtype=F64), generator=seeded(seed))


def of_bernoulli(leaves: Leaves, x: Tensor) -> Tensor:
    missing = x.isnan()
    log_prob = dist.Bernoulli(logits=leaves["logits"]).log_prob(x.nan_to_num(nan=0.0)[:, None])
    return log_prob.masked_fill(missing[:, None], 0.0).sum(-1)


def of_poisson(leaves: Leaves, x: Tensor) -> Tensor:
    missing = x.isnan()
    log_prob = dist.Poisson(leaves["log_rates"].exp()).log_prob(x.nan_to_num(nan=0.0)[:, None])
    return log_prob.masked_fill(missing[:, None], 0.0).sum(-1)


def of_categorical(sizes: tuple[int, ...]) -> Callable[[Leaves, Tensor], Tensor]:
    def conditional(leaves: Leaves, x: Tensor) -> Tensor:
        total = 0.0
        for logits, codes in zip(leaves["logits"].split(sizes, 1), x.unbind(1), strict=True):
            missing = codes < 0
            log_prob = dist.Categorical(logits=logits).log_prob(codes.clamp(min=0)[:, None])
            total = total + log_prob.masked_fill(missing[:, None], 0.0)
        return total

    return conditional


def precision_factor(leaves: Leaves, kind: str, d: int) -> Tensor:
    entries = leaves["log_cholesky"]
    if kind == "diag":
        return torch.diag_embed(entries.exp())
    upper = torch.zeros(*entries.shape[:-1], d, d, dtype=F64)
    rows, columns = torch.triu_indices(d, d, 1)
    upper = upper.index_put((torch.arange(len(entries))[:, None], rows, columns), entries[:, d:])
    return upper + torch.diag_embed(entries[:, :d].exp())


# Scales on a grid of their logarithms: for what is smooth and vanishes at both ends the trapezoid rule is exact.
LOG_SCALES = torch.linspace(-22, 6, 280, dtype=F64)


def of_student(kind: str, degrees: Tensor | None = None) -> Callable[[Leaves, Tensor], Tensor]:
    """Integrate the definition: a Gaussian whose scale is gamma distributed."""

    def conditional(leaves: Leaves, x: Tensor) -> Tensor:
        d = x.shape[1]
        nu = leaves["log_degrees"].exp() if degrees is None else degrees
        tril = torch.linalg.inv(precision_factor(leaves, kind, d)).mT
        u = LOG_SCALES.exp()
        gaussian = dist.MultivariateNormal(leaves["means"], scale_tril=tril / u.sqrt()[:, None, None, None])
        gamma = dist.Gamma(nu / 2, nu / 2).log_prob(u[:, None]) + LOG_SCALES[:, None]
        log_prob = gaussian.log_prob(x[:, None, None]) + gamma
        return log_prob.logsumexp(1) + math.log(LOG_SCALES[1] - LOG_SCALES[0])

    return conditional


def of_factors(kind: str) -> Callable[[Leaves, Tensor], Tensor]:
    def conditional(leaves: Leaves, x: Tensor) -> Tensor:
        noise = leaves["log_noise"].exp()
        noise = noise[:, None] if kind == "isotropic" else noise
        covariance = leaves["loadings"] @ leaves["loadings"].mT + torch.diag_embed(noise.expand_as(leaves["means"]))
        return dist.MultivariateNormal(leaves["means"], covariance).log_prob(x[:, None])

    return conditional


def gamma(p: dict[str, Tensor]) -> dist.Distribution:
    return dist.Gamma(p["log_shape"].exp(), p["log_rate"].exp(), validate_args=False)


def gaussian(p: dict[str, Tensor]) -> dist.Distribution:
    return dist.Independent(dist.Normal(p["mean"], p["log_scale"].exp(), validate_args=False), 1, validate_args=False)


def heavy_tailed(noise: Tensor, g: torch.Generator) -> Tensor:
    """Return t distributed numbers with three degrees of freedom."""
    return noise / torch.randn(len(noise), 3, generator=g, dtype=F64).square().mean(1, keepdim=True).sqrt()


def student(kind: str) -> Problem:
    heavy = [heavy_tailed(normal(size, 2, seed=size), seeded(9)) for size in (25, 20)]
    x = torch.cat([heavy[0], heavy[1] @ torch.tensor([[1.0, 0.6], [0, 2.0]], dtype=F64) + 2])
    cholesky = normal(2, 3 if kind == "full" else 2, seed=3, scale=0.4)
    empty = StudentMixture(
        log_weights=weights_of(2),
        means=torch.zeros(2, 2, dtype=F64),
        precisions_cholesky=torch.ones(2, 2, 2, dtype=F64) if kind == "full" else torch.ones(2, 2, dtype=F64),
        degrees_of_freedom=torch.ones(2, dtype=F64),
        covariance_type=kind,
    )
    mixture = empty.with_unconstrained(
        {
            "log_weights": weights_of(2),
            "means": normal(2, 2, seed=4),
            "log_cholesky": cholesky,
            "log_degrees": torch.tensor([1.2, 2.1], dtype=F64),
        }
    )
    return Problem(f"student-{kind}", mixture, x, of_student(kind), {"covariance_type": kind, "reg_covar": 0.0})


def factors(kind: str) -> Problem:
    x = normal(60, 2, seed=1) @ normal(2, 5, seed=2) + normal(60, 5, seed=3, scale=0.5)
    shape = {"diag": (2, 5), "tied": (5,), "isotropic": (2,)}[kind]
    mixture = FactorAnalysers(
        log_weights=weights_of(2),
        means=normal(2, 5, seed=4),
        loadings=normal(2, 5, 2, seed=5),
        noise=normal(*shape, seed=6, scale=0.5).exp(),
        noise_type=kind,
    )
    return Problem(f"factors-{kind}", mixture, x, of_factors(kind), {"noise_type": kind, "n_factors": 2})


def problems() -> list[Problem]:
    bits = torch.bernoulli(torch.linspace(0.2, 0.7, 150, dtype=F64).view(30, 5), generator=seeded())
    holes = torch.rand(30, 5, generator=seeded(5)) < 0.2
    bernoulli = BernoulliMixture(log_weights=weights_of(3), logits=normal(3, 5, seed=1))
    counts = torch.cat([counts_of(2.0, 20, 3, 1), counts_of(5.0, 15, 3, 2)])
    poisson = PoissonMixture(log_weights=weights_of(2), log_rates=1 + normal(2, 3, seed=1, scale=0.5))
    large = torch.cat([counts_of(3e5, 20, 2, 1), counts_of(3.01e5, 15, 2, 2)])
    rates = math.log(3e5) + normal(2, 2, seed=1, scale=2e-3)
    sizes = (3, 2, 4)
    codes = torch.stack([torch.randint(size, (40,), generator=seeded(size)) for size in sizes], 1)
    tables = torch.cat([part.log_softmax(1) for part in normal(2, 9, seed=1).split(sizes, 1)], 1)
    categorical = CategoricalMixture(log_weights=weights_of(2), log_probabilities=tables, n_categories=sizes)
    positive = normal(40, 1, seed=1).exp() * torch.linspace(0.5, 2, 40, dtype=F64)[:, None]
    return [
        Problem("bernoulli", bernoulli, bits, of_bernoulli),
        Problem("bernoulli-missing", bernoulli, bits.masked_fill(holes, NAN), of_bernoulli),
        Problem("poisson", poisson, counts, of_poisson),
        Problem("poisson-missing", poisson, counts.masked_fill(counts == 3, NAN), of_poisson),
        Problem("poisson-large", PoissonMixture(log_weights=weights_of(2), log_rates=rates), large, of_poisson),
        Problem("categorical", categorical, codes, of_categorical(sizes)),
        Problem("categorical-missing", categorical, codes.masked_fill(codes == 2, -1), of_categorical(sizes)),
        student("full"),
        student("diag"),
        factors("diag"),
        factors("tied"),
        factors("isotropic"),
        Problem(
            "gamma",
            DistributionMixture(
                log_weights=weights_of(2),
                parameters={"log_shape": normal(2, seed=1), "log_rate": normal(2, seed=2)},
                build=gamma,
                max_steps=200,
            ),
            positive,
            lambda leaves, x: dist.Gamma(leaves["log_shape"].exp(), leaves["log_rate"].exp()).log_prob(x),
            {
                "build": gamma,
                "guess": lambda part: {"log_shape": torch.zeros((), dtype=F64), "log_rate": -part.mean().log()},
            },
        ),
        Problem(
            "independent-normals",
            DistributionMixture(
                log_weights=weights_of(2),
                parameters={"mean": normal(2, 3, seed=1), "log_scale": normal(2, 3, seed=2, scale=0.4)},
                build=gaussian,
                max_steps=200,
            ),
            normal(30, 3, seed=3) * torch.tensor([1, 2, 3], dtype=F64),
            lambda leaves, x: dist.Normal(leaves["mean"], leaves["log_scale"].exp()).log_prob(x[:, None]).sum(-1),
            {
                "build": gaussian,
                "guess": lambda part: {"mean": part.mean(0), "log_scale": torch.zeros(3, dtype=F64)},
            },
        ),
    ]


PROBLEMS = {problem.id: problem for problem in problems()}
every_problem = pytest.mark.parametrize("name", PROBLEMS)
LATENT = [name for name in PROBLEMS if name.startswith(("student", "factors"))]
every_latent = pytest.mark.parametrize("name", LATENT)

# --- the block -------------------------------------------------------------------------------------------------------


def blocked_gradient(problem: Problem) -> Callable[[Leaves], dict[str, Tensor]]:
    return lambda leaves: gradient_of(lambda values: problem.witness(values).logsumexp(-1).mean(), leaves)


def leaky_gradient(problem: Problem) -> Callable[[Leaves], dict[str, Tensor]]:
    """The gradient of the likelihood, and the mean over samples of Cov_r(a, grad a)."""

    def gradient(leaves: Leaves) -> dict[str, Tensor]:
        a = problem.witness(leaves).detach()
        r = a.softmax(-1)
        weights = r * (a - (r * a).sum(-1, keepdim=True))
        leak = gradient_of(lambda values: (weights * problem.witness(values)).sum(-1).mean(), leaves)
        blocked = blocked_gradient(problem)(leaves)
        return {name: blocked[name] + leak[name] for name in leaves}

    return gradient


def entropies(problem: Problem, leaves: Leaves) -> Tensor:
    """Return the entropy of the second latent variable given sample and component, (N, K)."""
    x = problem.x
    if problem.id.startswith("student"):
        kind, d, nu = problem.id.split("-")[1], x.shape[1], leaves["log_degrees"].exp()
        tril = torch.linalg.inv(precision_factor(leaves, kind, d)).mT
        whitened = torch.linalg.solve_triangular(tril, (x[:, None] - leaves["means"])[..., None], upper=False)
        distances = whitened.square().sum((-1, -2))
        return dist.Gamma(((nu + d) / 2).expand_as(distances), (nu + distances) / 2).entropy()
    noise = leaves["log_noise"].exp()
    noise = (noise[:, None] if problem.id.endswith("isotropic") else noise).expand_as(leaves["means"])
    loadings = leaves["loadings"]
    precision = torch.eye(loadings.shape[2], dtype=F64) + loadings.mT @ torch.diag_embed(1 / noise) @ loadings
    posterior = dist.MultivariateNormal(torch.zeros(loadings.shape[0], loadings.shape[2], dtype=F64), None, precision)
    return posterior.entropy().expand(len(x), -1)


def open_complete_gradient(problem: Problem) -> Callable[[Leaves], dict[str, Tensor]]:
    """The gradient of the likelihood less the entropies of the component, and of what comes with it."""

    def objective(values: Leaves) -> Tensor:
        a = problem.witness(values)
        r = a.softmax(-1)
        entropy = torch.special.entr(r).sum(-1) + (r * entropies(problem, values)).sum(-1)
        return (a.logsumexp(-1) - entropy).mean()

    return lambda leaves: gradient_of(objective, leaves)


def case(name: str, program: str) -> BlockCase:
    problem = PROBLEMS[name]
    loss, opened = {
        "surrogate": (lambda mixture: surrogate(mixture, problem.x), leaky_gradient),
        "evidence_lower_bound": (lambda mixture: evidence_lower_bound(mixture, problem.x), blocked_gradient),
        "complete_surrogate": (lambda mixture: mixture.complete_surrogate(problem.x), open_complete_gradient),
    }[program]
    return BlockCase(
        id=f"em.{program}-{name}",
        block=RESPONSIBILITIES,
        parameters=lambda: problem.leaves,
        loss=lambda leaves: loss(problem.mixture.with_unconstrained(leaves)),
        blocked=blocked_gradient(problem),
        opened=opened(problem),
        # Where counts are large, the witness is the small difference of large numbers that the family avoids.
        tolerance=1e-12 if name != "poisson-large" else 1e-9,
    )


BLOCK_CASES: list[BlockCase] = [
    *(case(name, program) for name in PROBLEMS for program in ("surrogate", "evidence_lower_bound")),
    *(case(name, "complete_surrogate") for name in LATENT),
]


@every_latent
def test_complete_surrogate_is_likelihood_minus_both_entropies(name):
    problem = PROBLEMS[name]
    a = problem.witness(problem.leaves)
    r = a.softmax(-1)
    entropy = torch.special.entr(r).sum(-1) + (r * entropies(problem, problem.leaves)).sum(-1)
    expected = (a.logsumexp(-1) - entropy).mean()
    assert torch.isclose(problem.mixture.complete_surrogate(problem.x), expected, rtol=1e-12)
    weight = torch.arange(1.0, 1 + len(problem.x), dtype=F64)
    weighted = problem.mixture.complete_surrogate(problem.x, weight)
    assert torch.isclose(weighted, (weight * (a.logsumexp(-1) - entropy)).sum() / weight.sum(), rtol=1e-12)
    with pytest.raises(ValueError, match="`sample_weight` should have shape"):  # a column would broadcast
        problem.mixture.complete_surrogate(problem.x, weight[:, None])


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "poisson-large"])
def test_em_map_is_a_constant_and_open_its_jacobian_is_that_of_differences(name):
    problem = PROBLEMS[name]
    mixture, leaves = problem.mixture, problem.mixture.unconstrained()

    def em_map(point: Tensor) -> Tensor:
        now = mixture.with_unconstrained(unflat(point, leaves))
        return flat(now.m_step(problem.x, e_step(now, problem.x)[0]).unconstrained())

    point = flat(leaves)
    assert not torch.autograd.functional.jacobian(em_map, point).any()
    with unblock(RESPONSIBILITIES):
        found = torch.autograd.functional.jacobian(em_map, point)
    step = 1e-5
    columns = [
        (em_map(point + step * e) - em_map(point - step * e)) / (2 * step) for e in torch.eye(len(point)).to(F64)
    ]
    expected = torch.stack(columns, 1)
    # Log-weights and logits are free up to a constant: both maps start from any, and end at the normalised ones.
    assert (found - expected).norm() < 1e-6 * expected.norm()
    assert expected.norm() > 0.1


# --- densities -------------------------------------------------------------------------------------------------------


@every_problem
def test_log_joint_is_the_witness(name):
    problem = PROBLEMS[name]
    rtol = 1e-12 if name != "poisson-large" else 1e-9
    assert torch.allclose(problem.mixture.log_joint(problem.x), problem.witness(problem.leaves), rtol=rtol)


@every_problem
def test_coordinates_round_trip(name):
    problem = PROBLEMS[name]
    leaves = problem.mixture.unconstrained()
    back = problem.mixture.with_unconstrained({**leaves, "log_weights": leaves["log_weights"] + 3.0})
    assert torch.allclose(back.log_joint(problem.x), problem.mixture.log_joint(problem.x), rtol=1e-12)
    assert all(value.isfinite().all() for value in leaves.values())


@every_problem
def test_under_torch_func(name):
    problem = PROBLEMS[name]
    mixture, x = problem.mixture, problem.x
    leaves = mixture.unconstrained()

    def program(values: Leaves, rows: Tensor) -> Tensor:
        return surrogate(mixture.with_unconstrained(values), rows)

    found = grad(program)(leaves, x)
    assert relative_error(found, blocked_gradient(problem)(leaves)) < (1e-12 if name != "poisson-large" else 1e-9)
    per_sample = vmap(grad(lambda values, row: program(values, row[None])), in_dims=(None, 0))(leaves, x)
    assert relative_error({key: value.mean(0) for key, value in per_sample.items()}, found) < 1e-10
    by_rows = jacrev(lambda values: log_density(mixture.with_unconstrained(values), x))(leaves)
    assert relative_error({key: value.mean(0) for key, value in by_rows.items()}, found) < 1e-10


# --- the M-step ------------------------------------------------------------------------------------------------------


def held_surrogate(problem: Problem, responsibilities: Tensor) -> Callable[[Leaves], Tensor]:
    """The surrogate that the M-step maximises; with a second latent variable, both posteriors are held."""
    return lambda leaves: (responsibilities * problem.witness(leaves)).sum(-1).mean()


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in LATENT])
def test_m_step_is_a_stationary_maximum_of_the_surrogate(name):
    problem = PROBLEMS[name]
    weight = torch.linspace(0.2, 2.0, len(problem.x), dtype=F64)[:, None]
    responsibilities = weight * e_step(problem.mixture, problem.x)[0]
    found = problem.mixture.m_step(problem.x, responsibilities)
    q, leaves = held_surrogate(problem, responsibilities), found.unconstrained()
    scale = max(1.0, float(problem.x.nan_to_num(nan=0.0).abs().max()))
    assert all(slope.abs().max() < 1e-7 * scale for slope in gradient_of(q, leaves).values())
    for seed in range(20):
        nearby = {
            key: value + normal(*value.shape, seed=seed + i, scale=0.05)
            for i, (key, value) in enumerate(leaves.items())
        }
        assert q(nearby) < q(leaves)


@pytest.mark.slow
@every_latent
def test_m_step_raises_the_surrogate_and_its_fixed_point_is_stationary(name):
    problem = PROBLEMS[name]
    r = e_step(problem.mixture, problem.x)[0]
    q = held_surrogate(problem, r)
    found, values = problem.mixture, [q(problem.leaves)]
    for _ in range(400):
        # Responsibilities held: only the second latent variable is inferred anew.
        found = found.m_step(problem.x, r)
        values.append(q(found.unconstrained())) if len(values) < 20 else None
    assert all(after >= before - 1e-13 * abs(before) for before, after in pairwise(values))
    assert values[1] > values[0] + 1e-3
    if not name.startswith("factors"):  # where some noise vanishes, in the data of some
        slopes = gradient_of(q, found.unconstrained())
        assert all(slope.abs().max() < 1e-6 for slope in slopes.values())


@every_problem
@pytest.mark.parametrize("dead", ["by-weight", "in-the-m-step"])
def test_a_component_without_samples_keeps_its_parameters(name, dead):
    problem = PROBLEMS[name]
    mixture, x = problem.mixture, problem.x
    if dead == "by-weight":
        log_weights = torch.full_like(mixture.log_weights, -INF)
        log_weights[0] = 0.0
        mixture = dataclasses.replace(mixture, log_weights=log_weights)
        r = e_step(mixture, x)[0]
    else:
        r = torch.zeros(len(x), mixture.n_components, dtype=F64)
        r[:, 0] = 1.0
    found = mixture.m_step(x, r)
    before, after = mixture.unconstrained(), found.unconstrained()
    for key in before:
        if before[key].shape[:1] == (mixture.n_components,) and key != "log_weights":
            assert torch.allclose(after[key][1:], before[key][1:], rtol=1e-12)
    assert found.weights[1:].max() < 1e-15
    assert log_likelihood(found, x).isfinite()


@every_problem
def test_weights_of_samples_are_repetitions(name):
    problem = PROBLEMS[name]
    times = torch.arange(len(problem.x)) % 3
    r = e_step(problem.mixture, problem.x)[0]
    weighted = problem.mixture.m_step(problem.x, times[:, None] * r)
    repeated = problem.mixture.m_step(problem.x.repeat_interleave(times, 0), r.repeat_interleave(times, 0))
    assert relative_error(weighted.unconstrained(), repeated.unconstrained()) < 1e-7
    closed_form = not isinstance(problem.mixture, DistributionMixture)
    assert not closed_form or relative_error(weighted.unconstrained(), repeated.unconstrained()) < 1e-11


# --- fits ------------------------------------------------------------------------------------------------------------


def random_problem(name: str, seed: int) -> tuple[object, Tensor]:
    """Return a start and samples of a random size, for a family in a random setting."""
    g = seeded(seed)
    n, d, k = (int(torch.randint(low, high, (), generator=g)) for low, high in ((25, 45), (1, 5), (1, 4)))
    noise = torch.randn(n, d, generator=g, dtype=F64)
    options: dict[str, object] = {}
    match name:
        case "bernoulli":
            kind, x = BernoulliMixture, (noise > torch.randn(d, generator=g, dtype=F64)).to(F64)
            x = x.masked_fill(torch.rand(n, d, generator=g) < 0.1, NAN)
        case "poisson":
            rates = (2 * torch.randn(n, d, generator=g, dtype=F64)).exp() * (10.0 ** (seed % 7))
            kind, x = PoissonMixture, torch.poisson(rates, generator=g)
            x = x.masked_fill(torch.rand(n, d, generator=g) < 0.1, NAN)
        case "categorical":
            kind, x = CategoricalMixture, torch.randint(-1, 4, (n, d), generator=g)
        case "student":
            kind, x = StudentMixture, heavy_tailed(noise, g)
            k, options = min(k, 2), {"covariance_type": ("full", "diag")[seed % 2], "reg_covar": 0.0}
        case "factors":
            mixing = torch.randn(d, d, generator=g, dtype=F64)
            kind, x = FactorAnalysers, noise @ mixing
            options = {"n_factors": 1 + seed % d, "noise_type": ("diag", "tied", "isotropic")[seed % 3]}
    return kind.start(x, k, generator=g, **options), x


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bernoulli", "poisson", "categorical", "student", "factors"])
def test_likelihood_never_falls(name):
    gains = singular = 0
    for seed in range(200):
        mixture, x = random_problem(name, seed)
        value = None
        for _ in range(6):
            responsibilities, after = e_step(mixture, x)
            if value is not None:
                assert after >= value - 1e-12 * (1 + abs(value)), (seed, mixture.n_components)
                gains += bool(after > value + 1e-9)
            value = after
            try:
                mixture = mixture.m_step(x, responsibilities)
            except ValueError:  # a singular scatter of a component with few samples
                singular += 1
                break
    assert gains > 400
    assert singular < (20 if name == "student" else 1)


@pytest.mark.slow
@every_problem
def test_fit_climbs_to_a_stationary_point_by_every_road(name):
    problem = PROBLEMS[name]
    ends = []
    for accelerate in ("none", "anderson"):
        found = maximise_likelihood(problem.mixture, problem.x, accelerate=accelerate, tol=1e-12, max_iter=100)
        assert all(after >= before - 1e-13 * abs(before) for before, after in pairwise(found.history))
        assert found.log_likelihood > float(log_likelihood(problem.mixture, problem.x)) + 1e-4
        ends.append(found)
    assert ends[1].log_likelihood >= ends[0].log_likelihood - 0.05


@every_problem
def test_fit_family_finds_at_least_what_the_first_start_gives(name):
    problem = PROBLEMS[name]
    k, kind = problem.mixture.n_components, type(problem.mixture)
    one = fit_family(kind, problem.x, k, max_iter=30, generator=seeded(), **problem.options)
    three = fit_family(kind, problem.x, k, max_iter=30, n_init=3, generator=seeded(), **problem.options)
    assert three.log_likelihood >= one.log_likelihood - 1e-9  # of equal ones the first is kept
    assert math.isclose(one.log_likelihood, float(log_likelihood(one.parameters, problem.x)), rel_tol=1e-9)
    again = fit_family(kind, problem.x, k, max_iter=30, generator=seeded(), **problem.options)
    assert again.history == one.history


def scores(mixture: object, x: Tensor) -> dict[str, Tensor]:
    def of_one(values: Leaves, row: Tensor) -> Tensor:
        return log_density(mixture.with_unconstrained(values), row[None])[0]

    return vmap(grad(of_one), in_dims=(None, 0))(mixture.unconstrained(), x)


@every_problem
def test_samples_are_drawn_from_the_density(name):
    mixture = PROBLEMS[name].mixture
    x, labels = mixture.sample(4000, seeded(1))
    again, _ = mixture.sample(4000, seeded(1))
    assert torch.equal(x, again)
    assert x.shape == (4000, mixture.n_features)
    mixture.check(x)
    shares = labels.bincount(minlength=mixture.n_components) / 4000
    assert (shares - mixture.weights).abs().max() < 4 * 0.5 / 4000**0.5
    # The score has mean 0 under the density it belongs to, in every coordinate: each mean is a z-score away.
    rows = scores(mixture, x)
    for key, slopes in rows.items():
        spread = slopes.std(0).clamp(min=1e-12)
        z = slopes.mean(0) / spread * 4000**0.5
        assert z.abs().max() < 4.5, key


@every_problem
def test_number_of_parameters_is_the_rank_of_the_scores(name):
    mixture = PROBLEMS[name].mixture
    x, _ = mixture.sample(300, seeded(2))
    rows = scores(mixture, x)
    matrix = torch.cat([value.reshape(300, -1) for value in rows.values()], 1)
    matrix = matrix / matrix.norm(dim=0)
    assert int(torch.linalg.matrix_rank(matrix, rtol=1e-9)) == mixture.n_parameters


@every_problem
def test_float32_is_near_float64(name):
    problem = PROBLEMS[name]
    single = problem.mixture.to(torch.float32)
    x = problem.x.float() if problem.x.is_floating_point() else problem.x
    found = single.m_step(x, e_step(single, x)[0])
    expected = problem.mixture.m_step(problem.x, e_step(problem.mixture, problem.x)[0])
    assert all(value.dtype == torch.float32 for value in found.unconstrained().values())
    gap = log_likelihood(found.to(F64), problem.x) - log_likelihood(expected, problem.x)
    # Rates of 3e5 are rounded by 0.02; and a climb by values that are rounded ends before the top.
    rounded = name == "poisson-large" or isinstance(single, DistributionMixture)
    assert abs(float(gap)) < (1e-4 if rounded else 1e-5)
    assert single.log_joint(x).dtype == torch.float32


# --- refusals --------------------------------------------------------------------------------------------------------


@every_problem
def test_start_refuses(name):
    problem = PROBLEMS[name]
    kind, x = type(problem.mixture), problem.x
    for bad, error, message in [
        ((x, 0), ValueError, "`n_components` should be a positive integer. Found 0."),
        ((x, 2.0), ValueError, "`n_components` should be a positive integer. Found 2.0."),
        ((x, True), ValueError, "`n_components` should be a positive integer. Found True."),
        ((x[:2], 3), ValueError, "`n_components` should be at most 2, the number of samples. Found 3."),
        ((x[:0], 1), ValueError, "`x` should have shape (N, D), at least (1, 1)."),
        ((x[:, 0], 1), ValueError, "`x` should have shape (N, D), at least (1, 1)."),
        ((x.tolist(), 1), TypeError, "`x` should be a tensor. Found list."),
        ((x.to(torch.complex64), 1), TypeError, "`x` should be real."),
    ]:
        with pytest.raises(error) as caught:
            kind.start(*bad, **problem.options)
        assert str(caught.value).startswith(message)
    with pytest.raises(ValueError, match=r"`sample_weight` should have shape"):
        kind.start(x, 1, sample_weight=torch.ones(3), **problem.options)
    for weight in (torch.zeros(len(x)), torch.full((len(x),), NAN), torch.linspace(-1, 1, len(x))):
        with pytest.raises(ValueError, match=r"`sample_weight` should be finite, not negative and not all 0"):
            fit_family(kind, x, 1, sample_weight=weight, **problem.options)
    with pytest.raises(TypeError, match=r"`sample_weight` should be a tensor or None. Found list."):
        kind.start(x, 1, sample_weight=[1.0], **problem.options)
    with pytest.raises(ValueError, match=r"`n_init` should be a positive integer. Found 0."):
        fit_family(kind, x, 1, n_init=0, **problem.options)
    with pytest.raises(ValueError, match=r"`x` should have shape \(N, \d\)"):
        problem.mixture.log_joint(torch.cat([x, x], 1))
    with pytest.raises(ValueError, match=r"`n` should be a positive integer. Found 0."):
        problem.mixture.sample(0)
    with pytest.raises(ValueError, match=r"`log_weights` should have shape|should have shape"):
        dataclasses.replace(problem.mixture, log_weights=torch.zeros(7, dtype=F64))


def test_a_name_is_no_family():
    with pytest.raises(TypeError, match=r"`family` should be a family of mixtures, .*\. Found 'poisson'\."):
        fit_family("poisson", torch.zeros(4, 1), 2)


@pytest.mark.parametrize("kind", [StudentMixture, FactorAnalysers])
def test_values_too_large_for_a_variance_are_refused(kind):
    x = 1e160 * torch.randn(60, 3, generator=seeded(), dtype=torch.float64)
    options = {"n_factors": 1} if kind is FactorAnalysers else {}
    with pytest.raises(ValueError, match=r"`x` should have a finite covariance.*too large"):
        fit_family(kind, x, 2, generator=seeded(), **options)
