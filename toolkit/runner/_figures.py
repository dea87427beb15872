"""The pictures of the report. Each has its values on hover, and its results in words for those who do not see it.

Imports neither torch nor an algorithm.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.runner._chart import (
    WIDTH,
    Key,
    Scale,
    area,
    dot,
    fit,
    frame,
    legend,
    line,
    mark,
    numbers_below,
    panel,
    significant,
    svg,
    text,
)

__all__ = [
    "COLOURS", "METHODS", "Arrow", "Band", "Bar", "Level", "Path", "Strip", "draw_arrows", "draw_bands",
    "draw_bars", "draw_curves", "draw_methods", "draw_parameters", "draw_plane", "draw_strips", "draw_sweep",
]  # fmt: skip

COLOURS = ("var(--blocked)", *(f"var(--open-{index})" for index in range(1, 6)))
"""The blocked run, and the open runs."""

METHODS = tuple(f"var(--method-{index})" for index in range(1, 7))
"""Other methods for the same model."""

_REFERENCE = "var(--soft)"

# Arrows whose lengths differ by more than this are drawn with logarithmic lengths.
_LONG = 5.0

# Two values of a sweep that differ by more than this factor make its axis logarithmic.
_WIDE_SWEEP = 30.0

# A curve of at most so many evaluations shows each as a dot: a line alone would look like a course that was measured.
_FEW = 6


@dataclass(frozen=True)
class Arrow:
    """A gradient in the plane of itself and the blocked one: its length over the blocked one's, and the degrees."""

    label: str
    ratio: float
    angle: float
    colour: str


@dataclass(frozen=True)
class Band:
    """A curve for every seed: `values` (seeds, points) over `steps` (points,); NaN where a run had ended."""

    label: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    colour: str
    dashes: int = 0

    @property
    def key(self) -> Key:
        """Its entry in a legend."""
        return Key(self.label, self.colour, self.dashes)

    @property
    def known(self) -> list[tuple[float, list[float]]]:
        """Each step with a finite value, and the finite values of the seeds."""
        columns = zip(self.steps.tolist(), self.values.T.tolist(), strict=True)
        found = [(step, [value for value in column if math.isfinite(value)]) for step, column in columns]
        return [(step, column) for step, column in found if column]


@dataclass(frozen=True)
class Level:
    """One value to compare a curve with, drawn as a line across."""

    label: str
    value: float
    colour: str = _REFERENCE
    dashes: int = 1

    @property
    def key(self) -> Key:
        """Its entry in a legend."""
        return Key(self.label, self.colour, self.dashes)


@dataclass(frozen=True)
class Bar:
    """One bar, and how its value is written."""

    label: str
    value: float
    text: str
    colour: str


@dataclass(frozen=True)
class Strip:
    """One value for every seed, of one variant; NaN where a seed has none."""

    label: str
    values: NDArray[np.float64]
    colour: str


@dataclass(frozen=True)
class Path:
    """The points (x, y) of a run in the plane of two metrics, in their order."""

    key: Key
    points: Sequence[tuple[float, float]]


def draw_arrows(panels: Sequence[tuple[str, Sequence[Arrow]]]) -> str:
    """Draw the gradients as arrows, a panel for each moment of training; the blocked one points right, with length 1.

    The plane of two vectors is exact; with several open gradients each is turned into the same plane, so that angles
    to the blocked gradient are right and angles among the others are not.
    """
    return _figure(_arrow_panel(title, arrows) for title, arrows in panels)


def draw_parameters(names: Sequence[str], series: Sequence[tuple[str, Sequence[float], Sequence[float], str]]) -> str:
    """Draw angle and length of the open gradient against the blocked one, for every parameter.

    `series` holds (label, angles in degrees, ratios, colour) of every variant.
    """
    sizes = [ratio for _, _, ratios, _ in series for ratio in ratios if math.isfinite(ratio) and ratio > 0]
    # A little more than the ends: the inverse of an inverse may be rounded to beyond the value.
    reach = 1.001 * max([2.0, *(max(ratio, 1 / ratio) for ratio in sizes)])
    turns = [(label, angles, colour) for label, angles, _, colour in series]
    lengths = [(label, ratios, colour) for label, _, ratios, colour in series]
    angle, length = "angle to the blocked gradient", "length, relative to the blocked gradient"
    drawn = [
        panel(angle, _rows(angle, names, turns, Scale(0, 180, 12, WIDTH - 50), 0, _angle)),
        panel(length, _rows(length, names, lengths, Scale(1 / reach, reach, 12, WIDTH - 50, "log"), 1, _length)),
    ]
    return _figure(drawn, [Key(label, colour) for label, _, _, colour in series])


def draw_bands(panels: Sequence[tuple[str, Sequence[Band], float | None]], levels: Sequence[Level]) -> str:
    """Draw metrics over training: the mean of the seeds, the range of the seeds shaded, the best value dotted.

    `levels` are drawn on the first panel.
    """
    drawn, keys = [], []
    for index, (title, bands, best) in enumerate(panels):
        lines = [*(levels if index == 0 else ()), *_best(best)]
        drawn.append(panel(title, draw_curves(title, "training step", bands, lines), "training step"))
        keys += [*(band.key for band in bands), *(level.key for level in lines)]
    return _figure(drawn, keys)


def draw_methods(title: str, label: str, bands: Sequence[Band], levels: Sequence[Level], best: float | None) -> str:
    """Draw an objective over the steps of several methods; beside it, if the best is known, the gap to the best."""
    lines = [*levels, *_best(best)]
    drawn = [panel(title, draw_curves(title, label, bands, lines), label if bands else "")]
    if best is not None and bands:
        gaps = [replace(band, values=np.abs(best - band.values)) for band in bands]
        gap = "distance to the best possible"
        drawn.append(panel(gap, draw_curves(gap, label, gaps, (), wide=10.0), label))
    return _figure(drawn, [*(band.key for band in bands), *(level.key for level in lines)])


def draw_bars(panels: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Draw bars of costs, a panel for each quantity."""
    drawn = []
    for title, bars in panels:
        across = Scale(0, max(bar.value for bar in bars) or 1, 8, WIDTH - 80)
        parts = "".join(
            _bar(8, across.place(bar.value), 6 + 26 * row, 18, bar.colour, f"{bar.label}: {bar.text}")
            + text(across.place(bar.value) + 6, 20 + 26 * row, bar.text, kind="strong")
            for row, bar in enumerate(bars)
        )
        shows = f"{title}: {', '.join(f'{bar.label} {bar.text}' for bar in bars)}."
        drawn.append(panel(title, svg(8 + 26 * len(bars), parts, shows)))
    return _figure(drawn, [Key(bar.label, bar.colour) for _, bars in panels for bar in bars])


def draw_strips(panels: Sequence[tuple[str, Sequence[Strip], float | None]]) -> str:
    """Draw the final values: a dot per seed, a bar at the median, and a dotted line at a reference value."""
    drawn = [panel(title, _strips(title, strips, value)) for title, strips, value in panels]
    return _figure(drawn, [Key(strip.label, strip.colour) for _, strips, _ in panels for strip in strips])


def draw_sweep(label: str, positions: Sequence[float], panels: Sequence[tuple[str, Sequence[Band]]]) -> str:
    """Draw the results for each value of a swept quantity: a dot per seed, and a line through the medians."""
    drawn = [panel(title, _swept(title, label, positions, bands), label) for title, bands in panels]
    return _figure(drawn, [band.key for _, bands in panels for band in bands])


def draw_plane(x: str, y: str, panels: Sequence[tuple[str, Sequence[Path]]]) -> str:
    """Draw paths through the plane of two metrics: all panels alike, with equal units along both axes."""
    panels = [(title, known) for title, paths in panels if (known := [path for path in paths if path.points])]
    points = [point for _, paths in panels for path in paths for point in path.points]
    drawn = [panel(title, _plane(x, y, title, paths, points), f"{x} across, {y} up") for title, paths in panels]
    return _figure(drawn, [path.key for _, paths in panels for path in paths])


def draw_curves(
    title: str,
    label: str,
    bands: Sequence[Band],
    levels: Sequence[Level],
    *,
    wide: float = 1e3,
    height: float = 200,
    told: bool = True,
) -> str:
    """Return a chart of curves: the mean of the seeds, and their range as a shade. `told`: values appear on hover."""
    ends = [value for band in bands for _, column in band.known for value in (min(column), max(column))]
    if fit(ends, 0, 1, wide=wide).kind == "log":  # a level at 0 should not press the small values onto it
        wide = math.sqrt(wide)
    up = fit([*ends, *(level.value for level in levels)], height - 24, 8, wide=wide)
    steps = sorted({step for band in bands for step, _ in band.known})
    across = fit(steps, 0, 1, wide=math.inf, margin=0)
    parts, across = frame(across, up, [tick for tick in across.ticks() if steps and tick.is_integer()])
    shades = lines = ""
    for index, band in enumerate(bands):
        lows, highs, middles = (
            [(across.place(step), up.place(of(column))) for step, column in band.known]
            for of in (min, max, statistics.fmean)
        )
        shades += area([*lows, *highs[::-1]], band.colour)
        lines += line(middles, band.key, 3 if index == 0 else 2)
        if len(middles) <= _FEW:
            lines += "".join(dot(x, y, 3.5, band.colour) for x, y in middles)
    parts += shades + lines
    for level in levels:
        parts += line([(x, up.place(level.value)) for x in (across.start, across.end)], level.key, 1.5)
    if told:
        parts += _columns(label, steps, bands, across, up, statistics.fmean)
    return svg(height, parts, _story(title, label, bands, levels, statistics.fmean))


def _figure(panels: Iterable[str], keys: Iterable[Key] = ()) -> str:
    return f'<div class="panels">{"".join(panels)}</div>{legend(list(dict.fromkeys(keys)))}'


def _best(best: float | None) -> list[Level]:
    return [] if best is None else [Level("best possible", best, dashes=2)]


def _arrow_panel(title: str, arrows: Sequence[Arrow]) -> str:
    """Draw arrows from the middle of half circles, which mark round lengths."""
    drawn = [arrow for arrow in arrows if math.isfinite(arrow.ratio) and arrow.ratio > 0]
    lengths = [1.0, *(arrow.ratio for arrow in drawn)]
    across, rings = _radii(min(lengths), max(lengths))
    middle, ground = WIDTH / 2, 148.0
    parts, reach = "", math.inf
    for ring, r in ((ring, across.place(ring)) for ring in rings):
        parts += f'<path class="grid" d="M{middle - r:.1f} {ground}A{r:.1f} {r:.1f} 0 0 1 {middle + r:.1f} {ground}"/>'
        half = 3.6 * len(number := f"×{ring:g}")
        if middle - r + half < reach:  # a number that would touch the one before is left out
            parts, reach = parts + text(middle - r, ground + 16, number, "middle"), middle - r - half - 4
    parts += f'<path class="grid" d="M{middle - across.end:.1f} {ground}H{middle + across.end:.1f}"/>'
    for index, arrow in enumerate(drawn):
        angle = arrow.angle if math.isfinite(arrow.angle) else 0.0
        # The first is drawn wide and the later ones narrower, so that equal arrows are all seen.
        parts += mark(
            _arrow(middle, ground, across.place(arrow.ratio), angle, (7.0, 4.0, 2.5, 1.5)[min(index, 3)], arrow.colour),
            _arrow_label(arrow),
        )
    labels = [_arrow_label(arrow) for arrow in arrows]
    keys = [Key(label, arrow.colour) for label, arrow in zip(labels, arrows, strict=True)]
    return panel(title, svg(170, parts, f"Gradients {title}: {'; '.join(labels)}."), keys=keys)


def _radii(shortest: float, longest: float) -> tuple[Scale, list[float]]:
    """Return the scale of the arrows' lengths, and the lengths of the half circles."""
    if longest / shortest <= _LONG:
        return Scale(0, longest, 0, 136), [1.0]
    across = Scale(shortest / 10, longest, 0, 136, "log")
    rings = [10.0**power for power in range(math.ceil(math.log10(shortest)), math.floor(math.log10(longest)) + 1)]
    return across, rings[:: -(-len(rings) // 4)] if len(rings) > 4 else rings


def _arrow(x: float, y: float, length: float, angle: float, width: float, colour: str) -> str:
    """Return an arrow that points right and is turned against the clock."""
    head = min(length, 3 * width)
    neck, wing, side = length - head, 1.4 * width, width / 2
    outline = f"M0 {-side}H{neck:.1f}V{-wing}L{length:.1f} 0L{neck:.1f} {wing}V{side}H0Z"
    turn = f"translate({x:.1f} {y:.1f}) rotate({-angle:.2f})"
    return f'<path style="fill: {colour}" transform="{turn}" d="{outline}"'


def _arrow_label(arrow: Arrow) -> str:
    if not math.isfinite(arrow.angle):
        return f"{arrow.label}: zero gradient" if arrow.ratio == 0 else arrow.label
    if arrow.label == "blocked":
        return arrow.label
    return f"{arrow.label}: {_angle(arrow.angle)}, length {_length(arrow.ratio)}"


def _rows(
    title: str,
    names: Sequence[str],
    series: Sequence[tuple[str, Sequence[float], str]],
    across: Scale,
    origin: float,
    write: Callable[[float], str],
) -> str:
    """Return a chart with a bar for each name and variant, from `origin` to the value."""
    height = 22 + 14 * len(series)
    parts, told = "", []
    for row, name in enumerate(names):
        top = height * row + 14
        parts += text(8, top, name, kind="strong")
        parts += f'<path class="mid" d="M{across.place(origin):.1f} {top + 4:g}V{top + height - 14:g}"/>'
        for index, (label, values, colour) in enumerate(series):
            y, value = top + 5 + 14 * index, values[row]
            told.append(f"{name}, {label}: {write(value)}")
            begin = end = across.place(origin)
            if math.isfinite(value) and value > 0:
                begin, end = sorted((begin, across.place(value)))
                parts += _bar(begin, end, y, 11, colour, told[-1])
            parts += text(end + 6, y + 10, write(value))
    return svg(height * len(names) + 6, parts, f"{title}: {'; '.join(told)}.")


def _bar(begin: float, end: float, y: float, height: float, colour: str, value: str) -> str:
    width = max(1.0, end - begin)
    place = f'x="{begin:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
    return mark(f'<rect {place} style="fill: {colour}"', value)


def _angle(angle: float) -> str:
    return "no angle" if math.isnan(angle) else f"{significant(angle, 2)}°"


def _length(ratio: float) -> str:
    """Write a relative length; NaN is zero over zero."""
    if math.isnan(ratio):
        return "0 / 0"
    return "vanishes" if ratio == 0 else f"×{significant(ratio, 3)}" if math.isfinite(ratio) else "only when open"


def _plane(x: str, y: str, title: str, paths: Sequence[Path], points: Sequence[tuple[float, float]]) -> str:
    """Return a chart in which `points` have a place, with a dot where each path begins and its end in words."""
    scales = [fit(values, 0, 1, wide=math.inf) for values in zip(*points, strict=True)]
    reach = max(scale.high - scale.low for scale in scales) / 2
    across, up = (replace(s, low=(s.low + s.high) / 2 - reach, high=(s.low + s.high) / 2 + reach) for s in scales)
    side = WIDTH - 12 - frame(across, replace(up, start=1, end=0))[1].start
    parts, across = frame(across, replace(up := replace(up, start=8 + side, end=8)))
    told = []
    for path in paths:
        places = [(across.place(at), up.place(height)) for at, height in path.points]
        parts += line(places, path.key) + dot(*places[0], 3.5, path.key.colour)
        ends = (f"({significant(at, 4)}, {significant(height, 4)})" for at, height in (path.points[0], path.points[-1]))
        told.append(f"{path.key.label} from {' to '.join(ends)}")
    return svg(side + 32, parts, f"{title}, the path of ({x}, {y}): {'; '.join(told)}.")


def _strips(title: str, strips: Sequence[Strip], value: float | None) -> str:
    ends = [np.sort(strip.values[np.isfinite(strip.values)]).tolist() for strip in strips]
    known = [end for column in ends for end in column]
    height = 34.0 * len(strips) + 8
    across = fit([*known, *([] if value is None else [value])], 16, WIDTH - 16)
    parts = "".join(
        f'<path class="grid" d="M{across.place(tick):.1f} 4V{height:g}"/>' for tick in across.ticks(4)
    ) + numbers_below(across, across.ticks(4), height + 16)
    if value is not None:
        parts += line([(across.place(value), 4), (across.place(value), height)], Key("", _REFERENCE, 2), 1.5)
    told = []
    for row, (strip, column) in enumerate(zip(strips, ends, strict=True)):
        y = 24.0 + 34 * row
        for end, offset in zip(column, _scatter(len(column)), strict=True):
            parts += dot(across.place(end), y + 22 * offset, 3.5, strip.colour, f"{strip.label}: {significant(end, 4)}")
        if column:
            x = across.place(statistics.median(column))
            parts += line([(x, y - 14), (x, y + 14)], Key("", strip.colour), 2.5)
            told.append(f"{strip.label} {_range(column, statistics.median)}")
    return svg(height + 22, parts, f"{title}, at the end of every seed: {'; '.join(told)}.")


def _swept(title: str, label: str, positions: Sequence[float], bands: Sequence[Band]) -> str:
    """Return a chart of dots, one a seed, with a line through the medians."""
    up = fit([value for band in bands for _, column in band.known for value in column], 176, 8)
    # At the same place; the first is wide and the later ones narrow, so that equal values are all seen.
    parts, across = frame(fit(positions, 0, 1, wide=_WIDE_SWEEP), up, positions)
    for index, band in enumerate(bands):
        for step, column in band.known:
            parts += "".join(dot(across.place(step), up.place(v), 2 + 3 / (1 + index), band.colour) for v in column)
        middles = [(across.place(step), up.place(statistics.median(column))) for step, column in band.known]
        parts += line(middles, band.key, 1.5 + 3 / (1 + index))
    parts += _columns(label, positions, bands, across, up, statistics.median)
    return svg(200, parts, _story(title, label, bands, (), statistics.median))


_Middle = Callable[[Sequence[float]], float]


def _columns(
    label: str, steps: Sequence[float], bands: Sequence[Band], across: Scale, up: Scale, middle: _Middle
) -> str:
    """Return an invisible column for each step, which shows all values of this step on hover."""
    places = [across.place(step) for step in steps]
    cuts = [across.start, *((left + right) / 2 for left, right in itertools.pairwise(places)), across.end]
    parts, found = "", [(band.label, dict(band.known)) for band in bands]
    for step, (left, right) in zip(steps, itertools.pairwise(cuts), strict=False):
        lines = [f"{name}: {_range(values[step], middle)}" for name, values in found if step in values]
        place = f'x="{left:.1f}" y="{up.end:g}" width="{right - left:.1f}" height="{up.start - up.end:g}"'
        parts += mark(f'<rect class="hit" {place}', "\n".join([f"{label} {step:g}", *lines]))
    return parts


def _story(title: str, label: str, bands: Sequence[Band], levels: Sequence[Level], middle: _Middle) -> str:
    """Return the first and the last value of each curve in words."""
    told = []
    for band in bands:
        if band.known:
            (start, first), (end, last) = band.known[0], band.known[-1]
            first_value, last_value = (significant(middle(column), 4) for column in (first, last))
            told.append(f"{band.label} {first_value} at {start:g}, {last_value} at {end:g}")
    told += [f"{level.label} {significant(level.value, 4)}" for level in levels]
    return f"{title}, over the {label}: {'; '.join(told)}." if told else f"{title}: no values."


def _range(values: Sequence[float], middle: _Middle) -> str:
    """Write the middle of the seeds, and their range where it shows."""
    low, at, high = (significant(value, 4) for value in (min(values), middle(values), max(values)))
    return at if low == high else f"{at} ({low} … {high})"


def _scatter(count: int) -> NDArray[np.float64]:
    """Return offsets across a row, which keep equal values apart: evenly spread, neighbours far from each other."""
    golden = (math.sqrt(5) - 1) / 2
    return np.asarray([0.6 * (index * golden % 1 - 0.5) for index in range(count)])
