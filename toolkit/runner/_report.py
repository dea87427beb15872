"""The contents of the report: pictures, tables and sentences, from records. Imports neither torch nor an algorithm."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.runner._chart import Key, significant, standalone
from toolkit.runner._figures import (
    COLOURS,
    METHODS,
    Arrow,
    Band,
    Bar,
    Level,
    Path,
    Strip,
    degrees,
    draw_arrows,
    draw_bands,
    draw_bars,
    draw_curves,
    draw_methods,
    draw_parameters,
    draw_plane,
    draw_strips,
    draw_sweep,
)
from toolkit.runner._findings import Difference, broken_claims, compared, doubts, finals, median, rounding, verdict_of
from toolkit.runner._records import BLOCKED, WITHOUT_EFFECT, ExperimentRecords, Record, overrides_of

__all__ = ["draw_card", "experiment_view", "first_sentence", "training_effect", "variant_verdict"]

# The largest readable number of parameters in one picture; those with the largest leak are shown.
_MOST_PARAMETERS = 10

# A smaller number in a table is rounding.
_NOTHING = 1e-9

# A value within this relative distance of an event's limit counts as at the limit, not beyond: events are coarse.
_AT_THE_LIMIT = 1e-5

# The smallest number of seeds for which the report shows where each seed ended.
_MANY_SEEDS = 10

# A sweep with more curves than this is shown in its table only.
_MOST_PANELS = 4

# If opening the block lengthens a gradient by more than this factor, the blocked gradient has vanished.
_VANISHED = 1e4


@dataclass(frozen=True)
class VariantView:
    """One set of open blocks, summarised over the seeds, in words and numbers ready for the page."""

    name: str
    colour: str
    blocks: list[tuple[str, str]]
    verdict: str
    kind: str
    sentence: str
    outcome: str
    angle: str
    ratio: str
    leak: str
    target: str
    final: str
    training: str
    time: str
    memory: str


@dataclass(frozen=True)
class SeedsView:
    """Where the seeds ended: a picture, and a table of medians and ranges whose rows begin with the variant."""

    count: int
    picture: str
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class SweepView:
    """Results of the runs for each value of a swept quantity; a table row begins with value and variant."""

    label: str
    picture: str
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class MethodsView:
    """Results of other methods on the same model: a picture, and a table whose rows begin with the method."""

    label: str
    picture: str
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class OthersView:
    """Results with overridden values beside those of the config: a picture if one number varies, and table rows."""

    picture: str
    rows: list[list[str]]


@dataclass(frozen=True)
class ExperimentView:
    """One config, ready for the page."""

    key: str
    title: str
    finding: str
    with_values: str
    broken_claims: list[str]
    doubts: list[str]
    damaged: list[str]
    about: str
    objective: str
    better: str
    variants: list[VariantView]
    rows: list[list[str]]
    arrows: str
    parameters: str
    curves: str
    plane: str
    seeds: SeedsView | None
    sweep: SweepView | None
    methods: MethodsView | None
    others: OthersView | None
    costs: str
    config: str
    command: str
    provenance: list[tuple[str, str]]


def experiment_view(experiment: ExperimentRecords) -> ExperimentView:
    """Return the contents of an experiment's page."""
    records = experiment.records
    newest = records[-1].data
    names = [name for name in newest["variants"] if name != BLOCKED]
    colours = {name: COLOURS[(index + 1) % len(COLOURS)] for index, name in enumerate(names)}
    every, all_colours = [BLOCKED, *names], {BLOCKED: COLOURS[0], **colours}
    variants = [_variant(records, name, colours[name]) for name in names]
    return ExperimentView(
        key=f"x-{experiment.name}",
        title=newest["config"]["title"],
        finding="" if overrides_of(records) else newest["config"]["finding"],
        with_values=" ".join(overrides_of(records)),
        broken_claims=[] if overrides_of(records) else broken_claims(records),
        doubts=doubts(records),
        damaged=experiment.damaged,
        about=newest["about"],
        objective=newest["objective"]["label"],
        better=better_end(records),
        variants=variants,
        rows=[
            ["blocked", "0°", "×1", "0", _target(records, BLOCKED), _spread(finals(records, BLOCKED)), "×1", "×1"],
            *([f"{v.name} open", v.angle, v.ratio, v.leak, v.target, v.final, v.time, v.memory] for v in variants),
        ],
        arrows=draw_arrows([(title, _arrows(of, when, colours)) for when, title, of in _moments(records)]),
        parameters=_parameters(records, names, colours),
        curves=draw_bands(_curves(records, every, all_colours), [] if newest.get("methods") else _references(newest)),
        plane=_plane(records, every, all_colours),
        seeds=_seeds(records, every, all_colours),
        sweep=_sweep(records, every, all_colours),
        methods=_methods(records),
        others=_others(experiment, names, all_colours),
        costs=draw_bars(_costs(records, every, all_colours)),
        config=newest["source"].strip(),
        command=_command(experiment.name, newest),
        provenance=_provenance(records),
    )


def better_end(records: Sequence[Record]) -> str:
    """Return the better end of the objective's axis in words."""
    return "higher is better" if records[-1].data["objective"]["higher_is_better"] else "lower is better"


def draw_card(experiment: ExperimentRecords) -> str:
    """Draw the objective over training, as a file."""
    records = experiment.records
    names = list(records[-1].data["variants"])
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    ((title, bands, _),) = _curves(records, names, colours)[:1]
    return standalone(draw_curves(title, "training step", bands, (), height=170, told=False))


def first_sentence(text: str) -> str:
    """Return the beginning of a text, up to the first full stop that is followed by a capital letter."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split()), maxsplit=1)[0]


def _moments(records: Sequence[Record]) -> list[tuple[str, str, Sequence[Record]]]:
    """Return the moments at which gradients were compared, and the records that reached each."""
    trained = [record for record in records if record.data["variants"][BLOCKED]["diverged_at"] is None]
    moments: list[tuple[str, str, Sequence[Record]]] = [("first", "before the first step", records)]
    return [*moments, ("last", "after training with the block", trained)] if trained else moments


def _variant(records: Sequence[Record], name: str, colour: str) -> VariantView:
    newest = records[-1].data
    first, *later = (
        [record.data["comparison"][when]["effects"][name] for record in of] for when, _, of in _moments(records)
    )
    effects, last = first, later[0] if later else []
    verdict, opened = variant_verdict(records, name), newest["variants"][name]["open"]
    return VariantView(
        name=name,
        colour=colour,
        blocks=[(block, newest["blocks"][block]) for block in opened],
        verdict=verdict["label"],
        kind=verdict["kind"],
        sentence=_of_blocks(opened, _sentence(verdict, effects, last)),
        outcome=_of_blocks(opened, _outcome(records, name) + _happened(records, name)),
        angle=_range([_degrees(effect["cosine"]) for effect in effects], lambda angle: f"{significant(angle, 3)}°"),
        ratio=_range([effect["ratio"] for effect in effects], lambda ratio: f"×{significant(ratio, 3)}"),
        leak=_range([_relative_leak(record, name, "first") for record in records], "{:.2g}".format),
        target=_target(records, name),
        final=_spread(finals(records, name)),
        training=training_effect(records, name),
        time=_range([_cost_ratio(record, name, "seconds_per_step") for record in records], "×{:.2f}".format),
        memory=_range([_cost_ratio(record, name, "graph_bytes") for record in records], "×{:.2f}".format),
    )


# Words of a sentence about a block -> those about several.
_OF_SEVERAL = {
    "the block improves": "the blocks improve",
    "The block itself makes": "The blocks themselves make",
    "this block, so it has": "these blocks, so they have",
    "the block": "the blocks",
    "with it": "with them",
}


def _of_blocks(opened: Sequence[str], sentences: str) -> str:
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


def _sentence(verdict: Mapping[str, Any], first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> str:
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
    if length < _NOTHING:
        return "makes the gradient vanish"
    angle = significant(median(_degrees(effect["cosine"]) for effect in effects), 2)
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


def _outcome(records: Sequence[Record], name: str) -> str:
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
        end = "in every seed" if found.exact else "up to rounding"
        return f"Training ends at {ends} with and without the block, {end}."
    seeds = f"{len(found.gains)} seeds" if len(found.gains) > 1 else "one seed"
    counts = f"better in {found.better} and worse in {found.worse} of {seeds}"
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


def _happened(records: Sequence[Record], name: str) -> str:
    """Return the events of the open and of the blocked runs, with the number of seeds of each."""
    sentences = []
    for event in _events(records, list(records[-1].data["variants"][BLOCKED]["metrics"])):
        opened, blocked = (_count(event, finals(records, variant, event["metric"])) for variant in (name, BLOCKED))
        clause = event["says"][:1].upper() + event["says"][1:]
        sentences.append(f" {clause} in {opened} seeds without the block, and in {blocked} with it.")
    return "".join(sentences)


def _arrows(records: Sequence[Record], when: str, colours: dict[str, str]) -> list[Arrow]:
    arrows = [Arrow(BLOCKED, 1.0, 1.0, COLOURS[0])]
    for name, colour in colours.items():
        effects = [record.data["comparison"][when]["effects"][name] for record in records]
        ratio, cosine = median([e["ratio"] for e in effects]), median([e["cosine"] for e in effects])
        arrows.append(Arrow("open" if len(colours) == 1 else f"{name} open", ratio, cosine, colour))
    return arrows


def _parameters(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> str:
    when, _, reached = _moments(records)[-1]
    effects = {name: [record.data["comparison"][when]["effects"][name] for record in reached] for name in names}
    known = list(effects[names[0]][0]["per_parameter"])

    def values(name: str, parameter: str, what: str) -> float:
        return median([effect["per_parameter"][parameter][what] for effect in effects[name]])

    leaks = {parameter: max(values(name, parameter, "leak") for name in names) for parameter in known}
    kept = set(sorted(known, key=lambda parameter: -leaks[parameter])[:_MOST_PARAMETERS])
    shown = [parameter for parameter in known if parameter in kept]
    series = [
        (
            _legend(name, [BLOCKED, *names]),
            [values(name, parameter, "cosine") for parameter in shown],
            [values(name, parameter, "ratio") for parameter in shown],
            colours[name],
        )
        for name in names
    ]
    return draw_parameters(shown, series)


def _curves(
    records: Sequence[Record], names: Sequence[str], colours: dict[str, str]
) -> list[tuple[str, list[Band], float | None]]:
    newest, metrics = records[-1].data, _metrics(records)
    panels = []
    for metric in metrics[:3]:
        bands = []
        for index, name in enumerate(names):
            runs = [record.data["variants"][name] for record in records]
            longest = max((run["steps"] for run in runs), key=len)
            values = np.full((len(runs), len(longest)), np.nan)
            for row, run in zip(values, runs, strict=True):
                row[: len(run["steps"])] = [np.nan if v is None else v for v in run["metrics"][metric]]
            # The later lines are dashed, so that a line that lies exactly on another is still seen.
            steps = np.asarray(longest, dtype=float)
            bands.append(Band(_legend(name, names), steps, values, colours[name], min(index, 3)))
        title = newest["objective"]["label"] if metric == "objective" else metric.replace("_", " ")
        panels.append((title, bands, _best(records) if metric == "objective" else None))
    return panels


def _metrics(records: Sequence[Record]) -> list[str]:
    """Return the metrics that are drawn as curves."""
    newest = records[-1].data
    return [name for name in newest["variants"][BLOCKED]["metrics"] if name not in (newest.get("plane") or ())]


def _plane(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> str:
    """Draw the path of the first seed in the plane of two metrics, for each variant and each other method."""
    first = records[0].data
    if not (plane := first.get("plane")):
        return ""

    def path(label: str, metrics: Mapping[str, Sequence[float | None]], colour: str, dashes: int = 0) -> Path:
        points = zip(*(metrics.get(name, ()) for name in plane), strict=True)
        return Path(Key(label, colour, dashes), [(x, y) for x, y in points if x is not None and y is not None])

    variants = [
        path(_legend(name, names), first["variants"][name]["metrics"], colours[name], min(index, 3))
        for index, name in enumerate(names)
    ]
    methods = enumerate(((first["methods"] or {}).get("trained") or {}).items())
    others = [path(name, trained["metrics"], METHODS[index % len(METHODS)]) for index, (name, trained) in methods]
    x, y = plane
    return draw_plane(x, y, [("with the block and without", variants), *((each.key.label, [each]) for each in others)])


def _seeds(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> SeedsView | None:
    """Return where every seed ended; None if the seeds are few enough for the curves to show it."""
    if len(records) < _MANY_SEEDS:
        return None
    newest, metrics = records[-1].data, _metrics(records)
    ends = {(metric, name): finals(records, name, metric) for metric in metrics for name in names}
    label = newest["objective"]["label"]
    titles = {metric: label if metric == "objective" else metric.replace("_", " ") for metric in metrics}
    marks = {event["metric"]: _limit(event) for event in newest.get("events", [])}
    differences = [
        Strip(_legend(name, names), np.subtract(ends["objective", name], ends["objective", BLOCKED]), colours[name])
        for name in names[1:]
    ]
    panels: list[tuple[str, list[Strip], float | None]] = [(f"{label}, open minus blocked", differences, 0.0)]
    for metric in metrics[1:]:
        strips = [Strip(_legend(name, names), np.asarray(ends[metric, name]), colours[name]) for name in names]
        panels.append((titles[metric], strips, marks.get(metric)))
    events = _events(records, metrics)
    heads = ["variant", *titles.values(), *(_headline(event) for event in events)]
    rows = []
    for name in names:
        cells = [_range(ends[metric, name], _brief) for metric in metrics]
        cells += [_count(event, ends[event["metric"], name]) for event in events]
        rows.append([_legend(name, names), *cells])
    return SeedsView(len(records), draw_strips(panels), heads, rows)


def _sweep(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> SweepView | None:
    newest = records[-1].data
    swept = newest.get("sweep")
    if swept is None:
        return None
    positions = swept["values"]
    found = {name: _swept(records, name, len(positions)) for name in names}
    curves = list(next((values for values in found.values() if values), {}))
    panels = [
        (
            curve,
            [
                Band(_legend(name, names), np.asarray(positions, dtype=float), found[name][curve], colours[name])
                for name in names
                if found[name]
            ],
        )
        for curve in curves
    ]
    events = _events(records, curves)
    rows = []
    for index, position in enumerate(positions):
        for name in names:
            values = {curve: found[name][curve][:, index].tolist() if found[name] else [] for curve in curves}
            cells = [_range(values[curve], _brief) for curve in curves]
            cells += [_count(event, values[event["metric"]]) for event in events]
            rows.append([f"{position:g}", _legend(name, names), *cells])
    heads = [swept["label"], "variant", *curves, *(_headline(event) for event in events)]
    picture = draw_sweep(swept["label"], positions, panels[:_MOST_PANELS])
    return SweepView(swept["label"], picture, heads, rows)


def _references(data: Mapping[str, Any]) -> list[Level]:
    known = data["config"].get("references", {})
    return [Level(name, value, dashes=1 + index) for index, (name, value) in enumerate(known.items())]


def _methods(records: Sequence[Record]) -> MethodsView | None:
    records = [record for record in records if (record.data.get("methods") or {}).get("trained")]
    if not records:
        return None
    newest = records[-1].data
    methods = newest["methods"]
    sign = 1 if newest["objective"]["higher_is_better"] else -1
    bands, levels, rows = [], [], []
    coordinates = newest.get("plane") or ()
    others = [
        name for name in next(iter(methods["trained"].values()))["metrics"] if name not in ("objective", *coordinates)
    ]
    for index, name in enumerate(methods["trained"]):
        dashes, colour = divmod(index, len(METHODS))
        trained = [record.data["methods"]["trained"][name] for record in records]
        values = np.asarray([method["metrics"]["objective"] for method in trained], dtype=float)
        best = at = "–"
        if values.shape[1] > 1:
            bands.append(Band(name, np.asarray(methods["steps"], dtype=float), values, METHODS[colour], dashes))
            ranked = np.where(np.isfinite(values), sign * values, -np.inf)
            tops = ranked.max(axis=1, keepdims=True)
            best = _range((sign * tops).ravel().tolist(), _brief)
            # The first step as good as the best: on a plateau, the last bit would decide between equal steps.
            reached = (ranked >= tops - rounding(records) * np.abs(tops)).argmax(axis=1)
            at = _range([float(methods["steps"][step]) for step in reached], "{:.0f}".format)
        elif np.isfinite(values).any():
            levels.append(Level(name, float(np.nanmean(values)), METHODS[colour], dashes))
        ends = [
            _range([method["metrics"][metric][-1] for method in trained], _brief) for metric in ("objective", *others)
        ]
        rows.append([name, best, at, *ends, _range([method["seconds"] for method in trained], "{:.3g} s".format)])
    references = _references(newest)
    for level in references:
        rows.append([level.label, "–", "–", _brief(level.value), *["–"] * len(others), "–"])
    label, objective = methods["label"], newest["objective"]["label"]
    heads = ["method", "best on the way", f"at {label}", "at the end", *others, "processor time"]
    picture = draw_methods(objective, label, bands, [*levels, *references], _best(records))
    return MethodsView(label, picture, heads, rows)


def _others(experiment: ExperimentRecords, names: Sequence[str], colours: dict[str, str]) -> OthersView | None:
    """Return the results with other values of the config; None if there are none."""
    groups = [experiment.records, *experiment.overridden]
    if len(groups) == 1:
        return None
    rows = [
        [
            " ".join(overrides_of(records)) or "of the config",
            name,
            str(len(records)),
            _spread(finals(records, BLOCKED)),
            _spread(finals(records, name)),
            training_effect(records, name),
        ]
        for records in groups
        for name in names
        if name in records[-1].data["variants"]
    ]
    return OthersView(_swept_values(groups, [BLOCKED, *names], colours), rows)


def _swept_values(groups: Sequence[Sequence[Record]], names: Sequence[str], colours: dict[str, str]) -> str:
    """Draw the objective over a number that alone differs between groups of records; nothing if there is none."""
    configs = [records[-1].data["config"] for records in groups]
    varied = [name for name in configs[0] if any(config.get(name) != configs[0][name] for config in configs)]
    varied = [name for name in varied if name not in WITHOUT_EFFECT]
    if len(varied) != 1 or not all(isinstance(config[varied[0]], int | float) for config in configs):
        return ""
    groups = sorted(groups, key=lambda records: float(records[-1].data["config"][varied[0]]))
    positions = [float(records[-1].data["config"][varied[0]]) for records in groups]
    bands = []
    for name in names:
        values = np.full((max(map(len, groups)), len(groups)), np.nan)
        for column, records in enumerate(groups):
            if name in records[-1].data["variants"]:
                values[: len(records), column] = finals(records, name)
        bands.append(Band(_legend(name, names), np.asarray(positions), values, colours[name]))
    return draw_sweep(varied[0], positions, [(groups[0][-1].data["objective"]["label"], bands)])


def _swept(records: Sequence[Record], name: str, count: int) -> dict[str, NDArray[np.float64]]:
    """Return curve -> (seeds, values); empty if no seed was trained to its end."""
    sweeps = [record.data["variants"][name].get("sweep") for record in records]
    curves = next((list(sweep) for sweep in sweeps if sweep is not None), [])
    nothing = [None] * count
    return {
        curve: np.asarray([nothing if sweep is None else sweep[curve] for sweep in sweeps], dtype=float)
        for curve in curves
    }


def _events(records: Sequence[Record], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events that these metrics decide."""
    return [event for event in records[-1].data.get("events", []) if event["metric"] in metrics]


def _limit(event: Mapping[str, Any]) -> float:
    limit: float = event["above"] if event["below"] is None else event["below"]
    return limit


def _headline(event: Mapping[str, Any]) -> str:
    return f"{event['says']} ({event['metric']} {'above' if event['below'] is None else 'below'} {_limit(event):g})"


def _count(event: Mapping[str, Any], values: Sequence[float]) -> str:
    """Return the number of seeds in which the event happened, of the seeds that have a value."""
    finite, limit = [value for value in values if math.isfinite(value)], _limit(event)
    sign = 1 if event["below"] is None else -1
    happened = sum(sign * (value - limit) > _AT_THE_LIMIT * abs(limit) for value in finite)
    return f"{happened} of {len(finite)}" if finite else "–"


def _best(records: Sequence[Record]) -> float | None:
    """Return the best value that can be reached: the mean over the seeds, whose data may differ."""
    values = [record.data["objective"]["best"] for record in records]
    return None if None in values else statistics.fmean(values)


def _costs(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> list[tuple[str, list[Bar]]]:
    def panel(title: str, what: str, write: Callable[[float], str]) -> tuple[str, list[Bar]]:
        medians = [median([record.data["variants"][name][what] for record in records]) for name in names]
        bars = [
            Bar(_legend(name, names), value, write(value), colours[name])
            for name, value in zip(names, medians, strict=True)
        ]
        return title, bars

    panels = [
        panel("time of a gradient", "seconds_per_step", _milliseconds),
        panel("graph memory", "graph_bytes", _bytes),
        panel("peak memory", "peak_bytes", _bytes),
    ]
    return [(title, bars) for title, bars in panels if all(math.isfinite(bar.value) for bar in bars)]


def _legend(name: str, names: Sequence[str]) -> str:
    if name == BLOCKED:
        return "blocked"
    return "open" if len(names) == 2 else f"{name} open"


def _target(records: Sequence[Record], name: str) -> str:
    return _range([record.data["comparison"]["first"]["target_error"][name] for record in records], "{:.1e}".format)


def _relative_leak(record: Record, name: str, when: str) -> float:
    comparison = record.data["comparison"][when]
    size, leak = comparison["blocked_norm"], comparison["effects"][name]["leak"]
    return leak / size if size and leak is not None else math.nan


def _cost_ratio(record: Record, name: str, what: str) -> float:
    blocked, opened = (record.data["variants"][variant][what] for variant in (BLOCKED, name))
    return opened / blocked if blocked and opened else math.nan


def _degrees(cosine: float | None) -> float:
    return math.nan if cosine is None else degrees(cosine)


def _range(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Write the median, and the range of the seeds where it shows."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "–"
    texts = [write(value) for value in (statistics.median(finite), min(finite), max(finite))]
    return texts[0] if texts[1] == texts[2] else f"{texts[0]} ({texts[1]} … {texts[2]})"


def _spread(values: Sequence[float]) -> str:
    finite: NDArray[np.float64] = np.asarray([value for value in values if math.isfinite(value)])
    if not finite.size:
        return "–"
    if finite.size == 1:
        return f"{finite[0]:.5g}"
    return f"{finite.mean():.5g} ± {finite.std(ddof=1):.2g}"


def _brief(value: float) -> str:
    """Write a number for a large table; a number that is only rounding becomes 0."""
    return significant(value, 4) if abs(value) > _NOTHING else "0"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _command(name: str, data: dict[str, Any]) -> str:
    overrides = "".join(f" --set {shlex.quote(override)}" for override in data["overrides"])
    path = data.get("path", f"configs/{name}.toml")
    return f"stopgrad run {shlex.quote(path)}{overrides}"


def _provenance(records: Sequence[Record]) -> list[tuple[str, str]]:
    newest = records[-1].data
    git = newest["git"]
    commit = "not in a git checkout" if git is None else git["commit"][:12] + (" with changes" if git["dirty"] else "")
    machine = newest["machine"]
    return [
        ("seeds", ", ".join(str(record.seed) for record in records)),
        ("commit", commit),
        ("versions", ", ".join(f"{package} {version}" for package, version in newest["versions"].items())),
        (
            "machine",
            f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads used, {machine['system']}",
        ),
        ("finished", newest["finished"]),
    ]
