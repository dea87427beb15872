"""The surrogates of this project, written once more for JAX and TensorFlow, with their own `stop_gradient`.

A script: ``python peer_programs.py jax|tensorflow in.npz out.npz`` reads parameters and constants, and writes values
and gradients with the blocks closed and with each of them open. It imports neither torch nor the project, and a test
runs it in a process of its own, because the libraries print, warn and start threads when they are imported.

A program gets ``np``, the library's NumPy interface; ``stop(name, array)``, its `stop_gradient` unless that block is
open; ``grad(function)``, the derivative of a scalar function of one array; parameters and constants.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy

Arrays = Mapping[str, Any]


# --- parts -----------------------------------------------------------------------------------------------------------


def log_softmax(np: Any, x: Any) -> Any:
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def sigmoid(np: Any, x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def log_one_plus_exp(np: Any, x: Any) -> Any:
    return np.log(1 + np.exp(x))


def unit(np: Any, x: Any) -> Any:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


def norm(np: Any, x: Any) -> Any:
    return np.sqrt(np.sum(x * x))


def cross_entropy(np: Any, logits: Any, one_hot: Any) -> Any:
    return -np.sum(one_hot * log_softmax(np, logits), axis=-1)


def divergence(np: Any, clean: Any, moved: Any) -> Any:
    log_p, log_q = log_softmax(np, clean), log_softmax(np, moved)
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


def network(np: Any, x: Any, p: Arrays) -> Any:
    return np.matmul(np.tanh(np.matmul(x, np.transpose(p["first"]))), np.transpose(p["second"]))


def free_energy(np: Any, p: Arrays, v: Any) -> Any:
    x = np.matmul(v, p["weights"]) + p["hidden_bias"]
    return -np.sum(v * p["visible_bias"], axis=-1) - np.sum(log_one_plus_exp(np, x), axis=-1)


def straight_through(np: Any, stop: Any, p: Arrays, start: Any, draws: Arrays, name: str) -> Any:
    """One Gibbs step whose draws are given."""
    mean = sigmoid(np, np.matmul(start, p["weights"]) + p["hidden_bias"])
    hidden = draws[f"{name}_hidden"] + (mean - stop("rbm.straight_through", mean))
    mean = sigmoid(np, np.matmul(hidden, np.transpose(p["weights"])) + p["visible_bias"])
    return draws[f"{name}_visible"] + (mean - stop("rbm.straight_through", mean))


# --- programs --------------------------------------------------------------------------------------------------------


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


def em_surrogate(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    from_means = c["x"][:, None] - p["means"][None]
    log_density = -0.5 * np.sum(np.exp(p["log_precisions"]) * from_means * from_means, axis=-1)
    log_joint = log_softmax(np, p["logits"]) + log_density + 0.5 * np.sum(p["log_precisions"], axis=-1)
    held = np.exp(stop("em.responsibilities", log_softmax(np, log_joint)))
    return np.mean(np.sum(held * log_joint, axis=-1))


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


# Program -> the blocks in it, each of which is opened once.
PROGRAMS: dict[Callable[..., Any], tuple[str, ...]] = {
    softmax: ("softmax.shift",),
    linear_cross_entropy: ("softmax.shift",),
    undivided_softmax: ("test_peers.shift",),
    em_surrogate: ("em.responsibilities",),
    contrastive_divergence: ("rbm.negative_samples",),
    persistent_contrastive_divergence: ("rbm.negative_samples", "rbm.persistent_chains"),
    end_of_a_chain: ("rbm.straight_through",),
    expected_energy: ("rbm.hidden_posteriors",),
    fast_weights: ("rbm.fast_weights",),
    centred: ("rbm.centering_offsets", "rbm.centered_coordinates"),
    exact_divergence: ("rbm.chain_distribution", "rbm.chain_energy"),
    adversarial_example: ("adversarial.example",),
    held_trades: ("adversarial.clean_distribution",),
    virtual_adversarial: ("adversarial.virtual_direction", "adversarial.virtual_clean"),
    curvature: ("adversarial.curvature_direction",),
    weight_perturbation: ("adversarial.weight_perturbation",),
}


def variants(blocks: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the sets of blocks to open: none, each alone, all together."""
    return [(), *((block,) for block in blocks), *([blocks] if len(blocks) > 1 else [])]


def key(*parts: str) -> str:
    return "|".join(parts)


# --- the libraries ---------------------------------------------------------------------------------------------------


def jax_library() -> SimpleNamespace:
    import jax

    jax.config.update("jax_enable_x64", True)

    def value_and_gradient(function: Callable[[Arrays], Any], parameters: Arrays) -> tuple[Any, Arrays]:
        return jax.jit(jax.value_and_grad(function))(
            {name: jax.numpy.asarray(value) for name, value in parameters.items()}
        )

    return SimpleNamespace(
        np=jax.numpy,
        constant=jax.numpy.asarray,
        stop_gradient=jax.lax.stop_gradient,
        grad=jax.grad,
        value_and_gradient=value_and_gradient,
    )


def tensorflow_library() -> SimpleNamespace:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    def value_and_gradient(function: Callable[[Arrays], Any], parameters: Arrays) -> tuple[Any, Arrays]:
        variables = {name: tf.constant(value) for name, value in parameters.items()}
        with tf.GradientTape() as tape:
            tape.watch(list(variables.values()))
            value = function(variables)
        return value, tape.gradient(value, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    def grad(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = function(x)
            return tape.gradient(value, x)

        return gradient

    return SimpleNamespace(
        np=tf.experimental.numpy,
        constant=tf.constant,
        stop_gradient=tf.stop_gradient,
        grad=grad,
        value_and_gradient=value_and_gradient,
    )


LIBRARIES = {"jax": jax_library, "tensorflow": tensorflow_library}


def results(library: SimpleNamespace, inputs: Arrays) -> Iterator[tuple[str, Any]]:
    """Yield the value and the gradients of every program, for every set of open blocks."""
    for program, blocks in PROGRAMS.items():
        parts: dict[str, dict[str, Any]] = {"parameter": {}, "constant": {}}
        for name, value in inputs.items():
            owner, part, leaf = name.split("|")
            if owner == program.__name__:
                parts[part][leaf] = value if part == "parameter" else library.constant(value)
        for opened in variants(blocks):

            def stop(name: str, value: Any, opened: tuple[str, ...] = opened) -> Any:
                return value if name in opened else library.stop_gradient(value)

            value, gradient = library.value_and_gradient(
                partial(program, library.np, stop, library.grad, c=parts["constant"]), parts["parameter"]
            )
            where = key(program.__name__, "+".join(opened))
            yield key(where, "value"), numpy.asarray(value)
            yield from ((key(where, name), numpy.asarray(slope)) for name, slope in gradient.items())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    chosen, source, target = sys.argv[1:]
    with numpy.load(source) as archive:
        numpy.savez(target, **dict(results(LIBRARIES[chosen](), dict(archive))))
