"""Time of a fit of the Bernoulli estimator and of scikit-learn's, and the likelihood and the features of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import BernoulliRBM as Theirs

from benchmarks._measure import Row, timed_row
from toolkit.rbm import RBM
from toolkit.rbm.estimators import BernoulliRBM


def rows() -> Iterator[Row]:
    """Measure whole fits, single batches, held-out likelihoods, and the errors of a classifier on the features."""
    for dtype in (np.float64, np.float32):
        yield _fit(
            dtype,
            "scikit-learn's update",
            "at most 0.75",
            {"offset_rate": None, "weight_decay": 0.0, "schedule": "constant"},
        )
        yield _fit(dtype, "centred", "", {})
        yield _partial_fit(dtype)
    yield _defaults()
    for given in ({"n_iter": 10}, {"n_iter": 30}, {"learning_rate": 0.06}, {"batch_size": 50}):
        yield _classifier(given)


def _fit(dtype: type[np.floating], how: str, goal: str, more: dict[str, Any]) -> Row:
    pixels = _pixels(dtype)
    options: dict[str, Any] = {"n_components": 100, "batch_size": 10, "n_iter": 10, "learning_rate": 0.01}
    ours, theirs = BernoulliRBM(**options, **more, random_state=0), Theirs(**options, random_state=0)
    return timed_row(
        f"estimator: fit, {how} / scikit-learn's, digits, 100 hidden, batch 10, {np.dtype(dtype).name}",
        lambda: ours.fit(pixels),
        lambda: theirs.fit(pixels),
        goal,
        note="a step, all of a fit counted",
        steps=10 * -(-len(pixels) // 10),
        repeats=5,
    )


def _partial_fit(dtype: type[np.floating]) -> Row:
    pixels = _pixels(dtype)[:100]
    options: dict[str, Any] = {"n_components": 100, "batch_size": 100, "learning_rate": 0.01, "random_state": 0}
    ours, theirs = BernoulliRBM(**options), Theirs(**options)
    what = f"estimator: partial_fit of 100 rows / scikit-learn's, digits, 100 hidden, {np.dtype(dtype).name}"
    return timed_row(what, lambda: ours.partial_fit(pixels), lambda: theirs.partial_fit(pixels))


def _defaults() -> Row:
    """Compare the gaps to the best that is known, -17.88, of the exact held-out log-likelihoods."""
    pixels = _pixels(np.float64)
    order = np.random.RandomState(0).permutation(len(pixels))
    train, held_out = pixels[order[:1437]], pixels[order[1437:]]
    begun = time.process_time()
    ours = BernoulliRBM(16, random_state=0).fit(train)
    between = time.process_time()
    theirs = Theirs(16, random_state=0).fit(train)
    ended = time.process_time()
    mean = float(ours.log_likelihood(held_out).mean())
    their_mean = _log_likelihood(theirs, held_out)
    best = -17.88
    return Row(
        "estimator: held-out log-likelihood below -17.88 / scikit-learn's, digits, 16 hidden, both defaults",
        (best - mean) / (best - their_mean),
        "",
        f"{mean:.2f} in {between - begun:.2f} s against {their_mean:.2f} in {ended - between:.2f} s, nats per sample",
    )


def _classifier(given: dict[str, Any]) -> Row:
    """Compare the errors of a logistic regression on 64 features of held-out digits, the means of three seeds."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels / 16
    order = np.random.RandomState(0).permutation(len(pixels))
    train, held_out = order[:1348], order[1348:]
    accuracies = []
    for machine in (BernoulliRBM, Theirs):
        scores = []
        for seed in range(3):
            features = machine(64, random_state=seed, verbose=0, **given).fit(pixels[train]).transform(pixels)
            classifier = LogisticRegression(max_iter=300).fit(features[train], labels[train])
            scores.append(classifier.score(features[held_out], labels[held_out]))
        accuracies.append(float(np.mean(scores)))
    ours, theirs = accuracies
    ((name, value),) = given.items()
    what = f"estimator: errors of a classifier on its features / scikit-learn's, digits, 64 hidden, {name}={value}"
    return Row(what, (1 - ours) / (1 - theirs), "", f"accuracy {ours:.1%} against {theirs:.1%}")


def _log_likelihood(theirs: Theirs, held_out: np.ndarray) -> float:
    rbm = RBM(held_out.shape[1], theirs.n_components, dtype=torch.float64)
    with torch.no_grad():
        rbm.weights.copy_(torch.from_numpy(theirs.components_).mT)
        rbm.visible_bias.copy_(torch.from_numpy(theirs.intercept_visible_))
        rbm.hidden_bias.copy_(torch.from_numpy(theirs.intercept_hidden_))
        return float(rbm.log_likelihood(torch.from_numpy(held_out)).mean())


def _pixels(dtype: type[np.floating]) -> np.ndarray:
    return (load_digits().data >= 8).astype(dtype)
