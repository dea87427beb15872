"""The base class of the estimators: training a machine, and evaluating a trained one.

N rows, D features, H components: hidden units.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from toolkit._checkpoint import fingerprint
from toolkit._checks import choice, integer, level, number
from toolkit._data import Array, Form, RandomState, from_numpy, generator_of, is_chunked
from toolkit._divergence import DivergenceError
from toolkit._progress import Progress
from toolkit._run import Course
from toolkit.blocks import no_graph
from toolkit.rbm.annealing import ais
from toolkit.rbm.estimators._notice import Notice
from toolkit.rbm.estimators._rows import Check, Epoch, Rows, read_rows
from toolkit.rbm.estimators._trainer import Method, Options, Trainer, trainer_of
from toolkit.rbm.machine.enumeration import ENUMERABLE_UNITS
from toolkit.rbm.machine.model import RBM, HiddenUnits, VisibleUnits
from toolkit.rbm.training.fused import FusedTrainer
from toolkit.rbm.training.loop import Plan, run_training
from toolkit.rbm.training.schedules import Schedule as Rates
from toolkit.rbm.training.schedules import linear_decay

__all__ = ["BaseRBM", "Callback", "Schedule"]

Schedule: TypeAlias = Literal["constant", "linear"]
Callback: TypeAlias = Callable[[int, RBM], None]

# Units of the smaller layer up to which `sample` enumerates their states.
_TABLED_UNITS = 20

# Chains and temperatures of an estimate of log Z.
_ANNEALED = 500, 1000

# If `n_chains` is None: as many chains as a batch has rows, at most the number of rows, but 100 at least; and at most
# the second number in `partial_fit`.
_CHAINS, _MOST_CHAINS = 100, 10_000

# Lines of progress of a fit.
_LINES = 100

# Parameters that may change when a fit resumes from a checkpoint; a random state is compared separately.
_FREE = frozenset({"n_iter", "verbose", "random_state", "checkpoint", "callback"})

# Softplus evaluations for the rows that show progress.
_SHOWN = 2**22


@dataclass(frozen=True)
class _Training:
    rbm: RBM
    trainer: Trainer
    options: Options


class BaseRBM(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A restricted Boltzmann machine with scikit-learn's interface.

    Results are computed from the public attributes, which a user may set. A subclass defines the kind of visible units,
    and the coordinates in which the machine sees the data.
    """

    n_components: int
    learning_rate: float | None
    batch_size: int | None
    n_iter: int | None
    verbose: int | None
    random_state: RandomState
    method: Method
    gibbs_steps: int
    n_chains: int | None
    n_temperatures: int
    fast_rate: float | None
    offset_rate: float | Literal["auto"] | None
    weight_decay: float
    schedule: Schedule | None
    average_from: float | None
    checkpoint: str | os.PathLike[str] | None
    callback: Callback | None

    components_: Array
    intercept_hidden_: Array
    intercept_visible_: Array

    _visible_units: ClassVar[VisibleUnits]

    # Numbers that the estimator chooses if they are None.
    _automatic: ClassVar[frozenset[str]] = frozenset({"fast_rate"})

    # --- hooks ---

    def _rate(self, n_features: int) -> float:
        """Return the learning rate at the beginning of a fit."""
        assert self.learning_rate is not None
        return float(self.learning_rate)

    def _constant_rate(self, n_features: int) -> float:
        """Return the learning rate of `partial_fit`."""
        return self._rate(n_features)

    def _rates(self, rate: float) -> float | Rates:
        """Return the learning rate of a fit, or its schedule, from the rate at the beginning."""
        return rate if self.schedule == "constant" else linear_decay(rate)

    @property
    def _offset(self) -> float | None:
        """The weight of a batch in the offsets; None without centring."""
        return None if self.offset_rate is None else float(self.offset_rate)

    def _rows_of_a_batch(self) -> int:
        """Return the number of rows of a batch of a fit."""
        assert self.batch_size is not None
        return int(self.batch_size)

    def _epochs(self, n_batches: int) -> int:
        """Return the number of epochs of a fit, for a number of batches per epoch."""
        assert self.n_iter is not None
        return int(self.n_iter)

    @property
    def _hidden_units(self) -> HiddenUnits:
        return "bernoulli"

    def _check_values(self, block: Tensor) -> None:
        """Raise ValueError for data that the units cannot have."""

    def _check_more(self) -> None:
        """Raise ValueError for the first parameter of the subclass that is out of range."""

    def _set_coordinates(self, rows: Rows, form: Form) -> dict[str, Tensor]:
        """Learn the coordinates; return the visible parameters at which training starts, float64."""
        raise NotImplementedError

    def _to_machine(self, block: Tensor) -> Tensor:
        """Return rows in the coordinates of the machine."""
        raise NotImplementedError

    def _to_training(self, block: Tensor) -> Tensor:
        """Return checked rows in the coordinates of the machine, for training."""
        return self._to_machine(block)

    def _from_machine(self, visible: Tensor) -> Tensor:
        """Return visible units of the machine as rows."""
        return visible

    def _set_start(self, rbm: RBM) -> None:
        """Change the parameters at which `fit` starts."""

    def _after_step(self, rbm: RBM) -> None:
        """Project the parameters onto their valid range."""

    def _load(self, rbm: RBM) -> None:
        """Set the parameters of a machine from the public attributes."""
        rbm.weights.copy_(_tensor(self.components_).mT)
        rbm.hidden_bias.copy_(_tensor(self.intercept_hidden_))
        rbm.visible_bias.copy_(_tensor(self.intercept_visible_))

    def _publish(self, rbm: RBM, form: Form) -> None:
        """Set the public attributes from the parameters of a machine."""
        self.components_ = form.give(rbm.weights.mT)
        self.intercept_hidden_ = form.give(rbm.hidden_bias)
        self.intercept_visible_ = form.give(rbm.visible_bias)

    # --- training ---

    @no_graph()
    def fit(self, X: object, y: object = None) -> Self:
        """Train a new machine.

        Args:
            X: (N, D): an array, a tensor, a sparse matrix, or chunks of rows that can be read again for each epoch: a
                list, a data loader, or a function that returns an iterator. Only one chunk is in memory at a time; of a
                sparse matrix or a large memory-mapped array, one dense block of a few megabytes.
            y: Ignored.

        Returns:
            The estimator.

        Raises:
            TypeError: If `X` is complex, a sparse tensor, or chunks that can be read only once.
            ValueError: If a parameter is out of range; if `X` is empty, has a wrong shape, is not finite, or has values
                that are invalid for the visible units; or if `checkpoint` belongs to a fit of other data, parameters,
                or random state, or of more epochs.
            DivergenceError: If the parameters became infinite.
        """
        self._check_parameters()
        generator = generator_of(self.random_state)
        rows, form = read_rows(self, X, reset=True, check=self._check_values)
        self._forget()
        self._generator, self._form, self._n_batches = generator, form, 0
        self._most_chains = max(rows.n_rows, _CHAINS)
        rbm = self._new_machine(rows)
        self._set_start(rbm)
        batch_size = min(self._rows_of_a_batch(), rows.n_rows)
        n_batches = math.ceil(rows.n_rows / batch_size)
        epochs, rate = self._epochs(n_batches), self._rate(rbm.n_visible)
        trainer = self._trainer_for(rbm, batch_size, rate)
        shown_every = math.ceil(epochs / _LINES)
        with Progress(
            verbose=int(self.verbose or 0), interval=1, callback=None, step="epoch", measure=self._measure
        ) as progress:
            shown = self._shown_rows(rows, rbm) if self.verbose else None
            progress.begin(f"{type(self).__name__}: {rows.n_rows} rows, {epochs} epochs")
            notice = Notice(type(self).__name__, epochs, n_batches) if self.verbose is None else None

            def after(update: int, _: int) -> None:
                self._after_step(rbm)
                if notice is not None:
                    notice(update)
                if update % n_batches:
                    return
                epoch = update // n_batches
                if shown is not None and (epoch % shown_every == 0 or epoch == epochs):
                    progress(epoch, self._show(rbm, shown))
                if self.callback is not None:
                    self.callback(epoch, rbm)

            if epochs:
                course = Course(
                    epochs=epochs,
                    checkpoint=self.checkpoint,
                    checkpoint_every=n_batches,
                    callback=after,
                    resumed=lambda update: progress.say(f"goes on from update {update} of {epochs * n_batches}"),
                )
                plan = Plan(
                    self._rates(rate),
                    generator,
                    rows.n_rows,
                    average_from=self.average_from,
                    belongs_to=self._belongs_to(),
                )
                data = Epoch(rows, generator, batch_size, self._to_training)
                run_training(cast(FusedTrainer, trainer), data, course, plan)
        self.n_iter_ = epochs
        self._set(rbm, trainer)
        return self

    @no_graph()
    def partial_fit(self, X: object, y: object = None) -> Self:
        """Take one step of training with a batch of any size, whose gradient is the mean over its rows.

        The first batch also sets the initial parameters. After `fit`, training continues from its parameters and
        chains. The learning rate is constant.

        Args:
            X: (B, D), as in `fit`, or chunks, each of which is a batch; these may be an iterator.
            y: Ignored.

        Returns:
            The estimator.

        Raises:
            TypeError: If `X` is complex or a sparse tensor.
            ValueError: As for `fit`.
            DivergenceError: If the parameters became infinite.
        """
        if is_chunked(X):
            for chunk in cast("Iterable[Any]", X() if callable(X) else X):
                self.partial_fit(chunk[0] if isinstance(chunk, list | tuple) else chunk)
            return self
        self._check_parameters()
        first = not hasattr(self, "components_")
        rows, form = read_rows(self, X, reset=first, check=self._check_values)
        if first:
            self._forget()
            self._generator, self._form, self._n_batches = generator_of(self.random_state), form, 0
            self._most_chains = _MOST_CHAINS
            rbm = self._new_machine(rows)
            self.n_iter_ = 0
        else:
            rbm = self._machine()
        rate = self._constant_rate(rbm.n_visible)
        trainer = self._trainer_for(rbm, max(min(self._rows_of_a_batch(), _MOST_CHAINS), rows.n_rows), rate)
        batch = torch.cat([self._to_training(block.to(rbm.weights.device)) for block in rows.blocks()])
        trainer.step(batch, learning_rate=rate)
        self._after_step(rbm)
        name = next((name for name, parameter in rbm.named_parameters() if not bool(parameter.isfinite().all())), None)
        if name is not None:
            del self._training
            raise DivergenceError(
                f"Training diverged: `{name}` is not finite after this batch; the attributes keep their last values. "
                "Lower the learning rate.",
                update=self._n_batches + 1,
                last_good=self._n_batches,
                name=name,
            )
        self._n_batches += 1
        self._set(rbm, trainer)
        return self

    def _belongs_to(self) -> dict[str, Any]:
        """Return the values that identify a checkpoint: all parameters except those that may change on resuming."""
        found = {name: value for name, value in self.get_params(deep=False).items() if name not in _FREE}
        if isinstance(self.random_state, torch.Generator):
            found["random_state"] = self.random_state.initial_seed()
        elif isinstance(self.random_state, int | np.integer):  # other kinds cannot be compared
            found["random_state"] = int(self.random_state)
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in found.items()}

    def _new_machine(self, rows: Rows) -> RBM:
        """Return the initial machine of training."""
        form = self._form
        visible = self._set_coordinates(rows, form)
        rbm = self._made(len(visible["visible_bias"]), int(self.n_components), form, self._generator)
        if self._visible_units == "bernoulli":
            self._reference = visible["visible_bias"].cpu()
        for name, value in visible.items():
            getattr(rbm, name).copy_(value)
        return rbm

    def _machine(self) -> RBM:
        """Return the machine in its coordinates, with parameters from the public attributes."""
        n_hidden, n_visible = self.components_.shape
        last, form = self._last(), self._answer_form
        if last is not None and last.rbm.weights.shape == (n_visible, n_hidden):
            rbm = last.rbm
        else:
            rbm = self._made(n_visible, n_hidden, form, torch.Generator())
        self._load(rbm)
        return rbm

    def _made(self, n_visible: int, n_hidden: int, form: Form, generator: torch.Generator) -> RBM:
        """Return a machine of the units of the estimator."""
        return RBM(
            n_visible,
            n_hidden,
            visible=self._visible_units,
            hidden=self._hidden_units,
            generator=generator,
            device=form.device,
            dtype=form.dtype,
        )

    def _trainer_for(self, rbm: RBM, batch_size: int, rate: float) -> Trainer:
        """Return the trainer of a machine, which continues from the last training."""
        most = min(self._rows_of_a_batch(), getattr(self, "_most_chains", _MOST_CHAINS))
        options = Options(
            method=self.method,
            steps=int(self.gibbs_steps),
            n_chains=int(most if self.n_chains is None else self.n_chains),
            n_temperatures=int(self.n_temperatures),
            fast_rate=rate if self.fast_rate is None else float(self.fast_rate),
            offset_rate=self._offset,
            weight_decay=float(self.weight_decay),
        )
        last = self._last()
        if last is not None and last.options == options and last.rbm is rbm and last.trainer.batch_size >= batch_size:
            return last.trainer
        trainer = trainer_of(rbm, options, batch_size=batch_size, generator=self._draws(rbm.weights.device))
        before = (last.options, last.trainer.state_dict()) if last else getattr(self, "_resume", None)
        if before is not None and before[0] == options:
            trainer.load_state_dict(before[1])
        self._training = _Training(rbm, trainer, options)
        return trainer

    def _last(self) -> _Training | None:
        """Return the training that `partial_fit` continues, if it is still in memory."""
        return getattr(self, "_training", None)

    def _set(self, rbm: RBM, trainer: Trainer) -> None:
        """Set the public attributes."""
        self._publish(rbm, self._form)
        if trainer.chains is not None:
            chains = trainer.chains
            self.h_samples_ = self._form.give(chains[-1] if chains.ndim == 3 else chains)

    def _forget(self) -> None:
        for name in ("_training", "_resume", "_reference", "_log_partition", "h_samples_"):
            if hasattr(self, name):
                delattr(self, name)

    def _draws(self, device: torch.device) -> torch.Generator:
        """Return a generator on a device: the estimator's own, or a new one seeded from it."""
        own = self._own_generator()
        if own.device == device:
            return own
        key = str(device)
        others: dict[str, torch.Generator] = self.__dict__.setdefault("_generators", {})
        if key not in others:
            seed = int(torch.randint(2**31 - 1, (), generator=own, device=own.device))
            others[key] = torch.Generator(device).manual_seed(seed)
        return others[key]

    def _own_generator(self) -> torch.Generator:
        if not hasattr(self, "_generator"):
            self._generator = generator_of(self.random_state)
        return self._generator

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with the part of training that is needed to continue."""
        state = dict(super().__getstate__())
        training: _Training | None = state.pop("_training", None)
        if training is not None:
            state["_resume"] = training.options, training.trainer.state_dict()
        return state

    # --- answers ---

    @property
    def rbm_(self) -> RBM:
        """A copy of the trained machine as a module, for rows in the units of the data."""
        check_is_fitted(self, "components_")
        with no_graph():
            return self._machine_of_rows()

    def _machine_of_rows(self) -> RBM:
        raise NotImplementedError

    @property
    def _answer_form(self) -> Form:
        """The form of attributes and draws: array or tensor, like the first rows."""
        form: Form | None = getattr(self, "_form", None)
        return Form.of(self.components_) if form is None else form

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    @no_graph()
    def transform(self, X: object) -> Array:
        """Return the means of the hidden units given the data.

        Args:
            X: (N, D), as in `fit`; any finite values.

        Returns:
            (N, H).

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: If `X` does not have the features that were fitted, or is not finite.
        """
        return self._answer(X, lambda rbm, visible: rbm.hidden_mean(visible))

    @no_graph()
    def reconstruct(self, X: object) -> Array:
        """Return the means of the visible units, with the hidden units at their means given the data.

        Args:
            X: (N, D), as in `transform`.

        Returns:
            (N, D), in the units of the data.

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: If `X` does not have the features that were fitted, or is not finite.
        """
        return self._answer(X, lambda rbm, v: self._from_machine(rbm.visible_mean(rbm.hidden_mean(v))))

    @no_graph()
    def gibbs(self, X: object) -> Array:
        """Take one Gibbs step from the data: draw the hidden units, and then the visible ones.

        Each call continues the draws of `random_state`.

        Args:
            X: (N, D), as in `transform`.

        Returns:
            (N, D), in the units of the data.

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: If `X` does not have the features that were fitted, or is not finite.
        """

        def step(rbm: RBM, visible: Tensor) -> Tensor:
            draws = self._draws(visible.device)
            hidden = rbm.sample_hidden(visible, generator=draws)
            return self._from_machine(rbm.sample_visible(hidden, generator=draws))

        return self._answer(X, step)

    @no_graph()
    def sample(self, n_samples: int = 1, *, steps: int = 1000) -> Array:
        """Draw from the model.

        If one of the layers has at most 20 binary units, draws are exact, from all states of this layer. Otherwise
        draws are by Gibbs chains that start at the ends of the training chains; if the model has distant modes, the
        chains may stay in their modes.

        Args:
            n_samples: Number of samples, N.
            steps: Gibbs steps of the chains.

        Returns:
            (N, D), in the units of the data.

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: If `n_samples` or `steps` is not a positive integer.
        """
        check_is_fitted(self, "components_")
        n_samples, steps = integer("n_samples", n_samples, 1), integer("steps", steps, 1)
        rbm = self._machine()
        draws = self._draws(rbm.weights.device)
        if _fewest_states(rbm) <= 2**_TABLED_UNITS:
            visible, _ = rbm.sample_exactly(n_samples, generator=draws)
        else:
            chains = getattr(self, "h_samples_", None)
            hidden = rbm.hidden_bias.new_zeros(1, rbm.n_hidden) if chains is None else _tensor(chains).to(rbm.weights)
            hidden = hidden[torch.randint(len(hidden), (n_samples,), generator=draws, device=draws.device)]
            visible = rbm.sample_visible(hidden, generator=draws)
            for _ in range(steps):
                visible = rbm.sample_visible(rbm.sample_hidden(visible, generator=draws), generator=draws)
        return self._answer_form.give(self._from_machine(visible))

    def _volume(self) -> float:
        """Return the log-density in the machine's coordinates minus that in the units of the data, nats."""
        return 0.0

    @property
    def log_partition_(self) -> float:
        """Log Z of the machine in the coordinates of training, nats, as used by `log_likelihood`."""
        check_is_fitted(self, "components_")
        with no_graph():
            rbm = copy.deepcopy(self._machine()).double()
            # As integers, whose fingerprint is that of all bits: of the numbers, it would be two sums.
            key = [fingerprint(p.view(torch.int64), most=sys.maxsize) for p in rbm.parameters()]
            known: tuple[object, float] | None = getattr(self, "_log_partition", None)
            if known is None or known[0] != key:
                known = self._log_partition = key, self._find_log_partition(rbm)
        return known[1]

    def _find_log_partition(self, rbm: RBM) -> float:
        if _fewest_states(rbm) <= 2**ENUMERABLE_UNITS:
            return float(rbm.log_partition())
        reference = getattr(self, "_reference", None)
        return ais(
            rbm,
            chains=_ANNEALED[0],
            inverse_temperatures=_ANNEALED[1],
            reference=None if reference is None else reference.to(rbm.weights),
            # A generator with a fixed seed, so that a score is the same each time.
            generator=torch.Generator(rbm.weights.device).manual_seed(0),
        ).estimate

    @no_graph()
    def log_likelihood(self, X: object) -> Array:
        """Return the log-likelihood of each row, exactly where a layer can be enumerated.

        If both layers have more than 2^25 states, log Z is estimated by annealed importance sampling with 500 chains
        and 1000 temperatures. The log-likelihood is then too high in expectation; `toolkit.rbm.sandwich` of `rbm_`
        estimates by how much.

        Args:
            X: (N, D), as in `fit`.

        Returns:
            (N,), nats; for real numbers the log-density in the units of the data.

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: If `X` does not have the features that were fitted, is not finite, or has values that are
                invalid for the visible units; binary units have a likelihood only for values from 0 to 1.
        """
        check_is_fitted(self, "components_")
        log_partition, volume = self.log_partition_, self._volume()
        return self._answer(
            X,
            lambda rbm, visible: -rbm.free_energy(visible) - log_partition - volume,
            precise=True,
            check=self._check_values,
        )

    def score_samples(self, X: object) -> Array:
        """Return a score of each row, (N,), nats."""
        raise NotImplementedError

    def score(self, X: object, y: object = None) -> float:
        """Return the mean of `score_samples`, in nats.

        Args:
            X: (N, D), as in `transform`.
            y: Ignored.

        Raises:
            NotFittedError: If the machine is not trained.
            ValueError: As for `score_samples`.
        """
        return float(self.score_samples(X).mean())

    def _answer(
        self,
        x: object,
        function: Callable[[RBM, Tensor], Tensor],
        *,
        precise: bool = False,
        check: Check = lambda block: None,
    ) -> Array:
        """Return a function of the machine for each row, block by block, in the form of the rows."""
        check_is_fitted(self, "components_")
        rows, form = read_rows(self, x, reset=False, check=check)
        rbm = self._machine()
        dtype = torch.float64 if precise else rbm.weights.dtype
        if (rbm.weights.device, rbm.weights.dtype) != (form.device, dtype):
            rbm = copy.deepcopy(rbm).to(form.device, dtype)
        answers = [function(rbm, self._to_machine(block).to(rbm.weights.dtype)) for block in rows.blocks()]
        return form.give(torch.cat(answers))

    # --- progress ---

    _measure: ClassVar[str] = "nats per sample"

    def _shown_rows(self, rows: Rows, rbm: RBM) -> Tensor:
        """Return the rows whose score shows the progress of training: few, so that scoring takes little time."""
        count = min(rows.n_rows, max(_SHOWN // rbm.weights.numel(), 16))
        kept: list[Tensor] = []
        blocks: Iterator[Tensor] = rows.blocks()
        while (missing := count - sum(map(len, kept))) > 0:
            kept.append(next(blocks)[:missing].clone())
        return self._to_machine(torch.cat(kept)).to(rbm.weights.dtype)

    def _show(self, rbm: RBM, visible: Tensor) -> float:
        raise NotImplementedError

    # --- parameters ---

    def _check_parameters(self) -> None:
        """Raise ValueError for the first parameter that is out of range."""
        for name, least in (
            ("n_components", 1),
            ("batch_size", 1),
            ("n_iter", 0),
            ("gibbs_steps", 1),
            ("n_temperatures", 2),
        ):
            if getattr(self, name) is not None or name not in self._automatic:
                integer(name, getattr(self, name), least)
        if self.n_chains is not None:
            integer("n_chains", self.n_chains, 1)
        if self.verbose is not None:
            level(self.verbose)
        if not isinstance(self.checkpoint, str | os.PathLike | None):
            raise ValueError(f"`checkpoint` should be a path, or None. Found {self.checkpoint!r}.")
        number("weight_decay", self.weight_decay, least=0)
        for name in ("learning_rate", "fast_rate"):
            if getattr(self, name) is not None or name not in self._automatic:
                number(name, getattr(self, name), above=0)
        if self.offset_rate is not None and not (self.offset_rate == "auto" and "offset_rate" in self._automatic):
            number("offset_rate", self.offset_rate, above=0, most=1)
        if self.average_from is not None:
            number("average_from", self.average_from, least=0, below=1)
        choice("method", self.method, get_args(Method))
        if self.schedule is not None or "schedule" not in self._automatic:
            choice("schedule", self.schedule, get_args(Schedule))
        if self.callback is not None and not callable(self.callback):
            raise ValueError(f"`callback` should be a function, or None. Found {self.callback!r}.")
        self._check_more()

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _fewest_states(rbm: RBM) -> float:
    """Return the number of states of the layer with fewer states."""
    counts = (rbm.joint.hidden.n_states, rbm.joint.visible.n_states)
    return min(math.inf if count is None else count for count in counts)


def _tensor(attribute: object) -> Tensor:
    return attribute if isinstance(attribute, Tensor) else from_numpy(np.asarray(attribute))
