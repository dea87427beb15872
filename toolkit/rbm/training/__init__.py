"""Training without autograd: the engine that takes the steps, and the loop around it."""

from toolkit.rbm.training.fused import FusedTrainer
from toolkit.rbm.training.loop import (
    DivergenceError,
    Schedule,
    cosine_decay,
    linear_decay,
    rank_generator,
    shard,
    train,
)

__all__ = [
    "DivergenceError",
    "FusedTrainer",
    "Schedule",
    "cosine_decay",
    "linear_decay",
    "rank_generator",
    "shard",
    "train",
]
