"""The command line: ``python -m toolkit audit path/to/file.py:make_loss``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Small models on two OpenMP threads that spin-wait run up to ten times slower than on one. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import click

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stopgrad")
def main() -> None:
    """Ask a program about its stop-gradients."""


@main.command()
@click.argument("program", metavar="FILE:FUNCTION")
@click.option("--json", "as_json", is_flag=True, help="Print plain JSON.")
@click.option("--page", "page_path", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page.")
def audit(program: str, as_json: bool, page_path: Path | None) -> None:
    """Find the places that stop a gradient in a program, and the effect of each.

    FUNCTION is called without arguments. It returns the loss, a function that runs the program and returns a scalar
    tensor; or the loss and the parameters to differentiate by: a module, a dict, or a list of tensors.

    Ends with 0; with 1 if the audit is not valid, and with 2 if there is nothing to audit.
    """
    path, _, name = program.rpartition(":")
    file = Path(path)
    if not path or not name:
        _stop(f"The program should be FILE:FUNCTION. Found {program!r}.")
    if not file.is_file():
        _stop(f"The program should be in a file. Found none at {path}.")
    with contextlib.redirect_stdout(sys.stderr):  # the program's own output is no part of the answer
        loss, params = _loss_of(_imported(file), name, path)
        from toolkit.gradients.audit import audit as audited

        found = _asked(f"{path}:{name}", lambda: audited(loss, params))
        if page_path is not None:
            from toolkit.gradients.audit.page import page

            command = shlex.join(["python", "-m", "toolkit", *sys.argv[1:]])
            text = page(found, program, command)
            try:
                page_path.write_text(text, "utf-8")
            except OSError as error:
                _stop(f"The page should be written to {page_path}. Found: {error.strerror}.")
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if page_path is not None:
        click.echo(f"page: {page_path}", err=True)
    sys.exit(0 if found.valid else 1)


def _imported(file: Path) -> Any:
    """Import a file under a name of its own, with its folder on the path, as if it was started there."""
    taken = not file.stem.isidentifier() or importlib.util.find_spec(file.stem) is not None
    name = f"audited_{file.stem}" if taken else file.stem
    sys.path.insert(0, str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        _stop(f"The program should be a Python file. Found {file}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    _asked(str(file), lambda: loader.exec_module(module))
    return module


def _loss_of(module: Any, name: str, path: str) -> tuple[Callable[[], Any], Any]:
    make = getattr(module, name, None)
    if not callable(make):
        found = "none" if make is None else type(make).__name__
        _stop(f"{path} should have a function {name!r}. Found {found}.")
    made = _asked(f"{path}:{name}", make)
    loss, params = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(loss) or isinstance(loss, type):
        _stop(f"{path}:{name} should return a loss function, or a loss function and parameters. Found {_kind(made)}.")
    return loss, params


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return type(value).__name__


def _asked(what: str, function: Callable[[], Any]) -> Any:
    """Call into the program; its errors are one line, with the place in its own files."""
    try:
        return function()
    except Exception as error:
        here = str(Path(__file__).parent)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(here)]
        at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        _stop(f"{what} should run. Found {type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]}{at}")


def _stop(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main(prog_name="python -m toolkit")
