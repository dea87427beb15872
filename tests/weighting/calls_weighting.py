"""A small call of every public function of `toolkit.weighting` that takes a number."""

from collections.abc import Callable
from typing import Any

import torch
from calls import Call

from toolkit import weighting

X = torch.tensor([0.4, -1.2])
COST = torch.tensor([[0.0, 1.0], [2.0, 0.5]])
W = torch.tensor([0.4, -0.9], requires_grad=True)
FOCAL = {"inputs": X, "targets": torch.ones(2), "alpha": 0.25, "gamma": 2.0}
LABELLED = {"logits": X[None], "labels": torch.tensor([1]), "gamma": 2.0}
ONES = torch.ones(2)

RESULTS: set[str] = set()

CALLS: dict[str, Callable[..., Any]] = {
    f"weighting.{name}": Call(getattr(weighting, name), **arguments)
    for name, arguments in {
        "BatchRenorm": {"num_features": 2},
        "adaptive_weight": {
            "reconstruction_loss": W.square().sum(),
            "adversarial_loss": W.sum(),
            "last_layer": W,
        },
        "batch_renorm": {"input": COST, "running_mean": X, "running_std": ONES},
        "beta_nll_loss": {"input": X, "target": X, "var": ONES},
        "circle_loss": {"embeddings": COST + 1, "labels": torch.tensor([0, 1])},
        "circle_loss_of_similarities": {"positive": X, "negative": X},
        "consistency_function": {"network": lambda x, t: x},
        "consistency_loss": {
            "model": lambda x, t: x,
            "x": COST,
            "noise": COST,
            "t": ONES,
            "earlier": 0 * ONES,
            "c": 0.1,
        },
        "ema_normalize": {"input": X, "scale": torch.tensor(1.0), "decay": 0.9},
        "focal_loss": LABELLED,
        "gradnorm_loss": {
            "weights": ONES,
            "gradient_norms": ONES,
            "losses": ONES,
            "initial_losses": ONES,
            "alpha": 1.5,
        },
        "held_focal_loss": LABELLED,
        "held_sigmoid_focal_loss": FOCAL,
        "karras_times": {"n": 3},
        "mixstyle": {"input": COST[None], "permutation": torch.tensor([0]), "mixing": 0.5},
        "sigmoid_focal_loss": FOCAL,
        "sinkhorn_loss": {"cost": COST, "epsilon": 0.5},
        "sinkhorn_potentials": {"cost": COST, "epsilon": 0.5},
    }.items()
}
