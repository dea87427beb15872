"""The command line: ``stopgrad``, in a checkout also ``python -m experiments``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Small models on two OpenMP threads that spin-wait run up to ten times slower than on one. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import click

__all__ = ["main"]

RESULTS = click.option(
    "--results", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True,
    help="Folder of the records and the report.",
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stopgrad")
def main() -> None:
    """Run algorithms with and without their stop-gradients, and measure the difference."""


@main.command()
@click.argument("configs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value; may be repeated.")
@click.option("--force", is_flag=True, help="Run finished seeds again.")
@RESULTS
def run(configs: tuple[Path, ...], overrides: tuple[str, ...], force: bool, results: Path) -> None:
    """Train with the blocks in place and again with each named block open.

    CONFIGS are TOML files, or folders of them. Finished seeds are not run twice: an interrupted run resumes.
    """
    from toolkit.runner._config import ConfigError, load_config

    try:
        paths = list(_files(configs))
        loaded = [load_config(path, overrides) for path in paths]
    except ConfigError as error:
        _stop(str(error), 2)
    from toolkit.runner._comparison import RunError, run_config
    from toolkit.runner._progress import Progress

    begin = time.perf_counter()
    for config in loaded:
        with Progress(config.name, config.config) as progress:
            try:
                run_config(
                    config, results, force=force,
                    on_seed=progress.on_seed, on_step=progress.on_step, on_method=progress.on_method,
                )  # fmt: skip
            except RunError as error:
                _stop(str(error), 1)
    count = "1 config" if len(loaded) == 1 else f"{len(loaded)} configs"
    click.echo(f"{count} in {time.perf_counter() - begin:.0f} s; records in {results}/")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("docs/zoo"))
@RESULTS
def zoo(folder: Path, results: Path) -> None:
    """Audit the programs of the bug zoo, with and without their bugs, and record the results for the report.

    FOLDER holds the programs; docs/zoo by default.
    """
    from toolkit.runner._records import write_zoo
    from toolkit.runner._zoo import examine, read_programs

    try:
        examined = [examine(program) for program in read_programs(folder)]
    except ValueError as error:
        _stop(str(error), 2)
    for program in examined:
        click.echo(f"{program['name']}: {program['title']}")
        for complaint in program["buggy"]["complaints"]:
            click.echo(f"    {complaint}")
    write_zoo(results, examined)
    wrong = [f"{program['name']}: no bug was found" for program in examined if not program["buggy"]["complaints"]]
    wrong += [f"{program['name']}: blamed without its bug" for program in examined if program["fixed"]["complaints"]]
    if wrong:
        _stop("\n".join(wrong), 1)
    click.echo(f"{len(examined)} bugs found, {len(examined)} fixed programs pass; record in {results}/zoo.json")


@main.command()
@RESULTS
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="The page.  [RESULTS/index.html]")
def report(results: Path, output: Path | None) -> None:
    """Draw one self-contained page from the records. Needs no torch."""
    from toolkit.runner._records import read_all, read_zoo
    from toolkit.runner._report import write_report

    try:
        records, programs = read_all(results), read_zoo(results)
    except ValueError as error:
        _stop(str(error), 1)
    if not records and not programs:
        _stop(f"{results}: no records there; run a config first", 2)
    page = write_report(records, output or results / "index.html", programs)
    click.echo(f"report of {len(records)} configs: {page.resolve()}")


@main.command("list")
@click.option("--configs", type=click.Path(path_type=Path, file_okay=False), default=Path("configs"), show_default=True)
def list_command(configs: Path) -> None:
    """Show experiments, their blocks, and the available configs."""
    from toolkit.runner._listing import listing

    click.echo(listing(configs))


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    from toolkit.runner._config import ConfigError

    for path in paths:
        if not path.is_dir():
            yield path
            continue
        files = sorted(path.glob("*.toml"))
        if not files:
            raise ConfigError(f"{path}: no .toml files in this folder")
        yield from files


def _stop(message: str, code: int) -> None:
    for line in message.splitlines():
        click.echo(f"error: {line}", err=True)
    sys.exit(code)
