"""Time of stochastic estimators against their plain forms, torch's and Pyro's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributions import Independent, Normal, OneHotCategoricalStraightThrough

from benchmarks._measure import Row, gradient, timed_row
from toolkit.stochastic import (
    dreg_loss,
    iwae_bound,
    iwae_loss,
    path_log_prob,
    straight_through,
    vimco_loss,
)


def rows() -> Iterator[Row]:
    """Measure value and gradient. A mask in the weighted sums costs time; plain torch gives NaN at a weight of 0."""
    generator = torch.Generator().manual_seed(0)
    yield from _importance(64, 256, generator)
    yield _straight_through(256, 128, generator)
    yield _held_density(256, 64, generator)
    yield _beside_pyro()


def _importance(samples: int, batch: int, generator: torch.Generator) -> Iterator[Row]:
    log_weights = torch.randn(samples, batch, generator=generator, requires_grad=True)
    log_probs = torch.randn(samples, batch, generator=generator, requires_grad=True)

    def naive_vimco() -> Tensor:
        """One log-sum for each sample that is left out."""
        bound = log_weights.logsumexp(0)
        others = (log_weights.sum(0) - log_weights) / (samples - 1)
        eye = torch.eye(samples, dtype=torch.bool)[..., None]
        without = torch.where(eye, others, log_weights).logsumexp(1)
        return -(bound + (log_probs * (bound - without).detach()).sum(0)).mean()

    def naive_dreg() -> Tensor:
        return -(log_weights.softmax(0).detach().square() * log_weights).sum(0).mean()

    size = f"{samples} samples, batch {batch}"
    both = [log_weights, log_probs]
    yield _row(f"vimco_loss / one log-sum for each sample, {size}", lambda: vimco_loss(*both), naive_vimco, both)
    yield _row(f"dreg_loss / plain torch, {size}", lambda: dreg_loss(log_weights), naive_dreg, [log_weights])
    yield _row(
        f"iwae_loss / iwae_bound, {size}",
        lambda: iwae_loss(log_weights),
        lambda: -iwae_bound(log_weights),
        [log_weights],
    )


def _straight_through(batch: int, classes: int, generator: torch.Generator) -> Row:
    logits = torch.randn(batch, classes, generator=generator, requires_grad=True)

    def ours() -> Tensor:
        q = OneHotCategoricalStraightThrough(logits=logits)
        return straight_through(q.sample(), q.probs).square().sum()

    def theirs() -> Tensor:
        return OneHotCategoricalStraightThrough(logits=logits).rsample().square().sum()

    return _row(f"straight_through / torch.distributions, {batch} x {classes}", ours, theirs, [logits], "at most 1.1")


def _held_density(batch: int, size: int, generator: torch.Generator) -> Row:
    mean = torch.randn(batch, size, generator=generator, requires_grad=True)
    noise = torch.randn(batch, size, generator=generator)

    def ours() -> Tensor:
        return path_log_prob(Independent(Normal(mean, 0.8), 1), mean + 0.8 * noise).mean()

    def theirs() -> Tensor:
        return Independent(Normal(mean.detach(), 0.8), 1).log_prob(mean + 0.8 * noise).mean()

    return _row(f"path_log_prob / a distribution made again, {batch} x {size}", ours, theirs, [mean], "at most 1.1")


def _beside_pyro() -> Row:
    import pyro
    from pyro.distributions import Normal as Gaussian

    pyro.clear_param_store()
    one = torch.tensor(1.0)

    def model() -> None:
        z = pyro.sample("z", Gaussian(0 * one, one))
        pyro.sample("x", Gaussian(z, 0.6 * one), obs=0.9 * one)

    def guide() -> None:
        pyro.sample("z", Gaussian(pyro.param("mean", lambda: 0.5 * one), 0.8 * one))

    bound = pyro.infer.RenyiELBO(alpha=0, num_particles=8)
    mean = torch.tensor(0.5, requires_grad=True)

    def ours() -> tuple[Tensor, ...]:
        q = Normal(mean, 0.8)
        z = q.rsample((8,))
        log_joint = Normal(0.0, 1.0).log_prob(z) + Normal(z, 0.6).log_prob(0.9 * one)
        return torch.autograd.grad(iwae_loss(log_joint - q.log_prob(z)), mean)

    what = "iwae_loss / Pyro's RenyiELBO, 8 particles of one number"
    return timed_row(what, ours, lambda: bound.loss_and_grads(model, guide), "at most 1.1")


def _row(
    what: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], leaves: list[Tensor], goal: str = ""
) -> Row:
    return timed_row(what, gradient(ours, *leaves), gradient(theirs, *leaves), goal)
