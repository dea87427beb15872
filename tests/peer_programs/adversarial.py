"""Adversarial training and smoothness, with attacks that no ball cuts short."""

from typing import Any

from peer_programs._parts import Arrays, cross_entropy, log_softmax, norm, unit


def network(np: Any, x: Any, p: Arrays) -> Any:
    return np.matmul(np.tanh(np.matmul(x, np.transpose(p["first"]))), np.transpose(p["second"]))


def divergence(np: Any, clean: Any, moved: Any) -> Any:
    log_p, log_q = log_softmax(np, clean), log_softmax(np, moved)
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


def adversarial_example(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """Three normalised steps up the margin, all inside of the ball."""

    def margin(x: Any) -> Any:
        z = network(np, x, p)
        others = np.log(np.sum((1 - c["one_hot"]) * np.exp(z), axis=-1))
        return np.sum(others - np.sum(c["one_hot"] * z, axis=-1))

    x = c["x"]
    for _ in range(3):
        x = x + 0.2 * unit(np, grad(margin)(x))
    return np.mean(cross_entropy(np, network(np, stop("adversarial.example", x), p), c["one_hot"]))


def held_trades(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    clean, moved = network(np, c["x"], p), network(np, c["example"], p)
    held = stop("adversarial.clean_distribution", clean)
    return np.mean(cross_entropy(np, clean, c["one_hot"]) + 6.0 * divergence(np, held, moved))


def virtual_adversarial(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """With two classes the exact direction is the gradient of the difference of their logits."""

    def difference(x: Any) -> Any:
        return np.sum(c["minus_at_the_likelier"] * network(np, x, p))

    direction = stop("adversarial.virtual_direction", unit(np, grad(difference)(c["x"])))
    clean, moved = network(np, c["x"], p), network(np, c["x"] + 0.3 * direction, p)
    return np.mean(divergence(np, stop("adversarial.virtual_clean", clean), moved))


def curvature(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    def losses(x: Any) -> Any:
        return np.sum(cross_entropy(np, network(np, x, p), c["one_hot"]))

    slope = grad(losses)(c["x"])
    direction = stop("adversarial.curvature_direction", unit(np, slope))
    change = grad(losses)(c["x"] + 0.4 * direction) - slope
    return np.mean(cross_entropy(np, network(np, c["x"], p), c["one_hot"]) + 4.0 * np.sum(change * change, axis=-1))


def weight_perturbation(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    def loss(weights: Arrays) -> Any:
        return np.mean(cross_entropy(np, network(np, c["x"], weights), c["one_hot"]))

    def step(name: str) -> Any:
        slope = grad(lambda value: loss({**p, name: value}))(p[name])
        return stop("adversarial.weight_perturbation", 0.1 * norm(np, p[name]) / norm(np, slope) * slope)

    return loss({name: p[name] + step(name) for name in ("first", "second")})


PROGRAMS = {
    adversarial_example: ("adversarial.example",),
    held_trades: ("adversarial.clean_distribution",),
    virtual_adversarial: ("adversarial.virtual_direction", "adversarial.virtual_clean"),
    curvature: ("adversarial.curvature_direction",),
    weight_perturbation: ("adversarial.weight_perturbation",),
}
