"""Draws an audit as one self-contained HTML page: every place with its lines of source and its effect."""

from __future__ import annotations

import html
import linecache
import math
import platform

import torch

from toolkit.blocks import Site
from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.source import stop_span
from toolkit.gradients.verdict import BlockEffect, Difference, Verdict

__all__ = ["page"]

_LINES_AROUND = 3

_OFF_GRAPH = "it ran, and no path of this loss crosses it"

# From this number of parameters on, their table is folded.
_MOST_ROWS_SHOWN = 4


def page(found: Audit, title: str, command: str) -> str:
    """Return the page.

    Args:
        found: The audit. Its program runs once more, for the picture of its graph.
        title: The name of the audited program.
        command: The command that makes the page again.
    """
    effects = "".join(_effect(found, effect) for effect in found.effects)
    effects += "".join(_set(found, effect) for effect in found.sets)
    unopened = [(entry.kind, entry.site, entry.reason) for entry in found.unopened]
    escapes = [(entry.kind, entry.site, "the value leaves the graph") for entry in found.escapes]
    off_graph = [(found.kinds[place], place, _OFF_GRAPH) for place in found.off_graph]
    return _PAGE.format(
        style=_STYLE,
        title=_text(title),
        summary=_summary(found),
        effects=effects or "<p>Nothing in this program stops a gradient that could be opened.</p>",
        others=_others(found, "Not opened", [*unopened, *escapes]) + _others(found, "Outside of the graph", off_graph),
        graph=_graph(found),
        command=_text(command),
        versions=_text(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"),
    )


def _summary(found: Audit) -> str:
    if not found.valid:
        return f'<p class="invalid"><strong>Invalid.</strong> {_text(found.reason)}. Believe nothing below.</p>'
    head = f"loss {found.loss:.6g}, {len(found.blocked)} parameters, gradient {_norm(found):.6g}"
    source = "The answer is taken from the graph of the step itself."
    if found.reruns:
        source = "The answer is taken from the graph of the step itself, or where it says so from another run."
    if not found.is_recorded:
        source = "With every place closed, the loss and every gradient are those of the plain program, bit for bit."
    head = f"<p><strong>{_text(head)}.</strong> {source} Each stop below was opened (removed) alone.</p>"
    return head + "".join(f"<p>{_sentence(text)}</p>" for text in [found.summary(), *found.remarks])


def _norm(found: Audit) -> float:
    return math.hypot(*(gradient.to_dense().norm().item() for gradient in found.blocked.values()))


def _effect(found: Audit, effect: BlockEffect) -> str:
    site, kind = found.sites[effect.name], found.kinds[effect.name]
    verdict = effect.verdict
    named = "" if effect.name == str(site) else f" <strong>{_text(effect.name)}</strong>"
    why = f"<p>{_text(effect.why)}</p>" if effect.why else ""
    calls = f", {effect.calls} times" if effect.calls > 1 else ""
    calls += ", in a run without it" if effect.name in found.reruns else ""
    return f"""<section>
<h3><span class="verdict {verdict.kind}">{_text(verdict.label)}</span> <code>{_text(kind)}</code>{named}
<span class="where">{_text(str(site))}, in {_text(site.function)}{calls}</span></h3>
{why}{_excerpt(site, kind)}{_says(verdict)}
{_numbers(effect)}
</section>
"""


def _set(found: Audit, effect: BlockEffect) -> str:
    places = effect.name.split(" + ")
    listed = "".join(f"<li><code>{_text(found.kinds[place])}</code> {_text(place)}</li>" for place in places)
    return f"""<section>
<h3><span class="verdict {effect.verdict.kind}">{_text(effect.verdict.label)}</span> together</h3>
<p>Opened one by one these do nothing; opened together they do.</p><ul>{listed}</ul>{_says(effect.verdict)}
{_numbers(effect)}
</section>
"""


def _says(verdict: Verdict) -> str:
    parameters = f"<code>{_text(', '.join(verdict.parameters))}</code>"
    return {
        "cuts": f"<p>Only this keeps the gradient from {parameters}.</p>",
        "makes": f"<p>Without this stop the gradient of {parameters} is zero.</p>",
        "partial": "<p>Without this stop the gradient changes.</p>",
        "redundant": "<p>Without this stop the gradient is the same, up to rounding.</p>",
        "noise": "<p>Whether the gradient changes without this cannot be told: rounding is as large.</p>",
    }.get(verdict.kind, "")


def _numbers(effect: BlockEffect) -> str:
    if effect.verdict.kind == "no-op":
        return "<p>Nothing that carries a gradient comes here.</p>"
    whole = Difference(effect.leak, effect.ratio, effect.cosine)
    rows = [
        f"<tr><td><code>{_text(name)}</code></td>{_cells(difference)}</tr>"
        for name, difference in effect.per_parameter.items()
    ]
    table = (
        "<table><tr><th></th><th>leak</th><th>open / blocked</th><th>angle</th></tr>"
        f"<tr class='whole'><td>all parameters</td>{_cells(whole)}</tr>{''.join(rows)}</table>"
    )
    if len(rows) >= _MOST_ROWS_SHOWN:
        first = f"leak {effect.leak:.3g}, open / blocked {_ratio(effect.ratio)}, angle {_angle(effect.cosine)}"
        table = f"<div><p>{_text(first)}</p><details><summary>{len(rows)} parameters</summary>{table}</details></div>"
    return f'<div class="numbers">{_arrows(whole)}{table}</div>'


def _cells(difference: Difference) -> str:
    cells = (f"{difference.leak:.3g}", _ratio(difference.ratio), _angle(difference.cosine))
    return "".join(f"<td>{_text(cell)}</td>" for cell in cells)


def _ratio(ratio: float) -> str:
    return "–" if math.isnan(ratio) else "∞" if math.isinf(ratio) else f"{ratio:.3g}"


def _angle(cosine: float) -> str:
    return "–" if math.isnan(cosine) else f"{math.degrees(math.acos(cosine)):.3g}°"


def _arrows(difference: Difference) -> str:
    """Draw the blocked gradient upwards, and the one with the place open at its angle, to the same scale."""
    ratio = difference.ratio
    if math.isnan(ratio):
        return ""
    blocked, open = (0.0, 1.0) if math.isinf(ratio) else (1 / max(1.0, ratio), ratio / max(1.0, ratio))
    angle = 0.0 if math.isnan(difference.cosine) else math.acos(difference.cosine)
    x, y = 44 * open * math.sin(angle), -44 * open * math.cos(angle)
    lines = "".join(
        f'<line x2="{a:.1f}" y2="{b:.1f}" class="{name}"/><circle cx="{a:.1f}" cy="{b:.1f}" r="{r}" class="{name}"/>'
        for name, a, b, r in (("open", x, y, 5), ("blocked", 0.0, -44 * blocked, 2.6))
    )
    return (
        '<svg class="arrows" viewBox="-50 -52 100 104" role="img" aria-label="blocked and open gradient">'
        f'<circle r="48" class="rim"/>{lines}</svg>'
    )


def _others(found: Audit, title: str, entries: list[tuple[str, str, str]]) -> str:
    shown = "".join(_other(found, *entry) for entry in entries)
    return f"<h2>{title}</h2>{shown}" if shown else ""


def _other(found: Audit, kind: str, place: str, reason: str) -> str:
    site = found.sites[place]
    return f"""<section>
<h3><code>{_text(kind)}</code> <span class="where">{_text(place)}, in {_text(site.function)}</span></h3>
<p>{_sentence(reason)}</p>{_excerpt(site, kind)}
</section>
"""


def _excerpt(site: Site, kind: str) -> str:
    lines = linecache.getlines(site.file)
    if not lines:
        return ""
    first = max(1, site.line - _LINES_AROUND)
    last = min(len(lines), site.line + _LINES_AROUND)
    span = stop_span("".join(lines), site.line, site.column, kind)
    indent = min((_indent(line) for line in lines[first - 1 : last] if line.strip()), default=0)
    if span is not None:
        span = span[0] - indent, span[1] - indent
    numbered = ((number, lines[number - 1][indent:] or "\n") for number in range(first, last + 1))
    shown = [_source_line(number, line, span, number == site.line) for number, line in numbered]
    return f"<pre>{''.join(shown)}</pre>"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _source_line(number: int, line: str, span: tuple[int, int] | None, is_here: bool) -> str:
    line = line.rstrip("\n")
    if is_here and span is not None:
        raw = line.encode()  # columns of the syntax tree are in bytes
        before, stop, after = (raw[a:b].decode() for a, b in ((0, span[0]), span, (span[1], len(raw))))
        code = f"{_text(before)}<mark>{_text(stop)}</mark>{_text(after)}"
    else:
        code = _text(line)
    return f'<span class="line{" here" if is_here else ""}"><i>{number}</i>{code or " "}</span>'


def _graph(found: Audit) -> str:
    try:
        drawn = found.graph().svg()
    except Exception as error:  # a page without its picture is better than none
        return f"<p>The graph cannot be drawn: {_text(str(error))}</p>"
    return f'<h2>The graph</h2><figure class="scroll">{drawn}</figure>'


def _text(text: str) -> str:
    return html.escape(text)


def _sentence(text: str) -> str:
    return _text(f"{text[:1].upper()}{text[1:]}.")


_STYLE = """
  :root { --ink: #1d2530; --soft: #5b6674; --line: #dfe4ea; --paper: #ffffff; --ground: #f5f7f9; --blocked: #0072B2;
    --open: #D55E00; --mark: #fdebd9; }
  @media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #98a4b3; --line: #323b47; --paper: #1a2028;
    --ground: #12161c; --blocked: #56B4E9; --open: #ff9d52; --mark: #5b3410; } figure svg { background: #fff; } }
  * { box-sizing: border-box; }
  body { margin: 0; background: var(--ground); color: var(--ink);
    font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
  main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
  h1 { font-size: 1.9rem; line-height: 1.15; margin: 0 0 .8rem; letter-spacing: -.015em; overflow-wrap: anywhere; }
  h2 { font-size: 1.3rem; margin: 2.2rem 0 .6rem; letter-spacing: -.01em; }
  h3 { font-size: 1rem; margin: 0 0 .7rem; display: flex; flex-wrap: wrap; gap: .6rem; align-items: baseline; }
  p { margin: .5rem 0; max-width: 46rem; }
  code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .86em; }
  section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 1.1rem 1.3rem;
    margin: 1rem 0; }
  .where { color: var(--soft); font-weight: 400; font-size: .88rem; margin-left: auto; }
  .verdict { padding: .05rem .6rem; border-radius: 1rem; font-size: .82rem; color: #fff; background: #6b7280; }
  .verdict.partial, .verdict.cuts, .verdict.makes { background: #b3470a; }
  .verdict.redundant { background: #2f7d4f; }
  .invalid { border-left: 3px solid #b00020; padding-left: .9rem; }
  pre { margin: .4rem 0; background: var(--ground); border: 1px solid var(--line); border-radius: 6px;
    padding: .5rem 0; overflow-x: auto; }
  .line { display: block; padding: 0 .8rem 0 0; white-space: pre; color: var(--soft); }
  .line i { display: inline-block; width: 3.6rem; padding-right: .9rem; text-align: right; font-style: normal;
    opacity: .6; user-select: none; }
  .line.here { color: var(--ink); background: color-mix(in srgb, var(--mark) 45%, transparent);
    white-space: pre-wrap; overflow-wrap: anywhere; padding-left: 3.6rem; }
  .line.here i { margin-left: -3.6rem; }
  mark { background: var(--mark); color: inherit; border-bottom: 2px solid var(--open); border-radius: 2px; }
  .numbers { display: flex; gap: 1.4rem; align-items: flex-start; margin-top: .8rem; }
  .numbers > :last-child { flex: 1; min-width: 0; }
  .arrows { width: 6rem; height: 6rem; flex: none; }
  .arrows .rim { fill: none; stroke: var(--line); }
  .arrows line { stroke-width: 2.6; stroke-linecap: round; } .arrows line.open { stroke-width: 7; }
  .arrows line.blocked { stroke: var(--blocked); } .arrows circle.blocked { fill: var(--blocked); }
  .arrows line.open { stroke: var(--open); } .arrows circle.open { fill: var(--open); }
  .key { color: var(--soft); font-size: .88rem; } .key b { font-weight: 600; }
  .key .b { color: var(--blocked); } .key .o { color: var(--open); }
  table { border-collapse: collapse; font-size: .86rem; width: 100%; }
  th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
    font-variant-numeric: tabular-nums; }
  th { font-weight: 600; color: var(--soft); }
  tr.whole td { font-weight: 600; }
  td:first-child { width: 45%; overflow-wrap: anywhere; }
  summary { cursor: pointer; color: var(--soft); }
  figure { margin: .6rem 0; } .scroll { overflow: auto; max-height: 48rem; background: var(--paper);
    border: 1px solid var(--line); border-radius: 10px; padding: 1rem; }
  footer { color: var(--soft); font-size: .86rem; margin-top: 2.5rem; overflow-wrap: anywhere; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>What stops the gradient in {title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>What stops the gradient in {title}</h1>
{summary}
<p class="key">The dials: <b class="b">the gradient as the program has it</b>, upwards, and
<b class="o">the gradient with this stop open</b>, at its angle to it and to the same scale. The leak is the norm of the
part of the gradient that flows through the open stop.</p>
{effects}
{others}
{graph}
<footer><code>{command}</code><br>{versions}</footer>
</main>
</body>
</html>
"""
