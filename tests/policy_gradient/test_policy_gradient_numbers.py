"""Exact numbers and expectations over all draws: what each loss of the room is worth in a small problem."""

import itertools
from functools import partial

import pytest
import torch
from test_policy_gradient import (
    ACTIONS,
    ADVANTAGES,
    GAUSSIAN,
    LOGITS,
    ON_TIMES,
    PEER_CASES,
    RHO,
    SAC,
    TRACE,
    D,
    Q,
    R,
    V,
    soft_actor,
    soft_critic,
    soft_temperature,
)
from values import doubles

from toolkit import policy_gradient as pg
from toolkit import unblock

THETA, REWARDS = doubles(0.2, -0.4, 0.7), doubles(1.0, 0.5, -0.3)
OF_RETURN = doubles(0.2364722446, 0.0439607385, -0.2804329831)  # the gradient of J = 0.2438722164


def leaf(value):
    return value.clone().requires_grad_()


def gradient(loss, *leaves, opened=()):
    with unblock(*opened):
        return torch.autograd.grad(loss(), leaves, materialize_grads=True)


def close(found, *expected):
    torch.testing.assert_close(found, doubles(*expected), rtol=0, atol=6e-11)


# --- sampled and all actions ------------------------------------------------------------------------------------------


def test_an_open_frequency_pushes_the_worst_action_up_most():
    theta = leaf(THETA)
    found = partial(gradient, lambda: -pg.expected_policy_gradient_loss(theta, REWARDS), theta)
    torch.testing.assert_close(found()[0], OF_RETURN, rtol=0, atol=6e-11)
    close(found(opened=[pg.SAMPLING])[0], 0.0018935040, -0.0365165268, 0.0346230228)


def test_an_open_baseline_of_the_return_itself_only_rescales():
    theta = leaf(THETA)

    def loss():
        return -pg.expected_policy_gradient_loss(theta, REWARDS, (theta.softmax(-1) * REWARDS).sum())

    close(gradient(loss, theta, opened=[pg.ADVANTAGE])[0], 0.4747297743, 0.0882533657, -0.5629831400)


def test_the_policy_gradient_loss():
    logits, adv = leaf(LOGITS), leaf(ADVANTAGES)
    loss = partial(pg.policy_gradient_loss, logits, ACTIONS, adv)
    assert loss().item() == pytest.approx(0.2894811391, abs=6e-11)
    of_logits, of_adv = gradient(loss, logits, adv)
    expected = (0.2345558347, 0.1287269714, -0.3632828061), (0.1617773486, -0.0968541023, -0.0649232463)
    close(of_logits, *expected)
    assert of_adv.tolist() == [0, 0]
    close(gradient(loss, adv, opened=[pg.ADVANTAGE])[0], 0.3311897729, 0.2591294004)


def test_an_actor_critic_with_an_open_advantage_overestimates_by_the_surprise():
    logits, v, g = leaf(LOGITS), leaf(doubles(0.3, -0.2)), doubles(1.2, 0.5)
    loss = partial(pg.actor_critic_loss, logits, ACTIONS, v, g)
    assert loss().item() == pytest.approx(0.8044613759, abs=6e-11)
    close(gradient(loss, v)[0], -0.45, -0.35)
    close(gradient(loss, v, opened=[pg.ADVANTAGE])[0], -0.7811897729, -0.6091294004)
    surprise = -LOGITS.log_softmax(-1)[range(2), ACTIONS]
    fixed = leaf(g + surprise)
    at_the_fixed_point = partial(pg.actor_critic_loss, logits, ACTIONS, fixed, g)
    torch.testing.assert_close(gradient(at_the_fixed_point, fixed, opened=[pg.ADVANTAGE])[0], doubles(0.0, 0.0))


def test_regret_matching():
    logits, q = leaf(LOGITS), leaf(Q)
    loss = partial(pg.rm_loss, logits, q)
    assert loss().item() == pytest.approx(-0.2005134606, abs=6e-11)
    expected = (-0.0743846607, 0.0020858231, 0.0722988375), (0.0359102596, -0.0456969470, 0.0097866874)
    close(gradient(loss, logits)[0], *expected)
    of_logits, of_q = gradient(loss, logits, q, opened=[pg.ADVANTAGE])
    close(of_logits, (-0.0171137936, 0.0127326101, 0.0043811835), (0.0213486794, -0.0310969250, 0.0097482456))
    close(of_q, (-0.0806282437, -0.0442497184, 0.1248779621), (0.0721026283, -0.0917528868, 0.0196502586))


# --- groups: expectations over every group of draws -------------------------------------------------------------------


def expected_gradient(k, advantages):
    """Return the policy gradient over all groups of k draws, weighted by their probabilities."""
    total = torch.zeros(3, dtype=torch.float64)
    for draws in itertools.product(range(3), repeat=k):
        theta = leaf(THETA)
        log_prob = theta.log_softmax(-1)[list(draws)]
        loss = pg.grpo_loss(log_prob[:, None], advantages(REWARDS[list(draws)]))
        total -= log_prob.sum().exp().detach() * torch.autograd.grad(loss, theta)[0]
    return total


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_baseline_of_the_others_has_no_bias_and_that_of_all_has_a_factor(k):
    others = expected_gradient(k, partial(pg.group_advantages, baseline="leave_one_out"))
    torch.testing.assert_close(others, OF_RETURN, rtol=0, atol=6e-11)
    of_all = expected_gradient(k, partial(pg.group_advantages, baseline="mean"))
    torch.testing.assert_close(of_all, (k - 1) / k * others, rtol=0, atol=1e-15)


def test_dividing_by_the_deviation_turns_the_gradient():
    found = expected_gradient(4, partial(pg.group_advantages, baseline="mean", scale="std"))
    torch.testing.assert_close(found / OF_RETURN, doubles(1.177, 1.412, 1.214), rtol=0, atol=6e-4)


def test_advantages_of_a_group():
    r = REWARDS[[0, 2, 2, 1]]
    close(pg.group_advantages(r, baseline="leave_one_out"), 1.03333333333, -0.7, -0.7, 0.36666666667)
    others = torch.stack([r[i] - r[[j for j in range(4) if j != i]].mean() for i in range(4)])
    torch.testing.assert_close(pg.group_advantages(r, baseline="leave_one_out"), others)
    scaled = pg.group_advantages(r, baseline="mean", scale="std", epsilon=1e-4)
    torch.testing.assert_close(scaled, (r - r.mean()) / (r.std() + 1e-4))


def test_a_group_of_equal_rewards_and_one_of_integers():
    for baseline, scale in itertools.product(("mean", "leave_one_out"), ("std", "none")):
        equal = pg.group_advantages(torch.full((2, 3), 0.1), baseline=baseline, scale=scale)
        assert equal.abs().max() < 1e-3
    found = pg.group_advantages(torch.tensor([1, 0, 0, 0]), baseline="leave_one_out", scale="std")
    assert found.abs().max() < 2.1


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_the_clipped_surrogate():
    logits, adv = leaf(LOGITS), leaf(ADVANTAGES)
    old = doubles(-0.9, -0.6)

    def loss():
        ratios = pg.importance_ratios(logits.log_softmax(-1)[range(2), ACTIONS], old)
        return pg.clipped_surrogate_pg_loss(ratios, adv, 0.2)

    assert loss().item() == pytest.approx(-0.4659300283, abs=6e-11)
    close(gradient(loss, logits)[0], (0.0, 0.0, 0.0), (0.1755567229, -0.1051036436, -0.0704530792))
    close(gradient(loss, adv, opened=[pg.ADVANTAGE])[0], -0.6, -0.5425874647)


def test_an_upper_width_of_its_own():
    ratios = leaf(doubles(1.25, 1.25))
    loss = partial(pg.clipped_surrogate_pg_loss, ratios, doubles(1.0, 1.0), 0.2)
    assert gradient(loss, ratios)[0].tolist() == [0, 0]
    wider = partial(loss, epsilon_high=0.3)
    assert gradient(wider, ratios)[0].tolist() == [-0.5, -0.5]


def test_a_ratio_at_the_bounds_has_not_left_the_interval():
    """0.8 in half precision is below 0.8, but no less than the bound of that precision."""
    for ratios in (leaf(doubles(0.75, 1.25)), torch.tensor([0.8, 1.2]).half().requires_grad_()):
        width = 1 - ratios[0].item() if ratios.dtype == torch.float64 else 0.2
        for advantages in ((1.0, 2.0), (-1.0, -2.0)):
            adv = ratios.new_tensor(advantages)
            loss = partial(pg.clipped_surrogate_pg_loss, ratios, adv, width)
            assert gradient(loss, ratios)[0].tolist() == (-adv / 2).tolist()


def test_the_ratio_of_a_policy_to_itself_has_the_gradient_of_reinforce():
    logits = leaf(LOGITS)

    def loss():
        log_prob = logits.log_softmax(-1)[range(2), ACTIONS]
        return pg.grpo_loss(log_prob[:, None], ADVANTAGES)

    assert loss().item() == pytest.approx(-0.35)
    reinforce = gradient(lambda: pg.policy_gradient_loss(logits, ACTIONS, ADVANTAGES), logits)[0]
    torch.testing.assert_close(gradient(loss, logits)[0], reinforce)
    assert gradient(loss, logits, opened=[pg.OLD_POLICY])[0].abs().max() == 0


def test_the_divergence_that_each_estimator_pulls_down():
    """k1 pulls nothing, k2 the divergence that it estimates, and k3, which estimates it better, the other one."""
    theta = leaf(THETA)
    reference = doubles(0.5, 0.1, -0.2).log_softmax(-1)

    def expectation(estimate):
        log_prob = theta.log_softmax(-1)
        return (log_prob.exp().detach() * estimate(log_prob, reference)).sum()

    def divergence(p, log_p, log_q):
        return (p * (log_p - log_q)).sum()

    log_pi = theta.log_softmax(-1)
    (reverse,) = torch.autograd.grad(divergence(log_pi.exp(), log_pi, reference), theta, retain_graph=True)
    (forward,) = torch.autograd.grad(divergence(reference.exp(), reference, log_pi), theta)
    expected = {"k1": torch.zeros(3, dtype=torch.float64), "k2": reverse, "k3": forward}
    for kind, slope in expected.items():
        found = gradient(lambda kind=kind: expectation(partial(pg.kl_penalty, kind=kind)), theta)[0]
        torch.testing.assert_close(found, slope, rtol=0, atol=1e-15)
    rows = [expectation(lambda a, b: 1.0 * (a - b)), expectation(partial(pg.kl_penalty, kind="k3"))]
    torch.testing.assert_close(*rows)

    def surrogate():
        weights = theta.softmax(-1).detach()
        log_prob = theta.log_softmax(-1)
        return sum(weights[a] * pg.reverse_kl_loss(log_prob[a], reference[a]) for a in range(3))

    torch.testing.assert_close(gradient(surrogate, theta)[0], reverse, rtol=0, atol=1e-15)


def test_an_importance_weight_that_carries_a_gradient_turns_it_for_rare_actions():
    """Over all actions of another policy: each term is multiplied by 1 + log pi."""
    theta = leaf(torch.zeros(4, dtype=torch.float64))
    behaviour, q = doubles(0.1, 0.2, 0.3, 0.4), doubles(1.0, 0.5, -0.3, 0.2)

    def loss():
        log_prob = theta.log_softmax(-1)
        return sum(behaviour[a] * pg.off_policy_pg_loss(log_prob[a], behaviour.log()[a], q[a]) for a in range(4))

    blocked, opened = (gradient(loss, theta, opened=names)[0] for names in ([], [pg.IMPORTANCE_WEIGHTS]))
    torch.testing.assert_close(blocked, -(q - q.mean()) / 4, rtol=0, atol=1e-15)
    torch.testing.assert_close(opened, (1 - doubles(4.0)[0].log()) * blocked, rtol=0, atol=1e-15)


def test_clipped_weights_have_no_score_where_they_are_clipped():
    log_prob = leaf(doubles(-0.1, -3.0))
    loss = partial(pg.off_policy_pg_loss, log_prob, doubles(-1.0, -1.0), doubles(2.0, 2.0), clip_rho=1.0)
    blocked, opened = (gradient(loss, log_prob, opened=names)[0] for names in ([], [pg.IMPORTANCE_WEIGHTS]))
    assert blocked[0] == opened[0] == -1
    torch.testing.assert_close(opened[1], -2 * blocked[1])


# --- trajectories -----------------------------------------------------------------------------------------------------


def test_generalised_advantages():
    v = leaf(V)
    estimate = partial(pg.truncated_generalized_advantage_estimation, R)
    close(estimate(D, TRACE, V), 1.112217, -0.0441, 1.93, -0.375)
    close(estimate(torch.full_like(D, 0.9), TRACE, V), 1.133550375, -0.0102375, 1.98375, -0.375)
    loss = lambda: (ON_TIMES * estimate(D, TRACE, v)).sum()  # noqa: E731
    close(gradient(loss, v, opened=[pg.ADVANTAGE])[0], -0.5, 1.135, -2.18495, 0.076428, 1.0604988)


def test_the_value_loss_of_generalised_advantages_is_that_of_lambda_returns():
    v = leaf(V)
    loss = lambda: 4 * pg.gae_value_loss(R, D, TRACE, v)  # noqa: E731
    assert loss().item() == pytest.approx(2.5522482325, abs=6e-11)
    close(gradient(loss, v)[0], -1.112217, 0.0441, -1.93, 0.375, 0.0)
    opened = gradient(loss, v, opened=[pg.VALUE_TARGET])[0]
    close(opened, -1.112217, 0.34439859, -1.7527188883, 0.9374774226, 0.8437025874)


def test_vtrace():
    v, rho = leaf(V), leaf(RHO)
    arguments = lambda: (v[:-1], v[1:], R, D, rho)  # noqa: E731
    close(pg.vtrace(*arguments()).detach(), 0.808416, 0.2304, 1.656, -0.375)
    loss = lambda: 0.5 * pg.vtrace(*arguments()).square().sum()  # noqa: E731
    assert loss().item() == pytest.approx(1.7947907945, abs=6e-11)
    of_v, of_rho = gradient(loss, v, rho, opened=[pg.VTRACE_TARGET])
    close(of_v, -0.4850496, -0.2304, -1.4303749824, 0.375, 1.124550114)
    close(of_rho, 1.0892273818, 0.0, 4.1515003238, 0.0)


@pytest.mark.parametrize(
    ("opened", "of_v", "of_rho"),
    [
        ([], [0, 0, 0, 0, 0], [0, 0, 0, 0]),
        ([pg.ADVANTAGE], [-0.3, 1.0, -1.8, -0.3, 0.27], [0.67368, 0.0, 3.68, 0.0]),
        ([pg.ADVANTAGE, pg.VTRACE_TARGET], [-0.3, 1.0, -1.8657, -0.3, 1.140264], [0.67368, 0.0, 2.47112, 0.0]),
    ],
    ids=["blocked", "advantage", "both"],
)
def test_the_advantage_of_vtrace(opened, of_v, of_rho):
    v, rho = leaf(V), leaf(RHO)

    def loss():
        found = pg.vtrace_td_error_and_advantage(v[:-1], v[1:], R, D, rho)
        return (ON_TIMES * found.pg_advantage).sum() + 0.0 * v.sum()

    found = gradient(loss, v, rho, opened=opened)
    close(found[0], *of_v)
    close(found[1], *of_rho)


def test_the_advantage_of_vtrace_with_a_trace():
    found = pg.vtrace_td_error_and_advantage(V[:-1], V[1:], R, D, RHO, TRACE)
    close(found.pg_advantage, 0.62136918, -0.16569, 1.737, -0.375)


def test_vtrace_on_policy_is_generalised_advantage_estimation():
    one = torch.ones(4, dtype=torch.float64)
    expected = pg.truncated_generalized_advantage_estimation(R, D, TRACE, V)
    torch.testing.assert_close(pg.vtrace(V[:-1], V[1:], R, D, one, TRACE), expected)


def test_a_trace_for_each_time():
    traces = doubles(0.2, 0.9, 0.5, 0.1)
    factors = (D * traces).tolist()
    errors = (R + D * V[1:] - V[:-1]).tolist()
    expected = [errors[3]]
    for error, factor in zip(errors[2::-1], factors[2::-1], strict=True):
        expected.insert(0, error + factor * expected[0])
    close(pg.truncated_generalized_advantage_estimation(R, D, traces, V), *expected)
    found = pg.vtrace_td_error_and_advantage(V[:-1], V[1:], R, D, RHO, torch.full_like(traces, TRACE))
    constant = pg.vtrace_td_error_and_advantage(V[:-1], V[1:], R, D, RHO, TRACE)
    torch.testing.assert_close(found, constant)


@pytest.mark.parametrize("length", [1, 2, 47, 48, 49, 64, 65, 200])
def test_long_and_short_trajectories_follow_the_same_recursion(length):
    generator = torch.Generator().manual_seed(length)
    rewards, values = (torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (length, length + 1))
    discounts = torch.rand(3, length, generator=generator, dtype=torch.float64)
    discounts[:, length // 2] = 0  # an end of an episode
    values.requires_grad_()
    expected = [torch.zeros(3, dtype=torch.float64)]
    for t in range(length - 1, -1, -1):
        error = rewards[:, t] + discounts[:, t] * values[:, t + 1] - values[:, t]
        expected.insert(0, error + 0.95 * discounts[:, t] * expected[0])
    expected = torch.stack(expected[:-1], -1)
    with unblock(pg.ADVANTAGE):
        found = pg.truncated_generalized_advantage_estimation(rewards, discounts, 0.95, values)
        torch.testing.assert_close(found, expected)
        slopes = [torch.autograd.grad(each.square().sum(), values)[0] for each in (found, expected)]
    torch.testing.assert_close(*slopes)


# --- soft and deterministic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "value", "block", "closed", "opened"),
    [
        (
            soft_actor,
            0.2243177888,
            pg.TEMPERATURE,
            {"mean": -0.8474291018, "log_std": 0.1690605063, "log_alpha": 0.0},
            {"log_alpha": -0.3831238256},
        ),
        (
            soft_critic,
            0.4555265208,
            pg.SOFT_TARGET,
            {"k": 0.7713999801, "mean": 0.0, "log_std": 0.0, "log_alpha": 0.0},
            {"k": 0.1020121089, "mean": 0.7637438022, "log_std": -0.1133337098, "log_alpha": 0.3534806600},
        ),
        (
            soft_temperature,
            0.7510032668,
            pg.ENTROPY_GAP,
            {"log_alpha": 0.7510032668, "mean": 0.0, "log_std": 0.0},
            {"log_alpha": 0.7510032668, "mean": 0.0, "log_std": 0.3678794412},
        ),
        (
            partial(soft_temperature, multiplier="log_alpha"),
            -2.0414385332,
            pg.ENTROPY_GAP,
            {"log_alpha": 2.0414385332, "log_std": 0.0},
            {"log_alpha": 2.0414385332, "log_std": -1.0},
        ),
    ],
    ids=["actor", "critic", "temperature", "log temperature"],
)
def test_the_losses_of_soft_actor_critic(loss, value, block, closed, opened):
    p = {name: leaf(number) for name, number in GAUSSIAN.items()}
    assert loss(p, SAC).item() == pytest.approx(value, abs=6e-11)
    for names, expected in (([], closed), ([block], opened)):
        found = dict(zip(p, gradient(lambda: loss(p, SAC), *p.values(), opened=names), strict=True))
        for name, number in expected.items():
            assert found[name].item() == pytest.approx(number, abs=6e-11), name


def test_the_entropy_bonus_cancels_if_the_gap_is_open_and_the_losses_are_summed():
    p = {name: leaf(number) for name, number in GAUSSIAN.items()}
    loss = lambda: soft_actor(p, SAC) + soft_temperature(p, SAC)  # noqa: E731
    (found,) = gradient(loss, p["log_std"], opened=[pg.ENTROPY_GAP])
    normal, mean, std = SAC["normal"], GAUSSIAN["mean"], GAUSSIAN["log_std"].exp()
    without_bonus = (GAUSSIAN["k"] * (mean + std * normal - 1) * std * normal).mean()
    torch.testing.assert_close(found, without_bonus)


def test_the_temperature_only_falls_if_it_is_open_and_the_losses_are_summed():
    p = {name: leaf(number) for name, number in GAUSSIAN.items()}
    loss = lambda: soft_actor(p, SAC) + soft_temperature(p, SAC)  # noqa: E731
    (found,) = gradient(loss, p["log_alpha"], opened=[pg.TEMPERATURE])
    torch.testing.assert_close(found, GAUSSIAN["log_alpha"].exp())  # -alpha H with H = -1


def test_the_score_of_a_gaussian_and_the_path_through_its_draw():
    mean, log_std = leaf(doubles(0.2)), leaf(doubles(-0.3))
    normal = doubles([0.5], [-1.2])

    def loss():
        action = mean + log_std.exp() * normal
        return pg.gaussian_log_prob(action, mean.expand(2, 1), log_std.expand(2, 1)).mean()

    blocked, opened = (torch.cat(gradient(loss, mean, log_std, opened=names)) for names in ([], [pg.ACTION]))
    close(blocked, -0.4724505827, -0.155)
    torch.testing.assert_close(opened, doubles(0.0, -1.0), rtol=0, atol=1e-15)
    normal_law = torch.distributions.Normal(mean.detach(), log_std.detach().exp())
    torch.testing.assert_close(
        pg.gaussian_log_prob(normal[:, 0], mean.expand(2), log_std.expand(2)), normal_law.log_prob(normal[:, 0]).sum()
    )


def test_the_deterministic_policy_gradient():
    a, m = doubles(0.4, -0.7), doubles([2.0, 0.5], [0.5, 1.0])
    action, slope = leaf(a), leaf(-m @ a)
    loss = lambda: pg.dpg_loss(action, slope).sum()  # noqa: E731
    close(gradient(loss, action)[0], 0.45, -0.5)
    of_action, of_slope = gradient(loss, action, slope, opened=[pg.ACTION_TARGET])
    assert of_action.tolist() == [0, 0]
    close(of_slope, -0.45, 0.5)
    bounded = 0.3 * doubles(0.45, -0.5) / 0.4525**0.5
    torch.testing.assert_close(gradient(lambda: pg.dpg_loss(action, slope, 0.3).sum(), action)[0], bounded)
    parameters, _, held = PEER_CASES["deterministic"]
    leaves = {name: leaf(value) for name, value in parameters.items()}
    close(gradient(lambda: held(leaves, {}), leaves["action"])[0], 0.45, -0.5)
    close(gradient(lambda: held(leaves, {}), leaves["matrix"], opened=[pg.CRITIC])[0], (0.08, -0.14), (-0.14, 0.245))


def test_an_open_critic_that_learns_from_the_actions_of_the_policy_ends_one_too_high():
    """With the losses summed and rewards of ``2 a - 0.5``, the fixed point is ``r + 1``, and r with the block."""
    actions = doubles([0.3], [-1.2], [0.8])
    rewards = 2 * actions[:, 0] - 0.5
    critic = torch.nn.Linear(1, 1).double()
    for opened, bias in (([], -0.5), ([pg.CRITIC], 0.5)):
        with torch.no_grad():
            critic.weight.fill_(2.0)
            critic.bias.fill_(bias)

        def loss():
            error = pg.td3_critic_loss(critic(actions).T, rewards, 0 * rewards, 0 * rewards[None])
            return error - pg.held_critic(critic, actions).mean()

        for slope in gradient(loss, *critic.parameters(), opened=opened):
            torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-15)


def test_one_critic_is_that_of_ddpg():
    q, later, r, d = doubles(0.3, -0.2), doubles(1.0, 0.5), doubles(0.7, -0.3), doubles(0.9, 0.0)
    expected = 0.5 * torch.nn.functional.mse_loss(q, r + d * later)
    torch.testing.assert_close(pg.td3_critic_loss(q[None], r, d, later[None]), expected)
    pessimistic = pg.td3_critic_loss(q[None], r, d, torch.stack([later, later + 1]))
    torch.testing.assert_close(pessimistic, expected)
