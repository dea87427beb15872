"""A mode that sees every call of a program while it is audited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from toolkit._tensors import HALF
from toolkit.blocks import carries_gradient
from toolkit.gradients._as_plain import unrecorded
from toolkit.gradients._cuts import WRITES_STAY_BLOCKED, Unrecordable, changed_by
from toolkit.gradients._gates import is_called_by_checkpoint, replaced_by
from toolkit.gradients._nodes import roots_in
from toolkit.gradients._snapshot import Kept
from toolkit.gradients.audit._frames import calling_frame
from toolkit.gradients.audit._regions import WITHOUT_END
from toolkit.gradients.audit._tensors import requires_gradient
from toolkit.gradients.audit.places import BareBlocks, Replacement

__all__ = ["Watch", "watching"]

_STALE = "autocast keeps the cast of a weight that is updated before its next use, and a recorded region keeps none"
_CHANGED_ONCE = "a checkpoint in it changes a tensor in place, and would change it once more in the backward pass"
_DERIVATIVES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})

# Under another name than that of torch, which an audit replaces.
_is_recording = torch.is_grad_enabled


class Watch(TorchFunctionMode):
    """Observes every call inside of a region.

    In-place operations on older tensors are kept out of the graph of an opened region: they are state, not values.
    Operations on tangents are noted, because `torch.no_grad` does not stop them.
    """

    def __init__(self, bare: BareBlocks) -> None:
        super().__init__()
        self._bare = bare

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, func = kwargs or {}, replaced_by(func)
        if not self._bare.is_mine():
            return func(*args, **kwargs)
        result = self._watched(func, args, kwargs)
        if torch._C._is_any_autocast_enabled():
            self._refuse_stale_casts((args, kwargs), result)
        return result

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bare = self._bare
        if func in bare.bound_earlier:
            return bare.bound_earlier[func](*args, **kwargs)
        if func in _DERIVATIVES and bare.close_regions is not None:
            bare.close_regions(roots_in((args, kwargs)))
        if func in _DERIVATIVES and not kwargs.get("create_graph"):
            bare.note_escape(f"{func.__name__}()", calling_frame())
        elif (
            func is torch._C._set_grad_enabled
            and args == (False,)
            and (site := bare.site("_set_grad_enabled", calling_frame()))
        ):
            bare.real[str(site)] = WITHOUT_END
        changed = changed_by(func, args, kwargs)
        if bare.undone is not None:
            bare.undone += [Kept.now(tensor, "", is_data=False) for tensor in filter(bare.is_state, changed)]
        region = bare.region
        if region is None and not changed:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if region is None:
            if _is_recording():
                bare.note_writes(changed, leaves)
            return func(*args, **kwargs)
        one_mode = forward_ad._current_level >= 0 and bare.kinds[region] != "inference_mode"
        if one_mode and any(map(_has_tangent, leaves)):
            bare.one_mode[region] = None
        # Without a gradient, as a counter of a batch norm, there is nothing to keep out.
        states = [tensor for tensor in changed if bare.is_state(tensor)]
        # An integer is the number of batches of a batch norm, which no gradient uses.
        moves = any(tensor.is_floating_point() for tensor in states)
        if moves and bare.unrepeated and is_called_by_checkpoint("checkpoint"):
            bare.partly |= dict.fromkeys(bare.unrepeated.intersection(bare.entered()), _CHANGED_ONCE)
        changed = states if states and any(map(carries_gradient, leaves)) else []
        bare.writes.update([region] if changed else [])
        # A view cannot be made a constant again.
        if changed and (region in bare.spares or any(tensor._base is not None for tensor in changed)):
            bare.partly[region] = WRITES_STAY_BLOCKED
            with unrecorded():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _refuse_stale_casts(self, inputs: Any, result: Any) -> None:
        """Raise Unrecordable if a call under autocast took a weight of which the plain step has an older cast.

        Autocast keeps the cast of a weight until its end, also past an update of the weight. In a recorded region it
        keeps none.
        """
        if not any(getattr(leaf, "dtype", None) in HALF for leaf in tree_leaves(result)):
            return
        regions = frozenset(self._bare.regions_without_casts())
        for weight in tree_leaves(inputs):
            if not (requires_gradient(weight) and weight.is_leaf and weight.dtype is torch.float32):
                continue
            version, earlier = self._bare.casts.setdefault(weight, (weight._version, regions))
            if weight._version != version and (found := earlier | regions):
                raise Unrecordable(dict.fromkeys(sorted(found), _STALE))


def watching(bare: BareBlocks) -> list[Replacement]:
    """Return the attributes to replace for a `Watch`, each with the function that makes the new one of the old."""

    def clearing(original: Any) -> Any:
        def clear_autocast_cache() -> None:
            bare.casts.clear()
            original()

        return clear_autocast_cache

    def backward(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            """Watch the calls of functions and hooks: torch leaves the mode during a derivative."""
            if not bare.is_mine() or any(isinstance(mode, Watch) for mode in _get_current_function_mode_stack()):
                return original(*args, **kwargs)
            with Watch(bare):
                return original(*args, **kwargs)

        return run

    return [(torch.autograd, "_engine_run_backward", backward), (torch, "clear_autocast_cache", clearing)]


def _has_tangent(input: Tensor) -> bool:
    """Return whether a forward-mode derivative of any level flows into `input`."""
    functorch = torch._C._functorch
    while True:
        wrapped = functorch.is_functorch_wrapped_tensor(input)
        batched = wrapped and functorch.is_batchedtensor(input)
        try:
            if not batched and forward_ad.unpack_dual(input).tangent is not None:
                return True
        except RuntimeError:  # torch differentiates one of its own operations, and has no tangent to show yet
            return True
        if not wrapped:
            return False
        input = functorch.get_unwrapped(input)
