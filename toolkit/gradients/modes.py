"""Forward mode and reverse mode compute the same derivative: `mode_lint` finds the places where they disagree."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, grad_mode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.blocks import constants
from toolkit.gradients._eager import without_compiled_code
from toolkit.gradients._parts import find_parts
from toolkit.gradients._places import user_site
from toolkit.gradients._program import checked_dense, checked_function
from toolkit.gradients._snapshot import Snapshot

__all__ = ["ModeFinding", "ModeReport", "mode_lint"]

_DIRECTIONS = 3  # one random direction shows a disagreement with probability 1; the others are a reserve


@dataclass(frozen=True)
class ModeFinding:
    """One place where forward and reverse mode disagree.

    Attributes:
        site: ``file:line:column``, for a decorated function the place of the function; empty if no place explains it.
        kind: ``"region"``: the place turns off reverse mode, and not forward mode. ``"hook"``: a hook changes a
            gradient, and forward mode has no hooks. ``"unknown"``: another cause; then the two derivatives of one
            operation differ, for example ``backward`` and ``jvp`` of a `torch.autograd.Function`.
        calls: Number of times that the program reached the place.
        difference: The part of the disagreement that vanishes if both modes are treated alike there, relative to the
            size of the compared products.
    """

    site: str
    kind: str
    calls: int
    difference: float

    def __str__(self) -> str:
        if self.kind == "unknown":
            return (
                f"Forward and reverse mode differ by {self.difference:.3g} and no place explains that: a "
                "torch.autograd.Function may have a `backward` and a `jvp` that are not of the same function."
            )
        times = f" ({self.calls} times)" if self.calls > 1 else ""
        what = {
            "region": "the recording is switched off, which stops reverse mode and not forward mode; "
            "`stop_recording` and `stop_gradient` stop both",
            "hook": "a hook changes the gradient of reverse mode, and forward mode has no hooks; "
            "a torch.autograd.Function with `backward` and `jvp` changes both",
        }[self.kind]
        return f"{self.site}{times}: {what}. The modes differ by {self.difference:.3g} because of it."


@dataclass(frozen=True)
class ModeReport:
    """The findings of `mode_lint`; empty, and false, if the modes agree.

    Attributes:
        findings: The findings, in the order of the program.
    """

    findings: tuple[ModeFinding, ...]

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "Forward and reverse mode agree."

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain JSON."""
        return {"findings": [{**vars(finding), "sentence": str(finding)} for finding in self.findings]}


def mode_lint(fn: Callable[..., Any], inputs: Tensor | Sequence[Tensor]) -> ModeReport:
    """Compare forward and reverse mode of ``fn(*inputs)``, and find the places where they disagree.

    With the Jacobian J, ``u . (J v)`` by forward mode and ``(u J) . v`` by reverse mode are the same number. Both come
    from one forward pass, for random v and u. `torch.no_grad` and `torch.set_grad_enabled` stop reverse mode but not
    forward mode, so that ``jacfwd`` and ``jacrev`` differ. If the two numbers differ, the program runs again for every
    candidate place, with both modes treated alike there; a place that changes the difference is a finding. The
    program's state is restored, and compiled functions run in eager mode.

    Args:
        fn: The function; its result is a tensor, or a tree of lists, tuples and dicts that contains tensors.
        inputs: One tensor or several. Derivatives are taken by tensors of floating point or complex dtype. float64
            shows differences down to 1e-10 of the products' size, float32 down to 1e-5.

    Raises:
        TypeError: If `inputs` holds other objects than tensors.
        ValueError: If no input or no result has a derivative, if an input is sparse or nested, or if a product is not
            finite.
        NotImplementedError: If an operation has no derivative in forward mode.
        RuntimeError: If a `torch.autograd.Function` has no derivative in forward mode.

    References:
        Griewank and Walther, "Evaluating Derivatives", 2nd ed. 2008, section 3.2 (the identity of the products).

    Example:
        >>> def loss(x):
        ...     with torch.no_grad():
        ...         scale = x.exp()
        ...     return (scale * x).sum()
        >>> print(mode_lint(loss, torch.ones(3, dtype=torch.float64)))  # doctest: +ELLIPSIS
        <...>:2:5: the recording is switched off, which stops reverse mode and not forward mode; ...
        >>> print(mode_lint(torch.sin, torch.ones(3, dtype=torch.float64)))
        Forward and reverse mode agree.
    """
    if not isinstance(inputs, Iterable):
        raise TypeError(f"`inputs` should be a tensor or a sequence of tensors. Found {type(inputs).__name__}.")
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for entry in given:
        if not isinstance(entry, Tensor):
            raise TypeError(f"`inputs` should be tensors. Found {type(entry).__name__}.")
    checked_dense(given)
    if not any(_is_smooth(entry) for entry in given):
        raise ValueError("`inputs` should hold at least one tensor of floating point or complex dtype. Found none.")
    checked_function("fn", fn, given)
    snapshot = Snapshot(find_parts(fn), {})
    places: dict[str, _Place] = {}

    def differences(nests: bool, *mended: str) -> tuple[Tensor, Tensor]:
        watch = _GradMode(mended)
        with snapshot.set_aside(), without_compiled_code(), torch.enable_grad():
            found = [_products(fn, given, seed, nests, watch) for seed in range(_DIRECTIONS)]
        for key, place in watch.places.items():
            places.setdefault(key, place)
        return torch.tensor([a - b for a, b, _ in found]), torch.tensor([scale for _, _, scale in found])

    nests = False
    try:
        difference, scale = differences(nests)
    except RuntimeError as error:
        if "Nested forward mode" not in str(error):
            raise
        nests = True
        difference, scale = differences(nests)
    if not scale.isfinite().all():
        raise ValueError("`fn` should have finite derivatives. Found an infinite or NaN one.")
    eps = max(torch.finfo(entry.dtype).eps for entry in given if _is_smooth(entry))
    tolerance = eps ** (2 / 3) * scale
    if (difference.abs() <= tolerance).all():
        return ModeReport(())
    findings = []
    for key, place in list(places.items()):
        changed = (differences(nests, key)[0] - difference).abs()
        if (changed > tolerance).any():
            findings.append(ModeFinding(key, place.kind, place.calls // _DIRECTIONS, (changed / scale).max().item()))
    rest = differences(nests, *(finding.site for finding in findings))[0].abs()
    if (rest > tolerance).any():
        findings.append(ModeFinding("", "unknown", 1, (rest / scale).max().item()))
    return ModeReport(tuple(findings))


def _products(
    fn: Callable[..., Any], inputs: list[Tensor], seed: int, nests: bool, watch: _GradMode
) -> tuple[float, float, float]:
    """Return ``u . (J v)``, ``(u J) . v`` and the size of the products."""
    generator = torch.Generator().manual_seed(seed)
    primals = [entry.detach().requires_grad_() for entry in inputs if _is_smooth(entry)]
    directions = [_random_like(primal, generator) for primal in primals]

    def smooth(*smooth_inputs: Tensor) -> tuple[Tensor, ...]:
        rest = iter(smooth_inputs)
        result = fn(*(next(rest) if _is_smooth(entry) else entry for entry in inputs))
        return tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _is_smooth(leaf))

    with ExitStack() as stack:
        if nests:  # a forward-mode derivative inside of the program; does not allow hooks and updates of buffers
            with watch:
                pair: Any = torch.func.jvp(smooth, tuple(primals), tuple(directions))
        else:  # until the reverse pass ends: a checkpoint runs its part again
            stack.enter_context(forward_ad.dual_level())
            with watch:
                results = smooth(*map(forward_ad.make_dual, primals, directions))
            pair = zip(*map(_unpacked, results), strict=True) if results else ((), ())
        values, tangents = pair
        if not values:
            raise ValueError("`fn` should return a tensor of floating point or complex dtype. Found none.")
        weights = [_random_like(value, generator) for value in values]
        gradients = _reverse(values, primals, weights)
    forward, forward_size = _dot(weights, tangents)
    reverse, reverse_size = _dot(gradients, directions)
    return forward, reverse, max(forward_size + reverse_size, torch.finfo(torch.float64).tiny)


def _unpacked(value: Tensor) -> tuple[Tensor, Tensor]:
    primal, tangent = forward_ad.unpack_dual(value)
    return primal, torch.zeros_like(primal) if tangent is None else tangent


def _reverse(values: Sequence[Tensor], primals: list[Tensor], weights: list[Tensor]) -> Sequence[Tensor | None]:
    recorded = [(value, weight) for value, weight in zip(values, weights, strict=True) if value.requires_grad]
    if not recorded:
        return [None] * len(primals)
    roots, cotangents = zip(*recorded, strict=True)
    return torch.autograd.grad(roots, primals, cotangents, allow_unused=True)


def _dot(left: Sequence[Tensor | None], right: Sequence[Tensor]) -> tuple[float, float]:
    """Return the real inner product and the product of the norms."""
    products = squares = others = 0.0
    for a, b in zip(left, right, strict=True):
        b = b.detach().to(torch.complex128).reshape(-1)
        others += b.abs().square().sum().item()
        if a is not None:
            a = a.detach().to(torch.complex128).reshape(-1)
            squares += a.abs().square().sum().item()
            products += torch.linalg.vecdot(a, b).real.item()
    return products, math.sqrt(squares * others)


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.randn(tensor.shape, dtype=dtype, generator=generator, device=generator.device).to(
        tensor.device, tensor.dtype
    )


@dataclass
class _Place:
    kind: str
    calls: int = 0


class _GradMode(TorchFunctionMode):
    """Notes the places where reverse mode is switched off or changed, and treats both modes alike in one place."""

    def __init__(self, mended: Collection[str]) -> None:
        super().__init__()
        self.places: dict[str, _Place] = {}
        self._mended = mended
        # id -> the context object, kept so that its id stays unique; the state it restores; whether its place is
        # mended.
        self._entered: dict[int, tuple[Any, tuple[bool, bool] | None, bool]] = {}
        self._dropping = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            self._switch(args[0], sys._getframe(1))
        elif func is Tensor.register_hook and self._note("hook", sys._getframe(1)):
            return func(args[0], lambda _: None)
        result = func(*args, **(kwargs or {}))
        return constants(result) if self._dropping else result  # views keep their tangents without forward mode

    def _forward(self, dropping: bool, enabled: bool) -> tuple[bool, bool]:
        """Drop tangents or not, switch forward mode off or on, and return the previous state of both."""
        before = self._dropping, torch._C._is_fwd_grad_enabled()
        self._dropping = dropping
        torch._C._set_fwd_grad_enabled(enabled)
        return before

    def _switch(self, enabled: bool, frame: FrameType) -> None:
        """Follow ``with`` statements by their context objects: leaving one restores the state before it."""
        context, leaving = None, False
        while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # of other modes
            frame = frame.f_back
        while frame.f_code.co_filename == grad_mode.__file__ and frame.f_back is not None:
            context, leaving = frame.f_locals.get("self"), leaving or frame.f_code.co_name == "__exit__"
            frame = frame.f_back
        if leaving:
            _, before, _ = self._entered.pop(id(context), (None, None, False))
            if before is not None:
                self._forward(*before)
        elif id(context) not in self._entered:
            mended = not enabled and self._note("region", frame)
            within = enabled and any(outer for _, _, outer in self._entered.values())
            before = self._forward(not enabled, enabled) if mended or within else None
            self._entered[id(context)] = (context, before, mended)

    def _note(self, kind: str, frame: FrameType) -> bool:
        key = str(user_site(frame))
        place = self.places.setdefault(key, _Place(kind))
        place.calls += 1
        return key in self._mended
