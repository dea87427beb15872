"""A package as it would be without one of its stops: the stop is taken out of the text of the source.

The edited text is compiled when the package is imported. If it is imported already, functions get the code of the
edited text. Nothing of the toolkit is used, so that the toolkit's answers can be compared with the result.
"""

from __future__ import annotations

import ast
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

from benchmarks.atlas.processes import Failure

__all__ = ["NotRemovable", "Stop", "take_out", "without"]

_METHODS = {"detach()": "detach", "detach_()": "detach_"}
_REGIONS = ("no_grad", "inference_mode", "set_grad_enabled")
_NOTHING = b'__import__("contextlib").nullcontext()'


class NotRemovable(Failure):
    """A stop whose text was not found; the message is a sentence."""


class Stop(NamedTuple):
    """A place that stops a gradient.

    Attributes:
        file: The absolute path.
        line: From 1.
        column: From 1, in bytes of UTF-8; 1 for a decorator, whose `line` is that of the first decorator.
        kind: The call, as an audit names it: ``"detach()"``, ``".data"``, ``"no_grad"``.
    """

    file: str
    line: int
    column: int
    kind: str


class _Edit(NamedTuple):
    """Replaces the bytes from `start` to `end` with `text`."""

    start: int
    end: int
    text: bytes


def take_out(stops: Iterable[Stop]) -> bool:
    """Remove these stops from this process, and return whether that was possible.

    It is possible if their files are not imported yet, and for stops inside of functions that exist.

    Raises:
        NotRemovable: If a stop is not found in its file.
    """
    by_file: dict[str, list[Stop]] = {}
    for stop in stops:
        by_file.setdefault(stop.file, []).append(stop)
    edited = {file: without(Path(file).read_bytes(), found) for file, found in by_file.items()}
    imported = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    _edit_imports(edited)
    in_functions = all(not _is_decorator(stop) for stop in stops if stop.file in imported)
    return in_functions and all(_edit_functions(file, text) for file, text in edited.items() if file in imported)


def _edit_imports(edited: dict[str, bytes]) -> None:
    """Let Python import these files with another text, from now on."""
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str):
        file = loader.get_filename(name)
        return compile(edited[file], file, "exec", dont_inherit=True) if file in edited else original(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _edit_functions(file: str, text: bytes) -> bool:
    """Give the functions of a file the code of another text, and return whether any has changed."""
    before, after = (compile(source, file, "exec", dont_inherit=True) for source in (Path(file).read_bytes(), text))
    codes = dict(_pairs(before, after))
    changed = [
        function
        for function in gc.get_objects()
        if type(function) is FunctionType and function.__code__.co_filename == file and function.__code__ in codes
    ]
    for function in changed:
        function.__code__ = codes[function.__code__]
    return bool(changed)


def _pairs(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield each code that differs between two texts of the same functions, with its successor."""
    if before != after:
        yield before, after
    constants = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (before, after))
    yield from itertools.chain.from_iterable(itertools.starmap(_pairs, zip(*constants, strict=True)))


def without(source: bytes, stops: Iterable[Stop]) -> bytes:
    """Return the source of a file without these stops.

    Raises:
        NotRemovable: If a stop is not found.
    """
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    tree = ast.parse(source)
    edits = {edit for stop in stops for edit in _edits(tree, source, stop, lambda line, byte: offsets[line - 1] + byte)}
    for edit in sorted(edits, reverse=True):  # from the end, where no offset has moved yet
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


def _edits(tree: ast.Module, source: bytes, stop: Stop, offset: Callable[[int, int], int]) -> list[_Edit]:
    """Return the edits that remove a stop; `offset` is that of a line and a byte in it."""
    if stop.kind in _REGIONS:
        contexts = list(_contexts(tree, stop)) or list(_decorators(tree, stop))
        edits = [_Edit(*_span(node, offset), text) for node, text in contexts]
    elif stop.kind == ".data" or stop.kind in _METHODS:
        attributes = [
            (_span(attribute, offset)[1], _span(end, offset)[1]) for attribute, end in _attributes(tree, stop)
        ]
        edits = [_Edit(source.rindex(b".", 0, name), end, b"") for name, end in attributes]
        functions = [] if edits else _functions(tree, stop)
        edits += [_Edit(*_span(function, offset), b"") for function in functions]
    else:
        raise NotRemovable(f"`{stop.kind}` copies a tensor, and has no form without the stop.")
    if not edits:
        raise NotRemovable(f"No `{stop.kind}` stands at the place itself: it is called by another name.")
    return edits


def _attributes(tree: ast.Module, stop: Stop) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    """Yield each attribute of a stop, and the expression that ends with it."""
    for node in ast.walk(tree):
        call = isinstance(node, ast.Call) and not node.args and stop.kind in _METHODS
        attribute = node.func if call else node
        name = _METHODS.get(stop.kind, "data")
        if not (isinstance(attribute, ast.Attribute) and attribute.attr == name and (call or stop.kind == ".data")):
            continue
        if _place(node, attribute) == (stop.line, stop.column):
            yield attribute, node


def _functions(tree: ast.Module, stop: Stop) -> Iterator[ast.expr]:
    """Yield ``torch.detach``, or another name of it, where it is called with a tensor."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and _begins(node, stop):
            yield node.func


def _contexts(tree: ast.Module, stop: Stop) -> Iterator[tuple[ast.expr, bytes]]:
    """Yield the context of a ``with``, or the argument of ``enter_context``, and its replacement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            contexts = [item.context_expr for item in node.items]
            if _begins(node, stop):  # Python places the start of a region at the statement
                named = [context for context in contexts if stop.kind in ast.unparse(context)]
                yield from ((context, _NOTHING) for context in named or contexts[:1])
            yield from ((context, _NOTHING) for context in contexts if _begins(context, stop))
        elif isinstance(node, ast.Call) and _begins(node, stop) and _name(node.func) == "enter_context":
            yield node.args[0], _NOTHING


def _decorators(tree: ast.Module, stop: Stop) -> Iterator[tuple[ast.expr, bytes]]:
    """Yield the decorator of a function, and its replacement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.decorator_list[0].lineno == stop.line:
            for decorator in node.decorator_list:
                if _ends_with(decorator.func if isinstance(decorator, ast.Call) else decorator, stop):
                    yield decorator, b"(lambda function: function)"


def _is_decorator(stop: Stop) -> bool:
    return stop.kind in _REGIONS and stop.column == 1


def _span(node: ast.expr, offset: Callable[[int, int], int]) -> tuple[int, int]:
    return offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)


def _place(node: ast.expr, attribute: ast.Attribute) -> tuple[int, int]:
    """Return line and column as Python reports them: a chain over several lines is placed at the attribute's name."""
    if attribute.end_lineno == node.lineno:
        return node.lineno, node.col_offset + 1
    return attribute.end_lineno or 0, (attribute.end_col_offset or 0) - len(attribute.attr) + 1


def _begins(node: ast.expr | ast.stmt, stop: Stop) -> bool:
    return (node.lineno, node.col_offset + 1) == (stop.line, stop.column)


def _ends_with(node: ast.expr, stop: Stop) -> bool:
    return _name(node) == _METHODS.get(stop.kind, stop.kind)


def _name(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))
