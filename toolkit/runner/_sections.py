"""Sections of an experiment's page that only some experiments have: a picture, and a table. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.runner._figures import METHODS, Band, Level, Strip, draw_methods, draw_strips, draw_sweep
from toolkit.runner._findings import finals, rounding
from toolkit.runner._numbers import brief, duration, ranged, spread
from toolkit.runner._records import BLOCKED, WITHOUT_EFFECT, ExperimentRecords, Record, overrides_of
from toolkit.runner._sentences import count_of, events_of, headline_of, limit_of, training_effect

__all__ = [
    "Section",
    "best_value",
    "curve_metrics",
    "label_of",
    "methods_section",
    "others_section",
    "reference_levels",
    "seeds_section",
    "sweep_section",
]

# The smallest number of seeds for which the report shows where each seed ended.
_MANY_SEEDS = 10

# A sweep with more curves than this is shown in its table only.
_MOST_PANELS = 4


@dataclass(frozen=True)
class Section:
    """A picture, and a table whose rows begin with a variant, a method, or a swept value and a variant.

    Attributes:
        label: The seeds and their number, the name of a step of the methods, or what is swept.
        picture: SVG; empty for a single swept value, and if no number alone varies.
        heads: The heads of the columns.
        rows: The rows of the table.
        note: Further sentences below the table.
    """

    label: str
    picture: str
    heads: list[str]
    rows: list[list[str]]
    note: str = ""


def seeds_section(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> Section | None:
    """Return where every seed ended; None if the seeds are few enough for the curves to show it."""
    if len(records) < _MANY_SEEDS:
        return None
    newest, metrics = records[-1].data, curve_metrics(records)
    ends = {(metric, name): finals(records, name, metric) for metric in metrics for name in names}
    label = newest["objective"]["label"]
    titles = {metric: label if metric == "objective" else metric.replace("_", " ") for metric in metrics}
    marks = {event["metric"]: limit_of(event) for event in newest.get("events", [])}
    differences = [
        Strip(label_of(name, names), np.subtract(ends["objective", name], ends["objective", BLOCKED]), colours[name])
        for name in names[1:]
    ]
    panels: list[tuple[str, list[Strip], float | None]] = [(f"{label}, open minus blocked", differences, 0.0)]
    for metric in metrics[1:]:
        strips = [Strip(label_of(name, names), np.asarray(ends[metric, name]), colours[name]) for name in names]
        panels.append((titles[metric], strips, marks.get(metric)))
    events = events_of(records, metrics)
    heads = ["variant", *titles.values(), *(headline_of(event) for event in events)]
    rows = []
    for name in names:
        cells = [ranged(ends[metric, name], brief) for metric in metrics]
        cells += [count_of(event, ends[event["metric"], name]) for event in events]
        rows.append([label_of(name, names), *cells])
    return Section(f"{len(records)} seeds", draw_strips(panels), heads, rows)


def sweep_section(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> Section | None:
    """Return the results for each value of a swept quantity; None without a sweep."""
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
                Band(label_of(name, names), np.asarray(positions, dtype=float), found[name][curve], colours[name])
                for name in names
                if found[name]
            ],
        )
        for curve in curves
    ]
    events = events_of(records, curves)
    rows = []
    for index, position in enumerate(positions):
        for name in names:
            values = {curve: found[name][curve][:, index].tolist() if found[name] else [] for curve in curves}
            cells = [ranged(values[curve], brief) for curve in curves]
            cells += [count_of(event, values[event["metric"]]) for event in events]
            rows.append([f"{position:g}", label_of(name, names), *cells])
    heads = [swept["label"], "variant", *curves, *(headline_of(event) for event in events)]
    # Of a single value the table says all that a picture could.
    picture = draw_sweep(swept["label"], positions, panels[:_MOST_PANELS]) if len(positions) > 1 else ""
    return Section(swept["label"], picture, heads, rows)


def _swept(records: Sequence[Record], name: str, count: int) -> dict[str, NDArray[np.float64]]:
    """Return curve -> (seeds, values); empty if no seed was trained to its end."""
    sweeps = [record.data["variants"][name].get("sweep") for record in records]
    curves = next((list(sweep) for sweep in sweeps if sweep is not None), [])
    nothing = [None] * count
    return {
        curve: np.asarray([nothing if sweep is None else sweep[curve] for sweep in sweeps], dtype=float)
        for curve in curves
    }


def methods_section(records: Sequence[Record]) -> Section | None:
    """Return the results of other methods on the same model; None if no seed has trained any."""
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
        # The later lines are dashed, so that a line that lies exactly on another is still seen. A colour that comes
        # again has other dashes.
        dashes, colour = index + index // 12, index % len(METHODS)
        trained = [record.data["methods"]["trained"][name] for record in records]
        values = np.asarray([method["metrics"]["objective"] for method in trained], dtype=float)
        best = at = "–"
        if values.shape[1] > 1:
            bands.append(Band(name, np.asarray(methods["steps"], dtype=float), values, METHODS[colour], dashes))
            ranked = np.where(np.isfinite(values), sign * values, -np.inf)
            tops = ranked.max(axis=1, keepdims=True)
            best = ranged((sign * tops).ravel().tolist(), brief)
            # The first step as good as the best: on a plateau, the last bit would decide between equal steps.
            reached = (ranked >= tops - rounding(records) * np.abs(tops)).argmax(axis=1)
            at = ranged([float(methods["steps"][step]) for step in reached], "{:.0f}".format)
        elif np.isfinite(values).any():
            levels.append(Level(name, float(np.nanmean(values)), METHODS[colour], dashes))
        ends = [
            ranged([method["metrics"][metric][-1] for method in trained], brief) for metric in ("objective", *others)
        ]
        time = ranged([method.get("seconds_per_step") for method in trained], duration)
        rows.append([name, best, at, *ends, time])
    references = reference_levels(newest)
    for level in references:
        rows.append([level.label, "–", "–", brief(level.value), *["–"] * len(others), "–"])
    label, objective = methods["label"], newest["objective"]["label"]
    heads = ["method", "best on the way", f"at {label}", "at the end", *others, f"time per {label}"]
    note = " Rows with a single number are published values." if references else ""
    if levels:
        note += " A horizontal line in the picture is a method of which only the end is known."
    if all(row[-1] == "–" for row in rows):  # nobody asked for times
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    else:
        note = f" The {heads[-1]} is measured without the evaluations, while nothing else runs.{note}"
    picture = draw_methods(objective, label, bands, [*levels, *references], best_value(records))
    return Section(label, picture, heads, rows, note)


def reference_levels(data: Mapping[str, Any]) -> list[Level]:
    """Return the published values that the config lists, as lines."""
    known = data["config"].get("references", {})
    return [Level(name, value, dashes=1 + index) for index, (name, value) in enumerate(known.items())]


def others_section(experiment: ExperimentRecords, names: Sequence[str], colours: dict[str, str]) -> Section | None:
    """Return the results with other values of the config, drawn if one number varies; None if there are none."""
    groups = [experiment.records, *experiment.overridden]
    if len(groups) == 1:
        return None
    rows = [
        [
            " ".join(overrides_of(records)) or "of the config",
            name,
            str(len(records)),
            spread(finals(records, BLOCKED)),
            spread(finals(records, name)),
            training_effect(records, name),
        ]
        for records in groups
        for name in names
        if name in records[-1].data["variants"]
    ]
    blocked = f"{experiment.records[-1].data['objective']['label']}, blocked"
    heads = ["values", "opened", "seeds", blocked, "open", "with the block, training ends"]
    return Section("other values", _swept_values(groups, [BLOCKED, *names], colours), heads, rows)


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
        bands.append(Band(label_of(name, names), np.asarray(positions), values, colours[name]))
    return draw_sweep(varied[0], positions, [(groups[0][-1].data["objective"]["label"], bands)])


def curve_metrics(records: Sequence[Record]) -> list[str]:
    """Return the metrics that are drawn as curves."""
    newest = records[-1].data
    return [name for name in newest["variants"][BLOCKED]["metrics"] if name not in (newest.get("plane") or ())]


def best_value(records: Sequence[Record]) -> float | None:
    """Return the best value that can be reached: the mean over the seeds, whose data may differ."""
    values = [record.data["objective"]["best"] for record in records]
    return None if None in values else statistics.fmean(values)


def label_of(name: str, names: Sequence[str]) -> str:
    """Return a variant's name for a legend: "open" alone if it is the only one beside the blocked one."""
    if name == BLOCKED:
        return "blocked"
    return "open" if len(names) == 2 else f"{name} open"
