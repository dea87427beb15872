"""Value learning beside rlax and torchrl: the same values and the same gradients, with the target held and without.

Both are in the dependency group ``gallery-peers``. rlax takes one sample, and a flag in place of the block.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from values import draw

from toolkit import Block, unblock
from toolkit.value_learning import (
    CATEGORICAL_TARGET,
    DOUBLE_Q_TARGET,
    EXPECTED_SARSA_TARGET,
    LAMBDA_RETURNS,
    N_STEP_RETURNS,
    Q_TARGET,
    QUANTILE_TARGET,
    SARSA_TARGET,
    TD_TARGET,
    categorical_double_q_learning,
    categorical_l2_project,
    categorical_q_learning,
    categorical_td_learning,
    double_q_learning,
    expected_sarsa,
    lambda_returns,
    n_step_bootstrapped_returns,
    q_learning,
    quantile_q_learning,
    sarsa,
    td_lambda,
    td_learning,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(scope="module")
def rlax() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax = pytest.importorskip("jax")
        library = pytest.importorskip("rlax")
    jax.config.update("jax_enable_x64", True)
    return library


R, D = 0.5 * draw(1, 4), draw(2, 4).sigmoid() / 5 + 0.8
A, NEXT = torch.tensor([1, 0, 2, 2]), torch.tensor([2, 2, 0, 1])
Q, Q_NEXT, SELECTOR = draw(3, 4, 3), draw(4, 4, 3), draw(5, 4, 3)
REWARDS, DISCOUNTS, VALUES = draw(6, 4, 7), draw(7, 4, 7).sigmoid(), draw(8, 4, 8)
ATOMS, NEXT_ATOMS = torch.linspace(-1, 2, 4).double(), torch.linspace(-3.1, 4.2, 9).double()
LOGITS, NEXT_LOGITS = draw(9, 4, 3, 4), draw(10, 4, 3, 9)  # every atom of the labels has some mass
TAU = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]).double()
THETA, NEXT_THETA, THETA_SELECTOR = draw(12, 4, 5, 3), draw(13, 4, 6, 3), draw(14, 4, 2, 3)
SEQUENCE = (VALUES[:, :-1], REWARDS, DISCOUNTS, VALUES[:, 1:])

# Name -> our function, its block, the tensors with a batch, and rlax's function of one sample with its flag.
Peer = Callable[[Any, bool], Callable[..., Any]]
CASES: dict[str, tuple[Callable[..., Tensor], Block, tuple[Tensor, ...], Peer]] = {
    "td_learning": (
        td_learning,
        TD_TARGET,
        (Q[:, 0], R, D, Q_NEXT[:, 0]),
        lambda rlax, s: partial(rlax.td_learning, stop_target_gradients=s),
    ),
    "sarsa": (
        sarsa,
        SARSA_TARGET,
        (Q, A, R, D, Q_NEXT, NEXT),
        lambda rlax, s: partial(rlax.sarsa, stop_target_gradients=s),
    ),
    "expected_sarsa": (
        expected_sarsa,
        EXPECTED_SARSA_TARGET,
        (Q, A, R, D, Q_NEXT, SELECTOR.softmax(-1)),
        lambda rlax, s: partial(rlax.expected_sarsa, stop_target_gradients=s),
    ),
    "q_learning": (
        q_learning,
        Q_TARGET,
        (Q, A, R, D, Q_NEXT),
        lambda rlax, s: partial(rlax.q_learning, stop_target_gradients=s),
    ),
    "double_q_learning": (
        double_q_learning,
        DOUBLE_Q_TARGET,
        (Q, A, R, D, Q_NEXT, SELECTOR),
        lambda rlax, s: partial(rlax.double_q_learning, stop_target_gradients=s),
    ),
    "td_lambda": (
        partial(td_lambda, lambda_=0.7),
        LAMBDA_RETURNS,
        SEQUENCE,
        lambda rlax, s: lambda v, r, d, w: rlax.td_lambda(v, r, d, w, 0.7, stop_target_gradients=s),
    ),
    "td_lambda of each step": (
        td_lambda,
        LAMBDA_RETURNS,
        (*SEQUENCE, draw(15, 4, 7).sigmoid()),
        lambda rlax, s: partial(rlax.td_lambda, stop_target_gradients=s),
    ),
    "n_step_bootstrapped_returns": (
        lambda v, r, d, w: n_step_bootstrapped_returns(r, d, w, 3) - v,
        N_STEP_RETURNS,
        SEQUENCE,
        lambda rlax, s: lambda v, r, d, w: rlax.n_step_bootstrapped_returns(r, d, w, 3, stop_target_gradients=s) - v,
    ),
    "categorical_td_learning": (
        lambda x, r, d, y: (2 * categorical_td_learning(ATOMS, x, r, d, NEXT_ATOMS, y)).sqrt(),
        CATEGORICAL_TARGET,
        (LOGITS[:, 0], R, D, NEXT_LOGITS[:, 0]),
        lambda rlax, s: (
            lambda x, r, d, y: (
                (
                    2
                    * rlax.categorical_td_learning(
                        ATOMS.numpy(), x, r, d, NEXT_ATOMS.numpy(), y, stop_target_gradients=s
                    )
                )
                ** 0.5
            )
        ),
    ),
    "categorical_q_learning": (
        lambda x, a, r, d, y: (2 * categorical_q_learning(ATOMS, x, a, r, d, NEXT_ATOMS, y)).sqrt(),
        CATEGORICAL_TARGET,
        (LOGITS, A, R, D, NEXT_LOGITS),
        lambda rlax, s: (
            lambda x, a, r, d, y: (
                (
                    2
                    * rlax.categorical_q_learning(
                        ATOMS.numpy(), x, a, r, d, NEXT_ATOMS.numpy(), y, stop_target_gradients=s
                    )
                )
                ** 0.5
            )
        ),
    ),
    "categorical_double_q_learning": (
        lambda x, a, r, d, y, z: (2 * categorical_double_q_learning(ATOMS, x, a, r, d, NEXT_ATOMS, y, z)).sqrt(),
        CATEGORICAL_TARGET,
        (LOGITS, A, R, D, NEXT_LOGITS, SELECTOR),
        lambda rlax, s: (
            lambda x, a, r, d, y, z: (
                (
                    2
                    * rlax.categorical_double_q_learning(
                        ATOMS.numpy(),
                        x,
                        a,
                        r,
                        d,
                        NEXT_ATOMS.numpy(),
                        y,
                        z,
                        stop_target_gradients=s,
                    )
                )
                ** 0.5
            )
        ),
    ),
    **{
        f"quantile_q_learning with kappa {kappa}": (
            lambda x, a, r, d, z, y, kappa=kappa: (
                2 * quantile_q_learning(x, TAU, a, r, d, z, y, huber_param=kappa)
            ).sqrt(),
            QUANTILE_TARGET,
            (THETA, A, R, D, THETA_SELECTOR, NEXT_THETA),
            lambda rlax, s, kappa=kappa: (
                lambda x, a, r, d, z, y: (
                    (2 * rlax.quantile_q_learning(x, TAU.numpy(), a, r, d, z, y, kappa, stop_target_gradients=s)) ** 0.5
                )
            ),
        )
        for kappa in (0.0, 0.5)
    },
}


def ours(function: Callable[..., Tensor], arguments: tuple[Tensor, ...], *opened: Block) -> list[Tensor]:
    leaves = [a.clone().requires_grad_() if a.is_floating_point() else a for a in arguments]
    with unblock(*opened):
        value = (0.5 * function(*leaves).square()).sum()
        floats = [leaf for leaf in leaves if leaf.requires_grad]
        return [value.detach(), *torch.autograd.grad(value, floats, materialize_grads=True)]


def theirs(of_flag: Callable[[Any], Callable[..., Any]], arguments: tuple[Tensor, ...]) -> dict[bool, list[Tensor]]:
    """Return the value and the gradients for both flags: rlax lets it be traced."""
    import jax

    floats = [i for i, a in enumerate(arguments) if a.is_floating_point()]

    def answers(stopped: Any, *values: Any) -> Any:
        def loss(*values: Any) -> Any:
            return (0.5 * jax.vmap(of_flag(stopped))(*values) ** 2).sum()

        return jax.value_and_grad(loss, argnums=floats)(*values)

    every = jax.vmap(answers, (0, *[None] * len(arguments)))
    value, slopes = jax.jit(every)(np.array([True, False]), *(a.numpy() for a in arguments))
    found = [torch.from_numpy(np.array(part)) for part in (value, *slopes)]
    return {True: [part[0] for part in found], False: [part[1] for part in found]}


@pytest.mark.parametrize("name", CASES)
def test_rlax_has_the_same_value_and_gradients(rlax, name):
    function, block, arguments, peer = CASES[name]
    expected = theirs(partial(peer, rlax), arguments)
    torch.testing.assert_close(ours(function, arguments), expected[True], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours(function, arguments, block), expected[False], rtol=1e-9, atol=1e-11)


def test_rlax_leaves_the_returns_of_several_steps_open_unless_told_otherwise(rlax):
    """The same loss as above without the flag has the gradient with the block open."""
    function, block, arguments, _ = CASES["n_step_bootstrapped_returns"]

    def peer(stopped: Any) -> Callable[..., Any]:
        return lambda v, r, d, w: rlax.n_step_bootstrapped_returns(r, d, w, 3) - v

    found = theirs(peer, arguments)[True]
    torch.testing.assert_close(found, ours(function, arguments, block), rtol=1e-9, atol=1e-11)
    assert (found[-1] - ours(function, arguments)[-1]).abs().max() > 0.1


def test_rlax_has_no_open_gradient_of_a_label_with_an_empty_atom(rlax):
    """At the end of every episode, for example. The derivative of ``m log m`` enters its cross entropy at m = 0."""
    function, block, (logits, _, _, following), peer = CASES["categorical_td_learning"]
    arguments = (logits, torch.tensor([0.3, 0.0, 0.6, 1.9]).double(), torch.zeros(4).double(), following)
    found = theirs(partial(peer, rlax), arguments)
    torch.testing.assert_close(ours(function, arguments), found[True], rtol=1e-9, atol=1e-11)
    assert found[False][-1].isnan().all()
    assert ours(function, arguments, block)[-1].abs().max() < 1e-12  # no value is left in these labels


def test_rlax_projects_as_well(rlax):
    z, p = draw(16, 5), draw(17, 5).softmax(-1)
    expected = rlax.categorical_l2_project(z.numpy(), p.numpy(), ATOMS.numpy())
    torch.testing.assert_close(categorical_l2_project(z, p, ATOMS), torch.from_numpy(np.array(expected)))


@pytest.fixture(scope="module")
def torchrl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchrl.objectives.value.functional")


def test_torchrl_has_the_same_lambda_returns_and_leaves_them_open(torchrl):
    """It takes one discount, flags of the ends, and a last dimension of size 1."""
    ends = torch.zeros(4, 7, dtype=torch.bool)
    ends[:, 3] = ends[:, -1] = True
    discounts = 0.9 * (~ends).double()

    def estimated(v: Tensor, r: Tensor, d: Tensor, w: Tensor) -> Tensor:
        flags = ends[..., None]
        return torchrl.td_lambda_return_estimate(0.9, 0.7, w[..., None], r[..., None], flags, flags)[..., 0] - v

    arguments = (VALUES[:, :-1], REWARDS, discounts, VALUES[:, 1:])
    value, by_v, by_r, _, by_w = ours(partial(td_lambda, lambda_=0.7), arguments, LAMBDA_RETURNS)
    their_value, their_v, their_r, _, their_w = ours(estimated, arguments)
    torch.testing.assert_close([their_value, their_v, their_r, their_w], [value, by_v, by_r, by_w])


def test_the_vectorised_returns_of_torchrl_have_single_precision(torchrl):
    """They hold the discount in float32 and drop factors below 1e-7, for returns in float64 too."""
    ends = torch.zeros(4, 7, 1, dtype=torch.bool)
    inputs = (0.9, 0.7, VALUES[:, 1:, None], REWARDS[..., None], ends, ends)
    returns = lambda_returns(REWARDS, torch.full_like(REWARDS, 0.9), VALUES[:, 1:], 0.7)
    torch.testing.assert_close(torchrl.td_lambda_return_estimate(*inputs)[..., 0], returns, rtol=1e-13, atol=1e-13)
    error = (torchrl.vec_td_lambda_return_estimate(*inputs)[..., 0] - returns).abs().max()
    assert 1e-10 < error < 1e-5
