"""Formulas that the programs of several rooms share."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Arrays", "cross_entropy", "log_one_plus_exp", "log_softmax", "norm", "sigmoid", "unit"]

Arrays = Mapping[str, Any]


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
