"""Expectation over transformation: the mean prediction of a random model, as a model to attack.

N samples, each of shape (...), C classes, S draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from toolkit._checks import integer

__all__ = ["EOT"]


class EOT(nn.Module):
    """A model that returns ``log mean_s softmax(f_s(x))``, the mean prediction of S draws of a random model f.

    Its gradient is the mean of the draws' gradients of the class probabilities, so any attack on it is the attack under
    expectation over transformation. The draws come from torch's generators, as the model takes them. Attacks leave the
    modes and the buffers of the model as they were, and the global random states.

    Args:
        model: Inputs (N, ...) to logits (N, C), random: by noise, by dropout that stays on, or by transformations of
            its inputs.
        samples: S, draws for each evaluation. Each costs a forward pass. An ensemble of attacks needs enough draws that
            its successes are not luck.

    Raises:
        TypeError: If `model` cannot be called.
        ValueError: If `samples` is not positive.

    References:
        Athalye, Engstrom, Ilyas and Kwok, "Synthesizing robust adversarial examples", 2018, equation 1; Athalye,
        Carlini and Wagner, "Obfuscated gradients give a false sense of security", 2018, section 5.3.

    Example:
        >>> noisy = lambda x: (x + torch.randn_like(x)) @ torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> example = EOT(noisy, samples=10)
        >>> example(torch.ones(3, 2)).exp().sum(1)
        tensor([1.0000, 1.0000, 1.0000])
    """

    def __init__(self, model: Callable[[Tensor], Tensor], samples: int = 20) -> None:
        super().__init__()
        if not callable(model):
            raise TypeError(f"`model` should be callable. Found {type(model).__name__}.")
        self.model, self.samples = model, integer("samples", samples)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities, (N, C)."""
        draws = [self.model(x).log_softmax(1) for _ in range(self.samples)]
        return torch.stack(draws).logsumexp(0) - math.log(self.samples)
