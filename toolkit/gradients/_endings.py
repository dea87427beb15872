"""The ends of paths from parameters that do not reach the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.blocks import Site

__all__ = ["Endings", "by_module"]


class Endings(TorchFunctionMode):
    """Observes every call of a forward pass, and finds where the results of some parameters stop carrying a gradient.

    Attributes:
        found: Parameter -> the first operation without gradient-carrying results, and its place.
    """

    def __init__(self, params: Mapping[str, Tensor], caller: Callable[[], Site | None]) -> None:
        """Follow these parameters; `caller` returns the place of a call in the user's code."""
        super().__init__()
        self.found: dict[str, str] = {}
        self._caller = caller
        self._made_of = WeakIdKeyDictionary()
        for name, parameter in params.items():
            self._made_of[parameter] = frozenset({name})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = list(self._followed((args, kwargs)))
        carried = [tensor for tensor in given if tensor.requires_grad]
        result = func(*args, **(kwargs or {}))
        if given:
            names = frozenset().union(*(self._made_of[tensor] for tensor in given))
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for tensor in made:
                self._made_of[tensor] = self._made_of.get(tensor, frozenset()) | names
            if carried and made and not any(tensor.requires_grad for tensor in made):
                self._note(func, carried)
            elif func is Tensor.requires_grad_ or func is nn.Module.requires_grad_:
                self._note(func, [tensor for tensor in given if not tensor.requires_grad])
        return result

    def _followed(self, values: Any) -> Iterator[Tensor]:
        return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf in self._made_of)

    def _note(self, func: Callable[..., Any], tensors: Iterable[Tensor]) -> None:
        site = self._caller()
        if site is None:
            return
        what = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        for tensor in tensors:
            for name in self._made_of[tensor]:
                self.found[name] = f"{what}() at {site}"


def by_module(endings: Mapping[str, str]) -> list[str]:
    """Return a line for each module whose parameters have no path to the loss."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, ending in endings.items():
        module, _, own = name.rpartition(".")
        groups.setdefault((module, ending), []).append(own)
    return [
        f"no path to the loss: {f'{module}: ' if module else ''}{', '.join(names)}"
        + (f": it ends in {ending}" if ending else "")
        for (module, ending), names in groups.items()
    ]
