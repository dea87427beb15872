r"""The joint distribution of two layers: energies and conditionals, as functions of their parameters.

An `RBM` holds the parameters of one `Joint`. Tempered machines, fast weights and centred coordinates are a `Joint` with
other parameters.

N samples, V columns of the visible layer, H of the hidden one. Energies are in nats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._checks import number
from toolkit.rbm.machine.layers import Layer

__all__ = ["Joint"]


@dataclass(frozen=True)
class Joint:
    r"""Two coupled layers, :math:`E(v, h) = -a(v) - a(h) - s(v)^\top W s(h)`.

    Attributes:
        weights: W, (\*, V, H); leading dimensions are separate machines.
        visible: The visible layer.
        hidden: The hidden layer.
    """

    weights: Tensor
    visible: Layer
    hidden: Layer

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in `RBM`, in the order of `RBM`."""
        tensors = {"weights": self.weights, "visible_bias": self.visible.bias, "hidden_bias": self.hidden.bias}
        for side, layer in (("visible", self.visible), ("hidden", self.hidden)):
            tensors |= {f"{side}_{name}": getattr(layer, name) for name in layer.more_parameters}
        return tensors

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Joint:
        """Return the machine with these parameters; all names of `tensors` are required."""
        layers = []
        for side, layer in (("visible", self.visible), ("hidden", self.hidden)):
            fields = ("bias", *layer.more_parameters)
            layers.append(dataclasses.replace(layer, **{field: tensors[f"{side}_{field}"] for field in fields}))
        return Joint(tensors["weights"], *layers)

    def to_type(self, dtype: torch.dtype) -> Joint:
        """Return the machine with parameters of this floating-point dtype; itself if nothing changes."""
        if all(tensor.dtype == dtype for tensor in self.tensors.values()):
            return self
        return self.with_tensors({name: tensor.to(dtype) for name, tensor in self.tensors.items()})

    def in_full_precision(self) -> Joint:
        """Return the machine in float32 at least, for sums that need more than half precision."""
        return self.to_type(torch.promote_types(self.weights.dtype, torch.float32))

    def to_hidden(self, visible: Tensor) -> Tensor:
        r"""Return the input of the hidden layer, (\*, H), from `visible`, (\*, V)."""
        return self.visible.statistic(visible) @ self.weights

    def to_visible(self, hidden: Tensor) -> Tensor:
        r"""Return the input of the visible layer, (\*, V), from `hidden`, (\*, H)."""
        return self.hidden.statistic(hidden) @ self.weights.mT

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        r"""Return :math:`E(v, h)`, (\*)."""
        interaction = (self.to_hidden(visible) * self.hidden.statistic(hidden)).sum(-1)
        return -self.visible.log_weight(visible) - self.hidden.log_weight(hidden) - interaction

    def free_energy(self, visible: Tensor) -> Tensor:
        r"""Return :math:`F(v) = -\log \sum_h e^{-E(v, h)}`, (\*)."""
        return -self.visible.log_weight(visible) - self.hidden.log_normaliser(self.to_hidden(visible))

    def hidden_free_energy(self, hidden: Tensor) -> Tensor:
        r"""Return :math:`-\log \sum_v e^{-E(v, h)}`, (\*), an integral where the visible units are continuous."""
        return -self.hidden.log_weight(hidden) - self.visible.log_normaliser(self.to_visible(hidden))

    def hidden_mean(self, visible: Tensor) -> Tensor:
        r"""Return :math:`E[h \mid v]`, (\*, H)."""
        return self.hidden.mean(self.to_hidden(visible))

    def visible_mean(self, hidden: Tensor) -> Tensor:
        r"""Return :math:`E[v \mid h]`, (\*, V)."""
        return self.visible.mean(self.to_visible(hidden))

    def sample_hidden(self, visible: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Draw the hidden units given the visible ones, (\*, H)."""
        return self.hidden.sample(self.to_hidden(visible), generator)

    def sample_visible(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Draw the visible units given the hidden ones, (\*, V)."""
        return self.visible.sample(self.to_visible(hidden), generator)

    def shifted(self, by: Mapping[str, Tensor]) -> Joint:
        """Return the machine with offsets added to parameters, by their names in `RBM`."""
        moved = {name: tensor + by[name] if name in by else tensor for name, tensor in self.tensors.items()}
        return self.with_tensors(moved)

    def annealed(self, inverse_temperature: Tensor | float, reference: Tensor | None = None) -> Joint:
        r"""Return the machine on the path from a machine without weights to this one.

        .. math::
            E_\beta = (1 - \beta) E_0 + \beta E, \qquad E_0(v, h) = -a_0(v) - a(h)|_{c = 0}

        :math:`E_0` has the visible biases `reference` and no hidden biases; a Gaussian layer keeps its variance, so
        that every :math:`E_\beta` defines a distribution. With Bernoulli units and a reference of 0, :math:`E_\beta` is
        :math:`\beta E`. For a Gaussian layer with a reference other than its own biases, :math:`E_\beta` is exact up to
        a constant, which depends only on :math:`\beta` and is 0 at both ends: the biases are interpolated, their
        squares are not.

        Args:
            inverse_temperature: :math:`\beta`, between 0 and 1; a tensor (\*) gives one machine per entry.
            reference: (V,), the visible biases of :math:`E_0`. None: 0, or the machine's own biases if the units are
                Gaussian.
        """
        if not isinstance(inverse_temperature, Tensor):
            inverse_temperature = number("inverse_temperature", inverse_temperature)
        beta = torch.as_tensor(inverse_temperature, dtype=self.weights.dtype, device=self.weights.device)
        if reference is None:
            reference = self.visible.reference
        per_unit = beta[..., None, None] if beta.ndim else beta
        visible = self.visible.with_bias(reference + per_unit * (self.visible.bias - reference))
        return Joint(per_unit * self.weights, visible, self.hidden.with_bias(per_unit * self.hidden.bias))

    def annealed_difference(
        self, visible: Tensor, hidden: Tensor, reference: Tensor | None = None, to_hidden: Tensor | None = None
    ) -> Tensor:
        r"""Return :math:`E - E_0 = \partial E_\beta / \partial \beta`, (\*), which decides a swap of temperatures.

        Args:
            visible: (\*, V).
            hidden: (\*, H).
            reference: As in `annealed`.
            to_hidden: (\*, H), the input of the hidden layer, where it is known.
        """
        if reference is None:
            reference = self.visible.reference
        if to_hidden is None:
            to_hidden = self.to_hidden(visible)
        at_zero = self.visible.with_bias(reference).log_weight(visible)
        interaction = ((to_hidden + self.hidden.bias) * self.hidden.statistic(hidden)).sum(-1)
        return at_zero - self.visible.log_weight(visible) - interaction


def checked_reference(reference: Tensor, joint: Joint) -> Tensor:
    """Return visible biases of a machine without weights, on the machine's device.

    Raises:
        TypeError: If `reference` is not a tensor.
        ValueError: If it does not have the shape (V,), or is not finite.
    """
    if not isinstance(reference, Tensor):
        raise TypeError(f"`reference` should be a tensor. Found {type(reference).__name__}.")
    shape = (joint.visible.n_columns,)
    if reference.shape != shape:
        raise ValueError(f"`reference` should have shape {shape}. Found {tuple(reference.shape)}.")
    if not bool(reference.isfinite().all()):
        raise ValueError(f"`reference` should be finite. Found {float(reference[~reference.isfinite()][0])}.")
    return reference.to(joint.weights.device)
