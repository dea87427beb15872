"""``python -m toolkit audit``: what it prints, what its page shows, how it ends, and what it leaves alone."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from folders import ROOT

from toolkit.__main__ import main
from toolkit.gradients import audit
from toolkit.gradients.audit.source import stop_span
from toolkit.runner._command import main as stopgrad

DETACH = torch.Tensor.detach

PROGRAM = '''\
"""A program with <b>stops</b> & a "quoted" name."""
import random
import torch
from torch import nn
from helper_of_program import scale

torch.manual_seed(0)
net, other = nn.Linear(4, 3), nn.Linear(4, 3)
x = torch.randn(6, 4)


@torch.no_grad()
def target(y):
    return other(y).exp()


def loss():
    print("the program prints")
    a = net(x)
    with torch.no_grad():
        held = scale(a)
    label = a.mean().item()  # "<i>ümlaut</i>"
    return (a * held * (a + label).exp().detach() * target(x)).sum()


def make_loss():
    return loss


def with_parameters():
    return loss, {"<weight>": net.weight}


def changing():
    clock = random.SystemRandom()

    def loss():
        return (net(x) * net(x).detach()).sum() * clock.random()

    return loss


def raising():
    raise KeyError("no data")


def not_a_loss():
    return torch.ones(3)


def three():
    return loss, net, 3


def vector():
    return lambda: net(x)


def late():
    def loss():
        raise OSError("lost")

    return loss


constant = 3
'''


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program_to_audit.py").write_text(PROGRAM)
    (tmp_path / "helper_of_program.py").write_text("def scale(a):\n    return a.sin()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield "program_to_audit.py"
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    assert {name for name, module in before.items() if sys.modules.get(name) is not module} == set()


def _run(*arguments):
    return CliRunner().invoke(main, ["audit", *arguments])


def _line(text):
    return 1 + PROGRAM[: PROGRAM.index(text)].count("\n")


def test_the_table_names_every_place(program):
    result = _run(f"{program}:make_loss")
    assert result.exit_code == 0, result.output
    for text, column in (("    with torch.no_grad", 5), ("(a + label)", 24), ("@torch.no_grad", 1)):
        assert f"{program}:{_line(text)}:{column}" in result.stdout
    assert f"leaves the graph: item() at {program}:{_line('label =')}:13" in result.stdout
    assert "the program prints" not in result.stdout


def test_the_summary_names_the_verdicts_that_bear_load(program):
    result = _run(f"{program}:make_loss")
    assert result.stdout.splitlines()[1] == "3 stops: 3 load-bearing (2 partial, 1 cuts all paths)"


def test_json_is_what_the_audit_says(program):
    result = _run(f"{program}:with_parameters", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    found = audit(sys.modules["program_to_audit"].loss, {"<weight>": sys.modules["program_to_audit"].net.weight})
    assert told == json.loads(json.dumps(found.to_dict()))
    assert list(told["effects"][0]["per_parameter"]) == ["<weight>"]
    assert [effect["verdict"]["kind"] for effect in told["effects"]] == ["partial", "partial", "redundant"]


def test_an_audit_that_is_not_valid_ends_with_1(program):
    result = _run(f"{program}:changing", "--page", "out.html")
    assert result.exit_code == 1
    assert result.stdout.startswith("INVALID: the program is not deterministic")
    assert "<strong>Invalid.</strong> the program is not deterministic" in Path("out.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:make_loss"], "PROGRAM should be a file. Found none at nowhere.py: check the path"),
        (["-m", "nowhere.at_all"], "MODULE should be found from here. Found no nowhere: check the name, or run in its"),
        ([], "PROGRAM should be a script, FILE:FUNCTION, or -m MODULE. Found none: `stopgrad audit train.py`."),
        (["program_to_audit.py:"], "PROGRAM should be a file. Found none at program_to_audit.py:: check"),
        (
            ["train.py", "--backward", "2", "--all"],
            "`--backward` should not stand beside `--all`. Found both: leave one out.",
        ),
        (["program_to_audit.py:nothing"], "should have a function 'nothing'. Found none: check the name."),
        (["program_to_audit.py:constant"], "should have a function 'constant'. Found int: check the name."),
        (["program_to_audit.py:raising"], "Found KeyError: 'no data' (at "),
        (
            ["program_to_audit.py:not_a_loss"],
            "should return a loss function, or a loss function and parameters. Found Te",
        ),
        (["program_to_audit.py:three"], "Found a tuple of function, Linear, int."),
        (["program_to_audit.py:vector"], "`loss` should return a scalar. Found a tensor of shape (6, 3)"),
        (["program_to_audit.py:late"], "Found OSError: lost (at "),
        (["broken.py:make_loss"], "broken.py should run. Found SyntaxError: "),
        (["notes.txt:make_loss"], "should be a Python file, or FILE:FUNCTION of one. Found notes.txt: check the path."),
        (["program_to_audit.py:make_loss", "--page", "no/such/folder.html"], "Found: No such file or directory."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_clear_line_and_ends_with_2(program, arguments, message):
    Path("broken.py").write_text("def make_loss(:\n")
    Path("notes.txt").write_text("nothing")
    result = _run(*arguments)
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if line != "the program prints"]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert result.stdout == ""
    assert torch.Tensor.detach is DETACH


def test_a_file_reads_its_own_arguments(program):
    words = list(sys.argv)
    Path("asks.py").write_text(
        "import sys, torch\n"
        "rate = float(sys.argv[2])\n"
        "w = torch.ones((), requires_grad=True)\n"
        "def make_loss():\n"
        "    return lambda: rate * (w * w.detach()) * len(sys.argv)\n"
    )
    result = _run("asks.py:make_loss", "--", "--rate", ".5")
    assert result.stdout.startswith("loss 1.5, blocked gradient 1.5\n"), result.output
    assert sys.argv == words


def test_an_option_of_the_program_belongs_behind_a_dash(program):
    for command in (main, stopgrad):
        result = CliRunner().invoke(command, ["audit", "train.py", "--rate", ".5"])
        assert result.exit_code == 2
        assert re.search("--rate.* The arguments of the program stand after `--`", result.output)


def test_a_file_with_the_name_of_a_module_replaces_nothing(program):
    Path("toolkit.py").write_text(PROGRAM)
    result = _run("toolkit.py:make_loss")
    assert result.exit_code == 0, result.output
    assert f"toolkit.py:{_line('    with torch.no_grad')}:5" in result.stdout


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.marked, self.references, self._in_mark, self.text = [], [], False, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._in_mark = tag == "mark"
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        self._in_mark = False

    def handle_data(self, data):
        self.text.append(data)
        if self._in_mark:
            self.marked.append(data)


def test_the_page_marks_the_words_that_stop(program):
    result = _run(f"{program}:make_loss", "--page", "out.html")
    assert result.exit_code == 0, result.output
    text = Path("out.html").read_text("utf-8")
    page = _Page(text)
    assert page.marked == ["torch.no_grad()", ".detach()", "torch.no_grad()", ".item()"]
    assert page.references == ["data:,"]
    assert "<i>ümlaut</i>" in "".join(page.text)  # escaped: it is text, not a tag
    assert "<p>The value leaves the graph.</p>" in text
    assert "<p>Only this keeps the gradient from <code>" in text
    assert "<p>Without this stop the gradient changes.</p>" in text
    assert re.search(r"<p>\d+ stops?: [^<]+\.</p>", text)
    assert re.search(r"<figure[^>]*>\s*<svg", text)
    assert "<footer><code>stopgrad" in text
    assert text.count("<section>") == text.count("</section>") == 4
    for excerpt in re.findall("<pre>(.*?)</pre>", text, re.DOTALL):
        assert re.search(r"</i>\S", excerpt), "a narrow screen has no room for an indent that all lines share"


@pytest.mark.parametrize(
    ("code", "column", "kind", "marked"),
    [
        ("y = (a + b).exp().detach() * c", 5, "detach()", ".detach()"),
        ("y = a.detach().exp()", 5, "detach()", ".detach()"),
        ("y = torch.detach(a + b)", 5, "detach()", "torch.detach(a + b)"),
        ("y.data.mul_(x.data)", 1, ".data", "y.data"),
        ("y = float(a.sum())", 5, "float()", "float(a.sum())"),
        ("with open(f) as g, torch.no_grad(): pass", 1, "no_grad", "torch.no_grad()"),
        ("@torch.inference_mode()\ndef f(): pass", 1, "inference_mode", "torch.inference_mode()"),
        ("é = a.item()", 6, "item()", ".item()"),
    ],
)
def test_the_words_that_stop_are_found(code, column, kind, marked):
    start, end = stop_span(code, 1, column, kind)
    assert code.splitlines()[0].encode()[start:end].decode() == marked


@pytest.mark.parametrize("code", ["y = 3", "y = (", "y = a.detach(\n)"])
def test_words_that_are_not_on_the_line_are_not_guessed(code):
    assert stop_span(code, 1, 5, "detach()") is None


def test_help_needs_no_torch():
    code = "import sys; sys.argv[1:] = ['audit', '--help']; import runpy\n"
    code += "try: runpy.run_module('toolkit', run_name='__main__')\nexcept SystemExit as end: assert not end.code\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FILE:FUNCTION" in done.stdout
    for label in ("no-op", "redundant", "below the noise", "partial", "cuts all paths", "makes the gradient"):
        assert f"\n  {label}  " in done.stdout, "a newcomer finds each verdict of the table explained"
