"""Optimisation inside of optimisation: held inner gradients, states and fixed points."""

from typing import Any

from peer_programs._parts import Arrays


def _descended(np: Any, stop: Any, p: Arrays, c: Arrays) -> Any:
    w = p["w"]
    for _ in range(2):
        w = w - 0.3 * stop("bilevel.inner_gradient", _times(np, c["A"], w - c["a"]))
    return w


def _times(np: Any, matrix: Any, vector: Any) -> Any:
    return np.sum(matrix * vector, axis=-1)


def maml(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    distance = _descended(np, stop, p, c) - c["b"]
    return 0.5 * np.sum(distance * _times(np, c["B"], distance))


def reptile(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    adapted = stop("bilevel.adapted", _descended(np, stop, p, c))
    return np.sum((p["w"] - adapted) ** 2) / 0.6


def newton_step(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    residual = p["a"] * c["w"] ** 2 + c["w"] - p["b"]
    return np.sum((c["w"] - residual / stop("bilevel.jacobian", 2 * p["a"] * c["w"] + 1)) ** 2)


def truncated_unrolling(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    w = 0 * c["c"]
    for step in range(5):
        w = stop("bilevel.early_steps", w) if step == 3 else w
        w = w - 0.3 * (_times(np, c["H"], w) - c["c"] + np.exp(p["log_penalty"]) * w)
    return np.sum(w**2)


def truncated_scan(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    h, total = c["h"], 0.0
    for t in range(6):
        h = stop("bilevel.state", h) if t in (2, 4) else h
        h = np.tanh(p["a"] * h + c["x"][t])
        total = total + 0.5 * (h - 0.1) ** 2
    return total


def one_step_equilibrium(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    z = c["start"]
    for _ in range(4):
        z = np.tanh(np.matmul(z, np.transpose(p["W"])) + p["b"])
    z = stop("bilevel.fixed_point", z)
    z = np.tanh(np.matmul(z, np.transpose(p["W"])) + p["b"])
    return np.sum(c["c"] * z) + 0.5 * np.sum(z**2)


PROGRAMS = {
    maml: ("bilevel.inner_gradient",),
    reptile: ("bilevel.adapted",),
    newton_step: ("bilevel.jacobian",),
    truncated_unrolling: ("bilevel.early_steps",),
    truncated_scan: ("bilevel.state",),
    one_step_equilibrium: ("bilevel.fixed_point",),
}
