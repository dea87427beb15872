"""The answers about a package, in a JSON file of its own, from which the documentation is drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["RECORDS", "Answer", "Loss", "Record", "read_records"]

RECORDS = Path(__file__).with_name("records")


@dataclass(frozen=True)
class Answer:
    """The effect of opening some stops of a loss together, as an audit tells it and as the removal shows it.

    Attributes:
        places: ``file:line:column`` in the package. Several: they were opened together.
        kinds: The call at each place.
        sources: The line of source at each place.
        links: Where each line can be read; empty if it is not published.
        verdict: As the audit says it.
        kind: The kind of the verdict.
        leak: Norm of the change of the gradient.
        ratio: Norm of the gradient with the stops open, relative to the plain one; None if that is zero.
        cosine: Cosine of the angle between the two; None if one of them is zero.
        removed_leak: The leak after the stops were removed from the source; None if they could not be removed.
        distance: Largest distance of a parameter's gradient from the one after the removal, relative to its norm.
        agrees: Whether gradient, leak and verdict are those of the removal; None if it was not compared, or
            if the audit says that a part stayed closed and the rest differs.
        remark: Why it was not compared, or the difference; else empty.
    """

    places: list[str]
    kinds: list[str]
    sources: list[str]
    links: list[str]
    verdict: str
    kind: str
    leak: float | None
    ratio: float | None
    cosine: float | None
    removed_leak: float | None = None
    distance: float | None = None
    agrees: bool | None = None
    remark: str = ""


@dataclass(frozen=True)
class Loss:
    """The audit of one loss.

    Attributes:
        name: The function in the program.
        failure: A sentence if there is no answer; else empty.
        gradient: Norm of the plain gradient.
        answers: The effect of each stop alone, then of stops together.
        unopened: ``place: kind: reason`` of each stop that could not be opened.
    """

    name: str
    failure: str = ""
    gradient: float | None = None
    answers: list[Answer] = field(default_factory=list)
    unopened: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """The audits of one package.

    Attributes:
        package: Its name in the package index.
        version: Its version.
        torch: The version of torch.
        losses: One for each function of the program.
        repository: Its address; empty if the package does not name it.
    """

    package: str
    version: str
    torch: str
    losses: list[Loss]
    repository: str = ""

    def write(self, folder: Path = RECORDS) -> None:
        """Write the record, in place of an earlier one of the package."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False)
        (folder / f"{self.package}.json").write_text(text + "\n", "utf-8")

    def answers(self) -> Iterator[tuple[Loss, Answer]]:
        """Yield each answer with its loss."""
        return ((loss, answer) for loss in self.losses for answer in loss.answers)


def read_records(folder: Path = RECORDS) -> list[Record]:
    """Return all records, by the name of the package."""
    return [_record(json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]


def _record(entry: dict) -> Record:
    return Record(**{**entry, "losses": [_loss(loss) for loss in entry["losses"]]})


def _loss(entry: dict) -> Loss:
    return Loss(**{**entry, "answers": [Answer(**answer) for answer in entry["answers"]]})
