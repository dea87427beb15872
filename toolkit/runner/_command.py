"""The command line: ``stopgrad``, in a checkout also ``python -m experiments``."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# Small models on two OpenMP threads that spin-wait run up to ten times slower than on one. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import click

from toolkit.__main__ import NonemptyPath, audit
from toolkit.runner._discovery import BUNDLE, here_or_bundled

if TYPE_CHECKING:
    from toolkit.runner._config import LoadedConfig
    from toolkit.runner._units import Unit

__all__ = ["main"]

_DRAWN_EVERY = 10  # seconds between two drawings of pages, which read all records and nobody looks at more often

RESULTS = click.option(
    "--results", type=NonemptyPath(file_okay=False), default=Path("results"), show_default=True,
    help="Folder of the records and the report.",
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stopgrad")
def main() -> None:
    """Measure the effect of stop-gradients on gradients and on training.

    \b
    stopgrad audit train.py    # the stops of your own script
    stopgrad run em_iris       # train with a stop, and without it
    """  # noqa: D301 - the sign by which click leaves lines as they are


def _audit(words: tuple[str, ...], page_path: Path | None, **options: Any) -> None:
    assert audit.callback is not None
    file, _, function = words[0].rpartition(":") if words else ("", "", "")
    is_function = file and function.isidentifier() and not Path(words[0]).is_file()
    with _here_or_at_a_copy(Path(file)) if is_function else contextlib.nullcontext():
        audit.callback(words, page_path=page_path and page_path.resolve(), **options)


main.add_command(
    type(audit)(
        "audit",
        params=audit.params,
        help=audit.help,
        callback=_audit,
        short_help="Measure the effect of each stop of a program.",
    )
)


class _RunCommand(click.Command):
    """A command that knows the keys of a config, which are no options of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from toolkit.runner._config import ExperimentConfig

            key = error.option_name.lstrip("-").replace("-", "_")
            if key not in ExperimentConfig.model_fields:
                raise
            message = f"No such option {error.option_name!r}: keys of a config are set by --set {key}=VALUE."
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None


@main.command(cls=_RunCommand, short_help="Train with the blocks in place, and with each open.")
@click.argument("configs", nargs=-1, type=NonemptyPath())
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Give a key of the configs another value. May be repeated.",
)
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=A,B,...",
              help="Run once with each value of a key. May be repeated: all combinations run.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), metavar="N", show_default="the number of cores",
              help="Number of seeds that run side by side.")  # fmt: skip
@click.option("--ray", "cluster", metavar="ADDRESS",
              help="Run on this Ray cluster; `auto` is the cluster of this machine. Needs stopgrad[ray].")  # fmt: skip
@click.option("--force", is_flag=True, help="Run finished seeds again.")
@RESULTS
def run(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    jobs: int | None,
    cluster: str | None,
    force: bool,
    results: Path,
) -> None:
    """Train with the blocks in place, and again with each block open that the config names.

    \b
    stopgrad run em_iris --set steps=50 --set seeds=5
    stopgrad run configs/em_iris.toml --sweep learning_rate=0.01,0.1

    CONFIGS are TOML files, folders of them, or names of bundled configs, as `stopgrad list` shows them.  [default:
    configs]

    Finished seeds are not run again, so the same command continues an interrupted run.
    """  # noqa: D301 - the sign by which click leaves lines as they are
    from toolkit.runner._choice import chosen_configs
    from toolkit.runner._config import ConfigError

    try:
        chosen = chosen_configs(configs or (Path("configs"),), overrides, sweeps)
    except ConfigError as error:
        _stop(str(error), 2)
    _check_writable(results)
    if cluster is not None:
        _check_ray()
    _run(chosen, results, jobs=jobs or _cores(), cluster=cluster, force=force)


def _run(configs: Sequence[LoadedConfig], results: Path, **options: Any) -> None:
    from toolkit.runner._jobs import run_units
    from toolkit.runner._units import units_of

    begin = time.perf_counter()
    units = [unit for config in configs for unit in units_of(config)]
    pages = _Pages(units, results)
    try:
        errors = run_units(units, results, on_record=pages.on_record, **options)
    except ConnectionError as error:
        _stop(f"`--ray` should be the address of a running cluster. Found {options['cluster']!r}: {error}", 2)
    except KeyboardInterrupt:
        _stop(f"stopped; finished seeds are kept in {results}/, and the same command runs the others", 130)
    for line in _verdicts(configs, results):
        click.echo(line)
    kept = _with_records(units, results)
    passed = time.perf_counter() - begin
    click.echo(
        f"{_count(configs, 'config')} in {passed:.0f} s; records of {kept} of {_count(units, 'seed')} in {results}/"
    )
    drawn = kept > 0 and pages.draw()
    if drawn:
        click.echo(f"page: {(results / 'index.html').resolve()}")
    if errors:
        _stop("\n".join(errors), 1)
    if not drawn:
        sys.exit(1)
    command = ["stopgrad", "report", *([] if results == Path("results") else ["--results", str(results)])]
    click.echo(f"next: {shlex.join([*command, '--single', 'report.html'])}, for one file to send")


class _Pages:
    """Draws the pages while units run: after the first record, and then of configs that have all their seeds."""

    def __init__(self, units: Sequence[Unit], results: Path) -> None:
        self._units, self._results = units, results
        self._left = Counter(unit.label for unit in units)
        self._complete: set[str] = set()
        self._next = -math.inf

    def on_record(self, unit: Unit) -> None:
        """Count a record, and draw the pages of complete configs if the last drawing is some time ago."""
        self._left[unit.label] -= 1
        if not self._left[unit.label]:
            self._complete.add(unit.path.stem)
        first = self._next == -math.inf
        if (self._complete or first) and time.monotonic() >= self._next and self._write(self._complete):
            self._complete.clear()
            self._next = time.monotonic() + _DRAWN_EVERY

    def draw(self) -> bool:
        """Draw the pages of all configs, with all times; return whether that was possible."""
        return self._write({unit.path.stem for unit in self._units})

    def _write(self, names: Collection[str]) -> bool:
        from toolkit.runner._site import write_site

        try:
            write_site(self._results, names)
        except OSError as error:
            click.echo(f"the page is not drawn: {error}", err=True)
            return False
        return True


def _with_records(units: Sequence[Unit], results: Path) -> int:
    """Return the number of units that have records."""
    from toolkit.runner._records import is_finished

    return sum(is_finished(unit.folder(results), unit.seed) for unit in units)


def _verdicts(configs: Sequence[LoadedConfig], results: Path) -> Iterator[str]:
    """Yield the verdict on each config that has records, and the claims that they contradict."""
    from toolkit.runner._comparison import folder_of
    from toolkit.runner._findings import broken_claims, doubts, verdicts
    from toolkit.runner._records import overrides_of, read_records

    for config in configs:
        records = read_records(folder_of(config, results))
        if records:
            yield from (f"{config.label}: {line}" for line in verdicts(records))
            claims = [] if overrides_of(records) else broken_claims(records)
            yield from (f"{config.label}: doubtful: {doubt}" for doubt in doubts(records))
            yield from (f"{config.label}: the records contradict the config: {claim}" for claim in claims)


@main.command(short_help="Audit the programs of the bug zoo.")
@click.argument("folder", type=NonemptyPath(), default=Path("docs/zoo"))
@RESULTS
def zoo(folder: Path, results: Path) -> None:
    """Audit each program of the bug zoo with its bug and without it, and draw the page of the zoo.

    FOLDER holds the programs, published ones with a wrong stop.  [default: docs/zoo]

    `stopgrad audit docs/zoo/forgotten_block.py:buggy` audits one of them.
    """
    from toolkit.runner._records import write_zoo
    from toolkit.runner._site import write_site
    from toolkit.runner._zoo import examine, read_programs

    _check_writable(results)
    try:
        with _here_or_at_a_copy(folder):
            examined = [examine(program) for program in read_programs(folder)]
    except ValueError as error:
        _stop(str(error), 2)
    for program in examined:
        click.echo(f"{program['name']}: {program['title']}")
        for complaint in program["buggy"]["complaints"]:
            click.echo(f"    {complaint}")
    try:
        write_zoo(results, examined)
        write_site(results, ())
    except OSError as error:
        _stop(f"{results}: the record and the page cannot be written: {error.strerror}", 1)
    wrong = [f"{program['name']}: no bug was found" for program in examined if not program["buggy"]["complaints"]]
    wrong += [
        f"{program['name']}: a bug was found in `fixed()`" for program in examined if program["fixed"]["complaints"]
    ]
    if wrong:
        _stop("\n".join(wrong), 1)
    click.echo(f"{len(examined)} bugs found, {len(examined)} fixed programs pass; record in {results}/zoo.json")


@main.command(short_help="Draw the report from the records.")
@RESULTS
@click.option("--single", type=NonemptyPath(dir_okay=False), help="Write the whole report into this one file.")
def report(results: Path, single: Path | None) -> None:
    """Draw the report from the records: index.html in the folder of the results, and a page for each experiment.

    `stopgrad report --single report.html` writes one file, to send to others. No report needs torch.

    Damaged records are left out, and named at the end and on the page of their experiment; the exit code is then 1.
    """
    from toolkit.runner._records import damaged_records, read_all, read_zoo
    from toolkit.runner._site import write_single, write_site

    try:
        records, programs, damaged = read_all(results), read_zoo(results), []
        if results.exists():
            damaged = damaged_records(results)
    except OSError as error:
        _stop(f"{error.filename}: cannot be read: {error.strerror}", 2)
    if not records and not programs:
        _stop(
            "\n".join(damaged)
            or f"`--results` should be a folder with records. Found none in {results}: `stopgrad run` writes them",
            2,
        )
    try:
        page = write_single(records, single, programs) if single else write_site(results)
    except OSError as error:
        elsewhere = "" if single else "; `--single FILE` writes to another place"
        _stop(f"{single or results}: the report cannot be written: {error.strerror}{elsewhere}", 1)
    click.echo(f"report of {_count(records, 'config')}: {page.resolve()}")
    if damaged:
        _stop("\n".join(damaged), 1)


@main.command("list", short_help="List experiments, blocks, configs and keys.")
@click.argument("experiment", required=False)
@click.option("--configs", type=NonemptyPath(file_okay=False), default=Path("configs"), show_default=True,
              help="Folder of the configs.")  # fmt: skip
def list_command(experiment: str | None, configs: Path) -> None:
    """List the experiments, the blocks with their reasons, and the configs.

    With the name of an EXPERIMENT, list the keys of its configs instead, with types and defaults: `stopgrad list em`.
    """
    from toolkit.runner._config import ConfigError
    from toolkit.runner._listing import keys_of, listing

    folder = here_or_bundled(configs)
    if not folder.is_dir():
        _stop(f"`--configs` should be a folder. Found none at {configs}: check the path", 2)
    try:
        click.echo(listing(folder) if experiment is None else keys_of(experiment, folder))
    except (ValueError, ConfigError) as error:
        _stop(str(error), 2)


@main.command(short_help="Lay out a project of your own.")
@click.argument("folder", type=NonemptyPath(file_okay=False))
def init(folder: Path) -> None:
    """Lay out a project of your own in FOLDER: one experiment, one config, one test, with comments.

    After `stopgrad init my_project`, edit these files, and start `stopgrad run configs` in the folder. The test needs
    pytest, which is not installed with this package: `pip install pytest`.
    """
    source = BUNDLE / "docs" / "project"
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.suffix in (".py", ".toml")]
    taken = [folder / file for file in files if (folder / file).exists()]
    if taken:
        _stop(f"FOLDER should be new. Found {taken[0]}: choose another folder", 2)
    try:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file, folder / file)
    except OSError as error:
        _stop(f"{folder}: {error.strerror}", 1)
    for file in files:
        click.echo(folder / file)
    enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}, then: "
    click.echo(f"next: {enter}stopgrad run configs")
    click.echo("test: python -m pytest (which needs: pip install pytest)")


@contextlib.contextmanager
def _here_or_at_a_copy(path: Path) -> Iterator[None]:
    """Enter a folder in which a bundled path exists, if it does not exist here.

    The folder holds a copy: inside of the installed library, programs would count as code of the library.
    """
    bundled = here_or_bundled(path)
    if bundled == path:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        source = bundled if bundled.is_dir() else bundled.parent
        shutil.copytree(source, Path(folder) / source.relative_to(BUNDLE))
        with contextlib.chdir(folder):
            yield


def _check_writable(results: Path) -> None:
    """Stop if no records can be written: better before the training than after it."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        _stop(
            f"`--results` should be a folder that can be written to. Found {results} ({error.strerror}): name another.",
            2,
        )


def _check_ray() -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        _stop("`--ray` needs the package ray: pip install 'stopgrad[ray]'", 2)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def _stop(message: str, code: int) -> NoReturn:
    for line in message.splitlines():
        click.echo(f"error: {line}", err=True)
    sys.exit(code)
