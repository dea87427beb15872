r"""The Bernoulli machine with scikit-learn's interface.

N rows, D features, H components: hidden units.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from toolkit._checks import number
from toolkit._data import Array, Form, RandomState
from toolkit.blocks import no_graph
from toolkit.rbm.estimators._base import BaseRBM, Callback, Schedule
from toolkit.rbm.estimators._rows import Rows
from toolkit.rbm.estimators._trainer import Method
from toolkit.rbm.evaluation import pseudo_log_likelihood
from toolkit.rbm.machine.layers import log_one_plus_exp
from toolkit.rbm.machine.model import RBM, VisibleUnits
from toolkit.rbm.training.schedules import Schedule as Rates
from toolkit.rbm.training.schedules import linear_decay

__all__ = ["BernoulliRBM"]

# Tuned on digits of 8 x 8 and 28 x 28 pixels with 16 to 500 components, by the likelihood of held-out rows.
_RATE, _HIGHEST_RATE, _OFFSET_RATE = 3.2, 0.4, 0.1
_BATCH, _UPDATES, _LEAST_EPOCHS = 100, 30_000, 10

# scikit-learn's, for fits with one of its arguments. Steps are longer, because they shrink in the second half.
_THEIR_EPOCHS, _THEIR_BATCH, _THEIR_RATE, _LONGER = 10, 10, 0.1, 2

# Numbers of a block of the pseudo-likelihood, (B, D, H).
_BLOCK = 2**20

# Numbers up to this far beyond 1 are rounding of 1: MinMaxScaler gives 1 + 2e-16.
_ROUNDING = 1e-6


@dataclass(eq=False, repr=False)
class BernoulliRBM(BaseRBM):
    r"""A restricted Boltzmann machine of zeros and ones, or probabilities of ones, with scikit-learn's interface.

    Parameters, attributes and methods have the names and meanings of ``sklearn.neural_network.BernoulliRBM``, with
    these differences:

    - **Batches.** Rows are in a new random order in each epoch. Each side of an update is a mean over its own rows,
      also for a smaller last batch, and for a batch of any size in `partial_fit`, which returns the estimator.
    - **Training.** The visible biases start at the frequencies of the data, gradients are centred and weights decay.
      The learning rate falls to 0, and there are more updates, for the best likelihood. If one of `learning_rate`,
      `batch_size` and `n_iter` is given, scikit-learn's defaults hold for the others, gradients are plain, and in `fit`
      visible biases start at 0. scikit-learn's own training is ``learning_rate=0.1, batch_size=10, n_iter=10,
      offset_rate=None, weight_decay=0, schedule="constant"``.
    - **`score_samples`** is deterministic: the expectation of scikit-learn's score, which draws one feature at random.
    - **Data** must be between 0 and 1 in training and in scores. Other values raise an error, unless `binarize` is
      given.

    New features are methods other than persistent chains, the exact log-likelihood, samples of the model,
    reconstruction, tensors on any device, and chunks of rows.

    Args:
        n_components: Number of hidden units, H.
        learning_rate: The step size; see `schedule`. None: 0.1 if `batch_size` or `n_iter` is given, else
            :math:`3.2 / \sqrt D`, at most 0.4; a quarter of that in `partial_fit`, where the rate is constant.
        batch_size: Rows of a batch. None: 10 if `learning_rate` or `n_iter` is given, else 100.
        n_iter: Epochs, passes over all rows. None: enough for 30,000 updates, and at least 10; 10 if
            `learning_rate` or `batch_size` is given.
        verbose: 1 shows progress, 2 also the time. None: a fit of more than two seconds prints one line, with the time
            that is left, to stderr. 0: nothing.
        random_state: An integer, a numpy.random.RandomState, a torch.Generator, or None for NumPy's global state.
        method: Source of the negative samples of an update. ``"pcd"``: chains that continue from update to update.
            ``"cd"``: `gibbs_steps` from the data. ``"fpcd"``: persistent chains driven by fast weights.
            ``"tempering"``: persistent chains at several temperatures that are swapped. ``"exact"``: all states of the
            smaller layer, if it is small.
        gibbs_steps: Gibbs steps of the chains in an update.
        n_chains: Number of persistent chains. None: `batch_size`, but at most the larger of the number of rows and 100;
            in `partial_fit`, which does not know the number of rows, at most 10,000.
        n_temperatures: Number of temperatures of ``"tempering"``.
        fast_rate: The learning rate of the fast weights of ``"fpcd"``. None: `learning_rate`.
        offset_rate: Weight of each batch in the running means that are the offsets of centred coordinates. None: plain
            gradients. ``"auto"``: None if `learning_rate`, `batch_size` or `n_iter` is given, else 0.1.
        weight_decay: Factor of the penalty, half the squared weights.
        schedule: ``"linear"``: the learning rate falls to 0 over the epochs. ``"constant"``: it stays the same. None:
            ``"linear"``; but if `learning_rate`, `batch_size` or `n_iter` is given, twice the rate in the first half of
            training, falling to 0 in the second.
        average_from: The fraction of training after which parameters are averaged; the result is their mean. None: no
            averaging; the result is the last parameters.
        binarize: Features above this threshold become 1, others 0. None: data are zeros and ones, or probabilities.
        checkpoint: A file to which `fit` writes its progress. If the file exists, `fit` resumes, with the same bits as
            without the interruption. The file belongs to one fit: to its data, parameters and random state (if this is
            a number or a generator); only `n_iter` may be larger. Searches over parameters and folds need one file for
            each fit. None: no checkpoint.
        callback: Called after each epoch with its number and the machine.

    Attributes:
        components_: (H, D), weights.
        intercept_hidden_: (H,), hidden biases.
        intercept_visible_: (D,), visible biases.
        h_samples_: (M, H), hidden states of the persistent chains; only for methods with persistent chains.
        log_partition_: Log Z, nats.
        rbm_: The machine as a `toolkit.rbm.RBM`.
        n_iter_: Epochs of the last `fit`.
        n_features_in_: Number of features, D.
        feature_names_in_: (D,), if the rows have feature names.

    References:
        Tieleman, "Training restricted Boltzmann machines using approximations to the likelihood gradient", 2008.
        Melchior, Fischer & Wiskott, "How to center deep Boltzmann machines", 2016.

    Example:
        >>> x = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.uint8).repeat(50, 1)
        >>> machine = BernoulliRBM(2, learning_rate=0.05, n_iter=1000, random_state=0).fit(x)
        >>> machine.transform(x).shape, bool(machine.log_likelihood(x).mean() > -1.5)  # log 1/2 at best
        (torch.Size([100, 2]), True)
    """

    _visible_units: ClassVar[VisibleUnits] = "bernoulli"
    _measure: ClassVar[str] = "nats per sample of pseudo-log-likelihood"
    _automatic: ClassVar[frozenset[str]] = BaseRBM._automatic | {
        "learning_rate",
        "batch_size",
        "n_iter",
        "offset_rate",
        "schedule",
    }

    n_components: int = 256
    _: KW_ONLY
    learning_rate: float | None = None
    batch_size: int | None = None
    n_iter: int | None = None
    verbose: int | None = None
    random_state: RandomState = None
    method: Method = "pcd"
    gibbs_steps: int = 1
    n_chains: int | None = None
    n_temperatures: int = 10
    fast_rate: float | None = None
    offset_rate: float | Literal["auto"] | None = "auto"
    weight_decay: float = 1e-3
    schedule: Schedule | None = None
    average_from: float | None = None
    binarize: float | None = None
    checkpoint: str | os.PathLike[str] | None = None
    callback: Callback | None = None

    @no_graph()
    def score_samples(self, X: object) -> Array:
        r"""Return the pseudo-log-likelihood of each row: the log-probability of each feature given the others, summed.

        .. math::
            \sum_i \log p(v_i \mid v_{-i}) = \sum_i \log \sigma(F(v \text{ with } 1 - v_i) - F(v))

        scikit-learn draws one i at random and multiplies its term by D; this score is its expectation. The score needs
        no log Z, but ranks models differently from the likelihood, `log_likelihood`.

        Args:
            X: (N, D), as in `fit`.

        Returns:
            (N,), nats.

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: If `X` does not have the features that were fitted, is not finite, or is not between 0 and 1.

        References:
            Besag, "Statistical analysis of non-lattice data", 1975.
        """
        return self._answer(X, _pseudo_log_likelihood, check=self._check_values)

    # --- hooks ---

    def _rate(self, n_features: int) -> float:
        if self.learning_rate is not None:
            return super()._rate(n_features)
        return _THEIR_RATE if self._is_short else _best_rate(n_features)

    def _constant_rate(self, n_features: int) -> float:
        return super()._rate(n_features) if self.learning_rate is not None else _best_rate(n_features) / 4

    @property
    def _offset(self) -> float | None:
        if self.offset_rate != "auto":
            return super()._offset
        return None if self._is_short else _OFFSET_RATE

    @property
    def _is_short(self) -> bool:
        """Whether a fit takes scikit-learn's time: one of its arguments of training is given."""
        return any(value is not None for value in (self.learning_rate, self.batch_size, self.n_iter))

    def _rates(self, rate: float) -> float | Rates:
        if self.schedule is not None or not self._is_short:
            return super()._rates(rate)
        return linear_decay(_LONGER * rate, hold=0.5)

    def _rows_of_a_batch(self) -> int:
        if self.batch_size is not None:
            return super()._rows_of_a_batch()
        return _THEIR_BATCH if self._is_short else _BATCH

    def _epochs(self, n_batches: int) -> int:
        if self.n_iter is not None:
            return super()._epochs(n_batches)
        return _THEIR_EPOCHS if self._is_short else max(_LEAST_EPOCHS, math.ceil(_UPDATES / n_batches))

    def _check_more(self) -> None:
        if self.binarize is not None:
            number("binarize", self.binarize)

    def _check_values(self, block: Tensor) -> None:
        if self.binarize is not None or block.dtype == torch.bool or not block.numel():
            return
        least, most = (float(end) for end in block.aminmax())
        if least < -_ROUNDING or most > 1 + _ROUNDING:
            found = least if least < -_ROUNDING else most
            raise ValueError(
                f"`X` should be between 0 and 1. Found {found}. Scale it, with `MinMaxScaler(clip=True)` for rows that "
                "were not fitted, or give `binarize`, above which values are 1."
            )

    def _set_coordinates(self, rows: Rows, form: Form) -> dict[str, Tensor]:
        count = torch.stack([self._to_training(block).sum(0, dtype=torch.float64) for block in rows.blocks()]).sum(0)
        return {"visible_bias": ((count + 1) / (rows.n_rows - count + 1)).log()}

    def _set_start(self, rbm: RBM) -> None:
        if self._is_short:  # biases of the data leave less to the weights, whose features are worse after few epochs
            rbm.visible_bias.zero_()

    def _to_machine(self, block: Tensor) -> Tensor:
        if self.binarize is not None:
            return block > float(self.binarize)
        return block

    def _to_training(self, block: Tensor) -> Tensor:
        if self.binarize is None and block.is_floating_point():
            return block.clamp(0, 1)
        return self._to_machine(block)

    def _machine_of_rows(self) -> RBM:
        return copy.deepcopy(self._machine())

    def _show(self, rbm: RBM, visible: Tensor) -> float:
        return float(_pseudo_log_likelihood(rbm, visible).mean())


def _best_rate(n_features: int) -> float:
    return min(_HIGHEST_RATE, _RATE / math.sqrt(n_features))


def _pseudo_log_likelihood(rbm: RBM, visible: Tensor) -> Tensor:
    """Return the pseudo-log-likelihood of each row, (N,), from `visible`, (N, D), with values from 0 to 1."""
    visible = visible.to(rbm.weights.dtype)
    if bool(((visible == 0) | (visible == 1)).all()):
        return pseudo_log_likelihood(rbm, visible)
    parts = []
    for v in visible.split(max(1, _BLOCK // rbm.weights.numel())):
        x = (v @ rbm.weights + rbm.hidden_bias)[:, None]
        change = 1 - 2 * v
        flipped = log_one_plus_exp(x + change[..., None] * rbm.weights) - log_one_plus_exp(x)
        parts.append(logsigmoid(-change * rbm.visible_bias - flipped.sum(-1)).sum(-1))
    return torch.cat(parts)
