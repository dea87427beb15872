"""The records of runs in `results/`: one folder per seed, complete or absent.

    results/<config>/<hash of the resolved config>/seed-000/record.json
                                                            gradients.safetensors
    results/zoo.json

A record is written under another name and renamed, so a run that is killed leaves no half record. This module
imports neither torch nor toolkit: reports are drawn where they are not installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

__all__ = [
    "BLOCKED",
    "ExperimentRecords",
    "Record",
    "environment",
    "finished_seeds",
    "read_all",
    "read_zoo",
    "results_folder",
    "variant_name",
    "write_record",
    "write_zoo",
]

SCHEMA = 1
_WITHOUT_EFFECT = ("seeds", "title", "finding", "references")  # on the record of a seed

BLOCKED = "blocked"
"""The variant with every block in place."""

_PACKAGES = ("stopgrad", "torch", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True)
class Record:
    """The record of one seed of one config.

    Attributes:
        seed: The seed.
        data: `record.json`.
        gradients: ``"<first or last>/<variant>/<parameter>"`` -> gradient.
    """

    seed: int
    data: dict[str, Any]
    gradients: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ExperimentRecords:
    """All finished seeds of one config, in the order of the seeds; at least one."""

    name: str
    records: list[Record]


def variant_name(opened: frozenset[str]) -> str:
    """Return the name of a set of open blocks in records and reports."""
    return " + ".join(sorted(opened)) or BLOCKED


def results_folder(root: Path, name: str, resolved: Mapping[str, Any]) -> Path:
    """Return the folder of a config's records; it changes with every value that can change a seed's record.

    The number of seeds does not change the folder: adding seeds continues a config.
    """
    values = {key: value for key, value in resolved.items() if key not in _WITHOUT_EFFECT}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return root / name / digest


def finished_seeds(folder: Path) -> set[int]:
    """Return the seeds whose records are complete."""
    return {int(path.parent.name.removeprefix("seed-")) for path in folder.glob("seed-*/record.json")}


def write_record(folder: Path, seed: int, data: Mapping[str, Any], gradients: Mapping[str, NDArray[Any]]) -> Path:
    """Write the record of one seed atomically. An older record of the same seed is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f".seed-{seed:03d}.*"):
        shutil.rmtree(left_over)
    unfinished = folder / f".seed-{seed:03d}.{os.getpid()}"
    unfinished.mkdir()
    text = json.dumps({"schema": SCHEMA, **data}, indent=1, allow_nan=False)
    (unfinished / "record.json").write_text(text, encoding="utf-8")
    arrays = {key: np.ascontiguousarray(value) for key, value in gradients.items()}
    safetensors.numpy.save_file(arrays, unfinished / "gradients.safetensors")
    for file in unfinished.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    finished = folder / f"seed-{seed:03d}"
    if finished.exists():
        shutil.rmtree(finished)
    unfinished.replace(finished)
    return finished


def read_all(root: Path) -> list[ExperimentRecords]:
    """Return the records of every config with records, sorted by name; of each config those of its newest values.

    Raises:
        ValueError: If a record is damaged, or of another version of this project.
    """
    found = []
    for name in sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []:
        folders = [folder for folder in (root / name).iterdir() if finished_seeds(folder)]
        if folders:
            newest = max(
                folders, key=lambda folder: max(f.stat().st_mtime_ns for f in folder.glob("seed-*/record.json"))
            )
            found.append(ExperimentRecords(name, [_read(path) for path in sorted(newest.glob("seed-*"))]))
    return found


def write_zoo(root: Path, programs: Sequence[Mapping[str, Any]]) -> Path:
    """Write the record of the bug zoo atomically."""
    root.mkdir(parents=True, exist_ok=True)
    unfinished = root / f".zoo.{os.getpid()}"
    text = json.dumps({"schema": SCHEMA, "programs": programs, **environment(1)}, indent=1, allow_nan=False)
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(root / "zoo.json")


def read_zoo(root: Path) -> list[dict[str, Any]]:
    """Return the record of the bug zoo; empty if no such record exists.

    Raises:
        ValueError: If the record is of another version of this project.
    """
    path = root / "zoo.json"
    if not path.is_file():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    _check_schema(data, path)
    programs: list[dict[str, Any]] = data["programs"]
    return programs


def environment(threads: int) -> dict[str, Any]:
    """Return the provenance of a report's numbers: commit, versions, machine."""
    return {
        "git": _git(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": threads,
        },
    }


def _read(folder: Path) -> Record:
    try:
        data = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder}: the record is damaged ({error}): run its config again with --force") from None
    _check_schema(data, folder)
    return Record(data["seed"], data, safetensors.numpy.load_file(folder / "gradients.safetensors"))


def _check_schema(data: Mapping[str, Any], path: Path) -> None:
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: `schema` should be {SCHEMA}. Found {data.get('schema')!r}: run its config again.")


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)


def _git() -> dict[str, Any] | None:
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
