"""Time of Baum-Welch and Viterbi against hmmlearn's C++: many sequences at once, and one long one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks._measure import Row, timed_pair
from toolkit.em import hmm

_STEPS = 10

# States, features, lengths, goal for a fit. All diagonal, as hmmlearn's default is.
_CELLS = (
    (32, 2, [250] * 200, "at most 0.25"),
    (32, 8, [250] * 200, ""),
    (4, 2, [250] * 1000, ""),
    (4, 1, [250_000], "at most 2.5"),
)


def rows() -> Iterator[Row]:
    """Measure whole fits of a fixed number of steps, E-steps and paths; hmmlearn by the faster of its two ways."""
    import hmmlearn.hmm as peers  # an optional peer: without it these rows are skipped

    logging.getLogger("hmmlearn").setLevel(logging.ERROR)
    for k, d, lengths, goal in _CELLS:
        start, x = _problem(k, d, lengths)
        array = x.numpy()

        def model(implementation: str, n_iter: int = _STEPS, start: hmm.HMMParameters = start) -> peers.GaussianHMM:
            found = peers.GaussianHMM(
                start.n_states,
                "diag",
                init_params="",
                implementation=implementation,
                n_iter=n_iter,
                tol=-math.inf,
                covars_prior=0,
                covars_weight=0,
                min_covar=0,
            )
            found.startprob_, found.transmat_ = start.log_start.exp().numpy(), start.log_transition.exp().numpy()
            assert isinstance(start.emissions, hmm.GaussianEmissions)
            found.means_, found.covars_ = start.emissions.means.numpy(), start.emissions.covariances.numpy()
            return found

        size = f"{len(lengths)} x {lengths[0]} steps, {k} states, {d} features"
        # Ours evaluates the last parameters too, so one E-step more.
        yield _faster(
            f"{_STEPS} steps of Baum-Welch / hmmlearn's, {size}",
            lambda start=start, x=x, lengths=lengths: hmm.fit(
                start, x, lengths, accelerate="none", tol=0, max_iter=_STEPS
            ),
            {name: lambda name=name, n=array, s=lengths, m=model: m(name).fit(n, s) for name in ("scaling", "log")},
            goal,
        )
        yield _faster(
            f"posteriors / hmmlearn's, {size}",
            lambda start=start, x=x, lengths=lengths: hmm.posteriors(start, x, lengths),
            {
                name: lambda name=name, n=array, s=lengths, m=model: m(name).score_samples(n, s)
                for name in ("scaling", "log")
            },
        )
        yield _faster(
            f"most probable paths / hmmlearn's, {size}",
            lambda start=start, x=x, lengths=lengths: hmm.viterbi(start, x, lengths),
            {"Viterbi": lambda n=array, s=lengths, m=model: m("log").decode(n, s)},
        )


def _faster(what: str, ours, theirs: dict, goal: str = "") -> Row:
    """Return the row against the faster of their ways, by one run of each."""
    found = {name: timed_pair(ours, program, repeats=1) for name, program in theirs.items()}
    name = min(found, key=lambda name: found[name][2])
    ratio, seconds, their_seconds = timed_pair(ours, theirs[name], repeats=3)
    return Row(what, ratio, goal, f"{seconds * 1e3:.0f} ms against {their_seconds * 1e3:.0f} ms ({name})")


def _problem(k: int, d: int, lengths: list[int]) -> tuple[hmm.HMMParameters, Tensor]:
    """Return a start near the truth, and data, float64."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    transition = torch.rand(k, k, **options) ** 3 + 0.02
    ones, uniform = torch.ones(k, d, dtype=torch.float64), torch.full((k,), 1 / k, dtype=torch.float64)
    means = 2 * torch.randn(k, d, **options)
    truth, start = (
        hmm.HMMParameters.of(
            start=uniform,
            transition=matrix,
            emissions=hmm.GaussianEmissions.from_covariances(means=centres, covariances=ones, covariance_type="diag"),
        )
        for matrix, centres in (
            (transition / transition.sum(1, keepdim=True), means),
            (uniform.expand(k, k), means + 0.3 * torch.randn(k, d, **options)),
        )
    )
    return start, hmm.sample(truth, lengths, generator=generator)[0]
