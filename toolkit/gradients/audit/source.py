"""The source text of places that stop a gradient."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator
from typing import NamedTuple

from toolkit.blocks import Site

__all__ = ["line_of", "lines_of", "stop_span", "text_of"]


class _Stop(NamedTuple):
    """The expression of a stop.

    Attributes:
        node: The whole expression.
        columns: The columns of the call alone, from 0, without the tensor in front of a method; None if the call spans
            several lines.
        prefix: The keyword or sign in front of the expression.
    """

    node: ast.expr
    columns: tuple[int, int] | None
    prefix: str = ""


def stop_span(source: str, line: int, column: int, kind: str) -> tuple[int, int] | None:
    """Return the columns of the call that stops the gradient, from 0; None if the call spans several lines.

    Args:
        source: The whole file.
        line: Line of the place, from 1.
        column: Column of the place, from 1.
        kind: The kind of the place, as in `Audit.kinds`.
    """
    return next((stop.columns for stop in _stops(source, line, column, kind) if stop.columns), None)


def text_of(site: Site, kind: str) -> str:
    """Return the expression that stops the gradient, in one line: ``y.exp().detach()``, ``with torch.no_grad()``.

    The text depends neither on the line of the place nor on the layout of the code. Without a source it is the kind.
    """
    for stop in _stops("".join(linecache.getlines(site.file)), site.line, site.column, kind):
        return stop.prefix + ast.unparse(stop.node)
    return line_of(site) or kind


def line_of(site: Site) -> str:
    """Return the line of a place, without the space around it; empty if there is no source."""
    return linecache.getline(site.file, site.line).strip()


def lines_of(site: Site, kind: str) -> range:
    """Return the numbers of the lines of the call that stops the gradient."""
    for stop in _stops("".join(linecache.getlines(site.file)), site.line, site.column, kind):
        return range(stop.node.lineno, (stop.node.end_lineno or stop.node.lineno) + 1)
    return range(site.line, site.line + 1)


def _stops(source: str, line: int, column: int, kind: str) -> Iterator[_Stop]:
    word = next(iter(re.findall(r"\w+", kind.rpartition(".")[2])), "")
    for node in _nodes(source):
        if isinstance(node, ast.With | ast.AsyncWith) and _starts(node, line, column):
            items = (item.context_expr for item in node.items)
            yield from (_Stop(item, _columns(item, line), "with ") for item in items if word in _names(item))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and column == 1 and _begins(node, line):
            found = (decorator for decorator in node.decorator_list if word in _names(decorator))
            yield from (_Stop(decorator, _columns(decorator, line), "@") for decorator in found)
        elif isinstance(node, ast.Call) and _last_name(node.func) == word and _calls(node, line, column):
            method = ((node.func.end_col_offset or 0) - len(word) - 1, node.end_col_offset or 0)
            on_line = not node.args and node.func.end_lineno == node.end_lineno == line
            yield _Stop(node, method if on_line else _columns(node, line))
        elif isinstance(node, ast.Attribute) and _starts(node, line, column) and f".{node.attr}" == kind:
            yield _Stop(node, _columns(node, line))


@functools.lru_cache
def _nodes(source: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return []


def _starts(node: ast.stmt | ast.expr, line: int, column: int) -> bool:
    return (node.lineno, node.col_offset) == (line, column - 1)


def _begins(node: ast.FunctionDef | ast.AsyncFunctionDef, line: int) -> bool:
    """Return whether the first line of a function, decorators included, is this line."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) == line


def _calls(node: ast.Call, line: int, column: int) -> bool:
    """Return whether a call has this place, which is that of the method's name in a chain over several lines."""
    name = node.func.end_lineno, (node.func.end_col_offset or 0) - len(_last_name(node.func))
    return _starts(node, line, column) or (node.lineno != line and name == (line, column - 1))


def _columns(node: ast.expr, line: int) -> tuple[int, int] | None:
    return (node.col_offset, node.end_col_offset or 0) if node.lineno == node.end_lineno == line else None


def _names(node: ast.expr) -> set[str]:
    return {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)}


def _last_name(node: ast.expr) -> str:
    name: str = getattr(node, "attr", getattr(node, "id", ""))
    return name
