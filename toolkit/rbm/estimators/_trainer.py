"""The trainers of the estimators, by the name of the method.

H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.rbm.machine.model import RBM
from toolkit.rbm.surrogates.centering import Offsets, centered_gradient, centering_offsets
from toolkit.rbm.surrogates.divergence import likelihood_gradient
from toolkit.rbm.training.fused import FusedTrainer

__all__ = ["ExactTrainer", "Method", "Options", "Trainer", "trainer_of"]

Method: TypeAlias = Literal["pcd", "cd", "fpcd", "tempering", "exact"]


class ExactTrainer:
    """Gradient descent on the exact negative log-likelihood of each batch: the smaller layer is enumerated.

    Args:
        rbm: The machine.
        batch_size: The largest number of rows of a batch.
        offset_rate: As in `FusedTrainer`.
        weight_decay: As in `FusedTrainer`.
    """

    def __init__(self, rbm: RBM, *, batch_size: int, offset_rate: float | None, weight_decay: float) -> None:
        self.rbm, self.batch_size, self.group, self.generator = rbm, batch_size, None, None
        self.offset_rate, self.weight_decay = offset_rate, weight_decay
        self._offsets: Offsets | None = None

    @property
    def chains(self) -> None:
        """None: there are no chains."""
        return

    def step(self, data: Tensor, *, learning_rate: float) -> None:
        """Update the parameters.

        Args:
            data: (N, V).
            learning_rate: The step size.

        Raises:
            ValueError: If both layers are too large to enumerate.
        """
        data = data.to(self.rbm.weights.dtype)
        with no_graph():
            gradient = likelihood_gradient(self.rbm, data)
            decay = {"weights": self.weight_decay * self.rbm.weights}
            if self.offset_rate is not None:
                self._offsets = centering_offsets(self.rbm, data, previous=self._offsets, rate=self.offset_rate)
                gradient = centered_gradient(gradient, self._offsets)
                # Decay in the coordinates of the update moves the biases as well.
                decay["visible_bias"] = -decay["weights"] @ self._offsets.hidden
                decay["hidden_bias"] = -decay["weights"].mT @ self._offsets.visible
            for name, parameter in self.rbm.named_parameters():
                parameter.sub_(learning_rate * (gradient[name] + decay.get(name, 0.0)))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on which the next steps depend."""
        if self._offsets is None:
            return {}
        return {"visible_offset": self._offsets.visible.clone(), "hidden_offset": self._offsets.hidden.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        if state:
            self._offsets = Offsets(state["visible_offset"], state["hidden_offset"])


Trainer: TypeAlias = FusedTrainer | ExactTrainer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of training, except for the learning rate. See `FusedTrainer`."""

    method: Method
    steps: int
    n_chains: int
    n_temperatures: int
    fast_rate: float
    offset_rate: float | None
    weight_decay: float


def trainer_of(rbm: RBM, options: Options, *, batch_size: int, generator: torch.Generator) -> Trainer:
    """Return the trainer of a method; chains start with all hidden units at zero."""
    offset_rate, weight_decay, method = options.offset_rate, options.weight_decay, options.method
    if method == "exact":
        return ExactTrainer(rbm, batch_size=batch_size, offset_rate=offset_rate, weight_decay=weight_decay)
    with no_graph():
        chains = None if method == "cd" else torch.zeros_like(rbm.hidden_bias).expand(options.n_chains, -1)
        betas = None
        if method == "tempering":
            betas = torch.linspace(0, 1, options.n_temperatures, dtype=rbm.weights.dtype, device=rbm.weights.device)
    return FusedTrainer(
        rbm,
        batch_size=batch_size,
        steps=options.steps,
        chains=chains,
        inverse_temperatures=betas,
        fast_rate=options.fast_rate if method == "fpcd" else None,
        offset_rate=offset_rate,
        weight_decay=weight_decay,
        generator=generator,
    )
