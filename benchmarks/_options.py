"""The command line of the benchmarks. It imports no benchmark and no torch: help comes at once."""

from __future__ import annotations

import argparse
import ast
import pkgutil
from pathlib import Path

import benchmarks


def names() -> dict[str, bool]:
    """Return name -> whether the benchmark runs only on request."""
    found = [info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("_")]
    return {name: "\nON_REQUEST = True\n" in _source(name) for name in found}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; help and mistakes end the program."""
    found = names()
    lines = [f"  {name:22}{_first_line(name)}{' (*)' if long else ''}" for name, long in found.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Print a table of ratios, this project beside its peers: below 1 is better.",
        epilog="\n".join(["benchmarks:", *lines, "", "(*) takes long, and runs only if it is named"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the benchmarks to run; all without (*) by default")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    fuzz = parser.add_argument_group("options of fuzz")
    fuzz.add_argument("--programs", type=int, default=2000, help="number of random programs (default: 2000)")
    fuzz.add_argument("--seed", type=int, default=0, help="seed of the first program (default: 0)")
    fuzz.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument_group("options of atlas").add_argument("--package", help="the name in the package index")
    chosen = parser.parse_intermixed_args(arguments)
    for name in chosen.names:
        if name not in found:
            parser.error(f"NAME should be one of {', '.join(found)}. Found {name!r}.")
    return chosen


def _source(name: str) -> str:
    (folder,) = benchmarks.__path__
    module = Path(folder, f"{name}.py")
    return (module if module.exists() else module.with_suffix("") / "__init__.py").read_text("utf-8")


def _first_line(name: str) -> str:
    return (ast.get_docstring(ast.parse(_source(name))) or "").partition("\n")[0]
