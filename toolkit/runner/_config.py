"""The format of config files, with one clear line for each mistake.

This module does not import torch; an experiment's own `Config`, which does, is imported only when a config names it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from toolkit.runner._discovery import experiment_folders, import_experiment
from toolkit.runner._records import variant_name

__all__ = ["ConfigError", "ExperimentConfig", "LoadedConfig", "load_config", "load_experiment"]

_MISPLACED = "should stand above the first [table]; below it, a key is part of that table"

BlockSet = str | list[str]


def _in_order(ends: list[float]) -> list[float]:
    if ends[0] > ends[1]:
        raise ValueError("should be [low, high]")
    return ends


Interval = Annotated[
    list[Annotated[float, Field(allow_inf_nan=False)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_in_order),
]


class Claim(BaseModel):
    """The numbers that a config expects of its records with some blocks open. The report and a test check them.

    Attributes:
        verdict: The kind of the verdict, the same in every seed: ``"partial"``, ``"redundant"``, ...
        training: Effect of the block on the final objective, by the report's rule.
        gain: Ends of an interval for the typical improvement by the block, in the units of the objective.
        angle: Ends of an interval for the angle between both first gradients, in degrees; the median of the seeds.
        ratio: Ends of an interval for the length of the open gradient over that of the blocked one; the median of the
            seeds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    verdict: Literal["no-op", "redundant", "noise", "partial", "cuts", "makes"] | None = None
    training: Literal["better", "worse", "same", "undecided", "broke off"] | None = None
    gain: Interval | None = None
    angle: Interval | None = None
    ratio: Interval | None = None


def _device_name(name: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError("should be cpu, cuda, or cuda:N with a number N")
    return name


class ExperimentConfig(BaseModel):
    """Values common to all experiments. An experiment's own `Config` adds its fields.

    Attributes:
        experiment: The module in `experiments/`, beside the config or of this project, that runs it.
        title: One line for the report.
        finding: The block's effect on training, in words for a reader who does not know stop-gradients.
        open: The variants that are compared with the blocked run: each is a block, or a list of blocks that are
            opened together.
        seeds: Number of seeds; they are 0, 1, 2, ...
        steps: Training steps of each run.
        evaluate_every: Steps between two evaluations of the metrics. The first and last step are always evaluated.
        expect: Variant -> the numbers that the finding claims, as tables ``[expect."em.responsibilities"]``. A claim
            on the training needs at least five seeds.
        references: Source -> published value of the objective, which the report draws as a line.
        seconds: Rough time of a seed. Seeds without records run in the order of this time, the longest first.
        learning_rate: Step size of the optimiser.
        dtype: Floating-point type of data and parameters.
        device: The torch device of the run.
        threads: Threads for torch. Small models are fastest with one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    experiment: str
    title: Annotated[str, Field(min_length=1)]
    finding: Annotated[str, Field(min_length=1)]
    open: Annotated[list[BlockSet], Field(min_length=1)]
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    expect: dict[str, Claim] = {}
    references: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    steps: Annotated[int, Field(ge=1)]
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    dtype: Literal["float32", "float64"] = "float64"
    device: Annotated[str, AfterValidator(_device_name)] = "cpu"
    threads: Annotated[int, Field(ge=1, le=256)] = 1

    @property
    def variants(self) -> list[frozenset[str]]:
        """The sets of open blocks, the blocked run (the empty set) first."""
        return [frozenset(), *(frozenset([entry] if isinstance(entry, str) else entry) for entry in self.open)]

    def resolved(self) -> dict[str, Any]:
        """Return every value, defaults included, as plain JSON."""
        return self.model_dump(mode="json")


class ConfigError(Exception):
    """A config that cannot be run; its text has one line for each mistake, ready to be shown."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config file, read and checked.

    Attributes:
        name: The file's name without its ending: the folder of its results.
        label: The name and the swept values, for the reader.
        path: The file.
        source: Its text.
        overrides: The ``key=value`` of the command line.
        config: The values.
        module: The experiment.
    """

    name: str
    label: str
    path: Path
    source: str
    overrides: tuple[str, ...]
    config: ExperimentConfig
    module: ModuleType


def load_config(path: Path, overrides: Iterable[str] = (), swept: Iterable[str] = ()) -> LoadedConfig:
    """Read a config file, apply overrides, and check every value.

    Args:
        path: A TOML file.
        overrides: ``key=value`` each; the value is read as TOML, or as a string if it is not valid TOML.
        swept: The same, of `--sweep`.

    Raises:
        ConfigError: If the config has a mistake; the text names file, line and key, and suggests the nearest valid
            name.
    """
    source = _read(path)
    try:
        values = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        message, _, at = str(error).partition(" (at line ")
        line = f":{at.partition(',')[0]}" if at else ""
        raise ConfigError(f"{path}{line}: not valid TOML: {message[0].lower()}{message[1:]}") from None
    where = _Places(path, source)
    overrides, swept = tuple(overrides), tuple(swept)
    for option, override in (*(("--set", text) for text in overrides), *(("--sweep", text) for text in swept)):
        values.update(where.override(option, override))
    known = experiment_folders(path)
    if "experiment" not in values:
        for name, table in values.items():
            tables = (table, *table.values()) if isinstance(table, dict) else ()
            if any(isinstance(part, dict) and "experiment" in part for part in tables):
                raise ConfigError(f"{where(name, 'experiment')}: {_MISPLACED}")
        raise ConfigError(f"{path}: experiment: missing; should be one of {', '.join(known)}")
    name = values["experiment"]
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{where('experiment')}: unknown experiment {name!r}{_suggest(name, known)}")
    module = load_experiment(name, known[name])
    config_class: type[ExperimentConfig] = module.Config
    try:
        config = config_class.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_mistakes(error.errors(), where, config_class))) from None
    _check_blocks(config, where)
    _check_claims(config, where)
    _check_device(config, where)
    label = " ".join((path.stem, *swept))
    return LoadedConfig(path.stem, label, path, source, (*overrides, *swept), config, module)


def load_experiment(name: str, folder: Path) -> ModuleType:
    """Import an experiment, and check that it has a `Config` and a `run`.

    Raises:
        ConfigError: If it cannot be imported, or lacks `Config` or `run`.
    """
    file = folder / f"{name}.py"
    try:
        module = import_experiment(name, folder)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), repr(error))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines, reason = [error.lineno], error.msg
        at = f"{file}:{lines[-1]}" if lines else str(file)
        raise ConfigError(f"{at}: {type(error).__name__}: {reason}") from error
    config, run = (getattr(module, part, None) for part in ("Config", "run"))
    if not (isinstance(config, type) and issubclass(config, ExperimentConfig)):
        raise ConfigError(f"{file}: `Config` should be a class derived from ExperimentConfig. Found {config!r}.")
    if not callable(run):
        raise ConfigError(f"{file}: `run` should be a function of a config and a seed. Found {run!r}.")
    return module


@dataclass
class _Places:
    """The place where each key was set: a line of the file, or an option of the command line."""

    path: Path
    source: str

    def __post_init__(self) -> None:
        self.overridden: dict[str, str] = {}

    def override(self, option: str, text: str) -> dict[str, Any]:
        """Return the key and the value of an option, and remember where the key was set."""
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not key:
            raise ConfigError(f"{option} {text}: should be key=value")
        if key in self.overridden:
            raise ConfigError(f"{option} {text}: `{key}` should be set once. Found {self.overridden[key]} before it.")
        self.overridden[key] = f"{option} {text}"
        return {key: _toml_value(value)}

    def __call__(self, *location: str | int) -> str:
        """Return the place of a key, or of one in a table of an array: ``("methods", 1, "name")``, the second table."""
        key, name = location[0], ".".join(part for part in location if isinstance(part, str))
        if key in self.overridden:
            return self.overridden[str(key)] + (f": {name}" if len(location) > 1 else "")
        first = 0
        for depth, part in enumerate(location):
            line = self._table(str(key), part) if depth == 1 else None
            if line is None and isinstance(part, str):
                line = self._line(first, part)
            if line is None:
                break
            first = line
        return f"{self.path}:{first}: {name}" if first else f"{self.path}: {name}"

    def _line(self, after: int, key: str) -> int | None:
        """Return the number of the first line after line `after` that sets a key, in the same table if there is one."""
        for number, line in enumerate(self.source.splitlines()[after:], after + 1):
            if re.match(rf"\s*{re.escape(key)}\s*=", line):
                return number
            if after and line.lstrip().startswith("["):
                break
        return None if after else 0

    def _table(self, key: str, part: str | int) -> int | None:
        """Return the number of the line at which a table begins, given its name or its index in an array of tables."""
        head = rf"\[\[\s*{re.escape(key)}\s*\]\]"
        if isinstance(part, str):
            head = rf"""\[\s*{re.escape(key)}\s*\.\s*["']?{re.escape(part)}["']?\s*\]"""
        heads = [number for number, line in enumerate(self.source.splitlines(), 1) if re.match(rf"\s*{head}", line)]
        index = part if isinstance(part, int) else 0
        return heads[index] if index < len(heads) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _mistakes(errors: Iterable[ErrorDetails], where: _Places, config_class: type[ExperimentConfig]) -> list[str]:
    """Return a line for each mistake; a key that is misspelt or stands below another table is not missing too."""
    below = {
        str(error["loc"][-1]): error["loc"]
        for error in errors
        if error["type"] == "extra_forbidden"
        and len(error["loc"]) > 1
        and error["loc"][-1] in config_class.model_fields
    }
    misspelt = set()
    for error in errors:
        if error["type"] == "extra_forbidden":
            (*table, key), keys = _location(config_class, error["loc"])
            misspelt |= {(*table, close) for close in _closest(key, keys)}
    kept = [
        error
        for error in errors
        if not error["loc"]
        or (error["loc"][-1] not in below and (error["type"] != "missing" or error["loc"] not in misspelt))
    ]
    lines = [_sentence(error, where, config_class) for error in kept]
    if below:
        place = where(*next(iter(below.values()))).partition(": ")[0]
        lines.append(f"{place}: {', '.join(below)}: {_MISPLACED}")
    return list(dict.fromkeys(lines))


def _sentence(details: ErrorDetails, where: _Places, config_class: type[ExperimentConfig]) -> str:
    location, keys = _location(config_class, details["loc"])
    place, found = where(*location), details["input"]
    if details["type"] == "extra_forbidden":
        if location[0] == "expect" and isinstance(found, dict):
            table = ".".join(map(str, location[1:]))
            return f'{place}: unknown key; a name with a dot needs quotes: [expect."{table}"]'
        return f"{place}: unknown key{_suggest(location[-1], keys)}"
    if details["type"] == "missing":
        # A key that is not there has no line, but its table has.
        return f"{place}: missing" if len(location) > 1 else f"{where.path}: {location[0]}: missing"
    message = details["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(\w+)( should have .*?) after validation, not \d+$", r"\1\2", message)
    message = (message[0].lower() + message[1:]).removeprefix("input ")
    # A whole table is more than a line, and a message of an experiment may say itself which value it found.
    if isinstance(found, dict) or re.search(r"\b[Ff]ound\b", message):
        return f"{place}: {message}"
    allowed = (details.get("ctx") or {}).get("expected", "")
    hint = _suggest(found, re.findall(r"'([^']*)'", allowed)) if isinstance(found, str) and allowed else ""
    return f"{place}: {message}, found {found!r}{hint}"


def _location(model: Any, parts: Iterable[str | int]) -> tuple[list[str | int], Collection[str]]:
    """Return the place of a mistake in the tables of a config, and the valid keys of the innermost table.

    The place ends at a key's value. The position inside a value, the third item of a list for example, is left out.
    """
    location: list[str | int] = []
    keys: Collection[str] = list(model.model_fields)
    for part in parts:
        location.append(part)
        if _is_table(model):
            keys = list(model.model_fields)
            if part not in keys:
                break
            model = model.model_fields[part].annotation
            if not _is_table((None, *get_args(model))[-1]):
                break
        else:  # a list or a dict of tables
            model = get_args(model)[-1]
    return location or ["config"], keys


def _is_table(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, BaseModel)


def _check_device(config: ExperimentConfig, where: _Places) -> None:
    import torch

    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if config.device not in ("cpu", *devices, *["cuda"][: len(devices)]):
        found = f"one of cpu, {', '.join(devices)}" if devices else "cpu, as torch finds no CUDA device here"
        raise ConfigError(f"{where('device')}: `device` should be {found}. Found {config.device!r}.")


def _check_blocks(config: ExperimentConfig, where: _Places) -> None:
    from toolkit import declared_blocks

    known = declared_blocks()
    for name in dict.fromkeys(name for variant in config.variants for name in sorted(variant)):
        if name not in known:
            hint = _suggest(name, known) or f"; a module declares it outside of `run`: block({name!r}, why)"
            raise ConfigError(f"{where('open')}: unknown block {name!r}{hint}")
    if len(set(config.variants)) < len(config.variants):
        raise ConfigError(f"{where('open')}: the same blocks are opened twice, found {config.open!r}")


def _check_claims(config: ExperimentConfig, where: _Places) -> None:
    for name in config.references:
        if name in type(config).model_fields:
            raise ConfigError(f"{where('references', name)}: {_MISPLACED}")
    variants = [variant_name(variant) for variant in config.variants[1:]]
    for name in config.expect:
        if name not in variants and "open" not in where.overridden:
            raise ConfigError(f"{where('expect', name)}: unknown variant {name!r}{_suggest(name, variants)}")


def _closest(found: object, known: Collection[str] | Mapping[str, Any]) -> list[str]:
    """Return the known name that is most like another, if one is alike."""
    return difflib.get_close_matches(str(found), list(known), n=1, cutoff=0.5)


def _suggest(found: object, known: Collection[str] | Mapping[str, Any]) -> str:
    if close := _closest(found, known):
        return f"; did you mean {close[0]!r}?"
    return f"; should be one of {', '.join(sorted(known))}" if 0 < len(known) <= 12 else ""
