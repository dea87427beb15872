"""Assertions about the gradients of a program, for a user's own test suite.

A stop is a block, or a bare place: a line ``"model.py:88"``, a function or a class. A place stands for all stops in it,
opened together. The program's state is restored. A failed assertion raises `AssertionError` with the table of a
comparison; an invalid question raises `ValueError` or `TypeError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from torch import Tensor, nn

from toolkit.blocks import Block
from toolkit.gradients import Audit, audit
from toolkit.gradients._program import Answer, Program, named_parameters
from toolkit.gradients.audit.named import NamedPlace, Place, named_place, told
from toolkit.gradients.compare import Comparison, compare
from toolkit.gradients.graph import graph_of

__all__ = ["assert_blocked", "assert_flows", "assert_load_bearing", "assert_redundant"]

Parameter = str | Tensor | nn.Module


def assert_blocked(loss: Callable[[], Tensor], param: Parameter | Place) -> None:
    """Assert that no gradient of `loss` reaches a parameter: the graph has no path to it.

    A path counts even if its gradient happens to be zero, so that the assertion does not depend on the current values.
    For a place, assert that the place stops a gradient.

    Args:
        loss: Runs the program and returns its loss, a real scalar.
        param: A parameter, or a module for all of its parameters, or the name of either in `loss`, such as
            ``"encoder.weight"`` for the weight of the variable ``encoder``. Or a place: ``"model.py:88"``, a function
            or a class.

    Raises:
        AssertionError: If a path to the parameter exists, or if no gradient reaches a stop at the place.
        TypeError: If `loss` does not return a tensor, or `param` is of another type.
        ValueError: If the loss is not a real scalar, is NaN or has no gradient, or if `loss` does not use the parameter
            or the parameter requires no gradient.

    Example:
        >>> online, target = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> x = torch.ones(3, 2)
        >>> def loss():
        ...     return (online(x) - stop_gradient(target(x), "doc.target")).square().mean()
        >>> assert_blocked(loss, target)
        >>> assert_flows(loss, "online.weight")
    """
    __tracebackhide__ = True
    if (place := named_place(param)) is not None:
        _assert_stops_at(loss, place)
        return
    answer = _answer(loss, param)
    found = [
        f"a path to {name!r}, gradient {gradient.norm():.3g}"
        for name, gradient in answer.gradients.items()
        if name in answer.reached
    ]
    if found:
        _fail("`param` should be blocked: no gradient should reach it.", found, compare(loss, answer.params))


def assert_flows(loss: Callable[[], Tensor], param: Parameter) -> None:
    """Assert that a gradient of `loss` reaches a parameter: a path exists, and the gradient is finite and not zero.

    Args:
        loss: Runs the program and returns its loss, a real scalar.
        param: As in `assert_blocked`. A gradient has to reach every parameter of a module.

    Raises:
        AssertionError: If no path to the parameter exists, or if its gradient is zero or not finite.
        TypeError: As for `assert_blocked`.
        ValueError: As for `assert_blocked`.

    Example:
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> assert_flows(lambda: w * stop_gradient(w, "doc.factor"), "w")
    """
    __tracebackhide__ = True
    answer, found = _answer(loss, param), []
    for name, gradient in answer.gradients.items():
        if name not in answer.reached:
            found.append(f"no path to {name!r}")
        elif not gradient.isfinite().all():
            found.append(f"a gradient that is not finite at {name!r}")
        elif not gradient.count_nonzero():
            found.append(f"a path to {name!r} on which the gradient is zero")
    if found:
        _fail("`param` should get a gradient.", found, compare(loss))


def assert_redundant(loss: Callable[[], Tensor], block: Block | Place) -> None:
    """Assert that a block is redundant: opening it changes the gradient by rounding at most.

    A gradient must reach the block; otherwise the assertion fails, because the block was not tested.

    Args:
        loss: Runs the program and returns its loss, a real scalar.
        block: A block or its name; or a place of bare stops, ``"model.py:88"``, a function or a class.

    Raises:
        AssertionError: If opening the block changes the gradient, if no gradient reaches it, or if there is no stop at
            the place.
        TypeError: If `loss` does not return a tensor, or `block` is not a block.
        ValueError: If the program does not reach the block, or for a loss that is invalid for `assert_blocked`.

    Example:
        >>> x = torch.tensor([1.0, 3.0], requires_grad=True)
        >>> def log_sum_exp():
        ...     shift = stop_gradient(x.max(), "doc.shift")
        ...     return (x - shift).exp().sum().log() + shift
        >>> assert_redundant(log_sum_exp, "doc.shift")
    """
    __tracebackhide__ = True
    _assert_verdict(
        loss, block, {"redundant"}, "`block` should be redundant: opening it should not change the gradient."
    )


def assert_load_bearing(loss: Callable[[], Tensor], block: Block | Place) -> None:
    """Assert that a block is load-bearing: opening it changes the gradient.

    Args:
        loss: Runs the program and returns its loss, a real scalar.
        block: As in `assert_redundant`.

    Raises:
        AssertionError: If opening the block changes the gradient by rounding at most, or if there is no stop at the
            place.
        TypeError: As for `assert_redundant`.
        ValueError: As for `assert_redundant`.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> assert_load_bearing(lambda: x * stop_gradient(x, "doc.factor"), "doc.factor")
        >>> loss = lambda: x * x.detach()
        >>> assert_load_bearing(loss, loss)
    """
    __tracebackhide__ = True
    wish = "`block` should be load-bearing: opening it should change the gradient."
    _assert_verdict(loss, block, {"partial", "cuts", "makes"}, wish)


def _assert_verdict(loss: Callable[[], Tensor], block: Block | Place, verdicts: Collection[str], wish: str) -> None:
    __tracebackhide__ = True
    found: Comparison | Audit
    if (place := named_place(block)) is not None:
        found, names = _stops_at(loss, place, wish)
        unopened = {told(found, entry.site): entry.reason for entry in found.unopened if entry.site in names}
        label = "; ".join(told(found, name) for name in names)
    elif isinstance(block, (Block, str)):
        found = compare(loss, blocks=[block])
        names = [block.name if isinstance(block, Block) else block]
        unopened = {repr(name): reason for name, reason in found.unopened.items()}
        label = repr(names[0])
    else:
        raise TypeError(f"`block` should be a Block, its name or a place. Found {type(block).__name__}.")
    if unopened:
        _fail(wish, [f"{stop} not opened: {reason}" for stop, reason in unopened.items()], found)
    verdict = (found[names[0]] if len(names) == 1 else found.effect(names)).verdict
    if verdict.kind not in verdicts:
        unmet = ", nothing that carries a gradient reaches it" if verdict.kind == "no-op" else ""
        _fail(wish, [f"{label}: {verdict}{unmet}"], found)


def _assert_stops_at(loss: Callable[[], Tensor], place: NamedPlace) -> None:
    __tracebackhide__ = True
    wish = "A gradient should be stopped at the place."
    found, names = _stops_at(loss, place, wish)
    silent = {effect.name for effect in found.effects if effect.verdict.kind == "no-op"}
    if silent.issuperset(names):
        reason = "nothing that carries a gradient reaches it"
        _fail(wish, [f"{told(found, name)}: {reason}" for name in names], found)


def _stops_at(loss: Callable[[], Tensor], place: NamedPlace, wish: str) -> tuple[Audit, list[str]]:
    """Return the audit, and the stops at a place, at least one."""
    __tracebackhide__ = True
    found = audit(loss)
    if not found.valid:
        raise RuntimeError(f"`loss` should do the same each time it runs. Found {found.reason}.")
    names = place.stops(found)
    if len({found.sites[name].file for name in names}) > 1:
        files = " and ".join(told(found, name) for name in names)
        raise ValueError(f"A place should be in one file. Found {files}: give more of its path.")
    if not names:
        line = f": `{source}`" if (source := place.source(found)) else ""
        near = [f"\n  {told(found, name)}" for name in place.nearest(found)]
        nearest = f"\nThe nearest stops:{''.join(near)}" if near else ""
        _fail(wish, [f"no stop at {place.name}{line}{nearest}"], found)
    return found, names


def _answer(loss: Callable[[], Tensor], param: object) -> Answer:
    """Return the gradients of a plain run for the parameters of `param`."""
    program = Program(loss, None)
    parts = program.parts
    named = {name: tensor for name, tensor in parts.tensors.items() if isinstance(tensor, Tensor)}
    for prefix, module in parts.modules.items():
        named |= dict(module.named_parameters(prefix))
    if isinstance(param, nn.Module):
        known = parts.names_of_leaves()
        params: dict[str, Tensor] = {known.get(id(entry), name): entry for name, entry in param.named_parameters()}
    elif isinstance(param, Tensor):
        params = {parts.names_of_leaves().get(id(param), "param"): param}
    elif isinstance(param, str):
        params = {name: tensor for name, tensor in named.items() if f"{name}.".startswith(f"{param}.")}
        if not params:
            close = difflib.get_close_matches(param, named, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else f" It has {sorted(named)}."
            raise ValueError(f"`param` should be the name of a parameter that `loss` uses. Found {param!r}.{hint}")
    else:
        raise TypeError(f"`param` should be a parameter, a module or a name. Found {type(param).__name__}.")
    if not any(tensor.requires_grad for tensor in params.values()):
        raise ValueError("`param` should require a gradient. Found a constant.")
    params = named_parameters(params, parts)
    used = {id(tensor) for tensor in named.values()}
    if any(id(tensor) not in used for tensor in params.values()):
        used |= {id(params[name]) for name in graph_of(program, params).reachable("all")}
    for name, tensor in params.items():
        if id(tensor) not in used:
            raise ValueError(f"`param` should be one that `loss` uses. Found {name!r}, which it does not reach.")
    answer = program.answer(params, around=False)
    if answer.constant:
        graph_of(program, params)  # raises if no block is the reason
    return answer


def _fail(wish: str, found: Iterable[str], comparison: Comparison | Audit) -> NoReturn:
    __tracebackhide__ = True
    raise AssertionError(f"{wish} Found {'; '.join(found)}.\n{comparison}")
