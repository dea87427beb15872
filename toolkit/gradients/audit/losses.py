"""The effect of every `detach`, `no_grad` and similar call in unmodified code on the gradient of its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.blocks import has_storage
from toolkit.gradients._answers import ProgramAnswers, answers_of
from toolkit.gradients._endings import Endings
from toolkit.gradients._program import Parameters
from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.places import BareBlocks
from toolkit.gradients.audit.replaced import refuse_another, replaced
from toolkit.gradients.compare import Comparison
from toolkit.gradients.graph import graph_of
from toolkit.gradients.verdict import are_close

__all__ = ["HIDDEN_CHANGE", "audit"]

HIDDEN_CHANGE = "the memory is changed where autograd cannot see it: the gradient is that of other values"
"""The reason to leave a ``.data`` closed if an in-place change through it made the plain gradient wrong."""


def audit(loss: Callable[[], Tensor], params: Parameters = None) -> Audit:
    """Find every place in unmodified code that stops a gradient, and measure its effect, as `compare` does for blocks.

    These places are ``detach``, ``detach_``, ``.data``, ``torch.tensor(x)``, ``new_tensor``, ``no_grad`` and
    ``inference_mode`` (also as decorators), ``set_grad_enabled``, in your code, in third-party packages and inside
    `torch.nn`. One forward pass opens each place separately. Places that cannot be opened are listed.

    With every place closed the loss and all gradients must equal those of a plain run, bit for bit. If recording a
    place changes them, the place keeps its meaning and is listed. If they still differ, the result is marked as not
    valid, with the reason. Parameters, buffers, ``.grad``, modes and random state are restored, and so are torch's
    attributes, which are replaced while the program runs. Compiled functions run in eager mode.

    Args:
        loss: Runs the program and returns its loss, a real scalar. It should not update parameters.
        params: The parameters to differentiate by: a module, a tensor, a dict or iterable of these, or None for
            every leaf that the loss depends on.

    Raises:
        TypeError: As for `compare`.
        ValueError: As for `compare`.
        RuntimeError: If another audit is running in this process.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> found = audit(lambda: w * (w * w).detach() + w.detach(), {"w": w})
        >>> found.valid, [str(effect.verdict) for effect in found.effects]
        (True, ['partial', 'partial'])
    """
    bare = BareBlocks()
    refuse_another()
    with answers_of(loss, params, partial(replaced, bare), bare.sparing) as answers:
        for place in bare.decorators:
            answers.board.meetings.pop(place, None)
        comparison = Comparison(answers, nested=bare.nested)
        answers.leave_quiet()
        kept = [] if comparison.reason else _kept_from_earlier_calls(answers)
        cached = [f"the results of {name}" for name in answers.program.parts.cached]
        known = ", ".join(cached + kept)
        return Audit(
            comparison,
            bare,
            graph=lambda: graph_of(answers.program, answers.params),
            remarks=[f"kept from an earlier call, and not audited: {known}"] if known else [],
            closed=_hidden_changes(answers, comparison, bare),
            unreached={} if comparison.reason else _endings(answers, comparison, bare),
        )


def _kept_from_earlier_calls(answers: ProgramAnswers) -> list[str]:
    """Name the values that were computed from parameters before this run, with stops that nobody saw.

    They are tensors that the program reads: with a graph, or in the memory of a parameter, without its gradient.
    """
    program, memory = answers.program, {_memory(parameter) for parameter in answers.params.values()} - {None}
    suspects = {
        name: tensor
        for name, tensor in program.parts.tensors.items()
        if tensor.grad_fn is not None or (not tensor.requires_grad and _memory(tensor) in memory)
    }
    if not suspects:
        return []
    with program.aside(around=False), _Reads(suspects) as reads:
        program.run()
    return [f"`{name}`" for name in reads.found]


def _hidden_changes(answers: ProgramAnswers, comparison: Comparison, bare: BareBlocks) -> dict[str, str]:
    """Return the places at which changes through ``.data`` have made the plain gradient wrong, with this reason."""
    suspects = [place for place in {**comparison.unopened, **bare.real} if bare.kinds.get(place) == ".data"]
    if not suspects or comparison.reason:
        return {}
    # As if each saved value had not changed since it was saved.
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda kept: kept):
        honest = answers.program.answer(answers.params, around=False).gradients
    return {} if are_close(honest, answers.plain.gradients) else dict.fromkeys(suspects, HIDDEN_CHANGE)


def _endings(answers: ProgramAnswers, comparison: Comparison, bare: BareBlocks) -> dict[str, str]:
    """Return parameter -> the end of its path, for parameters without a path to the loss with every place open.

    If none were given, these are parameters of the modules that the program reaches, as far as it computes with them.
    """
    program, paths = answers.program, answers.plain.reached
    if len(paths) < len(answers.params) and comparison.meetings:
        opened = [effect.name for effect in comparison.effects]
        try:
            paths |= program.answer(answers.params, opened).reached
        except Exception:  # one by one, then
            paths |= {name for effect in comparison.effects for name in effect.verdict.parameters}
    missing = {name: parameter for name, parameter in answers.params.items() if name not in paths}
    beside = _beside(answers) if program.given is None else {}
    if not (missing or beside):
        return {}
    watch = Endings(missing | beside, bare.user_site)
    with program.aside(around=False), watch:
        program.run()
    return {name: watch.of(name) for name in missing | beside if name in missing or name in watch.used}


def _beside(answers: ProgramAnswers) -> dict[str, Tensor]:
    """Return the parameters of modules that the program reaches, and on which the loss does not depend."""
    known = {id(parameter) for parameter in answers.params.values()}
    return {
        name: parameter
        for prefix, module in answers.program.parts.modules.items()
        for name, parameter in module.named_parameters(prefix)
        if parameter.requires_grad and id(parameter) not in known
    }


class _Reads(TorchFunctionMode):
    """Sees which of some tensors a program computes with.

    Attributes:
        found: Their names.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self._names = {id(tensor): name for name, tensor in tensors.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # and not a shape, say
            read = (self._names.get(id(leaf)) for leaf in tree_leaves((args, kwargs)))
            self.found.update(dict.fromkeys(name for name in read if name is not None))
        return result


def _memory(tensor: Tensor) -> int | None:
    """Return where a tensor keeps its numbers; None if they are not in one place."""
    return tensor.untyped_storage()._cdata if has_storage(tensor) else None
