"""Softmax and its relatives, with their shift held."""

from typing import Any

from peer_programs._parts import Arrays


def softmax(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x = p["x"]
    shift = stop("softmax.shift", np.max(x, axis=-1, keepdims=True))
    e = np.exp(x - shift)
    total = np.sum(e, axis=-1, keepdims=True)
    log_y = (x - shift) - np.log(total)
    value = np.sum(c["of_softmax"] * (e / total)) + np.sum(c["of_log_softmax"] * log_y)
    return value + np.sum(c["of_logsumexp"] * (shift + np.log(total))) - np.sum(c["one_hot"] * log_y)


def linear_cross_entropy(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x = np.matmul(p["input"], np.transpose(p["weight"])) + p["bias"]
    z = x - stop("softmax.shift", np.max(x, axis=-1, keepdims=True))
    return np.mean(np.log(np.sum(np.exp(z), axis=-1)) - np.sum(c["one_hot"] * z, axis=-1))


def undivided_softmax(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """A shift that leaks: here an open block has a gradient of its own, and the peers have to find it too."""
    x = p["x"]
    return np.sum(c["of_softmax"] * np.exp(x - stop("test_peers.shift", np.max(x, axis=-1, keepdims=True))))


PROGRAMS = {
    softmax: ("softmax.shift",),
    linear_cross_entropy: ("softmax.shift",),
    undivided_softmax: ("test_peers.shift",),
}
