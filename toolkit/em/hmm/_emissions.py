r"""Emissions of the states of a hidden Markov model: Gaussian vectors, or symbols.

Each kind comes twice: as parameters with differentiable `log_prob` and `m_step`, which are the specification; and, from
`prepare`, as data that are laid out for the fast pass of `toolkit.em.hmm._recursions`.

N steps, D features, M symbols, K states. A chunk has its slots as columns, in the order of the pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from toolkit._checks import broadcasts, number
from toolkit._random import device_of
from toolkit._tensors import floating, integers
from toolkit.blocks import no_graph
from toolkit.em.components import Movable
from toolkit.em.covariance import CovarianceType, Quadratics, Structure, soft_counts, structure_of
from toolkit.em.engine.samples import expanded
from toolkit.em.gaussian import (
    GaussianParameters,
    from_unconstrained,
    moments_of,
    precisions_cholesky,
    to_unconstrained,
)
from toolkit.em.hmm._plan import Plan
from toolkit.em.hmm._recursions import smallest_exponent

__all__ = ["CategoricalEmissions", "Emissions", "GaussianEmissions", "Pass", "Prepared"]

# Largest mean of the squared terms of a distance for which the expansion is used; it loses about a tenth of an epsilon
# of that.
_NARROW = {torch.float32: 30.0, torch.float64: 1e5}

# Slots of one product of posteriors with expanded data; a longer float32 sum would lose digits.
_TILE = 2**12

# The most quadratic features that are written at once.
_GROUP = 320


class Pass(Protocol):
    """One pass of the emissions, with fixed parameters, over prepared data."""

    def log_prob(self, chunk: int, begin: int, end: int) -> Tensor:
        """Return the log-probabilities or log-densities of some slots of a chunk, (K, end - begin)."""

    def emit(self, chunk: int, begin: int, out: Tensor) -> Tensor:
        """Write scaled emission probabilities, and return the logs of the scales (see `_recursions.Emit`)."""

    def consume(self, chunk: int, posteriors: Tensor) -> None:
        """Add a chunk's posteriors (K, N) to the statistics of the M-step."""

    def finish(self, *, prior: float | Tensor, reg_covar: float, update: str) -> Emissions:
        """Return the emissions of the M-step, updating only these kinds (see `hmm.fit`)."""


class Prepared(Protocol):
    """Data laid out for the fast pass."""

    def begin(self, emissions: Emissions) -> Pass:
        """Return a pass over these data."""


class Emissions(Protocol):
    """The emission distributions of K states."""

    @property
    def n_states(self) -> int:
        """K."""

    def check(self, x: Tensor) -> None:
        """Raise an error unless `x` is data of this kind, with N steps in the first dimension."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-probability or log-density of each step in each state, (N, K), nats."""

    def m_step(self, x: Tensor, posteriors: Tensor, *, prior: float | Tensor = 1.0, reg_covar: float = 0.0) -> Self:
        """Return the emissions that are most likely under posteriors (N, K).

        `prior` are Dirichlet concentrations, for symbols; `reg_covar` is added to variances, for Gaussians.
        """

    def sample(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw an emission of each state (N,)."""

    def unconstrained(self) -> dict[str, Tensor]:
        """Return unconstrained coordinates: every real value is allowed."""

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the emissions at these coordinates."""

    def to(self, target: torch.dtype | torch.device) -> Self:
        """Return the emissions in another floating-point type, or on another device."""

    def prepare(self, x: Tensor, plan: Plan) -> Prepared:
        """Return data laid out for the fast pass."""


# --- Gaussian ---


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianEmissions(Movable):
    """A Gaussian for each state.

    Attributes:
        means: (K, D).
        precisions_cholesky: Shaped by the type, as in `GaussianParameters`.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.

    Raises:
        ValueError: If the type is unknown, or the shapes do not fit together.

    Example:
        >>> two = GaussianEmissions.from_covariances(
        ...     means=torch.tensor([[0.0], [3.0]]), covariances=torch.tensor([1.0, 4.0]), covariance_type="spherical")
        >>> two.log_prob(torch.tensor([[1.0]]))
        tensor([[-1.4189, -2.1121]])
    """

    means: Tensor
    precisions_cholesky: Tensor
    covariance_type: CovarianceType

    def __post_init__(self) -> None:
        _ = self._mixture  # checks the shapes

    @classmethod
    def from_covariances(cls, *, means: Tensor, covariances: Tensor, covariance_type: CovarianceType) -> Self:
        """Return the emissions with these means (K, D) and covariances (shaped by the type).

        Raises:
            ValueError: If a covariance is not positive definite, or the shapes do not fit together.
        """
        factor = precisions_cholesky(covariances, covariance_type)
        return cls(means=means, precisions_cholesky=factor, covariance_type=covariance_type)

    @property
    def n_states(self) -> int:
        """K."""
        return self.means.shape[0]

    @property
    def n_features(self) -> int:
        """D."""
        return self.means.shape[1]

    @property
    def covariances(self) -> Tensor:
        """Shaped by the type."""
        return self._mixture.covariances

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless `x` has shape (N, D)."""
        if x.ndim != 2 or x.shape[1] != self.n_features:
            raise ValueError(f"`x` should have shape (N, {self.n_features}). Found {tuple(x.shape)}.")

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density of each step in each state, (N, K), nats. `x` is (N, D)."""
        return self._mixture.log_joint(x)

    def m_step(self, x: Tensor, posteriors: Tensor, *, prior: float | Tensor = 1.0, reg_covar: float = 0.0) -> Self:
        r"""Return means :math:`\sum_n \gamma_{nk} x_n / N_k` and the covariances about them.

        A state without posteriors keeps its mean and covariance.

        Args:
            x: (N, D).
            posteriors: (N, K).
            prior: Ignored; only symbols have a prior.
            reg_covar: Added to every variance. 0 is maximum likelihood.

        Raises:
            ValueError: If a covariance becomes singular.
        """
        check_prior("prior", prior)
        reg_covar = number("reg_covar", reg_covar, least=0)
        floating(x=x, posteriors=posteriors)
        _, means, scatter = moments_of(x, posteriors, structure_of(self.covariance_type).separate)
        return self._estimate(posteriors.sum(0), means, scatter, reg_covar)

    def sample(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw an emission of each state (N,), (N, D)."""
        integers(states=states)
        shape = (len(states), self.n_features)
        device = device_of(generator, self.means)
        noise = torch.randn(shape, generator=generator, dtype=self.means.dtype, device=device).to(self.means.device)
        structure = structure_of(self.covariance_type)
        return self.means[states] + structure.colour(self.precisions_cholesky, noise, states)

    def unconstrained(self) -> dict[str, Tensor]:
        """Return ``means`` and ``log_cholesky`` (see `to_unconstrained`)."""
        values = to_unconstrained(self._mixture)
        return {name: values[name] for name in ("means", "log_cholesky")}

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the emissions at these coordinates."""
        weights = values["means"].new_zeros(len(values["means"]))
        mixture = from_unconstrained({**values, "log_weights": weights}, self.covariance_type)
        return dataclasses.replace(self, means=mixture.means, precisions_cholesky=mixture.precisions_cholesky)

    def prepare(self, x: Tensor, plan: Plan) -> PreparedGaussian:
        """Return data (N, D) laid out for the fast pass."""
        return PreparedGaussian.of(x, plan)

    @functools.cached_property
    def _mixture(self) -> GaussianParameters:
        return GaussianParameters(
            log_weights=self.means.new_zeros(self.means.shape[:1]),
            means=self.means,
            precisions_cholesky=self.precisions_cholesky,
            covariance_type=self.covariance_type,
        )

    def _estimate(self, counts: Tensor, means: Tensor, scatter: Tensor, reg_covar: float, update: str = "e") -> Self:
        """Return the emissions of counts (K,), means and `separate` scatter about them; empty states keep theirs."""
        kind, structure = self.covariance_type, structure_of(self.covariance_type)
        safe = soft_counts(counts)
        empty = counts < safe
        means = torch.where(empty[:, None], self.means, means)
        if not set(update) & set("ec"):
            return dataclasses.replace(self, means=means if "m" in update else self.means)
        if not set(update) & set("em"):
            # The best covariance about the present means.
            shifts, means = means - self.means, self.means
            scatter = scatter + structure.separate.products(counts[:, None] * shifts, shifts)
        scatter = scatter.sum(0) if structure.is_shared else scatter
        covariances = structure.regularise(structure.estimate(scatter, safe[:, None].expand(means.shape)), reg_covar)
        if not structure.is_shared:
            shape = (-1, *[1] * (covariances.ndim - 1))
            covariances = torch.where(empty.view(shape), self.covariances, covariances)
        return type(self).from_covariances(means=means, covariances=covariances, covariance_type=kind)


@dataclass(frozen=True, eq=False)
class PreparedGaussian:
    """Centred features as rows.

    Attributes:
        centre: (D,), float64.
        widths: (D,), float64: root mean squares of the centred features.
        chunks: (D, N) each.
    """

    centre: Tensor
    widths: Tensor
    chunks: tuple[Tensor, ...]

    @classmethod
    @no_graph()
    def of(cls, x: Tensor, plan: Plan) -> PreparedGaussian:
        """Lay data (N, D) out."""
        centre = x.mean(0, dtype=torch.float64)
        chunks = []
        squares = torch.zeros_like(centre)
        for chunk in plan.chunks:
            rows = x.index_select(0, chunk.steps)
            centred = (rows - centre).to(x.dtype).mT.contiguous()
            squares += centred.square().sum(1, dtype=torch.float64)
            chunks.append(centred)
        return cls(centre, (squares / max(1, len(x))).sqrt(), tuple(chunks))

    def begin(self, emissions: Emissions) -> GaussianPass:
        """Return a pass with these emissions."""
        assert isinstance(emissions, GaussianEmissions)
        return GaussianPass(self, emissions.to(torch.float64))


class GaussianPass:
    """One pass of Gaussian emissions.

    The log-density and the statistics are linear in the quadratic features :math:`(x_i x_j, x_i, 1)`: one matrix
    product each. Where that expansion would cancel too far (`_NARROW`), differences from the means are taken instead.
    """

    def __init__(self, data: PreparedGaussian, emissions: GaussianEmissions) -> None:
        self._data, self._emissions = data, emissions
        structure = structure_of(emissions.covariance_type)
        self._means = emissions.means - data.centre
        k, d = self._means.shape
        log_determinants = emissions._mixture.log_determinants.expand(k)
        self._constant = log_determinants - 0.5 * d * math.log(2 * math.pi)
        # Terms that all states share are kept: the log-density itself is needed, not only its differences between
        # states.
        self._structure: Structure = structure.separate
        factor = emissions.precisions_cholesky
        self._factor = factor.expand(k, *factor.shape) if structure.is_shared else factor
        self._quadratics: list[Quadratics] = self._structure.quadratics(d, _GROUP)
        quadratic, linear = self._structure.coefficients(self._factor, self._means)
        constant = self._constant - 0.5 * (linear * self._means).sum(1)
        theta = torch.cat([quadratic, linear, constant[:, None]], 1)
        dtype = data.chunks[0].dtype if data.chunks else torch.float64
        self._expands = bool(self._structure.largest_terms(self._factor, data.widths).max() < _NARROW[dtype])
        self._theta = theta.to(dtype)
        self._sums = torch.zeros_like(theta)
        self._about_means = theta.new_zeros(self._structure.shape(k, d))

    def emit(self, chunk: int, begin: int, out: Tensor) -> Tensor:
        """Write scaled emissions (see `Pass`)."""
        return scaled(self.log_prob(chunk, begin, begin + out.shape[0] * out.shape[2]), out)

    def log_prob(self, chunk: int, begin: int, end: int) -> Tensor:
        """Return log-densities (see `Pass`)."""
        x = self._data.chunks[chunk][:, begin:end]
        if self._expands:
            return self._theta @ expanded(self._quadratics, x)
        whitened = self._structure.whiten(self._factor, self._differences(x))
        return self._constant[:, None] - 0.5 * whitened.square_().sum(1)

    def consume(self, chunk: int, posteriors: Tensor) -> None:
        """Add a chunk's posteriors (see `Pass`)."""
        x = self._data.chunks[chunk]
        for begin in range(0, x.shape[1], _TILE):
            part, share = x[:, begin : begin + _TILE], posteriors[:, begin : begin + _TILE]
            if self._expands:
                self._sums += share @ expanded(self._quadratics, part).mT
            else:
                self._add_about_means(self._differences(part), share.double())

    def finish(self, *, prior: float | Tensor = 1.0, reg_covar: float = 0.0, update: str = "e") -> GaussianEmissions:
        """Return the M-step's emissions (see `Pass`)."""
        structure, d = self._structure, self._means.shape[1]
        raw, sums, counts = self._sums.split([self._sums.shape[1] - d - 1, d, 1], 1)
        second = structure.second_moments(raw, d) if self._expands else self._about_means
        shifts = sums / soft_counts(counts)
        scatter = second - structure.products(sums, shifts)
        origins = self._data.centre if self._expands else self._emissions.means
        return self._emissions._estimate(counts[:, 0], origins + shifts, scatter, reg_covar, update)

    def _differences(self, x: Tensor) -> Tensor:
        return x.double() - self._means[:, :, None]

    def _add_about_means(self, differences: Tensor, share: Tensor) -> None:
        d = differences.shape[1]
        weighted = share[:, None] * differences
        self._sums[:, -1] += share.sum(1)
        self._sums[:, -1 - d : -1] += weighted.sum(2)
        self._about_means += self._structure.moments(weighted, differences)


def scaled(log_prob: Tensor, out: Tensor) -> Tensor:
    """Write the exponentials of (K, B) as (n_times, K, n_rows), divided by each slot's largest; return its log (B,)."""
    n_times, k, n_rows = out.shape
    largest = log_prob.amax(0)
    # Clamped: an exponential with a denormal result is an order of magnitude slower.
    relative = log_prob.sub_(largest).clamp_(min=smallest_exponent(out.dtype))
    torch.exp(relative.view(k, n_times, n_rows).transpose(0, 1), out=out)
    return largest


# --- symbols ---


@dataclass(frozen=True, kw_only=True, eq=False)
class CategoricalEmissions(Movable):
    """A distribution over symbols 0 to M - 1 for each state.

    Attributes:
        log_probabilities: (K, M), nats. Each row's probabilities sum to 1; minus infinity is a symbol that is never
            emitted.

    Raises:
        ValueError: If `log_probabilities` does not have shape (K, M).

    Example:
        >>> weather = CategoricalEmissions(log_probabilities=torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log())
        >>> weather.log_prob(torch.tensor([0, 1])).exp()
        tensor([[0.9000, 0.2000],
                [0.1000, 0.8000]])
    """

    log_probabilities: Tensor

    def __post_init__(self) -> None:
        if self.log_probabilities.ndim != 2 or 0 in self.log_probabilities.shape:
            raise ValueError(
                f"`log_probabilities` should have shape (K, M). Found {tuple(self.log_probabilities.shape)}."
            )

    @property
    def n_states(self) -> int:
        """K."""
        return self.log_probabilities.shape[0]

    @property
    def n_symbols(self) -> int:
        """M."""
        return self.log_probabilities.shape[1]

    def check(self, x: Tensor) -> None:
        """Raise an error unless `x` holds symbols, (N,)."""
        if x.dtype != torch.int64:
            raise TypeError(f"`x` should be an int64 tensor of symbols. Found {x.dtype}.")
        if x.ndim != 1:
            raise ValueError(f"`x` should have shape (N,). Found {tuple(x.shape)}.")
        if len(x) and (int(x.min()) < 0 or int(x.max()) >= self.n_symbols):
            raise ValueError(
                f"`x` should hold symbols from 0 to {self.n_symbols - 1}. Found {int(x.min())} to {int(x.max())}."
            )

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-probability of each symbol in each state, (N, K), nats. `x` is (N,), int64."""
        return self.log_probabilities.mT[x]

    def m_step(self, x: Tensor, posteriors: Tensor, *, prior: float | Tensor = 1.0, reg_covar: float = 0.0) -> Self:
        """Return the frequencies of symbols (N,) under posteriors (N, K); a state without any keeps its probabilities.

        Args:
            x: (N,), int64.
            posteriors: (N, K).
            prior: Dirichlet concentrations, one or (K, M) or (M,). 1 is maximum likelihood.
            reg_covar: Ignored; only Gaussians have covariances.
        """
        check_prior("prior", prior)
        number("reg_covar", reg_covar, least=0)
        integers(x=x)
        floating(posteriors=posteriors)
        counts = posteriors.new_zeros(self.n_symbols, self.n_states).index_add(0, x, posteriors).mT
        return self._estimate(counts, prior)

    def sample(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a symbol of each state (N,), (N,) int64."""
        integers(states=states)
        return draw(self.log_probabilities.exp()[states], generator)

    def unconstrained(self) -> dict[str, Tensor]:
        """Return ``log_probabilities``, free up to a constant in each row."""
        return {"log_probabilities": self.log_probabilities}

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the emissions at these coordinates."""
        return dataclasses.replace(self, log_probabilities=values["log_probabilities"].log_softmax(1))

    def prepare(self, x: Tensor, plan: Plan) -> PreparedSymbols:
        """Return symbols (N,) laid out for the fast pass."""
        return PreparedSymbols(tuple(x[chunk.steps] for chunk in plan.chunks))

    def _estimate(self, counts: Tensor, prior: float | Tensor) -> Self:
        return type(self)(log_probabilities=normalise(counts, self.log_probabilities, prior))


@dataclass(frozen=True, eq=False)
class PreparedSymbols:
    """Symbols (N,) of each chunk."""

    chunks: tuple[Tensor, ...]

    def begin(self, emissions: Emissions) -> CategoricalPass:
        """Return a pass with these emissions."""
        assert isinstance(emissions, CategoricalEmissions)
        return CategoricalPass(self, emissions.to(torch.float64))


class CategoricalPass:
    """One pass of categorical emissions: look-ups, and counts."""

    def __init__(self, data: PreparedSymbols, emissions: CategoricalEmissions) -> None:
        self._data, self._emissions = data, emissions
        self._largest = emissions.log_probabilities.amax(0)
        relative = emissions.log_probabilities - self._largest.clamp(min=torch.finfo(torch.float64).min)
        self._table = relative.exp()
        self._counts = torch.zeros_like(self._table)

    def emit(self, chunk: int, begin: int, out: Tensor) -> Tensor:
        """Write scaled emissions (see `Pass`)."""
        n_times, k, n_rows = out.shape
        symbols = self._data.chunks[chunk][begin : begin + n_times * n_rows]
        out.copy_(self._table.index_select(1, symbols).view(k, n_times, n_rows).transpose(0, 1))
        return self._largest[symbols]

    def log_prob(self, chunk: int, begin: int, end: int) -> Tensor:
        """Return log-probabilities (see `Pass`)."""
        return self._emissions.log_probabilities.index_select(1, self._data.chunks[chunk][begin:end])

    def consume(self, chunk: int, posteriors: Tensor) -> None:
        """Add a chunk's posteriors (see `Pass`)."""
        symbols = self._data.chunks[chunk]
        for count, share in zip(self._counts, posteriors.double(), strict=True):
            count += torch.bincount(symbols, share, minlength=len(count))

    def finish(self, *, prior: float | Tensor = 1.0, reg_covar: float = 0.0, update: str = "e") -> CategoricalEmissions:
        """Return the M-step's emissions (see `Pass`)."""
        return self._emissions._estimate(self._counts, prior) if "e" in update else self._emissions


def check_prior(name: str, value: float | Tensor) -> None:
    """Raise a ValueError unless concentrations are positive and finite."""
    if not isinstance(value, Tensor):
        number(name, value, above=0)
    elif not bool((value.isfinite() & (value > 0)).all()):
        raise ValueError(f"`{name}` should be positive and finite. Found {value.tolist()}.")


def normalise(counts: Tensor, log_before: Tensor, prior: float | Tensor) -> Tensor:
    """Return the logs of the most probable distributions, given counts and a Dirichlet prior, along the last dimension.

    Probabilities of 0 stay 0, whatever the prior. Rows without any counts keep their probabilities.
    """
    if isinstance(prior, Tensor) and not broadcasts(prior.shape, counts.shape):
        raise ValueError(
            f"`prior` should have concentrations that broadcast to {tuple(counts.shape)}. Found {tuple(prior.shape)}."
        )
    impossible = log_before == -math.inf
    added = (counts + (prior - 1)).clamp(min=0).masked_fill(impossible, 0.0)
    total = added.sum(-1, keepdim=True)
    # The logarithm of 0 is filled in, as its derivative would be infinite.
    positive = added > 0
    logs = torch.where(positive, added, 1.0).log() - torch.where(total > 0, total, 1.0).log()
    return torch.where(total > 0, logs.masked_fill(~positive, -math.inf), log_before)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw an index from each row, (N,)."""
    device = device_of(generator, probabilities)
    cumulative = probabilities.cumsum(-1)
    uniform = torch.rand(probabilities.shape[:-1], generator=generator, dtype=torch.float64, device=device)
    threshold = uniform.to(cumulative) * cumulative[..., -1]
    # An index of probability 0 is never drawn, not even by a draw of 0 or by rounding: ties go to the right.
    index = torch.searchsorted(cumulative, threshold[..., None], right=True)[..., 0]
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
