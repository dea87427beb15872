"""Temporal-difference learning: losses of one step and of several, distributions, gradient TD and target networks."""

from typing import Any

from peer_programs._parts import Arrays, log_softmax

__all__ = ["PROGRAMS"]


def _half_squares(np: Any, errors: Any) -> Any:
    return 0.5 * np.sum(errors * errors)


def temporal_differences(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """Five kinds of labels for the same predictions: of a state, of the next action, of all, of the best."""
    taken = np.sum(c["taken"] * p["q"], axis=-1)
    kinds = {
        "td_target": p["v"],
        "sarsa_target": np.sum(c["taken_next"] * p["q_next"], axis=-1),
        "expected_sarsa_target": np.sum(p["probs"] * p["q_next"], axis=-1),
        "q_target": np.max(p["q_next"], axis=-1),
        "double_q_target": np.sum(c["preferred"] * p["q_next"], axis=-1),
    }
    value = 0.0
    for weight, (name, following) in enumerate(kinds.items(), start=1):
        target = stop(f"value_learning.{name}", c["rewards"] + c["discounts"] * following)
        value = value + weight * _half_squares(np, target - taken)
    return value


def returns_of_several_steps(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """Windows of two steps, and lambda-returns from the last step back."""
    steps, v = range(4), p["v"]
    pairs = []
    for t in steps:
        last = min(t + 1, 3)
        pair = c["rewards"][:, last] + c["discounts"][:, last] * v[:, last + 1]
        pairs.append(pair if t == 3 else c["rewards"][:, t] + c["discounts"][:, t] * pair)
    mixed = [c["rewards"][:, 3] + c["discounts"][:, 3] * v[:, 4]]
    for t in (2, 1, 0):
        following = 0.3 * v[:, t + 1] + 0.7 * mixed[0]
        mixed.insert(0, c["rewards"][:, t] + c["discounts"][:, t] * following)
    value = 0.0
    for t in steps:
        value = value + _half_squares(np, stop("value_learning.n_step_returns", pairs[t]) - v[:, t])
        value = value + 2 * _half_squares(np, stop("value_learning.lambda_returns", mixed[t]) - v[:, t])
    return value


def distributions_of_returns(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """A cross entropy on atoms at a distance of 1, and quantiles with Huber's loss up to 0.5."""
    atoms = c["atoms"]
    z = c["rewards"][:, None] + c["discounts"][:, None] * atoms
    z = np.minimum(np.maximum(z, atoms[0]), atoms[-1])
    shares = np.maximum(1 - np.abs(z[:, :, None] - atoms), 0)
    masses = np.sum(np.exp(log_softmax(np, p["next_logits"]))[:, :, None] * shares, axis=1)
    value = -np.sum(stop("value_learning.categorical_target", masses) * log_softmax(np, p["logits"]))

    labels = stop("value_learning.quantile_target", c["rewards"][:, None] + c["discounts"][:, None] * p["next_theta"])
    error = labels[:, None, :] - p["theta"][:, :, None]
    size = np.abs(error)
    huber = np.where(size < 0.5, 0.5 * error * error, 0.5 * (size - 0.25))
    weight = np.where(error < 0, 1 - c["tau"][:, None], c["tau"][:, None])
    return value + np.sum(np.mean(weight * huber, axis=-1))


def gradient_temporal_differences(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """GTD2, TDC and the estimate of the error that both multiply, with linear functions."""
    v, following, h = (np.matmul(c[x], p[w]) for x, w in (("phi", "theta"), ("phi_next", "theta"), ("phi", "w")))
    error = c["rho"] * (c["rewards"] + c["discounts"] * following - v)
    saddle = error * stop("value_learning.gtd2_estimate", h)
    correction = c["rho"] * c["discounts"] * following * stop("value_learning.tdc_estimate", h)
    corrected = correction - stop("value_learning.tdc_error", error) * v
    estimate = 0.5 * h * h - stop("value_learning.estimated_error", error) * h
    return np.sum(saddle + 2 * corrected + 3 * estimate)


def averaged_target_network(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    target = stop("value_learning.target_parameters", 0.7 * c["old"] + 0.3 * p["weights"])
    errors = c["rewards"] + np.matmul(c["phi_next"], target) - np.matmul(c["phi"], p["weights"])
    return _half_squares(np, errors)


PROGRAMS = {
    temporal_differences: (
        "value_learning.td_target",
        "value_learning.sarsa_target",
        "value_learning.expected_sarsa_target",
        "value_learning.q_target",
        "value_learning.double_q_target",
    ),
    returns_of_several_steps: ("value_learning.n_step_returns", "value_learning.lambda_returns"),
    distributions_of_returns: ("value_learning.categorical_target", "value_learning.quantile_target"),
    gradient_temporal_differences: (
        "value_learning.gtd2_estimate",
        "value_learning.tdc_error",
        "value_learning.tdc_estimate",
        "value_learning.estimated_error",
    ),
    averaged_target_network: ("value_learning.target_parameters",),
}
