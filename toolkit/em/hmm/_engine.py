"""Baum-Welch without a gradient: the fast pass over one set of sequences, and the slow pass for the unsound ones.

S sequences, N steps in all, K states.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.em.engine.checks import check_weights
from toolkit.em.hmm._chain import Chain, is_short
from toolkit.em.hmm._emissions import Pass, Prepared
from toolkit.em.hmm._logarithms import smooth, sums_over_paths
from toolkit.em.hmm._plan import Chunk, Plan, plan
from toolkit.em.hmm._recursions import Consume, ForwardBackward, Workspace, forward_backward
from toolkit.em.hmm.parameters import DirichletPrior, HMMParameters, Posteriors, with_counts

__all__ = ["Engine"]


@dataclass(frozen=True, eq=False)
class _Arrangement:
    """Sequences prepared for the fast pass, all as one chain or by a plan, and chunks of them for the slow pass."""

    fast: Plan
    slow: tuple[Chunk, ...]
    prepared: Prepared
    chain: Chain | None = None


class Engine:
    """The fast pass over one set of sequences, and the slow pass for the unsound ones."""

    def __init__(
        self, parameters: HMMParameters, x: Tensor, lengths: list[int], sequence_weight: Tensor | None
    ) -> None:
        check_weights(sequence_weight, len(lengths), name="sequence_weight")
        self.weight = None if sequence_weight is None else sequence_weight.to(x.device, torch.float64)
        self.dtype = x.dtype if x.is_floating_point() else parameters.log_start.dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"`x` should be a float32 or float64 tensor. Found {self.dtype}.")
        self._lengths = lengths
        self._starts = [0, *itertools.accumulate(lengths)]
        self._workspace = Workspace()
        if x.device.type == "cpu" and is_short(lengths, parameters.n_states):
            # So few that float32 would save no time.
            self._inner, self._x = torch.float64, x.double() if x.is_floating_point() else x
            self._whole = self._chain(parameters)
        else:
            self._inner, self._x = self.dtype, x
            self._whole = self._arrange(parameters, frozenset())

    def step(
        self, parameters: HMMParameters, prior: DirichletPrior, reg_covar: float, update: str = "ste"
    ) -> tuple[HMMParameters, Tensor]:
        """Return the parameters after a step of the kinds in `update`, float64, and log-likelihoods before it, (S,)."""
        parameters = parameters.to(torch.float64)
        found, at_work = self._run(parameters, lambda at_work, _: at_work.consume)
        emissions = at_work.finish(prior=prior.emission, reg_covar=reg_covar, update=update)
        new = with_counts(parameters, found.start, found.transitions, emissions, prior)
        new = dataclasses.replace(
            new,
            log_start=new.log_start if "s" in update else parameters.log_start,
            log_transition=new.log_transition if "t" in update else parameters.log_transition,
        )
        return new, found.log_likelihoods

    def posteriors(self, parameters: HMMParameters) -> Posteriors:
        """Return the posteriors of all sequences."""
        states = torch.empty((len(self._x), parameters.n_states), dtype=self.dtype, device=self._x.device)

        def keep(_: Pass, chunks: Sequence[Chunk]) -> Consume:
            def consume(number: int, posteriors: Tensor) -> None:
                states.index_copy_(0, chunks[number].steps, posteriors.mT.to(self.dtype).contiguous())

            return consume

        found, _ = self._run(parameters, keep)
        return Posteriors(
            states=states,
            start=found.start.to(self.dtype),
            transitions=found.transitions.to(self.dtype),
            log_likelihoods=found.log_likelihoods,
        )

    def log_likelihoods(self, parameters: HMMParameters) -> Tensor:
        """Return the log-likelihoods of all sequences, (S,), float64."""
        found, _ = self._run(parameters, None)
        return found.log_likelihoods

    def _run(
        self,
        parameters: HMMParameters,
        consumer: Callable[[Pass, Sequence[Chunk]], Consume] | None,
    ) -> tuple[ForwardBackward, Pass]:
        """Run the fast pass, then repeat unsound sequences in logarithms."""
        arrangement = self._whole
        bad: frozenset[int] = frozenset()
        while True:
            at_work = arrangement.prepared.begin(parameters.emissions)
            chunks = [*arrangement.fast.chunks, *arrangement.slow]
            consume = None if consumer is None else consumer(at_work, chunks)
            logs = parameters.log_start.to(self._inner), parameters.log_transition.to(self._inner)
            options: dict[str, Any] = {"consume": consume, "weights": self.weight}
            if arrangement.chain is not None:
                found = arrangement.chain.forward_backward(*logs, at_work.emit, **options)
            else:
                plan, workspace = arrangement.fast, self._workspace
                found = forward_backward(*logs, plan, at_work.emit, workspace=workspace, **options)
            if bool(found.sound.all()):
                break
            if arrangement.chain is None:
                bad |= set((~found.sound).nonzero().ravel().tolist())
            arrangement = self._arrange(parameters, bad)
        for place, chunk in enumerate(arrangement.slow, len(arrangement.fast.chunks)):
            self._run_slowly(parameters, chunk, found, None if consume is None else functools.partial(consume, place))
        return found, at_work

    def _run_slowly(
        self,
        parameters: HMMParameters,
        chunk: Chunk,
        found: ForwardBackward,
        consume: Callable[[Tensor], None] | None,
    ) -> None:
        """Add the sequences of a chunk to the results, computed in logarithms and float64."""
        model = parameters.to(torch.float64)
        chosen = chunk.sequences.tolist()
        lengths = [self._lengths[s] for s in chosen]
        x = torch.cat([self._x[self._starts[s] : self._starts[s + 1]] for s in chosen])
        x = x.double() if x.is_floating_point() else x
        found.log_likelihoods[chunk.sequences] = sums_over_paths(model, x, lengths)
        if consume is None:
            return
        weight = None if self.weight is None else self.weight[chunk.sequences]
        states, start, transitions = smooth(model, x, lengths, weight)
        found.start.add_(start)
        found.transitions.add_(transitions)
        # Reorder from one sequence after the other to the order of the slots.
        shift = torch.zeros(len(self._lengths), dtype=torch.int64, device=x.device)
        shift[chunk.sequences] = torch.tensor(
            [begin - self._starts[s] for s, begin in zip(chosen, [0, *itertools.accumulate(lengths)], strict=False)],
            device=x.device,
        )
        consume(states[chunk.steps + shift[chunk.slot_sequences]].to(self._inner).mT)

    def _arrange(self, parameters: HMMParameters, bad: frozenset[int]) -> _Arrangement:
        """Lay out the data, with the sequences in `bad` for the slow pass."""
        k, device = parameters.n_states, self._x.device
        good = [s for s in range(len(self._lengths)) if s not in bad]
        fast = plan(self._lengths, k, device=device, item_size=self._inner.itemsize, only=good)
        slow = plan(self._lengths, k, device=device, block=0, only=sorted(bad)).chunks
        everything = dataclasses.replace(fast, chunks=(*fast.chunks, *slow))
        return _Arrangement(fast, slow, parameters.emissions.prepare(self._x, everything))

    def _chain(self, parameters: HMMParameters) -> _Arrangement:
        """Lay out the data as one chain."""
        row = plan([len(self._x)], parameters.n_states, block=0)
        prepared = parameters.emissions.prepare(self._x, row)
        return _Arrangement(row, (), prepared, Chain(self._lengths, parameters.n_states))
