"""The parts of a chart, as SVG and HTML text: scales, axes, marks with their values, legends.

Colours are CSS variables, so that a page can be read in the dark. A chart is 320 units wide and its text 12 units high:
on a phone a unit is a pixel. Matplotlib fixes the colours of its SVG, and its text shrinks with the page. Imports
neither torch nor toolkit.
"""

from __future__ import annotations

import html
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "PALETTE", "STYLE", "WIDTH", "Key", "Scale", "area", "dot", "fit", "frame", "legend", "line", "mark",
    "numbers_below", "panel", "significant", "standalone", "svg", "text",
]  # fmt: skip

WIDTH = 320

# A colour has one meaning on all pages: the blocked run, an open run, another method.
_LIGHT = {
    "ink": "#1d2530", "soft": "#5b6674", "grid": "#e3e8ed", "paper": "#ffffff", "blocked": "#0072b2",
    "open-1": "#d55e00", "open-2": "#00855f", "open-3": "#b85c92", "open-4": "#9a6a00", "open-5": "#6b4eaf",
    "method-1": "#8c564b", "method-2": "#66740a", "method-3": "#17808f", "method-4": "#5a45a0", "method-5": "#ad1457",
    "method-6": "#4d4d4d",
}  # fmt: skip
_DARK = {
    "ink": "#e8ecf1", "soft": "#aab4c0", "grid": "#323c48", "paper": "#1b222b", "blocked": "#56b4e9",
    "open-1": "#ff8a3d", "open-2": "#2fc79a", "open-3": "#e79bc5", "open-4": "#e6b422", "open-5": "#b39dff",
    "method-1": "#d0a08f", "method-2": "#c4d04a", "method-3": "#5fd0de", "method-4": "#a99df5", "method-5": "#ff80ab",
    "method-6": "#c0c0c0",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return ":root { " + " ".join(f"--{name}: {colour};" for name, colour in colours.items()) + " }"


PALETTE = f"{_variables(_LIGHT)} @media (prefers-color-scheme: dark) {{ {_variables(_DARK)} }}"
"""The colours of charts and pages as CSS variables, light and dark."""

_DASHES = ("", "6 5", ".1 4.5", "9 5 .1 5")  # with round ends, which lengthen a dash by the width of the line

# A larger number is drawn as missing, and a smaller one as zero: products of such numbers are out of range.
_LARGEST, _SMALLEST = 1e250, 1e-250

# A smaller number does not make an axis of both signs logarithmic.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Scale:
    """The places of values along an axis.

    Attributes:
        low: The value at `start`.
        high: The value at `end`.
        start: A place, in units of the chart.
        end: A place.
        kind: Equal steps of the value, of its logarithm, or of ``asinh(value / unit)``: linear near zero and
            logarithmic for large values of both signs.
        unit: Where the last kind begins to be logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    kind: Literal["linear", "log", "asinh"] = "linear"
    unit: float = 1.0

    def place(self, value: float) -> float:
        """Return the place of a value; NaN if it is not between the ends."""
        if not self.low <= value <= self.high:
            return math.nan
        low, at, high = (self._bent(v) for v in (self.low, value, self.high))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values between the ends."""
        if self.kind == "linear":
            return _round_values(self.low, self.high, count)
        powers = [sign * 10.0**power for power in range(-307, 301) for sign in (-1, 1)]
        smallest = self.low if self.kind == "log" else 3 * self.unit
        kept = sorted(power for power in powers if self.low <= power <= self.high and abs(power) >= smallest)
        if self.kind == "asinh" and self.low <= 0 <= self.high:
            below, above = [power for power in kept if power < 0], [power for power in kept if power > 0]
            return [*_thinned(below[::-1], count // 2)[::-1], 0.0, *_thinned(above, count // 2)]
        return _thinned(kept, count) if len(kept) > 1 else _round_values(self.low, self.high, count)

    def _bent(self, value: float) -> float:
        match self.kind:
            case "log":
                return math.log10(value)
            case "asinh":
                if math.isfinite(value / self.unit):
                    return math.asinh(value / self.unit)
                return math.copysign(math.log(2) + math.log(abs(value)) - math.log(self.unit), value)
            case "linear":
                return value


@dataclass(frozen=True)
class Key:
    """An entry of a legend, and the look of a line."""

    label: str
    colour: str
    dashes: int = 0

    @property
    def style(self) -> str:
        """The look of the line, in CSS."""
        dashes = _DASHES[self.dashes % len(_DASHES)]
        return f"stroke: {self.colour}" + (f"; stroke-dasharray: {dashes}" if dashes else "")


def fit(values: Iterable[float], start: float, end: float, *, wide: float = 1e3, margin: float = 0.05) -> Scale:
    """Return a scale that holds all finite values.

    It is logarithmic if positive values differ by more than a factor `wide`, or if some of any sign are `wide` squared
    times as large as half of them.
    """
    known = sorted(value if abs(value) > _SMALLEST else 0.0 for value in values if abs(value) <= _LARGEST)
    if not known:
        return Scale(0.0, 1.0, start, end)
    low, high = known[0], known[-1]
    sizes = [abs(value) for value in known if abs(value) > _ROUNDING] or [1.0]
    if low > 0 and high > wide * low:
        room = 10 ** (margin * (math.log10(high) - math.log10(low)))
        return Scale(low / room, high * room, start, end, "log")
    unit = min(sizes) if low == 0 else statistics.median(sizes)
    if max(sizes) > wide**2 * unit:
        return Scale(low - margin * abs(low), high + margin * abs(high), start, end, "asinh", unit)
    room = margin * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low - room, high + room, start, end)


def significant(value: float, digits: int) -> str:
    """Write a number with `digits` significant digits, without an exponent where that is readable."""
    if not math.isfinite(value) or value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    written = f"{value:.{decimals}f}"
    return written.rstrip("0").rstrip(".") if decimals else written


def frame(across: Scale, up: Scale, ticks: Sequence[float] | None = None) -> tuple[str, Scale]:
    """Return grid and numbers of two axes, and the horizontal scale in the room that the numbers leave.

    Args:
        across: The horizontal scale; its places are set here.
        up: The vertical scale, from the lower to the upper end.
        ticks: Values to write below. None: round values.
    """
    numbers = _written(up.ticks())
    across = replace(across, start=8 + 7.2 * max(map(len, numbers), default=0), end=WIDTH - 12)
    parts = ""
    for value, number in zip(up.ticks(), numbers, strict=True):
        y = up.place(value)
        parts += f'<path class="grid" d="M{across.start:.1f} {y:.1f}H{across.end:.1f}"/>'
        parts += text(across.start - 6, y + 4, number, "end")
    return parts + numbers_below(across, across.ticks() if ticks is None else ticks, up.start + 18), across


def numbers_below(across: Scale, ticks: Sequence[float], y: float) -> str:
    """Return the numbers below an axis; a number that would touch the one before is left out."""
    parts, reach = "", -math.inf
    for value, number in zip(ticks, _written(ticks), strict=True):
        half = 3.6 * len(number)
        x = min(across.place(value), WIDTH - half)
        if x - half > reach:
            parts, reach = parts + text(x, y, number, "middle"), x + half + 4
    return parts


def line(points: Sequence[tuple[float, float]], key: Key, width: float = 2) -> str:
    """Return a line through places; it is interrupted where a place is NaN, and a single place is a dot."""
    parts, gap = [], True
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            parts.append(f"{'M' if gap else 'L'}{x:.1f} {y:.1f}")
        gap = not (math.isfinite(x) and math.isfinite(y))
    if len(parts) == 1:
        parts.append("h.01")
    return f'<path class="line" style="{key.style}" stroke-width="{width:g}" d="{"".join(parts)}"/>' if parts else ""


def area(points: Sequence[tuple[float, float]], colour: str) -> str:
    """Return a shade between places."""
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in known)
    return f'<path class="area" style="fill: {colour}" d="M{path}Z"/>' if known else ""


def dot(x: float, y: float, radius: float, colour: str, value: str = "") -> str:
    """Return a translucent dot, with its value on hover; nothing if it has no place."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return ""
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"'
    return mark(f'<circle class="dot" {place} style="fill: {colour}"', value)


def mark(shape: str, value: str) -> str:
    """Return a shape (an SVG element without its end) with a value that a reader sees on hover."""
    name = shape[1:].split(maxsplit=1)[0]
    return f"{shape}><title>{html.escape(value)}</title></{name}>" if value else f"{shape}/>"


def text(x: float, y: float, written: str, anchor: str = "start", kind: str = "") -> str:
    """Return a text whose baseline begins, has its middle or ends at a place."""
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(written)}</text>'


def svg(height: float, parts: str, shows: str) -> str:
    """Return a chart; `shows` says in words which results it shows."""
    label = html.escape(" ".join(shows.split()))
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">{parts}</svg>'


def panel(title: str, chart: str, below: str = "", keys: Sequence[Key] = ()) -> str:
    """Return a chart with its title, the label of its horizontal axis and a legend of its own."""
    axis = f'<p class="axis">{html.escape(below)}</p>' if below else ""
    return f'<div class="panel"><p class="title">{html.escape(title)}</p>{chart}{axis}{legend(keys)}</div>'


def legend(keys: Sequence[Key]) -> str:
    """Return a list of lines and their labels."""
    entries = (
        f'<li><svg class="swatch" viewBox="0 0 26 8" aria-hidden="true"><path style="{key.style}" d="M0 4H26"/></svg>'
        f"<span>{html.escape(key.label)}</span></li>"
        for key in keys
    )
    return f'<ul class="legend">{"".join(entries)}</ul>' if keys else ""


# The look of a chart; pages hold it once, and so does a chart that is a file.
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: var(--soft) } .strong { fill: var(--ink) } "
    ".grid { stroke: var(--grid); fill: none } .line { fill: none; stroke-linejoin: round; stroke-linecap: round } "
    ".mid { stroke: var(--soft); fill: none } .area { fill-opacity: .18 } "
    ".dot { fill-opacity: .5 } .hit { fill: var(--ink); fill-opacity: 0 } .hit:hover { fill-opacity: .1 }"
)


def standalone(chart: str) -> str:
    """Return a chart as a file of its own, with its colours."""
    return chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f"><style>{PALETTE} {STYLE}</style>", 1
    )


def _round_values(low: float, high: float, count: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten between two numbers."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * raw)
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thinned(values: list[float], count: int) -> list[float]:
    return values[:: max(1, math.ceil(len(values) / max(1, count)))]


def _written(values: Sequence[float]) -> list[str]:
    """Write the numbers of an axis, with the digits that tell neighbours apart."""
    steps = [abs(after - before) for before, after in itertools.pairwise(values) if after != before]
    digits = 4
    if steps:
        digits = math.floor(math.log10(max(map(abs, values)))) - math.floor(math.log10(min(steps))) + 2
    return [significant(value, min(12, digits)).replace("e+0", "e").replace("e-0", "e-") for value in values]
