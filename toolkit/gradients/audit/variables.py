"""Modules and tensors of a running program, by the variables that hold them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from types import FrameType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from toolkit.gradients._parts import Parts
from toolkit.gradients._places import TOOLKIT, TORCH

__all__ = ["modules_by_name", "objects_of", "parameters_of", "scopes_of"]

_Kind = TypeVar("_Kind")


class _IsOf(dict[type, bool]):
    """Type -> whether it is one of some classes; each type is asked once."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds

    def __missing__(self, found: type) -> bool:
        answer = self[found] = issubclass(found, self._kinds)
        return answer


def objects_of(*kinds: type[_Kind]) -> list[_Kind]:
    """Return the objects of these classes that are alive, also those that the program has hidden by `gc.freeze`.

    A look at every object takes a tenth of a second in a large program, so ask for several classes in one call.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
    found: list[Any] = gc.get_objects()
    return list(compress(found, map(_IsOf(kinds).__getitem__, map(type, found))))


def scopes_of(frame: FrameType | None) -> list[Mapping[str, Any]]:
    """Return the variables in use: those of the script, then of each function from the innermost one outwards."""
    scopes: list[Mapping[str, Any]] = [vars(sys.modules["__main__"])]
    while frame is not None:
        if not frame.f_code.co_filename.startswith((TORCH, TOOLKIT)):
            scopes.append(frame.f_locals)
        frame = frame.f_back
    return scopes


def parameters_of(leaves: Sequence[Tensor], parts: Parts, scopes: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return name -> leaf, with names from modules and variables where they have one."""
    names, named = parts.names_of_leaves(), dict[str, Tensor]()
    if wanted := {id(leaf) for leaf in leaves} - names.keys():
        for name, found in _held(scopes):
            if id(found) in wanted:
                names.setdefault(id(found), name)
    for index, leaf in enumerate(dict.fromkeys(leaves)):
        name = names.get(id(leaf), f"leaf {tuple(leaf.shape)} #{index}")
        named[f"{name} #{index}" if name in named else name] = leaf
    return named


def modules_by_name(alive: Iterable[object], scopes: Sequence[Mapping[str, Any]]) -> dict[str, nn.Module]:
    """Return name -> module for every module among these objects that no other contains."""
    modules = {id(found): found for found in alive if isinstance(found, nn.Module)}
    inside = {id(child) for module in modules.values() for child in module._modules.values()}
    roots = {
        key: module
        for key, module in modules.items()
        if key not in inside and next(module.parameters(), None) is not None
    }
    if len(roots) == 1:
        return {"": next(iter(roots.values()))}
    names: dict[int, str] = {}
    for name, found in _held(scopes):
        if id(found) in roots:
            names.setdefault(id(found), name)
    named: dict[str, nn.Module] = {}
    for key, module in roots.items():
        name = names.get(key, type(module).__name__)
        named[f"{name} #{len(named)}" if name in named else name] = module
    return named


def _held(scopes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield name and object for variables, and for the items and attributes of variables."""
    for scope in scopes:
        for name, value in list(scope.items()):
            yield name, value
            if type(value) in (list, tuple):
                yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
            elif type(value) is dict:
                yield from ((f"{name}[{key!r}]", item) for key, item in value.items() if isinstance(key, str))
            elif not isinstance(value, ModuleType):
                with suppress(AttributeError):
                    attributes = object.__getattribute__(value, "__dict__")
                    yield from ((f"{name}.{key}", found) for key, found in list(attributes.items()))
