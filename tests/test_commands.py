"""Every command that README and the documents show works as it stands there, outside of the checkout too."""

import ast
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv

import pytest
import warm
from folders import ROOT

from benchmarks._options import options

# Shown for data or devices that are not here.
NOT_HERE = ("own_data",)

# What would take minutes is made short; a command stays as it is but for these values.
SHORT = ("seeds=1", "steps=2", "evaluate_every=1")

TUTORIAL = ROOT / "docs" / "tutorial.md"

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(text):
    """Return the commands of the fenced console blocks, without their remarks."""
    lines = [
        line
        for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    commands = [re.split(r" {2,}|\s+#", line.removeprefix("$ "))[0].strip() for line in lines]
    return [command for command in commands if not command.startswith(("error:", "make", "pip install", "source"))]


COMMANDS = list(dict.fromkeys(command for path in DOCUMENTS for command in commands_of(path.read_text("utf-8"))))


def test_commands_are_read():
    text = "x\n```console\n$ stopgrad list    lists\nstopgrad run a  # runs\nmake run\nerror: no\n```\n"
    assert commands_of(text) == ["stopgrad list", "stopgrad run a"]
    assert {shlex.split(command)[1] for command in COMMANDS if command.startswith("stopgrad ")} == {
        "run", "report", "list", "zoo", "audit", "init"
    }  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder, and a new environment with the wheel; its dependencies are those of this environment."""
    builders = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True, capture_output=True, text=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # Last on the path, and without its .pth files, so that the checkout is not there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = python.with_name("stopgrad")
    script.write_text(script.read_text().replace(f"#!{python}", f"#!{warm.python(str(python))}", 1))
    work = folder / "elsewhere"
    work.mkdir()
    (work / "example.py").write_text(_example())
    (work / "train.py").write_text(_block("python", "optimizer.step()"))
    (work / "stuck.py").write_text(_block("python", "left over", TUTORIAL))
    return work, folder / "venv" / "bin"


def _example():
    """Return the program that README audits, as a file with the function that its command names."""
    return _block("python", "print(audit(loss))").replace("print(audit(loss))", "def make_loss():\n    return loss")


def _block(language, part, document=ROOT / "README.md"):
    """Return the block of a document with this part."""
    text = document.read_text("utf-8")
    (found,) = (block for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if part in block)
    return found


def _done(command, installed):
    work, binaries = installed
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_wheel_is_imported_and_not_the_checkout(installed):
    program = "import toolkit, importlib.util; print(toolkit.__file__, importlib.util.find_spec('experiments'))"
    done = _done([str(installed[1] / "python"), "-c", program], installed)
    assert done.stdout.startswith(str(installed[1].parent)), done.stderr
    assert done.stdout.split()[1] == "None", "a user's own package of this name can be imported"


def _shortened(parts):
    """Return a command that runs for seconds; swept values stay."""
    for value in SHORT:
        key = value.partition("=")[0] + "="
        given = [at for at, part in enumerate(parts) if part.startswith(key)]
        if not given:
            parts = [*parts, "--set", value]
        for at in given:
            parts = [*parts[:at], value, *parts[at + 1 :]] if parts[at - 1] == "--set" else parts
    return parts


@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(command, installed):
    if any(part in command for part in NOT_HERE):
        pytest.skip("needs files or a device of the reader's own")
    parts = shlex.split(command)
    if parts[:2] == ["stopgrad", "run"] and "learning_rat=0.1" not in command:
        parts = _shortened(["configs/em_iris.toml" if part == "configs" else part for part in parts])
    done = _done(parts, installed)
    expected = 2 if "learning_rat=0.1" in command else 0
    assert done.returncode == expected, done.stderr


def test_the_first_command_has_the_answer_that_readme_shows(installed):
    done = _done(["stopgrad", "audit", "train.py", "--step", "10"], installed)
    assert done.stdout == _block("text", "step 10")


def test_the_tutorial_shows_the_answers_before_and_after_the_repair(installed):
    done = _done(["stopgrad", "audit", "stuck.py", "--step", "10"], installed)
    assert done.stdout == _block("text", "stuck.py:12:5", TUTORIAL)
    stuck = _block("python", "left over", TUTORIAL)
    repaired = re.sub(r" +with torch.no_grad.*\n    ", "", stuck).replace("assert loss > 0.7", "assert loss < 0.01")
    folder = installed[0] / "repaired"
    folder.mkdir()
    (folder / "stuck.py").write_text(repaired)
    done = _done(["stopgrad", "audit", "stuck.py", "--step", "10"], (folder, installed[1]))
    assert done.stdout.endswith(_block("text", "stuck.py:13:13", TUTORIAL))


def test_every_file_that_readme_shows_is_there():
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.findall(r"\]\(([^)#]+)\)|`(docs/[\w./]+)`", text)
    assert len(found) > 5
    for link in (link or path for link, path in found):
        assert (ROOT / link).is_file(), link


def test_a_project_of_ones_own_runs_and_passes_its_test(installed):
    work, binaries = installed
    project = work / "own"
    told = _done(["stopgrad", "init", str(project)], installed)
    assert told.returncode == 0
    assert told.stdout.splitlines()[-2:] == [
        f"next: cd {project}, then: stopgrad run configs",
        "test: python -m pytest (which needs: pip install pytest)",
    ]
    assert "FOLDER should be new. Found " in _done(["stopgrad", "init", str(project)], installed).stderr
    run = _done(["stopgrad", "run", str(project / "configs"), "--results", str(project / "results")], installed)
    assert run.returncode == 0, run.stderr
    assert "contradict" not in run.stdout
    assert "with the block, training ends better" in run.stdout
    tests = _done([str(binaries / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)], installed)
    assert tests.returncode == 0, tests.stdout


@pytest.mark.parametrize("is_first", [True, False], ids=["own first", "bundled first"])
def test_a_project_of_ones_own_runs_beside_bundled_experiments(installed, tmp_path, is_first):
    """Both import modules beside their experiments, and both folders are named `experiments`."""
    assert _done(["stopgrad", "init", str(tmp_path)], installed).returncode == 0
    (tmp_path / "experiments" / "_shared.py").write_text("PLACES = 5\n")
    module = tmp_path / "experiments" / "random_walk.py"
    module.write_text(
        module.read_text().replace("import torch\n", "import torch\nfrom experiments._shared import PLACES\n", 1)
    )
    configs = [str(tmp_path / "configs"), "quantization_levels"]
    run = ["stopgrad", "run", *(configs if is_first else configs[::-1]), "--results", str(tmp_path / "results")]
    done = _done([*run, *(part for value in SHORT for part in ("--set", value))], installed)
    assert done.returncode == 0, done.stderr
    assert "records of 2 of 2 seeds" in done.stdout


@pytest.mark.parametrize("module", ["experiments", "benchmarks"])
def test_help_answers_within_half_a_second(module):
    """The processor time of a new interpreter: the clock would measure the load of the machine."""
    program = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', {module!r}, '--help'], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    times = [
        float(
            subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        )
        for _ in range(3)
    ]
    assert min(times) < 0.5


def test_the_files_of_the_tests_that_benchmarks_import_are_there():
    imports = [
        (path.name, node.module)
        for path in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests"
    ]
    assert imports
    assert not [name for name in imports if not (ROOT / f"{name[1].replace('.', '/')}.py").is_file()]


def test_help_of_the_benchmarks_names_each_of_them(capsys):
    with pytest.raises(SystemExit) as ended:
        options(["--help"])
    assert ended.value.code == 0
    listed = re.findall(r"^  (\w+)  +[`A-Z]", capsys.readouterr().out.partition("benchmarks:")[2], re.MULTILINE)
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {"atlas", "gallery"}
    assert sorted(listed) == sorted(name for name in modules if not name.startswith("_"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("bloks", "NAME should be one of .* Found 'bloks'"),
        ("fuzz --program-count 2", "unrecognized arguments: --program-count"),
        ("--threads", "--threads: expected one argument"),
    ],
)
def test_a_mistake_in_the_command_of_the_benchmarks_runs_none(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        options(words.split())
    assert ended.value.code == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("words", ["--threads 2 blocks em", "blocks --threads 2 em", "blocks em --threads 2"])
def test_options_of_the_benchmarks_stand_anywhere(words):
    chosen = options(words.split())
    assert (chosen.names, chosen.threads) == (["blocks", "em"], 2)
