"""``stopgrad audit --expect``: a table of expected stops, its differences from the program, and their forms."""

import json
import linecache
import os
import random
import subprocess
import sys
import tomllib

import pytest
import torch
import warm
from click.testing import CliRunner
from folders import ROOT

from toolkit.__main__ import main
from toolkit.blocks import Site
from toolkit.gradients import audit
from toolkit.gradients.audit.annotations import error_of, notices_of
from toolkit.gradients.audit.expectations import Difference, Stop, differences, read_tables, stops_of, write_tables
from toolkit.gradients.audit.schema import AnswerSchema
from toolkit.gradients.audit.source import lines_of, text_of

PROGRAM = """\
import torch
from torch import nn

torch.manual_seed(0)
online = nn.Linear(3, 2)
target = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
x = torch.randn(4, 3)


@torch.no_grad()
def scale(y):
    return y.exp()


def loss():
    with torch.no_grad():
        goal = target(x)
    y = online(x)
    return ((y - goal) * y.detach() * scale(y)).sum() + y.mean().item()


def make_loss():
    return loss
"""

TABLE = """\
[[stop]]
file = "model.py"
function = "scale"
source = "@torch.no_grad()"
verdict = "partial"

[[stop]]
file = "model.py"
function = "loss"
source = "with torch.no_grad()"
verdict = "cuts"
parameters = ["target.*"]

[[stop]]
file = "model.py"
function = "loss"
source = "y.detach()"
verdict = "partial"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(PROGRAM)
    (tmp_path / "stops.toml").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield tmp_path
    linecache.clearcache()
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def _run(*arguments):
    for name in ("model", "audited_model"):
        sys.modules.pop(name, None)
    linecache.clearcache()
    return CliRunner().invoke(main, ["audit", "model.py:make_loss", *arguments])


def _told(result):
    return [line.removeprefix("NOT as expected: ") for line in result.stdout.splitlines() if line.startswith("NOT as")]


def test_stops_as_expected_end_with_0(folder):
    result = _run("--expect", "stops.toml")
    assert result.exit_code == 0, result.output
    assert "3 stops" in result.stdout


def test_lines_that_move_are_no_difference(folder):
    moved = PROGRAM.replace("y.detach()", "y\n        .detach()").replace(
        "import torch\n", "import torch\n\n# More.\n", 1
    )
    (folder / "model.py").write_text(moved)
    assert _run("--expect", "stops.toml").exit_code == 0


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("y.detach() *", "y *", ["model.py: `y.detach()` in loss: the stop is gone; expected partial"]),
        (
            "return y.exp()",
            "return y.exp().detach()",
            [
                "model.py:10: `@torch.no_grad()` in scale: redundant; expected partial",
                "model.py:12: `y.exp().detach()` in scale: a new stop: no-op",
            ],
        ),
        (
            "return y.exp()",
            "return torch.ones(2)",
            ["model.py:10: `@torch.no_grad()` in scale: no-op; expected partial"],
        ),
        (
            "(y - goal)",
            "(y - goal - target[1](y))",
            ["model.py:16: `with torch.no_grad()` in loss: cuts target.0.*; expected cuts target.*"],
        ),
        (
            "y.detach() *",
            "online(x).detach() *",
            [
                "model.py:19: `online(x).detach()` in loss: a new stop: partial",
                "model.py: `y.detach()` in loss: the stop is gone; expected partial",
            ],
        ),
    ],
    ids=["gone", "new", "verdict", "parameters", "another text"],
)
def test_each_difference_is_a_line_and_ends_with_1(folder, before, after, told):
    (folder / "model.py").write_text(PROGRAM.replace(before, after))
    result = _run("--expect", "stops.toml")
    assert result.exit_code == 1
    assert _told(result) == told
    as_json = _run("--expect", "stops.toml", "--json")
    assert as_json.exit_code == 1
    json.loads(as_json.stdout)
    assert told[0] in as_json.stderr


def test_the_table_that_is_written_is_met(folder):
    (folder / "stops.toml").unlink()
    assert "stops.toml: `--update` writes it." in _run("--expect", "stops.toml").stderr
    result = _run("--expect", "stops.toml", "--update")
    assert result.exit_code == 0, result.output
    assert tomllib.loads((folder / "stops.toml").read_text("utf-8")) == tomllib.loads(TABLE)
    assert _run("--expect", "stops.toml").exit_code == 0


def test_a_table_elsewhere_finds_its_files(folder, monkeypatch):
    (folder / "ci").mkdir()
    assert _run("--expect", "ci/stops.toml", "--update").exit_code == 0
    rows = tomllib.loads((folder / "ci/stops.toml").read_text("utf-8"))["stop"]
    assert {row["file"] for row in rows} == {"../model.py"}
    monkeypatch.chdir(folder / "ci")
    result = CliRunner().invoke(main, ["audit", "../model.py:make_loss", "--expect", "stops.toml"])
    assert result.exit_code == 0, result.output


def test_an_answer_that_is_not_valid_writes_no_table(folder):
    random = PROGRAM.replace(".sum() + y.mean().item()", ".sum() * clock.random()")
    (folder / "model.py").write_text(f"import random\n{random}")
    with (folder / "model.py").open("a") as file:
        file.write("\n\nclock = random.SystemRandom()\n")
    assert _run("--expect", "stops.toml", "--update").exit_code == 1
    assert (folder / "stops.toml").read_text() == TABLE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[stop]\n", "`stops.toml` should be a TOML file. Found: "),
        ("stop = 3\n", "`stops.toml` should hold arrays of tables. Found 3."),
        ("[[stops]]\n" + TABLE.partition("\n")[2], "should have stops under [[stop]] alone. Found ['stop', 'stops']."),
        ('[[stop]]\nfile = "a.py"\n', "should have the texts file, function, source, verdict. Found {'file': 'a.py'}."),
        (TABLE + 'line = 3\n', "should have the texts file, function, source, verdict. Found "),
        (TABLE.replace('"cuts"', '"cut"'), "should be one of ['cuts', 'makes', 'no-op', 'noise', 'not opened', "),
    ],
)  # fmt: skip
def test_a_wrong_table_is_one_clear_line(folder, text, message):
    (folder / "stops.toml").write_text(text)
    result = _run("--expect", "stops.toml")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_update_needs_a_table(folder):
    assert "`--expect`. Found it alone: add `--expect FILE.toml`." in _run("--update").stderr


def test_annotations_of_github(folder, monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(folder.parent))
    here = f"{folder.name}/model.py"
    lines = _run("--format", "github").stdout.splitlines()
    notices = [line for line in lines if line.startswith("::notice")]
    assert notices[0].startswith(f"::notice file={here},line=16::no_grad: cuts all paths to [target.")
    assert len(notices) == 3
    (folder / "model.py").write_text(PROGRAM.replace("y.detach() *", "y *"))
    (folder / "stops.toml").write_text(TABLE.replace('"cuts"\nparameters = ["target.*"]', '"partial"'))
    result = _run("--format", "github", "--expect", "stops.toml")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("::")] == [
        f"::error file={here},line=16::model.py:16: `with torch.no_grad()` in loss: cuts target.*; expected partial",
        f"::error file={here}::model.py: `y.detach()` in loss: the stop is gone; expected partial",
    ]


def test_annotations_escape_their_own_signs(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    gone = Difference(Stop("a,b:c%.py", "f", "x\n", "partial"), "50 %\r")
    assert error_of(gone, tmp_path) == "::error file=a%2Cb%3Ac%25.py::a,b:c%25.py: `x%0A` in f: 50 %25%0D"


def test_an_answer_that_is_not_valid_is_an_error():
    w, clock = torch.ones(2, requires_grad=True), random.SystemRandom()
    found = audit(lambda: (w * w.detach()).sum() * clock.random(), {"w": w})
    assert notices_of(found) == [f"::error::The audit is not valid: {found.reason}"]


def _stop(verdict, *parameters, source="y.detach()"):
    return Stop("a.py", "f", source, verdict, parameters)


@pytest.mark.parametrize(
    ("expected", "found", "is_met"),
    [
        (_stop("redundant"), _stop("noise"), True),
        (_stop("noise"), _stop("redundant"), True),
        (_stop("redundant"), _stop("no-op"), False),
        (_stop("redundant"), _stop("partial"), False),
        (_stop("cuts", "a", "b[0]"), _stop("cuts", "b[0]", "a"), True),
        (_stop("cuts", "net.*"), _stop("cuts", "net.*"), True),
        (_stop("cuts", "net.*"), _stop("cuts", "net.0.*"), False),
        (_stop("cuts", "a"), _stop("cuts"), False),
    ],
)
def test_an_effect_is_met(expected, found, is_met):
    assert expected.is_met_by(found) is is_met
    assert bool(differences([expected], [found])) is not is_met


def test_equal_stops_are_counted():
    two = [_stop("partial"), _stop("partial")]
    assert differences(two, two) == []
    assert [difference.text for difference in differences(two, two[:1])] == ["the stop is gone; expected partial"]
    assert [difference.text for difference in differences(two[:1], two)] == ["a new stop: partial"]


def test_any_text_is_read_as_it_was_written(tmp_path):
    stops = [_stop("cuts", 'a"b', "ü", source="x['\\n\x7f']\t"), _stop("not opened", source="y")]
    for name in ("stop", "TestX::test_a[1.5-ä]"):
        write_tables(tmp_path / "t.toml", {name: stops}, "a\nb")
        assert read_tables(tmp_path / "t.toml") == {name: stops}


def test_a_module_stands_for_its_parameters():
    parts = {name: torch.nn.Linear(1, 1) for name in ("a", "b")}
    net = torch.nn.ModuleDict({"x": torch.nn.ModuleDict(parts), "y": torch.nn.Linear(1, 1)})

    def loss():
        x = torch.ones(1, 1)
        return (net["y"](x) * (net["x"]["a"](x) + net["x"]["b"](x).detach() + net["y"].bias.detach())).sum()

    first, second = stops_of(audit(loss, net), ROOT)
    assert (first.verdict, first.parameters) == ("cuts", ("x.b.*",))
    assert (second.verdict, second.parameters) == ("partial", ())
    assert first.source == "net['x']['b'](x).detach()"
    assert first.function == "test_a_module_stands_for_its_parameters.<locals>.loss"
    assert first.file == "tests/gradients/test_audit_expectations.py"


@pytest.mark.parametrize(
    ("code", "column", "kind", "text", "lines"),
    [
        ("y = (a +  b).exp(\n).detach() * c", 5, "detach()", "(a + b).exp().detach()", [1, 2]),
        ("x.detach() * y\\\n .detach()", 1, "detach()", "x.detach()", [1]),
        ("y.data.mul_(x)", 1, ".data", "y.data", [1]),
        ("with open(f) as g, torch.no_grad(): pass", 1, "no_grad", "with torch.no_grad()", [1]),
        ("@a\n@torch.no_grad()\ndef f(): pass", 1, "no_grad", "@torch.no_grad()", [2]),
        ("y = wrapped(x)  # ", 5, "detach()", "y = wrapped(x)  #", [1]),
        ("", 1, "detach()", "detach()", [1]),
    ],
)
def test_the_text_of_a_stop(tmp_path, code, column, kind, text, lines):
    (tmp_path / "a.py").write_text(code)
    site = Site(str(tmp_path / "a.py"), 1, column, "f")
    assert text_of(site, kind) == text
    assert list(lines_of(site, kind)) == lines


SCRIPT = """
import os
import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
optimisers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, critic)]
os.chdir("..")
for _ in range(3):
    fake = generator(torch.randn(4, 2))
    (critic(fake.detach()) * critic.bias.data).mean().backward()
    (critic(fake) * fake.detach().mean()).mean().backward()
    for optimiser in optimisers:
        optimiser.step()
"""


def test_the_backward_passes_of_a_script(tmp_path):
    def run(*arguments):
        words = ["audit", "train.py", "--step", "2", "--expect", "a.toml", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [warm.python(), "-m", "toolkit", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    (tmp_path / "train.py").write_text(SCRIPT)
    done = run("--all", "--update", "--page", "page.html")
    assert done.returncode == 0, done.stderr
    command = "stopgrad audit train.py --step 2 --expect a.toml --all --update --page page.html"
    assert all(command in (tmp_path / name).read_text() for name in ("a.toml", "page-1.html", "page-2.html"))
    rows = tomllib.loads((tmp_path / "a.toml").read_text("utf-8"))["stop"]
    assert [(row["file"], row["source"], row["backward"], row["verdict"]) for row in rows] == [
        ("train.py", "fake.detach()", 1, "cuts"),
        ("train.py", "critic.bias.data", 1, "partial"),
        ("train.py", "fake.detach()", 2, "partial"),
    ]
    assert run("--all").returncode == run("--backward", "2").returncode == 0
    (tmp_path / "train.py").write_text(SCRIPT.replace(" * fake.detach().mean()", ""))
    done = run("--all")
    assert done.returncode == 1
    assert "train.py: `fake.detach()` in <module>, backward pass 2: the stop is gone; expected partial" in done.stdout
    assert run().returncode == 0, "the first backward pass is as it was"
    told = AnswerSchema.model_validate_json(run("--json").stdout)
    assert told.backward == "step 2, backward pass 1"


def test_json_has_its_schema(folder):
    for program in (PROGRAM, PROGRAM.replace("y.mean().item()", "y.mean().detach_() + x.argmax()")):
        (folder / "model.py").write_text(program)
        told = AnswerSchema.model_validate_json(_run("--json").stdout)
        assert told.backward is None
        assert {effect.verdict.kind for effect in told.effects} == {"partial", "cuts"}
    with pytest.raises(ValueError, match="extra_forbidden"):
        AnswerSchema.model_validate({**told.model_dump(), "more": 1})
