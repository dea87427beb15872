"""Randomised smoothing: a certified L2 radius for any classifier, with a stated confidence.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import beta, norm
from torch import Tensor

from toolkit._checks import function, integer, number
from toolkit._random import own_generator
from toolkit.adversarial._untouched import untouched
from toolkit.adversarial.balls.box import check_inputs
from toolkit.blocks import no_graph

__all__ = ["ABSTAIN", "SmoothedCertificate", "certify_smoothing"]

ABSTAIN = -1


class SmoothedCertificate(NamedTuple):
    """Predictions of the smoothed classifier, and the radius within which each prediction provably holds.

    Attributes:
        predictions: (N,), int64; -1 for samples without a certificate.
        radius: In L2, (N,), float64; 0 for samples without a certificate.
        probability: Lower confidence bound of the probability of the prediction under noise, (N,), float64; also given
            where it is too small for a certificate.
    """

    predictions: Tensor
    radius: Tensor
    probability: Tensor


def certify_smoothing(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    sigma: float,
    samples: int,
    samples_selection: int = 100,
    confidence: float = 0.999,
    generator: torch.Generator | None,
    batch_size: int = 1000,
) -> SmoothedCertificate:
    """Certify the smoothed classifier ``g(x) = argmax_c P(model(x + sigma * noise) = c)`` in L2, with normal noise.

    The most frequent class of `samples_selection` draws is tested on `samples` other draws. If it comes k times, ``p``
    is the exact lower confidence bound of Clopper and Pearson, the (1 - confidence)-quantile of the Beta distribution
    with parameters k and samples - k + 1. Where ``p > 1/2`` no displacement shorter than ``sigma * Phi^-1(p)`` changes
    the prediction of g; elsewhere it abstains.

    The certificate holds for g, neither for the model nor for the majority of finitely many draws. For each sample it
    is wrong with a probability of at most ``1 - confidence``; for a joint statement about N samples, divide this
    probability by N. The largest possible radius is ``sigma * Phi^-1((1 - confidence) ** (1 / samples))``, from
    unanimous draws.

    Memory depends on `batch_size` and not on `samples`. The model's modes, buffers and gradients and the global random
    state do not change.

    Args:
        model: Inputs (B, ...) to logits (B, C). Run in evaluation mode, on noisy inputs in the dtype of `x`. The noise
            is not clipped, so inputs leave their usual range.
        x: Inputs, (N, ...), floating point.
        sigma: Standard deviation of the noise.
        samples: Draws that estimate the probability, for each sample.
        samples_selection: Draws that choose the class.
        confidence: Probability with which the radius of one sample holds, between 0 and 1.
        generator: Source of the noise. Samples draw one after the other, so results depend on their order.
            None: torch's global generator.
        batch_size: Number of noisy inputs in one call of the model.

    Raises:
        TypeError: If `x` is not a floating-point tensor, or the model does not return a tensor.
        ValueError: If `sigma`, `samples`, `samples_selection` or `batch_size` is not positive, `confidence` is not
            between 0 and 1, `x` is not a batch of samples, or the model does not return logits (B, C), or returns NaN.

    References:
        Cohen, Rosenfeld and Kolter, "Certified adversarial robustness via randomized smoothing", 2019, theorem 1 and
        the algorithm "Certify". Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case
        of the binomial", 1934.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = certify_smoothing(
        ...     lambda x: x @ weight.T, torch.ones(1, 2), sigma=1.0, samples=10_000, generator=generator
        ... )  # the boundary is 1.4 away
        >>> found.predictions.item(), 1.3 < found.radius.item() < 1.4
        (0, True)
    """
    function("model", model)
    check_inputs("x", x)
    sigma, confidence = number("sigma", sigma, above=0), number("confidence", confidence, above=0, below=1)
    samples, batch_size = integer("samples", samples), integer("batch_size", batch_size)
    samples_selection, generator = integer("samples_selection", samples_selection), own_generator(generator)
    predictions, agreeing = [], []
    with no_graph(), untouched(model):
        for row in x:
            selection = _votes(model, row, sigma, samples_selection, generator, batch_size)
            predictions.append(int(selection.argmax()))
            agreeing.append(int(_votes(model, row, sigma, samples, generator, batch_size)[predictions[-1]]))
    count = np.array(agreeing, dtype=float)
    # No agreeing draw at all: the bound is 0, where the distribution has no parameter k.
    probability = np.where(count > 0, beta.ppf(1 - confidence, np.maximum(count, 1), samples - count + 1), 0.0)
    certified = probability > 0.5
    radius = np.where(certified, sigma * norm.ppf(probability), 0.0)
    return SmoothedCertificate(
        torch.tensor(np.where(certified, predictions, ABSTAIN), dtype=torch.int64, device=x.device),
        torch.tensor(radius, dtype=torch.float64, device=x.device),
        torch.tensor(probability, dtype=torch.float64, device=x.device),
    )


def _votes(
    model: Callable[[Tensor], Tensor],
    row: Tensor,
    sigma: float,
    samples: int,
    generator: torch.Generator,
    batch_size: int,
) -> Tensor:
    """Return the number of predictions of each class at ``row + sigma * noise``, (C,)."""
    votes: Tensor | None = None
    for begin in range(0, samples, batch_size):
        size = min(batch_size, samples - begin)
        # Drawn on the generator's device, so that a seed means the same on every device.
        dtype = torch.promote_types(row.dtype, torch.float32)
        noise = torch.randn(size, *row.shape, generator=generator, device=generator.device, dtype=dtype)
        logits = model((row + sigma * noise.to(row.device)).to(row.dtype))
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"`model` should return logits, a tensor (B, C). Found {type(logits).__name__}: pick the logits in a "
                "function, as in `lambda x: model(x)[0]`."
            )
        if logits.dim() != 2 or len(logits) != size:
            raise ValueError(f"`model` should return logits of shape ({size}, C). Found {tuple(logits.shape)}.")
        if logits.isnan().any():
            raise ValueError("`model` should return numbers. Found NaN.")
        counted = torch.bincount(logits.argmax(1), minlength=logits.shape[1])
        votes = counted if votes is None else votes + counted
    assert votes is not None
    return votes
