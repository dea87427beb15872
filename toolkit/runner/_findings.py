"""Findings of records: which variant ends better, and whether the claims of a config hold. Imports no torch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.runner._numbers import degrees_of
from toolkit.runner._records import BLOCKED, Record
from toolkit.runner._rounding import OF_TARGET, OF_TRAINING

__all__ = [
    "RULE",
    "Difference",
    "broken_claims",
    "compared",
    "doubts",
    "finals",
    "median",
    "rounding",
    "verdict_of",
    "verdicts",
]

RULE = (
    "Each seed is trained with the block and without it. Better and worse mean that a 95 % confidence interval of the "
    "difference (in brackets) excludes zero. With six seeds or more this is the interval of the median, by order "
    "statistics; with fewer, that of the mean, by Student's t. If the interval includes zero, the difference is "
    "undecided. A difference within rounding counts as zero."
)

_FROM_SEEDS = 6  # the smallest number whose interval for the median has 95 %

_CLAIM_FROM = 5  # seeds: with fewer, the interval of the difference is too wide

_WORSE_FROM = 3  # seeds: of fewer, all end worse by chance too often

# Student's t: the quantile .975 for 1, 2, 3, 4 degrees of freedom.
_QUANTILES = (12.706, 4.303, 3.182, 2.776)


@dataclass(frozen=True)
class Difference:
    """The improvement of the final objective by the block, over the seeds in which both runs reached their end.

    Attributes:
        kind: The block's effect, by `RULE`. ``"broke off"``: no open run reached its end, ``"none"``: no seed can be
            compared, and the blocked run is at fault.
        gains: The improvement in each seed, in the units of the objective; 0 where it is rounding.
        exact: Whether all final objectives are equal to the last bit.
        size: The median improvement, or the mean for few seeds.
        low: Lower end of its 95 % confidence interval; NaN for a single seed.
        high: Upper end.
        broken: Seeds in which only the open run broke off.
        both_broken: Seeds in which the blocked run broke off.
    """

    kind: Literal["better", "worse", "same", "undecided", "broke off", "none"]
    gains: list[float]
    exact: bool
    size: float
    low: float
    high: float
    broken: int
    both_broken: int

    @property
    def better(self) -> int:
        """The seeds in which the block improves the objective."""
        return sum(gain > 0 for gain in self.gains)

    @property
    def worse(self) -> int:
        """The seeds in which the block impairs the objective."""
        return sum(gain < 0 for gain in self.gains)


def compared(records: Sequence[Record], name: str) -> Difference:
    """Return the block's effect on the final objective, against the variant `name`."""
    sign = 1 if records[-1].data["objective"]["higher_is_better"] else -1
    ends = list(zip(finals(records, BLOCKED), finals(records, name), strict=True))
    pairs = [(blocked, opened) for blocked, opened in ends if math.isfinite(blocked) and math.isfinite(opened)]
    tie = rounding(records) * (statistics.fmean(abs(blocked) for blocked, _ in pairs) or 1.0) if pairs else 0.0
    differences = [sign * (blocked - opened) for blocked, opened in pairs]
    gains = [gain if abs(gain) > tie else 0.0 for gain in differences]
    size, low, high = _interval(gains)
    broken = sum(math.isfinite(blocked) and not math.isfinite(opened) for blocked, opened in ends)
    return Difference(
        kind=_kind(gains, low, high, broken),
        gains=gains,
        exact=not any(differences),
        size=size,
        low=low,
        high=high,
        broken=broken,
        both_broken=sum(not math.isfinite(blocked) for blocked, _ in ends),
    )


def _kind(
    gains: Sequence[float], low: float, high: float, broken: int
) -> Literal["better", "worse", "same", "undecided", "broke off", "none"]:
    if not gains:
        return "broke off" if broken else "none"
    if not any(gains):
        return "same"
    if low > 0:
        return "better"
    return "worse" if high < 0 else "undecided"


def _interval(gains: Sequence[float]) -> tuple[float, float, float]:
    """Return the typical gain and the ends of its 95 % confidence interval, as `RULE` states them.

    For any distribution, the median lies between the k-th smallest and the k-th largest of n draws, except with twice
    the probability of fewer than k heads in n throws of a coin.
    """
    count, ordered = len(gains), sorted(gains)
    if count >= _FROM_SEEDS:
        below = list(itertools.accumulate(math.comb(count, heads) / 2**count for heads in range(count)))
        cut = sum(probability <= 0.025 for probability in below)
        return statistics.median(gains), ordered[cut - 1], ordered[-cut]
    if not gains:
        return math.nan, math.nan, math.nan
    mean = statistics.fmean(gains)
    if count == 1:
        return mean, math.nan, math.nan
    reach = _QUANTILES[count - 2] * statistics.stdev(gains) / math.sqrt(count)
    return mean, mean - reach, mean + reach


def finals(records: Sequence[Record], name: str, metric: str = "objective") -> list[float]:
    """Return a metric of a variant after training, for every seed; NaN where the run broke off."""
    values = []
    for record in records:
        variant = record.data["variants"][name]
        final = variant["metrics"][metric][-1] if variant["diverged_at"] is None else None
        values.append(math.nan if final is None else final)
    return values


def rounding(records: Sequence[Record]) -> float:
    """Return the relative difference of two objectives that is only rounding."""
    return OF_TRAINING[records[-1].data["config"]["dtype"]]


def verdict_of(effect: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return kind, parameters, label and text of a verdict; older records have the text alone."""
    verdict: Mapping[str, Any] | str = effect["verdict"]
    if not isinstance(verdict, str):
        return verdict
    label, _, names = verdict.partition(" to [")
    parameters = names.removesuffix("]").split(", ") if names else []
    return {"kind": verdict.split()[0], "parameters": parameters, "label": label, "text": verdict}


def verdicts(records: Sequence[Record]) -> list[str]:
    """Return a line for each open variant: the verdicts on its gradient, and the block's effect on training."""
    newest = records[-1].data
    label = newest["objective"]["label"]
    return [
        f"{name} {_gradient(records, name)}; {_training(compared(records, name), label, plural=' + ' in name)}"
        for name in newest["variants"]
        if name != BLOCKED
    ]


def _gradient(records: Sequence[Record], name: str) -> str:
    """Return the verdicts before and after training in words; the second is missing if every blocked run broke off."""
    trained = [record for record in records if record.data["variants"][BLOCKED]["diverged_at"] is None]
    first, last = (
        " or ".join(dict.fromkeys(_told(record.data["comparison"][when]["effects"][name]) for record in of))
        for when, of in (("first", records), ("last", trained))
    )
    if last == first:
        return f"{first} at the first and the last step"
    return f"{first} at the first step" + (f" and {last} at the last" if trained else "")


def doubts(records: Sequence[Record]) -> list[str]:
    """Return the reasons to doubt the experiment of these records, one sentence each."""
    return [*_doubts_of_target(records), *_doubts_of_metrics(records), *_doubts_of_seeds(records)]


def _doubts_of_target(records: Sequence[Record]) -> Iterator[str]:
    errors = [record.data["comparison"]["first"]["target_error"][BLOCKED] for record in records]
    error = max((error for error in errors if error is not None), default=0.0)
    if error > (bound := OF_TARGET[records[-1].data["config"]["dtype"]]):
        sign = ", as of its negative" if math.isclose(error, 2, rel_tol=bound) else ""
        yield f"The blocked gradient should be `target`. Found a distance of {error:.3g} times its length{sign}."


def _doubts_of_metrics(records: Sequence[Record]) -> Iterator[str]:
    newest = records[-1].data
    ends = {
        metric: [value for name in newest["variants"] for value in finals(records, name, metric)]
        for metric in newest["variants"][BLOCKED]["metrics"]
    }
    if any(map(math.isfinite, ends["objective"])):
        for metric, values in ends.items():
            if not any(map(math.isfinite, values)):
                yield f"The metric {metric!r} should be a number after training. Found none in any run."


def _doubts_of_seeds(records: Sequence[Record]) -> Iterator[str]:
    newest, runs = records[-1].data, [record.data["variants"][BLOCKED] for record in records]
    if len(runs) > 1 and all(run["metrics"] == runs[0]["metrics"] for run in runs):
        yield f"The seeds should differ. Found {len(runs)} identical trainings, which count as independent ones."
    higher = newest["objective"]["higher_is_better"]
    claims = newest["config"].get("expect", {}).values()
    claimed = any(claim["training"] is not None or claim["gain"] is not None for claim in claims)
    moves = [end - run["metrics"]["objective"][0] for end, run in zip(finals(records, BLOCKED), runs, strict=True)]
    if len(runs) >= _WORSE_FROM and not claimed and all(move < 0 if higher else move > 0 for move in moves):
        yield (
            f"Training should improve the objective. Found it worse than at the start in all {len(runs)} seeds, "
            f"by `higher_is_better` {higher}."
        )


def _told(effect: Mapping[str, Any]) -> str:
    """Return a verdict as the end of a sentence that begins with the block."""
    label: str = verdict_of(effect)["label"]
    return label if label.startswith(("cuts", "makes")) else f"is {label}"


def _training(found: Difference, label: str, *, plural: bool) -> str:
    seeds, block = len(found.gains), "the blocks" if plural else "the block"
    match found.kind:
        case "better" | "worse":
            count = found.better if found.kind == "better" else found.worse
            by = f"{abs(found.size):.3g} in the {label}"
            return f"with {block}, training ends {found.kind} by {by} ({count} of {seeds} seeds)"
        case "same":
            return f"with {block}, training ends at the same value"
        case "undecided":
            return f"the difference in training is undecided ({seeds} seed{'' if seeds == 1 else 's'})"
        case "broke off":
            return f"with {block}, training ends well; without {block}, every run broke off"
        case "none":
            return f"with {block}, every run broke off"


def broken_claims(records: Sequence[Record]) -> list[str]:
    """Return the claims of a config that its records contradict, one sentence each.

    Few seeds that leave the effect on training undecided contradict no claim about it.
    """
    found = []
    for name, claim in records[-1].data["config"].get("expect", {}).items():
        effects = [record.data["comparison"]["first"]["effects"][name] for record in records]
        difference = compared(records, name)
        kinds = sorted({verdict_of(effect)["kind"] for effect in effects})
        if claim["verdict"] is not None and kinds != [claim["verdict"]]:
            found.append(f"{name}: the verdict should be {claim['verdict']}. Found {', '.join(kinds)}.")
        open_question = difference.kind == "undecided" and len(records) < _CLAIM_FROM
        if claim["training"] not in (None, difference.kind) and not open_question:
            found.append(f"{name}: training with the block should end {claim['training']}. Found {difference.kind}.")
        measured = {
            "gain": difference.size,
            "ratio": median(effect["ratio"] for effect in effects),
            "angle": median(degrees_of(effect["cosine"]) for effect in effects),
        }
        for quantity, value in measured.items():
            if claim[quantity] is not None and not claim[quantity][0] <= value <= claim[quantity][1]:
                low, high = claim[quantity]
                found.append(f"{name}: {quantity} should be in {low:g} to {high:g}. Found {value:.4g}.")
    return found


def median(values: Iterable[float | None]) -> float:
    """Return the median of the finite values; NaN if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan
