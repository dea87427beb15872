"""Curvature: Hessian products of blocked surrogates, trust regions, reweighted squares, scaled gradients."""

from collections.abc import Callable
from typing import Any

from peer_programs._parts import Arrays, log_softmax

SCALE = 1.3


def network(np: Any, w: Any, c: Arrays) -> Any:
    return np.tanh(np.sum(c["x"] * w, axis=-1)) * w[0]


def half_squares(np: Any, f: Any, c: Arrays) -> Any:
    return 0.5 * np.sum((f - c["y"]) * (f - c["y"]))


def divergence(np: Any, stop: Any, grad: Any, w: Any, c: Arrays) -> Any:
    f = network(np, w, c)
    held = stop("curvature.held_outputs", f)
    slope = grad(lambda h: half_squares(np, h, c))(held)
    return half_squares(np, f, c) - half_squares(np, held, c) - np.sum(slope * (f - held))


def along(np: Any, grad: Any, model: Callable[[Any], Any], p: Arrays, c: Arrays) -> Any:
    return np.sum(grad(model)(p["w"]) * c["direction"])


def gauss_newton_product(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return along(np, grad, lambda w: divergence(np, stop, grad, w, c), p, c)


def gauss_newton_model(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    def loss(w: Any) -> Any:
        return half_squares(np, network(np, w, c), c)

    def model(w: Any) -> Any:
        value, slope, point = (stop("curvature.linear_part", part) for part in (loss(w), grad(loss)(w), w))
        return value + np.sum(slope * (w - point)) + divergence(np, stop, grad, w, c)

    return along(np, grad, model, p, c)


def trust_region(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    log_p, log_q = log_softmax(np, p["logits"]), log_softmax(np, stop("curvature.held_policy", p["held"]))
    value = np.sum(np.exp(log_q) * (log_q - log_p)) + 0.3 * np.sum(np.exp(log_p) * (log_p - log_q))
    mean, log_std = (stop("curvature.held_policy", p[f"held_{name}"]) for name in ("mean", "log_std"))
    distance = (p["mean"] - mean) * (p["mean"] - mean)
    ratio = (np.exp(2 * log_std) + distance) / np.exp(2 * p["log_std"])
    return value + np.sum(0.5 * (ratio - 1) + p["log_std"] - log_std)


def reweighted_squares(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    r = p["r"]
    u = (r / SCALE) * (r / SCALE)
    weights = (stop("curvature.weights", 1 / (1 + u)), stop("curvature.weights", np.exp(-u)))
    return np.sum(0.5 * (weights[0] + weights[1]) * r * r)


def half_quadratic(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    def loss(r: Any) -> Any:
        w = stop("curvature.majoriser", 1 / (1 + (r / SCALE) * (r / SCALE)))
        return np.sum(0.5 * w * r * r + 0.5 * SCALE * SCALE * (w - 1 - np.log(w)))

    return np.sum(grad(loss)(p["r"]))


def proximal(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    change = p["x"] - stop("curvature.anchor", p["a"])
    return np.sum(change * change) / 0.6


def scaled_gradient(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    held = stop("curvature.partial", p["x"])
    return np.sin(np.sum(c["weight"] * (held + 0.3 * (p["x"] - held)))) + np.sum(p["x"] * p["x"])


PROGRAMS = {
    gauss_newton_product: ("curvature.held_outputs",),
    gauss_newton_model: ("curvature.linear_part", "curvature.held_outputs"),
    trust_region: ("curvature.held_policy",),
    reweighted_squares: ("curvature.weights",),
    half_quadratic: ("curvature.majoriser",),
    proximal: ("curvature.anchor",),
    scaled_gradient: ("curvature.partial",),
}
