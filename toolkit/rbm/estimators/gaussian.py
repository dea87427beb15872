r"""The Gaussian machine with scikit-learn's interface.

N rows, D features, H components: hidden units.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, get_args

import torch
from torch import Tensor

from toolkit._checks import choice, number
from toolkit._data import Array, Form, RandomState
from toolkit.rbm.estimators._base import BaseRBM, Callback, Schedule, _tensor
from toolkit.rbm.estimators._rows import Rows
from toolkit.rbm.estimators._trainer import Method
from toolkit.rbm.machine.model import RBM, HiddenUnits, VisibleUnits

__all__ = ["GaussianRBM"]


@dataclass(eq=False, repr=False)
class GaussianRBM(BaseRBM):
    r"""A restricted Boltzmann machine of real numbers, for data in their own units.

    .. math::
        E(v, h) = \sum_i \frac{(v_i - b_i)^2}{2 \sigma_i^2} - \sum_{ij} \frac{v_i}{\sigma_i^2} W_{ij} h_j - c^\top h

    Given the hidden units, features are independent and normal around :math:`b + W h` with variances :math:`\sigma^2`,
    which are learned. The model is a mixture of :math:`2^H` Gaussians with shared parameters. Parameters and methods
    are those of `BernoulliRBM`.

    Training uses standardised coordinates: each feature minus its mean, divided by its standard deviation. Only there
    does a learning rate have a fixed meaning. The family of machines is closed under a change of units, so attributes
    and results are exactly those of a machine for the data in their own units.

    Args:
        n_components: Number of hidden units, H.
        learning_rate: The step size at the beginning.
        batch_size: Rows of a batch.
        n_iter: Epochs, passes over all rows.
        verbose: As in `BernoulliRBM`.
        random_state: As in `BernoulliRBM`.
        method: As in `BernoulliRBM`.
        gibbs_steps: As in `BernoulliRBM`.
        n_chains: As in `BernoulliRBM`.
        n_temperatures: As in `BernoulliRBM`.
        fast_rate: As in `BernoulliRBM`.
        offset_rate: As in `BernoulliRBM`.
        weight_decay: As in `BernoulliRBM`.
        schedule: ``"linear"``: the learning rate falls to 0 over the epochs. ``"constant"``: it stays the same.
        average_from: As in `BernoulliRBM`.
        hidden: ``"bernoulli"``, or ``"rectified"``: counting units, without an exact likelihood.
        min_variance: Lower bound of :math:`\sigma^2` relative to the variance of the data: the likelihood has no upper
            bound for features that are constant, or determined exactly by the others.
        checkpoint: As in `BernoulliRBM`.
        callback: Called after each epoch with its number and the machine, in standardised coordinates.

    Attributes:
        components_: (H, D), weights: the shift of a feature's mean by a hidden unit.
        intercept_hidden_: (H,), hidden biases.
        intercept_visible_: (D,), the mean of the features where all hidden units are 0.
        variance_: (D,), variance of the features given the hidden units.
        mean_: (D,), mean of the data at the start of training.
        scale_: (D,), standard deviation of these data; 1 for constant features.
        h_samples_: (M, H), hidden states of the persistent chains; only for methods with persistent chains.
        log_partition_: Log Z in standardised coordinates, nats.
        rbm_: The machine as a `toolkit.rbm.RBM`, for rows in the units of the data.
        n_iter_: Epochs of the last `fit`.
        n_features_in_: Number of features, D.
        feature_names_in_: (D,), if the rows have feature names.

    References:
        Cho, Ilin & Raiko, "Improved learning of Gaussian-Bernoulli restricted Boltzmann machines", 2011. Melchior, Wang
        & Wiskott, "Gaussian-binary restricted Boltzmann machines for modeling natural image statistics", 2017, on the
        meaning and the initial values of the parameters.

    Example:
        >>> x = 1000 + torch.randn(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> x[:150] += 6
        >>> two = GaussianRBM(1, random_state=0).fit(x)
        >>> [round(value) for value in two.reconstruct(x[[0, -1]])[:, 0].tolist()]
        [1006, 1000]
    """

    _visible_units: ClassVar[VisibleUnits] = "gaussian"
    _measure: ClassVar[str] = "mean squared error of the reconstruction, of standardised features"

    n_components: int = 16
    _: KW_ONLY
    learning_rate: float = 0.05
    batch_size: int = 10
    n_iter: int = 100
    verbose: int | None = None
    random_state: RandomState = None
    method: Method = "pcd"
    gibbs_steps: int = 1
    n_chains: int | None = 100
    n_temperatures: int = 10
    fast_rate: float | None = None
    offset_rate: float | None = 0.01
    weight_decay: float = 0.0
    schedule: Schedule = "linear"
    average_from: float | None = None
    hidden: HiddenUnits = "bernoulli"
    min_variance: float = 1e-3
    checkpoint: str | os.PathLike[str] | None = None
    callback: Callback | None = None

    variance_: Array = field(init=False)
    mean_: Array = field(init=False)
    scale_: Array = field(init=False)

    def score_samples(self, X: object) -> Array:
        """Return the log-density of each row in the units of the data: `log_likelihood`.

        Args:
            X: (N, D), as in `transform`.

        Returns:
            (N,), nats.

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: As for `log_likelihood`.
        """
        return self.log_likelihood(X)

    # --- hooks ---

    @property
    def _hidden_units(self) -> HiddenUnits:
        return self.hidden

    def _check_more(self) -> None:
        choice("hidden", self.hidden, get_args(HiddenUnits))
        number("min_variance", self.min_variance, above=0, most=1)

    def _set_coordinates(self, rows: Rows, form: Form) -> dict[str, Tensor]:
        mean, variance = _moments(rows)
        # The variance of a constant feature is only rounding.
        kind = torch.finfo(form.dtype)
        varies = variance > (4 * kind.eps * mean).square()
        held = (variance <= kind.max) & (~varies | (variance * float(self.min_variance) >= kind.tiny))
        if not bool(held.all()):
            column = int((~held).nonzero()[0])
            raise ValueError(
                f"`X` should have features whose variances {form.dtype} can hold. Found {float(variance[column]):.3g} "
                f"in column {column}: scale it."
            )
        scale = torch.where(varies, variance, 1.0).sqrt()
        self.mean_, self.scale_ = form.give(mean), form.give(scale)
        return {"visible_bias": torch.zeros_like(mean), "visible_log_variance": torch.zeros_like(mean)}

    def _to_machine(self, block: Tensor) -> Tensor:
        mean, scale = self._frame(block.device)
        return (block.double() - mean) / scale

    def _from_machine(self, visible: Tensor) -> Tensor:
        mean, scale = self._frame(visible.device)
        return mean + scale * visible

    def _volume(self) -> float:
        return float(self._frame(torch.device("cpu"))[1].log().sum())

    def _frame(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and scale, float64: the mean may be large beside the scale."""
        return _tensor(self.mean_).to(device, torch.float64), _tensor(self.scale_).to(device, torch.float64)

    def _after_step(self, rbm: RBM) -> None:
        rbm.visible_log_variance.clamp_(min=math.log(self.min_variance))

    def _load(self, rbm: RBM) -> None:
        device = rbm.weights.device
        mean, scale = self._frame(device)
        weights, visible, hidden, variance = (
            _tensor(value).to(device, torch.float64)
            for value in (self.components_, self.intercept_visible_, self.intercept_hidden_, self.variance_)
        )
        rbm.weights.copy_(weights.mT / scale[:, None])
        rbm.visible_bias.copy_((visible - mean) / scale)
        rbm.visible_log_variance.copy_((variance / scale.square()).log())
        # Contribution of the mean to the input of the hidden units.
        rbm.hidden_bias.copy_(hidden + weights @ (mean / variance))

    def _publish(self, rbm: RBM, form: Form) -> None:
        for name, value in self._of_rows(rbm).items():
            setattr(self, name, form.give(value))

    def _of_rows(self, rbm: RBM) -> dict[str, Tensor]:
        """Return the attributes of the machine in the units of the data, float64."""
        mean, scale = self._frame(rbm.weights.device)
        variance = rbm.visible_log_variance.double().exp() * scale.square()
        weights = rbm.weights.double().mT * scale
        return {
            "components_": weights,
            "intercept_visible_": mean + scale * rbm.visible_bias.double(),
            "intercept_hidden_": rbm.hidden_bias.double() - weights @ (mean / variance),
            "variance_": variance,
        }

    def _machine_of_rows(self) -> RBM:
        rbm = copy.deepcopy(self._machine())
        found = self._of_rows(rbm)
        rbm.weights.copy_(found["components_"].mT)
        rbm.visible_bias.copy_(found["intercept_visible_"])
        rbm.hidden_bias.copy_(found["intercept_hidden_"])
        rbm.visible_log_variance.copy_(found["variance_"].log())
        return rbm

    def _show(self, rbm: RBM, visible: Tensor) -> float:
        return float((rbm.visible_mean(rbm.hidden_mean(visible)) - visible).square().mean())


def _moments(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each feature, (D,), float64, in one pass.

    References:
        Chan, Golub & LeVeque, "Algorithms for computing the sample variance", 1983, equation 2.1.
    """
    count, mean, scatter = 0, None, None
    for block in rows.blocks():
        x = block.double()
        own = x.mean(0)
        inner = (x - own).square().sum(0)
        if mean is None or scatter is None:
            count, mean, scatter = len(x), own, inner
            continue
        step, total = own - mean, count + len(x)
        scatter = scatter + inner + step.square() * (count * len(x) / total)
        mean, count = mean + step * (len(x) / total), total
    assert mean is not None
    assert scatter is not None
    return mean, scatter / count
