"""What a config file may say, and one clear sentence for each way to say it wrong.

This module does not import torch; an experiment's own `Config`, which does, is imported only when a config names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ExperimentConfig"]

BlockSet = str | list[str]


class ExperimentConfig(BaseModel):
    """What every experiment's config says. An experiment's own `Config` adds its fields.

    Attributes:
        experiment: The module in `experiments/` that runs it.
        title: One line for the report.
        finding: What theory says the block does here, in words for a reader who never heard of stop-gradients.
        open: The variants that are compared with the blocked run: each is a block, or a list of blocks that are
            opened together.
        seeds: How many seeds; they are 0, 1, 2, ...
        steps: Training steps of each run.
        evaluate_every: Steps between two evaluations of the metrics. The first and last step are always evaluated.
        learning_rate: Step size of the optimiser.
        dtype: Floating-point type of data and parameters.
        device: Where it runs.
        threads: Threads for torch. Small models are fastest with one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    experiment: str
    title: str
    finding: str
    open: Annotated[list[BlockSet], Field(min_length=1)]
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    steps: Annotated[int, Field(ge=1)]
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    learning_rate: Annotated[float, Field(gt=0)]
    dtype: Literal["float32", "float64"] = "float64"
    device: str = "cpu"
    threads: Annotated[int, Field(ge=1)] = 1

    @property
    def variants(self) -> list[frozenset[str]]:
        """The sets of open blocks, the blocked run (the empty set) first."""
        return [frozenset(), *(frozenset([entry] if isinstance(entry, str) else entry) for entry in self.open)]

    def resolved(self) -> dict[str, Any]:
        """Return every value, defaults included, as plain JSON."""
        return self.model_dump(mode="json")
