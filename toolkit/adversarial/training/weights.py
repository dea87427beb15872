"""Adversarial weight perturbation: the gradient at the worst weights nearby updates the original weights.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from toolkit._checks import function, number
from toolkit.adversarial._functional import called_with, reentrant_kept
from toolkit.blocks import block, no_graph, stop_recording

__all__ = ["WEIGHT_PERTURBATION", "awp_loss", "reweighted", "weight_perturbation"]

WEIGHT_PERTURBATION = block(
    "adversarial.weight_perturbation",
    "The perturbation is where the loss is probed: the weights descend from there, and do not try to move the probe.",
)


def awp_loss(model: nn.Module, loss: Callable[[nn.Module], Tensor], *, gamma: float) -> Tensor:
    """Return the loss at the weights that `weight_perturbation` finds: ``loss(w + v)``.

    It stands for ``max_{v : |v_l| <= gamma |w_l|} loss(w + v)``. With the block `WEIGHT_PERTURBATION` in place its
    gradient with respect to w is the gradient of the loss at ``w + v``.

    Batch normalisation in training mode updates its running statistics once, from the forward pass at the unperturbed
    weights, and keeps them; the pass at the perturbed weights works on copies of the buffers. Both passes draw the same
    dropout masks.

    Args:
        model: Any module. Its parameters are read, and never written.
        loss: Function of a model that returns a scalar. It is called with two modules that compute the same function as
            `model`, one with its weights and one with the perturbed weights, and should treat both alike: examples are
            made once, outside of `loss`.
        gamma: Largest length of the perturbation of a weight, relative to the length of the weight.

    Returns:
        A scalar; the loss itself if the model has no weights to perturb.

    Raises:
        TypeError: If `model` is not a `torch.nn.Module`.
        ValueError: If `gamma` is negative or not finite.

    References:
        Wu, Xia and Wang, "Adversarial weight perturbation helps robust generalization", 2020, section 4.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = model.load_state_dict({"weight": torch.tensor([[3.0, 4.0]])})
        >>> awp_loss(model, lambda model: model(torch.tensor([[1.0, 0.0]])).sum(), gamma=0.1)
        tensor(3.5000, grad_fn=<SumBackward0>)
    """
    gamma, weights = number("gamma", gamma, least=0), _weights(model)
    function("loss", loss, "a model")
    if not weights:
        return loss(model)

    def at_the_weights() -> tuple[dict[str, Tensor], Tensor]:
        # The slope is by the weights at which the loss is taken, and not by the weights that made an open example:
        # else the perturbation, and so the value of the loss, would depend on whether the block of the example is open.
        places = {name: weight.view_as(weight) for name, weight in weights.items()}
        return places, loss(_Reweighted(model, places))

    return loss(reweighted(model, _ascended(model, weights, at_the_weights, gamma)))


def weight_perturbation(model: nn.Module, loss: Callable[[nn.Module], Tensor], *, gamma: float) -> dict[str, Tensor]:
    """Return perturbed weights ``w_l + gamma * |w_l| * g_l / |g_l|``, where g is the gradient of the loss.

    One step of ascent in every layer, to the boundary of a ball whose radius is relative to the layer's weights. The
    perturbed weights are new tensors, to be used with `reweighted` or `torch.func.functional_call`: adding the
    perturbation in place and subtracting it later would leave rounding errors in most of the weights.

    No parameter's ``.grad`` and no global random state changes. Changes that `loss` makes to buffers stay: in training
    mode batch normalisation updates its running statistics, as in any forward pass.

    Args:
        model: Any module.
        loss: Function of a model that returns a scalar; called once, with `model`.
        gamma: As in `awp_loss`.

    Returns:
        Perturbed weights by name, for trained parameters with at least two dimensions; biases and the scales of
        normalisation are not perturbed. The perturbation is a constant while the block `WEIGHT_PERTURBATION` is in
        place.

    Raises:
        TypeError: If `model` is not a `torch.nn.Module`.
        ValueError: If `gamma` is negative or not finite.

    References:
        Wu, Xia and Wang, "Adversarial weight perturbation helps robust generalization", 2020, section 4.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = model.load_state_dict({"weight": torch.tensor([[3.0, 4.0]])})
        >>> weight_perturbation(model, lambda model: model(torch.tensor([[1.0, 0.0]])).sum(), gamma=0.1)
        {'weight': tensor([[3.5000, 4.0000]], grad_fn=<AddBackward0>)}
    """
    gamma, weights = number("gamma", gamma, least=0), _weights(model)
    return _ascended(model, weights, lambda: (weights, loss(model)), gamma)


def reweighted(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that computes as `model`, with other weights and with copies of its buffers.

    It shares the submodules of `model`, so it is in the same mode. Use it to call the model, not to store it.

    Args:
        model: Any module.
        weights: Values of the replaced parameters, by name.
    """
    with no_graph():
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return _Reweighted(model, {**buffers, **weights})


class _Reweighted(nn.Module):
    """A module that computes as `model`, with other tensors in the place of some of its own."""

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._values = dict(values)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        result: Tensor = called_with(self.model, self._values, args, kwargs)
        return result


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters to perturb."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module. Found {type(model).__name__}.")
    return {name: value for name, value in model.named_parameters() if value.dim() > 1 and value.requires_grad}


def _ascended(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    evaluate: Callable[[], tuple[Mapping[str, Tensor], Tensor]],
    gamma: float,
) -> dict[str, Tensor]:
    """Return weights after a step of ascent; `evaluate` returns the weights to differentiate by, and the loss."""
    devices = sorted({value.device.index for value in model.parameters() if value.is_cuda})
    with stop_recording(WEIGHT_PERTURBATION):
        recorded = torch.is_grad_enabled()
        with torch.enable_grad(), torch.random.fork_rng(devices), reentrant_kept():
            places, value = evaluate()
        if not weights:  # of which torch takes no gradient
            return {}
        slopes = torch.autograd.grad(
            value, list(places.values()), create_graph=recorded, allow_unused=True, materialize_grads=True
        )
        steps = [_step(weight, slope, gamma) for weight, slope in zip(weights.values(), slopes, strict=True)]
    return {name: weight + step for (name, weight), step in zip(weights.items(), steps, strict=True)}


def _step(weight: Tensor, slope: Tensor, gamma: float) -> Tensor:
    length = torch.linalg.vector_norm(slope)
    per_slope = torch.linalg.vector_norm(weight) / length.masked_fill(length == 0, torch.inf)
    step: Tensor = gamma * per_slope * slope
    return step
