"""Training without autograd: the engine that takes the steps, and the loop around it."""

from toolkit._distributed import rank_generator, shard
from toolkit._divergence import DivergenceError
from toolkit.rbm.training.fused import FusedTrainer
from toolkit.rbm.training.loop import train
from toolkit.rbm.training.schedules import Schedule, cosine_decay, linear_decay

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
