"""The records of runs in `results/`: one folder per seed, complete or absent.

    results/<config>/<hash of the resolved config>/seed-000/record.json
                                                            gradients.safetensors
    results/zoo.json

A record is written under another name and renamed, so a run that is killed leaves no half record. This module
imports neither torch nor toolkit: reports are drawn where they are not installed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

__all__ = [
    "BLOCKED",
    "MEASURED_SEEDS",
    "WITHOUT_EFFECT",
    "ExperimentRecords",
    "Record",
    "claimed",
    "damaged_records",
    "environment",
    "is_finished",
    "is_older",
    "lacks_seconds",
    "overrides_of",
    "read_all",
    "read_records",
    "read_zoo",
    "results_folder",
    "variant_name",
    "write_record",
    "write_times",
    "write_zoo",
]

SCHEMA = 1
WITHOUT_EFFECT = ("seeds", "title", "finding", "references", "expect", "seconds")
"""The keys of a config that do not change the record of a seed."""

MEASURED_SEEDS = 1
"""Times are measured for the first seeds of a config alone: they do not depend on the seed."""

_AGAIN = "run its config again"

# Parts of every record that the report reads.
_PARTS = ("config", "objective", "comparison", "variants", "blocks")

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
class Damage:
    """A record that cannot be read, or that is of another version of this project; the sentence says where and why."""

    sentence: str


@dataclass(frozen=True)
class ExperimentRecords:
    """All finished seeds of one config, in the order of the seeds; at least one.

    Attributes:
        name: The config's file name without its ending.
        records: The seeds.
        overridden: The seeds for each set of overridden values.
        damaged: The damaged records of configs with this file name, in a sentence each.
    """

    name: str
    records: list[Record]
    overridden: list[list[Record]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def variant_name(opened: frozenset[str]) -> str:
    """Return the name of a set of open blocks in records and reports."""
    return " + ".join(sorted(opened)) or BLOCKED


def results_folder(root: Path, name: str, resolved: Mapping[str, Any]) -> Path:
    """Return the folder of a config's records; it changes with every value that can change a seed's record.

    The number of seeds does not change the folder: adding seeds continues a config.
    """
    values = {key: value for key, value in resolved.items() if key not in WITHOUT_EFFECT}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return root / name / digest


def is_finished(folder: Path, seed: int) -> bool:
    """Return whether the record of a seed is there, and whole."""
    return not isinstance(_read(_seed(folder, seed)), Damage)


def is_older(folder: Path, seed: int, file: Path) -> bool:
    """Return whether a file was changed after a seed was trained."""
    return (_seed(folder, seed) / "gradients.safetensors").stat().st_mtime_ns < file.stat().st_mtime_ns


def lacks_seconds(folder: Path, seed: int) -> bool:
    """Return whether the record of a seed still lacks its times."""
    if seed >= MEASURED_SEEDS or isinstance(found := _read(_seed(folder, seed)), Damage):
        return False
    return any(variant["seconds_per_step"] is None for variant in found.data["variants"].values())


def _read_below(folder: Path) -> dict[Path, Record | Damage]:
    """Return the records below a folder, in the order of their seeds, and the folders that cannot be read."""
    unreadable: list[OSError] = []
    seeds = [
        Path(path) for path, *_ in os.walk(folder, onerror=unreadable.append) if re.search(r"[/\\]seed-\d{3,}$", path)
    ]
    found = {path: _read(path) for path in sorted(seeds)}
    found.update({Path(error.filename): Damage(_unreadable(error)) for error in unreadable})
    return found


def _unreadable(error: OSError) -> str:
    return f"{error.filename}: cannot be read: {error.strerror}"


def _seed(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed:03d}"


def write_record(folder: Path, seed: int, data: Mapping[str, Any], gradients: Mapping[str, NDArray[Any]]) -> Path:
    """Write the record of one seed atomically. An older record of the same seed is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f".seed-{seed:03d}.*.unfinished"):
        shutil.rmtree(left_over)
    unfinished, older = (folder / f".seed-{seed:03d}.{os.getpid()}{end}.unfinished" for end in ("", ".older"))
    unfinished.mkdir()
    _write_json(unfinished / "record.json", data)
    arrays = {key: np.ascontiguousarray(value) for key, value in gradients.items()}
    # `save_file` makes a file that no other user can read.
    (unfinished / "gradients.safetensors").write_bytes(safetensors.numpy.save(arrays))
    for file in unfinished.iterdir():
        with file.open("r+b") as handle:  # Windows writes out no file that is open for reading alone
            os.fsync(handle.fileno())
    finished = _seed(folder, seed)
    if finished.exists():
        finished.replace(older)
    unfinished.replace(finished)
    shutil.rmtree(older, ignore_errors=True)
    return finished


def write_times(folder: Path, seed: int, times: Mapping[str, Any]) -> None:
    """Add the times to a record, atomically."""
    path = _seed(folder, seed) / "record.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for name, measured in times["variants"].items():
        variant = data["variants"][name]
        variant["seconds_per_step"] = measured["seconds_per_step"]
        if variant["sweep"] is not None:
            variant["sweep"].update(measured["sweep"])
    for name, method in ((data["methods"] or {}).get("trained") or {}).items():
        method["seconds_per_step"] = times["methods"].get(name)
    _write_json(path.with_name(".record.json"), data).replace(path)


def _write_json(path: Path, data: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps({"schema": SCHEMA, **data}, indent=1, allow_nan=False), encoding="utf-8")
    return path


@contextlib.contextmanager
def claimed(folder: Path, seed: int) -> Iterator[bool]:
    """Claim a seed for this process, and yield False if another process has it. A claim ends with its process."""
    from filelock import FileLock, Timeout  # late: `--help` does not wait for it

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".seed-{seed:03d}.claim"
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):  # Windows has no open file deleted: there, the lock deletes it
            path.unlink()
        lock.release()


def read_all(root: Path) -> list[ExperimentRecords]:
    """Return the records of every config with records, sorted by name.

    A config whose file was edited has records of older values: those count that agree with the file, or the newest if
    none does. Records of overridden values stand beside them; they come first only where there are no others. Damaged
    records are left out, and named.
    """
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return [found for name in names for found in _of_name(name, root / name)]


def read_records(folder: Path) -> list[Record]:
    """Return the whole records of one folder, in the order of the seeds."""
    return [record for record in _read_below(folder).values() if isinstance(record, Record)]


def damaged_records(root: Path) -> list[str]:
    """Return a sentence about each damaged record in a results folder, or in a part of it."""
    zoo = [_read_zoo(root / "zoo.json")] if (root / "zoo.json").is_file() else []
    return [one.sentence for one in (*_read_below(root).values(), *zoo) if isinstance(one, Damage)]


def _of_name(name: str, folder: Path) -> list[ExperimentRecords]:
    """Return the records of the configs with one file name: configs in several folders differ in their titles."""
    found = _read_below(folder)
    damaged = [one.sentence for one in found.values() if isinstance(one, Damage)]
    of_values: dict[Path, list[Record]] = {}
    for path, one in found.items():
        if isinstance(one, Record):
            of_values.setdefault(path.parent, []).append(one)
    groups: dict[str, list[list[Record]]] = {}
    for _, records in sorted(of_values.items()):
        groups.setdefault(records[-1].data.get("config", {}).get("title", ""), []).append(records)
    return [_chosen(name, of_title, damaged) for _, of_title in sorted(groups.items())]


def _chosen(name: str, groups: list[list[Record]], damaged: list[str]) -> ExperimentRecords:
    plain = [records for records in groups if not overrides_of(records)]
    overridden = sorted((records for records in groups if overrides_of(records)), key=_time)
    if not plain:
        return ExperimentRecords(name, overridden[-1], overridden[:-1], damaged)
    newest = max(plain, key=lambda records: (_agrees(records), _time(records)))
    return ExperimentRecords(name, newest, overridden, damaged)


def overrides_of(records: Sequence[Record]) -> list[str]:
    """Return the ``key=value`` that these records were made with, without those that change no record."""
    found = [record.data.get("overrides", []) for record in records]
    fewest: list[str] = min(found, key=len)
    return [text for text in fewest if text.partition("=")[0].strip() not in WITHOUT_EFFECT]


def _agrees(records: Sequence[Record]) -> bool:
    """Return whether the config's file still has the values of these records."""
    data = records[-1].data
    try:
        now, then = (tomllib.loads(text) for text in (Path(data["path"]).read_text("utf-8-sig"), data["source"]))
    except (OSError, KeyError, ValueError):
        return False
    return {**now, **dict.fromkeys(WITHOUT_EFFECT)} == {**then, **dict.fromkeys(WITHOUT_EFFECT)}


def _time(records: Sequence[Record]) -> str:
    return max(str(record.data.get("finished", "")) for record in records)


def write_zoo(root: Path, programs: Sequence[Mapping[str, Any]]) -> Path:
    """Write the record of the bug zoo atomically."""
    root.mkdir(parents=True, exist_ok=True)
    unfinished = root / f".zoo.{os.getpid()}"
    text = json.dumps({"schema": SCHEMA, "programs": programs, **environment(1)}, indent=1, allow_nan=False)
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(root / "zoo.json")


def read_zoo(root: Path) -> list[dict[str, Any]]:
    """Return the record of the bug zoo; empty if there is none, or if it is damaged."""
    path = root / "zoo.json"
    found = _read_zoo(path) if path.is_file() else []
    return [] if isinstance(found, Damage) else found


def _read_zoo(path: Path) -> list[dict[str, Any]] | Damage:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Damage(f"{path}: the record is damaged ({error}): run `stopgrad zoo` again")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("programs"), list):
        return Damage(f"{path}: the record is damaged or of another version: run `stopgrad zoo` again")
    programs: list[dict[str, Any]] = data["programs"]
    return programs


def environment(threads: int) -> dict[str, Any]:
    """Return the provenance of a report's numbers: commit, versions, machine."""
    return {
        "git": _git(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": threads,
        },
    }


def _read(folder: Path) -> Record | Damage:
    """Return the record of a seed, or its damage."""
    try:
        data = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        gradients = safetensors.numpy.load((folder / "gradients.safetensors").read_bytes())
    except FileNotFoundError as error:
        return Damage(f"{folder}: {Path(error.filename or 'gradients.safetensors').name} is missing: {_AGAIN}")
    except PermissionError as error:
        return Damage(_unreadable(error))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        return Damage(f"{folder}: the record is damaged ({error}): {_AGAIN}")
    if not isinstance(data, dict) or ("schema" in data and "seed" not in data):
        return Damage(f"{folder}: the record is damaged (it is no record): {_AGAIN}")
    if data.get("schema") != SCHEMA:
        return Damage(f"{folder}: `schema` should be {SCHEMA}. Found {data.get('schema')!r}: {_AGAIN}")
    if missing := [part for part in _PARTS if part not in data]:
        return Damage(f"{folder}: the record is damaged (it has no {', '.join(missing)}): {_AGAIN}")
    return Record(data["seed"], data, gradients)


@functools.cache
def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@functools.cache  # the commit at the first record: later ones are not of the code that this process has imported
def _git() -> dict[str, Any] | None:
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
