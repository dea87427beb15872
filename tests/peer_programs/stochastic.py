"""The surrogates of the stochastic estimators."""

import math
from typing import Any

from peer_programs._parts import Arrays, log_one_plus_exp, log_softmax, sigmoid


def log_sum(np: Any, x: Any) -> Any:
    return np.log(np.sum(np.exp(x), axis=0))


def stochastic_score(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_q = log_softmax(np, p["theta"])
    costs = log_q - c["log_p"]
    drawn, cost = np.matmul(c["draws"], log_q), np.matmul(c["draws"], costs)
    baseline = c["features"] * p["slope"]
    signal = stop("stochastic.score_cost", cost) - stop("stochastic.baseline", baseline)
    weights = stop("stochastic.sampling_weights", np.exp(log_q))
    return np.mean(drawn * signal + cost) + np.sum(weights * log_q * c["rewards"])


def stochastic_dice(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_probs = -log_one_plus_exp(np, c["sign"] * p["theta"])
    costs = c["costs"] * p["theta"]
    passed, value = 0.0 * log_probs[0], 0.0
    for t in range(3):
        passed = passed + log_probs[t]
        value = value + np.exp(passed - stop("stochastic.magic_box", passed)) * costs[t]
        value = value + (1 - np.exp(log_probs[t] - stop("stochastic.magic_box", log_probs[t]))) * c["baselines"][t]
    return np.mean(value)


def stochastic_importance(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_w, log_q = p["log_weights"], p["log_probs"]
    normalised = np.exp(log_w - log_sum(np, log_w))
    iwae = np.sum(stop("stochastic.iwae_weights", normalised) * log_w, axis=0)
    dreg = np.sum(stop("stochastic.dreg_weights", normalised) ** 2 * log_w, axis=0)
    wake = np.sum(stop("stochastic.wake_weights", normalised) * log_q, axis=0)
    bound = log_sum(np, log_w) - math.log(3)
    vimco = bound
    for k in range(3):
        others = np.concatenate([log_w[:k], log_w[k + 1 :]])
        without = np.concatenate([others, np.mean(others, axis=0)[None]])
        vimco = vimco + log_q[k] * stop("stochastic.vimco_signal", bound - (log_sum(np, without) - math.log(3)))
    return -np.mean(iwae + 2 * dreg + 3 * wake + 4 * vimco)


def stochastic_path(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    z = p["mean"] + np.exp(p["log_scale"]) * c["noise"]
    mean, log_scale = (stop("stochastic.density_parameters", p[name]) for name in ("mean", "log_scale"))
    value = np.sum(c["of_density"] * (-0.5 * ((z - mean) / np.exp(log_scale)) ** 2 - log_scale))
    y = c["uniform"] / p["rate"]
    point = stop("stochastic.implicit_point", y)
    cdf = 1 - np.exp(-p["rate"] * point)
    density = p["rate"] * np.exp(-p["rate"] * point)
    step = (cdf - stop("stochastic.implicit_cdf", cdf)) / density
    value = value + np.sum(c["of_sample"] * (stop("stochastic.implicit_sample", y) - step) ** 2)
    drawn = stop("stochastic.wake_samples", p["mean"] + np.exp(p["log_scale"]) * c["noises"])
    log_prob = -0.5 * ((drawn - p["mean"]) / np.exp(p["log_scale"])) ** 2 - p["log_scale"] - c["constant"]
    normalised = np.exp(c["log_weights"] - log_sum(np, c["log_weights"]))
    return value - np.mean(np.sum(normalised * log_prob, axis=0))


def stochastic_draws(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    theta, b = p["theta"], c["bits"]
    log_prob = -log_one_plus_exp(np, (1 - 2 * b) * theta)
    relaxed = sigmoid(np, theta + c["first"]) ** 2
    sign = 2 * b - 1
    conditional = sigmoid(np, sign * log_one_plus_exp(np, c["second"] + log_one_plus_exp(np, sign * theta))) ** 2
    rebar = log_prob * stop("stochastic.rebar_signal", c["cost"] - conditional) + c["cost"] + relaxed - conditional
    q = sigmoid(np, theta)
    return np.mean(rebar) + np.sum(c["of_bits"] * (b + (q - stop("stochastic.straight_through", q))) ** 3)


PROGRAMS = {
    stochastic_score: ("stochastic.score_cost", "stochastic.baseline", "stochastic.sampling_weights"),
    stochastic_dice: ("stochastic.magic_box",),
    stochastic_importance: (
        "stochastic.iwae_weights",
        "stochastic.dreg_weights",
        "stochastic.wake_weights",
        "stochastic.vimco_signal",
    ),
    stochastic_path: (
        "stochastic.density_parameters",
        "stochastic.implicit_sample",
        "stochastic.implicit_point",
        "stochastic.implicit_cdf",
        "stochastic.wake_samples",
    ),
    stochastic_draws: ("stochastic.rebar_signal", "stochastic.straight_through"),
}
