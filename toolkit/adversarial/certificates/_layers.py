"""A model as a chain of plain layers, each used by its formula: the model is not called, so it does not change.

N samples, D inputs, M units of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.adversarial.networks import Normalize
from toolkit.blocks import no_graph

__all__ = [
    "AFFINE",
    "RESHAPING",
    "Affine",
    "affine_chain",
    "check_logits",
    "plain_layers",
    "roundings_of",
    "run_affine",
    "run_sizes",
]

AFFINE = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    Normalize,
)
RESHAPING = (nn.Flatten, nn.Unflatten)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)  # in evaluation mode
_MONOTONE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Sigmoid, nn.Tanh, nn.MaxPool1d, nn.MaxPool2d)


class Affine(NamedTuple):
    """``z -> weight z + bias`` on flat vectors.

    The terms of a product of several layers may cancel. Their rounding errors do not: they grow with absolute values.

    Attributes:
        weight: (M, M of the layer before).
        bias: (M,).
        weight_size: The sums of the absolute values of the terms of `weight`, (M, M of the layer before).
        bias_size: The same sums for `bias`, (M,).
        terms: The largest number of roundings behind an entry of `weight` or `bias`.
    """

    weight: Tensor
    bias: Tensor
    weight_size: Tensor
    bias_size: Tensor
    terms: int


def plain_layers(model: nn.Module, activations: tuple[type[nn.Module], ...] = _MONOTONE) -> list[nn.Module]:
    """Return the layers of a sequential model that act in evaluation mode.

    Args:
        model: A `torch.nn.Sequential`.
        activations: The allowed nonlinear layers.

    Raises:
        TypeError: If `model` is not a `torch.nn.Sequential` of known layers, or has hooks.
        ValueError: If a batch normalisation keeps no statistics, or a `torch.nn.LeakyReLU` is decreasing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Sequential. Found {type(model).__name__}.")
    layers = list(_flat(model))
    for layer in layers:
        if type(layer) not in AFFINE + RESHAPING + activations:
            known = ", ".join(kind.__name__ for kind in AFFINE + RESHAPING + _NOTHING + activations)
            raise TypeError(
                f"`model` should be a torch.nn.Sequential of {known} and Sequential. Found {type(layer).__name__}."
            )
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.running_var is None:
            raise ValueError(
                "`model` should normalise by running statistics. Found a batch normalisation that has none."
            )
        if isinstance(layer, nn.LeakyReLU | nn.ELU) and _falls(layer):
            raise ValueError(f"`model` should have activations that do not fall. Found {layer}.")
    return layers


def _falls(layer: nn.LeakyReLU | nn.ELU) -> bool:
    return (layer.negative_slope if isinstance(layer, nn.LeakyReLU) else layer.alpha) < 0


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    # Before any layer is left out: with a hook, or its own forward, even an identity may compute anything.
    if model._forward_hooks or model._forward_pre_hooks:
        raise TypeError(f"`model` should have no forward hooks. Found one on {type(model).__name__}.")
    if "forward" in vars(model):
        raise TypeError(f"`model` should have the forward of its layers. Found another on {type(model).__name__}.")
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        for child in model:
            yield from _flat(child)
    elif type(model) not in _NOTHING:
        yield model


def run_affine(
    layer: nn.Module,
    input: Tensor,
    *,
    shift: Tensor | None = None,
    weight: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> Tensor:
    """Return ``weight(W) input``, plus b unless `shift` is given, in the dtype of `input` and in evaluation mode.

    Args:
        layer: An affine layer, of a class in `AFFINE`.
        input: (N, ...).
        shift: The value in place of b. None: the layer's own; zero: no shift.
        weight: Function of W whose result takes the place of W, for example `torch.abs`.
    """
    if isinstance(layer, nn.AvgPool2d | nn.AdaptiveAvgPool2d):  # W is not negative, and b is zero
        if (getattr(layer, "divisor_override", None) or 1) < 0:
            raise ValueError(f"`divisor_override` should be positive. Found {layer}.")
        pooled: Tensor = layer.forward(input)
        return pooled
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | Normalize):
        scale, bias, _ = _scale_and_bias(layer, input)
        shape = _channels(input)
        return input * weight(scale).reshape(shape) + (bias if shift is None else shift).reshape(shape)
    assert isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
    own = None if layer.bias is None or shift is not None else layer.bias.to(input)
    if isinstance(layer, nn.Linear):
        return F.linear(input, weight(layer.weight.to(input)), own)
    convolved: Tensor = layer._conv_forward(input, weight(layer.weight.to(input)), own)
    return convolved


def run_sizes(layer: nn.Module, input: Tensor) -> Tensor:
    """Return ``|W| input + |b|`` for an input that is not negative; ``|b|`` sums the absolute terms of b."""
    total = run_affine(layer, input, shift=input.new_zeros(1), weight=torch.abs)
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | Normalize):
        return total + _scale_and_bias(layer, input)[2].reshape(_channels(input))
    bias: Tensor | None = getattr(layer, "bias", None)
    if bias is None:
        return total
    size = bias.to(input).abs()
    return total + (size if isinstance(layer, nn.Linear) else size.reshape(_channels(input)))


def roundings_of(layer: nn.Module, input: Tensor) -> int:
    """Return how many roundings an output of an affine layer has, at most."""
    if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
        return layer.weight[0].numel() + 1
    return 8 if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | Normalize) else input.shape[1:].numel() + 1


def _channels(input: Tensor) -> tuple[int, ...]:
    return (1, -1, *[1] * (input.dim() - 2))


def _scale_and_bias(layer: nn.BatchNorm1d | nn.BatchNorm2d | Normalize, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, shift and size of the shift's terms of each channel, (C,), or (1,) if all channels share them."""
    if isinstance(layer, Normalize):
        mean, scale = layer.mean.to(input), 1 / layer.std.to(input)
    else:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean, scale = layer.running_mean.to(input), (layer.running_var.to(input) + layer.eps).rsqrt()
        if layer.weight is not None:
            scale = scale * layer.weight.to(input)
    # Without this check a single input channel would be broadcast to all channels of the layer.
    if len(scale) != input.shape[1] and not (isinstance(layer, Normalize) and len(scale) == 1):
        raise ValueError(f"The input of {layer} should have {len(scale)} channels. Found {input.shape[1]}.")
    bias = -mean * scale
    size = bias.abs()
    if not isinstance(layer, Normalize) and layer.bias is not None:
        bias, size = bias + layer.bias.to(input), size + layer.bias.to(input).abs()
    return scale, bias, size


def affine_chain(model: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Affine]:
    """Return the dense layers between the rectifiers of a ReLU network. Differentiable in its parameters.

    Every affine layer becomes its matrix, whose columns are the layer's outputs for unit vectors. Layers without a
    rectifier between them are merged.

    Args:
        model: A chain; see `plain_layers`.
        x: (N, ...), for the shape of a sample and the device.
        dtype: Dtype of the matrices.

    Raises:
        TypeError: If the model is not a chain, or has other nonlinear layers than `torch.nn.ReLU`.
        ValueError: If the model does not return a vector for each sample.
    """
    chain: list[Affine] = []
    current = _Map.identity(x.shape[1:], dtype, x.device)
    changed = True
    for layer in plain_layers(model, (nn.ReLU,)):
        if isinstance(layer, nn.ReLU):
            if changed:  # the rectifier of a rectifier is the same
                chain.append(current.dense())
                current = _Map.identity(current.offset.shape[1:], dtype, x.device)
            changed = False
            continue
        current = current.then(layer)
        if len(current.offset) != 1:
            raise TypeError(f"`model` should keep the samples of a batch apart. Found {layer}.")
        changed = True
    check_logits(current.offset.shape)
    return [*chain, current.dense()]


def check_logits(shape: Sequence[int]) -> None:
    """Raise ValueError unless the shape of the logits is (N, C)."""
    if len(shape) != 2:
        raise ValueError(f"`model` should return logits of shape (N, C). Found (N, {', '.join(map(str, shape[1:]))}).")


class _Map(NamedTuple):
    """An affine map: its outputs for the unit vectors without the shift, its output for zero, and the sizes of both."""

    columns: Tensor
    offset: Tensor
    column_sizes: Tensor
    offset_size: Tensor
    terms: int

    @classmethod
    def identity(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Map:
        features = shape.numel()
        basis = torch.eye(features, dtype=dtype, device=device)
        columns, offset = basis.reshape(features, *shape), torch.zeros(1, *shape, dtype=dtype, device=device)
        return cls(columns, offset, columns, offset, 0)

    def then(self, layer: nn.Module) -> _Map:
        """Return the map followed by an affine or a reshaping layer."""
        if type(layer) not in AFFINE:
            columns, offset, column_sizes, offset_size = (layer.forward(part) for part in self[:4])
            return _Map(columns, offset, column_sizes, offset_size, self.terms)
        zero = self.offset.new_zeros(1)
        columns, offset = run_affine(layer, self.columns, shift=zero), run_affine(layer, self.offset)
        with no_graph():
            if not self.terms and isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
                return _Map(columns, offset, columns.abs(), offset.abs(), 1)  # of the identity: nothing is rounded
            sizes = run_affine(layer, self.column_sizes, shift=zero, weight=torch.abs)
            return _Map(
                columns, offset, sizes, run_sizes(layer, self.offset_size), self.terms + roundings_of(layer, columns)
            )

    def dense(self) -> Affine:
        weight, weight_size = (part.flatten(1).T for part in (self.columns, self.column_sizes))
        bias, bias_size = (part.flatten(1)[0] for part in (self.offset, self.offset_size))
        return Affine(weight, bias, weight_size, bias_size, self.terms)
