"""Small calls of the stochastic estimators that take a number or a generator."""

from collections.abc import Callable
from typing import Any

import torch

from toolkit import stochastic

RESULTS: set[str] = set()

CALLS: dict[str, Callable[..., Any]] = {
    "stochastic.relaxed_bernoulli": lambda generator=None: stochastic.relaxed_bernoulli(
        torch.tensor([0.4, -0.2, 0.1]), generator=generator
    ),
}
