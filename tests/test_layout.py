"""The rules that keep the project simple, read from its syntax trees and its texts, without importing it.

A rule is a function from one module to what it finds wrong. Each is asked of every module, and tried on bad examples.
"""

import ast
import functools
import gc
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest
from folders import ROOT


@dataclass(frozen=True)
class Module:
    """One module of the project, parsed."""

    name: str
    tree: ast.Module
    is_package: bool = False

    @classmethod
    def read(cls, path: Path) -> "Module":
        return cls(_name(path), ast.parse(path.read_text("utf-8")), path.stem == "__init__")

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the tree, which every rule looks through."""
        return list(ast.walk(self.tree))

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split("."))


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [path for room in ("toolkit", "experiments") for path in sorted((ROOT / room).rglob("*.py"))]
NAMES = {_name(path) for path in FILES}


@functools.cache
def parsed() -> dict[Path, Module]:
    """Return every module of the project, parsed when the first rule asks for it."""
    gc.disable()  # half a million nodes, none of them garbage
    try:
        found = {path: Module.read(path) for path in FILES}
        for module in found.values():
            assert module.nodes
        return found
    finally:
        gc.enable()


def modules() -> list[Module]:
    return [*parsed().values()]


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """Drop the syntax trees when all rules were asked: they would be looked through for garbage."""
    yield
    parsed.cache_clear()


# --- who may import whom -----------------------------------------------------------------------------------------

REPORT = r"toolkit\.runner\._(records|report|site|findings|sentences|sections|numbers|figures|chart|rounding)"

# A module, and the modules of this project that it may import. The first line that fits a module counts.
ARROWS = [
    (r"toolkit", r"toolkit\.(blocks|gradients(\.\w+)*)"),
    (r"toolkit\.blocks(\.\w+)?", r"toolkit\.blocks(\.\w+)?"),
    (r"toolkit\.datasets", r"toolkit\._checks"),
    (r"toolkit\.__main__", r"toolkit\.gradients(\.\w+)*"),
    (REPORT, REPORT),
    (r"toolkit\.runner\._command", r"toolkit\.(__main__|runner\.\w+)"),
    (r"toolkit\.runner(\.\w+)?", r"toolkit(\.(_checks|blocks|gradients(\.\w+)*|runner(\.\w+)?))?"),
    (r"toolkit\._\w+", r"toolkit\.(blocks|_\w+)"),
    (r"toolkit\.(testing|pytest_plugin)", r"toolkit\.(blocks|_\w+|gradients(\.\w+)*)"),
    (r"toolkit\.(?P<room>\w+)(\.\w+)*", r"toolkit\.(blocks|_\w+|{room}(\.\w+)*)"),
    (r"experiments\.__main__", r"toolkit\.runner\._command"),
    (r"experiments(\.\w+)?", r"toolkit(?!\.runner\.)(\.\w+)*|experiments\._\w+"),
]


def imports_against_the_arrows(module: Module) -> Iterator[str]:
    match, allowed = next((match, to) for who, to in ARROWS if (match := re.fullmatch(who, module.name)))
    allowed = allowed.replace("{room}", match.groupdict().get("room") or "")
    for imported in _imports(module):
        ours = imported.split(".")[0] in ("toolkit", "experiments", "tests", "benchmarks")
        if ours and not re.fullmatch(allowed, imported):
            yield f"imports {imported}"


def parts_that_import_each_other(of: list[Module]) -> list[str]:
    """Return a circle of modules, or of rooms, each of which imports the next; nothing if there is none."""
    graph: dict[str, set[str]] = {}
    for module in of:
        for imported in _imports(module):
            pairs = zip(module.name.split("."), imported.split("."), strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            one, other = (".".join(name.split(".")[: shared + 1]) for name in (module.name, imported))
            graph.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_parts_import_each_other() -> None:
    assert parts_that_import_each_other(modules()) == []


def test_parts_that_import_each_other_are_noticed() -> None:
    texts = {
        "toolkit.rbm.chains.gibbs": "",
        "toolkit.rbm.chains.langevin": "from toolkit.rbm.surrogates.divergence import X",
        "toolkit.rbm.surrogates.divergence": "from toolkit.rbm.chains.gibbs import gibbs",
    }
    found = parts_that_import_each_other([Module(name, ast.parse(text)) for name, text in texts.items()])
    assert set(found) == {"toolkit.rbm.chains", "toolkit.rbm.surrogates"}


def torch_in_the_report(module: Module) -> Iterator[str]:
    if re.fullmatch(REPORT, module.name):
        for imported in _imports(module):
            if imported.split(".")[0] == "torch":
                yield f"imports {imported}"


def _imports(module: Module) -> Iterator[str]:
    """Return what is imported anywhere in a module, at its top or inside functions, by full name."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.name.split(".")[: None if module.is_package else -1]
            base = above[: len(above) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in NAMES else source


# --- the gradient is stopped in one place ------------------------------------------------------------------------

STOPS = {"detach", "detach_", "no_grad", "inference_mode", "set_grad_enabled", "data", "requires_grad_"}
SWITCH = re.compile(r"stop|detach|block|grad(?!ebook)|through|differentiable|unroll", re.IGNORECASE)


def stops_outside_of_blocks(module: Module) -> Iterator[str]:
    if not re.match(r"toolkit(?!\.(blocks|gradients)\b)", module.name) or re.fullmatch(REPORT, module.name):
        return  # `Record.data` is no tensor's: the report knows no tensors
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in STOPS:
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Store):
            yield f"line {node.lineno}: sets .requires_grad"
        elif isinstance(node, ast.alias) and node.name.split(".")[-1] in STOPS:
            yield f"line {node.lineno}: imports {node.name}"
        elif isinstance(node, ast.Constant) and node.value in STOPS - {"data"}:
            yield f"line {node.lineno}: {node.value!r}"


def booleans_that_choose_a_gradient(module: Module) -> Iterator[str]:
    for function in module.nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        padding = [None] * (len(positional) - len(arguments.defaults))
        defaults = [*padding, *arguments.defaults, *arguments.kw_defaults]
        for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
            annotated = argument.annotation is not None and re.search(r"\bbool\b", ast.unparse(argument.annotation))
            boolean = annotated or (isinstance(default, ast.Constant) and isinstance(default.value, bool))
            if boolean and SWITCH.search(argument.arg):
                yield f"line {function.lineno}: {function.name}({argument.arg}: bool)"


def blocks_that_are_not_plain_declarations(module: Module) -> Iterator[str]:
    """Blocks are declared at module level, as ``NAME = block("module.quantity", "Why.")``, so that they can be read."""
    plain = {id(node.value) for node in module.tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value}
    room = module.name.split(".")[1] if "." in module.name else module.name
    for call in _calls_of_block(module):
        name, why = (call.args[i].value if _is_text(call.args, i) else None for i in (0, 1))
        if id(call) not in plain or name is None or why is None or call.keywords:
            yield f'line {call.lineno}: should be `NAME = block("...", "...")` at the top level'
        elif not re.fullmatch(rf"{room}(\.[a-z0-9_]+)+", name):
            yield f"line {call.lineno}: {name!r} should begin with {room + '.'!r}"
        elif not re.fullmatch(r"[A-Z0-9].*[^.]\.", why):
            yield f"line {call.lineno}: the reason of {name!r} should be a sentence"


def _calls_of_block(module: Module) -> Iterator[ast.Call]:
    if module.name.startswith("toolkit.blocks"):
        return
    for node in module.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "block":
            yield node


def _is_text(arguments: list[ast.expr], index: int) -> bool:
    return (
        len(arguments) > index
        and isinstance(arguments[index], ast.Constant)
        and isinstance(arguments[index].value, str)
    )


# --- what a reader may expect ------------------------------------------------------------------------------------


def public_names_without_a_docstring(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield "the module"
    pending: list[tuple[str, ast.AST]] = [("", module.tree)]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name[0] == "_":
                continue
            if not ast.get_docstring(node) and not _is_overload(node):
                yield f"{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                pending.append((f"{prefix}{node.name}.", node))


def _is_overload(node: ast.AST) -> bool:
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return any(decorator.split(".")[-1] in ("overload", "setter") for decorator in decorators)


def citations_under_another_name(module: Module) -> Iterator[str]:
    """A docstring cites under ``References:``, the section that Google's form and Sphinx know."""
    for node in module.nodes:
        docstring = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
        if re.search(r"^Sources?:$", docstring or "", re.MULTILINE):
            yield getattr(node, "name", "the module")


# Texts that do not begin with an argument: the subject is a part of the program, a file, or several arguments.
MOST_OTHER_SUBJECTS = 0.08


def errors_without_a_requirement(module: Module) -> Iterator[str]:
    """An error of a caller says what its subject should be: "`scale` should be positive. Found 0."."""
    for line, text in errors_of(module):
        composed = text.startswith("{") or text.endswith("{text}")
        if not composed and "should " not in text and text not in OF_SCIKIT_LEARN:
            yield f"line {line}: {text!r}"


# Found by its words in scikit-learn's own tests of estimators.
OF_SCIKIT_LEARN = {"Input X contains NaN.{hint}"}


def errors_of(module: Module) -> Iterator[tuple[int, str]]:
    """Return line and text of each error of a caller; an expression within a text is its source in braces."""
    for node in module.nodes:
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and call.args and ast.unparse(call.func) in ("ValueError", "TypeError"):
            (first, *_) = call.args
            if isinstance(first, ast.Constant | ast.JoinedStr):
                parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                yield (
                    node.lineno,
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                        for part in parts
                    ),
                )


def test_errors_begin_with_their_argument() -> None:
    texts = {f"{module.name}:{line}": text for module in modules() for line, text in errors_of(module)}
    others = [f"{place}: {text}" for place, text in texts.items() if not text.startswith(("`", "{"))]
    assert len(texts) > 400
    assert len(others) <= MOST_OTHER_SUBJECTS * len(texts), "\n".join(others)


RULES: list[Callable[[Module], Iterator[str]]] = [
    imports_against_the_arrows,
    torch_in_the_report,
    stops_outside_of_blocks,
    booleans_that_choose_a_gradient,
    blocks_that_are_not_plain_declarations,
    public_names_without_a_docstring,
    citations_under_another_name,
    errors_without_a_requirement,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    found = [f"{module.name}: {offence}" for module in modules() for offence in rule(module)]
    assert not found, "\n".join(found)


BAD = [
    (imports_against_the_arrows, "toolkit.em.gaussian", "from toolkit.rbm import gibbs"),
    (imports_against_the_arrows, "toolkit.em.gaussian", "from toolkit import rbm"),
    (imports_against_the_arrows, "toolkit.em.gaussian", "from toolkit import stop_gradient"),
    (imports_against_the_arrows, "toolkit.em.gaussian", "from ..gradients import compare"),
    (imports_against_the_arrows, "toolkit.softmax", "def late():\n    from toolkit.gradients import compare"),
    (imports_against_the_arrows, "toolkit.softmax", "import toolkit.runner._training"),
    (imports_against_the_arrows, "toolkit.blocks", "import toolkit._numbers"),
    (imports_against_the_arrows, "toolkit.gradients.compare", "from toolkit.softmax import SHIFT"),
    (imports_against_the_arrows, "toolkit", "from toolkit.softmax import softmax"),
    (imports_against_the_arrows, "experiments.em", "from toolkit.runner._comparison import run_config"),
    (imports_against_the_arrows, "experiments.em", "from experiments.rbm import Config"),
    (imports_against_the_arrows, "toolkit.runner._comparison", "import experiments.em"),
    (imports_against_the_arrows, "toolkit.runner._report", "from toolkit.runner._config import load_config"),
    (imports_against_the_arrows, "toolkit.runner._records", "from toolkit import declared_blocks"),
    (torch_in_the_report, "toolkit.runner._records", "def late():\n    import torch.nn"),
    (stops_outside_of_blocks, "toolkit.em.gaussian", "y = x.detach()"),
    (stops_outside_of_blocks, "toolkit.em.gaussian", "with torch.no_grad(): pass"),
    (stops_outside_of_blocks, "toolkit.em.gaussian", "from torch import inference_mode"),
    (stops_outside_of_blocks, "toolkit.em.gaussian", "x.data += 1"),
    (stops_outside_of_blocks, "toolkit.em.gaussian", "x.requires_grad = True"),
    (stops_outside_of_blocks, "toolkit.em.gaussian", "x.new_zeros(3).requires_grad_()"),
    (stops_outside_of_blocks, "toolkit.em.gaussian", "getattr(x, 'detach')()"),
    (booleans_that_choose_a_gradient, "toolkit.softmax", "def f(x, *, stop_gradient=True): pass"),
    (booleans_that_choose_a_gradient, "toolkit.softmax", "def f(x, detach_target: bool | None = None): pass"),
    (booleans_that_choose_a_gradient, "experiments.em", "def f(x, straight_through: bool, /): pass"),
    (blocks_that_are_not_plain_declarations, "toolkit.em.gaussian", "def f():\n    B = block('em.x', 'Why.')"),
    (blocks_that_are_not_plain_declarations, "toolkit.em.gaussian", "B = block('em.' + x, 'Why.')"),
    (blocks_that_are_not_plain_declarations, "toolkit.em.gaussian", "B = block('rbm.x', 'Why.')"),
    (blocks_that_are_not_plain_declarations, "toolkit.em.gaussian", "B = block('em.x', 'because')"),
    (public_names_without_a_docstring, "toolkit.softmax", "x = 1"),
    (public_names_without_a_docstring, "toolkit.softmax", "'''A.'''\ndef f(): pass"),
    (public_names_without_a_docstring, "toolkit.softmax", "'''A.'''\nclass C:\n    '''B.'''\n    def f(self): pass"),
    (citations_under_another_name, "toolkit.softmax", "def f():\n    '''A.\n\n    Source:\n        B.\n    '''"),
    (errors_without_a_requirement, "toolkit.softmax", "raise ValueError('bad shape')"),
    (errors_without_a_requirement, "toolkit.em.gaussian", "raise TypeError(f'`x` is {x}, no tensor')"),
]


@pytest.mark.parametrize(("rule", "name", "source"), BAD, ids=[f"{rule.__name__}-{source}" for rule, _, source in BAD])
def test_rule_notices(rule: Callable[[Module], Iterator[str]], name: str, source: str) -> None:
    assert list(rule(Module(name, ast.parse(source))))


def test_every_rule_is_tried_on_a_bad_example() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


# --- files beside the modules ------------------------------------------------------------------------------------


def untested(names: set[str], tests: set[str]) -> list[str]:
    """Return the public modules that have no test file: ``test_<module>.py``, or ``test_<room>.py`` for its parts."""
    found = []
    for name in sorted(names):
        _, *parts = name.split(".")
        if not parts or any(part.startswith("_") for part in parts) or parts in (["gradients"], ["runner"]):
            continue
        subject = parts[1] if parts[0] == "gradients" else parts[0]
        if not any(re.fullmatch(rf"test_{subject}(_\w+)?", test) for test in tests):
            found.append(name)
    return found


def test_every_public_module_has_a_test_file() -> None:
    assert untested(NAMES, {path.stem for path in (ROOT / "tests").rglob("test_*.py")}) == []


def test_a_module_without_a_test_file_is_noticed() -> None:
    names = {"toolkit", "toolkit.em", "toolkit.em.gaussian", "toolkit.gradients.compare", "experiments.td"}
    assert untested(names, {"test_em_fit"}) == ["experiments.td", "toolkit.gradients.compare"]


def test_every_config_has_its_experiment_and_every_experiment_a_config() -> None:
    named = {tomllib.loads(path.read_text("utf-8"))["experiment"] for path in (ROOT / "configs").glob("*.toml")}
    assert named == {name.split(".")[1] for name in NAMES if re.match(r"experiments\.[a-z]", name)}


def declared(modules: list[Module]) -> dict[str, str]:
    """Return name -> why of every block that these modules declare."""
    calls = [call for module in modules for call in _calls_of_block(module)]
    return {ast.literal_eval(call.args[0]): ast.literal_eval(call.args[1]) for call in calls}


def table_of_blocks(markdown: str) -> dict[str, str]:
    """Return name -> why from the Markdown table whose first column is headed "block"."""
    table = re.search(r"^\| *block *\|.*\n\|[-| :]+\|\n((?:\|.*\|\n?)+)", markdown, re.MULTILINE | re.IGNORECASE)
    rows = re.findall(r"^\| *`([^`]+)` *\| *(.*?) *\|", table[1], re.MULTILINE) if table else []
    return dict(rows)


def test_readme_is_true_of_every_block_that_it_names() -> None:
    """The documentation lists the blocks by itself."""
    named, known = table_of_blocks((ROOT / "README.md").read_text("utf-8")), declared(modules())
    rows = "\n".join(f"| `{name}` | {known.get(name, 'no such block')} |" for name in named)
    assert named, "no table of blocks"
    assert named.items() <= known.items(), f"the table of blocks in README.md should have these rows:\n{rows}"


def test_table_of_blocks_is_read() -> None:
    text = "| word | x |\n|---|---|\n| `a.b` | no |\n\n| Block | why |\n|---|---|\n| `c.d` | Yes. |\n| `e.f` | So. |\n"
    assert table_of_blocks(text) == {"c.d": "Yes.", "e.f": "So."}
    assert declared([Module("toolkit.c", ast.parse("X = block('c.d', 'Ye' 's.')"))]) == {"c.d": "Yes."}


# --- texts -------------------------------------------------------------------------------------------------------

# Paths of one machine, and hosts of package indices: whoever installs has their own.
PRIVATE = re.compile(r"(?<![\w.])/(?:work|opt|tmp|root|home)/|\b(?:pypi|pythonhosted|download\.pytorch)\.org\b")


def _tracked() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for room in ("toolkit", "experiments", "configs", "tests") for path in (ROOT / room).rglob("*.*")]
    return [path for path in paths if path.is_file() and path.suffix not in (".png", ".pyc")]


def test_texts_name_no_machine_path_and_no_index_host() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _tracked()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["cd {0}opt{0}venv", "'{0}tmp{0}x'", "{0}{0}pypi{1}org{0}simple"])
def test_private_texts_are_noticed(text: str) -> None:
    assert PRIVATE.search(text.format("/", "."))


@pytest.mark.parametrize("text", ["a{0}work{0}b", "make PYTHON=/path/to/python", "https://docs.pytorch.org/"])
def test_other_texts_pass(text: str) -> None:
    assert not PRIVATE.search(text.format("/"))


# --- words -------------------------------------------------------------------------------------------------------

# Code and formulas in documents and docstrings.
NO_PROSE = re.compile(
    r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|(?::math:)?(`+)[^`]+\1|(?:>>>|\.\.\. )[^\n]*"
    r"|\.\. math::[^\n]*(?:\n[ ]+[^\n]+)*",
    re.DOTALL,
)

# How often "what" may stand in 1,000 words: a noun is shorter and clearer.
CEILING = 1.5


def prose_of(path: Path) -> str:
    """Return the text of a document, or the docstrings of a module, without code and formulas."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        nodes = parsed()[path].nodes if path in parsed() else ast.walk(ast.parse(text))
        text = "\n\n".join(ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    return NO_PROSE.sub(" ", text)


def whats_per_thousand_words(texts: Iterable[str]) -> float:
    words = [word.lower() for text in texts for word in re.findall(r"[A-Za-z']+", text)]
    return 1000 * words.count("what") / max(len(words), 1)


def files_of_rooms() -> dict[str, list[Path]]:
    """Return the documents, each by itself, and the modules of each room."""
    found = {str(path.relative_to(ROOT)): [path] for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
    for tree in ("toolkit", "experiments", "docs/zoo"):
        for path in sorted((ROOT / tree).rglob("*.py")):
            found.setdefault("/".join(path.relative_to(ROOT).parts[:-1][:2]), []).append(path)
    return found


def test_texts_name_the_noun() -> None:
    found = {room: whats_per_thousand_words(map(prose_of, paths)) for room, paths in files_of_rooms().items()}
    above = {room: round(rate, 2) for room, rate in found.items() if rate > CEILING}
    assert not above, f'"what" in 1,000 words: {above}'


def test_whats_are_counted(tmp_path: Path) -> None:
    document, module = tmp_path / "a.md", tmp_path / "a.py"
    document.write_text("What `what` is: $what$.\n\n```python\nwhat = 1\n```\n", encoding="utf-8")
    module.write_text('"""Say what.\n\n>>> what()\n"""\n\n\ndef f():\n    """Say ``what``."""\n    what = "what"\n')
    assert prose_of(document).split() == ["What", "is:", "."]
    assert prose_of(module).split() == ["Say", "what.", "Say", "."]
    assert whats_per_thousand_words(["What it is.", "It is."]) == 200
