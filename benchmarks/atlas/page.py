"""The records as a sentence of figures and a table of HTML, without the packages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.atlas.records import Answer, Loss, Record

__all__ = ["figures", "sortable", "table"]

# Columns and their parts of the width in percent: all of them are in sight.
_HEAD = {
    "package": 11, "loss": 13, "verdict": 13, "leak": 8, "ratio": 7, "after the removal": 12, "place": 18, "source": 18,
}  # fmt: skip

# Sorts by the column whose head is clicked; numbers by their value.
_SCRIPT = """
document.querySelectorAll("table.atlas th").forEach((head, column) => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0];
  const key = row => row.cells[column].dataset.key ?? row.cells[column].innerText;
  const order = head.dataset.order = head.dataset.order === "1" ? "-1" : "1";
  const compared = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  body.append(...[...body.rows].sort((a, b) => order * compared(key(a), key(b))));
}));
"""


def figures(records: Iterable[Record]) -> str:
    """Return the counts of all records, in words."""
    records = list(records)
    losses = [loss for record in records for loss in record.losses]
    answers = [answer for loss in losses for answer in loss.answers]
    places = {
        (record.package, place): link
        for record in records
        for _, answer in record.answers()
        for place, link in zip(answer.places, answer.links, strict=True)
    }
    unlinked = sorted({package for (package, _), link in places.items() if not link})
    compared = [answer for answer in answers if answer.agrees is not None]
    return (
        f"{len(losses)} losses of {len(records)} packages reach {len(places)} stops. "
        f"{len(compared)} of {len(answers)} answers could be compared with the removal, "
        f"and {sum(bool(answer.agrees) for answer in compared)} agree. "
        f"Losses without an answer: {sum(bool(loss.failure) for loss in losses)}. "
        f"{sum(map(bool, places.values()))} stops link to their line"
        + (f"; the tag of the version is not known for {', '.join(unlinked)}." if unlinked else ".")
    )


def table(records: Iterable[Record]) -> str:
    """Return a row for each answer, as HTML that sorts by a click on the head of a column."""
    rows = [_cells(record, loss, answer) for record in records for loss, answer in record.answers()]
    failed = [
        [(_package(record), ""), (loss.name, ""), (loss.failure, ""), *[("", "")] * 5]
        for record in records
        for loss in record.losses
        if loss.failure
    ]
    return sortable(_HEAD, [*rows, *failed], list(_HEAD.values()))


def sortable(columns: Iterable[str], rows: Iterable[Iterable[tuple[str, str]]], widths: Sequence[int] = ()) -> str:
    """Return a table as HTML.

    Args:
        columns: The heads of the columns.
        rows: A cell is its HTML and the key that it is sorted by, empty for its text.
        widths: Of the columns, in percent; long words are then broken. Empty: as wide as the cells.
    """
    head = "".join(f'<th scope="col" style="cursor: pointer">{name}</th>' for name in columns)
    columns_of = "".join(f'<col style="width: {width}%">' for width in widths)
    layout = "; table-layout: fixed; width: 100%; min-width: 54em; overflow-wrap: anywhere" if widths else ""
    body = "\n".join(map(_row, rows))
    return (
        '<div style="overflow-x: auto; font-size: 0.8em"><table class="docutils atlas" '
        f'style="text-align: left{layout}">{columns_of}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n'
        f"</tbody></table></div>\n<script>{_SCRIPT}</script>\n"
    )


def _cells(record: Record, loss: Loss, answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield the HTML of each cell, and the key that it is sorted by."""
    yield _package(record), ""
    yield html.escape(loss.name), ""
    yield _verdict(answer.verdict), ""
    for number in (answer.leak, answer.ratio):
        yield ("", "-1") if number is None else (f"{number:.3g}", repr(number))
    told = {True: "agrees", False: "differs", None: "not compared"}[answer.agrees]
    yield html.escape(f"{told}. {answer.remark}" if answer.remark else told), ""
    yield "<br>".join(_linked(place, link) for place, link in zip(answer.places, answer.links, strict=True)), ""
    yield "<br>".join(f"<code>{html.escape(source)}</code>" for source in answer.sources), ""


def _verdict(text: str) -> str:
    """Return a verdict; many parameters are counted, and named when the pointer rests on them."""
    label, names, _ = text.partition(" [")
    count = text.count(",") + 1
    if not names or count == 1:
        return html.escape(text)
    return f'{html.escape(label)} <abbr title="{html.escape(text)}">{count} parameters</abbr>'


def _package(record: Record) -> str:
    return _linked(f"{record.package} {record.version}", record.repository)


def _linked(text: str, link: str) -> str:
    return f'<a href="{html.escape(link)}">{html.escape(text)}</a>' if link else html.escape(text)


def _row(cells: Iterable[tuple[str, str]]) -> str:
    keyed = ((f' data-key="{key}"' if key else "", text) for text, key in cells)
    return "<tr>" + "".join(f"<td{key}>{text}</td>" for key, text in keyed) + "</tr>"
