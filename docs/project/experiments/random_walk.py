"""Learning from one's own predictions: temporal differences, with the next prediction held constant or not.

A walker moves left or right along five places with equal chance; a step beyond the right end is rewarded by 1, and both
ends end the walk. The value of a place is the expected reward from there on, (i + 1) / 6. It is learned by comparing
each prediction with the reward plus the prediction at the next place.

This is an experiment of your own: a `Config` with the values that a config file may set, and a function `run` that
returns one seeded run. ``stopgrad run configs`` trains it with the block in place and again with the block open.

S places, N steps of the walker.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from toolkit import block, stop_gradient
from toolkit.runner import ExperimentConfig, Objective, Run

__all__ = ["NEXT", "Config", "run"]

# A block is a named place where the gradient is stopped. It is declared once, with its reason in a sentence.
NEXT = block("random_walk.next_value", "The next prediction is a label: only the prediction before it moves.")


class Config(ExperimentConfig):
    """Values of the random walk; `ExperimentConfig` has the common ones.

    Attributes:
        places: Number of places, S.
        samples: Number of steps of the walker, N.
    """

    places: Annotated[int, Field(ge=2)] = 5
    samples: Annotated[int, Field(ge=1)] = 10_000


def run(config: Config, seed: int) -> Run:
    """Return one seeded run. Two runs of the same config and seed have to be identical."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    before = torch.randint(config.places, (config.samples,), generator=generator)
    after = before + 2 * torch.randint(2, (config.samples,), generator=generator) - 1
    goes_on = ((after >= 0) & (after < config.places)).to(dtype)
    reward = (after == config.places).to(dtype)
    truth = torch.arange(1, config.places + 1, dtype=dtype) / (config.places + 1)
    values = torch.rand(config.places, generator=generator, dtype=dtype, requires_grad=True)

    def loss() -> Tensor:
        """Return the surrogate. Its value does not depend on which blocks are open, only its gradient does."""
        following = goes_on * values[after.clamp(0, config.places - 1)]
        target = reward + stop_gradient(following, NEXT)
        return 0.5 * (target - values[before]).square().mean()

    def target() -> dict[str, Tensor]:
        """Return the stated target of the blocked gradient without autograd: the update of TD(0), negated."""
        with torch.no_grad():
            error = reward + goes_on * values[after.clamp(0, config.places - 1)] - values[before]
            return {"values": torch.zeros_like(values).index_add(0, before, -error / config.samples)}

    def evaluate() -> dict[str, float]:
        """Return the metrics after each step; `objective` is the measure by which both runs are compared."""
        with torch.no_grad():
            return {"objective": (values - truth).square().mean().sqrt().item()}

    return Run(
        parameters={"values": values},
        loss=loss,
        objective=Objective(label="distance from the true values (root mean square)", higher_is_better=False, best=0.0),
        evaluate=evaluate,
        optimizer=torch.optim.SGD([values], lr=config.learning_rate),
        target=target,
    )
