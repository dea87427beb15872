"""Compare the gradients of one program for different sets of open blocks, from one forward pass."""

from __future__ import annotations

import html
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from toolkit.blocks import Block, declared_blocks, gated, opened
from toolkit.gradients._gates import EVERY_BLOCK, GateBoard, Meeting, gate_of, reachable_nodes
from toolkit.gradients._snapshot import Parts, Snapshot, find_parts, without_compiled_code

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BlockEffect", "Comparison", "Difference", "checked_loss", "compare", "named_parameters"]

Parameters = nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Tensor | None

# The sum over subsets doubles with every block.
_MOST_BLOCKS_ATTRIBUTED = 12

# A leak of up to so many times the noise of rounding counts as rounding.
_MOST_NOISE = 100.0

# Numbers that are widened to float64 at a time: a copy of a large gradient would cost more than its norm.
_CHUNK = 2**16

# In a table; `BlockEffect.verdict` names every parameter.
_WIDEST_VERDICT = 40


class Difference(NamedTuple):
    """How the gradient with a block open differs from the gradient with every block in place.

    Attributes:
        leak: ``|open - blocked|``, the Euclidean norm.
        ratio: ``|open| / |blocked|``; infinite where only the blocked one is 0, NaN where both are.
        cosine: Cosine of the angle between the two; NaN where one of them is 0.
    """

    leak: float
    ratio: float
    cosine: float


@dataclass(frozen=True)
class BlockEffect:
    """What opening one block, alone, does to the gradient.

    Attributes:
        name: The block.
        why: What it is held constant for.
        site: Where it was met first: ``file:line:column``.
        calls: How many tensors or regions it was applied to.
        verdict: ``"no-op"``: nothing that carries a gradient reached it. ``"redundant"``: the leak is zero to
            rounding. ``"partial"``: it changes the gradient. ``"cuts all paths to [...]"``: it is the only thing
            between the loss and these parameters.
        leak: Norm of the difference over all parameters.
        ratio: Norm of the gradient with the block open over the norm with it in place.
        cosine: Cosine of the angle between the two.
        per_parameter: The same three for every parameter.
    """

    name: str
    why: str
    site: str
    calls: int
    verdict: str
    leak: float
    ratio: float
    cosine: float
    per_parameter: dict[str, Difference]

    def to_dict(self) -> dict[str, Any]:
        """Return the effect as plain JSON; values that are not finite become None."""
        return {
            "name": self.name,
            "why": self.why,
            "site": self.site,
            "calls": self.calls,
            "verdict": self.verdict,
            **_plain(Difference(self.leak, self.ratio, self.cosine)),
            "per_parameter": {name: _plain(difference) for name, difference in self.per_parameter.items()},
        }


class Comparison:
    """Gradients of one program for any set of open blocks. Made by `compare`.

    Attributes:
        loss: The loss. It is the same for every set of open blocks.
        blocked: Parameter -> gradient with every block in place; zero where no path is left.
        effects: What opening each block alone does, in the order of the program.
    """

    loss: float
    blocked: dict[str, Tensor]
    effects: list[BlockEffect]

    def __init__(
        self,
        loss: Callable[[], Tensor],
        params: Parameters,
        blocks: Collection[Block | str] | None,
        *,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run `loss` once; see `compare`. Whatever runs of the program later on runs inside of `around` as well."""
        self._loss_function = loss
        self._around = around
        parts = find_parts(loss, params) if isinstance(params, nn.Module) else find_parts(loss)
        given = None if params is None else named_parameters(params, parts)
        self._snapshot = Snapshot(parts, given or {})
        self._board = GateBoard()
        with self._aside():
            with self._board.forward():
                self._value = checked_loss(loss())
            _refuse_hidden_graphs(self._value)
            self._board.close_regions(self._value)
            self._params = given if given is not None else _leaves(self._value, parts)
            self._versions = {name: parameter._version for name, parameter in self._params.items()}
            self._names = _selected(blocks, self._board.meetings)
            self._board.arrivals = []
            with self._with_open(frozenset()) as self._value:
                self.loss = self._value.item()
                self.blocked = self._differentiated(self._value)
            self._arrivals, self._board.arrivals = self._board.arrivals, None
            self.effects = [self._effect([name]) for name in self._names]

    @property
    def meetings(self) -> dict[str, Meeting]:
        """Block -> how the program met it, in its order."""
        return self._board.meetings

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> what is differentiated by."""
        return self._params

    def gradient(self, open: Collection[Block | str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly the blocks in `open` are open.

        A gate answers without another forward pass. A block that a derivative inside of the forward pass met (the
        inner gradient of an attack, say) has changed values by then, so for it the program is run again.

        Raises:
            ValueError: If a block was not met by the program.
            RuntimeError: If a parameter was modified since the comparison was made.
        """
        names = frozenset(_selected(open, self._board.meetings))
        with self._aside(), self._with_open(names) as value:
            return self._differentiated(value)

    def effect(self, open: Collection[Block | str]) -> BlockEffect:
        """Return what opening these blocks *together* does to the gradient.

        Raises:
            ValueError: If a block was not met by the program, or none is given.
            RuntimeError: If a parameter was modified since the comparison was made.
        """
        names = _selected(open, self._board.meetings)
        if not names:
            raise ValueError("`open` should name at least one block. Found none.")
        with self._aside():
            return self._effect(names)

    def attribution(self) -> dict[frozenset[str], dict[str, Tensor]]:
        """Split the gradient with all blocks open by the set of blocks that each path crosses.

        The gradient is multi-affine in the gates, so the part that crosses exactly the set S is the Moebius sum over
        its subsets, ``sum over T in S of (-1)^|S - T| gradient(T)``. The parts add up to the gradient with all blocks
        open; the part of the empty set is the blocked gradient.

        With more than 12 blocks only sets of up to two are split off, with a `UserWarning` that says so: what crosses
        three blocks or more is then in none of the parts.
        """
        largest = len(self._names)
        if largest > _MOST_BLOCKS_ATTRIBUTED:
            largest = 2
            warnings.warn(
                f"`attribution` is exact for at most {_MOST_BLOCKS_ATTRIBUTED} blocks. Found {len(self._names)}: only "
                "single blocks and pairs are split off.",
                stacklevel=2,
            )
        subsets = itertools.chain.from_iterable(
            itertools.combinations(self._names, size) for size in range(largest + 1)
        )
        parts = {frozenset(subset): self.gradient(subset) for subset in subsets}
        for block in self._names:
            for subset in parts:
                if block in subset:
                    without = parts[subset - {block}]
                    parts[subset] = {name: part - without[name] for name, part in parts[subset].items()}
        return parts

    @cached_property
    def interaction(self) -> float:
        """How far the effects of single blocks mislead about all of them together.

        ``|g(all) - g(none) - sum of the leaks of single blocks|``, relative to the largest of the gradients. Not 0 if a
        path crosses two blocks or more: opened one by one, none of them shows it.
        """
        everything = self.gradient(self._names)
        singles = [self.gradient([name]) for name in self._names]
        rests, sizes = [], [_norm(everything.values()), _norm(self.blocked.values())]
        for name, blocked in self.blocked.items():
            leaks = sum((_flat(single[name]).double() - _flat(blocked).double() for single in singles), 0.0)
            rests.append(_flat(everything[name]).double() - _flat(blocked).double() - leaks)
        sizes += [_norm(single.values()) for single in singles]
        return _norm(rests) / size if (size := max(sizes)) else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return loss, norm of the blocked gradient and effects as plain JSON."""
        return {
            "loss": _finite(self.loss),
            "blocked_norm": _finite(_norm(self.blocked.values())),
            "effects": [effect.to_dict() for effect in self.effects],
        }

    def plot(self) -> Figure:
        """Return a figure: for every block, size and direction of its gradient against the blocked one."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 0.9 + 0.45 * len(self.effects)), layout="constrained")
        ratios, cosines = figure.subplots(1, 2, sharey=True)
        names = [effect.name for effect in self.effects]
        ratios.barh(names, [effect.ratio for effect in self.effects], color="tab:blue")
        ratios.axvline(1, color="black", linewidth=1)
        ratios.set_xlabel("|open| / |blocked|")
        cosines.barh(names, [effect.cosine for effect in self.effects], color="tab:orange")
        cosines.set_xlim(-1, 1)
        cosines.axvline(0, color="black", linewidth=1)
        cosines.set_xlabel("cosine(open, blocked)")
        ratios.invert_yaxis()
        return figure

    def __str__(self) -> str:
        table = text_table(self.rows()) if self.effects else "no blocks were met"
        return "\n".join([self.head(), table, *self.warnings()])

    def _repr_html_(self) -> str:
        return html_table(self.rows())

    def head(self) -> str:
        """Return the line above the table: loss and size of the blocked gradient."""
        return f"loss {self.loss:.6g}, blocked gradient {_norm(self.blocked.values()):.6g}"

    def warnings(self) -> list[str]:
        """Return a line for each way in which the effects of single blocks mislead about all of them together."""
        carried = [effect for effect in self.effects if effect.verdict != "no-op"]
        unchanged = all(p._version == self._versions[name] for name, p in self._params.items())
        if len(carried) < 2 or not unchanged:
            return []
        found = []
        if self.interaction > self._precision**0.5:
            found.append(
                "single effects mislead: all blocks together change the gradient by another "
                f"{self.interaction:.0%} of its size, along paths that cross several of them (see attribution)"
            )
        together, largest = self.effect(self._names).leak, max(effect.leak for effect in carried)
        if together < 0.1 * largest and any(effect.verdict != "redundant" for effect in carried):
            found.append(
                f"single effects mislead: opened together, the blocks cancel to {together / largest:.0%} of the "
                "largest single leak"
            )
        return found

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of the effects as text, the names of its columns first."""
        return [("block", "verdict", "leak", "ratio", "cosine", "where"), *map(_row, self.effects)]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Let the program run without leaving a trace, and in this thread alone: a checkpoint has to meet the gates."""
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with self._snapshot.set_aside(), without_compiled_code(), torch.enable_grad(), one_thread, gated(None):
            with self._around():
                yield

    @contextmanager
    def _with_open(self, open: frozenset[str]) -> Iterator[Tensor]:
        """Yield the loss in a context where its derivative passes exactly the blocks in `open`."""
        for name, parameter in self._params.items():
            if parameter._version != self._versions[name]:
                raise RuntimeError(f"`{name}` should be as it was when the comparison was made. Found it modified.")
        if self._board.needs_rerun(open):
            # On the draws of the first run, with nothing open that another question has opened around this one, and
            # recording, which a program may switch off and not on again.
            with self._snapshot.set_aside(), gated(None), opened(*open), torch.enable_grad():
                yield self._loss_function()
        else:
            with self._board.backward(open):
                yield self._value

    def _effect(self, names: list[str]) -> BlockEffect:
        meetings = [self._board.meetings[name] for name in names]
        if not any(meeting.carried for meeting in meetings):
            verdict, products = "no-op", _products(self._flat_blocked, self._flat_blocked)
        else:
            with self._with_open(frozenset(names)) as value:
                products, gradients = self._products_when_open(value, names)
                # What has a gradient with every block in place has a path to it; only the others need a search.
                cut = [] if products[:, 3].all() else sorted(self._reached(value, names) - self._reached_when_blocked)
                verdict = f"cuts all paths to [{', '.join(cut)}]" if cut else "partial"
                if self._is_rounding(products.sum(0), value, gradients):
                    verdict = "redundant"
        total = _difference(products.sum(0).tolist())
        return BlockEffect(
            name=" + ".join(names),
            why=" ".join(declared_blocks()[name].why if name in declared_blocks() else "" for name in names).strip(),
            site=", ".join(str(meeting.site) for meeting in meetings),
            calls=sum(meeting.calls for meeting in meetings),
            verdict=verdict,
            leak=total.leak,
            ratio=total.ratio,
            cosine=total.cosine,
            per_parameter=dict(zip(self._params, map(_difference, products.tolist()), strict=True)),
        )

    @cached_property
    def _flat_blocked(self) -> list[Tensor]:
        return [_flat(gradient) for gradient in self.blocked.values()]

    @cached_property
    def _reached_when_blocked(self) -> set[str]:
        return self._reached(self._value, ())

    def _reached(self, value: Tensor, open: Collection[str]) -> set[str]:
        """Return the parameters that a gradient of `value` can reach through the graph."""
        nodes = [] if value.grad_fn is None else list(reachable_nodes(value.grad_fn, open))
        reached = {id(getattr(node, "variable", node)) for node in nodes}
        return {
            name
            for name, parameter in self._params.items()
            if id(parameter if parameter.grad_fn is None else parameter.grad_fn) in reached
        }

    def _is_rounding(self, products: Tensor, value: Tensor, gradients: Mapping[str, Tensor]) -> bool:
        """Judge whether a leak is what rounding makes of zero.

        Against the size of the gradients, with room for the rounding of long sums: eps^(3/4) of the coarsest dtype.
        Where the gradient itself vanishes, as after training, that says nothing; there against the noise of both.
        """
        leak, opened, blocked = (math.sqrt(products[i].item()) for i in (0, 2, 3))
        if not math.isfinite(leak):
            return False
        if leak <= self._precision**0.75 * max(opened, blocked):
            return True
        if self._is_resolved:
            return False
        # One extra pass for all blocks, and one for a block whose leak is as small as that.
        noise: float = self._blocked_noise
        return leak <= _MOST_NOISE**2 * noise and leak <= _MOST_NOISE * max(noise, self._noise(value, gradients))

    @cached_property
    def _precision(self) -> float:
        return max(torch.finfo(gradient.dtype).eps for gradient in self.blocked.values())

    @cached_property
    def _is_resolved(self) -> bool:
        """Whether the blocked gradient is clearly more than noise, as far as a short backward pass can tell.

        Of the parameters that have a good part of the gradient, the one that the program used last answers for all.
        """
        names = {id(parameter): name for name, parameter in self._params.items()}
        norms = {name: _norm([gradient]) for name, gradient in self.blocked.items()}
        large = {name for name, norm in norms.items() if norm > 0.1 * math.hypot(*norms.values())}
        uses = [
            (node._sequence_nr(), name)
            for node in ([] if self._value.grad_fn is None else reachable_nodes(self._value.grad_fn, ()))
            for successor, _ in node.next_functions
            if (name := names.get(id(getattr(successor, "variable", None)))) in large
        ]
        if not uses:
            return False
        _, last = max(uses)
        with self._with_open(frozenset()) as value:
            return self._noise(value, {last: self.blocked[last]}) <= math.sqrt(self._precision) * norms[last]

    @cached_property
    def _blocked_noise(self) -> float:
        with self._with_open(frozenset()) as value:
            return self._noise(value, self.blocked)

    def _noise(self, value: Tensor, gradients: Mapping[str, Tensor]) -> float:
        """Return how far rounding moves a gradient: the same one again, of a third and a seventh of the loss."""
        distances = []
        for divisor in (3, 7):
            share = torch.ones_like(value) / divisor
            parts = self._differentiated(value, {name: self._params[name] for name in gradients}, share)
            scale = share.double().item()
            moved = zip(parts.values(), gradients.values(), strict=True)
            distances.append(_norm(_flat(part).double() / scale - _flat(whole).double() for part, whole in moved))
        return max(distances)

    def _products_when_open(self, value: Tensor, names: Collection[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the products of `_products` with `names` open, and the gradient.

        The gradient is the blocked one plus the leak: what the cotangents that arrived at the gates of the blocked
        program become further up. So only the graph above the gates is passed again. It takes a backward pass that is
        linear: where hooks or functions of the user's own may look at cotangents, the whole pass is made.
        """
        if not self._is_linear or self._board.are_regions(names):
            gradients = self._differentiated(value)
            return _products(map(_flat, gradients.values()), self._flat_blocked), gradients
        arrived = [(edge, cotangent) for name, edge, cotangent in self._arrivals if name in names]
        wanted = {name: parameter for name, parameter in self._params.items() if parameter.requires_grad}
        gradients, rows = dict(self.blocked), dict(self._products_when_blocked)
        if arrived and wanted:
            edges, cotangents = zip(*arrived, strict=True)
            leaks = torch.autograd.grad(edges, list(wanted.values()), cotangents, retain_graph=True, allow_unused=True)
            for name, leak in zip(wanted, leaks, strict=True):
                if leak is not None:
                    gradients[name] = self.blocked[name] + leak.detach()
                    rows[name] = _products_of_leak(_flat(leak), _flat(self.blocked[name]))
        return torch.stack(list(rows.values())).cpu(), gradients

    @cached_property
    def _products_when_blocked(self) -> dict[str, Tensor]:
        products = _products(self._flat_blocked, self._flat_blocked)
        return dict(zip(self._params, products.to(self._value.device), strict=True))

    @cached_property
    def _is_linear(self) -> bool:
        if not self._board.linear or self._board.inner or self._board.pierced or self._value.grad_fn is None:
            return False
        leaves_with_hooks = any(parameter._backward_hooks for parameter in self._params.values())
        return not leaves_with_hooks and not any(
            isinstance(node, BackwardCFunction) and not gate_of(node)
            for node in reachable_nodes(self._value.grad_fn, EVERY_BLOCK)
        )

    def _differentiated(
        self, value: Tensor, params: Mapping[str, Tensor] | None = None, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        params = self._params if params is None else params
        # The program may have frozen some of them on its way.
        wanted = {name: parameter for name, parameter in params.items() if parameter.requires_grad}
        gradients: dict[str, Tensor | None] = {}
        if value.requires_grad and wanted:
            found = torch.autograd.grad(value, list(wanted.values()), weight, retain_graph=True, allow_unused=True)
            gradients = dict(zip(wanted, found, strict=True))
        return {
            name: torch.zeros_like(parameter) if (gradient := gradients.get(name)) is None else gradient.detach()
            for name, parameter in params.items()
        }


def compare(
    loss: Callable[[], Tensor], params: Parameters = None, *, blocks: Collection[Block | str] | None = None
) -> Comparison:
    """Compare the gradients of `loss` with every block in place and with each block open, from one forward pass.

    Every block that the program meets becomes an identity node that decides at backward time whether it passes the
    gradient. The program is left as it was found: random state (also of the generators that `loss` uses), ``.grad``,
    training modes and buffers are restored, also when `loss` raises. Compiled functions run in eager mode.

    Args:
        loss: Runs the program and returns its loss, a real scalar.
        params: What to differentiate by: a module, a dict, an iterable of tensors, a tensor, or None for every leaf
            that the loss depends on.
        blocks: The blocks whose effects are computed; None for all that are met.

    Raises:
        TypeError: If `loss` does not return a tensor, or `params` holds something else.
        ValueError: If the loss is not a real scalar, is not a number or has no gradient, if there is no parameter to
            differentiate by, or if a block in `blocks` was not met.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> comparison = compare(lambda: w * stop_gradient(w * w, "doc.scale"), {"w": w})
        >>> comparison.blocked["w"], comparison.gradient(["doc.scale"])["w"]
        (tensor(9.), tensor(27.))
        >>> comparison.effects[0].verdict
        'partial'
    """
    return Comparison(loss, params, blocks)


def checked_loss(value: Any) -> Tensor:
    """Return what a loss function returned, if a gradient can be asked of it."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`loss` should return a tensor. Found {type(value).__name__}.")
    if value.numel() != 1:
        raise ValueError(f"`loss` should return a scalar. Found a tensor of shape {tuple(value.shape)}.")
    if value.is_complex():
        raise ValueError(f"`loss` should return a real number. Found {value.dtype}.")
    if value.isnan():
        raise ValueError("`loss` should return a number. Found nan.")
    if not value.requires_grad:
        raise ValueError("`loss` should depend on a tensor that requires a gradient. Found a constant.")
    return value


def named_parameters(params: Parameters, parts: Parts) -> dict[str, Tensor]:
    """Return name -> tensor for what a caller gave to differentiate by; raise if it cannot be.

    Raises:
        TypeError: If `params` holds something else than tensors.
        ValueError: If none of them requires a gradient.
    """
    if isinstance(params, nn.Module):
        named: dict[str, Tensor] = dict(params.named_parameters())
    elif isinstance(params, Mapping):
        named = dict(params)
    elif isinstance(params, Tensor):
        named = {parts.names_of_leaves().get(id(params), "params"): params}
    elif not isinstance(params, Iterable):
        raise TypeError(
            f"`params` should be a module, a dict, an iterable of tensors or a tensor. Found {type(params).__name__}."
        )
    else:
        known = parts.names_of_leaves()
        entries = list(params)
        named = {known.get(id(entry), f"params[{index}]"): entry for index, entry in enumerate(entries)}
    for name, parameter in named.items():
        if not isinstance(parameter, Tensor):
            raise TypeError(f"`params` should hold tensors. Found {type(parameter).__name__} at {name!r}.")
    required = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not required:
        raise ValueError("`params` should hold at least one tensor that requires a gradient. Found none.")
    return required


def _refuse_hidden_graphs(loss: Tensor) -> None:
    """Raise if parts of the graph are made anew in the backward pass, where no derivative by a parameter finds them."""
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in reachable_nodes(loss.grad_fn, EVERY_BLOCK)):
        raise RuntimeError(
            "`loss` should checkpoint with use_reentrant=False. Found a reentrant checkpoint, which hides the graph of "
            "what it runs."
        )


def _leaves(loss: Tensor, parts: Parts) -> dict[str, Tensor]:
    known = parts.names_of_leaves()
    leaves = [node.variable for node in reachable_nodes(loss.grad_fn, EVERY_BLOCK) if hasattr(node, "variable")]
    return {known.get(id(leaf), f"leaf {tuple(leaf.shape)} #{index}"): leaf for index, leaf in enumerate(leaves)}


def _selected(blocks: Collection[Block | str] | None, met: Mapping[str, Meeting]) -> list[str]:
    if blocks is None:
        return list(met)
    if isinstance(blocks, (str, Block)):
        blocks = [blocks]
    names = list(dict.fromkeys(block.name if isinstance(block, Block) else block for block in blocks))
    for name in names:
        if name not in met:
            raise ValueError(f"`blocks` should be among those that the program meets: {sorted(met)}. Found {name!r}.")
    return names


def _products(open: Iterable[Tensor], blocked: Iterable[Tensor]) -> Tensor:
    """Return (P, 4), for every parameter with its gradients a and b: ``|a - b|^2, a . b, |a|^2, |b|^2``."""
    rows = []
    for a, b in zip(open, blocked, strict=True):
        parts = [(a, b)] if a.numel() <= _CHUNK else zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
        products = [_four_products(a_part.double(), b_part.double()) for a_part, b_part in parts]
        rows.append(
            products[0] if len(products) == 1 else [torch.stack(column).sum() for column in zip(*products, strict=True)]
        )
    return torch.stack([product for row in rows for product in row]).view(-1, 4).cpu()


def _products_of_leak(leak: Tensor, blocked: Tensor) -> Tensor:
    """Return the row of `_products` for the gradient ``blocked + leak``, without rounding the leak into the sum."""
    rows = []
    for part, b in zip(leak.split(_CHUNK), blocked.split(_CHUNK), strict=True):
        part, b = part.double(), b.double()
        a = b + part
        rows.append(torch.stack([part.dot(part), a.dot(b), a.dot(a), b.dot(b)]))
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)


def _four_products(a: Tensor, b: Tensor) -> list[Tensor]:
    leak = a - b
    return [leak.dot(leak), a.dot(b), a.dot(a), b.dot(b)]


def _difference(products: Iterable[float]) -> Difference:
    leak, dot, open, blocked = products
    if blocked:
        ratio = math.sqrt(open / blocked)
    else:
        ratio = math.inf if open else math.nan
    lengths = math.sqrt(open) * math.sqrt(blocked)
    cosine = dot / lengths if lengths else math.nan
    return Difference(math.sqrt(leak), ratio, cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine)))


def _flat(tensor: Tensor) -> Tensor:
    """Return all numbers of a tensor of any layout, real and imaginary parts apart, as one vector."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.reshape(-1)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(_flat(tensor).double().norm().item() for tensor in tensors))


def text_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def html_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as a table, the first as its head."""
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(("th", *("td",) * (len(rows) - 1)), rows, strict=True)
    ]
    return f"<table>{''.join(lines)}</table>"


def _row(effect: BlockEffect) -> tuple[str, ...]:
    numbers = (f"{value:.3g}" for value in (effect.leak, effect.ratio, effect.cosine))
    verdict = effect.verdict if len(effect.verdict) <= _WIDEST_VERDICT else f"{effect.verdict[: _WIDEST_VERDICT - 2]}…]"
    return (effect.name, verdict, *numbers, effect.site)


def _plain(difference: Difference) -> dict[str, float | None]:
    return {key: _finite(value) for key, value in difference._asdict().items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
