"""Sentences about records: the meaning of a verdict, the effect on training, and events. Imports no torch."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.runner._chart import significant
from toolkit.runner._findings import Difference, compared, finals, median, verdict_of
from toolkit.runner._numbers import NOTHING, degrees_of
from toolkit.runner._records import BLOCKED, Record

__all__ = [
    "better_end",
    "count_of",
    "events_in_words",
    "events_of",
    "first_sentence",
    "headline_of",
    "limit_of",
    "meaning_of",
    "of_blocks",
    "outcome_of",
    "training_effect",
    "variant_verdict",
]

# A value within this relative distance of an event's limit counts as at the limit, not beyond: events are coarse.
_AT_THE_LIMIT = 1e-5

# If opening the block lengthens a gradient by more than this factor, the blocked gradient has vanished.
_VANISHED = 1e4


def better_end(records: Sequence[Record]) -> str:
    """Return the better end of the objective's axis in words."""
    return "higher is better" if records[-1].data["objective"]["higher_is_better"] else "lower is better"


def first_sentence(text: str) -> str:
    """Return the beginning of a text, up to the first full stop that is followed by a capital letter."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split()), maxsplit=1)[0]


# Words of a sentence about a block -> those about several.
_OF_SEVERAL = {
    "the block improves": "the blocks improve",
    "The block itself makes": "The blocks themselves make",
    "this block, so it has": "these blocks, so they have",
    "the block": "the blocks",
    "with it": "with them",
}


def of_blocks(opened: Sequence[str], sentences: str) -> str:
    """Return sentences about a block as sentences about all that are opened together."""
    if len(opened) > 1:
        every = "both" if len(opened) == 2 else f"all {len(opened)}"
        sentences = sentences.replace("Opening the block", f"Opening {every} blocks")
        for one, several in _OF_SEVERAL.items():
            sentences = re.sub(rf"{one}\b", several, sentences)
    return sentences


def variant_verdict(records: Sequence[Record], name: str) -> Mapping[str, Any]:
    """Return the verdict on the first gradient of a variant, for all seeds."""
    return _agreed([verdict_of(record.data["comparison"]["first"]["effects"][name]) for record in records])


def _agreed(verdicts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one verdict for all seeds. Where they differ, its text lists the verdicts and their numbers of seeds."""
    texts = Counter(verdict["text"] for verdict in verdicts)
    if len(texts) == 1:
        return verdicts[0]
    text = ", ".join(f"{text} in {count}" for text, count in texts.most_common())
    shared: dict[str, Any] = {"parameters": [], "text": f"{text} of {len(verdicts)} seeds"}
    if len({verdict["kind"] for verdict in verdicts}) > 1:
        return {**shared, "kind": "differs", "label": "differs between seeds"}
    kind, label = verdicts[0]["kind"], verdicts[0]["label"]
    return {**shared, "kind": kind, "label": "below the noise" if kind == "noise" else label}


# The effect of a block that has no gradient to stop.
_NOTHING_LEAKS = {
    "no-op": "No gradient reaches this block, so it has nothing to stop.",
    "redundant": "Opening the block changes the gradient by no more than the rounding of floating-point numbers: the "
    "leak is zero.",
    "noise": "Opening the block changes the gradient by no more than the rounding in this low precision: a leak, if "
    "there is one, cannot be told from rounding.",
}


def meaning_of(verdict: Mapping[str, Any], first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> str:
    """Return the verdict's meaning for a reader who does not know stop-gradients."""
    kind, names = verdict["kind"], ", ".join(verdict["parameters"])
    if kind in _NOTHING_LEAKS and all(verdict_of(effect)["kind"] in _NOTHING_LEAKS for effect in last):
        if kind == "redundant" and all(effect["leak"] == 0 for effect in [*first, *last]):
            return "Opening the block does not change a single bit of the gradient: the leak is zero."
        return _NOTHING_LEAKS[kind]
    start = _turn(first)
    end = _turn(last) if last else ""
    if not last:
        sentence = f"Opening the block {start}, before the first step."
    elif start == end:
        sentence = f"Opening the block {start}, before the first step and once the model is trained."
    else:
        sentence = f"Opening the block {start} before the first step, and {end} once the model is trained."
    if kind == "cuts" and names:
        sentence += f" With the block in place no gradient reaches {names} at all."
    elif kind == "makes" and names:
        sentence += f" The block itself makes the gradient of {names}: without the block it is zero."
    elif kind in ("cuts", "makes", "differs"):
        sentence += f" The verdict is: {verdict['text']}."
    return sentence


def _turn(effects: Sequence[dict[str, Any]]) -> str:
    # A record has no infinity: if the leak has a value and the length has none, the blocked gradient is zero.
    ratios = [math.inf if effect["ratio"] is None and effect["leak"] else effect["ratio"] for effect in effects]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        is_zero = all(effect["leak"] == 0 for effect in effects)
        return "leaves a zero gradient at zero" if is_zero else "makes the gradient infinite or NaN"
    length = statistics.median(known)
    if math.isinf(length):
        return "lets a gradient through where there is none with the block"
    if length > _VANISHED:
        return f"makes a vanished gradient {significant(length, 2)} times as long"
    if length < NOTHING:
        return "makes the gradient vanish"
    angle = significant(median(degrees_of(effect["cosine"]) for effect in effects), 2)
    times = significant(length, 2)
    longer = "keeps its length" if times == "1" else f"makes it {times} times as long"
    return f"turns the gradient by {angle}° and {longer}"


def training_effect(records: Sequence[Record], name: str) -> str:
    """Return a few words on the block's effect on training, for tables."""
    found = compared(records, name)
    match found.kind:
        case "better" | "worse":
            return f"{found.kind} by {_size(found)}"
        case "same":
            return "the same"
        case "broke off":
            return "open runs break off"
        case "none":
            return "blocked runs break off"
        case "undecided":
            return "undecided"


def outcome_of(records: Sequence[Record], name: str) -> str:
    """Return the block's effect on training in sentences."""
    found, label = compared(records, name), records[-1].data["objective"]["label"]
    sentences = [_effect_on_training(found, label)]
    for count, which in ((found.broken, "open"), (found.both_broken, "blocked")):
        if count:
            sentences.append(f"In {count} of {len(records)} seeds the {which} run broke off: its loss was not finite.")
    return " ".join(filter(None, sentences))


def _effect_on_training(found: Difference, label: str) -> str:
    if found.kind in ("broke off", "none"):
        return "No seed can be compared."
    if found.kind == "same":
        ends = "exactly the same value" if found.exact else "the same value"
        count = "in every seed" if len(found.gains) > 1 else "in one seed"
        end = count if found.exact else "up to rounding"
        return f"Training ends at {ends} with and without the block, {end}."
    if len(found.gains) == 1:
        kind = "better" if found.better else "worse"
        return f"With the block, the {label} ends {_size(found)} {kind} in the one seed, which decides nothing."
    counts = f"better in {found.better} and worse in {found.worse} of {len(found.gains)} seeds"
    if found.kind == "undecided":
        return f"Whether the block improves the {label} is undecided: {counts}, typically {_size(found, signed=True)}."
    return f"With the block, the {label} ends {_size(found)} {found.kind}: {counts}."


def _size(found: Difference, signed: bool = False) -> str:
    """Return the typical difference with its confidence interval, if that has a length."""
    sign = 1 if signed or found.size > 0 else -1
    ends = sorted((sign * found.low, sign * found.high))
    size = significant(sign * found.size, 3)
    for digits in (2, 3):
        low, high = (significant(end, digits) for end in ends)
        if low != high:
            return f"{size} ({low} to {high})"
    return size


def events_in_words(records: Sequence[Record], name: str) -> str:
    """Return the events of the open and of the blocked runs, with the number of seeds of each."""
    sentences = []
    for event in events_of(records, list(records[-1].data["variants"][BLOCKED]["metrics"])):
        opened, blocked = (count_of(event, finals(records, variant, event["metric"])) for variant in (name, BLOCKED))
        clause = event["says"][:1].upper() + event["says"][1:]
        sentences.append(f" {clause} in {opened} seeds without the block, and in {blocked} with it.")
    return "".join(sentences)


def events_of(records: Sequence[Record], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events that these metrics decide."""
    return [event for event in records[-1].data.get("events", []) if event["metric"] in metrics]


def limit_of(event: Mapping[str, Any]) -> float:
    """Return the value of the metric beyond which an event happened."""
    limit: float = event["above"] if event["below"] is None else event["below"]
    return limit


def headline_of(event: Mapping[str, Any]) -> str:
    """Return an event and its limit as the head of a column."""
    return f"{event['says']} ({event['metric']} {'above' if event['below'] is None else 'below'} {limit_of(event):g})"


def count_of(event: Mapping[str, Any], values: Sequence[float]) -> str:
    """Return the number of seeds in which the event happened, of the seeds that have a value."""
    finite, limit = [value for value in values if math.isfinite(value)], limit_of(event)
    sign = 1 if event["below"] is None else -1
    happened = sum(sign * (value - limit) > _AT_THE_LIMIT * abs(limit) for value in finite)
    return f"{happened} of {len(finite)}" if finite else "–"
