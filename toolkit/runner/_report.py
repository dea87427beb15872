"""The contents of an experiment's page, and its card on the index, from records.

Imports neither torch nor an algorithm.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from toolkit.runner._chart import Key, significant, standalone
from toolkit.runner._figures import (
    COLOURS,
    METHODS,
    Arrow,
    Band,
    Bar,
    Path,
    draw_arrows,
    draw_bands,
    draw_bars,
    draw_curves,
    draw_parameters,
    draw_plane,
)
from toolkit.runner._findings import broken_claims, doubts, finals, median
from toolkit.runner._numbers import degrees_of, duration, in_bytes, ranged, spread
from toolkit.runner._records import BLOCKED, ExperimentRecords, Record, overrides_of
from toolkit.runner._sections import (
    best_value,
    curve_metrics,
    label_of,
    methods_section,
    others_section,
    reference_levels,
    seeds_section,
    sweep_section,
)
from toolkit.runner._sentences import (
    better_end,
    events_in_words,
    meaning_of,
    of_blocks,
    outcome_of,
    training_effect,
    variant_verdict,
)

__all__ = ["draw_card", "experiment_view"]

# The largest readable number of parameters in one picture; those with the largest leak are shown.
_MOST_PARAMETERS = 10


def experiment_view(experiment: ExperimentRecords) -> dict[str, Any]:
    """Return the contents of an experiment's page: the words, numbers and pictures of its template."""
    records = experiment.records
    newest = records[-1].data
    names = [name for name in newest["variants"] if name != BLOCKED]
    colours = {name: COLOURS[(index + 1) % len(COLOURS)] for index, name in enumerate(names)}
    every, all_colours = [BLOCKED, *names], {BLOCKED: COLOURS[0], **colours}
    variants = [_variant(records, name, colours[name]) for name in names]
    columns = ("angle", "ratio", "leak", "target", "final", "time", "memory")
    return {
        "key": f"x-{experiment.name}",
        "title": newest["config"]["title"],
        "finding": "" if overrides_of(records) else newest["config"]["finding"],
        "with_values": " ".join(overrides_of(records)),
        "broken_claims": [] if overrides_of(records) else broken_claims(records),
        "doubts": doubts(records),
        "damaged": experiment.damaged,
        "about": newest["about"],
        "objective": newest["objective"]["label"],
        "better": better_end(records),
        "variants": variants,
        "rows": [
            ["blocked", "0°", "×1", "0", _target(records, BLOCKED), spread(finals(records, BLOCKED)), "×1", "×1"],
            *([f"{variant['name']} open", *(variant[column] for column in columns)] for variant in variants),
        ],
        "arrows": draw_arrows([(title, _arrows(of, when, colours)) for when, title, of in _moments(records)]),
        "parameters": _parameters(records, names, colours),
        "curves": draw_bands(
            _curves(records, every, all_colours), [] if newest.get("methods") else reference_levels(newest)
        ),
        "plane": _plane(records, every, all_colours),
        "seeds": seeds_section(records, every, all_colours),
        "sweep": sweep_section(records, every, all_colours),
        "methods": methods_section(records),
        "others": others_section(experiment, names, all_colours),
        "costs": draw_bars(_costs(records, every, all_colours)),
        "config": newest["source"].strip(),
        "command": _command(experiment.name, newest),
        "provenance": _provenance(records),
    }


def draw_card(experiment: ExperimentRecords) -> str:
    """Draw the objective over training, as a file."""
    records = experiment.records
    names = list(records[-1].data["variants"])
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    ((title, bands, _),) = _curves(records, names, colours)[:1]
    return standalone(draw_curves(title, "training step", bands, (), height=170, told=False))


def _moments(records: Sequence[Record]) -> list[tuple[str, str, Sequence[Record]]]:
    """Return the moments at which gradients were compared, and the records that reached each."""
    trained = [record for record in records if record.data["variants"][BLOCKED]["diverged_at"] is None]
    moments: list[tuple[str, str, Sequence[Record]]] = [("first", "before the first step", records)]
    return [*moments, ("last", "after training with the block", trained)] if trained else moments


def _variant(records: Sequence[Record], name: str, colour: str) -> dict[str, Any]:
    """Return one set of open blocks, summarised over the seeds, in words and numbers ready for the page."""
    newest = records[-1].data
    first, *later = (
        [record.data["comparison"][when]["effects"][name] for record in of] for when, _, of in _moments(records)
    )
    effects, last = first, later[0] if later else []
    verdict, opened = variant_verdict(records, name), newest["variants"][name]["open"]
    return {
        "name": name,
        "colour": colour,
        "blocks": [(block, newest["blocks"][block]) for block in opened],
        "verdict": verdict["label"],
        "kind": verdict["kind"],
        "sentence": of_blocks(opened, meaning_of(verdict, effects, last)),
        "outcome": of_blocks(opened, outcome_of(records, name) + events_in_words(records, name)),
        "angle": ranged(
            [degrees_of(effect["cosine"]) for effect in effects], lambda angle: f"{significant(angle, 3)}°"
        ),
        "ratio": ranged([effect["ratio"] for effect in effects], lambda ratio: f"×{significant(ratio, 3)}"),
        "leak": ranged([_relative_leak(record, name, "first") for record in records], "{:.2g}".format),
        "target": _target(records, name),
        "final": spread(finals(records, name)),
        "training": training_effect(records, name),
        "time": ranged([_cost_ratio(record, name, "seconds_per_step") for record in records], "×{:.2f}".format),
        "memory": ranged([_cost_ratio(record, name, "graph_bytes") for record in records], "×{:.2f}".format),
    }


def _arrows(records: Sequence[Record], when: str, colours: dict[str, str]) -> list[Arrow]:
    arrows = [Arrow(BLOCKED, 1.0, 0.0, COLOURS[0])]
    for name, colour in colours.items():
        effects = [record.data["comparison"][when]["effects"][name] for record in records]
        ratio, angle = median(e["ratio"] for e in effects), median(degrees_of(e["cosine"]) for e in effects)
        arrows.append(Arrow("open" if len(colours) == 1 else f"{name} open", ratio, angle, colour))
    return arrows


def _parameters(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> str:
    when, _, reached = _moments(records)[-1]
    effects = {name: [record.data["comparison"][when]["effects"][name] for record in reached] for name in names}
    known = list(effects[names[0]][0]["per_parameter"])

    def values(name: str, parameter: str, what: str) -> list[float | None]:
        return [effect["per_parameter"][parameter][what] for effect in effects[name]]

    leaks = {parameter: max(median(values(name, parameter, "leak")) for name in names) for parameter in known}
    kept = set(sorted(known, key=lambda parameter: -leaks[parameter])[:_MOST_PARAMETERS])
    shown = [parameter for parameter in known if parameter in kept]
    series = [
        (
            label_of(name, [BLOCKED, *names]),
            [median(map(degrees_of, values(name, parameter, "cosine"))) for parameter in shown],
            [median(values(name, parameter, "ratio")) for parameter in shown],
            colours[name],
        )
        for name in names
    ]
    return draw_parameters(shown, series)


def _curves(
    records: Sequence[Record], names: Sequence[str], colours: dict[str, str]
) -> list[tuple[str, list[Band], float | None]]:
    newest, metrics = records[-1].data, curve_metrics(records)
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
            bands.append(Band(label_of(name, names), steps, values, colours[name], min(index, 3)))
        title = newest["objective"]["label"] if metric == "objective" else metric.replace("_", " ")
        panels.append((title, bands, best_value(records) if metric == "objective" else None))
    return panels


def _plane(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> str:
    """Draw the path of the first seed in the plane of two metrics, for each variant and each other method."""
    first = records[0].data
    if not (plane := first.get("plane")):
        return ""

    def path(label: str, metrics: Mapping[str, Sequence[float | None]], colour: str, dashes: int = 0) -> Path:
        points = zip(*(metrics.get(name, ()) for name in plane), strict=True)
        return Path(Key(label, colour, dashes), [(x, y) for x, y in points if x is not None and y is not None])

    variants = [
        path(label_of(name, names), first["variants"][name]["metrics"], colours[name], min(index, 3))
        for index, name in enumerate(names)
    ]
    methods = enumerate(((first["methods"] or {}).get("trained") or {}).items())
    others = [path(name, trained["metrics"], METHODS[index % len(METHODS)]) for index, (name, trained) in methods]
    x, y = plane
    return draw_plane(x, y, [("with the block and without", variants), *((each.key.label, [each]) for each in others)])


def _costs(records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> list[tuple[str, list[Bar]]]:
    def panel(title: str, what: str, write: Callable[[float], str]) -> tuple[str, list[Bar]]:
        medians = [median([record.data["variants"][name][what] for record in records]) for name in names]
        bars = [
            Bar(label_of(name, names), value, write(value), colours[name])
            for name, value in zip(names, medians, strict=True)
        ]
        return title, bars

    panels = [
        panel("time of a gradient", "seconds_per_step", duration),
        panel("graph memory", "graph_bytes", in_bytes),
        panel("peak memory", "peak_bytes", in_bytes),
    ]
    return [(title, bars) for title, bars in panels if all(math.isfinite(bar.value) for bar in bars)]


def _target(records: Sequence[Record], name: str) -> str:
    return ranged([record.data["comparison"]["first"]["target_error"][name] for record in records], "{:.2g}".format)


def _relative_leak(record: Record, name: str, when: str) -> float:
    comparison = record.data["comparison"][when]
    size, leak = comparison["blocked_norm"], comparison["effects"][name]["leak"]
    return leak / size if size and leak is not None else math.nan


def _cost_ratio(record: Record, name: str, what: str) -> float:
    blocked, opened = (record.data["variants"][variant][what] for variant in (BLOCKED, name))
    return opened / blocked if blocked and opened else math.nan


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
            f"{machine['processor']}, {machine['cores']} cores, threads: {machine['threads']}, {machine['system']}",
        ),
        ("finished", newest["finished"]),
    ]
