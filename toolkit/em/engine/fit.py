"""Fits a Gaussian mixture by closed-form EM steps, from a given start or from the usual ones.

N samples, D features, K components, R starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object, get_world_size

from toolkit._checks import instance, integer, number
from toolkit._data import Rows, reservoir, rows_of
from toolkit._random import check_generator
from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType, structure_of
from toolkit.em.engine.acceleration import Accelerate, ClimbOptions, ranked
from toolkit.em.engine.ascent import Fit, GaussianEngine, GaussianPrior, check_resolved, climb_each
from toolkit.em.engine.checks import check_callback, check_prior, check_tensor
from toolkit.em.engine.ranks import led
from toolkit.em.engine.restarts import NARROWEST, Mixtures, heats
from toolkit.em.engine.samples import Prepared, check_rows, prepare
from toolkit.em.engine.starts import Init, check_given, choose_starts
from toolkit.em.gaussian import GaussianParameters

__all__ = ["Fit", "fit"]

# Chunks: a re-iterable, or a function that returns a new iterator.
_Source: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]

# The most samples that are used to choose a start.
_SEEDING = 2**16


@no_graph()
def fit(
    x: Tensor | Iterable[Any] | Callable[[], Iterable[Any]],
    n_components: int,
    *,
    covariance_type: CovarianceType = "full",
    sample_weight: Tensor | None = None,
    tol: float = 1e-6,
    max_iter: int = 1000,
    n_init: int = 1,
    n_init_keep: int | None = None,
    init: Init | GaussianParameters = "kmeans",
    reg_covar: float = 1e-6,
    prior: GaussianPrior | None = None,
    accelerate: Accelerate = "auto",
    cache: bool = True,
    group: ProcessGroup | None = None,
    callback: Callable[[int, float], None] | None = None,
    generator: torch.Generator | None = None,
) -> Fit:
    """Maximise the log-likelihood of a Gaussian mixture by EM.

    Each step is `em_step`, or is extrapolated from several. The result is the highest point, also where `reg_covar`
    makes some steps lower the log-likelihood (see `climb`).

    Args:
        x: (N, D), float32 or float64, finite. Or chunks of it (B, D), arrays or tensors, alone or in pairs with their
            weights (B,), from any source that can be read again for each pass: a list, a DataLoader, a memory-mapped
            array, an object with ``__iter__``, a function that returns a new iterator. With ``cache=False`` chunks are
            not kept.
        n_components: Number of components, K; at most N.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        sample_weight: (N,), not negative: how often each sample counts. None: once.
        tol: Bound of convergence, in nats per sample: see `climb`. 0 takes all `max_iter` plain steps.
        max_iter: The most EM steps. 0 returns the start.
        n_init: Number of starts. The result is the highest fit without a degenerate component. A component is
            degenerate if it is less than 3 % as wide in some direction as the components are on average. With
            ``accelerate="none"`` all starts share one pass over the data for each step.
        n_init_keep: None: each start is iterated to its end. Otherwise all starts share one pass over the data for each
            step, until each gains less than 1e-4, or for 100 steps; only so many of the highest go on. That is faster,
            and may drop the start that would have ended highest. The history begins where the starts were compared.
        init: How to choose the means of the start (see `start`), or the start itself. One M-step from the samples
            nearest to each mean follows. A component with too few samples for a covariance of its own gets the
            covariance of all samples about their means.
        reg_covar: Added to every variance, in the data's units squared.
        prior: If given, the objective and the reported value are ``log-likelihood + log-density of the prior / N``.
        accelerate: ``"none"``, ``"squarem"`` or ``"anderson"``: see `climb`. ``"auto"``: for few samples and at most
            128 parameters, full or diag, plain steps and then Newton's, which end where the log-likelihood is concave
            and its quadratic model predicts a gain of at most `tol`; else ``"anderson"``.
        cache: Whether a second copy of the data is kept, in the order in which a pass reads them. If not, each pass
            reorders them again, chunk by chunk, and memory is bounded.
        group: A process group of `torch.distributed`. Each rank calls this function with its own part of the samples,
            possibly empty. Sufficient statistics are summed over the ranks, once in each step. The first rank alone
            decides, so that all ranks get the same result, bit for bit, on any processors.
        callback: Called after each evaluation with the number of evaluations and the log-likelihood, on the first rank.
        generator: Randomness of the start. None is torch's global generator.

    Returns:
        The fit result: `parameters` in the data's floating-point type, `log_likelihood` in nats per sample,
        `converged`, `n_iter`, and `history`.

    Raises:
        TypeError: If `x` is no float32 or float64 tensor, or chunks that can be read only once.
        ValueError: If an argument is out of range, `x` is not finite, a covariance becomes singular, or an outlier is
            so far from the other samples that rounding hides their differences.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 4.3.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [8.0], [9.0], [10.0]])
        >>> two = fit(x, 2, generator=torch.Generator().manual_seed(0))
        >>> two.parameters.means, two.converged
        (tensor([[9.0000],
                [0.5000]]), True)
    """
    n_components, n_init = integer("n_components", n_components), integer("n_init", n_init)
    if n_init_keep is not None:
        n_init_keep = integer("n_init_keep", n_init_keep)
    structure_of(covariance_type)
    reg_covar, tol = number("reg_covar", reg_covar, least=0), number("tol", tol, least=0)
    max_iter = integer("max_iter", max_iter, 0)
    check_prior(prior)
    check_callback(callback)
    check_generator(generator)
    if group is not None:
        instance("group", group, ProcessGroup)
    rows = _agreed_rows(x, sample_weight, n_components, covariance_type, group)
    data = prepare(rows, covariance_type, n_components, cache=cache, group=group)
    if n_components > data.n_samples:
        raise ValueError(
            f"`n_components` should be at most {data.n_samples}, the number of samples that have a weight. "
            f"Found {n_components}."
        )
    if isinstance(init, GaussianParameters):
        check_given(init, n_components, data.centre.shape[0], covariance_type)
        sampled, weights = None, None
    else:
        sampled, weights = _seeding_sample(x, sample_weight, rows, data, generator)

    options = ClimbOptions(accelerate=accelerate, tol=tol, max_iter=max_iter, callback=callback)
    engine = GaussianEngine(data, reg_covar, prior)

    def decide() -> Fit:
        if isinstance(init, GaussianParameters):
            return engine.climb(init.to(data.centre.device), options)
        assert sampled is not None
        starts = choose_starts(
            sampled,
            weights,
            n_components,
            n_init,
            covariance_type=covariance_type,
            init=init,
            reg_covar=reg_covar,
            generator=generator,
        )
        if len(starts) == 1:
            return engine.climb(starts[0], options)
        return _best_of(starts, engine, options, keep=n_init_keep)

    best = led(decide, data.as_samples(), _to_device)
    if prior is None and group is None:
        check_resolved(best, rows, data)
    return dataclasses.replace(best, parameters=best.parameters.to(data.dtype))


def _best_of(
    starts: list[GaussianParameters], engine: GaussianEngine, options: ClimbOptions, *, keep: int | None
) -> Fit:
    """Fit from all starts, or iterate from all together and fit from the best, and return the best fit.

    Joint steps are the fits themselves where steps are plain.
    """
    plain = options.accelerate == "none"
    found = []
    if engine.prior is None and (plain or keep is not None):
        found = heats(
            starts, engine.prepared, options, are_sound=_are_sound, keep=keep or 1, reg_covar=engine.reg_covar
        )
    climbs: list[Fit] = []
    for heat in (one.reached for one in found):
        singular = math.isinf(heat.log_likelihood)
        if plain and not singular:
            climbs.append(heat)
            continue
        with contextlib.suppress(ValueError) if singular else contextlib.nullcontext():  # singular by itself as well
            final = engine.climb(heat.parameters, options)
            climbs.append(dataclasses.replace(final, n_iter=heat.n_iter + final.n_iter))
    if not found:
        climbs, _ = climb_each(engine, [(start, 0) for start in starts], options)
    if not climbs:
        raise ValueError(
            f"`covariances` should be positive definite. Found a singular one after each of {len(starts)} starts. More "
            "regularisation (`reg_covar`), fewer components or a more restricted `covariance_type` help."
        )
    sound = _are_sound(Mixtures.of([one.parameters for one in climbs], engine.prepared))
    return ranked(climbs, engine.prepared.dtype, sound=sound, count=1)[0]


def _are_sound(mixtures: Mixtures) -> list[bool]:
    sound: list[bool] = (mixtures.narrowest() >= NARROWEST).tolist()
    return sound


def _checked_rows(
    x: Tensor | _Source, sample_weight: Tensor | None, n_components: int, group: ProcessGroup | None
) -> Rows:
    if isinstance(x, Tensor):
        check_tensor(x, sample_weight, n_components, whole=group is None)
        return rows_of(x, sample_weight)
    array = isinstance(x, np.ndarray) and not isinstance(x, np.memmap)
    first = x[0] if isinstance(x, list | tuple) and x else None
    numbers = isinstance(first[0] if isinstance(first, list | tuple) and first else first, int | float)
    if array or numbers or isinstance(x, str | bytes) or not (isinstance(x, Iterable) or callable(x)):
        hint = " `torch.from_numpy` makes a tensor of an array." if array else ""
        hint = " `torch.tensor` makes a tensor of numbers." if numbers else hint
        raise TypeError(f"`x` should be a float32 or float64 tensor, or chunks. Found {type(x).__name__}.{hint}")
    if sample_weight is not None:
        raise TypeError("Chunks should come in pairs with their weights. Found `sample_weight` beside them.")
    return check_rows(x)


def _seeding_sample(
    x: Tensor | _Source,
    sample_weight: Tensor | None,
    rows: Rows,
    data: Prepared,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """Return all samples and weights, or a random subset of them that is large enough to choose a start."""
    if isinstance(x, Tensor) and len(x) <= _SEEDING and data.group is None:
        return x, sample_weight
    size = _SEEDING if data.group is None else math.ceil(_SEEDING / get_world_size(data.group))
    every = data.group is None and data.n_samples <= size
    samples, weights, count = reservoir(rows(2**14), size, generator, every=every)
    if count > size:  # the draw has used up the weights
        weights = torch.ones_like(weights)
    if data.group is not None:
        gathered: list[Any] = [None] * get_world_size(data.group)
        all_gather_object(gathered, (samples.cpu(), weights.cpu()), group=data.group)
        samples = torch.cat([part for part, _ in gathered]).to(samples.device)
        weights = torch.cat([part for _, part in gathered]).to(samples.device)
    return samples, weights


def _to_device(found: Fit, device: torch.device) -> Fit:
    return dataclasses.replace(found, parameters=found.parameters.to(device))


def _agreed_rows(
    x: Tensor | _Source,
    sample_weight: Tensor | None,
    n_components: int,
    covariance_type: CovarianceType,
    group: ProcessGroup | None,
) -> Rows:
    """Return the checked reader of the rows; an error on one rank is raised on all, so that none waits."""
    if group is None:
        return _checked_rows(x, sample_weight, n_components, group)
    rows, error = None, ""
    seen: tuple[object, ...] = ()
    try:
        rows = _checked_rows(x, sample_weight, n_components, group)
        for part, _ in rows(2**14):  # all rows, to find values that are not finite here
            seen = (n_components, covariance_type, part.shape[1], str(part.dtype))
    except (TypeError, ValueError) as found:
        error = str(found)
    reports: list[Any] = [None] * get_world_size(group)
    all_gather_object(reports, (error, seen), group=group)
    for rank, (text, _) in enumerate(reports):
        if text:
            raise ValueError(f"Rank {rank}: {text}")
    different = {other for _, other in reports}
    if len(different) > 1:
        raise ValueError(
            "All ranks should have the same `n_components`, `covariance_type`, number of features and type of `x`. "
            f"Found {', '.join(map(str, sorted(different, key=str)))}."
        )
    assert rows is not None
    return rows
