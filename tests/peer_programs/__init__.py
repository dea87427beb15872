"""The surrogates of this project, written once more for JAX and TensorFlow, with their own `stop_gradient`.

A script: ``python -m peer_programs jax|tensorflow in.npz out.npz`` reads parameters and constants, and writes values
and gradients with the blocks closed and with each of them open. It imports neither torch nor the project, and a test
runs it in a process of its own, because the libraries print, warn and start threads when they are imported.

Each module has the programs of one room and the blocks in them, ``PROGRAMS``. A program gets ``np``, the library's
NumPy interface; ``stop(name, array)``, its `stop_gradient` unless that block is open; ``grad(function)``, the
derivative of a scalar function of one array; parameters and constants.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy

from peer_programs._parts import Arrays

# Program -> the blocks in it, each of which is opened once.
PROGRAMS: dict[Callable[..., Any], tuple[str, ...]] = {
    program: blocks
    for room in pkgutil.iter_modules(__path__, "peer_programs.")
    if not room.name.split(".")[1].startswith("_")
    for program, blocks in importlib.import_module(room.name).PROGRAMS.items()
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
