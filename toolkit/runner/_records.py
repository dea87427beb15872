"""The records of runs in `results/`: one folder per seed, complete or absent.

    results/<config>/<hash of the resolved config>/seed-000/record.json
                                                            gradients.safetensors
    results/zoo.json

A record is written under another name and renamed, so a run that is killed leaves no half record. This module
imports neither torch nor toolkit: reports are drawn where they are not installed.
"""

from __future__ import annotations

import contextlib
import fcntl
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
    "environment",
    "finished_seeds",
    "overrides_of",
    "read_all",
    "read_records",
    "read_zoo",
    "results_folder",
    "unmeasured_seeds",
    "variant_name",
    "write_record",
    "write_seconds",
    "write_zoo",
]

SCHEMA = 1
WITHOUT_EFFECT = ("seeds", "title", "finding", "references", "expect", "seconds")
"""The keys of a config that do not change the record of a seed."""

MEASURED_SEEDS = 1
"""The time of a step is measured for the first seeds of a config alone: it does not depend on the seed."""

_FILES = ("record.json", "gradients.safetensors")

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
    """All finished seeds of one config, in the order of the seeds; at least one.

    Attributes:
        name: The config's file name without its ending.
        records: The seeds.
        overridden: The seeds for each set of overridden values.
    """

    name: str
    records: list[Record]
    overridden: list[list[Record]] = field(default_factory=list)


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


def finished_seeds(folder: Path) -> set[int]:
    """Return the seeds whose records are complete."""
    return {int(path.name.removeprefix("seed-")) for path in _finished(folder)}


def unmeasured_seeds(folder: Path) -> set[int]:
    """Return the seeds whose records have to be completed by the times of a step."""
    return {seed for seed in finished_seeds(folder) if seed < MEASURED_SEEDS and _lacks_seconds(_seed(folder, seed))}


def _finished(folder: Path) -> list[Path]:
    """Return the folders of complete records, in the order of their seeds."""
    found = [path for path in folder.glob("seed-*") if re.fullmatch(r"seed-\d{3,}", path.name)]
    return sorted(path for path in found if all((path / file).is_file() for file in _FILES))


def _lacks_seconds(seed: Path) -> bool:
    return any(variant["seconds_per_step"] is None for variant in _read_data(seed)["variants"].values())


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
    safetensors.numpy.save_file(arrays, unfinished / "gradients.safetensors")
    for file in unfinished.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    finished = _seed(folder, seed)
    if finished.exists():
        finished.replace(older)
    unfinished.replace(finished)
    shutil.rmtree(older, ignore_errors=True)
    return finished


def write_seconds(folder: Path, seed: int, seconds: Mapping[str, float]) -> None:
    """Complete a record atomically by the seconds of a step of each variant."""
    path = _seed(folder, seed) / "record.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for name, value in seconds.items():
        data["variants"][name]["seconds_per_step"] = value
    _write_json(path.with_name(".record.json"), data).replace(path)


def _write_json(path: Path, data: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps({"schema": SCHEMA, **data}, indent=1, allow_nan=False), encoding="utf-8")
    return path


@contextlib.contextmanager
def claimed(folder: Path, seed: int) -> Iterator[bool]:
    """Claim a seed for this process, and yield False if another process has it. A claim ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".seed-{seed:03d}.claim"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = _is_at(path, file.fileno())
        except OSError:
            mine = False
        try:
            yield mine
        finally:
            if mine:
                path.unlink(missing_ok=True)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a file is still at its path, not deleted by the process that had it before."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def read_all(root: Path) -> list[ExperimentRecords]:
    """Return the records of every config with records, sorted by name.

    A config whose file was edited has records of older values: those count that agree with the file, or the newest if
    none does. Records of overridden values stand beside them; they come first only where there are no others.

    Raises:
        ValueError: If a record is damaged, or of another version of this project.
    """
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return [found for name in names for found in _of_name(name, root / name)]


def read_records(folder: Path) -> list[Record]:
    """Return the records of one folder, in the order of the seeds.

    Raises:
        ValueError: As `read_all`.
    """
    return [_read(path) for path in _finished(folder)]


def _of_name(name: str, folder: Path) -> list[ExperimentRecords]:
    """Return the records of the configs with one file name: configs in several folders differ in their titles."""
    groups: dict[str, list[list[Record]]] = {}
    for values in sorted(path for path in folder.iterdir() if path.is_dir()):
        records = read_records(values)
        if records:
            groups.setdefault(records[-1].data.get("config", {}).get("title", ""), []).append(records)
    return [_chosen(name, found) for _, found in sorted(groups.items())]


def _chosen(name: str, groups: list[list[Record]]) -> ExperimentRecords:
    plain = [records for records in groups if not overrides_of(records)]
    overridden = sorted((records for records in groups if overrides_of(records)), key=_time)
    if not plain:
        return ExperimentRecords(name, overridden[-1], overridden[:-1])
    return ExperimentRecords(name, max(plain, key=lambda records: (_agrees(records), _time(records))), overridden)


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
    """Return the record of the bug zoo; empty if no such record exists.

    Raises:
        ValueError: If the record is of another version of this project.
    """
    path = root / "zoo.json"
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: the record is damaged ({error}): run `stopgrad zoo` again") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("programs"), list):
        raise ValueError(f"{path}: the record is damaged or of another version: run `stopgrad zoo` again")
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
    data = _read_data(folder)
    try:
        gradients = safetensors.numpy.load_file(folder / "gradients.safetensors")
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(folder, error) from None
    return Record(data["seed"], data, gradients)


def _read_data(folder: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from None
    if not isinstance(data, dict) or ("schema" in data and "seed" not in data):
        raise _damaged(folder, ValueError("it is no record"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{folder}: `schema` should be {SCHEMA}. Found {data.get('schema')!r}: run its config again.")
    return data


def _damaged(folder: Path, error: Exception) -> ValueError:
    return ValueError(f"{folder}: the record is damaged ({error}): run its config again with --force")


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
