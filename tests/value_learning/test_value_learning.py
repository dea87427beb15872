"""Value learning: with its block a target is a label, without it the prediction and the label meet halfway."""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase, relative_error
from torch import Tensor
from torch.func import vmap
from values import draw, leaves

from experiments.value_learning import Config, Walk, run, true_values
from toolkit import Block, unblock
from toolkit.gradients import field_jacobian
from toolkit.value_learning import (
    CATEGORICAL_TARGET,
    DOUBLE_Q_TARGET,
    ESTIMATED_ERROR,
    EXPECTED_SARSA_TARGET,
    GTD2_ESTIMATE,
    LAMBDA_RETURNS,
    N_STEP_RETURNS,
    Q_TARGET,
    QUANTILE_TARGET,
    SARSA_TARGET,
    TARGET_PARAMETERS,
    TD_TARGET,
    TDC_ERROR,
    TDC_ESTIMATE,
    categorical_double_q_learning,
    categorical_l2_project,
    categorical_q_learning,
    categorical_td_learning,
    double_q_learning,
    error_estimate_loss,
    expected_sarsa,
    gtd2_loss,
    incremental_update,
    lambda_returns,
    n_step_bootstrapped_returns,
    q_learning,
    quantile_q_learning,
    quantile_regression_loss,
    sarsa,
    td_lambda,
    td_learning,
    tdc_loss,
)

Tensors = Mapping[str, Tensor]


def tensor(*values: object) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def half_squares(errors: Tensor) -> Tensor:
    return 0.5 * errors.square().sum()


# --- witnesses: sums over samples, actions, steps, atoms, written out ------------------------------------------------

R = tensor(0.7, -0.3, 1.1)
D = tensor(0.9, 0.8, 0.95)
ACTIONS, NEXT = torch.tensor([1, 0, 2]), torch.tensor([2, 2, 0])
Q = tensor([[0.2, -0.5, 1.3], [0.4, 0.1, -0.9], [-1.2, 0.6, 0.3]])
Q_NEXT = tensor([[0.9, 0.4, -0.6], [-0.2, 1.7, 0.5], [0.8, -0.1, 0.35]])
SELECTOR = tensor([[0.1, 0.8, 0.3], [0.6, -0.2, 0.2], [-0.4, 0.15, 0.9]])
P = tensor([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]])


def one_step(next_values: Callable[[Tensors, int], dict[str, dict[int, float]]], predicted: str = "q_tm1"):
    """Return the witnesses of a target ``r + d * next``, of which `next_values` gives the derivatives by its parts."""

    def witness(parameters: Tensors, *, opened: bool) -> dict[str, Tensor]:
        parameters = {name: value.detach() for name, value in parameters.items()}
        gradient = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for i in range(3):
            parts = next_values(parameters, i)
            following = float(parts.pop("value"))
            prediction = parameters[predicted][i, ACTIONS[i]] if predicted == "q_tm1" else parameters[predicted][i]
            error = R[i] + D[i] * following - prediction
            if predicted == "q_tm1":
                gradient[predicted][i, ACTIONS[i]] -= error
            else:
                gradient[predicted][i] -= error
            if opened:
                for name, slopes in parts.items():
                    for action, slope in slopes.items():
                        at = (i,) if action is None else (i, action)
                        gradient[name][at] += error * D[i] * slope
        return gradient

    return witness


def _of_td(p, i):
    return {"value": p["v_t"][i], "v_t": {None: 1.0}}


def _of_sarsa(p, i):
    return {"value": p["q_t"][i, NEXT[i]], "q_t": {int(NEXT[i]): 1.0}}


def _of_expected_sarsa(p, i):
    q, probs = p["q_t"][i].tolist(), p["probs"][i].tolist()
    value = sum(a * b for a, b in zip(q, probs, strict=True))
    return {"value": value, "q_t": dict(enumerate(probs)), "probs": dict(enumerate(q))}


def _of_q(p, i):
    q = p["q_t"][i].tolist()
    return {"value": max(q), "q_t": {q.index(max(q)): 1.0}}


def _of_double_q(p, i):
    selector = p["selector"][i].tolist()
    best = selector.index(max(selector))
    return {"value": p["q_t"][i, best], "q_t": {best: 1.0}}


def one_step_case(id, block, function, parameters, next_values, predicted="q_tm1") -> BlockCase:
    witness = one_step(next_values, predicted)
    return BlockCase(
        id=id,
        block=block,
        parameters=leaves(**parameters),
        loss=lambda p: half_squares(function(p)),
        blocked=partial(witness, opened=False),
        opened=partial(witness, opened=True),
    )


# A sequence of one episode that ends after its second step, and a second one that is cut.
REWARDS = tensor([[0.7, -0.3, 1.1, 0.2], [0.1, 0.9, -0.4, 0.6]])
DISCOUNTS = tensor([[0.9, 0.9, 0.8, 0.9], [0.7, 0.0, 0.95, 0.85]])
VALUES = tensor([[0.1, 0.6, -0.4, 0.8, 0.25], [-0.5, 0.35, 1.2, 0.15, -0.7]])
LAMBDA = 0.7


def window(row: int, start: int, length: int) -> tuple[float, float, int]:
    """Return the rewards, the product of the discounts and the index of the last value of a window."""
    total, product = 0.0, 1.0
    end = min(start + length, REWARDS.shape[1])
    for t in range(start, end):
        total += product * float(REWARDS[row, t])
        product *= float(DISCOUNTS[row, t])
    return total, product, end


def mixture(row: int, start: int, weights: list[tuple[int, float]], values: Tensor) -> tuple[float, dict[int, float]]:
    """Return a weighted sum of returns of several lengths, and its derivatives by the values."""
    total, slopes = 0.0, {}
    for length, weight in weights:
        rewards, product, end = window(row, start, length)
        total += weight * (rewards + product * float(values[row, end]))
        slopes[end] = slopes.get(end, 0.0) + weight * product
    return total, slopes


def lambda_weights(start: int) -> list[tuple[int, float]]:
    left = REWARDS.shape[1] - start
    return [(n, (1 - LAMBDA) * LAMBDA ** (n - 1)) for n in range(1, left)] + [(left, LAMBDA ** (left - 1))]


def many_steps(weights: Callable[[int], list[tuple[int, float]]], *, opened: bool):
    def witness(parameters: Tensors) -> dict[str, Tensor]:
        v = parameters["v"].detach()
        gradient = torch.zeros_like(v)
        for row in range(len(v)):
            for t in range(REWARDS.shape[1]):
                target, slopes = mixture(row, t, weights(t), v)
                error = target - v[row, t]
                gradient[row, t] -= error
                for k, slope in slopes.items() if opened else ():
                    gradient[row, k] += error * slope
        return {"v": gradient}

    return witness


def many_steps_case(id, block, errors, weights) -> BlockCase:
    return BlockCase(
        id=id,
        block=block,
        parameters=leaves(v=VALUES),
        loss=lambda p: half_squares(errors(p["v"])),
        blocked=many_steps(weights, opened=False),
        opened=many_steps(weights, opened=True),
    )


def n_step_errors(v: Tensor, n: int = 3) -> Tensor:
    return n_step_bootstrapped_returns(REWARDS, DISCOUNTS, v[:, 1:], n) - v[:, :-1]


ATOMS, NEXT_ATOMS = tensor(-1.0, -0.5, 0.5, 1.25, 2.0), tensor(-1.5, 0.0, 0.75, 1.5)


def triangles(z: Tensor, atoms: Tensor) -> Tensor:
    """Return the share of each source that each atom receives, (J, K), by linear interpolation of unit vectors."""
    shares = torch.zeros(len(z), len(atoms), dtype=torch.float64)
    for j, place in enumerate(z.clamp(atoms[0], atoms[-1]).tolist()):
        for k, atom in enumerate(atoms.tolist()):
            if place == atom:
                shares[j, k] = 1.0
            elif k + 1 < len(atoms) and atom < place < atoms[k + 1]:
                shares[j, k + 1] = (place - atom) / float(atoms[k + 1] - atom)
                shares[j, k] = 1 - shares[j, k + 1]
    return shares


def c51_row(logits: Tensor, reward: Tensor, discount: Tensor, next_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocked gradient by the logits and the leak into the next ones."""
    p, following = logits.softmax(-1), next_logits.softmax(-1)
    shares = triangles(reward + discount * NEXT_ATOMS, ATOMS)
    cost = -(shares * p.log()).sum(-1)
    return p - following @ shares, following * (cost - following @ cost)


def c51_td(parameters: Tensors, *, opened: bool) -> dict[str, Tensor]:
    rows = [c51_row(parameters["logits"][i].detach(), R[i], D[i], parameters["next"][i].detach()) for i in range(3)]
    leak = torch.stack([leak for _, leak in rows])
    return {"logits": torch.stack([row for row, _ in rows]), "next": leak if opened else 0 * leak}


def c51_q(parameters: Tensors, *, opened: bool) -> dict[str, Tensor]:
    gradient = {name: torch.zeros_like(value) for name, value in parameters.items()}
    selector = parameters.get("selector", parameters["next"].softmax(-1) @ NEXT_ATOMS).detach()
    for i in range(3):
        means = selector[i].tolist()
        best = means.index(max(means))
        row, leak = c51_row(
            parameters["logits"][i, ACTIONS[i]].detach(), R[i], D[i], parameters["next"][i, best].detach()
        )
        gradient["logits"][i, ACTIONS[i]] = row
        if opened:
            gradient["next"][i, best] = leak
    return gradient


TAU = tensor(1 / 6, 1 / 2, 5 / 6)


def quantile_witness(parameters: Tensors, *, kappa: float, opened: bool) -> dict[str, Tensor]:
    gradient = {name: torch.zeros_like(value) for name, value in parameters.items()}
    theta, following = parameters["theta"].detach(), parameters["next"].detach()
    for i in range(3):
        means = following[i].mean(0).tolist()
        best = means.index(max(means))
        for m in range(3):
            for j in range(4):
                u = float(R[i] + D[i] * following[i, j, best] - theta[i, m, ACTIONS[i]])
                slope = math.copysign(1.0, u) if kappa == 0 else max(-kappa, min(kappa, u))
                slope *= (1 - float(TAU[m]) if u < 0 else float(TAU[m])) / 4
                gradient["theta"][i, m, ACTIONS[i]] -= slope
                if opened:
                    gradient["next"][i, j, best] += float(D[i]) * slope
    return gradient


def quantile_case(kappa: float) -> BlockCase:
    return BlockCase(
        id=f"quantile-q-learning-kappa-{kappa:g}",
        block=QUANTILE_TARGET,
        parameters=leaves(theta=draw(5, 3, 3, 3), next=draw(6, 3, 4, 3)),
        loss=lambda p: quantile_q_learning(
            p["theta"], TAU, ACTIONS, R, D, p["next"], p["next"], huber_param=kappa
        ).sum(),
        blocked=partial(quantile_witness, kappa=kappa, opened=False),
        opened=partial(quantile_witness, kappa=kappa, opened=True),
    )


# Linear values and estimates of four transitions, as in the papers.
PHI, PHI_NEXT, RHO = draw(7, 4, 3), draw(8, 4, 3), tensor(1.3, 0.0, 2.1, 0.4)
REWARD, DISCOUNT = draw(9, 4), tensor(0.9, 0.95, 0.0, 0.8)
WEIGHTS = {"theta": tensor(0.3, -0.2, 0.5), "w": tensor(0.5, -0.1, 0.2)}


def gradient_td(name: str, *, opened: frozenset[str] = frozenset()):
    """Return the sums of the papers' updates with the opposite sign, and of the terms of open blocks."""

    def witness(parameters: Tensors) -> dict[str, Tensor]:
        theta, w = parameters["theta"].detach(), parameters["w"].detach()
        gradient = {"theta": torch.zeros(3, dtype=torch.float64), "w": torch.zeros(3, dtype=torch.float64)}
        for phi, following, rho, reward, g in zip(PHI, PHI_NEXT, RHO, REWARD, DISCOUNT, strict=True):
            delta = reward + g * following @ theta - phi @ theta
            estimate = phi @ w
            if name == "gtd2":
                gradient["theta"] += rho * estimate * (g * following - phi)
                gradient["w"] += rho * delta * phi * ("estimate" in opened)
            elif name == "tdc":
                gradient["theta"] += rho * (estimate * g * following - delta * phi)
                gradient["theta"] -= rho * (phi @ theta) * (g * following - phi) * ("error" in opened)
                gradient["w"] += rho * g * (following @ theta) * phi * ("estimate" in opened)
            else:
                gradient["w"] += (estimate - rho * delta) * phi
                gradient["theta"] -= rho * estimate * (g * following - phi) * ("error" in opened)
        return gradient

    return witness


LOSSES = {"gtd2": gtd2_loss, "tdc": tdc_loss, "estimate": error_estimate_loss}


def gradient_td_loss(name: str, p: Tensors) -> Tensor:
    v, following, h = PHI @ p["theta"], PHI_NEXT @ p["theta"], PHI @ p["w"]
    return LOSSES[name](v, REWARD, DISCOUNT, following, h, RHO).sum()


def gradient_td_case(name: str, block: Block, opened: str) -> BlockCase:
    return BlockCase(
        id=f"{name}-{opened}",
        block=block,
        parameters=leaves(**WEIGHTS),
        loss=partial(gradient_td_loss, name),
        blocked=gradient_td(name),
        opened=gradient_td(name, opened=frozenset({opened})),
    )


OLD, OLDER = {"weight": draw(10, 2, 3), "bias": draw(11, 2)}, 0.3


def averaged_network(p: Tensors) -> Tensor:
    """Return outputs of a target network after two updates, from the online network and from half of it."""
    halves = {name: 0.5 * value for name, value in p.items()}
    target = incremental_update(p, incremental_update(halves, OLD, OLDER), 0.2)
    return sum((value.square() * draw(12, *value.shape)).sum() for value in target.values()) + p["bias"].prod()


def averaged_gradient(parameters: Tensors, *, opened: bool) -> dict[str, Tensor]:
    gradient = {"weight": torch.zeros(2, 3, dtype=torch.float64), "bias": parameters["bias"].detach().flip(0).clone()}
    for name, value in parameters.items() if opened else ():
        target = 0.8 * (0.7 * OLD[name] + 0.3 * 0.5 * value.detach()) + 0.2 * value.detach()
        gradient[name] += 2 * target * draw(12, *value.shape) * (0.2 + 0.8 * 0.3 * 0.5)
    return gradient


BLOCK_CASES = [
    one_step_case(
        "td-learning",
        TD_TARGET,
        lambda p: td_learning(p["v_tm1"], R, D, p["v_t"]),
        {"v_tm1": tensor(0.2, -0.4, 0.9), "v_t": tensor(1.3, 0.1, -0.6)},
        _of_td,
        "v_tm1",
    ),
    one_step_case(
        "sarsa",
        SARSA_TARGET,
        lambda p: sarsa(p["q_tm1"], ACTIONS, R, D, p["q_t"], NEXT),
        {"q_tm1": Q, "q_t": Q_NEXT},
        _of_sarsa,
    ),
    one_step_case(
        "expected-sarsa",
        EXPECTED_SARSA_TARGET,
        lambda p: expected_sarsa(p["q_tm1"], ACTIONS, R, D, p["q_t"], p["probs"]),
        {"q_tm1": Q, "q_t": Q_NEXT, "probs": P},
        _of_expected_sarsa,
    ),
    one_step_case(
        "q-learning",
        Q_TARGET,
        lambda p: q_learning(p["q_tm1"], ACTIONS, R, D, p["q_t"]),
        {"q_tm1": Q, "q_t": Q_NEXT},
        _of_q,
    ),
    one_step_case(
        "double-q-learning",
        DOUBLE_Q_TARGET,
        lambda p: double_q_learning(p["q_tm1"], ACTIONS, R, D, p["q_t"], p["selector"]),
        {"q_tm1": Q, "q_t": Q_NEXT, "selector": SELECTOR},
        _of_double_q,
    ),
    many_steps_case("n-step-returns", N_STEP_RETURNS, n_step_errors, lambda t: [(3, 1.0)]),
    many_steps_case(
        "td-lambda",
        LAMBDA_RETURNS,
        lambda v: td_lambda(v[:, :-1], REWARDS, DISCOUNTS, v[:, 1:], LAMBDA),
        lambda_weights,
    ),
    BlockCase(
        id="categorical-td-learning",
        block=CATEGORICAL_TARGET,
        parameters=leaves(logits=draw(1, 3, 5), next=draw(2, 3, 4)),
        loss=lambda p: categorical_td_learning(ATOMS, p["logits"], R, D, NEXT_ATOMS, p["next"]).sum(),
        blocked=partial(c51_td, opened=False),
        opened=partial(c51_td, opened=True),
    ),
    BlockCase(
        id="categorical-q-learning",
        block=CATEGORICAL_TARGET,
        parameters=leaves(logits=draw(3, 3, 3, 5), next=draw(4, 3, 3, 4)),
        loss=lambda p: categorical_q_learning(ATOMS, p["logits"], ACTIONS, R, D, NEXT_ATOMS, p["next"]).sum(),
        blocked=partial(c51_q, opened=False),
        opened=partial(c51_q, opened=True),
    ),
    BlockCase(
        id="categorical-double-q-learning",
        block=CATEGORICAL_TARGET,
        parameters=leaves(logits=draw(3, 3, 3, 5), next=draw(4, 3, 3, 4), selector=SELECTOR),
        loss=lambda p: categorical_double_q_learning(
            ATOMS, p["logits"], ACTIONS, R, D, NEXT_ATOMS, p["next"], p["selector"]
        ).sum(),
        blocked=partial(c51_q, opened=False),
        opened=partial(c51_q, opened=True),
    ),
    quantile_case(0.7),
    quantile_case(0),
    gradient_td_case("gtd2", GTD2_ESTIMATE, "estimate"),
    gradient_td_case("tdc", TDC_ERROR, "error"),
    gradient_td_case("tdc", TDC_ESTIMATE, "estimate"),
    gradient_td_case("estimate", ESTIMATED_ERROR, "error"),
    BlockCase(
        id="target-parameters",
        block=TARGET_PARAMETERS,
        parameters=leaves(weight=draw(14, 2, 3), bias=draw(15, 2)),
        loss=averaged_network,
        blocked=partial(averaged_gradient, opened=False),
        opened=partial(averaged_gradient, opened=True),
    ),
]
CASES = pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.id)


def gradient(case: BlockCase, opened: tuple[Block, ...] = ()) -> dict[str, Tensor]:
    parameters = case.parameters()
    with unblock(*opened):
        found = torch.autograd.grad(case.loss(parameters), [*parameters.values()], materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


# --- the same programs in JAX and TensorFlow: `peer_programs/value_learning.py` ---------------------------------------


def temporal_differences(p: Tensors, c: Tensors) -> Tensor:
    step = (p["q"], ACTIONS, c["rewards"], c["discounts"])
    taken = p["q"].gather(-1, ACTIONS[:, None])[:, 0]
    errors = (
        td_learning(taken, c["rewards"], c["discounts"], p["v"]),
        sarsa(*step, p["q_next"], NEXT),
        expected_sarsa(*step, p["q_next"], p["probs"]),
        q_learning(*step, p["q_next"]),
        double_q_learning(*step, p["q_next"], SELECTOR),
    )
    return sum(weight * half_squares(error) for weight, error in enumerate(errors, start=1))


def returns_of_several_steps(p: Tensors, c: Tensors) -> Tensor:
    v = p["v"]
    pairs = n_step_bootstrapped_returns(c["rewards"], c["discounts"], v[:, 1:], 2) - v[:, :-1]
    mixed = td_lambda(v[:, :-1], c["rewards"], c["discounts"], v[:, 1:], 0.7)
    return half_squares(pairs) + 2 * half_squares(mixed)


def distributions_of_returns(p: Tensors, c: Tensors) -> Tensor:
    step = (c["rewards"], c["discounts"])
    categorical = categorical_td_learning(c["atoms"], p["logits"], *step, c["atoms"], p["next_logits"])
    following = p["next_theta"].unsqueeze(-1)
    actions = torch.zeros_like(ACTIONS)
    quantiles = quantile_q_learning(
        p["theta"].unsqueeze(-1), c["tau"], actions, *step, following, following, huber_param=0.5
    )
    return categorical.sum() + quantiles.sum()


def gradient_temporal_differences(p: Tensors, c: Tensors) -> Tensor:
    v, following, h = c["phi"] @ p["theta"], c["phi_next"] @ p["theta"], c["phi"] @ p["w"]
    arguments = (v, c["rewards"], c["discounts"], following, h, c["rho"])
    return (gtd2_loss(*arguments) + 2 * tdc_loss(*arguments) + 3 * error_estimate_loss(*arguments)).sum()


def averaged_target_network(p: Tensors, c: Tensors) -> Tensor:
    target = incremental_update(p, {"weights": c["old"]}, 0.3)["weights"]
    return half_squares(c["rewards"] + c["phi_next"] @ target - c["phi"] @ p["weights"])


def one_hot(actions: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(actions, 3).double()


STEPS = {"rewards": R, "discounts": D}
PEER_CASES = {
    "temporal_differences": (
        {"v": Q_NEXT[:, 1].clone(), "q": Q, "q_next": Q_NEXT, "probs": P},
        {**STEPS, "taken": one_hot(ACTIONS), "taken_next": one_hot(NEXT), "preferred": one_hot(SELECTOR.argmax(-1))},
        temporal_differences,
    ),
    "returns_of_several_steps": (
        {"v": VALUES},
        {"rewards": REWARDS, "discounts": DISCOUNTS},
        returns_of_several_steps,
    ),
    "distributions_of_returns": (
        {
            "logits": draw(26, 3, 4),
            "next_logits": draw(27, 3, 4),
            "theta": draw(28, 3, 3),
            "next_theta": draw(29, 3, 3),
        },
        {**STEPS, "atoms": tensor(-1, 0, 1, 2), "tau": TAU},
        distributions_of_returns,
    ),
    "gradient_temporal_differences": (
        WEIGHTS,
        {"phi": PHI, "phi_next": PHI_NEXT, "rho": RHO, "rewards": REWARD, "discounts": DISCOUNT},
        gradient_temporal_differences,
    ),
    "averaged_target_network": (
        {"weights": WEIGHTS["theta"]},
        {"old": WEIGHTS["w"], "phi": PHI, "phi_next": PHI_NEXT, "rewards": REWARD},
        averaged_target_network,
    ),
}


# --- numbers that were computed elsewhere ----------------------------------------------------------------------------

T4 = {"r": tensor(0.7, -0.3, 1.1, 0.2), "d": tensor(0.9, 0.9, 0.8, 0.9)}
ROWS = {  # name -> parameters, loss, value, blocked gradients, open gradients
    "td": (
        {"theta": tensor(0.3, -0.2, 0.5)},
        lambda p: half_squares(
            td_learning(
                tensor(1, 2, 0.5) @ p["theta"], tensor(0.7), tensor(0.9), tensor(0.4, -1, 1.5) @ p["theta"]
            )
        ),
        1.1445845,
        {"theta": tensor(-1.513, -3.026, -0.7565)},
        {"theta": tensor(-0.96832, -4.3877, 1.28605)},
    ),
    "n-step": (
        {"v": VALUES[0]},
        lambda p: half_squares(n_step_bootstrapped_returns(**T4_OF(p["v"]), n=3) - p["v"][:-1]),
        3.35427668,
        {"v": tensor(-1.7394, -0.396, -1.84, 0.375, 0)},
        {"v": tensor(-1.7394, -0.396, -1.84, 1.5021312, 1.243908)},
    ),
    "td-lambda": (
        {"v": VALUES[0]},
        lambda p: half_squares(td_lambda(p["v"][:-1], **T4_OF(p["v"]), lambda_=0.7)),
        2.5522482325,
        {"v": tensor(-1.112217, 0.0441, -1.93, 0.375, 0)},
        {"v": tensor(-1.112217, 0.34439859, -1.7527188883, 0.9374774226, 0.8437025874)},
    ),
    "expected-sarsa": (
        {"q": Q[0], "q_t": Q_NEXT[0], "p": P[0]},
        lambda p: half_squares(
            expected_sarsa(p["q"], torch.tensor(1), tensor(0.7), tensor(0.9), p["q_t"], p["p"])
        ),
        0.72,
        {"q": tensor(0, -1.2, 0), "q_t": tensor(0, 0, 0), "p": tensor(0, 0, 0)},
        {"q": tensor(0, -1.2, 0), "q_t": tensor(0.216, 0.324, 0.54), "p": tensor(0.972, 0.432, -0.648)},
    ),
    "c51": (
        {"logits": tensor(0.1, -0.3, 0.5, 0.2), "next": tensor([[0.4, 0.1, -0.2, 0.3], [-0.5, 0.2, 0.6, 0]])},
        lambda p: categorical_q_learning(
            tensor(-1, 0, 1, 2),
            torch.stack([p["logits"], 0 * p["logits"]]),
            torch.tensor(0),
            tensor(0.7),
            tensor(0.9),
            tensor(-1, 0, 1, 2),
            p["next"],
        ),
        1.3429860269,
        {"logits": tensor(0.2082523078, -0.0260651148, 0.0089885783, -0.1911757714), "next": torch.zeros(2, 4)},
        {
            "logits": tensor(0.2082523078, -0.0260651148, 0.0089885783, -0.1911757714),
            "next": tensor([[0, 0, 0, 0], [0.0558261444, -0.0136588194, -0.0438875104, 0.0017201854]]),
        },
    ),
    "qr": (
        {"theta": tensor(0.1, 0.5, 1.2), "next": tensor([[-0.2, 0.3, 0.9], [0, 0.4, 1.1]])},
        lambda p: quantile_q_learning(
            p["theta"][:, None], TAU, torch.tensor(0), tensor(0.7), tensor(0.9), p["next"].T[:, 1:], p["next"].T[:, 1:],
            huber_param=1,
        ),
        0.2814583333,
        {"theta": tensor(-0.1422222222, -0.2933333333, -0.1005555556), "next": torch.zeros(2, 3)},
        {
            "theta": tensor(-0.1422222222, -0.2933333333, -0.1005555556),
            "next": tensor([[0, 0, 0], [0.035, 0.125, 0.3225]]),
        },
    ),
}  # fmt: skip


def T4_OF(v: Tensor) -> dict[str, Tensor]:
    return {"r_t": T4["r"], "discount_t": T4["d"], "v_t": v[1:]}


@pytest.mark.parametrize("name", ROWS)
def test_known_numbers(name):
    values, loss, value, blocked, opened = ROWS[name]
    of = {
        "td": TD_TARGET, "n-step": N_STEP_RETURNS, "td-lambda": LAMBDA_RETURNS, "expected-sarsa": EXPECTED_SARSA_TARGET,
        "c51": CATEGORICAL_TARGET, "qr": QUANTILE_TARGET,
    }  # fmt: skip
    case = BlockCase(id=name, block=of[name], parameters=leaves(**values), loss=loss, blocked=None)
    assert float(loss(values)) == pytest.approx(value, abs=1e-9)
    for found, expected in ((gradient(case), blocked), (gradient(case, (case.block,)), opened)):
        assert relative_error(found, expected) < 1e-9


@CASES
def test_the_gradient_with_the_block_is_that_of_regression_onto_a_constant(case):
    """Or the witnesses have the same mistake as the code: a target computed before is no function of anything."""
    assert relative_error(gradient(case), case.blocked(case.parameters())) < 1e-12
    assert relative_error(gradient(case, (case.block,)), gradient(case)) > 1e-3


# --- which field it is -----------------------------------------------------------------------------------------------


def expectation(features: Tensor, next_features: Tensor, rewards: Tensor, weights: Tensor, discount: float):
    """Return the expected loss of TD(0) with linear values over weighted transitions, and its parameters."""
    theta = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        errors = td_learning(features @ theta, rewards, torch.full_like(rewards, discount), next_features @ theta)
        return 0.5 * (weights * errors.square()).sum()

    return loss, theta


def affine(loss: Callable[[], Tensor], theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient at 0 of a quadratic loss with the open blocks, and its Jacobian."""
    gradients = []
    for point in (torch.zeros_like(theta), *torch.eye(len(theta), dtype=theta.dtype)):
        with torch.no_grad():
            theta.copy_(point)
        gradients += torch.autograd.grad(loss(), theta)
    return gradients[0], torch.stack(gradients[1:], 1) - gradients[0][:, None]


def baird():
    """Return the seven-state star in expectation: all states are as frequent, and the policy goes to the last one."""
    features = torch.zeros(7, 8, dtype=torch.float64)
    features[range(6), range(6)], features[:6, 7] = 2.0, 1.0
    features[6, 6], features[6, 7] = 1.0, 2.0
    return expectation(features, features[6].expand(7, 8), tensor(*[0.0] * 7), tensor(*[1 / 7] * 7), 0.99)


def test_the_blocked_field_of_a_cycle_is_the_gradient_of_nothing():
    """Three states in a circle with two features: ``J = features^T (features - discount * next features) / 3``."""
    features = tensor([[1, 1], [1, 2], [-1, 1]])
    following = features.roll(-1, 0)
    loss, theta = expectation(features, following, tensor(0.3, -1, 0.5), tensor(1, 1, 1) / 3, 0.95)
    field = field_jacobian(loss, theta)
    assert not field.is_gradient_field
    torch.testing.assert_close(field.jacobian, features.T @ (features - 0.95 * following) / 3)
    assert field.asymmetry == pytest.approx(0.584, abs=5e-4)


def test_baird_star_grows_with_the_block_and_shrinks_without_it():
    loss, theta = baird()
    blocked = field_jacobian(loss, theta)
    assert blocked.eigenvalues[0].real == pytest.approx(0.23925, abs=1e-5)
    assert blocked.asymmetry == pytest.approx(1.139, abs=5e-4)
    with unblock(TD_TARGET):
        _, slopes = affine(loss, theta)
    torch.testing.assert_close(slopes, slopes.T)
    assert torch.linalg.eigvalsh(slopes).min() > -1e-12


def walk():
    """Return all transitions of the five-state walk, under its distribution of states, as rows of tables."""
    states = torch.eye(5, dtype=torch.float64)
    visits = tensor(1, 2, 3, 2, 1) / 9
    rows = torch.arange(5).repeat_interleave(2)
    following = torch.zeros(10, 5, dtype=torch.float64)
    following[1:9] = states[[1, 0, 2, 1, 3, 2, 4, 3]]
    rewards = torch.zeros(10, dtype=torch.float64)
    rewards[9] = 1.0
    return states[rows], following, rewards, visits[rows] / 2


@pytest.mark.parametrize(
    ("opened", "values"), [((), (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)), ((TD_TARGET,), (15, 20, 23, 26, 31))]
)
def test_fixed_points_of_the_random_walk(opened, values):
    """With the block the true values; the residual gradient stops at the exact fractions (15, 20, 23, 26, 31) / 46."""
    loss, theta = expectation(*walk(), 1.0)
    with unblock(*opened):
        slope, jacobian = affine(loss, theta)
    expected = tensor(*values) / (46 if opened else 1)
    torch.testing.assert_close(torch.linalg.solve(jacobian, -slope), expected)


def test_the_saddle_of_gtd2_cancels_with_its_block_open():
    """The loss of the estimate has the gradient of GTD2 with the opposite sign."""
    parameters = leaves(**WEIGHTS)()
    with unblock(ESTIMATED_ERROR):
        total = gradient_td_loss("gtd2", parameters) + gradient_td_loss("estimate", parameters)
        theta, _ = torch.autograd.grad(total, [*parameters.values()])
    assert theta.abs().max() < 1e-15
    with unblock(GTD2_ESTIMATE):
        total = gradient_td_loss("gtd2", parameters) + gradient_td_loss("estimate", parameters)
        _, w = torch.autograd.grad(total, [*parameters.values()])
    torch.testing.assert_close(w, PHI.T @ PHI @ WEIGHTS["w"])


def test_gradient_td_without_ratios_is_on_policy():
    v, following, h = PHI @ WEIGHTS["theta"], PHI_NEXT @ WEIGHTS["theta"], PHI @ WEIGHTS["w"]
    for loss in LOSSES.values():
        torch.testing.assert_close(
            loss(v, REWARD, DISCOUNT, following, h), loss(v, REWARD, DISCOUNT, following, h, torch.ones_like(RHO))
        )


# --- returns ---------------------------------------------------------------------------------------------------------


def test_without_bootstrapping_the_block_of_lambda_returns_is_redundant():
    ending = DISCOUNTS.clone()
    ending[:, -1] = 0

    def slope(*opened: Block) -> Tensor:
        v = VALUES.clone().requires_grad_()
        with unblock(*opened):
            return torch.autograd.grad(half_squares(td_lambda(v[:, :-1], REWARDS, ending, v[:, 1:], 1)), v)[0]

    assert torch.equal(slope(), slope(LAMBDA_RETURNS))
    returns = lambda_returns(REWARDS, ending, VALUES[:, 1:], 1)
    torch.testing.assert_close(returns, n_step_bootstrapped_returns(REWARDS, ending, VALUES[:, 1:], n=9))
    torch.testing.assert_close(returns, n_step_bootstrapped_returns(REWARDS, ending, 99 * VALUES[:, 1:], n=4))


def test_one_step_returns_are_the_targets_of_td():
    v = VALUES[:, 1:]
    errors = td_learning(VALUES[:, :-1], REWARDS, DISCOUNTS, v)
    torch.testing.assert_close(td_lambda(VALUES[:, :-1], REWARDS, DISCOUNTS, v, 0), errors)
    torch.testing.assert_close(n_step_bootstrapped_returns(REWARDS, DISCOUNTS, v, n=1), errors + VALUES[:, :-1])


@pytest.mark.parametrize("length", [1, 2, 47, 48, 49, 130])
def test_returns_of_any_length_follow_their_definition(length):
    r, v, lambda_ = draw(31, 2, length), draw(32, 2, length).requires_grad_(), draw(33, 2, length).sigmoid()
    discounts = draw(34, 2, length).sigmoid() * (draw(35, 2, length) > -1.5)
    expected = [r[:, -1] + discounts[:, -1] * v[:, -1]]
    for t in reversed(range(length - 1)):
        mixed = (1 - lambda_[:, t]) * v[:, t] + lambda_[:, t] * expected[0]
        expected.insert(0, r[:, t] + discounts[:, t] * mixed)
    expected = torch.stack(expected, 1)
    with unblock(LAMBDA_RETURNS):
        found = lambda_returns(r, discounts, v, lambda_)
    torch.testing.assert_close(found, expected)
    weights = draw(36, 2, length)
    slopes = (torch.autograd.grad((weights * each).sum(), v)[0] for each in (found, expected))
    torch.testing.assert_close(*slopes)


def test_lambda_may_differ_between_steps_and_carry_a_gradient():
    lambdas = tensor([[0.3, 0.9, 0.5, 0.7], [0.1, 0.4, 0.8, 0.6]]).requires_grad_()
    expected, later = [], None
    for t in (3, 2, 1, 0):
        mixed = VALUES[:, t + 1]
        if later is not None:
            mixed = (1 - lambdas[:, t]) * VALUES[:, t + 1] + lambdas[:, t] * later
        later = REWARDS[:, t] + DISCOUNTS[:, t] * mixed
        expected.insert(0, later)
    expected = torch.stack(expected, 1)
    with unblock(LAMBDA_RETURNS):
        found = lambda_returns(REWARDS, DISCOUNTS, VALUES[:, 1:], lambdas)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), lambdas), torch.autograd.grad(expected.square().sum(), lambdas)
    )
    constant = lambda_returns(REWARDS, DISCOUNTS, VALUES[:, 1:], torch.tensor(0.7))
    torch.testing.assert_close(constant, lambda_returns(REWARDS, DISCOUNTS, VALUES[:, 1:], 0.7), rtol=1e-6, atol=1e-6)
    assert not lambda_returns(REWARDS, DISCOUNTS, VALUES[:, 1:], lambdas).requires_grad


# --- distributions ---------------------------------------------------------------------------------------------------

FOUR, MASSES = tensor(-1, 0, 1, 2), tensor(0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.7, 0.9, (0.02, 0.14, 0.26, 0.58)),
        (1.0, 1.0, (0, 0.1, 0.2, 0.7)),  # every atom moves onto the next one
        (0.0, 0.0, (0, 1, 0, 0)),
        (9.0, 0.5, (0, 0, 0, 1)),
        (-9.0, 0.5, (1, 0, 0, 0)),
        (2.0, 0.0, (0, 0, 0, 1)),
    ],
)
def test_projections_keep_the_mass(reward, discount, expected):
    found = categorical_l2_project(reward + discount * FOUR, MASSES, FOUR)
    torch.testing.assert_close(found, tensor(*expected))
    assert float(found.sum()) == pytest.approx(1, abs=4e-16)


def test_a_projection_onto_uneven_atoms_keeps_the_mean():
    z, p = draw(16, 5, 6).clamp(-1, 2), draw(17, 5, 6).softmax(-1)
    found = categorical_l2_project(z, p, ATOMS)
    torch.testing.assert_close(found @ ATOMS, (z * p).sum(-1))
    torch.testing.assert_close(found, torch.stack([row @ triangles(at, ATOMS) for row, at in zip(p, z, strict=True)]))
    assert categorical_l2_project(z, p, ATOMS.flip(0)).sum(-1).isnan().all()


def test_the_greedy_action_of_c51_is_that_of_the_selector():
    logits, following = draw(3, 3, 3, 5), draw(4, 3, 3, 4)
    double = categorical_double_q_learning(ATOMS, logits, ACTIONS, R, D, NEXT_ATOMS, following, SELECTOR)
    best = SELECTOR.argmax(-1)
    assert not torch.equal(best, (following.softmax(-1) @ NEXT_ATOMS).argmax(-1))
    rows = torch.arange(3)
    single = categorical_td_learning(ATOMS, logits[rows, ACTIONS], R, D, NEXT_ATOMS, following[rows, best])
    torch.testing.assert_close(double, single)


def test_saturated_logits_give_finite_losses_and_gradients():
    logits = tensor([[1e4, -1e4, 0, 0, 0], [-1e4, 1e4, 1e4, 0, 0], [0, 0, 0, 0, 1e4]]).requires_grad_()
    following = tensor([[1e4, -1e4, 0, 0], [0, 0, -1e4, 1e4], [0, 0, 0, 0]]).requires_grad_()
    with unblock(CATEGORICAL_TARGET):
        loss = categorical_td_learning(ATOMS, logits, R, D, NEXT_ATOMS, following).sum()
        slopes = torch.autograd.grad(loss, (logits, following))
    assert all(slope.isfinite().all() for slope in (loss, *slopes))


@pytest.mark.parametrize("probability", [0.25, 0.5, 0.9])
def test_the_minimum_of_the_quantile_loss_is_the_quantile(probability):
    samples = draw(18, 101)
    candidates = samples.sort().values
    loss = quantile_regression_loss(candidates[:, None], tensor([probability]), samples.expand(101, 101), huber_param=0)
    assert loss.argmin() == round(probability * 100)


def test_the_huber_loss_is_not_divided_by_kappa():
    found = quantile_regression_loss(tensor([0.0]), tensor([0.5]), tensor([0.2, -3.0]), huber_param=0.5)
    assert float(found) == pytest.approx(0.5 * (0.02 + 0.5 * (3 - 0.25)) / 2)


def test_quantile_probabilities_may_differ_between_samples():
    theta, samples, tau = draw(19, 2, 3), draw(20, 2, 4), draw(21, 2, 3).sigmoid()
    rows = [quantile_regression_loss(theta[i], tau[i], samples[i], huber_param=1) for i in range(2)]
    torch.testing.assert_close(quantile_regression_loss(theta, tau, samples, huber_param=1), torch.stack(rows))


# --- target networks -------------------------------------------------------------------------------------------------


def test_with_a_target_network_the_block_changes_no_bit_of_the_online_gradient():
    online, target = (leaves(weight=draw(seed, 3, 2))()["weight"] for seed in (22, 23))
    states, following = draw(24, 3, 2), draw(25, 3, 2)

    def slope(*opened: Block) -> Tensor:
        with unblock(*opened):
            errors = q_learning(states @ online.T, ACTIONS, R, D, following @ target.T)
            return torch.autograd.grad(half_squares(errors), online)[0]

    assert torch.equal(slope(), slope(Q_TARGET))


def test_a_target_network_shares_no_memory_and_copies_counters():
    online = {"weight": draw(14, 2, 3), "batches": torch.tensor(7)}
    target = incremental_update(online, {"weight": torch.zeros_like(online["weight"]), "batches": torch.tensor(3)}, 1)
    assert torch.equal(target["weight"], online["weight"])
    assert target["batches"] == 7
    online["weight"] += 1
    online["batches"] += 1
    assert not torch.equal(target["weight"], online["weight"])
    assert target["batches"] == 7


@pytest.mark.parametrize("step_size", [0, 0.3, 1])
def test_a_mask_of_infinite_numbers_stays_and_a_copy_forgets_what_was_before(step_size):
    mask = {"mask": torch.triu(torch.full((3, 3), -torch.inf), 1)}
    assert torch.equal(incremental_update(mask, mask, step_size)["mask"], mask["mask"])
    broken = incremental_update({"weight": R}, {"weight": torch.full_like(R, torch.nan)}, step_size)["weight"]
    assert torch.equal(broken, R) if step_size == 1 else broken.isnan().all()


def test_networks_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"`old_tensors` should have the names of `new_tensors`. Found .*\['a', 'b'\]"):
        incremental_update({"a": R}, {"b": R}, 0.5)
    with pytest.raises(ValueError, match=r"`old_tensors\['a'\]` should have shape \(3,\) and the dtype"):
        incremental_update({"a": R}, {"a": R[:2]}, 0.5)


# --- the worlds of the experiment ------------------------------------------------------------------------------------


def test_the_walk_has_its_known_values():
    torch.testing.assert_close(true_values(5), tensor(1, 2, 3, 4, 5) / 6)
    walk = Walk.sampled(5, 2000, torch.Generator().manual_seed(0), torch.float64)
    before, rewards, discounts, after = walk.transitions()
    assert len(before) == int((walk.states[:, :-1] < 5).sum())
    assert int((discounts == 0).sum()) == 2000
    assert bool(((after - before).abs() == 1)[discounts > 0].all())
    assert bool((before[rewards == 1] == 4).all())
    assert abs(float(rewards.sum()) / 2000 - 0.5) < 4 * 0.5 / math.sqrt(2000)


def test_q_learning_beside_the_cliff_finds_the_safe_way():
    """Thirteen steps lead from the start around the cliff to the goal."""
    base = {"experiment": "value_learning", "title": "t", "finding": "f", "open": ["value_learning.q_target"]}
    config = Config(**base, task="cliff", discount=0.9, steps=60, learning_rate=1.0)
    made = run(config, 0)
    for step in range(60):
        made.optimizer.zero_grad()
        made.loss().backward()
        made.optimizer.step()
        made.after_step(step + 1)
    (values,) = made.parameters.values()
    assert values[36].max().item() == pytest.approx(-(1 - 0.9**13) / 0.1)
    assert made.evaluate()["objective"] < 1e-9


# --- forms -----------------------------------------------------------------------------------------------------------

# Functions of a batch, each with all of its tensors.
BATCHED = {
    "td_learning": (td_learning, (Q[0], R, D, Q_NEXT[0])),
    "sarsa": (sarsa, (Q, ACTIONS, R, D, Q_NEXT, NEXT)),
    "expected_sarsa": (expected_sarsa, (Q, ACTIONS, R, D, Q_NEXT, P)),
    "q_learning": (q_learning, (Q, ACTIONS, R, D, Q_NEXT)),
    "double_q_learning": (double_q_learning, (Q, ACTIONS, R, D, Q_NEXT, SELECTOR)),
    "n_step": (partial(n_step_bootstrapped_returns, n=2), (REWARDS, DISCOUNTS, VALUES[:, 1:])),
    "td_lambda": (partial(td_lambda, lambda_=LAMBDA), (VALUES[:, :-1], REWARDS, DISCOUNTS, VALUES[:, 1:])),
    "categorical_td_learning": (
        lambda logits, r, d, following: categorical_td_learning(ATOMS.to(r), logits, r, d, NEXT_ATOMS.to(r), following),
        (draw(1, 3, 5), R, D, draw(2, 3, 4)),
    ),
    "categorical_q_learning": (
        lambda logits, a, r, d, following: categorical_q_learning(
            ATOMS.to(r), logits, a, r, d, NEXT_ATOMS.to(r), following
        ),
        (draw(3, 3, 3, 5), ACTIONS, R, D, draw(4, 3, 3, 4)),
    ),
    "quantile_q_learning": (
        lambda q, a, r, d, following: quantile_q_learning(q, TAU.to(r), a, r, d, following, following, huber_param=0.7),
        (draw(5, 3, 3, 3), ACTIONS, R, D, draw(6, 3, 4, 3)),
    ),
    "gtd2_loss": (gtd2_loss, (REWARD, DISCOUNT, RHO, PHI[:, 0], PHI[:, 1], RHO)),
    "tdc_loss": (tdc_loss, (REWARD, DISCOUNT, RHO, PHI[:, 0], PHI[:, 1], RHO)),
    "error_estimate_loss": (error_estimate_loss, (REWARD, DISCOUNT, RHO, PHI[:, 0], PHI[:, 1], RHO)),
}
FORMS = pytest.mark.parametrize("name", BATCHED)


@FORMS
def test_batches_of_any_shape_and_vmap_agree_with_single_samples(name):
    function, arguments = BATCHED[name]
    found = function(*arguments)
    torch.testing.assert_close(vmap(function)(*arguments), found)
    single = torch.stack([function(*(argument[i] for argument in arguments)) for i in range(len(found))])
    torch.testing.assert_close(single, found)
    wide = function(*(argument.expand(2, *argument.shape) for argument in arguments))
    torch.testing.assert_close(wide, found.expand(2, *found.shape))


@FORMS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_single_and_half_precision(name, dtype, tolerance):
    function, arguments = BATCHED[name]
    rounded = [a.to(dtype) if a.is_floating_point() else a for a in arguments]
    found = function(*rounded)
    assert found.dtype == dtype
    exact = function(*(a.double() if a.is_floating_point() else a for a in rounded))
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


ARGUMENTS = [(name, i) for name, (_, arguments) in BATCHED.items() for i in range(len(arguments))]
OF_PROGRAM = (
    *(TD_TARGET, SARSA_TARGET, EXPECTED_SARSA_TARGET, Q_TARGET, DOUBLE_Q_TARGET, N_STEP_RETURNS, LAMBDA_RETURNS),
    *(CATEGORICAL_TARGET, QUANTILE_TARGET, GTD2_ESTIMATE, TDC_ERROR, ESTIMATED_ERROR),
)


def everything(*leaves: Tensor) -> Tensor:
    """Return one number of all functions, to compile them at once."""
    found, places = 0.0, iter(leaves)
    for name, (function, arguments) in BATCHED.items():
        values = [next(places) for _ in arguments]
        value = function(*values)
        # A block may hold the whole result.
        found = found + (value.square() * (1 + values[0].reshape(len(value), -1).mean(-1, keepdim=True))).sum()
        assert name
    return found


def value_and_gradients(program, device: str = "cpu") -> list[Tensor]:
    leaves = [BATCHED[name][1][i].to(device) for name, i in ARGUMENTS]
    leaves = [leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    value = program(*leaves)
    return [value.detach(), *torch.autograd.grad(value, floats, materialize_grads=True)]


BOTH = pytest.mark.parametrize("opened", [(), OF_PROGRAM], ids=["blocked", "open"])


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@BOTH
def test_compiled_code_has_the_same_gradients(opened):
    with unblock(*opened):
        expected = value_and_gradients(everything)
        found = value_and_gradients(torch.compile(everything, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@BOTH
def test_gradients_on_a_gpu_are_those_on_the_processor(opened):
    with unblock(*opened):
        found, expected = value_and_gradients(everything, ACCELERATOR), value_and_gradients(everything)
    assert all(value.device.type == ACCELERATOR for value in found)
    torch.testing.assert_close([value.cpu() for value in found], expected)


# --- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: td_learning(R[:, None], R, D, R), r"`r_t` should have the shape of `v_tm1`, (3, 1). Found (3,)."),
        (lambda: td_learning(R, R, D > 0, R), "`discount_t` should be a floating-point tensor. Found torch.bool."),
        (lambda: td_learning(R, R, 0.9, R), "`discount_t` should be a floating-point tensor. Found float."),
        (
            lambda: q_learning(Q, ACTIONS[:, None], R, D, Q),
            "`a_tm1` should have the shape of `r_t`, (3,). Found (3, 1).",
        ),
        (lambda: q_learning(Q, R, R, D, Q), "`a_tm1` should be a tensor of integers. Found torch.float64."),
        (lambda: sarsa(Q, ACTIONS, R, D, Q, [0, 1, 2]), "`a_t` should be a tensor of integers. Found list."),
        (
            lambda: q_learning(Q, ACTIONS, R, D, Q[:, :2]),
            "`q_t` should have the shape of `q_tm1`, (3, 3). Found (3, 2).",
        ),
        (
            lambda: q_learning(Q, ACTIONS, R[:, None], D, Q),
            "`r_t` should have the shape of `q_tm1` without its actions, (3,). Found (3, 1).",
        ),
        (
            lambda: q_learning(R[0], ACTIONS[0], R[0], D[0], R[0]),
            "`q_tm1` should have a last dimension of actions. Found shape ().",
        ),
        (
            lambda: lambda_returns(R[0], D[0], R[0], 0.5),
            "`r_t` should have a last dimension of time. Found shape ().",
        ),
        (lambda: lambda_returns(R, D, R, 1.5), "`lambda_` should be from 0 to 1. Found 1.5."),
        (
            lambda: lambda_returns(R, D, R, R[:2]),
            "`lambda_` should have the shape of `r_t`, or none, (3,). Found (2,).",
        ),
        (lambda: n_step_bootstrapped_returns(R, D, R, 0), "`n` should be a positive integer. Found 0."),
        (
            lambda: categorical_l2_project(R, R, R[:1]),
            "`z_q` should be a vector of at least two atoms. Found shape (1,).",
        ),
        (
            lambda: categorical_td_learning(ATOMS, Q, R, D, NEXT_ATOMS, Q),
            "`v_logits_tm1` should have the shape of its atoms, (3, 5). Found (3, 3).",
        ),
        (
            lambda: categorical_double_q_learning(ATOMS, ATOMS, ACTIONS, R, D, NEXT_ATOMS, Q, Q),
            "`q_logits_tm1` should have 2 dimensions or more, none empty. Found (5,).",
        ),
        (
            lambda: quantile_regression_loss(R, TAU[:2], R, huber_param=1),
            "`tau_src` should have the shape of `dist_src`, or of its last dimension, (3,). Found (2,).",
        ),
        (
            lambda: quantile_regression_loss(R, TAU, R, huber_param=-1),
            "`huber_param` should be finite and not negative. Found -1.",
        ),
        (
            lambda: quantile_regression_loss(R, TAU, R[:0], huber_param=1),
            "`dist_target` should have 1 dimensions or more, none empty. Found (0,).",
        ),
        (
            lambda: quantile_q_learning(Q, TAU, ACTIONS[0], R[0], D[0], Q[:0], Q, huber_param=1),
            "`dist_q_t_selector` should have 2 dimensions or more, none empty. Found (0, 3).",
        ),
        (lambda: gtd2_loss(R, R, D, R, R, RHO), "`rho_tm1` should have the shape of `v_tm1`, (3,). Found (4,)."),
        (lambda: incremental_update({}, {}, 2), "`step_size` should be from 0 to 1. Found 2."),
    ],
)
def test_wrong_input_is_refused(call, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        call()


@pytest.mark.parametrize("opened", [[], [CATEGORICAL_TARGET]], ids=["blocked", "open"])
def test_an_atom_without_any_probability_adds_nothing_to_the_cross_entropy(opened):
    atoms, return_, zero = torch.tensor([0.0, 1.0, 2.0]), torch.tensor(0.25), torch.tensor(0.0)
    logits = torch.tensor([0.3, 0.1, -torch.inf], requires_grad=True)
    rest = logits.detach()[:2].requires_grad_()
    logits_t = torch.zeros(3, requires_grad=True)
    with unblock(*opened):
        found = categorical_td_learning(atoms, logits, return_, zero, atoms, logits_t)
        expected = categorical_td_learning(atoms[:2], rest, return_, zero, atoms[:2], logits_t[:2])
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient[:2], *torch.autograd.grad(expected, rest))
    assert gradient[2] == 0
    unlikely = categorical_td_learning(atoms, logits, torch.tensor(1.5), zero, atoms, torch.zeros(3))
    assert unlikely == torch.inf, "a return that the prediction excludes"
