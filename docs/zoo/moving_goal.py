"""The common gradient norm of GradNorm is differentiated.

GradNorm learns a weight for each task, so that all weighted gradients have the norm that their progress asks for. That
goal is computed from the weights and the losses, and should be a constant. Without the stop the weights move the goal
instead of their norms, and through the losses in it the weights' own loss also trains the network.
"""

import torch
from torch import nn

SOURCES = ["vpetren/gradnorm_tf#2"]
MOVES, STAYS = ["weights"], ["trunk", "heads"]


def buggy():
    networks, x, targets, first = setup()

    def loss_of_the_weights():
        losses = task_losses(networks, x, targets)
        norms = networks["weights"][0] * gradient_norms(losses, networks["trunk"].weight)
        progress = losses / first
        goal = norms.mean() * (progress / progress.mean()) ** 1.5
        return (norms - goal).abs().sum()

    return loss_of_the_weights, networks


def fixed():
    networks, x, targets, first = setup()

    def loss_of_the_weights():
        losses = task_losses(networks, x, targets)
        norms = networks["weights"][0] * gradient_norms(losses, networks["trunk"].weight)
        progress = losses / first
        goal = (norms.mean() * (progress / progress.mean()) ** 1.5).detach()
        return (norms - goal).abs().sum()

    return loss_of_the_weights, networks


def task_losses(networks, x, targets):
    features = networks["trunk"](x).tanh()
    return (networks["heads"](features) - targets).square().mean(0)


def gradient_norms(losses, weight):
    gradients = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses]
    return torch.stack([gradient.norm() for gradient in gradients])


def setup():
    parts = {"trunk": nn.Linear(4, 3), "heads": nn.Linear(3, 2), "weights": nn.ParameterList([torch.ones(2)])}
    return (
        nn.ModuleDict(parts),
        torch.randn(8, 4),
        torch.randn(8, 2) * torch.tensor([1.0, 5.0]),
        torch.tensor([2.0, 9.0]),
    )
