"""The table of all blocks: each is asked at the point at which its tests prove its gradients."""

from __future__ import annotations

import html
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
sys.path[:0] = [str(ROOT / folder) for folder in _SETTINGS["tool"]["pytest"]["ini_options"]["pythonpath"]]

from contract import BlockCase, block_cases  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.atlas.page import sortable  # noqa: E402
from toolkit import Block, compare, declared_blocks, unblock  # noqa: E402
from toolkit.gradients import field_jacobian, measure_memory  # noqa: E402
from toolkit.runner._listing import import_everything  # noqa: E402

_KINDS = {"cuts": "cuts all paths", "makes": "makes the gradient"} | {
    kind: kind for kind in ("no-op", "redundant", "noise", "partial")
}

__all__ = ["cases_of_blocks", "read_configs", "row", "table"]

COLUMNS = ("family", "block", "verdict", "leak", "asymmetry", "bytes kept", "opened by")


def table() -> str:
    """Return a row for each block that the toolkit and its experiments declare, as HTML that sorts by a column."""
    configs = _configs()
    return sortable(COLUMNS, [row(cases, configs.get(cases[0].block.name, [])) for cases in cases_of_blocks()])


def cases_of_blocks() -> Iterator[list[BlockCase]]:
    """Yield the programs of each block, by family and name."""
    import_everything()
    cases: dict[Block, list[BlockCase]] = {}
    for case in block_cases():
        cases.setdefault(case.block, []).append(case)
    known = (block for block in declared_blocks().values() if not block.name.startswith("test_"))
    return (cases[block] for block in known if block in cases)


def row(cases: list[BlockCase], configs: list[str]) -> list[tuple[str, str]]:
    """Return the cells of one block, each with its HTML and the key that it is sorted by.

    The verdicts are those of all its programs, the numbers those of the program with the largest leak, or of the next
    one that can be differentiated twice.
    """
    answers = [_answer(case) for case in cases]
    ordered = sorted(zip(cases, answers, strict=True), key=lambda pair: pair[1][1], reverse=True)
    case, (_, leak) = ordered[0]
    asymmetries = (_asymmetry(case) for case, _ in ordered)
    family, _, name = case.block.name.partition(".")
    return [
        (f'<a href="{family}.html">{family.replace("_", " ")}</a>', family),
        (f'<div style="min-width: 20em"><code>{name}</code><br>{html.escape(case.block.why)}</div>', name),
        (" or ".join(sorted({verdict for verdict, _ in answers})), ""),
        _number(leak),
        _number(next((found for found in asymmetries if found is not None), None)),
        _bytes(case),
        ("<br>".join(map(_link, configs)), str(len(configs))),
    ]


def _answer(case: BlockCase) -> tuple[str, float]:
    """Return the kind of verdict, and the leak relative to the larger of both gradients."""
    parameters = case.parameters()
    comparison = compare(lambda: case.loss(parameters), parameters)
    effect = comparison[case.block]
    blocked, opened = (_size(comparison.gradient(names)) for names in ([], [case.block]))
    return _KINDS[effect.verdict.kind], effect.leak / max(blocked, opened, 1e-300)


def _size(gradient: Mapping[str, Tensor]) -> float:
    return math.hypot(*(float(part.norm()) for part in gradient.values()))


def _asymmetry(case: BlockCase) -> float | None:
    parameters = case.parameters()
    try:
        return float(field_jacobian(lambda: case.loss(parameters), parameters).asymmetry)
    except (RuntimeError, ValueError):  # not every program can be differentiated twice
        return None


def _bytes(case: BlockCase) -> tuple[str, str]:
    """Return the bytes that the graph keeps with the block and without it."""
    parameters = case.parameters()
    closed = measure_memory(lambda: case.loss(parameters)).graph
    with unblock(case.block):
        opened = measure_memory(lambda: case.loss(parameters)).graph
    return f"{closed:,}<br>open {opened:,}", str(opened / closed)


def _number(value: float | None) -> tuple[str, str]:
    return ("", "-1") if value is None else ("0" if value < 1e-12 else f"{value:.3g}", repr(value))


def read_configs() -> dict[str, dict[str, Any]]:
    """Return the bundled configs, by name."""
    paths = sorted((ROOT / "configs").glob("*.toml"))
    return {path.stem: tomllib.loads(path.read_text("utf-8")) for path in paths}


def _configs() -> dict[str, list[str]]:
    """Return block -> the configs that open it."""
    found: dict[str, list[str]] = {}
    for config, read in read_configs().items():
        opened: list[Any] = read["open"]
        for name in {name for entry in opened for name in ([entry] if isinstance(entry, str) else entry)}:
            found.setdefault(name, []).append(config)
    return found


def _link(config: str) -> str:
    address = f"all_experiments.html#config-{config.replace('_', '-')}"
    return f'<a href="{address}"><code>{config.replace("_", "_<wbr>")}</code></a>'
