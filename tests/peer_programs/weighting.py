"""Weights and statistics that are held constant."""

from typing import Any

from peer_programs._parts import Arrays, log_softmax, norm, sigmoid


def focal_sigmoid(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    own = sigmoid(np, c["signs"] * p["x"])
    return -np.sum(stop("weighting.focal_weight", (1 - own) ** 2) * np.log(own))


def focal_softmax(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_p = np.sum(c["one_hot"] * log_softmax(np, p["x"]), axis=-1)
    return -np.mean(stop("weighting.focal_weight", (1 - np.exp(log_p)) ** 1.5) * log_p)


def circle(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    m, gamma = 0.25, 8.0
    of_positive = stop("weighting.circle_weights", 1 + m - p["positive"])
    of_negative = stop("weighting.circle_weights", np.maximum(p["negative"] + m, 0))
    positive = np.sum(np.exp(-gamma * of_positive * (p["positive"] - 1 + m)))
    return np.log(1 + positive * np.sum(np.exp(gamma * of_negative * (p["negative"] - m))))


def two_losses(np: Any, t: Any) -> tuple[Any, Any]:
    return (t[0] - 1) ** 2 + (t[1] - 2) ** 2, t[0] ** 4 + t[1] ** 4 + t[0] * t[1] + 1


def self_normalized(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    first, second = two_losses(np, p["t"])
    return first / stop("weighting.own_losses", first) + second / stop("weighting.own_losses", second)


def ratio_balanced(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    first, second = two_losses(np, p["t"])
    return first + stop("weighting.loss_ratios", first / second) * second


def gradnorm(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    norms, progress = p["weights"] * c["norms"], c["losses"] / c["first"]
    goal = np.mean(norms) * (progress / np.mean(progress)) ** 1.5
    return np.sum(np.abs(norms - stop("weighting.gradnorm_target", goal)))


def adaptive(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    def reconstruction(w: Any) -> Any:
        return np.sum((w - 1) ** 2)

    def adversarial(w: Any) -> Any:
        return -(w[0] * w[1] + w[0] ** 3)

    w = p["w"]
    weight = norm(np, grad(reconstruction)(w)) / (norm(np, grad(adversarial)(w)) + 1e-4)
    return reconstruction(w) + stop("weighting.adaptive_weight", weight) * adversarial(w)


def importance(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    weights = stop("weighting.importance_weights", np.exp(log_softmax(np, p["log_weights"])))
    return np.sum(weights * p["losses"])


def beta_nll(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    nll = 0.5 * (np.log(p["var"]) + (c["y"] - p["mean"]) ** 2 / p["var"])
    return np.sum(stop("weighting.nll_weights", np.sqrt(p["var"])) * nll)


def moments(np: Any, x: Any) -> tuple[Any, Any]:
    mean = np.mean(x)
    return mean, np.sqrt(np.mean((x - mean) ** 2) + 1e-3)


def batch_renorm(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    mean, std = moments(np, p["x"])
    r = stop("weighting.renorm_corrections", std / 1.5)
    d = stop("weighting.renorm_corrections", (mean - 0.2) / 1.5)
    return np.sum(c["c"] * ((p["x"] - mean) / std * r + d))


def running_statistics(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    mean, std = (0.2 * stop("weighting.running_statistics", value) for value in moments(np, p["first"]))
    return np.sum(c["c"] * (p["second"] - mean) / (0.8 + std))


def running_scale(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    scale = 0.9 * 2.0 + 0.1 * np.mean(np.abs(p["x"]))
    return np.sum(c["c"] * p["x"] / stop("weighting.running_scale", scale))


def mixstyle(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x = p["x"]
    mean = np.mean(x, axis=1, keepdims=True)
    std = np.sqrt(np.sum((x - mean) ** 2, axis=1, keepdims=True) / 3 + 1e-6)
    mean, std = stop("weighting.style", mean), stop("weighting.style", std)
    mixed_mean, mixed_std = (0.7 * each + 0.3 * np.flip(each, 0) for each in (mean, std))
    return np.sum(c["c"] * ((x - mean) / std * mixed_std + mixed_mean))


def sinkhorn(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    epsilon, a, b = 0.3, c["a"], c["b"]
    cost = 0.5 * np.sum((p["x"][:, None] - c["y"][None]) ** 2, axis=-1)
    kernel, v = np.exp(-cost / epsilon), np.ones_like(b)
    for _ in range(3):
        u = 1 / np.sum(kernel * (b * v)[None], axis=1)
        v = 1 / np.sum(kernel * (a * u)[:, None], axis=0)
    f, g = (stop("weighting.potentials", epsilon * np.log(scaling)) for scaling in (u, v))
    plan = a[:, None] * b[None] * np.exp((f[:, None] + g[None] - cost) / epsilon)
    return np.sum(a * f) + np.sum(b * g) - epsilon * (np.sum(plan) - 1)


def consistency(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    def predicted(t: Any) -> Any:
        noisy, above = c["x"] + t[:, None] * c["noise"], t - 0.002
        skip, out = 0.25 / (above**2 + 0.25), 0.5 * above / np.sqrt(0.25 + t**2)
        return skip[:, None] * noisy + out[:, None] * p["theta"] * noisy

    label = stop("weighting.consistency_target", predicted(c["early"]))
    return np.sum((predicted(c["late"]) - label) ** 2)


PROGRAMS = {
    focal_sigmoid: ("weighting.focal_weight",),
    focal_softmax: ("weighting.focal_weight",),
    circle: ("weighting.circle_weights",),
    self_normalized: ("weighting.own_losses",),
    ratio_balanced: ("weighting.loss_ratios",),
    gradnorm: ("weighting.gradnorm_target",),
    adaptive: ("weighting.adaptive_weight",),
    importance: ("weighting.importance_weights",),
    beta_nll: ("weighting.nll_weights",),
    batch_renorm: ("weighting.renorm_corrections",),
    running_statistics: ("weighting.running_statistics",),
    running_scale: ("weighting.running_scale",),
    mixstyle: ("weighting.style",),
    sinkhorn: ("weighting.potentials",),
    consistency: ("weighting.consistency_target",),
}
