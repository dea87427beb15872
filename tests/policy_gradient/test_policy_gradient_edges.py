"""Masked and saturated policies, padding, other types, batches, compilation, and mistakes of a caller."""

import math
import re

import mpmath
import pytest
import torch
from each import each
from test_policy_gradient import ACTIONS, ADVANTAGES, LOGITS, PEER_CASES, RHO, D, Q, R, V
from torch import nn
from torch.utils._pytree import tree_leaves
from values import doubles

from toolkit import policy_gradient as pg
from toolkit import unblock


def leaf(value):
    return value.clone().requires_grad_()


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [[], [pg.SAMPLING], [pg.ADVANTAGE]], ids=["blocked", "sampling", "advantage"])
def test_a_masked_action_changes_nothing(opened):
    logits, q = doubles([0.2, -math.inf, 0.7]).requires_grad_(), doubles([1.0, 50.0, -0.3]).requires_grad_()
    allowed, of_allowed = leaf(logits[:, [0, 2]].detach()), leaf(q[:, [0, 2]].detach())
    for loss in (pg.expected_policy_gradient_loss, pg.qpg_loss, pg.rm_loss):
        if loss is not pg.expected_policy_gradient_loss and pg.SAMPLING in opened:
            continue
        with unblock(*opened):
            masked, plain = loss(logits, q), loss(allowed, of_allowed)
        torch.testing.assert_close(masked, plain)
        found = torch.autograd.grad(masked, logits)[0]
        torch.testing.assert_close(found[:, [0, 2]], torch.autograd.grad(plain, allowed)[0])
        assert found[0, 1] == 0


def test_saturated_logits_have_finite_losses_and_gradients():
    logits = doubles([1e4, 0.0, -1e4], [-1e4, 1e4, 0.0]).requires_grad_()
    losses = [
        pg.policy_gradient_loss(logits, ACTIONS, ADVANTAGES),
        pg.expected_policy_gradient_loss(logits, Q),
        pg.qpg_loss(logits, Q),
        pg.rpg_loss(logits, Q),
    ]
    for loss in losses:
        assert loss.isfinite()
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


@pytest.mark.parametrize(
    "opened", [[], [pg.IMPORTANCE_WEIGHTS], [pg.ADVANTAGE]], ids=["blocked", "weights", "advantage"]
)
def test_an_action_that_the_policy_never_takes_has_no_weight(opened):
    logits, advantages = doubles([0.2, -math.inf, 0.7], [0.1, 0.3, -0.5]).requires_grad_(), leaf(ADVANTAGES)
    with unblock(*opened):
        log_prob = logits.log_softmax(-1)[torch.arange(2), torch.tensor([1, 0])]
        loss = pg.off_policy_pg_loss(log_prob, doubles(-1.0, -1.2), advantages)
        alone = pg.off_policy_pg_loss(log_prob[1:], doubles(-1.2), advantages[1:]) / 2
    torch.testing.assert_close(loss, alone)
    found, expected = (
        torch.autograd.grad(x, [logits, advantages], retain_graph=True, materialize_grads=True) for x in (loss, alone)
    )
    torch.testing.assert_close(found, expected)
    assert pg.off_policy_pg_loss(doubles(math.nan), doubles(-1.0), doubles(1.0)).isnan()


@pytest.mark.parametrize("wide", ["r_t", "discount_t", "rho_tm1", "lambda_"])
def test_rewards_of_numpy_in_double_precision_are_taken(wide):
    arguments = {
        "v_tm1": V[:-1],
        "v_t": V[1:],
        "r_t": R,
        "discount_t": D,
        "rho_tm1": RHO,
        "lambda_": doubles(0.5, 0.6, 0.7, 0.8),
    }
    mixed = {name: value if name == wide else value.float() for name, value in arguments.items()}
    for found, expected in zip(
        *(pg.vtrace_td_error_and_advantage(**given) for given in (mixed, arguments)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_the_penalty_on_a_neighbouring_policy_is_no_rounding():
    """k3 is never negative, and half the square of a small log-ratio."""
    log_prob = -torch.rand(1000, generator=torch.Generator().manual_seed(3)) - 0.5
    reference = log_prob + 1e-4 * torch.randn(1000, generator=torch.Generator().manual_seed(4))
    found = pg.kl_penalty(log_prob, reference)
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), pg.kl_penalty(log_prob.double(), reference.double()), rtol=1e-6, atol=0)


def test_padding_may_hold_anything():
    log_prob = doubles([-1.0, math.nan], [-0.5, -0.2]).requires_grad_()
    mask = torch.tensor([[True, False], [True, True]])
    loss = pg.grpo_loss(log_prob, doubles(1.0, -1.0), mask_t=mask)
    assert loss.item() == 0
    found = torch.autograd.grad(loss, log_prob)[0]
    assert found.tolist() == [[-0.5, 0.0], [0.25, 0.25]]


def test_a_sample_without_tokens_counts_nothing():
    log_prob = doubles([-1.0], [-0.5]).requires_grad_()
    loss = pg.grpo_loss(log_prob, doubles(1.0, -1.0), mask_t=torch.tensor([[False], [True]]))
    assert torch.autograd.grad(loss, log_prob)[0].tolist() == [[0.0], [0.5]]


def test_the_log_probability_of_a_squashed_action_is_exact_where_the_action_rounds_to_one():
    generator = torch.Generator().manual_seed(3)
    mean, log_std = doubles([0.3], [5.0], [-30.0]), doubles([-0.5], [0.2], [0.1])
    action, log_prob = pg.squashed_gaussian_sample(mean, log_std, generator=generator)
    z = torch.randn(mean.shape, generator=generator.manual_seed(3), dtype=torch.float64)
    with mpmath.workdps(60):
        for i in range(3):
            m, s, e = (mpmath.mpf(x[i, 0].item()) for x in (mean, log_std, z))
            u = m + mpmath.exp(s) * e
            density = -(e**2) / 2 - s - mpmath.log(2 * mpmath.pi) / 2 - mpmath.log(1 - mpmath.tanh(u) ** 2)
            assert log_prob[i].item() == pytest.approx(float(density), rel=1e-14)
            assert action[i, 0].item() == pytest.approx(float(mpmath.tanh(u)))


def test_a_slope_of_zero_is_not_clipped():
    slope = torch.zeros(2, requires_grad=True)
    loss = pg.dpg_loss(torch.ones(2), slope, 0.5).sum()
    with unblock(pg.ACTION_TARGET):
        loss = pg.dpg_loss(torch.ones(2), slope, 0.5).sum()
    assert torch.autograd.grad(loss, slope)[0].tolist() == [0, 0]


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_slopes_and_rewards_whose_squares_are_no_float32(size):
    slope, bound = torch.tensor([3.0, -4.0]), 0.5
    action = torch.zeros(2, requires_grad=True)
    loss = pg.dpg_loss(action, slope * size, bound)
    expected = -slope * min(size, bound / 5)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), action)[0], expected, rtol=1e-6, atol=0)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25])
    expected = pg.group_advantages(rewards, baseline="mean", scale="std", epsilon=1e-4)
    found = pg.group_advantages(rewards * size, baseline="mean", scale="std", epsilon=1e-4 * size)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.1, 1000.1, -1e6 - 0.3])
def test_equal_rewards_have_no_advantage(baseline, reward):
    # The mean of equal numbers is not always that number: 7 x 1000.1 in single precision is one of the cases.
    for k in range(2, 12):
        rewards = torch.full((k,), reward)
        assert pg.group_advantages(rewards, baseline=baseline, scale="std").tolist() == [0] * k


def test_the_deviation_of_rewards_in_half_precision_does_not_overflow():
    rewards = torch.tensor([300.0, 0.0, 0.0, 0.0])
    expected = pg.group_advantages(rewards, baseline="mean", scale="std")
    found = pg.group_advantages(rewards.half(), baseline="mean", scale="std")
    torch.testing.assert_close(found.float(), expected, rtol=4e-3, atol=0)  # a few roundings of 2^-11


def test_an_action_at_its_bound_keeps_its_gradient():
    action = torch.tensor([1.0, -1.0, 1.5], requires_grad=True)
    found = pg.smoothed_actions(action, noise=0.0)
    assert torch.autograd.grad(found.sum(), action)[0].tolist() == [1, 1, 0]


def test_smoothed_actions_stay_near_and_inside():
    actions = torch.linspace(-1, 1, 1001)
    found = pg.smoothed_actions(actions, noise=3.0, clip=0.1, generator=torch.Generator().manual_seed(0))
    assert found.abs().max() <= 1
    assert (found - actions).abs().max() <= 0.1 + 1e-6
    assert torch.equal(pg.smoothed_actions(actions, noise=0.0), actions)


@each("name", PEER_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_and_half_precision(name, dtype):
    parameters, constants, loss = PEER_CASES[name]
    answers = []
    for kind in (dtype, torch.float64):
        leaves = {key: leaf(value.to(kind)) for key, value in parameters.items()}
        value = loss(leaves, {key: constant.to(kind) for key, constant in constants.items()})
        assert value.dtype == kind
        slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        answers.append([value, *slopes])
    # A few dozen operations on numbers of order 1; two of the losses end in a difference of such numbers.
    bound = 60 * torch.finfo(dtype).eps
    for found, expected in zip(*answers, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


# --- transforms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [[], [pg.ADVANTAGE]], ids=["blocked", "opened"])
def test_a_batch_is_a_loop_and_a_vmap(opened):
    generator = torch.Generator().manual_seed(1)
    values = leaf(torch.randn(3, 5, generator=generator, dtype=torch.float64))

    def one(v):
        advantages = pg.truncated_generalized_advantage_estimation(R, D, 0.7, v)
        found = pg.vtrace_td_error_and_advantage(v[:-1], v[1:], R, D, RHO, 0.7)
        return advantages.square().sum() + found.pg_advantage.square().sum() + found.errors.square().sum()

    with unblock(*opened):
        batched = pg.truncated_generalized_advantage_estimation(R.expand(3, 4), D.expand(3, 4), 0.7, values)
        each = [pg.truncated_generalized_advantage_estimation(R, D, 0.7, v) for v in values]
        assert torch.equal(batched, torch.stack(each))
        mapped = torch.func.vmap(torch.func.grad(one))(values)
        looped = torch.stack([torch.autograd.grad(one(v), v)[0] for v in map(leaf, values.detach())])
    torch.testing.assert_close(mapped, looped)


def test_losses_of_sampled_actions_map_over_a_batch():
    def loss(logits, a, adv):
        return pg.policy_gradient_loss(logits[None], a[None], adv[None])

    found = torch.func.vmap(torch.func.grad(loss))(LOGITS, ACTIONS, ADVANTAGES)
    logits = leaf(LOGITS)
    expected = torch.autograd.grad(2 * pg.policy_gradient_loss(logits, ACTIONS, ADVANTAGES), logits)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("name", ["policy_gradient", "grouped", "off_policy", "vtrace_advantages", "soft_critic"])
def test_a_compiled_loss_is_the_same(name):
    parameters, constants, loss = PEER_CASES[name]
    torch.compiler.reset()
    answers = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = {key: leaf(value) for key, value in parameters.items()}
        value = run(leaves, constants)
        answers.append([value, *torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)])
    for found, expected in zip(*answers, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.keeps_its_sums
def test_value_and_gradient_compile_together():
    """As jax compiles them: faster than a compiled loss that is differentiated afterwards."""

    def loss(values):
        return pg.gae_value_loss(R, D, 0.7, values)

    torch.compiler.reset()
    found = torch.compile(torch.func.grad_and_value(loss), fullgraph=True, backend="aot_eager")(V)
    torch.testing.assert_close(found, torch.func.grad_and_value(loss)(V))


def test_leading_dimensions_are_any():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 4, 5, generator=generator)
    actions, advantages = logits.argmin(-1), torch.randn(2, 3, 4, generator=generator)
    found = pg.policy_gradient_loss(logits, actions, advantages)
    rows = [t.flatten(0, 2) for t in (logits, actions, advantages)]
    torch.testing.assert_close(found, pg.policy_gradient_loss(*rows))


def test_a_critic_is_held_with_its_buffers_and_left_as_it_was():
    critic = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().eval()
    action = leaf(LOGITS[:, :2])
    pg.held_critic(critic, action).sum().backward()
    expected = torch.autograd.grad(critic(action).sum(), action)[0]
    torch.testing.assert_close(action.grad, expected)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in critic.parameters())


# --- mistakes ---------------------------------------------------------------------------------------------------------

COLUMN = ADVANTAGES[:, None]
MISTAKES = {
    "a column of advantages": (
        lambda: pg.policy_gradient_loss(LOGITS, ACTIONS, COLUMN),
        "`adv_t` should have the shape of `a_t`, (2,). Found (2, 1).",
    ),
    "a column of values": (
        lambda: pg.actor_critic_loss(LOGITS, ACTIONS, COLUMN, ADVANTAGES),
        "`v_t` should have the shape of `a_t`, (2,). Found (2, 1).",
    ),
    "a column of actions": (
        lambda: pg.policy_gradient_loss(LOGITS, ACTIONS[:, None], COLUMN),
        "`a_t` should have the shape of `logits_t` without its last dimension, (2,). Found (2, 1).",
    ),
    "actions that are fractions": (
        lambda: pg.policy_gradient_loss(LOGITS, ADVANTAGES, ADVANTAGES),
        "`a_t` should be a tensor of integers. Found torch.float64.",
    ),
    "a baseline for each action": (
        lambda: pg.expected_policy_gradient_loss(LOGITS, Q, Q),
        "`baseline_t` should have the shape of `logits_t` without its last dimension, (2,). Found (2, 3).",
    ),
    "logits without dimensions": (
        lambda: pg.policy_gradient_loss(LOGITS[0, 0], ACTIONS[0], ADVANTAGES[0]),
        "`logits_t` should have at least one dimension. Found none.",
    ),
    "a number for a tensor": (
        lambda: pg.policy_gradient_loss(LOGITS, ACTIONS, 0.5),
        "`adv_t` should be a floating-point tensor. Found float.",
    ),
    "values without a last one": (
        lambda: pg.gae_value_loss(R, D, 0.7, V[:-1]),
        "`values` should have shape (5,), one time more than `r_t`. Found (4,).",
    ),
    "no time": (
        lambda: pg.vtrace(R[:0], R[:0], R[:0], R[:0], R[:0]),
        "`r_t` should have at least one time. Found shape (0,).",
    ),
    "traces of another length": (
        lambda: pg.gae_value_loss(R, D, R[:3], V),
        "`lambda_` should broadcast to the shape (4,) of `r_t`. Found (3,).",
    ),
    "traces of a larger shape": (
        lambda: pg.gae_value_loss(R, D, R.expand(2, 4), V),
        "`lambda_` should broadcast to the shape (4,) of `r_t`. Found (2, 4).",
    ),
    "a group of one": (
        lambda: pg.group_advantages(R[:1], baseline="mean"),
        "`rewards` should have groups of at least two. Found shape (1,).",
    ),
    "an unknown baseline": (
        lambda: pg.group_advantages(R, baseline="median"),
        "`baseline` should be one of 'mean', 'leave_one_out'. Found 'median'.",
    ),
    "a divergence without a reference": (
        lambda: pg.grpo_loss(LOGITS, ADVANTAGES, beta=0.1),
        "`reference_log_prob_t` should be given for a positive `beta`. Found None, 0.1.",
    ),
    "tokens without a group": (
        lambda: pg.grpo_loss(R, R),
        "`log_prob_t` should have shape (*, K, T). Found (4,).",
    ),
    "a temperature with a dimension": (
        lambda: pg.sac_actor_loss(R[:1], R, R),
        "`log_alpha` should be a tensor without dimensions. Found shape (1,).",
    ),
    "a critic that is a function": (
        lambda: pg.held_critic(lambda x: x, R),
        "`critic` should be a torch.nn.Module. Found function.",
    ),
    "values of critics without their dimension": (
        lambda: pg.td3_critic_loss(R, R, D, R[None]),
        "`q_tm1` should have shape (K, *), * being (4,). Found (4,).",
    ),
    "bounds that are turned round": (
        lambda: pg.smoothed_actions(R, low=1.0, high=-1.0),
        "`high` should be finite and above 1. Found -1.0.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("action", [-100, -1, 3])
def test_an_action_that_does_not_exist_is_refused(action):
    """Torch's cross entropy ignores a label of -100."""
    with pytest.raises(ValueError, match=f"^`a_t` should be at least 0 and below 3. Found {action}.$"):
        pg.policy_gradient_loss(LOGITS, torch.tensor([action, 0]), ADVANTAGES)


@pytest.mark.parametrize("times", [8, 400])
def test_half_precision_is_rounded_once(times):
    rewards, v_tm1, v_t, rho = torch.randn(4, times, dtype=torch.bfloat16)
    discounts, lambda_ = torch.full((2, times), 0.99, dtype=torch.bfloat16)
    values = torch.cat([v_tm1, v_t[-1:]])
    calls = [
        (pg.truncated_generalized_advantage_estimation, (rewards, discounts, lambda_, values)),
        (pg.gae_value_loss, (rewards, discounts, 0.9, values)),
        (pg.vtrace, (v_tm1, v_t, rewards, discounts, rho.exp())),
        (pg.vtrace_td_error_and_advantage, (v_tm1, v_t, rewards, discounts, rho.exp(), lambda_)),
    ]
    for function, arguments in calls:
        found = function(*arguments)
        wide = function(*(value.float() if isinstance(value, torch.Tensor) else value for value in arguments))
        for half, single in zip(tree_leaves(found), tree_leaves(wide), strict=True):
            assert half.dtype == torch.bfloat16
            assert torch.equal(half, single.bfloat16())
