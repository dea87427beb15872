"""Base classes of parameters: tensors that change type and device together, and the weights of a mixture.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit._random import check_generator
from toolkit._tensors import shape_of

__all__ = ["Components", "Located", "Movable"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Movable:
    """A dataclass of tensors, nested dataclasses of tensors, and settings."""

    def to(self, target: torch.dtype | torch.device) -> Self:
        """Return the parameters in another floating-point type, or on another device; itself if nothing changes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: value.to(target) for name, value in values.items() if hasattr(value, "to")}
        stays = all(value is values[name] for name, value in moved.items())
        return self if stays else dataclasses.replace(self, **moved)


@functools.cache
def _tensors_of(kind: Any) -> list[tuple[str, bool]]:
    """Return the fields of a dataclass that are tensors, and whether each may be None."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    return [(name, "None" in found) for name, found in types.items() if found.startswith("Tensor")]


@dataclass(frozen=True, kw_only=True, eq=False)
class Components(Movable):
    """The weights of a mixture.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
    """

    log_weights: Tensor

    def __post_init__(self) -> None:
        kind: object = type(self)
        for name, may_lack in _tensors_of(kind):
            value = getattr(self, name)
            if value is not None or not may_lack:
                shape_of(name, value)

    @property
    def n_components(self) -> int:
        """K."""
        return self.log_weights.shape[0]

    @property
    def weights(self) -> Tensor:
        """Weights of the components, (K,); they sum to 1."""
        return self.log_weights.exp()

    def _labels(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw the components of `n` samples, (N,)."""
        n = integer("n", n)
        check_generator(generator)
        weights = self.weights if generator is None else self.weights.to(generator.device)
        return torch.multinomial(weights, n, replacement=True, generator=generator).to(self.log_weights.device)

    def _check_fields(self, **shapes: tuple[int, ...]) -> None:
        """Raise a ValueError unless the fields have these shapes."""
        for name, shape in {"log_weights": (self.n_components,), **shapes}.items():
            found = tuple(getattr(self, name).shape)
            if found != shape or 0 in shape:
                raise ValueError(f"`{name}` should have shape {shape}, nowhere 0. Found {found}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Located(Components):
    """The weights and the means of a mixture.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        means: (K, D).
    """

    means: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.means.ndim != 2 or 0 in self.means.shape:
            raise ValueError(f"`means` should have shape (K, D). Found {tuple(self.means.shape)}.")

    @property
    def n_features(self) -> int:
        """D."""
        return self.means.shape[1]
