"""Stochastic estimators: their blocks against closed forms, and their means against enumeration and quadrature."""

import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase, relative_error
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Exponential,
    Gamma,
    Independent,
    MixtureSameFamily,
    Normal,
    TanhTransform,
    TransformedDistribution,
)
from torch.nn.functional import logsigmoid, softplus
from values import doubles, leaves, seeded

from toolkit import stochastic, unblock
from toolkit.gradients import field_jacobian
from toolkit.stochastic import (
    dice_loss,
    dreg_loss,
    enumerated_loss,
    implicit_sample,
    iwae_bound,
    iwae_loss,
    leave_one_out,
    magic_box,
    path_log_prob,
    rebar_loss,
    relaxed_bernoulli,
    score_function_loss,
    straight_through,
    vimco_loss,
    wake_loss,
    wake_proposal_loss,
)


def _grad(loss, *parameters, **options):
    return torch.autograd.grad(loss, parameters, **options)


# --- the programs ------------------------------------------------------------------------------------------------

THETA, LOG_P, REWARDS = doubles(0.2, -0.5, 1.0), doubles(-1.0, 0.3, -0.4), doubles(1.0, 0.3, -0.7)
DRAWS = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 2, 2, 1, 0])]
FEATURES = doubles(0.5, -1.0, 2.0, 0.3, 0.7)


def _sampled(p, c):
    log_q = p["theta"].log_softmax(0)
    costs = log_q - c["log_p"]
    return score_function_loss(c["draws"] @ log_q, c["draws"] @ costs, baseline=c["features"] * p["slope"])


def _sampled_witness(score_cost=0, baseline=0):
    """The gradient with these blocks open, from the scores of the draws."""

    def witness(parameters):
        theta, slope = parameters["theta"].detach(), parameters["slope"].detach()
        q = theta.softmax(0)
        scores, log_q = DRAWS - q, DRAWS @ q.log()
        signal = log_q - DRAWS @ LOG_P - FEATURES * slope
        by_theta = ((signal + 1 + score_cost * log_q)[:, None] * scores).mean(0)
        return {"theta": by_theta, "slope": -baseline * (log_q * FEATURES).mean()[None]}

    return witness


def _enumerated(p, c):
    log_q = p["theta"].log_softmax(0)
    return enumerated_loss(log_q, log_q * c["rewards"])


def _enumerated_witness(weights=0):
    def witness(parameters):
        q, r = parameters["theta"].detach().softmax(0), REWARDS
        return {"theta": q * (r - q @ r) + weights * q * (q.log() * r - q @ (q.log() * r))}

    return witness


SIGN = doubles(1, 1, -1, -1, 1, -1, 1, -1, 1, 1, -1, 1).reshape(3, 4)
COSTS = torch.arange(12, dtype=torch.float64).reshape(3, 4).sin()
BASELINES = torch.arange(12, dtype=torch.float64).reshape(3, 4).cos()


def _dice(p, c):
    """Bernoulli draws with the log-probability -softplus(sign * theta), and costs that depend on theta too."""
    return dice_loss(-softplus(c["sign"] * p["theta"]), c["costs"] * p["theta"], baselines=c["baselines"])


def _dice_witness(box):
    def witness(parameters):
        theta = parameters["theta"].detach()
        scores = -SIGN * (SIGN * theta).sigmoid()
        to_go = (COSTS * theta).flip(0).cumsum(0).flip(0)
        return {"theta": (COSTS + box * scores * (to_go - BASELINES)) / 4}

    return witness


LOG_WEIGHTS = doubles(0.3, -1.2, 0.8, 1.1, 0.4, -0.6).reshape(3, 2)
LOG_PROBS = doubles(-0.7, -1.9, -0.3, -1.1, -2.3, -0.8).reshape(3, 2)
# By their weight in the program of the peers.
IMPORTANCE = [
    (1, lambda p, c: iwae_loss(p["log_weights"])),
    (2, lambda p, c: dreg_loss(p["log_weights"])),
    (3, lambda p, c: wake_loss(p["log_weights"], p["log_probs"])),
    (4, lambda p, c: vimco_loss(p["log_weights"], p["log_probs"])),
]


def _importance_witness(of_column, leaks=0):
    """The gradient in NumPy, column by column: from w, the normalised w and its Jacobian, and log q."""

    def witness(parameters):
        log_w = parameters["log_weights"].detach().numpy()
        log_q = parameters.get("log_probs", parameters["log_weights"]).detach().numpy()
        gradients = []
        for column in range(2):
            w = np.exp(log_w[:, column])
            normal = w / w.sum()
            jacobian = np.diag(normal) - np.outer(normal, normal)
            gradients.append(of_column(w, normal, jacobian, log_q[:, column], leaks))
        found = (-torch.from_numpy(np.stack(slopes, 1)) / 2 for slopes in zip(*gradients, strict=True))
        return dict(zip(parameters, found, strict=False))

    return witness


def _iwae(w, normal, jacobian, log_q, leaks):
    return (normal + leaks * jacobian @ np.log(w),)


def _dreg(w, normal, jacobian, log_q, leaks):
    return (normal**2 + leaks * jacobian @ (2 * normal * np.log(w)),)


def _wake(w, normal, jacobian, log_q, leaks):
    return leaks * jacobian @ log_q, normal


def _vimco(w, normal, jacobian, log_q, leaks):
    by_weights, by_probs = normal.copy(), np.zeros(3)
    for k in range(3):
        others = np.delete(w, k)
        geometric = math.sqrt(others.prod())
        by_probs[k] = math.log(w.sum() / (others.sum() + geometric))
        without = np.insert(others + geometric / 2, k, 0) / (others.sum() + geometric)
        by_weights += leaks * log_q[k] * (normal - without)
    return by_weights, by_probs


NOISE, UNIFORM, OF_DENSITY, OF_SAMPLE = doubles(0.7, -1.1), doubles(0.4, 1.3), doubles(1.0, -0.6), doubles(0.8, 0.3)


def _density(p, c):
    scale = p["log_scale"].exp()
    log_prob = path_log_prob(Normal(p["mean"], scale), p["mean"] + scale * c["noise"])
    return (c["of_density"] * (log_prob + HALF_LOG_TAU)).sum()


def _density_witness(parameters):
    by_mean = -OF_DENSITY * NOISE / parameters["log_scale"].detach().exp()
    return {"mean": by_mean, "log_scale": -OF_DENSITY * NOISE**2}


def _implicit(p, c):
    return (c["of_sample"] * implicit_sample(Exponential(p["rate"]), c["uniform"] / p["rate"]).square()).sum()


def _implicit_witness(paths=1):
    """`paths` is how many times the derivative of the sample is counted."""

    def witness(parameters):
        rate = parameters["rate"].detach()
        return {"rate": paths * OF_SAMPLE * 2 * UNIFORM / rate * (-UNIFORM / rate**2)}

    return witness


NOISES = doubles(0.7, -1.1, 0.2, 1.4, -0.4, 0.9).reshape(3, 2)
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def _wake_samples(p, c):
    q = Normal(p["mean"], p["log_scale"].exp())
    return wake_proposal_loss(c["log_weights"], q, p["mean"] + p["log_scale"].exp() * c["noises"])


def _wake_samples_witness(parameters):
    w = LOG_WEIGHTS.exp() / LOG_WEIGHTS.exp().sum(0)
    by_mean = -(w * NOISES).sum(0) / parameters["log_scale"].detach().exp()
    return {"mean": by_mean / 2, "log_scale": -(w * (NOISES**2 - 1)).sum(0) / 2}


BITS, COST, OF_BITS = doubles(1, 0, 1), doubles(0.3, 0.2, 0.9), doubles(0.4, -0.7, 1.2)
FIRST, SECOND = doubles(0.9, -1.4, 0.2), doubles(-0.3, 0.6, 1.1)


def _control(p, c):
    theta, sign = p["theta"], 2 * c["bits"] - 1
    conditional = (sign * softplus(c["second"] + softplus(sign * theta))).sigmoid().square()
    return rebar_loss(-softplus(-sign * theta), c["cost"], (theta + c["first"]).sigmoid().square(), conditional)


def _control_witness(leaks=0):
    def witness(parameters):
        theta = parameters["theta"].detach()
        p, sign = theta.sigmoid(), 2 * BITS - 1
        log_prob = torch.where(BITS > 0, p, 1 - p).log()
        inner = SECOND + softplus(sign * theta)
        c = [(theta + FIRST).sigmoid(), (sign * softplus(inner)).sigmoid()]
        slopes = [2 * y**2 * (1 - y) for y in c]
        slopes[1] = slopes[1] * inner.sigmoid() * (sign * theta).sigmoid()  # sign^2 = 1
        score = (BITS - p) * (COST - c[1] ** 2)
        return {"theta": (score + slopes[0] - slopes[1] - leaks * log_prob * slopes[1]) / 3}

    return witness


def _through(p, c):
    return (c["of_bits"] * straight_through(c["bits"], p["theta"].sigmoid()) ** 3).sum()


def _through_witness(parameters):
    p = parameters["theta"].detach().sigmoid()
    return {"theta": OF_BITS * 3 * BITS**2 * p * (1 - p)}


CONSTANTS = {
    "stochastic_score": {"log_p": LOG_P, "draws": DRAWS, "features": FEATURES, "rewards": REWARDS},
    "stochastic_dice": {"sign": SIGN, "costs": COSTS, "baselines": BASELINES},
    "stochastic_importance": {},
    "stochastic_path": {
        "noise": NOISE,
        "uniform": UNIFORM,
        "of_density": OF_DENSITY,
        "of_sample": OF_SAMPLE,
        "noises": NOISES,
        "log_weights": LOG_WEIGHTS,
        "constant": doubles(HALF_LOG_TAU)[0],
    },
    "stochastic_draws": {"bits": BITS, "cost": COST, "of_bits": OF_BITS, "first": FIRST, "second": SECOND},
}
PARAMETERS = {
    "stochastic_score": {"theta": THETA, "slope": doubles(0.6)},
    "stochastic_dice": {"theta": 0.5 * BASELINES + 0.1},
    "stochastic_importance": {"log_weights": LOG_WEIGHTS, "log_probs": LOG_PROBS},
    "stochastic_path": {"mean": doubles(0.5, -0.3), "log_scale": doubles(-0.2, 0.4), "rate": doubles(0.7, 1.9)},
    "stochastic_draws": {"theta": doubles(0.4, -0.8, 1.3)},
}
LOSSES = {
    "stochastic_score": lambda p, c: _sampled(p, c) + _enumerated(p, c),
    "stochastic_dice": _dice,
    "stochastic_importance": lambda p, c: sum(weight * loss(p, c) for weight, loss in IMPORTANCE),
    "stochastic_path": lambda p, c: _density(p, c) + _implicit(p, c) + _wake_samples(p, c),
    "stochastic_draws": lambda p, c: _control(p, c) + _through(p, c),
}
PEER_CASES = {name: (PARAMETERS[name], CONSTANTS[name], loss) for name, loss in LOSSES.items()}


def _zero(parameters):
    return {name: torch.zeros_like(value) for name, value in parameters.items()}


def _case(program, block, names, part, blocked, opened, **options):
    """Return the case of a part of a program that depends on these parameters."""

    def loss(parameters):
        device = parameters[names[0]].device
        return part(parameters, {name: value.to(device) for name, value in CONSTANTS[program].items()})

    return BlockCase(
        id=block.name.replace(".", "-").replace("_", "-"),
        block=block,
        parameters=leaves(**{name: PARAMETERS[program][name] for name in names}),
        loss=loss,
        blocked=blocked,
        opened=opened,
        **options,
    )


def _importance_case(index, block, names, of_column):
    witnesses = _importance_witness(of_column), _importance_witness(of_column, 1)
    return _case("stochastic_importance", block, names, IMPORTANCE[index][1], *witnesses)


def _implicit_case(block, paths, **options):
    witnesses = _implicit_witness(), _implicit_witness(paths)
    return _case("stochastic_path", block, ["rate"], _implicit, *witnesses, **options)


SCORE, BOTH, GAUSSIAN = ["theta", "slope"], ["log_weights", "log_probs"], ["mean", "log_scale"]
BLOCK_CASES = [
    _case("stochastic_score", stochastic.SCORE_COST, SCORE, _sampled, _sampled_witness(), _sampled_witness(1, 0)),
    _case("stochastic_score", stochastic.BASELINE, SCORE, _sampled, _sampled_witness(), _sampled_witness(0, 1)),
    _case(
        "stochastic_score",
        stochastic.SAMPLING_WEIGHTS,
        ["theta"],
        _enumerated,
        _enumerated_witness(),
        _enumerated_witness(1),
    ),
    _case("stochastic_dice", stochastic.MAGIC_BOX, ["theta"], _dice, _dice_witness(1), _dice_witness(0)),
    _importance_case(0, stochastic.IWAE_WEIGHTS, BOTH[:1], _iwae),
    _importance_case(1, stochastic.DREG_WEIGHTS, BOTH[:1], _dreg),
    _importance_case(2, stochastic.WAKE_WEIGHTS, BOTH, _wake),
    _importance_case(3, stochastic.VIMCO_SIGNAL, BOTH, _vimco),
    _case(
        "stochastic_path",
        stochastic.DENSITY_PARAMETERS,
        GAUSSIAN,
        _density,
        _density_witness,
        lambda parameters: {"mean": torch.zeros_like(OF_DENSITY), "log_scale": -OF_DENSITY},
    ),
    _case(
        "stochastic_path",
        stochastic.WAKE_SAMPLES,
        GAUSSIAN,
        _wake_samples,
        _wake_samples_witness,
        lambda parameters: {"mean": torch.zeros(2).double(), "log_scale": torch.full((2,), 0.5).double()},
    ),
    _implicit_case(stochastic.IMPLICIT_SAMPLE, 2),
    _implicit_case(stochastic.IMPLICIT_POINT, 0),
    _implicit_case(stochastic.IMPLICIT_CDF, 0),
    _implicit_case(
        stochastic.IMPLICIT_DENSITY, 1, without_peer="Its leak is zero: it divides a difference that is zero."
    ),
    _case("stochastic_draws", stochastic.REBAR_SIGNAL, ["theta"], _control, _control_witness(), _control_witness(1)),
    _case("stochastic_draws", stochastic.STRAIGHT_THROUGH, ["theta"], _through, _through_witness, _zero),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.id)
def test_gradients_on_a_gpu_are_the_witnesses(case):
    parameters = {name: value.detach().to(ACCELERATOR).requires_grad_() for name, value in case.parameters().items()}
    found = dict(
        zip(parameters, _grad(case.loss(parameters), *parameters.values(), materialize_grads=True), strict=True)
    )
    assert relative_error({name: slope.cpu() for name, slope in found.items()}, case.blocked(case.parameters())) < 1e-10


# --- the score function ------------------------------------------------------------------------------------------


def _enumerated_score_function(theta, costs):
    """The mean of `score_function_loss` over all outcomes of one draw."""
    log_q = theta.log_softmax(0)
    losses = [score_function_loss(log_q[k : k + 1], costs(log_q)[k : k + 1]) for k in range(3)]
    return enumerated_loss(log_q, torch.stack(losses))


def test_the_mean_over_samples_is_the_gradient_of_the_expected_cost():
    theta = THETA.clone().requires_grad_()
    (found,) = _grad(_enumerated_score_function(theta, lambda log_q: log_q - LOG_P), theta)
    log_q = theta.log_softmax(0)
    (expected,) = _grad((log_q.exp() * (log_q - LOG_P)).sum(), theta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found, doubles(0.0395592300, -0.2471843031, 0.2076250730), rtol=0, atol=1e-10)


def test_an_open_cost_adds_an_entropy_bonus():
    theta = THETA.clone().requires_grad_()

    def cost(log_q):
        return log_q - LOG_P

    (closed,) = _grad(_enumerated_score_function(theta, cost), theta)
    with unblock(stochastic.SCORE_COST):
        (opened,) = _grad(_enumerated_score_function(theta, cost), theta)
    (of_the_entropy,) = _grad(Categorical(logits=theta).entropy(), theta)
    torch.testing.assert_close(opened, closed - of_the_entropy, rtol=1e-12, atol=1e-14)


def test_open_sampling_weights_add_the_gradient_of_the_weights():
    theta = THETA.clone().requires_grad_()
    log_q = theta.log_softmax(0)
    (closed,) = _grad(enumerated_loss(log_q, log_q * REWARDS), theta, retain_graph=True)
    torch.testing.assert_close(closed, doubles(0.2981783306, 0.0546808845, -0.3528592151), rtol=0, atol=1e-10)
    with unblock(stochastic.SAMPLING_WEIGHTS):
        (opened,) = _grad(enumerated_loss(log_q, log_q * REWARDS), theta)
    torch.testing.assert_close(opened, doubles(0.0037695134, 0.0032069031, -0.0069764165), rtol=0, atol=1e-10)


def test_an_impossible_outcome_does_not_count():
    theta = doubles(0.2, -math.inf, 1.0).requires_grad_()
    log_q = theta.log_softmax(0)
    costs = magic_box(log_q) * doubles(1.0, 5.0, -0.7) + log_q
    loss = enumerated_loss(log_q, costs)
    (gradient,) = _grad(loss, theta)
    two = doubles(0.2, 1.0).requires_grad_()
    log_q = two.log_softmax(0)
    (expected,) = _grad((log_q.exp() * doubles(1.0, -0.7)).sum(), two)  # the mean score is 0
    torch.testing.assert_close(gradient[[0, 2]], expected)
    assert loss.isfinite()
    assert gradient[1] == 0


@pytest.mark.parametrize("n_samples", [2, 3])
def test_leave_one_out_leaves_the_mean_of_the_gradient_unchanged(n_samples):
    """All outcomes of several independent draws, each weighted by its probability. The mean of all costs shrinks it."""
    theta = THETA.clone().requires_grad_()
    log_q = theta.log_softmax(0)
    means = {}
    for name, baseline in {"leave one out": leave_one_out, "mean of all": lambda c: c.mean(0)}.items():
        losses, log_probs = [], []
        for outcome in itertools.product(range(3), repeat=n_samples):
            drawn = log_q[list(outcome)]
            losses.append(score_function_loss(drawn, REWARDS[list(outcome)], baseline=baseline(REWARDS[list(outcome)])))
            log_probs.append(drawn.sum())
        (means[name],) = _grad(enumerated_loss(torch.stack(log_probs), torch.stack(losses)), theta, retain_graph=True)
    (exact,) = _grad(log_q.exp() @ REWARDS, theta)
    torch.testing.assert_close(means["leave one out"], exact)
    torch.testing.assert_close(means["mean of all"], exact * (n_samples - 1) / n_samples)


def test_the_exact_score_function_is_a_gradient_field_and_the_straight_through_one_is_none():
    theta = THETA.clone().requires_grad_()
    assert field_jacobian(lambda: _enumerated_score_function(theta, lambda c: c - LOG_P), [theta]).is_gradient_field

    logits = doubles(0.4, -0.9).requires_grad_()
    outcomes = doubles(*itertools.product((0, 1), repeat=2))
    log_q = -softplus((1 - 2 * outcomes) * logits.detach()).sum(1)

    def through():
        b = straight_through(outcomes, logits.sigmoid().expand(4, 2))
        return enumerated_loss(-softplus((1 - 2 * outcomes) * logits).sum(1), b[:, 0] ** 2 * b[:, 1])

    field = field_jacobian(through, [logits])
    p = logits.detach().sigmoid()
    slope = p * (1 - p)
    # d/d theta_2 of p_1' E[2 b_1 b_2], and d/d theta_1 of p_2' E[b_1^2]
    mixed = doubles(2 * p[0], 1.0) * slope[0] * slope[1]
    torch.testing.assert_close(field.jacobian[[0, 1], [1, 0]], mixed)
    assert log_q.exp().sum() == pytest.approx(1)
    assert not field.is_gradient_field


# --- DiCE --------------------------------------------------------------------------------------------------------


def _two_draws(theta, objective):
    """The mean over all outcomes of s1 ~ Bern(sigmoid(theta)), s2 ~ Bern(sigmoid(theta (1 + s1)))."""
    total = 0.0
    for s1, s2 in itertools.product((0.0, 1.0), repeat=2):
        log_probs = torch.stack([logsigmoid((2 * s - 1) * x) for s, x in ((s1, theta), (s2, theta * (1 + s1)))])
        costs = doubles(s1, 0.9 * (s1 * s2 - 0.5 * s2))
        total = total + log_probs.sum().exp().detach() * objective(log_probs, costs)
    return total


def _exact(theta):
    p, q = theta.sigmoid(), (2 * theta).sigmoid()
    return p + 0.9 * (p * q * 0.5 - (1 - p) * p * 0.5)


def _derivatives(value, theta, order=3):
    found = []
    for _ in range(order):
        if not value.requires_grad:
            return found + [0.0] * (order - len(found))
        (value,) = _grad(value, theta, create_graph=True)
        found.append(value.item())
    return found


@pytest.mark.parametrize("baseline", [None, 0.4], ids=["no baseline", "baseline"])
def test_dice_has_the_derivatives_of_the_mean_to_any_order(baseline):
    theta = doubles(0.3)[0].requires_grad_()
    baselines = None if baseline is None else doubles(baseline, -baseline)
    exact = _derivatives(_exact(theta), theta, 4)
    assert exact[:3] == pytest.approx([0.4501438726, 0.0361317228, -0.4657183021], abs=1e-10)
    # The weight of an outcome is its probability, a number: each derivative is the mean of those of the samples.
    value = _two_draws(theta, lambda log_probs, costs: dice_loss(log_probs, costs, baselines=baselines))
    assert value.item() == pytest.approx(0.6313378716, abs=1e-10)
    assert _derivatives(value, theta, 4) == pytest.approx(exact, rel=1e-12)


def test_a_baseline_of_dice_is_subtracted_from_the_costs_of_its_step_on():
    theta = PARAMETERS["stochastic_dice"]["theta"].clone().requires_grad_()
    (found,) = _grad(_dice({"theta": theta}, CONSTANTS["stochastic_dice"]), theta)
    torch.testing.assert_close(found, _dice_witness(1)({"theta": theta})["theta"])


def test_a_surrogate_of_the_first_order_is_wrong_at_the_second():
    theta = doubles(0.3)[0].requires_grad_()

    def surrogate(log_probs, costs):
        to_go = costs.flip(0).cumsum(0).flip(0)
        return (log_probs * to_go).sum()

    found = _derivatives(_two_draws(theta, surrogate), theta, 2)
    assert found == pytest.approx([0.4501438726, -0.2801816691], abs=1e-10)


def test_with_its_box_open_dice_has_no_derivative_of_any_order():
    theta = doubles(0.3)[0].requires_grad_()
    with unblock(stochastic.MAGIC_BOX):
        value = _two_draws(theta, dice_loss)
    assert _derivatives(value, theta) == [0.0, 0.0, 0.0]


# --- along the path ----------------------------------------------------------------------------------------------


def _evidence_bound(mean, scale, noise=0.7, m=-0.2, t=1.3):
    z = mean + scale * noise
    return Normal(doubles(m)[0], doubles(t)[0]).log_prob(z) - path_log_prob(Normal(mean, scale), z)


def test_sticking_the_landing_drops_the_score():
    mean, scale = doubles(0.5, 0.8).unbind()
    mean.requires_grad_(), scale.requires_grad_()
    closed = _grad(_evidence_bound(mean, scale), mean, scale)
    with unblock(stochastic.DENSITY_PARAMETERS):
        opened = _grad(_evidence_bound(mean, scale), mean, scale)
    assert [x.item() for x in closed] == pytest.approx([0.1294378698, 0.0906065089], abs=1e-10)
    assert [x.item() for x in opened] == pytest.approx([-0.7455621302, 0.7281065089], abs=1e-10)


def test_at_the_posterior_every_sample_has_gradient_zero():
    mean, scale = (x.requires_grad_() for x in doubles(-0.2, 1.3).unbind())
    for noise in (0.7, -2.0):
        assert [x.item() for x in _grad(_evidence_bound(mean, scale, noise), mean, scale)] == [0, 0]
    with unblock(stochastic.DENSITY_PARAMETERS):
        opened = _grad(_evidence_bound(mean, scale, 0.7), mean, scale)
    assert [x.item() for x in opened] == pytest.approx([-0.7 / 1.3, (1 - 0.49) / 1.3])


def _tanh_normal(loc, scale, cache_size):
    base = Independent(Normal(loc, scale), 1)
    return TransformedDistribution(base, [AffineTransform(loc[:1], scale[1:]), TanhTransform(cache_size=cache_size)])


def _mixture(loc, scale):
    return Independent(MixtureSameFamily(Categorical(logits=torch.stack([loc, scale])), Normal(loc, scale + 1)), 0)


@pytest.mark.parametrize("make", [lambda a, b: _tanh_normal(a, b, 0), _mixture], ids=["transformed", "mixture"])
def test_nested_distributions_are_held_in_all_their_parts(make):
    a, b, z = (
        doubles(0.3, -0.4).requires_grad_(),
        doubles(0.6, 0.9).requires_grad_(),
        doubles(0.1, 0.5).requires_grad_(),
    )
    z = z if make is not _mixture else z[0]
    q = make(a, b)
    plain, held = q.log_prob(z), path_log_prob(q, z)
    assert torch.equal(held, plain)
    assert _grad(held.sum(), a, b, allow_unused=True, retain_graph=True) == (None, None)
    torch.testing.assert_close(_grad(held.sum(), z), _grad(plain.sum(), z))


def test_a_weak_reference_to_an_inverse_is_made_again():
    """Earlier versions of torch keep the inverse of a transform that way."""
    affine, z = AffineTransform(doubles(0.3)[0], doubles(1.7)[0]), doubles(0.4)[0]
    q = TransformedDistribution(Normal(doubles(0.1)[0], doubles(0.8)[0]), [affine])
    expected = q.log_prob(z)
    affine._inv = weakref.ref(affine)
    assert path_log_prob(q, z) == expected


def test_a_cached_inverse_does_not_hide_the_path():
    """With a cache, log_prob(rsample()) takes the sample before the transform from it, and not from the sample."""
    slopes = []
    for cache_size in (0, 1):
        a, b = doubles(0.3, -0.4).requires_grad_(), doubles(0.6, 0.9).requires_grad_()
        q = _tanh_normal(a, b, cache_size)
        torch.manual_seed(0)
        slopes.append(torch.cat(_grad(path_log_prob(q, q.rsample()).sum(), a, b)))
    torch.testing.assert_close(slopes[0], slopes[1])


def test_a_cache_leaves_the_value_of_an_open_block_as_it_is():
    """Not the sample before the transform, whose inverse has another last bit."""
    q = _tanh_normal(doubles(0.3, -0.4).requires_grad_(), doubles(0.6, 0.9), 1)
    torch.manual_seed(0)
    z = q.rsample((50,))
    closed = path_log_prob(q, z)
    with unblock(stochastic.DENSITY_PARAMETERS):
        opened = path_log_prob(q, z)
    assert torch.equal(closed, opened)


def test_parameters_that_cannot_be_found_are_refused():
    q = Normal(doubles(0.3)[0].requires_grad_(), 1.0)
    q.network = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"^`distribution` should hold its parameters in tensors.*Found Linear\.$"):
        path_log_prob(q, doubles(0.1)[0])


def test_implicit_gradients_of_a_mixture_are_those_of_the_inverted_distribution_function():
    parameters = [x.requires_grad_() for x in doubles(0.4, -1.0, 0.8).unbind()]

    def mixture(logit, first, second):
        components = Normal(torch.stack([first, second]), doubles(1.0, 0.5))
        return MixtureSameFamily(Categorical(logits=torch.stack([logit, torch.zeros_like(logit)])), components)

    z = doubles(0.3)[0]
    found = _grad(implicit_sample(mixture(*parameters), z), *parameters)
    assert [x.item() for x in found] == pytest.approx([-0.6026953373, 0.3456654918, 0.6543345082], abs=1e-10)

    with torch.no_grad():
        level = mixture(*parameters).cdf(z).item()
        for i, slope in enumerate(found):
            ends = []
            for step in (-1e-5, 1e-5):
                moved = mixture(*(x + step * (i == j) for j, x in enumerate(parameters)))
                low, high = doubles(-9.0)[0], doubles(9.0)[0]
                for _ in range(60):
                    middle = (low + high) / 2
                    low, high = (middle, high) if moved.cdf(middle) < level else (low, middle)
                ends.append(low)
            assert ((ends[1] - ends[0]) / 2e-5).item() == pytest.approx(slope.item(), rel=1e-7)


class SeriesGamma(torch.distributions.Gamma):
    """A Gamma distribution whose distribution function is a power series, differentiable in the shape."""

    def cdf(self, value):
        a, x = self.concentration, value * self.rate
        terms = torch.cumprod(x / (a + torch.arange(1, 200, dtype=x.dtype)), 0)
        return (a * x.log() - x - torch.lgamma(a + 1)).exp() * (1 + terms.sum())


@pytest.mark.parametrize(("shape", "z"), [(2.3, 1.7), (12.0, 9.0), (0.3, 0.05)])
def test_torch_has_the_same_gradient_of_a_gamma_sample(shape, z):
    """Torch's is an approximation: it differs from 2e-5 on, in float64 too."""
    a = doubles(shape)[0].requires_grad_()
    (found,) = _grad(implicit_sample(SeriesGamma(a, doubles(1.0)[0]), doubles(z)[0]), a)
    theirs = torch._standard_gamma_grad(a.detach(), doubles(z)[0])
    assert theirs.item() == pytest.approx(found.item(), rel=1e-4)
    if shape == 2.3:
        assert found.item() == pytest.approx(0.9198276082, abs=1e-10)


def test_implicit_gradients_are_those_of_torchs_normal():
    mean, scale = (x.requires_grad_() for x in doubles(0.5, 0.8).unbind())
    q = Normal(mean, scale)
    z = q.rsample((5,))
    weights = doubles(0.1, -0.7, 1.3, 0.4, 0.9)
    for exact, found in zip(
        _grad(weights @ z.sin(), mean, scale),
        _grad(weights @ implicit_sample(q, z.detach()).sin(), mean, scale),
        strict=True,
    ):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


def test_an_implicit_sample_where_the_density_underflows_has_no_gradient():
    mean = doubles(0.0)[0].requires_grad_()
    found = implicit_sample(Normal(mean, 1.0), doubles(50.0, 1.0))
    assert found.tolist() == [50.0, 1.0]
    (slope,) = _grad(found[0], mean)
    assert slope == 0


def test_a_distribution_without_a_distribution_function_is_refused():
    with pytest.raises(ValueError, match=r"^`distribution` should have a distribution function, `cdf`. Found Beta\.$"):
        implicit_sample(torch.distributions.Beta(2.0, 3.0), torch.tensor(0.3))


@pytest.mark.parametrize("q", [Bernoulli(0.3), Independent(Normal(torch.zeros(2), 1.0), 1)], ids=["discrete", "vector"])
def test_only_continuous_scalars_have_implicit_samples(q):
    with pytest.raises(ValueError, match=r"^`distribution` should be continuous with scalar events\. Found"):
        implicit_sample(q, torch.zeros(2))


# --- several importance samples ----------------------------------------------------------------------------------

THREE = doubles(0.7, -1.1, 0.2)


def _log_weights(mean, scale, noise):
    """A Gaussian prior and likelihood at x = 0.9: log-weights whose proposal's density holds its parameters."""
    z = mean + scale * noise
    log_joint = Normal(doubles(-0.2)[0], doubles(1.3)[0]).log_prob(z) + Normal(z, doubles(0.6)[0]).log_prob(
        doubles(0.9)[0]
    )
    return log_joint - path_log_prob(Normal(mean, scale), z)


def _bound_gradient(loss, noise, opened):
    mean, scale = (x.requires_grad_() for x in doubles(0.5, 0.8).unbind())
    with unblock(*opened):
        return [-x.item() for x in _grad(loss(_log_weights(mean, scale, noise)), mean, scale)]


DENSITY, SQUARES = stochastic.DENSITY_PARAMETERS, stochastic.DREG_WEIGHTS
ESTIMATORS = {
    "iwae": (iwae_loss, [DENSITY], (-0.0673934491, 0.4512836847)),
    "stl": (iwae_loss, [], (0.2870289399, -0.3367048209)),
    "dreg": (dreg_loss, [], (0.0428016370, -0.0584502912)),
    "dreg, weights open": (dreg_loss, [SQUARES], (0.1469525978, -0.1712692507)),
    "dreg, density open": (dreg_loss, [DENSITY], (-0.1666806967, 0.3013162198)),
    "dreg, both open": (dreg_loss, [SQUARES, DENSITY], (0.0275291677, 0.1343598599)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_of_the_bound_at_given_samples(name):
    loss, opened, expected = ESTIMATORS[name]
    assert _bound_gradient(loss, THREE, opened) == pytest.approx(expected, abs=1e-10)


def _quadrature_mean(loss, opened, n=60, whole=False):
    """The mean of a gradient over both samples, by Gauss-Hermite quadrature of n^2 points."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n)
    weights = torch.from_numpy(np.outer(weights, weights).ravel() / (2 * math.pi))
    noise = torch.from_numpy(np.stack([x.ravel() for x in np.meshgrid(nodes, nodes, indexing="ij")]))
    mean, scale = (x.expand(n * n).clone().requires_grad_() for x in doubles(0.5, 0.8).unbind())
    with unblock(*opened):
        value = loss(mean, scale, noise) if whole else loss(_log_weights(mean, scale, noise))
        slopes = _grad(n * n * value, mean, scale)
    return [-(weights @ slope).item() for slope in slopes]


def test_dreg_has_the_mean_of_iwae_and_sticking_the_landing_has_not():
    iwae = _quadrature_mean(iwae_loss, [DENSITY])
    assert iwae == pytest.approx([0.2218823994, -0.4081107871], abs=1e-9)
    assert _quadrature_mean(dreg_loss, []) == pytest.approx(iwae, abs=1e-6)
    assert _quadrature_mean(iwae_loss, []) == pytest.approx([0.4421619331, -0.8322621433], abs=1e-9)


def test_the_wake_phase_of_a_proposal_by_quadrature():
    """Its mean is that of the path form of Tucker and others, with the weights w - w^2."""

    def path_form(log_weights):
        w = log_weights.detach().softmax(0)
        return -((w - w**2) * log_weights).sum(0).mean()

    def wake(mean, scale, noise):
        return wake_proposal_loss(_log_weights(mean, scale, noise), Normal(mean, scale), mean + scale * noise)

    assert _quadrature_mean(path_form, []) == pytest.approx([0.2202795837, -0.4241514759], abs=1e-9)
    assert _quadrature_mean(wake, [], whole=True) == pytest.approx([0.2202795337, -0.4241513562], abs=1e-9)


def test_the_blocked_weights_give_the_gradient_of_the_bound():
    log_weights = LOG_WEIGHTS.clone().requires_grad_()
    (of_the_bound,) = _grad(iwae_bound(log_weights), log_weights)
    torch.testing.assert_close(_grad(iwae_loss(log_weights), log_weights)[0], -of_the_bound)
    expected = math.log(np.exp(LOG_WEIGHTS.numpy()).mean(0).prod()) / 2
    assert iwae_bound(LOG_WEIGHTS).item() == pytest.approx(expected)


def test_vimco_enumerated():
    """Bernoulli, K = 2: joint probabilities .06 and .42 of the two outcomes."""
    phi = doubles(0.4)[0].requires_grad_()
    log_q = logsigmoid(torch.stack([-phi, phi]))
    log_w = doubles(0.06, 0.42).log() - log_q

    def mean(loss):
        pairs = [list(pair) for pair in itertools.product((0, 1), repeat=2)]
        losses = torch.stack([loss(log_w[pair], log_q[pair]) for pair in pairs])
        return enumerated_loss(torch.stack([log_q[pair].sum() for pair in pairs]), losses)

    (closed,) = _grad(mean(vimco_loss), phi, retain_graph=True)
    with unblock(stochastic.VIMCO_SIGNAL):
        (opened,) = _grad(mean(vimco_loss), phi, retain_graph=True)
    with unblock(stochastic.SAMPLING_WEIGHTS):
        (exact,) = _grad(mean(lambda w, q: -iwae_bound(w)), phi)
    assert closed.item() == pytest.approx(exact.item(), rel=1e-12)
    assert -closed.item() == pytest.approx(0.1896853985, abs=1e-10)
    assert -opened.item() == pytest.approx(0.3158191258, abs=1e-10)


@pytest.mark.parametrize("k", [2, 5])
def test_second_derivatives_of_vimco_with_its_block_open(k):
    """Against the definition, which takes each geometric mean on its own."""
    log_weights, log_probs = (torch.randn(k, generator=seeded(seed), dtype=torch.float64) for seed in (1, 2))

    def definition(w):
        means = [(w.sum() - w[i]) / (k - 1) for i in range(k)]
        without = torch.stack([torch.cat([w[:i], means[i][None], w[i + 1 :]]).logsumexp(0) for i in range(k)])
        return math.log(k) - w.logsumexp(0) - (log_probs * (w.logsumexp(0) - without)).sum()

    with unblock(stochastic.VIMCO_SIGNAL):
        found = torch.autograd.functional.hessian(lambda w: vimco_loss(w, log_probs), log_weights)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(definition, log_weights))


def test_vimco_with_many_samples_and_weights_of_zero():
    """Against the definition, a log-sum for each sample; a weight of zero pulls the geometric mean to zero."""
    log_w = torch.randn(40, 3, generator=seeded(), dtype=torch.float64) * 20
    log_w[4, 1] = -math.inf
    log_q = torch.zeros(40, 3, dtype=torch.float64, requires_grad=True)
    (slopes,) = _grad(vimco_loss(log_w, log_q), log_q)
    for k in range(40):
        others = torch.cat([log_w[:k], log_w[k + 1 :]])
        without = torch.cat([others, others.mean(0, keepdim=True)]).logsumexp(0)
        torch.testing.assert_close(slopes[k], -(log_w.logsumexp(0) - without) / 3, rtol=1e-10, atol=1e-12)


def test_the_wake_phase_of_the_proposal_is_that_of_the_posterior_and_no_gradient():
    """One sample of each outcome has the posterior as weights: KL(p(z|x) || q) for the proposal."""
    joint, phi = doubles(0.1, -0.7, 0.4).requires_grad_(), doubles(0.5, 0.2, -0.3).requires_grad_()

    def loss():
        log_q = phi.log_softmax(0)
        return wake_loss(joint, log_q) + wake_loss(joint, joint)

    posterior = joint.detach().softmax(0)
    torch.testing.assert_close(_grad(loss(), phi)[0], phi.detach().softmax(0) - posterior)
    field = field_jacobian(loss, [joint, phi])
    covariance = posterior.diag() - posterior.outer(posterior)
    torch.testing.assert_close(field.jacobian[3:, :3], -covariance)
    torch.testing.assert_close(field.jacobian[:3, 3:], torch.zeros(3, 3, dtype=torch.float64))
    assert not field.is_gradient_field


@pytest.mark.parametrize("loss", [iwae_loss, dreg_loss, lambda w: wake_loss(w, w)], ids=["iwae", "dreg", "wake"])
def test_a_sample_without_weight_does_not_count(loss):
    log_weights = doubles(0.3, -math.inf, 1.0).requires_grad_()
    value = loss(log_weights)
    (slope,) = _grad(value, log_weights)
    assert value.isfinite()
    assert slope.isfinite().all()
    assert slope[1] == 0
    rest = loss(log_weights[[0, 2]])
    torch.testing.assert_close(value, rest)


# --- control variates and straight through -----------------------------------------------------------------------


def _rebar(theta, u, v, eta, temperature=0.5):
    """Tucker's estimator with his f, written from uniform numbers; the draw b is given."""
    z = theta + (u / (1 - u)).log()
    b = (z > 0).to(theta)
    p = theta.sigmoid()
    uniform = torch.where(b > 0, v * p + 1 - p, v * (1 - p))
    other = theta + (uniform / (1 - uniform)).log()
    cost = (b - 0.45).square()
    c, conditional = (eta * ((x / temperature).sigmoid() - 0.45).square() for x in (z, other))
    return rebar_loss(-softplus((1 - 2 * b) * theta), cost, c, conditional)


def test_rebar_at_given_draws():
    theta = doubles(0.4)[0].requires_grad_()
    (closed,) = _grad(_rebar(theta, doubles(0.3), doubles(0.6), 0.8), theta)
    with unblock(stochastic.REBAR_SIGNAL):
        (opened,) = _grad(_rebar(theta, doubles(0.3), doubles(0.6), 0.8), theta)
    assert [closed.item(), opened.item()] == pytest.approx([-0.1654086786, -0.1900675240], abs=1e-10)


def test_rebar_is_unbiased_and_with_its_block_open_biased():
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(200))
    jump = 1 / (1 + math.exp(0.4))  # u where b jumps
    pieces = [(0.0, jump), (jump, 1.0)]
    u = torch.cat([(b + a) / 2 + (b - a) / 2 * nodes for a, b in pieces])
    of_u = torch.cat([(b - a) / 2 * weights for a, b in pieces])
    v, of_v = (1 + nodes) / 2, weights / 2
    total = (of_u[:, None] * of_v).reshape(-1)
    grid = torch.cartesian_prod(u, v)

    def mean(*opened):
        theta = torch.full_like(total, 0.4, requires_grad=True)
        with unblock(*opened):
            (slopes,) = _grad(len(total) * _rebar(theta, *grid.T, 0.8), theta)
        return (total @ slopes).item()

    p = 1 / (1 + math.exp(-0.4))
    assert mean() == pytest.approx(p * (1 - p) * (0.55**2 - 0.45**2), rel=1e-8)
    assert mean(stochastic.REBAR_SIGNAL) == pytest.approx(0.0273618666, abs=1e-9)


def test_the_draws_of_rebar_have_the_distributions_that_they_should():
    """b is Bernoulli; z and its second draw are both logistic around theta, with b as their sign."""
    theta = doubles(0.7)[0]
    b, z, other = relaxed_bernoulli(theta.expand(200_000), generator=seeded())
    p = theta.sigmoid().item()
    assert b.mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / 200_000))
    for relaxed in (z, other):
        assert torch.equal((relaxed > 0).double(), b)
        uniform = (relaxed - theta).sigmoid().sort().values
        steps = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
        assert (uniform - steps).abs().max() < 2 / math.sqrt(200_000)  # Kolmogorov: above by chance in 1 of 1,500
    inside = torch.corrcoef(torch.stack([z[b > 0], other[b > 0]]))[0, 1]  # independent given b
    assert abs(inside) < 5 / math.sqrt(b.sum())


def test_the_second_draw_moves_with_theta_at_a_fixed_bit():
    theta = doubles(0.6, -1.1, 0.2, -0.3).requires_grad_()
    draw = relaxed_bernoulli(theta, generator=seeded(3))
    assert sorted(draw.sample.unique().tolist()) == [0, 1]
    assert not draw.sample.requires_grad
    (found,) = _grad(draw.conditional.sum(), theta)
    generator = seeded(3)
    torch.rand(4, generator=generator, dtype=torch.float64)
    v, b, p = torch.rand(4, generator=generator, dtype=torch.float64), draw.sample, theta.sigmoid()
    uniform = torch.where(b > 0, v * p + 1 - p, (1 - v) * (1 - p))
    by_inversion = theta + (uniform / (1 - uniform)).log()
    torch.testing.assert_close(draw.conditional, by_inversion)
    torch.testing.assert_close(found, _grad(by_inversion.sum(), theta)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_saturated_logits_give_finite_draws_and_gradients(dtype):
    theta = torch.tensor([-80.0, 80.0, 0.0], dtype=dtype, requires_grad=True)
    b, z, other = relaxed_bernoulli(theta, generator=seeded())
    assert b.tolist()[:2] == [0, 1]
    assert b.dtype == z.dtype == other.dtype == dtype
    log_prob = -softplus((1 - 2 * b) * theta)
    loss = rebar_loss(log_prob, (b - 0.45) ** 2, z.sigmoid(), other.sigmoid())
    (slope,) = _grad(loss, theta)
    assert slope.isfinite().all()
    assert torch.stack([z, other]).isfinite().all()


def test_straight_through_keeps_the_bits_and_is_biased_for_a_cost_that_is_not_linear():
    b, p = torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.7], requires_grad=True)
    assert torch.equal(straight_through(b, p), b)

    theta = doubles(0.4)[0].requires_grad_()
    log_q = logsigmoid(torch.stack([-theta, theta]))
    b = straight_through(doubles(0.0, 1.0), theta.sigmoid().expand(2))
    (found,) = _grad(enumerated_loss(log_q, (b - 0.45) ** 3), theta)
    p = theta.sigmoid().item()
    exact = p * (1 - p) * (0.55**3 + 0.45**3)
    stated = p * (1 - p) * 3 * (p * 0.55**2 + (1 - p) * 0.45**2)
    assert found.item() == pytest.approx(stated)
    assert stated / exact == pytest.approx(3.0567, abs=1e-4)


# --- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", LOSSES)
def test_other_precisions_agree_with_float64(program, dtype):
    def gradient(dtype):
        parameters = {name: x.to(dtype, copy=True).requires_grad_() for name, x in PARAMETERS[program].items()}
        loss = LOSSES[program](parameters, {name: x.to(dtype) for name, x in CONSTANTS[program].items()})
        assert loss.dtype == dtype
        return torch.cat(
            [slope.double().reshape(-1) for slope in _grad(loss, *parameters.values(), materialize_grads=True)]
        )

    exact = gradient(torch.float64)
    assert (gradient(dtype) - exact).norm() <= 30 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize(
    "program", sorted(set(LOSSES) - {"stochastic_path"})
)  # torch.distributions checks its arguments with branches
def test_losses_can_be_mapped_over_a_batch(program):
    parameters = {name: torch.stack([x, x + 0.1]) for name, x in PARAMETERS[program].items()}

    def loss(p):
        return LOSSES[program](p, CONSTANTS[program])

    mapped = torch.func.vmap(torch.func.grad(loss))(parameters)
    for i in range(2):
        leaves = {name: x[i].clone().requires_grad_() for name, x in parameters.items()}
        slopes = _grad(loss(leaves), *leaves.values(), materialize_grads=True)
        for name, slope in zip(leaves, slopes, strict=True):
            torch.testing.assert_close(mapped[name][i], slope)


@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("program", LOSSES)
def test_losses_compile_without_a_break(program):
    torch.compiler.reset()
    leaves = {name: x.clone().requires_grad_() for name, x in PARAMETERS[program].items()}
    compiled = torch.compile(lambda p: LOSSES[program](p, CONSTANTS[program]), backend="aot_eager", fullgraph=True)
    slopes = [
        _grad(f(leaves), *leaves.values(), materialize_grads=True)
        for f in (compiled, lambda p: LOSSES[program](p, CONSTANTS[program]))
    ]
    for found, expected in zip(*slopes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


X, Y = torch.zeros(3, 2), torch.zeros(3)
WRONG = [
    (lambda: score_function_loss(X, Y), "`cost` should have the shape of `log_prob`, (3, 2). Found (3,)."),
    (
        lambda: score_function_loss(Y, Y, baseline=torch.zeros(3, 1)),
        "`baseline` should broadcast to the shape of `cost`. Found (3, 1) and (3,).",
    ),
    (
        lambda: score_function_loss(Y, Y, baseline=torch.zeros(2)),
        "`baseline` should broadcast to the shape of `cost`. Found (2,) and (3,).",
    ),
    (lambda: enumerated_loss(X, Y), "`losses` should have the shape of `log_probs`, (3, 2). Found (3,)."),
    (lambda: dice_loss(X, Y), "`log_probs` should have the shape of `costs`, (3,). Found (3, 2)."),
    (lambda: dice_loss(Y, Y, baselines=X), "`baselines` should have the shape of `costs`, (3,). Found (3, 2)."),
    (lambda: dice_loss(Y[0], Y[0]), "`log_probs` should have a sample along dimension 0. Found shape ()."),
    (lambda: leave_one_out(Y[:1]), "`costs` should have at least 2 samples along dimension 0. Found shape (1,)."),
    (lambda: wake_loss(X, Y), "`log_probs` should have the shape of `log_weights`, (3, 2). Found (3,)."),
    (
        lambda: vimco_loss(X[:1], X[:1]),
        "`log_weights` should have at least 2 samples along dimension 0. Found shape (1, 2).",
    ),
    (lambda: vimco_loss(X, Y), "`log_probs` should have the shape of `log_weights`, (3, 2). Found (3,)."),
    *(
        (lambda loss=loss: loss(X[:0]), "`log_weights` should have a sample along dimension 0. Found shape (0, 2).")
        for loss in (iwae_bound, iwae_loss, dreg_loss)
    ),
    (
        lambda: implicit_sample(Normal(torch.zeros(3, 1), 1.0), X[:, 0]),
        "`value` should have a shape that ends with the batch shape (3, 1) of the distribution. Found (3,).",
    ),
    (lambda: rebar_loss(X, X, X, Y), "`conditional` should have the shape of `log_prob`, (3, 2). Found (3,)."),
    (lambda: straight_through(X, Y), "`mean` should have the shape of `sample`, (3, 2). Found (3,)."),
    (lambda: straight_through([1.0], X), "`sample` should be a floating-point tensor. Found list."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_shapes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_a_gamma_has_no_distribution_function_that_torch_can_differentiate():
    """It raises, and does not give a gradient without the part of the shape."""
    a = doubles(2.3)[0].requires_grad_()
    with pytest.raises((RuntimeError, NotImplementedError)):
        _grad(implicit_sample(Gamma(a, doubles(1.0)[0]), doubles(1.7)[0]), a)
