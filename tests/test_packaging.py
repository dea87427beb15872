"""What is installed: versions, names, contents of the wheel, and what an import pulls in."""

import contextlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from each import each
from folders import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import experiments
import toolkit

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")
)
IMPORTED = [
    Requirement(text)
    for texts in (PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values())
    for text in texts
]
REQUIREMENTS = [
    *IMPORTED,
    *(Requirement(text) for texts in PROJECT["dependency-groups"].values() for text in texts),
]


def test_the_packages_are_ours():
    assert Path(toolkit.__file__).parent == ROOT / "toolkit"
    assert Path(experiments.__file__).parent == ROOT / "experiments"


@each("requirement", REQUIREMENTS, ids=str)
def test_a_dependency_has_a_lower_bound_and_a_pin_above_it(requirement):
    assert [bound.operator for bound in requirement.specifier] == [">="]
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_pins_are_exact_sorted_and_without_local_versions():
    assert PINS["torch"] == "2.13.0"
    assert list(PINS) == sorted(PINS)
    assert all(canonicalize_name(name) == name for name in PINS)
    assert all(re.fullmatch(r"[0-9]+(\.[0-9]+)+((a|b|rc|\.post)[0-9]+)?", version) for version in PINS.values())


@pytest.mark.skipif(
    importlib.metadata.version("torch").partition("+")[0] != PINS["torch"],
    reason="asks the pinned packages which others they need",
)
def test_what_is_needed_at_run_time_is_pinned_to_the_last_package():
    """Every package that an installed dependency pulls in has a pin too: an install leaves nothing to chance."""
    assert sorted(_needed(REQUIREMENTS) - set(PINS)) == []


def test_every_import_is_a_declared_dependency():
    declared = {canonicalize_name(requirement.name) for requirement in IMPORTED}
    distributions = importlib.metadata.packages_distributions()
    found = set()
    for path in [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text("utf-8"), re.MULTILINE):
            if name not in sys.stdlib_module_names and name in distributions:
                found |= {canonicalize_name(distribution) for distribution in distributions[name]}
    assert found - {"stopgrad"} <= declared | {"pydantic-core"}  # pydantic's own types, pinned by it


def test_wheel_holds_one_package_with_experiments_configs_and_zoo_inside(tmp_path):
    builders = pytest.importorskip("hatchling.builders.wheel")
    (artifact,) = builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    wheel = zipfile.ZipFile(artifact)
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {"toolkit", "stopgrad-0.1.0.dist-info"}
    assert {"toolkit/py.typed", "toolkit/runner/templates/index.html.j2"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "toolkit").rglob("*.py")} <= names
    rooms = [("experiments", "*.py"), ("configs", "*.toml"), ("docs/zoo", "*.py")]
    beside = [path.relative_to(ROOT) for room, pattern in rooms for path in (ROOT / room).rglob(pattern)]
    assert {f"toolkit/runner/bundled/{path.as_posix()}" for path in beside} <= names
    entry_points = wheel.read("stopgrad-0.1.0.dist-info/entry_points.txt").decode()
    assert "stopgrad = toolkit.runner._command:main" in entry_points
    metadata = wheel.read("stopgrad-0.1.0.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_the_citation_names_the_version_and_the_license():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {PROJECT['project']['version']}\n" in citation
    assert f"\nlicense: {PROJECT['project']['license']}\n" in citation


def test_changelog_knows_the_version():
    version = re.escape(PROJECT["project"]["version"])
    assert re.search(rf"^## \[{version}\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)


def _modules_after(program, *arguments):
    """Return the modules that a new interpreter has imported after `program`."""
    script = f"import sys\ntry:\n    {program}\nexcept SystemExit: pass\nprint('|'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.strip().splitlines()[-1].split("|"))


@pytest.mark.parametrize("verb", [[], ["run"], ["report"], ["list"]], ids=lambda verb: " ".join(verb) or "none")
def test_help_imports_no_torch(verb):
    modules = _modules_after("from toolkit.runner._command import main; main()", *verb, "--help")
    assert "click" in modules
    assert not modules & {"torch", "toolkit.blocks", "pydantic", "matplotlib", "numpy"}


def _needed(requirements):
    """Return the names of distributions that these requirements install."""
    pending, seen = list(requirements), set()
    while pending:
        name = canonicalize_name(pending.pop().name)
        if name not in seen:
            seen.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                further = map(Requirement, importlib.metadata.requires(name) or [])
                pending += [one for one in further if one.marker is None or one.marker.evaluate({"extra": ""})]
    return seen


# A finder: a name in `sys.modules` that stands for nothing reads as imported, to SciPy as "sphinx is at work".
_WITHOUT = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent)
from toolkit.runner._command import main
main(["list"])
"""


@pytest.mark.slow
def test_the_dependencies_alone_are_enough_to_list_everything():
    """`stopgrad list` imports every module, here without the packages of extras and of development."""
    needed = _needed(map(Requirement, PROJECT["project"]["dependencies"]))
    absent = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not needed & set(map(canonicalize_name, owners)) and not module.startswith(("_", "toolkit"))
    ]
    assert {"pytest", "hypothesis"} <= set(absent)
    done = subprocess.run([sys.executable, "-c", _WITHOUT.format(absent)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "softmax.shift" in done.stdout


def test_report_imports_neither_torch_nor_an_algorithm():
    modules = _modules_after("import toolkit.runner._site")
    assert "jinja2" in modules
    assert not modules & {"torch", "toolkit.blocks", "toolkit.gradients", "scipy", "sklearn"}


@pytest.mark.slow
def test_the_core_imports_torch_and_nothing_that_it_does_not_need():
    modules = _modules_after("from toolkit import audit, unblock")
    assert {"torch", "toolkit.blocks", "toolkit.gradients"} <= modules
    assert not modules & {"scipy", "sklearn", "matplotlib", "pydantic"}
    assert not modules & {f"toolkit.{room}" for room in ("softmax", "em", "rbm", "adversarial", "datasets")}


@pytest.mark.parametrize("command", [["-m", "experiments"], ["-c", "from toolkit.runner._command import main; main()"]])
def test_both_ways_in_offer_the_same_verbs(command):
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, check=True, capture_output=True, text=True)
    verbs = re.findall(r"^  (\w+)  ", done.stdout.partition("Commands:")[2], re.MULTILINE)
    assert {"run", "report", "list"} <= set(verbs)
