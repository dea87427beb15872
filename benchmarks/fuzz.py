"""Random programs with stops in them: how many get a wrong answer, and how many get none.

    python -m benchmarks fuzz [--programs 20000] [--seed 0] [--jobs 2]

`tests/fuzzing.py` writes the programs and knows the truth; ``python tests/fuzzing.py SEED`` prints a failure.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch

from benchmarks._measure import Row
from benchmarks._options import options
from tests.fuzzing import check, generate

ON_REQUEST = True

_CHUNK = 50


@dataclass
class Tally:
    """The findings in some programs.

    Attributes:
        programs: How many have a truth.
        answers: How many sets of open stops were answered.
        wrong: A line for each wrong answer: seed, kind, sentence.
        refused: Seeds of the programs with a refused question.
        reasons: Why, and how often.
        skipped: Why programs have no truth, and how often.
    """

    programs: int = 0
    answers: int = 0
    wrong: dict[int, list[str]] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add the findings in other programs."""
        self.programs += other.programs
        self.answers += other.answers
        self.wrong |= other.wrong
        self.refused += other.refused
        self.reasons += other.reasons
        self.skipped += other.skipped


def rows() -> Iterator[Row]:
    """Run the programs, print what is wrong and why answers were refused, and yield how often."""
    chosen = options()
    seeds = range(chosen.seed, chosen.seed + chosen.programs)
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    total, start = Tally(), time.perf_counter()
    with ProcessPoolExecutor(chosen.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for done, tally in enumerate(pool.map(tally_of, chunks), 1):
            total.add(tally)
            for seed, lines in tally.wrong.items():
                print(*(f"seed {seed}: {line}" for line in lines), sep="\n", flush=True)
            if done % 20 == 0:
                print(f"{done * _CHUNK} programs, {len(total.wrong)} wrong", file=sys.stderr, flush=True)
    rate = chosen.programs / (time.perf_counter() - start)
    for what, reasons in (("refused", total.reasons), ("skipped", total.skipped)):
        for reason, count in reasons.most_common():
            print(f"{what} {count} times: {reason}")
    note = f"of {total.programs} programs, seeds {seeds.start} to {seeds.stop - 1}"
    told = f"{total.answers} answers, {rate:.1f} programs per second in {chosen.jobs} processes"
    yield Row("wrong / programs", len(total.wrong) / total.programs, "0", f"{len(total.wrong)} {note}; {told}")
    refused = f"{len(total.refused)} {note}; {sum(total.skipped.values())} more have no truth"
    yield Row("refused / programs", len(total.refused) / total.programs, "below 0.02", refused)


def tally_of(seeds: range) -> Tally:
    """Check the programs of these seeds."""
    tally = Tally()
    for seed in seeds:
        finding = check(generate(seed))
        if finding.skipped:
            tally.skipped[_general(finding.skipped)] += 1
            continue
        tally.programs += 1
        tally.answers += finding.answers
        if finding.wrong:
            tally.wrong[seed] = [f"{kind}: {sentence}" for kind, sentence in finding.wrong]
        if finding.refused:
            tally.refused.append(seed)
        tally.reasons.update(map(_general, finding.refused))
    return tally


def _general(reason: str) -> str:
    """Return a reason without the names and numbers of one program."""
    return re.sub(r"\b[a-z]*\d[\w.+-]*", "_", reason)[:160]
