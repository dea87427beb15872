"""The command line: ``python -m toolkit audit path/to/file.py:make_loss``."""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# Small models on two OpenMP threads that spin-wait run up to ten times slower than on one. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import click

__all__ = ["NonemptyPath", "main"]

# The name of the table of expected stops.
_TABLE = "stop"

_COUNT = click.IntRange(1)

# The exit status of a program that Ctrl-C has ended, as a shell has it.
_INTERRUPTED = 130


class NonemptyPath(click.Path):
    """A path of the command line, as `pathlib.Path`. An empty one, which would be the current folder, is refused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail if it is empty."""
        if not os.fspath(value):
            self.fail(
                "the path is empty: " + ("`.` is the current folder." if self.dir_okay else "name a file."), param, ctx
            )
        return super().convert(value, param, ctx)


class _WithArguments(click.Command):
    """A command that says where the arguments of the program stand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            told = f"{error.format_message()} The arguments of the program stand after `--`."
            raise click.UsageError(told, ctx) from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stopgrad")
def main() -> None:
    """Ask a program about its stop-gradients: `python -m toolkit audit train.py`."""


@dataclass(frozen=True)
class _Options:
    """The options of `stopgrad audit`."""

    module: str | None
    step: int
    backward: int | None
    all_passes: bool
    continues: bool
    verify: bool
    rerun: bool
    memory: float | None
    form: str
    expect: Path | None
    update: bool
    page_path: Path | None
    witness: Path | None
    opened: str | None


@main.command(cls=_WithArguments)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [-- ARGUMENTS]")
@click.option("-m", "module", metavar="MODULE", help="Audit a module, as `python -m MODULE` runs it.")
@click.option("--step", type=_COUNT, metavar="N", default=1, show_default=True, help="Training step to audit.")
@click.option("--backward", type=_COUNT, metavar="N", show_default="1", help="Backward pass of this step to audit.")
@click.option("--all", "all_passes", is_flag=True, help="Audit all backward passes of this step.")
@click.option("--continue", "continues", is_flag=True, help="Let the script run to its end after the answer.")
@click.option("--verify", is_flag=True, help="Compare with a run without recording, bit for bit.")
@click.option("--rerun", is_flag=True, help="Run again for each stop that the record cannot open.")
@click.option(
    "--memory",
    type=click.FloatRange(0),
    metavar="MB",
    show_default="half of the free memory",
    help="Memory that the record of a `no_grad` may take.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    show_default=True,
    help="Form of the answer; github: text with annotations.",
)
@click.option("--json", "form", flag_value="json", help="The same as `--format json`.")
@click.option(
    "--expect",
    type=NonemptyPath(dir_okay=False, resolve_path=True),
    metavar="FILE.toml",
    help="Compare the stops with the table in this file.",
)
@click.option("--update", is_flag=True, help="Write this table from the stops found.")
@click.option("--page", "page_path", type=NonemptyPath(dir_okay=False), help="Write the answer as an HTML page, too.")
@click.option("--witness", type=NonemptyPath(), hidden=True)
@click.option("--opened", help="Arguments of `OpenedRun`, as JSON.", hidden=True)
def audit(words: tuple[str, ...], **options: Any) -> None:
    """Find the stop-gradients of a program (`detach`, `no_grad`, ...), and measure the effect of each.

    \b
    stopgrad audit train.py --step 10 -- --lr 0.1   # a script, with its arguments
    stopgrad audit model.py:make_loss               # a loss function

    A script runs as it is. The command records one training step, opens (removes) each stop of one of its backward
    passes, and ends the script. The function of FILE:FUNCTION takes no arguments and returns the loss: another function
    without arguments, which returns a scalar tensor. Or it returns a pair: the loss, and the parameters (a module, a
    dict, or a list of tensors).

    The answer goes to stdout, the output of the program to stderr. The leak is the norm of the part of the gradient
    that flows through the opened stop; ratio and cosine compare the gradient without the stop to the gradient with it.
    Each stop is opened alone. The verdict is its effect:

    \b
    no-op               no gradient reaches the stop ("carry nothing")
    redundant           the gradient changes by rounding at most
    below the noise     the effect cannot be told from rounding
    partial             load-bearing: the gradient changes
    cuts all paths      load-bearing: no gradient of these parameters with it
    makes the gradient  load-bearing: no gradient of these without it

    The exit code is that of the program, 1 if an answer is not valid or not as expected, 2 without an answer.
    """  # noqa: D301 - the sign by which click leaves lines as they are
    asked = _Options(**options)
    if not (words[0] if asked.module is None and words else asked.module):
        _stop("PROGRAM should be a script, FILE:FUNCTION, or -m MODULE. Found none: `stopgrad audit train.py`.")
    if asked.backward is not None and asked.all_passes:
        _stop("`--backward` should not stand beside `--all`. Found both: leave one out.")
    if asked.update and asked.expect is None:
        _stop("`--update` should stand beside `--expect`. Found it alone: add `--expect FILE.toml`.")
    expected = [] if asked.expect is None or asked.update else _expected(asked.expect)
    command = shlex.join(["stopgrad", *sys.argv[1:]])  # the program has other words
    program = words[0] if asked.module is None else asked.module
    answers, verified, code = _answers(program, words, asked)
    named = {f"step {asked.step}, backward pass {n}" if n else "": answer for n, answer in answers.items()}
    pages = [] if asked.page_path is None else _write_pages(asked.page_path, named, program, command)
    is_valid = all(answer.valid for answer in answers.values()) and not verified.startswith("NOT")
    _print(named, verified, asked.form)
    if asked.form == "github":
        _annotate([answer for answer in answers.values() if asked.expect is None or not answer.valid])
    is_expected = True
    if asked.expect is not None and is_valid:
        known = None if asked.update else [stop for stop in expected if asked.all_passes or stop.backward in answers]
        is_expected = _holds(asked.expect, known, answers, asked.form, command)
    for page in pages:
        click.echo(f"page: {page}", err=True)
    sys.exit(code if is_valid and is_expected else 1)


def _answers(program: str, words: tuple[str, ...], asked: _Options) -> tuple[dict[int, Any], str, int]:
    """Return backward pass -> answer, a sentence about the second run, and the exit status of the program."""
    file, _, function = program.rpartition(":")
    if asked.module is None and file and function.isidentifier() and not Path(program).is_file():
        if asked.rerun:
            _stop("`--rerun` should stand beside a script. Found a function, which runs again without it.")
        return {0: _answer_of_function(file, function, words[1:])}, "", 0
    from toolkit.gradients.audit.scripts import Question, Script

    if asked.module is None and not Path(program).is_file():
        _stop(f"PROGRAM should be a file. Found none at {program}: check the path, or audit a module by -m.")
    if asked.module is not None:  # its package alone, as a search for the module would run the package
        package = asked.module.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            _stop(f"MODULE should be found from here. Found no {package}: check the name, or run in its parent folder.")
    script = Script(program, asked.module is not None, words[1:] if asked.module is None else words)
    question = Question(asked.step, None if asked.all_passes else asked.backward or 1, asked.continues)
    if asked.witness is not None:
        _bear_witness(script, question, asked.witness, asked.opened)
    return _answers_of_script(script, question, asked)


def _print(answers: dict[str, Any], verified: str, form: str) -> None:
    if form == "json":
        found = [
            {"backward": name, **answer.to_dict()} if name else answer.to_dict() for name, answer in answers.items()
        ]
        click.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
    else:
        click.echo("\n\n".join(_text(name, answer) for name, answer in answers.items()))
    if verified:
        click.echo(verified, err=form == "json")


def _expected(path: Path) -> list[Any]:
    """Return the stops of a table."""
    from toolkit.gradients.audit.expectations import read_tables

    if not path.is_file():
        _stop(f"`--expect` should be a file with a table of stops. Found none at {path}: `--update` writes it.")
    try:
        tables = read_tables(path)
    except ValueError as error:
        _stop(str(error))
    if tables.keys() - {_TABLE}:
        _stop(f"`{path.name}` should have stops under [[{_TABLE}]] alone. Found {sorted(tables)}.")
    return tables.get(_TABLE, [])


def _holds(path: Path, expected: list[Any] | None, answers: dict[int, Any], form: str, command: str) -> bool:
    """Print each difference from the expected stops, and return whether there is none; None writes the table."""
    from toolkit.gradients.audit.annotations import error_of
    from toolkit.gradients.audit.expectations import differences, stops_of, write_tables

    found = [stop for backward, answer in answers.items() for stop in stops_of(answer, path.parent, backward)]
    if expected is None:
        write_tables(path, {_TABLE: found}, command)
        plural = "" if len(found) == 1 else "s"
        click.echo(f"expectations: {len(found)} stop{plural} in {path}", err=True)
        return True
    told = differences(expected, found)
    for difference in told:
        line = error_of(difference, path.parent) if form == "github" else f"NOT as expected: {difference}"
        click.echo(line, err=form == "json")
    return not told


def _annotate(answers: list[Any]) -> None:
    from toolkit.gradients.audit.annotations import notices_of

    for answer in answers:
        for line in notices_of(answer):
            click.echo(line)


def _text(name: str, answer: Any) -> str:
    """Return an answer as text; places of a script that carry nothing are counted alone."""
    return f"{name}\n{answer.text(silent=False)}" if name else str(answer)


def _answer_of_function(path: str, name: str, arguments: Sequence[str]) -> Any:
    file = Path(path)
    if not file.is_file():
        _stop(f"PROGRAM should be a file. Found none at {path}: check the path, or audit a module by -m.")
    with _output_aside(), _started_with([path, *arguments]):
        loss, params = _loss_of(_imported(file), name, path)
        from toolkit.gradients.audit import audit as audited

        return _asked(f"{path}:{name}", lambda: audited(loss, params))


def _answers_of_script(script: Any, question: Any, asked: _Options) -> tuple[dict[int, Any], str, int]:
    from toolkit.gradients.audit.scripts import RecordedRun

    run = RecordedRun(question, digests=asked.verify, memory=asked.memory)
    try:
        code = _run(run, script)
        if not run.audits:
            come = f"The script should come to {question}. Found its end after {run.progress}."
            sys.exit(code) if code else _stop(come)
        verified = _verified(run) if asked.verify else ""
        _rerun(run) if asked.rerun else _advise(run)
    finally:
        run.lessons.input.forget()
    return run.audits, verified, code


def _run(run: Any, script: Any) -> int:
    """Run a script; return its exit status, after the traceback of an error. Paths are as before it ran."""
    from toolkit.gradients.audit.scripts import Again, Refused

    try:
        with _output_aside(), contextlib.chdir("."):
            run.run(script)
    except Again:
        run.lessons.start_again()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Refused as error:
        _stop(str(error))
    except (Exception, KeyboardInterrupt) as error:
        here = (str(Path(__file__).parent), "<frozen runpy>")
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextlib.contextmanager
def _started_with(words: list[str]) -> Iterator[None]:
    """Give a program these words as its own command line."""
    own, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = own


@contextlib.contextmanager
def _output_aside() -> Iterator[None]:
    """Send the output of the program and of its child processes to stderr; at the exit of this process again."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        atexit.register(_put_aside)  # runs before the functions that the program has registered


def _put_aside() -> None:
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def _bear_witness(script: Any, question: Any, path: Path, opened: str | None) -> NoReturn:
    """Run a script without recording, write the numbers of its backward passes to a file, and end as the script ends.

    With places, these are open in the step that is asked about.
    """
    from toolkit.gradients.audit.scripts import ScriptRun

    if opened is not None:
        import torch

        from toolkit.gradients.audit.reruns import OpenedRun

        opened_run = OpenedRun(question, **json.loads(opened))
        code = _run(opened_run, script)
        torch.save(opened_run.found, path)
        sys.exit(code)
    run = ScriptRun(question, digests=True)
    code = _run(run, script)
    path.write_text(json.dumps([[digest.loss, *digest.gradients] for digest in run.digests]), "utf-8")
    sys.exit(code)


def _verified(run: Any) -> str:
    """Run this command again without recording; return whether it computes the same."""
    with _witness(run) as path:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else []
    recorded = [[digest.loss, *digest.gradients] for digest in run.digests]
    if found == recorded:
        return "verified: without recording, the script computes the same loss and gradients, bit for bit"
    for number, (plain, watched) in enumerate(zip(found, recorded, strict=False), start=1):
        if plain[0] != watched[0]:
            losses = f"{float.fromhex(watched[0])!r} recorded and {float.fromhex(plain[0])!r} without recording"
            return f"NOT verified: the loss of backward pass {number} from there on is {losses}"
        if plain != watched:
            n_others = len(set(plain[1:]) ^ set(watched[1:]))
            return f"NOT verified: with and without recording, {n_others} gradients are not the same; the loss is"
    return f"NOT verified: the script has {len(recorded)} backward passes recorded, and {len(found)} without recording"


@contextlib.contextmanager
def _witness(run: Any, *options: str) -> Iterator[Path]:
    """Run this command again as a witness, and yield the file that it writes, which may be missing."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "witness"
        arguments = sys.orig_argv[1:]
        at = arguments.index("audit") + 1
        command = [sys.executable, *arguments[:at], "--witness", str(path), *options, *arguments[at:]]
        subprocess.run(command, stdout=sys.stderr, env=run.lessons.environment(), check=False)
        yield path


def _rerun(run: Any) -> None:
    """Answer for the stops that the recorded step cannot open, each by a further run of this command."""
    import torch

    from toolkit.gradients.audit.reruns import Found, answer_by_reruns

    def again(places: Sequence[str], after: int = 0) -> Found:
        late = f", after backward pass {after}" if after else ""
        click.echo(f"rerun: without {' + '.join(places)}{late}" if places else "rerun: as it is", err=True)
        with _witness(run, "--opened", json.dumps({"places": list(places), "after": after})) as path:
            return torch.load(path, weights_only=False) if path.is_file() else Found()

    answer_by_reruns(run, again)


def _advise(run: Any) -> None:
    """Remark on the stops that the recorded step cannot open."""
    from toolkit.gradients.audit.reruns import left_for_reruns

    for answer in run.audits.values():
        if n_left := len(left_for_reruns(answer)):
            them = "the stop that is" if n_left == 1 else f"the {n_left} stops that are"
            answer.remarks.append(f"`--rerun` removes {them} not opened in a further run of the script")


def _write_pages(path: Path, answers: dict[str, Any], program: str, command: str) -> list[Path]:
    """Write a page for each answer, numbered if there are several; return the files."""
    from toolkit.gradients.audit.page import page

    pages = [path] if len(answers) == 1 else [path.with_stem(f"{path.stem}-{i + 1}") for i in range(len(answers))]
    for to, (name, answer) in zip(pages, answers.items(), strict=True):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                text = page(answer, f"{program}, {name}" if name else program, command)
            to.write_text(text, "utf-8")
        except OSError as error:
            _stop(f"The page should be written to {to}. Found: {error.strerror}.")
    return pages


def _imported(file: Path) -> Any:
    """Import a file under a name of its own, with its folder on the path, as if it was started there."""
    taken = not file.stem.isidentifier() or importlib.util.find_spec(file.stem) is not None
    name = f"audited_{file.stem}" if taken else file.stem
    sys.path.insert(0, str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        _stop(f"PROGRAM should be a Python file, or FILE:FUNCTION of one. Found {file}: check the path.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    _asked(str(file), lambda: loader.exec_module(module))
    return module


def _loss_of(module: Any, name: str, path: str) -> tuple[Callable[[], Any], Any]:
    make = getattr(module, name, None)
    if not callable(make):
        found = "none" if make is None else type(make).__name__
        _stop(f"{path} should have a function {name!r}. Found {found}: check the name.")
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
