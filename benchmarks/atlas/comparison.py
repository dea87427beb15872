"""Audits the losses of a program, and compares each answer with the package from which the stops were removed.

A program is a file of functions without arguments. Each returns a loss function and the parameters, a module or a dict.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.atlas.links import link
from benchmarks.atlas.processes import Failure, in_a_process
from benchmarks.atlas.records import Answer, Loss
from benchmarks.atlas.removal import Stop, take_out
from toolkit.blocks import Site
from toolkit.gradients import Audit, BlockEffect, audit

__all__ = ["builders", "compared_losses"]

Gradients = dict[str, "np.ndarray | None"]
Removed = dict[str, "Gradients | Failure"]
Builder = Callable[[], tuple[Callable[[], Tensor], nn.Module | Mapping[str, Tensor]]]
_PROJECT = str(Path(__file__).parents[2] / "benchmarks")


class _Asked(NamedTuple):
    """An answer of an audit, before it is compared."""

    answer: Answer
    stops: tuple[Stop, ...]
    gradient: Gradients


class _Audited(NamedTuple):
    """The result of the process of one loss."""

    loss: Loss
    plain: Gradients
    asked: list[_Asked]


def builders(module: str) -> dict[str, Builder]:
    """Return the losses of a program: its own public functions, in their order."""
    program = importlib.import_module(module)
    own = {name: value for name, value in vars(program).items() if not name.startswith("_")}
    return {name: value for name, value in own.items() if inspect.isfunction(value) and value.__module__ == module}


def compared_losses(module: str) -> list[Loss]:
    """Return the audits of all losses of a program, each answer compared with the removal of its stops."""
    audits, removed = in_a_process(_survey, module, seconds=7200)
    for stops, names in _wanted(audits).items():
        if stops not in removed:  # the package has to be imported anew
            removed[stops] = _without_or_failure(module, stops, names)
    return [
        replace(
            audited.loss, answers=[_compared(asked, audited, removed[asked.stops][name]) for asked in audited.asked]
        )
        for name, audited in audits.items()
    ]


def _wanted(audits: Mapping[str, _Audited]) -> dict[tuple[Stop, ...], list[str]]:
    """Return the losses that need each set of stops removed."""
    wanted: dict[tuple[Stop, ...], list[str]] = {}
    for name, audited in audits.items():
        for asked in audited.asked:
            wanted.setdefault(asked.stops, []).append(name)
    return wanted


def _without_or_failure(module: str, stops: tuple[Stop, ...], names: list[str]) -> Removed | None:
    try:
        return in_a_process(_without, module, stops, names, seconds=3600)
    except Failure as failure:
        return dict.fromkeys(names, failure)


# --- in the processes ---


def _survey(module: str) -> tuple[dict[str, _Audited], dict[tuple[Stop, ...], Removed]]:
    """Return the audits, and the gradients without the stops that can be removed after the import."""

    def audited(name: str, build: Builder) -> _Audited:
        try:
            return in_a_process(_audited, name, build)
        except Failure as failure:
            return _Audited(Loss(name, str(failure)), {}, [])

    audits = {name: audited(name, build) for name, build in builders(module).items()}
    removed = {stops: _without_or_failure(module, stops, names) for stops, names in _wanted(audits).items()}
    return audits, {stops: found for stops, found in removed.items() if found is not None}


def _without(module: str, stops: tuple[Stop, ...], names: Iterable[str]) -> Removed | None:
    """Return the gradients of some losses without these stops; None if the package is imported already."""
    if not take_out(stops):
        if module in sys.modules:
            return None
        raise Failure("The stop is inside of torch, or in a function that is made anew.")
    losses = builders(module)

    def gradients(name: str) -> Gradients | Failure:
        try:
            return in_a_process(_plain, losses[name])
        except Failure as failure:
            return failure

    return {name: gradients(name) for name in names}


def _audited(name: str, build: Builder) -> _Audited:
    plain = in_a_process(_plain, build)
    loss, parameters = _built(build)
    found = audit(loss, parameters)
    if not found.valid:
        return _Audited(Loss(name, f"Not valid: {found.reason}"), plain, [])
    if not _same(plain, _numbers(found.blocked)):
        return _Audited(Loss(name, "The audit's gradient without an open stop is not that of a plain run."), plain, [])
    ours = {effect.name for effect in found.effects if found.sites[effect.name].file.startswith(_PROJECT)}
    effects = [(effect, (effect.name,)) for effect in found.effects if effect.name not in ours]
    together = tuple(effect.name for effect, _ in effects)
    effects += [(effect, tuple(effect.name.split(" + "))) for effect in found.sets]
    unopened = [f"{_from_packages(found.sites[entry.site])}: {entry.kind}: {entry.reason}" for entry in found.unopened]
    if len(together) > 1 and not found.sets:
        try:
            effects.append((found.effect(together), together))
        except Exception as error:  # of the program
            unopened.append(f"all together: {error}")
    asked = [_asked(found, effect, places) for effect, places in effects]
    return _Audited(Loss(name, gradient=_norm(plain.values()), unopened=unopened), plain, asked)


def _asked(found: Audit, effect: BlockEffect, places: tuple[str, ...]) -> _Asked:
    sites = [found.sites[place] for place in places]
    numbers = effect.to_dict()
    stops = [
        Stop(site.file, site.line, site.column, found.kinds[place]) for place, site in zip(places, sites, strict=True)
    ]
    answer = Answer(
        places=[_from_packages(site) for site in sites],
        kinds=[stop.kind for stop in stops],
        sources=[linecache.getline(stop.file, stop.line).strip() for stop in stops],
        links=[],
        verdict=str(effect.verdict),
        kind=effect.verdict.kind,
        leak=numbers["leak"],
        ratio=numbers["ratio"],
        cosine=numbers["cosine"],
        remark=next((entry.reason for entry in found.unopened if entry.site in places), ""),
    )
    return _Asked(answer, tuple(sorted(stops)), _numbers(found.gradient(places)))


def _from_packages(site: Site) -> str:
    """Return ``file:line:column``, with the file as seen from the folder into which packages are installed."""
    folders = sorted((folder for folder in sys.path if folder and site.file.startswith(folder + "/")), key=len)
    return f"{site.file[len(folders[-1]) + 1 :] if folders else site.file}:{site.line}:{site.column}"


def _plain(build: Builder) -> Gradients:
    loss, parameters = _built(build)
    gradients = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    return _numbers(dict(zip(parameters, gradients, strict=True)))


def _built(build: Builder) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    """Return a loss and its parameters, made from the same random numbers each time and before the same ones."""
    _seed(0)
    loss, parameters = build()
    named = dict(parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters)
    _seed(1)
    return loss, {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - packages draw from it


# --- numbers ---


def _compared(asked: _Asked, audited: _Audited, removed: Gradients | Failure) -> Answer:
    asked = asked._replace(answer=replace(asked.answer, links=[link(place) for place in asked.answer.places]))
    if isinstance(removed, Failure):
        return replace(asked.answer, remark=f"{asked.answer.remark} Not compared: {removed}".strip())
    distance = max(
        (_distance(removed[name], found) / (_norm([removed[name]]) or 1.0) for name, found in asked.gradient.items()),
        default=0.0,
    )
    leak = _norm(
        np.subtract(_dense(removed[name], plain), _dense(plain, removed[name])) for name, plain in audited.plain.items()
    )
    faults = []
    if any(_distance(removed[name], found) > _allowed(removed[name], found) for name, found in asked.gradient.items()):
        faults.append(f"the gradient is {distance:.2g} away")
    if not np.isclose(leak, asked.answer.leak or 0.0, rtol=1e-5, atol=1e-6 * _norm(removed.values()), equal_nan=True):
        faults.append(f"the leak is {leak:.6g}")
    if asked.answer.kind not in (kinds := _kinds(audited.plain, removed)):
        faults.append(f"the verdict is {' or '.join(sorted(kinds))}")
    in_part = bool(asked.answer.remark)  # the audit itself says that a part stays closed
    return replace(
        asked.answer,
        removed_leak=_finite(leak),
        distance=_finite(distance),
        agrees=None if faults and in_part else not faults,
        remark=f"{asked.answer.remark} {'After the removal ' + ', '.join(faults) + '.' if faults else ''}".strip(),
    )


def _kinds(plain: Gradients, removed: Gradients) -> set[str]:
    """Return the verdicts that two gradients allow, of the program as it is and of that without the stops."""
    if any(plain[name] is None and gradient is not None for name, gradient in removed.items()):
        return {"cuts"}
    if all(_distance(gradient, plain[name]) == 0 for name, gradient in removed.items()):
        return {"no-op", "redundant"}
    beyond = {
        name for name, gradient in removed.items() if _distance(gradient, plain[name]) > _allowed(gradient, plain[name])
    }
    if not beyond:
        return {"redundant"}
    if any(_norm([removed[name]]) <= _allowed(plain[name], None) for name in beyond):
        return {"makes"}
    return {"partial"}


def _allowed(a: np.ndarray | None, b: np.ndarray | None) -> float:
    """Return the rounding of a gradient, eps^(3/4) of its norm, which leaves room for long sums."""
    eps = max((np.finfo(each.dtype).eps for each in (a, b) if each is not None), default=0.0)
    return float(eps) ** 0.75 * max(_norm([a]), _norm([b]))


def _numbers(gradients: Mapping[str, Tensor | None]) -> Gradients:
    """Return gradients as arrays; those in low precision as float32, which holds them exactly."""
    return {name: None if gradient is None else _array(gradient) for name, gradient in gradients.items()}


def _array(gradient: Tensor) -> np.ndarray:
    gradient = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
    low = gradient.dtype in (torch.float16, torch.bfloat16)
    return (gradient.float() if low else gradient).resolve_conj().numpy().copy()


def _dense(gradient: np.ndarray | None, like: np.ndarray | None) -> Any:
    if gradient is not None:
        return gradient
    return 0.0 if like is None else np.zeros_like(like)


def _distance(a: np.ndarray | None, b: np.ndarray | None) -> float:
    return _norm([np.subtract(_dense(a, b), _dense(b, a))])


def _norm(gradients: Iterable[Any]) -> float:
    wide = (np.asarray(each, dtype=np.result_type(each, np.float64)) for each in gradients if each is not None)
    return float(np.sqrt(sum(float(np.vdot(each, each).real) for each in wide)))


def _same(plain: Gradients, blocked: Gradients) -> bool:
    return all(np.array_equal(_dense(plain[name], found), found, equal_nan=True) for name, found in blocked.items())


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
