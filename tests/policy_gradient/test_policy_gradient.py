"""Every surrogate has the policy gradient, or the rule that is written for it, with its blocks in place."""

from functools import partial

import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase
from each import each
from torch import nn
from values import doubles

from toolkit import policy_gradient as pg
from toolkit import stop_gradient, unblock
from toolkit.gradients import field_jacobian

F64 = torch.float64


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# --- the problems: parameters, constants and the surrogate -----------------------------------------------------------

LOGITS = doubles([0.2, -0.4, 0.7], [1.0, 0.1, -0.3])
ACTIONS = torch.tensor([2, 0])
ONE_HOT = doubles([0, 0, 1], [1, 0, 0])
ADVANTAGES, WEIGHTS = doubles(1.5, -0.8), doubles(0.5, 2.0)
Q = doubles([1.0, 0.5, -0.3], [0.2, 0.9, 0.4])
R, D, V = doubles(0.7, -0.3, 1.1, 0.2), doubles(0.9, 0.9, 0.8, 0.9), doubles(0.1, 0.6, -0.4, 0.8, 0.25)
RHO, TRACE, ON_TIMES = doubles(0.6, 1.8, 0.9, 2.5), 0.7, doubles(0.5, -1.0, 2.0, 0.3)
DRAWS, MEAN, LOG_STD = draw(1, 2, 3), draw(2, 2, 3), 0.3 * draw(3, 2, 3)
LOG_PROB, OLD, REFERENCE = doubles(-1.2, -0.5, -2.0), doubles(-0.9, -0.6, -2.1), doubles(-1.1, -0.3, -1.4)
ON_ACTIONS, RATIOS = doubles(1.5, -0.8, 0.3), doubles(1.3, 1.1, 0.9)
TOKENS, REWARDS = -draw(4, 3, 4).square(), doubles(0.3, -1.2, 0.8)
MASK = doubles([1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1])
GAUSSIAN = {"mean": doubles(0.2)[0], "log_std": doubles(-0.3)[0], "k": doubles(0.8)[0], "log_alpha": doubles(-1.0)[0]}
NORMAL, TAKEN = doubles(0.5, -1.2), doubles(0.1, -0.6)
ACTION, CURVATURE = doubles(0.4, -0.7), doubles([2.0, 0.5], [0.5, 1.0])
SLOPES = doubles([0.5, -0.2], [1.5, 0.3])
TWINS, LATER = draw(5, 2, 3), draw(6, 2, 3)


class Quadratic(nn.Module):
    """``Q(a) = -a' M a / 2``, as a module whose parameter is given."""

    def __init__(self, matrix):
        super().__init__()
        self._parameters["matrix"] = matrix

    def forward(self, action):
        return -0.5 * action @ self.matrix @ action


def of_chosen(logits):
    return ACTIONS.to(logits.device)


def gaussian_scores(p, c):
    action = p["mean"] + p["log_std"].exp() * c["draws"]
    return (c["on_rows"] * pg.gaussian_log_prob(action, p["mean"], p["log_std"])).sum()


def expected(p, c):
    baseline = (p["logits"].softmax(-1) * p["q"]).sum(-1)
    return pg.expected_policy_gradient_loss(p["logits"], p["q"], baseline)


def kl_penalties(p, c):
    kinds = (("k1", 1.0), ("k2", 0.5), ("k3", 2.0))
    return sum(w * (c["w"] * pg.kl_penalty(p["log_prob"], p["reference"], kind)).sum() for kind, w in kinds)


def generalized_advantages(p, c):
    found = pg.truncated_generalized_advantage_estimation(c["r"], c["d"], TRACE, p["v"])
    return (c["w"] * found).sum() + 0.5 * p["v"].square().sum()


def vtrace_errors(p, c):
    return 0.5 * pg.vtrace(p["v"][:-1], p["v"][1:], c["r"], c["d"], p["rho"], TRACE, 2.0).square().sum()


def vtrace_advantages(p, c):
    found = pg.vtrace_td_error_and_advantage(p["v"][:-1], p["v"][1:], c["r"], c["d"], p["rho"], TRACE, 2.0, 1.2)
    return (c["w"] * (found.pg_advantage + 0.3 * found.q_estimate + 0.1 * found.errors)).sum()


def drawn(p, c):
    """Return the log-probability of a Gaussian policy's action, and its value."""
    action = p["mean"] + p["log_std"].exp() * c["normal"]
    log_prob = -0.5 * c["normal"].square() - p["log_std"] - 0.9189385332046727
    return log_prob, -0.5 * p["k"] * (action - 1).square()


def soft_actor(p, c):
    return pg.sac_actor_loss(p["log_alpha"], *drawn(p, c))


def soft_critic(p, c):
    log_prob, q = drawn(p, c)
    q_tm1 = -0.5 * p["k"] * (c["taken"] - 1).square()
    constants = torch.full_like(q, 0.5), torch.full_like(q, 0.99)
    return pg.sac_critic_loss(q_tm1, *constants, q, log_prob, p["log_alpha"])


def soft_temperature(p, c, multiplier="alpha"):
    log_prob, _ = drawn(p, c)
    return pg.sac_temperature_loss(p["log_alpha"], log_prob, target_entropy=-1.0, multiplier=multiplier)


def grouped(p, c):
    return pg.grpo_loss(
        p["log_prob"], p["adv"], reference_log_prob_t=c["reference"], beta=0.3, epsilon=0.2, mask_t=c["mask"]
    )


SAC = {"normal": NORMAL, "taken": TAKEN}
PEER_CASES = {
    "policy_gradient": (
        {"logits": LOGITS, "adv": ADVANTAGES},
        {"one_hot": ONE_HOT, "w": WEIGHTS},
        lambda p, c: pg.policy_gradient_loss(p["logits"], of_chosen(p["logits"]), p["adv"], c["w"]),
    ),
    "actor_critic": (
        {"logits": LOGITS, "v": doubles(0.3, -0.2), "g": doubles(1.2, 0.5)},
        {"one_hot": ONE_HOT},
        lambda p, c: pg.actor_critic_loss(p["logits"], of_chosen(p["logits"]), p["v"], p["g"], critic_weight=0.7),
    ),
    "gaussian_scores": (
        {"mean": MEAN, "log_std": LOG_STD},
        {"draws": DRAWS, "on_rows": ADVANTAGES},
        gaussian_scores,
    ),
    "expected_policy_gradient": ({"logits": LOGITS, "q": Q}, {}, expected),
    "q_policy_gradient": ({"logits": LOGITS, "q": Q}, {}, lambda p, c: pg.qpg_loss(p["logits"], p["q"])),
    "regret_matching": ({"logits": LOGITS, "q": Q}, {}, lambda p, c: pg.rm_loss(p["logits"], p["q"])),
    "regret": ({"logits": LOGITS, "q": Q}, {}, lambda p, c: pg.rpg_loss(p["logits"], p["q"])),
    "ratio_to_itself": (
        {"log_prob": LOG_PROB},
        {"w": ON_ACTIONS},
        lambda p, c: -(pg.importance_ratios(p["log_prob"]) * c["w"]).mean(),
    ),
    "clipped_surrogate": (
        {"ratios": RATIOS, "adv": ON_ACTIONS},
        {},
        lambda p, c: pg.clipped_surrogate_pg_loss(p["ratios"], p["adv"], 0.2),
    ),
    "grouped": ({"log_prob": TOKENS, "adv": REWARDS}, {"reference": TOKENS - 0.4, "mask": MASK}, grouped),
    "off_policy": (
        {"log_prob": LOG_PROB, "adv": ON_ACTIONS},
        {"behaviour": OLD},
        lambda p, c: pg.off_policy_pg_loss(p["log_prob"], c["behaviour"], p["adv"]),
    ),
    "kl_penalties": ({"log_prob": LOG_PROB, "reference": REFERENCE}, {"w": ON_ACTIONS}, kl_penalties),
    "reverse_kl": (
        {"log_prob": LOG_PROB, "reference": REFERENCE},
        {},
        lambda p, c: pg.reverse_kl_loss(p["log_prob"], p["reference"]),
    ),
    "generalized_advantages": ({"v": V}, {"r": R, "d": D, "w": ON_TIMES}, generalized_advantages),
    "generalized_values": ({"v": V}, {"r": R, "d": D}, lambda p, c: pg.gae_value_loss(c["r"], c["d"], TRACE, p["v"])),
    "vtrace_errors": ({"v": V, "rho": RHO}, {"r": R, "d": D}, vtrace_errors),
    "vtrace_advantages": ({"v": V, "rho": RHO}, {"r": R, "d": D, "w": ON_TIMES}, vtrace_advantages),
    "soft_actor": (GAUSSIAN, SAC, soft_actor),
    "soft_critic": (GAUSSIAN, SAC, soft_critic),
    "soft_temperature": (GAUSSIAN, SAC, soft_temperature),
    "deterministic": (
        {"action": ACTION, "matrix": CURVATURE},
        {},
        lambda p, c: -pg.held_critic(Quadratic(p["matrix"]), p["action"]),
    ),
    "improved_action": (
        {"action": doubles([0.4, -0.7], [1.1, 0.2]), "slope": SLOPES},
        {},
        lambda p, c: pg.dpg_loss(p["action"], p["slope"], 1.0).sum(),
    ),
    "pessimistic_critics": (
        {"q": TWINS, "later": LATER},
        {"r": doubles(0.7, -0.3, 1.1), "d": doubles(0.9, 0.0, 0.8)},
        lambda p, c: pg.td3_critic_loss(p["q"], c["r"], c["d"], p["later"]),
    ),
}


# --- the witnesses: closed forms of both gradients --------------------------------------------------------------------


def numbers(p):
    return {name: value.detach() for name, value in p.items()}


def policy_gradient(p, leak):
    p = numbers(p)
    pi = p["logits"].softmax(-1)
    weight = WEIGHTS * p["adv"] / 2
    log_pi = (pi.log() * ONE_HOT).sum(-1)
    return {"logits": weight[:, None] * (pi - ONE_HOT), "adv": -leak * WEIGHTS * log_pi / 2}


def actor_critic(p, into_value=0, into_return=0):
    p = numbers(p)
    pi, gap = p["logits"].softmax(-1), p["g"] - p["v"]
    log_pi = (pi.log() * ONE_HOT).sum(-1)
    return {
        "logits": gap[:, None] * (pi - ONE_HOT) / 2,
        "v": (-0.7 * gap + into_value * log_pi) / 2,
        "g": into_return * 0.7 * gap / 2,
    }


def score(p, through_the_draw):
    std = p["log_std"].detach().exp()
    if through_the_draw:
        return {"mean": torch.zeros_like(std), "log_std": -ADVANTAGES[:, None].expand(2, 3)}
    return {"mean": ADVANTAGES[:, None] * DRAWS / std, "log_std": ADVANTAGES[:, None] * (DRAWS.square() - 1)}


def of_all_actions(p, opened=None):
    p = numbers(p)
    pi = p["logits"].softmax(-1)
    centred = p["q"] - (pi * p["q"]).sum(-1, keepdim=True)
    entropy = -(pi * pi.log()).sum(-1, keepdim=True)
    if opened == "sampling":
        terms = (1 + pi.log()) * centred
        return {"logits": -pi * (terms - (pi * terms).sum(-1, keepdim=True)) / 2, "q": torch.zeros_like(pi)}
    grown = 1 + entropy if opened == "advantage" else 1
    leak = -pi * (pi.log() + entropy) / 2 if opened == "advantage" else torch.zeros_like(pi)
    return {"logits": -grown * pi * centred / 2, "q": leak}


def nothing(p):
    return {name: torch.zeros_like(value) for name, value in p.items()}


def regrets(p, kind, opened):
    p = numbers(p)
    pi = p["logits"].softmax(-1)
    centred = p["q"] - (pi * p["q"]).sum(-1, keepdim=True)
    better = (centred > 0).double()
    share, count = (pi * better).sum(-1, keepdim=True), better.sum(-1, keepdim=True)
    zero = torch.zeros_like(pi)
    if kind == "regret":
        return {"logits": -count * pi * centred / 2, "q": (better - count * pi) / 2 if opened else zero}
    positive = centred * better
    logits = -pi * (positive - (pi * positive).sum(-1, keepdim=True)) / 2
    if not opened:
        return {"logits": logits, "q": zero}
    return {"logits": logits + share * pi * centred / 2, "q": -pi * (better - share) / 2}


def clipped(p, leak):
    ratios, adv = p["ratios"].detach(), p["adv"].detach()
    inside = torch.where(adv > 0, ratios < 1.2, ratios > 0.8)
    counted = torch.where(adv > 0, ratios.clamp(max=1.2), ratios.clamp(min=0.8))
    return {"ratios": -adv * inside / 3, "adv": -leak * counted / 3}


def of_group(p, opened=None):
    tokens = MASK / MASK.sum(-1, keepdim=True) / 3
    reward = torch.zeros_like(TOKENS) if opened == "old" else -tokens * p["adv"].detach()[:, None]
    penalty = tokens * 0.3 * (1 - doubles(-0.4).exp())
    return {"log_prob": reward + penalty, "adv": -tokens.sum(-1) * (opened == "adv")}


def off_policy(p, opened=None):
    p = numbers(p)
    rho = (p["log_prob"] - OLD).exp()
    factor = 1 + p["log_prob"] if opened == "weights" else 1
    leak = -rho * p["log_prob"] / 3 if opened == "adv" else torch.zeros(3, dtype=F64)
    return {"log_prob": -rho * p["adv"] * factor / 3, "adv": leak}


def penalties(p, leak):
    x = (p["reference"] - p["log_prob"]).detach()
    slope = ON_ACTIONS * (1.0 - 0.5 * x + 2.0 * (1 - x.exp()))
    return {"log_prob": slope, "reference": -leak * slope}


def reverse(p, leak):
    p = numbers(p)
    found = (p["log_prob"] - p["reference"] + leak * p["log_prob"]) / 3
    return {"log_prob": found, "reference": -leak * p["log_prob"] / 3}


def decays(factors):
    """Return the matrix of ``y_t = x_t + factor_t y_{t+1}``."""
    found = torch.eye(len(factors), dtype=F64)
    for t in range(len(factors)):
        for s in range(t + 1, len(factors)):
            found[t, s] = factors[t:s].prod()
    return found


def slopes_of_errors():
    """Return the matrix of the TD errors' derivatives by the five values."""
    found = torch.zeros(4, 5, dtype=F64)
    found[range(4), range(4)], found[range(4), range(1, 5)] = -1.0, D
    return found


def advantages(p, leak):
    jacobian = decays(D * TRACE) @ slopes_of_errors()
    return {"v": p["v"].detach() + leak * jacobian.T @ ON_TIMES}


def lambda_returns(p, leak):
    v = p["v"].detach()
    errors = decays(D * TRACE) @ (R + D * v[1:] - v[:-1])
    jacobian = decays(D * TRACE) @ slopes_of_errors()
    return {"v": jacobian.T @ errors / 4 if leak else torch.cat([-errors, doubles(0)]) / 4}


def errors_of_vtrace(v, rho):
    traces = rho.clamp(max=1)
    return decays(D * traces * TRACE) @ (rho.clamp(max=2.0) * (R + D * v[1:] - v[:-1]))


def of_vtrace(p):
    p = numbers(p)
    return {"v": torch.cat([-errors_of_vtrace(p["v"], p["rho"]), doubles(0)]), "rho": torch.zeros(4, dtype=F64)}


def of_vtrace_advantage(p):
    """Only the errors carry a gradient, minus that of their own value."""
    return {"v": torch.cat([-0.1 * ON_TIMES, doubles(0)]), "rho": torch.zeros(4, dtype=F64)}


def of_open_vtrace_advantage(p):
    """The targets are held, so only the one-step returns and the weights move."""
    p = numbers(p)
    v, rho = p["v"], p["rho"]
    targets = errors_of_vtrace(v, rho) + v[:-1]
    later = torch.cat([TRACE * targets[1:] + (1 - TRACE) * v[1:-1], v[4:]])
    on_q = ON_TIMES * (rho.clamp(max=1.2) + 0.3)
    of_v = torch.cat([-ON_TIMES * (rho.clamp(max=1.2) + 0.1), doubles(0)])
    of_v[1:4] += (on_q * D)[:3] * (1 - TRACE)
    of_v[4] += (on_q * D)[3]
    return {"v": of_v, "rho": ON_TIMES * (R + D * later - v[:-1]) * (rho < 1.2)}


def soft(p, loss, opened):
    """Return the gradients of the one-dimensional Gaussian policy's three losses, by hand."""
    mean, log_std, k, log_alpha = (p[name].detach() for name in ("mean", "log_std", "k", "log_alpha"))
    alpha, std = log_alpha.exp(), log_std.exp()
    action = mean + std * NORMAL
    log_prob = -0.5 * NORMAL.square() - log_std - 0.9189385332046727
    slope, by_k = -k * (action - 1), -0.5 * (action - 1).square()
    zero = torch.zeros((), dtype=F64)
    if loss == "actor":
        return {
            "mean": -slope.mean(),
            "log_std": -alpha - (slope * std * NORMAL).mean(),
            "k": -by_k.mean(),
            "log_alpha": alpha * log_prob.mean() * opened,
        }
    if loss == "temperature":
        total = -alpha * (log_prob - 1).mean()
        return {"mean": zero, "log_std": alpha * opened, "k": zero, "log_alpha": total}
    of_taken = -0.5 * (TAKEN - 1).square()
    error = k * of_taken - (0.5 + 0.99 * (k * by_k - alpha * log_prob))
    into = -0.99 * error * opened
    return {
        "mean": (into * slope).mean(),
        "log_std": (into * (slope * std * NORMAL + alpha)).mean(),
        "k": (error * of_taken + into * by_k).mean(),
        "log_alpha": (-into * alpha * log_prob).mean(),
    }


def deterministic(p, leak):
    a, m = p["action"].detach(), p["matrix"].detach()
    return {"action": 0.5 * (m + m.T) @ a, "matrix": leak * 0.5 * torch.outer(a, a)}


def improved(p, opened):
    """A slope that is clipped has a square of 1, which does not change with it."""
    slope = p["slope"].detach()
    norm = slope.norm(dim=-1, keepdim=True)
    bounded = slope / norm.clamp(min=1)
    return {
        "action": torch.zeros_like(slope) if opened else -bounded,
        "slope": torch.where(norm > 1, 0.0, slope) * opened,
    }


def pessimistic(p, opened):
    q, later = p["q"].detach(), p["later"].detach()
    r, d = doubles(0.7, -0.3, 1.1), doubles(0.9, 0.0, 0.8)
    error = q - (r + d * later.amin(0))
    smallest = (later == later.amin(0)).double()
    return {"q": error / 3, "later": -smallest * d * error.sum(0) / 3 * opened}


def case(name, block, blocked, opened):
    """Return the case of one block in one of the problems."""
    parameters, constants, loss = PEER_CASES[name]
    return BlockCase(
        id=f"{block.name} in {name}",
        block=block,
        parameters=lambda: {key: value.clone().requires_grad_() for key, value in parameters.items()},
        loss=lambda p: loss(p, constants),
        blocked=blocked,
        opened=opened,
    )


def leaking(name, block, witness):
    """Return a case whose witness takes the strength of the leak, 0 or 1."""
    return case(name, block, lambda p: witness(p, 0), lambda p: witness(p, 1))


BLOCK_CASES = [
    leaking("policy_gradient", pg.ADVANTAGE, policy_gradient),
    case("actor_critic", pg.ADVANTAGE, actor_critic, partial(actor_critic, into_value=1)),
    case("actor_critic", pg.VALUE_TARGET, actor_critic, partial(actor_critic, into_return=1)),
    leaking("gaussian_scores", pg.ACTION, score),
    case("expected_policy_gradient", pg.SAMPLING, of_all_actions, partial(of_all_actions, opened="sampling")),
    case("expected_policy_gradient", pg.ADVANTAGE, of_all_actions, partial(of_all_actions, opened="advantage")),
    case("q_policy_gradient", pg.ADVANTAGE, of_all_actions, nothing),
    leaking("regret_matching", pg.ADVANTAGE, lambda p, leak: regrets(p, "regret matching", leak)),
    leaking("regret", pg.ACTION_VALUES, lambda p, leak: regrets(p, "regret", leak)),
    case("ratio_to_itself", pg.OLD_POLICY, lambda p: {"log_prob": -ON_ACTIONS / 3}, nothing),
    leaking("clipped_surrogate", pg.ADVANTAGE, clipped),
    case("grouped", pg.ADVANTAGE, of_group, partial(of_group, opened="adv")),
    case("grouped", pg.OLD_POLICY, of_group, partial(of_group, opened="old")),
    case("off_policy", pg.IMPORTANCE_WEIGHTS, off_policy, partial(off_policy, opened="weights")),
    case("off_policy", pg.ADVANTAGE, off_policy, partial(off_policy, opened="adv")),
    leaking("kl_penalties", pg.REFERENCE_POLICY, penalties),
    leaking("reverse_kl", pg.LOG_RATIO, reverse),
    leaking("generalized_advantages", pg.ADVANTAGE, advantages),
    leaking("generalized_values", pg.VALUE_TARGET, lambda_returns),
    case("vtrace_errors", pg.VTRACE_TARGET, of_vtrace, None),
    case("vtrace_advantages", pg.ADVANTAGE, of_vtrace_advantage, of_open_vtrace_advantage),
    leaking("soft_actor", pg.TEMPERATURE, lambda p, leak: soft(p, "actor", leak)),
    leaking("soft_critic", pg.SOFT_TARGET, lambda p, leak: soft(p, "critic", leak)),
    leaking("soft_temperature", pg.ENTROPY_GAP, lambda p, leak: soft(p, "temperature", leak)),
    leaking("deterministic", pg.CRITIC, deterministic),
    leaking("improved_action", pg.ACTION_TARGET, improved),
    leaking("pessimistic_critics", pg.CLIPPED_TARGET, pessimistic),
]


def test_every_block_of_the_room_has_a_case():
    assert {case.block for case in BLOCK_CASES} == {getattr(pg, name) for name in pg.__all__ if name.isupper()}


@pytest.mark.gpu
@each("case", BLOCK_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("opened", [False, True])
def test_a_gpu_finds_the_same_gradients(case, opened):
    parameters, constants, loss = PEER_CASES[case.id.rpartition(" ")[2]]

    def found(device):
        leaves = {key: value.to(device, copy=True).requires_grad_() for key, value in parameters.items()}
        held = {key: value.to(device) for key, value in constants.items()}
        with unblock(*[case.block] * opened):
            return torch.autograd.grad(loss(leaves, held), list(leaves.values()), materialize_grads=True)

    for there, here in zip(found(ACCELERATOR), found("cpu"), strict=True):
        torch.testing.assert_close(there.cpu(), here)


# --- is the blocked field the gradient of anything? -------------------------------------------------------------------


def test_the_field_of_the_expected_policy_gradient_is_a_gradient():
    logits = LOGITS.clone().requires_grad_()
    field = field_jacobian(lambda: pg.expected_policy_gradient_loss(logits, Q), {"logits": logits})
    assert field.is_gradient_field


OF_VALUE = doubles(0.6, -0.4)


def shared(theta):
    """Return log-probabilities and a value, of one state, that share two parameters."""
    return torch.stack([theta[0], theta[1], -theta.sum()]).log_softmax(-1), theta @ OF_VALUE


def test_the_field_of_an_actor_and_a_critic_that_share_parameters_is_no_gradient():
    theta, rewards = doubles(0.3, -0.5).requires_grad_(), Q[0]

    def loss():
        log_prob, value = shared(theta)
        draws = stop_gradient(log_prob.exp(), pg.SAMPLING)
        one = [
            pg.actor_critic_loss(log_prob[None], torch.tensor([a]), value[None], rewards[a : a + 1]) for a in range(3)
        ]
        return (draws * torch.stack(one)).sum()

    field = field_jacobian(loss, {"theta": theta})
    assert not field.is_gradient_field
    # The field is grad(-J) + (v - J) grad(v), and only the Jacobian of the second term is not symmetric.
    log_prob, _ = shared(theta)
    (of_return,) = torch.autograd.grad((log_prob.exp() * rewards).sum(), theta)
    twisted = torch.outer(OF_VALUE, OF_VALUE - of_return)
    torch.testing.assert_close(field.jacobian - field.jacobian.T, twisted - twisted.T, rtol=0, atol=1e-12)
