"""Live peers: rlax finds the same values and gradients, open and closed, and torchrl the same advantages.

They are in the dependency group ``gallery-peers``. Where a peer stops a gradient although it is told not to, or lets
one pass although it is told to stop, a test shows it.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_policy_gradient import ACTIONS, ADVANTAGES, LOGITS, ON_TIMES, RHO, SLOPES, WEIGHTS, D, Q, R, V
from values import doubles

from toolkit import policy_gradient as pg
from toolkit import unblock


@pytest.fixture(scope="module")
def peer():
    """Return rlax and jax; both warn when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax = pytest.importorskip("jax")
        jax.config.update("jax_enable_x64", True)
        return SimpleNamespace(jax=jax, np=jax.numpy, rlax=pytest.importorskip("rlax"))


def chosen(logits):
    return logits.log_softmax(-1)[range(2), ACTIONS]


def generalised(values):
    return (ON_TIMES * pg.truncated_generalized_advantage_estimation(R, D, 0.7, values)).sum() + values.sum()


def vtrace_errors(v, rho):
    return 0.5 * pg.vtrace(v[:-1], v[1:], R, D, rho, 0.7, 2.0).square().sum()


def vtrace_advantages(v, rho):
    found = pg.vtrace_td_error_and_advantage(v[:-1], v[1:], R, D, rho, 0.7, 2.0, 1.2)
    return (ON_TIMES * (found.pg_advantage + 0.3 * found.q_estimate + 0.1 * found.errors)).sum()


def rlax_generalised(p, flag, v):
    found = p.rlax.truncated_generalized_advantage_estimation(R.numpy(), D.numpy(), 0.7, v, stop_target_gradients=flag)
    return p.np.sum(ON_TIMES.numpy() * found) + p.np.sum(v)


def rlax_errors(p, flag, v, rho):
    found = p.rlax.vtrace(v[:-1], v[1:], R.numpy(), D.numpy(), rho, 0.7, 2.0, stop_target_gradients=flag)
    return 0.5 * p.np.sum(found**2)


def rlax_advantages(p, flag, v, rho):
    found = p.rlax.vtrace_td_error_and_advantage(
        v[:-1], v[1:], R.numpy(), D.numpy(), rho, 0.7, 2.0, 1.2, stop_target_gradients=flag
    )
    return p.np.sum(ON_TIMES.numpy() * (found.pg_advantage + 0.3 * found.q_estimate + 0.1 * found.errors))


# Name -> our loss, theirs with the flag, the arguments, the blocks that are open with the flag on, and with it off.
CASES: dict[str, tuple[Callable, Callable, tuple, list, list]] = {
    "policy_gradient_loss": (
        lambda logits, adv: pg.policy_gradient_loss(logits, ACTIONS, adv, WEIGHTS),
        lambda p, flag, logits, adv: p.rlax.policy_gradient_loss(
            logits, ACTIONS.numpy(), adv, WEIGHTS.numpy(), use_stop_gradient=flag
        ),
        (LOGITS, ADVANTAGES),
        [],
        [pg.ADVANTAGE],
    ),
    "clipped_surrogate_pg_loss": (
        lambda ratios, adv: pg.clipped_surrogate_pg_loss(ratios, adv, 0.2),
        lambda p, flag, ratios, adv: p.rlax.clipped_surrogate_pg_loss(ratios, adv, 0.2, use_stop_gradient=flag),
        (doubles(1.3, 1.1, 0.9, 0.7), ON_TIMES),
        [],
        [pg.ADVANTAGE],
    ),
    "qpg_loss": (
        pg.qpg_loss,
        lambda p, flag, logits, q: p.rlax.qpg_loss(logits, q, use_stop_gradient=flag),
        (LOGITS, Q),
        [],
        [pg.ADVANTAGE],
    ),
    "rpg_loss": (
        pg.rpg_loss,
        lambda p, flag, logits, q: p.rlax.rpg_loss(logits, q, use_stop_gradient=flag),
        (LOGITS, Q),
        [],
        [pg.ACTION_VALUES],
    ),
    "dpg_loss": (
        lambda a, slope: pg.dpg_loss(a, slope, 1.0).sum(),
        lambda p, flag, a, slope: p.np.sum(
            p.jax.vmap(lambda x, y: p.rlax.dpg_loss(x, y, 1.0, use_stop_gradient=flag))(a, slope)
        ),
        (doubles([0.4, -0.7], [1.1, 0.2]), SLOPES),
        [],
        [pg.ACTION_TARGET],
    ),
    "generalised_advantages": (generalised, rlax_generalised, (V,), [], [pg.ADVANTAGE]),
    "vtrace": (vtrace_errors, rlax_errors, (V, RHO), [], [pg.VTRACE_TARGET]),
    "vtrace_advantages": (
        vtrace_advantages,
        rlax_advantages,
        (V, RHO),
        [pg.ADVANTAGE],
        [pg.ADVANTAGE, pg.VTRACE_TARGET],
    ),
}


def ours(loss, arguments, opened):
    leaves = [each.clone().requires_grad_() for each in arguments]
    with unblock(*opened):
        value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)]


def theirs(peer, loss, flag, arguments):
    arrays = [each.numpy() for each in arguments]
    value, slopes = peer.jax.value_and_grad(partial(loss, peer, flag), argnums=tuple(range(len(arrays))))(*arrays)
    return [torch.from_numpy(np.array(each)) for each in (value, *slopes)]


@pytest.mark.filterwarnings("ignore:Rlax softmax:PendingDeprecationWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "open"])
def test_rlax_finds_the_same_value_and_gradient(peer, name, stopped):
    loss, of_rlax, arguments, closed, opened = CASES[name]
    found = ours(loss, arguments, closed if stopped else opened)
    for mine, other in zip(found, theirs(peer, of_rlax, stopped, arguments), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_rlax_stops_the_values_of_regret_matching_although_it_is_told_not_to(peer):
    """A helper is called without the flag. The logits' gradient is right, that of the values is 0."""

    def of_rlax(p, flag, logits, q):
        return p.rlax.rm_loss(logits, q, use_stop_gradient=flag)

    for stopped, opened in ((True, []), (False, [pg.ADVANTAGE])):
        value, of_logits, of_q = ours(pg.rm_loss, (LOGITS, Q), opened)
        their_value, their_logits, their_q = theirs(peer, of_rlax, stopped, (LOGITS, Q))
        torch.testing.assert_close([value, of_logits], [their_value, their_logits], rtol=1e-10, atol=1e-12)
        assert their_q.abs().max() == 0
        assert (of_q.abs().max() > 0.05) == (not stopped)


def test_the_same_slip_of_rlax_cannot_be_seen_in_the_q_policy_gradient(peer):
    """There the open gradient is 0 for the values as well."""
    loss, of_rlax, arguments, _, opened = CASES["qpg_loss"]
    assert ours(loss, arguments, opened)[2].abs().max() < 1e-15
    assert theirs(peer, of_rlax, False, arguments)[2].abs().max() < 1e-15


def test_rlax_lets_the_advantage_of_vtrace_move_the_critic_although_it_is_told_to_stop(peer):
    def of_rlax(p, flag, v, rho):
        found = p.rlax.vtrace_td_error_and_advantage(
            v[:-1], v[1:], R.numpy(), D.numpy(), rho, stop_target_gradients=flag
        )
        return p.np.sum(ON_TIMES.numpy() * found.pg_advantage)

    _, of_v, of_rho = theirs(peer, of_rlax, True, (V, RHO))
    torch.testing.assert_close(of_v, doubles(-0.3, 1.0, -1.8, -0.3, 0.27))
    torch.testing.assert_close(of_rho, doubles(0.67368, 0.0, 3.68, 0.0))


def test_two_halves_of_rlax_disagree_on_the_default(peer):
    """With no flag its advantages are open, and its V-trace is stopped."""
    arrays = R.numpy(), D.numpy()
    of_v = peer.jax.grad(lambda v: peer.np.sum(peer.rlax.truncated_generalized_advantage_estimation(*arrays, 0.7, v)))(
        V.numpy()
    )
    assert np.abs(of_v).max() > 0.5
    of_rho = peer.jax.grad(lambda rho: peer.np.sum(peer.rlax.vtrace(V.numpy()[:-1], V.numpy()[1:], *arrays, rho)))
    assert np.abs(of_rho(RHO.numpy())).max() == 0


@pytest.fixture(scope="module")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchrl")
        import torchrl.objectives.value.functional as functional
    return functional


@pytest.mark.parametrize("name", ["generalized_advantage_estimate", "vec_generalized_advantage_estimate"])
@pytest.mark.filterwarnings("ignore")
def test_torchrl_finds_the_same_advantages_and_gradients(torchrl, name):
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (7, 8))
    values.requires_grad_()
    done = torch.zeros(3, 7, 1, dtype=torch.bool)
    done[1, 3] = True
    discounts = torch.full((3, 7), 0.9, dtype=torch.float64).masked_fill(done[..., 0], 0)
    with unblock(pg.ADVANTAGE):
        mine = pg.truncated_generalized_advantage_estimation(rewards, discounts, 0.7, values)
    columns = values[:, :-1, None], values[:, 1:, None], rewards[..., None]
    other, _ = getattr(torchrl, name)(0.9, 0.7, *columns, done, done)
    torch.testing.assert_close(mine, other[..., 0], rtol=1e-6, atol=1e-6)
    slopes = [torch.autograd.grad(each.square().sum(), values)[0] for each in (mine, other)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_torchrl_finds_the_same_targets_of_vtrace(torchrl):
    mine = pg.vtrace_td_error_and_advantage(V[:-1], V[1:], R, torch.full_like(D, 0.9), RHO)
    done = torch.zeros(4, 1, dtype=torch.bool)
    columns = [each[:, None] for each in (RHO.log(), torch.zeros_like(RHO), V[:-1], V[1:], R)]
    advantage, target = torchrl.vtrace_advantage_estimate(0.9, *columns, done, done)
    torch.testing.assert_close(mine.pg_advantage, advantage[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.errors + V[:-1], target[:, 0], rtol=1e-6, atol=1e-6)
