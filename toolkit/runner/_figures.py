"""The pictures of the report, as SVG text for inlining. Imports neither torch nor toolkit."""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

__all__ = [
    "COLOURS",
    "Arrow",
    "Band",
    "Bar",
    "Level",
    "Strip",
    "degrees",
    "draw_arrows",
    "draw_bands",
    "draw_bars",
    "draw_methods",
    "draw_parameters",
    "draw_strips",
    "draw_sweep",
    "significant",
]

# Okabe and Ito's palette, distinct for every kind of colour vision. Blue is the blocked run in every picture.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

_MARKERS = ("", "o", "s", "^")

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "svg.fonttype": "path",
    "path.simplify_threshold": 0.5,
}


@dataclass(frozen=True)
class Arrow:
    """A gradient in the plane of itself and the blocked one: its length over the blocked one's, and the cosine."""

    label: str
    ratio: float
    cosine: float
    colour: str


@dataclass(frozen=True)
class Band:
    """A curve for every seed: `values` (seeds, points) over `steps` (points,); NaN where a run had ended."""

    label: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    colour: str


@dataclass(frozen=True)
class Level:
    """One value to compare a curve with, drawn as a line across."""

    label: str
    value: float
    colour: str


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


def draw_arrows(panels: Sequence[tuple[str, Sequence[Arrow]]], key: str) -> str:
    """Draw the gradients as arrows, one panel a moment of training; the blocked one points right with length 1.

    The plane of two vectors is exact; with several open gradients each is turned into the same plane, so that angles
    to the blocked gradient are right and angles among the others are not.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(
            figsize=(3.6 * len(panels), 2.3 + 0.17 * max(len(arrows) for _, arrows in panels)), layout="constrained"
        )
        for axes, (title, arrows) in zip(_row(figure, len(panels)), panels, strict=True):
            _draw_arrow_panel(axes, title, arrows)
        return _svg(figure, key, "Gradients with the block in place and open, drawn as arrows")


def draw_parameters(
    names: Sequence[str], series: Sequence[tuple[str, Sequence[float], Sequence[float], str]], key: str
) -> str:
    """Draw angle and length of the open gradient against the blocked one, for every parameter.

    `series` holds (label, cosines, ratios, colour) of every variant.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 1.1 + 0.24 * len(names) * max(1, len(series))), layout="constrained")
        angle, length = figure.subplots(1, 2, sharey=True)
        height = 0.8 / max(1, len(series))
        rows = np.arange(len(names))
        for index, (label, cosines, ratios, colour) in enumerate(series):
            offset = (index - (len(series) - 1) / 2) * height
            angles = [degrees(cosine) if math.isfinite(cosine) else 0.0 for cosine in cosines]
            angle.barh(rows + offset, angles, height * 0.9, color=colour, label=label)
            finite = [r if math.isfinite(r) and r > 0 else 1.0 for r in ratios]
            length.barh(rows + offset, np.log2(finite), height * 0.9, color=colour)
            for row, r in zip(rows, ratios, strict=True):
                if not math.isfinite(r) or r == 0:
                    text = "0 / 0" if math.isnan(r) else ("only when open" if r else "vanishes")
                    length.text(0.05, row + offset, text, va="center", fontsize=7, color="#555555")
        angle.set_yticks(rows, names)
        angle.invert_yaxis()
        angle.set_xlim(0, 180)
        angle.set_xticks([0, 45, 90, 135, 180], ["0°", "45°", "90°", "135°", "180°"])
        angle.set_title("angle to the blocked gradient")
        limit = max(1.0, *(abs(value) for value in length.get_xlim()))
        length.set_xlim(-limit, limit)
        length.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        length.xaxis.set_major_formatter(lambda value, _: f"×{2**value:.3g}")
        length.axvline(0, color="#888888", linewidth=0.8)
        length.set_title("length, relative to the blocked gradient")
        return _svg(figure, key, "Angle and relative length of the open gradient for every parameter")


def draw_bands(
    panels: Sequence[tuple[str, Sequence[Band], float | None]],
    levels: Sequence[Level],
    key: str,
    width: float | None = None,
) -> str:
    """Draw metrics over training: the mean of the seeds, the range of the seeds shaded, the best value dotted.

    `levels` are drawn on the first panel.
    """
    with mpl.rc_context(_STYLE):
        curves = len(panels[0][1]) + (panels[0][2] is not None) + len(levels)
        figure = Figure(figsize=(width or (7.2 if len(panels) > 1 else 5.4), 2.6 + 0.2 * curves), layout="constrained")
        for axes, (title, bands, best) in zip(_row(figure, len(panels)), panels, strict=True):
            _draw_curves(axes, bands)
            if best is not None:
                axes.axhline(best, color="#555555", linewidth=0.9, linestyle=":", label="best possible")
            if axes is figure.axes[0]:
                _draw_levels(axes, levels)
            _finish_curves(axes, title, "training step", len(panels))
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8)
        return _svg(figure, key, "Metrics over training for every variant")


def draw_methods(
    title: str, label: str, bands: Sequence[Band], levels: Sequence[Level], best: float | None, key: str
) -> str:
    """Draw an objective over the steps of several methods; beside it, if the best is known, the gap to the best."""
    close = best is not None and bool(bands)
    with mpl.rc_context(_STYLE):
        curves = len(bands) + len(levels) + (best is not None)
        figure = Figure(figsize=(7.2, 2.6 + 0.2 * curves), layout="constrained")
        axes, *others = _row(figure, 1 + close)
        _draw_curves(axes, bands)
        if best is not None:
            axes.axhline(best, color="#555555", linewidth=0.9, linestyle=":", label="best possible")
        _draw_levels(axes, levels)
        _finish_curves(axes, title, label, 1 + close)
        if not bands:
            axes.set_xticks([])
            axes.set_xlabel("")
        for axes in others:
            assert best is not None
            _draw_curves(axes, [Band(b.label, b.steps, np.abs(best - b.values), b.colour) for b in bands])
            _finish_curves(axes, "distance to the best possible", label, 2)
            axes.set_yscale("log")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8)
        return _svg(figure, key, "The objective over the steps of other methods")


def draw_bars(panels: Sequence[tuple[str, Sequence[Bar]]], key: str) -> str:
    """Draw cost bars, one panel a quantity."""
    with mpl.rc_context(_STYLE):
        rows = max(len(bars) for _, bars in panels)
        figure = Figure(figsize=(7.2, 0.7 + 0.34 * rows), layout="constrained")
        for index, (axes, (title, bars)) in enumerate(zip(_row(figure, len(panels)), panels, strict=True)):
            positions = range(len(bars))
            axes.barh(positions, [bar.value for bar in bars], 0.7, color=[bar.colour for bar in bars])
            for position, bar in zip(positions, bars, strict=True):
                axes.text(bar.value, position, f" {bar.text}", va="center", fontsize=8)
            axes.set_yticks(positions, [bar.label for bar in bars] if index == 0 else [""] * len(bars))
            axes.invert_yaxis()
            axes.set_xlim(0, 1.45 * max((bar.value for bar in bars), default=1) or 1)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.set_title(title)
        return _svg(figure, key, "Time and memory of every variant")


def draw_strips(panels: Sequence[tuple[str, Sequence[Strip], float | None]], key: str) -> str:
    """Draw the end of every seed: a dot per seed, a bar at the median, and a dotted line at a value of interest."""
    with mpl.rc_context(_STYLE):
        heights = [0.45 + 0.42 * len(strips) for _, strips, _ in panels]
        figure = Figure(figsize=(7.2, 0.2 + sum(heights)), layout="constrained")
        rows = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, strips, mark) in zip(rows, panels, strict=True):
            for row, strip in enumerate(strips):
                values = np.sort(strip.values[np.isfinite(strip.values)])
                axes.plot(values, row + _scatter(len(values)), "o", color=strip.colour, markersize=3.5, alpha=0.55)
                if len(values):
                    middle = np.median(values)
                    axes.plot([middle, middle], [row - 0.4, row + 0.4], color=strip.colour, linewidth=1.6)
            if mark is not None:
                axes.axvline(mark, color="#555555", linewidth=0.9, linestyle=":")
            axes.set_yticks(range(len(strips)), [strip.label for strip in strips])
            axes.set_ylim(len(strips) - 0.45, -0.55)
            axes.set_title(title)
            axes.grid(axis="x", color="#eeeeee")
            axes.set_axisbelow(True)
            axes.ticklabel_format(axis="x", useOffset=False)
        return _svg(figure, key, "Where every seed ended, for every variant")


def draw_sweep(label: str, positions: Sequence[float], panels: Sequence[tuple[str, Sequence[Band]]], key: str) -> str:
    """Draw the results for each value of a swept quantity: a dot per seed, and a line through the medians."""
    with mpl.rc_context(_STYLE):
        columns = min(2, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(7.2, 0.3 + 2.1 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        for axes, (title, bands) in zip(grid, panels, strict=False):
            for index, band in enumerate(bands):
                # At the same place; the first is wide and the later ones narrow, so that equal values are all seen.
                across = np.broadcast_to(band.steps, band.values.shape)
                size = 4 / (1 + index)
                axes.plot(
                    across.ravel(), band.values.ravel(), "o", color=band.colour, markersize=1.5 + size, alpha=0.45
                )
                some = np.isfinite(band.values).any(axis=0)
                middle = np.nanmedian(band.values[:, some], axis=0)
                axes.plot(band.steps[some], middle, color=band.colour, label=band.label, linewidth=1 + size)
            axes.set_title(textwrap.fill(title, 84 // columns))
            axes.set_xticks(positions, [f"{value:g}" for value in positions])
            axes.grid(axis="y", color="#eeeeee")
            axes.set_axisbelow(True)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.supxlabel(label, fontsize=9)
        figure.legend(
            *grid[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False, fontsize=8
        )
        return _svg(figure, key, f"What every variant gives, by {label}")


def degrees(cosine: float) -> float:
    """Return the angle in degrees; an angle that is only rounding of a cosine near 1 becomes 0."""
    angle = math.degrees(math.acos(cosine))
    return angle if angle > 1e-4 else 0.0


def significant(value: float, digits: int) -> str:
    """Write a number with `digits` significant digits, without an exponent where that is readable."""
    if not math.isfinite(value) or value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def _draw_curves(axes: Axes, bands: Sequence[Band]) -> None:
    for index, band in enumerate(bands):
        kept = ~np.isnan(band.values).all(axis=0)
        steps, values = band.steps[kept], band.values[:, kept]
        # Later lines are dashed, so that one that lies exactly on another is still seen.
        dashes = (None, None) if index == 0 else (5, 2.5 + index)
        # And once the colours begin again, they come with a mark.
        marker = _MARKERS[index // (len(COLOURS) - 1) % len(_MARKERS)]
        style: dict[str, Any] = {"color": band.colour, "dashes": dashes, "marker": marker, "markersize": 3}
        axes.plot(steps, np.nanmean(values, axis=0), label=band.label, **style)
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(steps, low, high, color=band.colour, alpha=0.15, linewidth=0)


def _draw_levels(axes: Axes, levels: Sequence[Level]) -> None:
    for index, level in enumerate(levels):
        axes.axhline(level.value, color=level.colour, linewidth=1, dashes=(2 + index, 2), label=level.label)


def _finish_curves(axes: Axes, title: str, label: str, panels: int) -> None:
    axes.set_title(textwrap.fill(title, 84 // panels))
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _draw_arrow_panel(axes: Axes, title: str, arrows: Sequence[Arrow]) -> None:
    drawn = [arrow for arrow in arrows if math.isfinite(arrow.ratio)]
    tips = []
    for arrow in drawn:
        cosine = arrow.cosine if math.isfinite(arrow.cosine) else 1.0
        tips.append((arrow.ratio * cosine, arrow.ratio * math.sqrt(max(0.0, 1 - cosine**2))))
    reach = max([1.0, *(math.hypot(*tip) for tip in tips)])
    for index, (arrow, (x, y)) in enumerate(zip(drawn, tips, strict=True)):
        # The first is drawn wide and the later ones narrower, so that equal arrows are all seen.
        width = (0.030, 0.016, 0.010, 0.006)[min(index, 3)]
        axes.quiver(
            0, 0, x, y, color=arrow.colour, angles="xy", scale_units="xy", scale=1, width=width, zorder=2 + index
        )
        axes.plot([], [], color=arrow.colour, linewidth=3, label=_arrow_label(arrow))
    left = min([0.0, *(x for x, _ in tips)])
    axes.set_xlim(left - 0.12 * reach, reach * 1.15)
    axes.set_ylim(-0.22 * reach, max([0.45 * reach, *(y * 1.15 for _, y in tips)]))
    axes.set_aspect("equal", adjustable="box")
    axes.axhline(0, color="#dddddd", linewidth=0.8, zorder=1)
    axes.axvline(0, color="#dddddd", linewidth=0.8, zorder=1)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(title)
    axes.legend(frameon=False, fontsize=7.5, loc="upper left", bbox_to_anchor=(0, -0.02), handlelength=1.2)


def _arrow_label(arrow: Arrow) -> str:
    if not math.isfinite(arrow.cosine):
        return f"{arrow.label}: no length" if arrow.ratio == 0 else arrow.label
    if arrow.label == "blocked":
        return arrow.label
    return f"{arrow.label}: {significant(degrees(arrow.cosine), 2)}°, length ×{significant(arrow.ratio, 3)}"


def _scatter(count: int) -> NDArray[np.float64]:
    """Return offsets across a row, which keep equal values apart: evenly spread, neighbours far from each other."""
    golden = (math.sqrt(5) - 1) / 2
    return np.asarray([0.6 * (index * golden % 1 - 0.5) for index in range(count)])


def _row(figure: Figure, count: int) -> list[Axes]:
    axes = figure.subplots(1, count, squeeze=False)
    return list(axes[0])


def _svg(figure: Figure, key: str, label: str) -> str:
    """Return inline SVG. Ids are prefixed with `key`: those of two figures on one page would collide."""
    with mpl.rc_context({"svg.hashsalt": key}):
        buffer = io.StringIO()
        # Tight: an axes with a fixed aspect may stand out of the room that the layout gave it.
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True, bbox_inches="tight"
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    text = re.sub(r'href="#', f'href="#{key}-', text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
