"""The ends of paths from parameters that do not reach the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.blocks import Site

__all__ = ["Endings", "by_module"]

_STOPS = frozenset({Tensor.detach, torch.detach, torch._C.TensorBase.__dict__["data"].__get__})
_ESCAPES = frozenset({Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__int__})


class Endings(TorchFunctionMode):
    """Observes every call of a forward pass, and finds the operations at which paths from some parameters end.

    A stop that could be opened is no end: a tensor behind it is followed as if it had a gradient.

    Attributes:
        used: The parameters that some tensor was computed from.
    """

    def __init__(self, params: Mapping[str, Tensor], caller: Callable[[], Site | None]) -> None:
        """Follow these parameters; `caller` returns the place of a call in the user's code."""
        super().__init__()
        self.used: set[str] = set()
        self._ends: dict[str, str] = {}
        self._stops: dict[str, str] = {}
        self._caller = caller
        self._made_of = WeakIdKeyDictionary()
        for name, parameter in params.items():
            self._made_of[parameter] = frozenset({name})

    def of(self, name: str) -> str:
        """Return the last operation that ended a path from a parameter, and where; else the last stop behind it."""
        return self._ends.get(name) or self._stops.get(name, "")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf in self._made_of]
        required = [tensor for tensor in given if tensor.requires_grad]
        result = func(*args, **(kwargs or {}))
        if given:
            names = frozenset().union(*(self._made_of[tensor] for tensor in given))
            is_told = bool(required) and torch.is_grad_enabled() and func not in _STOPS  # by autograd
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.used.update(names if made else ())
            alive = [leaf for leaf in made if leaf.requires_grad or not (is_told or _is_discrete(leaf))]
            for tensor in alive:
                self._made_of[tensor] = self._made_of.get(tensor, frozenset()) | names
            frozen = [tensor for tensor in required if not tensor.requires_grad]
            for tensor in frozen:
                self._made_of.pop(tensor, None)
            if func in _STOPS:
                self._note(self._stops, func, names)
            elif len(alive) < len(made) or frozen or func in _ESCAPES:
                self._note(self._ends, func, names)
        return result

    def _note(self, where: dict[str, str], func: Callable[..., Any], names: Iterable[str]) -> None:
        site = self._caller()
        if site is not None:
            where.update(dict.fromkeys(names, f"{_name(func)} at {site}"))


def _is_discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _name(func: Callable[..., Any]) -> str:
    """Return the name in code of a function or an attribute of tensors."""
    name = resolve_name(func) or getattr(func, "__name__", "")
    attribute = name.removesuffix(".__get__").removesuffix(".__set__")
    return f".{attribute.rpartition('.')[2]}" if attribute != name else f"{name.rpartition('.')[2]}()"


def by_module(endings: Mapping[str, str], parameters: Iterable[str], found: str = "no path to the loss") -> list[str]:
    """Return a line for each module of these parameters, which begins with `found`, their common property.

    A module is named instead of its parts if that holds for all parameters of it, and all end in the same place.
    """
    known = list(parameters)
    groups: dict[tuple[str, str], list[str]] = {}
    for name, ending in endings.items():
        module = _largest_module(name, ending, endings, known)
        groups.setdefault((module, ending), []).append(name.removeprefix(f"{module}."))
    lines = []
    for (module, ending), names in groups.items():
        inside = f"{module}: " if module else ""
        listed = ", ".join(names) if not any("." in name for name in names) else f"all {len(names)} parameters"
        lines.append(f"{found}: {inside}{listed}" + (f": it ends in {ending}" if ending else ""))
    return lines


def _largest_module(name: str, ending: str, endings: Mapping[str, str], known: Iterable[str]) -> str:
    """Return the outermost module around a parameter all of whose parameters end in the same place."""
    levels = name.split(".")
    for depth in range(1, len(levels)):
        module = ".".join(levels[:depth])
        if all(endings.get(other) == ending for other in known if other.startswith(f"{module}.")):
            return module
    return name.rpartition(".")[0]
