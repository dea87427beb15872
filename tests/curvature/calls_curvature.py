"""A call of every public function of the room of curvature that takes a number."""

import torch
from calls import Call

from toolkit import curvature

RESIDUALS = torch.tensor([0.3, -1.2, 4.0])
ROBUST = {"residuals": RESIDUALS, "kind": "cauchy", "scale": 1.5}
WEIGHT = torch.tensor([1.0, 2.0], requires_grad=True)

CALLS = {
    "curvature.half_quadratic_loss": Call(curvature.half_quadratic_loss, **ROBUST),
    "curvature.natural_gradient": Call(
        curvature.natural_gradient,
        loss=WEIGHT.square().sum(),
        divergence=(WEIGHT - WEIGHT.detach()).square().sum(),
        parameters=[WEIGHT],
        damping=0.1,
        iterations=2,
        tolerance=1e-8,
        radius=0.5,
    ),
    "curvature.proximal_penalty": Call(curvature.proximal_penalty, point=RESIDUALS, anchor=torch.zeros(3), step=0.5),
    "curvature.reweighted_loss": Call(curvature.reweighted_loss, **ROBUST),
    "curvature.robust_loss": Call(curvature.robust_loss, **ROBUST),
    "curvature.robust_weights": Call(curvature.robust_weights, **ROBUST),
    "curvature.scale_gradient": Call(curvature.scale_gradient, input=RESIDUALS, scale=0.5),
}
