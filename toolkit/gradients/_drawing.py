"""Draws boxes and arrows, as SVG with its own layout, and as text for Graphviz."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from toolkit.gradients._layout import Kind, Route, layered

__all__ = ["Arrow", "Box", "dot", "svg"]


@dataclass(frozen=True)
class Box:
    """The drawing of one node, or of one folded module.

    Attributes:
        kind: ``"loss"``, ``"operation"``, ``"module"``, ``"parameter"`` or ``"block"``.
        label: The name.
        note: A second, smaller line; may be empty.
        tip: The tooltip.
        reached: Whether a gradient reaches it with every block in place.
    """

    kind: str
    label: str
    note: str
    tip: str
    reached: bool


@dataclass(frozen=True)
class Arrow:
    """The path of a gradient from one box, by index, to another.

    Attributes:
        start: Where the gradient comes from.
        end: Where it goes.
        cut: Whether it is at a block.
        reached: Whether a gradient comes this far with every block in place.
    """

    start: int
    end: int
    cut: bool
    reached: bool


@dataclass(frozen=True)
class _Look:
    fill: str
    line: str
    text: str
    rounding: float = 4.0


_LOOKS = {
    "loss": _Look("#fdf3d7", "#b98900", "#5c4400", 13),
    "operation": _Look("#ffffff", "#8c96a3", "#1f2933"),
    "module": _Look("#e7effa", "#4a7ab8", "#173a63"),
    "parameter": _Look("#e6f4e9", "#4b9560", "#17472a", 13),
    "block": _Look("#fdeaea", "#c62828", "#a31515", 13),
}
_GREY = {"fill": "#f4f5f6", "line": "#bcc2c9", "text": "#68717c"}
_FLOW, _CUT = "#5f6b7a", "#c62828"
_PAINTED = [_GREY["line"], _FLOW, _CUT]

_BOLD = ("block", "loss")

# Pixels, for a sans-serif font of 12 px.
_LINE, _PADDING, _MARGIN = 15.0, 11.0, 12.0
_NARROW, _WIDE = frozenset("fijlrtI.,:;|!'()[]/ "), frozenset("mwMWQOG@%&")
_MOST_CHARACTERS = 44


def dot(boxes: Sequence[Box], arrows: Sequence[Arrow], title: str) -> str:
    """Return a digraph in the language of Graphviz."""
    lines = [
        "digraph {",
        f"  graph [label={_quoted(title)}, labelloc=b, fontname=Helvetica, bgcolor=transparent]",
        "  node [shape=box, style=filled, fontname=Helvetica, fontsize=11]",
        f'  edge [color="{_FLOW}"]',
    ]
    for index, box in enumerate(boxes):
        look = _look(box)
        styles = ["filled", *(["rounded"] if look.rounding > 4 else []), *(["dashed"] if box.kind == "block" else [])]
        label = "\\n".join(_escaped(line) for line in _lines(box))
        lines.append(
            f'  n{index} [label="{label}", tooltip={_quoted(box.tip)}, style="{",".join(styles)}", '
            f'fillcolor="{look.fill}", color="{look.line}", fontcolor="{look.text}"]'
        )
    for arrow in arrows:
        style = f' [style=dashed, color="{_colour(arrow)}"]' if arrow.cut else ""
        style = style or ("" if arrow.reached else f' [color="{_GREY["line"]}"]')
        lines.append(f"  n{arrow.start} -> n{arrow.end}{style}")
    return "\n".join([*lines, "}", ""])


def svg(boxes: Sequence[Box], arrows: Sequence[Arrow], title: str, caption: Sequence[str]) -> str:
    """Return one self-contained ``<svg>``. Its ids begin with a digest of its content, so that a page can hold many."""
    sizes = [_size(box) for box in boxes]
    layout = layered(sizes, [(arrow.start, arrow.end, _stroke(arrow)) for arrow in arrows])
    below = layout.height + 2 * _MARGIN + (8 if caption else 0)
    width = max([layout.width, *(_text_width(line) * 11 / 12 for line in caption)]) + 2 * _MARGIN
    left = (width - layout.width) / 2
    prefix = "g" + hashlib.sha256("\n".join([dot(boxes, arrows, title), *caption]).encode()).hexdigest()[:8]
    body = [
        f'<g transform="translate({left:.1f} {_MARGIN:.1f})" stroke-width="1.2">',
        *_edges(layout.routes),
        *(_box(f"{prefix}-{i}", *drawn) for i, drawn in enumerate(zip(boxes, sizes, layout.centres, strict=True))),
        "</g>",
        '<g font-size="11" fill="#4a5560">',
        *(
            f'<text x="{_MARGIN}" y="{below + i * _LINE:.1f}">{html.escape(line)}</text>'
            for i, line in enumerate(caption)
        ),
        "</g>",
    ]
    height = below + len(caption) * _LINE - (_MARGIN if not caption else 4)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{prefix}" role="img" aria-labelledby="{prefix}-title" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" text-anchor="start">'
    )
    return "\n".join([head, f'<title id="{prefix}-title">{html.escape(title)}</title>', *body, "</svg>"])


def _edges(routes: Iterable[Route]) -> Iterator[str]:
    """Draw all edges of one style as one path, and their heads as another."""
    strokes: dict[Kind, tuple[list[str], list[str]]] = {}
    for stroke, ends, points in routes:
        lines, heads = strokes.setdefault(stroke, ([], []))
        (x, y), *rest = points
        path = f"M{x:.1f} {y:.1f}"
        for index, (to_x, to_y) in enumerate(rest):
            if ends and index == len(rest) - 1:
                heads.append(f"M{to_x:.1f} {to_y:.1f}l-3.5 -7h7z")
                to_y -= 6
            middle = (y + to_y) / 2
            straight = abs(to_x - x) < 0.05
            path += (
                f"V{to_y:.1f}" if straight else f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
            )
            x, y = to_x, to_y
        lines.append(path)
    for (colour, dashes), (lines, heads) in sorted(strokes.items(), key=lambda stroke: _PAINTED.index(stroke[0][0])):
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<path d="{"".join(lines)}" fill="none" stroke="{colour}"{dashed}/>'
        yield f'<path d="{"".join(heads)}" fill="{colour}"/>'


def _box(id: str, box: Box, size: tuple[float, float], centre: tuple[float, float]) -> str:
    (width, height), (x, y), look = size, centre, _look(box)
    dashed = ' stroke-dasharray="5 3"' if box.kind == "block" else ""
    lines = _lines(box)
    texts = []
    for line_index, line in enumerate(lines):
        baseline = y + 4 + _LINE * (line_index - (len(lines) - 1) / 2)
        smaller = ' font-size="10.5"' if line_index else (' font-weight="600"' if box.kind in _BOLD else "")
        texts.append(f'<text x="{x:.1f}" y="{baseline:.1f}"{smaller}>{html.escape(line)}</text>')
    return (
        f'<g id="{id}" text-anchor="middle" fill="{look.text}"><title>{html.escape(box.tip)}</title>'
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{look.rounding:g}" fill="{look.fill}" stroke="{look.line}"{dashed}/>{"".join(texts)}</g>'
    )


def _look(box: Box) -> _Look:
    look = _LOOKS[box.kind]
    return look if box.reached else _Look(_GREY["fill"], _GREY["line"], _GREY["text"], look.rounding)


def _stroke(arrow: Arrow) -> tuple[str, str]:
    return _colour(arrow), "5 4" if arrow.cut else ""


def _colour(arrow: Arrow) -> str:
    return _GREY["line"] if not arrow.reached else _CUT if arrow.cut else _FLOW


def _lines(box: Box) -> list[str]:
    return [_shortened(line) for line in (box.label, box.note) if line]


def _shortened(line: str) -> str:
    """Leave out the middle of a long line: a path differs at its end."""
    if len(line) <= _MOST_CHARACTERS:
        return line
    return f"{line[: _MOST_CHARACTERS // 3]}…{line[-2 * _MOST_CHARACTERS // 3 :]}"


def _size(box: Box) -> tuple[float, float]:
    lines = _lines(box)
    bold = 1.08 if box.kind in _BOLD else 1.0
    return bold * max(_text_width(line) for line in lines) + 2 * _PADDING, _LINE * len(lines) + 10


def _text_width(line: str) -> float:
    return sum(4.4 if c in _NARROW else 10.8 if c in _WIDE else 8.4 if c.isupper() else 7.3 for c in line)


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
