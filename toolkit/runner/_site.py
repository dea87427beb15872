"""Writes the report: an index, a page for each experiment and for the bug zoo; or all of it in a single file.

Imports neither torch nor an algorithm: pages can be drawn where these are not installed.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from toolkit.runner._chart import PALETTE, STYLE, Key, legend
from toolkit.runner._figures import COLOURS
from toolkit.runner._findings import RULE, Difference, broken_claims, compared, doubts, finals
from toolkit.runner._records import BLOCKED, ExperimentRecords, Record, overrides_of, read_all, read_zoo
from toolkit.runner._report import draw_card, experiment_view
from toolkit.runner._sentences import better_end, first_sentence, training_effect, variant_verdict

__all__ = ["sketch", "write_single", "write_site"]


def write_site(root: Path, names: Collection[str] | None = None) -> Path:
    """Write the pages of the records in `root` and return the index.

    Args:
        root: The results folder.
        names: The configs whose pages are drawn again; a page that is missing is always drawn. None: all.
    """
    experiments, zoo = read_all(root), read_zoo(root)
    pages = root / "pages"
    for file, experiment in zip(_files(experiments), experiments, strict=True):
        if names is None or experiment.name in names or not (pages / f"{file}.html").is_file():
            _write(pages / f"{file}.svg", draw_card(experiment))
            _write(pages / f"{file}.html", _render("page", experiment=experiment_view(experiment)))
    if zoo:
        _write(pages / "zoo.html", _render("zoo", zoo=zoo))
    cards = [_card(file, experiment) for file, experiment in zip(_files(experiments), experiments, strict=True)]
    cards.sort(key=lambda card: -card["size"])
    hero = cards[0] if cards else None
    text = _render(
        "index",
        cards=cards,
        hero=hero if hero is not None and hero["size"] > 0 else None,
        hero_keys=_keys(len(hero["variants"])) if hero is not None else "",
        subjects=sorted({card["subject"] for card in cards}),
        verdicts=sorted({verdict for card in cards for _, verdict, _ in card["variants"]}),
        endings=sorted({ending for card in cards for ending in card["endings"]}),
        zoo=zoo,
        keys=_keys(max((len(card["variants"]) for card in cards), default=1)),
    )
    return _write(root / "index.html", text)


def write_single(experiments: Sequence[ExperimentRecords], page: Path, zoo: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write all of the report into one file, and return its path.

    Args:
        experiments: The records of every config.
        page: The file to write.
        zoo: The record of the bug zoo. Empty: the page has no such section.
    """
    return _write(page, _render("single", experiments=[experiment_view(one) for one in experiments], zoo=zoo))


def sketch() -> str:
    """Return the picture that explains a block."""
    return _environment().get_template("_sketch.svg.j2").render()


def _card(file: str, experiment: ExperimentRecords) -> dict[str, Any]:
    """Return one experiment of the index: a picture, a sentence, and the verdict on each block."""
    records = experiment.records
    data, names = records[-1].data, [name for name in records[-1].data["variants"] if name != BLOCKED]
    found = {name: compared(records, name) for name in names}
    effects = {name: training_effect(records, name) for name in names}
    about = "; ".join(f"with {name} open instead (training with the block: {effects[name]})" for name in names)
    return {
        "file": file,
        "title": data["config"]["title"],
        "subject": min(data["blocks"]).partition(".")[0].replace("_", " "),
        "sentence": "" if overrides_of(records) else first_sentence(data["config"]["finding"]),
        "objective": data["objective"]["label"],
        "alt": f"{data['objective']['label']} over the training steps: {about}.",
        "with_values": " ".join(overrides_of(records)),
        "better": better_end(records),
        "broken": not overrides_of(records) and bool(broken_claims(records)),
        "doubts": doubts(records),
        "endings": sorted({difference.kind for difference in found.values()}),
        "variants": [(name, variant_verdict(records, name)["label"], effects[name]) for name in names],
        "size": max(_size(records, name, difference) for name, difference in found.items()),
    }


def _size(records: Sequence[Record], name: str, found: Difference) -> float:
    """Return the least plausible gain by a block as a share of the largest final objective; 0 if it is not better."""
    if found.kind != "better":
        return 0.0
    ends = [abs(end) for variant in (BLOCKED, name) for end in finals(records, variant)]
    return found.low / max(end for end in ends if math.isfinite(end))


def _keys(variants: int) -> str:
    """Return the legend of all cards."""
    opened = ("with a block open", "with another block open", "with a third set of blocks open")
    names = zip(opened[:variants], COLOURS[1:], strict=False)
    keys = [Key(name, colour, index) for index, (name, colour) in enumerate(names, start=1)]
    return legend([Key("with every block in place", COLOURS[0]), *keys])


def _files(experiments: Sequence[ExperimentRecords]) -> list[str]:
    """Return a file name for each experiment; a second config of one name gets a number."""
    names = [re.sub(r"[^\w-]", "_", experiment.name) for experiment in experiments]
    return [f"{name}-{seen}" if (seen := names[:index].count(name)) else name for index, name in enumerate(names)]


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("toolkit.runner", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(name: str) -> str:
    """Return a name as HTML that may continue on the next line between its words, never in a word or a number."""
    return re.sub(r"([._/])(?=[^\W\d])", r"\1<wbr>", html.escape(name))


def _render(template: str, **values: Any) -> str:
    text = _environment().get_template(f"{template}.html.j2")
    return text.render(palette=PALETTE, chart_style=STYLE, rule=RULE, **values)


def _write(path: Path, text: str) -> Path:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)
