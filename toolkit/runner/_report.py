"""Draws the report: one self-contained page from the records in `results/`.

Imports neither torch nor toolkit: the page can be drawn where they are not installed.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from toolkit.runner._figures import (
    COLOURS,
    Arrow,
    Band,
    Bar,
    Level,
    Strip,
    degrees,
    draw_arrows,
    draw_bands,
    draw_bars,
    draw_methods,
    draw_parameters,
    draw_strips,
    draw_sweep,
    significant,
)
from toolkit.runner._records import BLOCKED, ExperimentRecords, Record
from toolkit.runner._rounding import OF_TRAINING

__all__ = ["write_report"]

# The largest readable number of parameters in one picture; those with the largest leak are shown.
_MOST_PARAMETERS = 10

# A smaller number in a table is rounding.
_NOTHING = 1e-9

# A value within this relative distance of an event's limit counts as at the limit, not beyond: events are coarse.
_AT_THE_LIMIT = 1e-5

# The smallest number of seeds for which the report shows where each seed ended.
_MANY_SEEDS = 10

_GREYS = ("#999999", "#333333", "#bbbbbb")  # of what others have said

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
    """Where the seeds ended: a picture, and a table of medians and ranges with a row for every variant."""

    count: int
    picture: str
    heads: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class SweepView:
    """Results of the runs for each value of a swept quantity; a table row is (value, variant, cells)."""

    label: str
    variants: int
    picture: str
    heads: list[str]
    rows: list[tuple[str, str, list[str]]]


@dataclass(frozen=True)
class MethodsView:
    """Results of other methods on the same model: a picture, and a table with a row (method, cells) for each method."""

    label: str
    picture: str
    heads: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class ExperimentView:
    """One config, ready for the page."""

    key: str
    title: str
    finding: str
    about: str
    objective: str
    better: str
    blocked_final: str
    blocked_target: str
    variants: list[VariantView]
    arrows: str
    parameters: str
    curves: str
    seeds: SeedsView | None
    sweep: SweepView | None
    methods: MethodsView | None
    costs: str
    config: str
    command: str
    provenance: list[tuple[str, str]]


def write_report(experiments: Sequence[ExperimentRecords], page: Path, zoo: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write the page atomically and return its path.

    Args:
        experiments: The records of every config.
        page: The file to write.
        zoo: The record of the bug zoo. None: the page has no such section.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("toolkit.runner", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    views = [_view(experiment) for experiment in experiments]
    template = environment.get_template("_report.html.j2")
    text = template.render(experiments=views, zoo=zoo, blocked_colour=COLOURS[0])
    page.parent.mkdir(parents=True, exist_ok=True)
    unfinished = page.with_name(f".{page.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(page)


def _view(experiment: ExperimentRecords) -> ExperimentView:
    records = experiment.records
    newest = records[-1].data
    names = [name for name in newest["variants"] if name != BLOCKED]
    colours = {name: COLOURS[(index + 1) % len(COLOURS)] for index, name in enumerate(names)}
    every, all_colours = [BLOCKED, *names], {BLOCKED: COLOURS[0], **colours}
    key = f"x-{experiment.name}"
    better = "higher is better" if newest["objective"]["higher_is_better"] else "lower is better"
    return ExperimentView(
        key=key,
        title=newest["config"]["title"],
        finding=newest["config"]["finding"],
        about=newest["about"],
        objective=newest["objective"]["label"],
        better=better,
        blocked_final=_spread(_finals(records, BLOCKED)),
        blocked_target=_target(records, BLOCKED),
        variants=[_variant(records, name, colours[name]) for name in names],
        arrows=draw_arrows([(title, _arrows(records, when, colours)) for when, title in _MOMENTS], f"{key}-arrows"),
        parameters=_parameters(records, names, colours, f"{key}-parameters"),
        curves=draw_bands(
            _curves(records, every, all_colours),
            [] if newest.get("methods") else _references(newest, COLOURS[len(every) :]),
            f"{key}-curves",
        ),
        seeds=_seeds(records, every, all_colours, f"{key}-seeds"),
        sweep=_sweep(records, every, all_colours, f"{key}-sweep"),
        methods=_methods(records, f"{key}-methods"),
        costs=draw_bars(_costs(records, every, all_colours), f"{key}-costs"),
        config=newest["source"].strip(),
        command=_command(experiment.name, newest),
        provenance=_provenance(records),
    )


_MOMENTS = (("first", "before the first step"), ("last", "after training with the block"))


def _variant(records: Sequence[Record], name: str, colour: str) -> VariantView:
    newest = records[-1].data
    effects = [record.data["comparison"]["first"]["effects"][name] for record in records]
    last = [record.data["comparison"]["last"]["effects"][name] for record in records]
    verdict = _agreed([_verdict(effect) for effect in effects])
    return VariantView(
        name=name,
        colour=colour,
        blocks=[(block, newest["blocks"][block]) for block in newest["variants"][name]["open"]],
        verdict=verdict["label"],
        kind=verdict["kind"],
        sentence=_sentence(verdict, effects, last),
        outcome=_outcome(records, name) + _happened(records, name),
        angle=_range([_degrees(effect["cosine"]) for effect in effects], lambda angle: f"{significant(angle, 3)}°"),
        ratio=_range([effect["ratio"] for effect in effects], lambda ratio: f"×{significant(ratio, 3)}"),
        leak=_range([_relative_leak(record, name, "first") for record in records], "{:.2g}".format),
        target=_target(records, name),
        final=_spread(_finals(records, name)),
        training=_training(records, name),
        time=_range([_cost_ratio(record, name, "seconds_per_step") for record in records], "×{:.2f}".format),
        memory=_range([_cost_ratio(record, name, "graph_bytes") for record in records], "×{:.2f}".format),
    )


def _verdict(effect: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return kind, parameters, label and text of a verdict; older records have the text alone."""
    verdict: Mapping[str, Any] | str = effect["verdict"]
    if not isinstance(verdict, str):
        return verdict
    label, _, names = verdict.partition(" to [")
    parameters = names.removesuffix("]").split(", ") if names else []
    return {"kind": verdict.split()[0], "parameters": parameters, "label": label, "text": verdict}


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
    if kind in _NOTHING_LEAKS and all(_verdict(effect)["kind"] in _NOTHING_LEAKS for effect in last):
        if kind == "redundant" and all(effect["leak"] == 0 for effect in [*first, *last]):
            return "Opening the block does not change a single bit of the gradient: the leak is zero."
        return _NOTHING_LEAKS[kind]
    start, end = _turn(first), _turn(last)
    if start == end:
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
    angle = significant(_median(_degrees(effect["cosine"]) for effect in effects), 2)
    return f"turns the gradient by {angle}° and makes it {significant(length, 2)} times as long"


def _training(records: Sequence[Record], name: str) -> str:
    """Return a few words on how the open runs end, for the table of all experiments."""
    gains, tie = _gains(records, name)
    if not gains:
        return "breaks off"
    worse, better = sum(gain > tie for gain in gains), sum(gain < -tie for gain in gains)
    if not worse and not better:
        return "same"
    return f"worse in {worse} of {len(gains)}" if worse >= better else f"better in {better} of {len(gains)}"


def _gains(records: Sequence[Record], name: str) -> tuple[list[float], float]:
    """Return the block's improvement of the final objective for each seed, and the largest difference that is a tie."""
    sign = 1 if records[-1].data["objective"]["higher_is_better"] else -1
    pairs = [
        (blocked, opened)
        for blocked, opened in zip(_finals(records, BLOCKED), _finals(records, name), strict=True)
        if math.isfinite(blocked) and math.isfinite(opened)
    ]
    size = statistics.fmean(abs(blocked) for blocked, _ in pairs) if pairs else 0.0
    return [sign * (blocked - opened) for blocked, opened in pairs], _rounding(records) * (size or 1.0)


def _rounding(records: Sequence[Record]) -> float:
    return OF_TRAINING[records[-1].data["config"]["dtype"]]


def _outcome(records: Sequence[Record], name: str) -> str:
    gains, tie = _gains(records, name)
    diverged = sum(record.data["variants"][name]["diverged_at"] is not None for record in records)
    ended = (
        f" In {diverged} of {len(records)} seeds the open run ended early: its loss was not finite." if diverged else ""
    )
    if not gains:
        return f"No seed can be compared.{ended}"
    if not any(gains):
        return f"Training ends at exactly the same value with and without the block, in every seed.{ended}"
    better, worse = sum(gain > tie for gain in gains), sum(gain < -tie for gain in gains)
    if not better and not worse:
        return f"Training ends at the same value with and without the block, up to rounding.{ended}"
    mean, label = statistics.fmean(gains), records[-1].data["objective"]["label"]
    if abs(mean) <= tie:
        return (
            f"With the block, the {label} ends the same on average, better in {better} and worse in {worse} of "
            f"{len(gains)} seeds.{ended}"
        )
    side, wins = ("better", better) if mean > 0 else ("worse", worse)
    return (
        f"With the block, the {label} ends {significant(abs(mean), 3)} {side} on average, and {side} in {wins} of "
        f"{len(gains)} seeds.{ended}"
    )


def _happened(records: Sequence[Record], name: str) -> str:
    """Return the events of the open and of the blocked runs, with the number of seeds of each."""
    sentences = []
    for event in _events(records, list(records[-1].data["variants"][BLOCKED]["metrics"])):
        opened, blocked = (_count(event, _finals(records, variant, event["metric"])) for variant in (name, BLOCKED))
        clause = event["says"][:1].upper() + event["says"][1:]
        sentences.append(f" {clause} in {opened} seeds without the block, and in {blocked} with it.")
    return "".join(sentences)


def _arrows(records: Sequence[Record], when: str, colours: dict[str, str]) -> list[Arrow]:
    arrows = [Arrow(BLOCKED, 1.0, 1.0, COLOURS[0])]
    for name, colour in colours.items():
        effects = [record.data["comparison"][when]["effects"][name] for record in records]
        ratio, cosine = _median([e["ratio"] for e in effects]), _median([e["cosine"] for e in effects])
        arrows.append(Arrow("open" if len(colours) == 1 else f"{name} open", ratio, cosine, colour))
    return arrows


def _parameters(records: Sequence[Record], names: Sequence[str], colours: dict[str, str], key: str) -> str:
    effects = {name: [record.data["comparison"]["last"]["effects"][name] for record in records] for name in names}
    known = list(effects[names[0]][0]["per_parameter"])

    def values(name: str, parameter: str, what: str) -> float:
        return _median([effect["per_parameter"][parameter][what] for effect in effects[name]])

    leaks = {parameter: max(values(name, parameter, "leak") for name in names) for parameter in known}
    kept = set(sorted(known, key=lambda parameter: -leaks[parameter])[:_MOST_PARAMETERS])
    shown = [parameter for parameter in known if parameter in kept]
    series = [
        (
            name,
            [values(name, parameter, "cosine") for parameter in shown],
            [values(name, parameter, "ratio") for parameter in shown],
            colours[name],
        )
        for name in names
    ]
    return draw_parameters(shown, series, key)


def _curves(
    records: Sequence[Record], names: Sequence[str], colours: dict[str, str]
) -> list[tuple[str, list[Band], float | None]]:
    newest = records[-1].data
    metrics = list(newest["variants"][BLOCKED]["metrics"])
    panels = []
    for metric in metrics[:3]:
        bands = []
        for name in names:
            runs = [record.data["variants"][name] for record in records]
            longest = max((run["steps"] for run in runs), key=len)
            values = np.full((len(runs), len(longest)), np.nan)
            for row, run in zip(values, runs, strict=True):
                row[: len(run["steps"])] = [np.nan if v is None else v for v in run["metrics"][metric]]
            bands.append(Band(_legend(name, names), np.asarray(longest, dtype=float), values, colours[name]))
        title = newest["objective"]["label"] if metric == "objective" else metric.replace("_", " ")
        panels.append((title, bands, _best(records) if metric == "objective" else None))
    return panels


def _seeds(records: Sequence[Record], names: Sequence[str], colours: dict[str, str], key: str) -> SeedsView | None:
    """Return where every seed ended; None if the seeds are few enough for the curves to show it."""
    if len(records) < _MANY_SEEDS:
        return None
    newest = records[-1].data
    metrics = list(newest["variants"][BLOCKED]["metrics"])
    finals = {(metric, name): _finals(records, name, metric) for metric in metrics for name in names}
    label = newest["objective"]["label"]
    titles = {metric: label if metric == "objective" else metric.replace("_", " ") for metric in metrics}
    marks = {event["metric"]: _limit(event) for event in newest.get("events", [])}
    differences = [
        Strip(_legend(name, names), np.subtract(finals["objective", name], finals["objective", BLOCKED]), colours[name])
        for name in names[1:]
    ]
    panels: list[tuple[str, list[Strip], float | None]] = [(f"{label}, open minus blocked", differences, 0.0)]
    for metric in metrics[1:]:
        strips = [Strip(_legend(name, names), np.asarray(finals[metric, name]), colours[name]) for name in names]
        panels.append((titles[metric], strips, marks.get(metric)))
    events = _events(records, metrics)
    heads = [*titles.values(), *(_headline(event) for event in events)]
    rows = []
    for name in names:
        cells = [_range(finals[metric, name], _brief) for metric in metrics]
        cells += [_count(event, finals[event["metric"], name]) for event in events]
        rows.append((_legend(name, names), cells))
    return SeedsView(len(records), draw_strips(panels, key), heads, rows)


def _sweep(records: Sequence[Record], names: Sequence[str], colours: dict[str, str], key: str) -> SweepView | None:
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
            rows.append((f"{position:g}", _legend(name, names), cells))
    picture = draw_sweep(swept["label"], positions, panels[:_MOST_PANELS], key)
    return SweepView(swept["label"], len(names), picture, [*curves, *(_headline(event) for event in events)], rows)


def _references(data: Mapping[str, Any], colours: Sequence[str]) -> list[Level]:
    known = data["config"].get("references", {})
    return [Level(name, value, colours[index % len(colours)]) for index, (name, value) in enumerate(known.items())]


def _methods(records: Sequence[Record], key: str) -> MethodsView | None:
    newest = records[-1].data
    methods = newest.get("methods")
    if methods is None:
        return None
    sign = 1 if newest["objective"]["higher_is_better"] else -1
    bands, levels, rows = [], [], []
    others = [metric for metric in next(iter(methods["trained"].values()))["metrics"] if metric != "objective"]
    for index, name in enumerate(methods["trained"]):
        colour = COLOURS[1 + index % (len(COLOURS) - 1)]
        trained = [record.data["methods"]["trained"][name] for record in records]
        values = np.asarray([method["metrics"]["objective"] for method in trained], dtype=float)
        best = at = "–"
        if values.shape[1] > 1:
            bands.append(Band(name, np.asarray(methods["steps"], dtype=float), values, colour))
            ranked = np.where(np.isfinite(values), sign * values, -np.inf)
            tops = ranked.max(axis=1, keepdims=True)
            best = _range((sign * tops).ravel().tolist(), _brief)
            # The first step as good as the best: on a plateau, the last bit would decide between equal steps.
            reached = (ranked >= tops - _rounding(records) * np.abs(tops)).argmax(axis=1)
            at = _range([float(methods["steps"][step]) for step in reached], "{:.0f}".format)
        elif np.isfinite(values).any():
            levels.append(Level(name, float(np.nanmean(values)), colour))
        ends = [
            _range([method["metrics"][metric][-1] for method in trained], _brief) for metric in ("objective", *others)
        ]
        rows.append((name, [best, at, *ends, _range([method["seconds"] for method in trained], "{:.3g} s".format)]))
    references = _references(newest, _GREYS)
    for level in references:
        rows.append((level.label, ["–", "–", _brief(level.value), *["–"] * len(others), "–"]))
    label, objective = methods["label"], newest["objective"]["label"]
    heads = ["best on the way", f"at {label}", "at the end", *others, "processor time"]
    picture = draw_methods(objective, label, bands, [*levels, *references], _best(records), key)
    return MethodsView(label, picture, heads, rows)


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
        medians = [_median([record.data["variants"][name][what] for record in records]) for name in names]
        bars = [
            Bar(_legend(name, names), value, write(value), colours[name])
            for name, value in zip(names, medians, strict=True)
        ]
        return title, bars

    return [
        panel("time of a gradient", "seconds_per_step", _milliseconds),
        panel("graph memory", "graph_bytes", _bytes),
        panel("peak memory", "peak_bytes", _bytes),
    ]


def _legend(name: str, names: Sequence[str]) -> str:
    if name == BLOCKED:
        return "blocked"
    return "open" if len(names) == 2 else f"{name} open"


def _finals(records: Sequence[Record], name: str, metric: str = "objective") -> list[float]:
    values = []
    for record in records:
        variant = record.data["variants"][name]
        final = variant["metrics"][metric][-1] if variant["diverged_at"] is None else None
        values.append(math.nan if final is None else final)
    return values


def _target(records: Sequence[Record], name: str) -> str:
    return _range([record.data["comparison"]["first"]["target_error"][name] for record in records], "{:.1e}".format)


def _relative_leak(record: Record, name: str, when: str) -> float:
    comparison = record.data["comparison"][when]
    size, leak = comparison["blocked_norm"], comparison["effects"][name]["leak"]
    return leak / size if size and leak is not None else math.nan


def _cost_ratio(record: Record, name: str, what: str) -> float:
    blocked = record.data["variants"][BLOCKED][what]
    return record.data["variants"][name][what] / blocked if blocked else math.nan


def _degrees(cosine: float | None) -> float:
    return math.nan if cosine is None else degrees(cosine)


def _median(values: Iterable[float | None]) -> float:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


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
    return f"python -m experiments run {shlex.quote(path)}{overrides}"


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
