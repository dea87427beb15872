"""Contrastive divergence and what surrounds it, on draws that are given."""

from typing import Any

from peer_programs._parts import Arrays, log_one_plus_exp, log_softmax, sigmoid


def free_energy(np: Any, p: Arrays, v: Any) -> Any:
    x = np.matmul(v, p["weights"]) + p["hidden_bias"]
    return -np.sum(v * p["visible_bias"], axis=-1) - np.sum(log_one_plus_exp(np, x), axis=-1)


def straight_through(np: Any, stop: Any, p: Arrays, start: Any, draws: Arrays, name: str) -> Any:
    """One Gibbs step whose draws are given."""
    mean = sigmoid(np, np.matmul(start, p["weights"]) + p["hidden_bias"])
    hidden = draws[f"{name}_hidden"] + (mean - stop("rbm.straight_through", mean))
    mean = sigmoid(np, np.matmul(hidden, np.transpose(p["weights"])) + p["visible_bias"])
    return draws[f"{name}_visible"] + (mean - stop("rbm.straight_through", mean))


def contrastive_divergence(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    moved = straight_through(np, stop, p, c["data"], c, "first")
    negative = stop("rbm.negative_samples", moved)
    return np.mean(free_energy(np, p, c["data"])) - np.mean(free_energy(np, p, negative))


def persistent_contrastive_divergence(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    chains, value = c["start"], 0.0
    for name in ("first", "second"):
        moved = straight_through(np, stop, p, chains, c, name)
        negative = stop("rbm.negative_samples", moved)
        value = value + np.mean(free_energy(np, p, c["data"])) - np.mean(free_energy(np, p, negative))
        chains = stop("rbm.persistent_chains", moved)
    return value + np.mean(free_energy(np, p, chains))


def end_of_a_chain(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    return np.mean(free_energy(np, p, straight_through(np, stop, p, c["data"], c, "first")))


def expected_energy(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x = np.matmul(c["data"], p["weights"]) + p["hidden_bias"]
    hidden = stop("rbm.hidden_posteriors", sigmoid(np, x))
    return np.sum(c["of_rows"] * (-np.sum(c["data"] * p["visible_bias"], axis=-1) - np.sum(x * hidden, axis=-1)))


def fast_weights(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    """Two updates, the second from the first: without the block the graph goes on through it."""
    fast = p["fast"]
    for name in ("first", "second"):
        fast = stop("rbm.fast_weights", 0.8 * fast - 0.3 * p["weights"] * c[name])
    return np.sum(fast * fast * c["first"]) + np.sum(fast * p["weights"])


def centred(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    w, b, h = p["weights"], p["visible_bias"], p["hidden_bias"]
    mean = np.mean(sigmoid(np, np.matmul(c["data"], w) + h), axis=0)
    mu, lam = (stop("rbm.centering_offsets", value) for value in (np.mean(c["data"], axis=0), mean))
    by_mu, by_lam = np.sum(w * mu[:, None], axis=0), np.sum(w * lam, axis=1)

    def hold(value: Any) -> Any:
        return stop("rbm.centered_coordinates", value)

    moved = w - (b - hold(b))[:, None] * lam - mu[:, None] * (h - hold(h))
    machine = {
        "weights": moved,
        "visible_bias": b + (hold(by_lam) - np.sum(moved * lam, axis=1)),
        "hidden_bias": h + (hold(by_mu) - np.sum(moved * mu[:, None], axis=0)),
    }
    return np.mean(free_energy(np, machine, c["data"])) - np.mean(free_energy(np, machine, c["negative"]))


def exact_divergence(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    v, h = c["visible_states"], c["hidden_states"]
    energy = -np.matmul(np.matmul(v, p["weights"]), np.transpose(h))
    energy = energy - np.sum(v * p["visible_bias"], axis=-1)[:, None] - np.sum(h * p["hidden_bias"], axis=-1)
    to_hidden = np.exp(log_softmax(np, -energy))
    to_visible = np.exp(log_softmax(np, -np.transpose(energy)))
    end = c["start"]
    for _ in range(2):
        end = np.sum(end[:, None] * to_hidden, axis=0)
        end = np.sum(end[:, None] * to_visible, axis=0)
    of_states = free_energy(np, p, v)
    held = stop("rbm.chain_distribution", end)
    value = np.sum((c["start"] - held) * of_states)
    return value + np.sum(end * stop("rbm.chain_energy", of_states)) + np.sum(end * np.log(end))


PROGRAMS = {
    contrastive_divergence: ("rbm.negative_samples",),
    persistent_contrastive_divergence: ("rbm.negative_samples", "rbm.persistent_chains"),
    end_of_a_chain: ("rbm.straight_through",),
    expected_energy: ("rbm.hidden_posteriors",),
    fast_weights: ("rbm.fast_weights",),
    centred: ("rbm.centering_offsets", "rbm.centered_coordinates"),
    exact_divergence: ("rbm.chain_distribution", "rbm.chain_energy"),
}
