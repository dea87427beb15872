"""The atlas of public packages: its records, its page, and the removal of stops from source texts."""

import ast
import contextlib
import dataclasses
import math
import re
from importlib.metadata import distributions

import pytest
import torch
from folders import ROOT

from benchmarks.atlas import links, row_of
from benchmarks.atlas.links import link, repository
from benchmarks.atlas.page import figures, table
from benchmarks.atlas.records import RECORDS, Answer, Loss, Record, read_records
from benchmarks.atlas.removal import NotRemovable, Stop, without

PROGRAMS = sorted(path for path in RECORDS.with_name("programs").glob("*.py") if path.stem != "__init__")
PINS = dict(line.split("==") for line in (RECORDS.parent / "requirements.txt").read_text().split() if "==" in line)


def _header(path):
    return re.match(r"(\S+) (\S+): ", ast.get_docstring(ast.parse(path.read_text("utf-8")))).groups()


# --- records and page ---


def test_every_program_has_a_record_of_all_its_losses():
    records = {record.package: record for record in read_records()}
    assert set(records) == {path.stem.replace("_", "-") for path in PROGRAMS}
    for path in PROGRAMS:
        package, version = _header(path)
        assert (records[package].package, records[package].version) == (package, version)
        assert PINS[package] == version
        functions = [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
        assert [loss.name for loss in records[package].losses] == [name for name in functions if name[0] != "_"]


def test_records_are_well_formed():
    for record in read_records():
        for loss, answer in record.answers():
            assert not loss.failure
            assert len(answer.places) == len(answer.kinds) == len(answer.sources) == len(answer.links) > 0
            assert all(re.fullmatch(r"[^/:][^:]*:\d+:\d+", place) for place in answer.places), answer.places
            assert answer.agrees is not None or answer.remark
            if answer.agrees:
                assert answer.removed_leak == pytest.approx(answer.leak, rel=1e-5, abs=1e-6 * (loss.gradient + 1))


def test_a_record_is_read_as_it_was_written(tmp_path):
    answer = Answer(["a.py:1:2"], ["detach()"], ["x.detach()"], [""], "partial", "partial", 1.0, None, 0.5)
    record = Record("package", "1.0", "2.13.0", [Loss("loss", "", 2.0, [answer]), Loss("other", "It failed.")])
    record.write(tmp_path)
    assert read_records(tmp_path) == [record]
    assert "1 of 1" not in figures([record])
    assert "2 losses of 1 packages reach 1 stops. 0 of 1 answers could be compared" in figures([record])
    assert table([record]).count("<tr>") == 3
    many = dataclasses.replace(answer, verdict="cuts all paths to [a.weight, a.bias, b]")
    told = table([dataclasses.replace(record, losses=[Loss("loss", "", 2.0, [many])])])
    assert (
        '<td>cuts all paths to <abbr title="cuts all paths to [a.weight, a.bias, b]">3 parameters</abbr></td>' in told
    )


def test_a_package_links_to_the_repository_that_it_names():
    assert repository("torch") == "https://github.com/pytorch/pytorch"
    named = Record("package", "1.0", "2.13.0", [Loss("loss", "It failed.")], "https://github.com/a/b")
    assert '<td><a href="https://github.com/a/b">package 1.0</a></td>' in table([named])
    assert "<td>package 1.0</td>" in table([dataclasses.replace(named, repository="")])


def test_a_place_links_to_its_line_at_the_tag_of_the_version(monkeypatch):
    released = torch.__version__.partition("+")[0]
    assert link("torch/distributions/normal.py:79:5") == (
        f"https://github.com/pytorch/pytorch/blob/v{released}/torch/distributions/normal.py#L79"
    )
    assert link("numpy/core.py:1:1") == ""
    monkeypatch.setitem(links._TAGS, "torch", "{}/src")
    assert link("torch/a.py:3:5") == f"https://github.com/pytorch/pytorch/blob/{released}/src/torch/a.py#L3"


def test_linked_lines_are_those_of_the_places():
    for record in read_records():
        for _, answer in record.answers():
            for place, address in zip(answer.places, answer.links, strict=True):
                path, line, _ = place.rsplit(":", 2)
                assert not address or address.endswith(f"/{path}#L{line}")


def test_the_page_names_the_packages_without_links():
    linked = Answer(["a.py:1:2"], ["detach()"], ["x.detach()"], ["https://host/a.py#L1"], "partial", "partial", 1, 1, 1)
    bare = dataclasses.replace(linked, links=[""])
    records = [
        Record(name, "1.0", "2.13.0", [Loss("loss", "", 2.0, [it])]) for name, it in (("a", linked), ("b", bare))
    ]
    assert figures(records).endswith("1 stops link to their line; the tag of the version is not known for b.")
    assert figures(records[:1]).endswith("1 stops link to their line.")


def test_the_page_counts_what_the_records_hold():
    records = read_records()
    answers = [answer for record in records for _, answer in record.answers()]
    agreed = sum(answer.agrees is True for answer in answers)
    assert f"and {agreed} agree." in figures(records)
    assert table(records).count("<td") % 8 == 0


FINDING = re.compile(
    r"- \*\*(.+?)\*\*, `(\w+)`: leak ([\d.e+]+?)(?:, ratio (.+?), cosine (.+?))?\.\n.*?Places: (.*?)\.\n", re.DOTALL
)


def test_the_findings_in_words_are_those_of_the_records():
    findings = FINDING.findall((ROOT / "docs" / "atlas.md").read_text("utf-8"))
    assert len(findings) == 10
    records = {record.package: record for record in read_records()}
    for package, name, leak, ratio, cosine, places in findings:
        (answer,) = (
            answer
            for loss, answer in records[package].answers()
            if loss.name == name and answer.places == re.findall("`(.+?)`", places)
        )
        assert answer.agrees
        for told, found in ((leak, answer.leak), (leak, answer.removed_leak), (ratio, answer.ratio)):
            assert not told or float(told) == pytest.approx(found, rel=0.005)
        assert not cosine or float(cosine) == pytest.approx(answer.cosine, abs=0.005)


def test_a_package_that_cannot_be_imported_is_told_and_others_go_on(tmp_path, monkeypatch):
    (tmp_path / "broken_program.py").write_text('raise ImportError("no such operator")')
    monkeypatch.syspath_prepend(tmp_path)
    row = row_of("torch", "broken_program")
    assert math.isnan(row.ratio)
    assert row.what.endswith(": not audited")
    assert row.note == "ImportError: no such operator"


# --- the removal ---

SOURCES = {
    "detach": ("y = (x + 1).detach() * x", 1, 5, "detach()", "y = (x + 1) * x"),
    "twice": ("y = x.detach().cpu().detach()", 1, 5, "detach()", "y = x.cpu()"),
    "argument": ("y = f(x, z.detach())", 1, 10, "detach()", "y = f(x, z)"),
    "function": ("y = torch.detach(x) * x", 1, 5, "detach()", "y = (x) * x"),
    "another name": ("y = stop(x) * x", 1, 5, "detach()", "y = (x) * x"),
    "a chain over lines": ("y = (x\n  .abs()\n  .detach())", 3, 4, "detach()", "y = (x\n  .abs()\n  )"),
    "letters of two bytes": ("y = µ.detach() + x.detach()", 1, 19, "detach()", "y = µ.detach() + x"),
    "data": ("y = x.data.abs() * x", 1, 5, ".data", "y = x.abs() * x"),
}


@pytest.mark.parametrize(("text", "line", "column", "kind", "expected"), SOURCES.values(), ids=SOURCES.keys())
def test_a_stop_is_taken_out_of_its_line(text, line, column, kind, expected):
    assert without(text.encode(), [Stop("", line, column, kind)]).decode() == expected


@pytest.mark.parametrize("stops", [1, 2])
def test_two_stops_of_a_line_are_taken_out_one_by_one_or_together(stops):
    found = [Stop("", 1, 5, "detach()"), Stop("", 1, 18, "detach()")][:stops]
    assert without(b"y = x.detach() + z.detach()", found) == (b"y = x + z.detach()", b"y = x + z")[stops - 1]


REGIONS = {
    "with": ("with torch.no_grad():\n    y = w * w\nout = w * y", 1, 1),
    "decorator": ("@torch.no_grad()\ndef f():\n    return w * w\nout = w * f()", 1, 1),
    "stack": ("with ExitStack() as s:\n    s.enter_context(torch.no_grad())\n    y = w * w\nout = w * y", 2, 5),
}


@pytest.mark.parametrize(("text", "line", "column"), REGIONS.values(), ids=REGIONS.keys())
def test_a_region_is_taken_out(text, line, column):
    def gradient(source):
        w = torch.tensor(3.0, requires_grad=True)
        names = {"torch": torch, "w": w, "ExitStack": contextlib.ExitStack}
        exec(compile(source, "program", "exec"), names)
        return torch.autograd.grad(names["out"], w)[0].item()

    assert gradient(text) == 9
    assert gradient(without(text.encode(), [Stop("", line, column, "no_grad")])) == 27


def test_a_stop_that_is_not_there_is_refused():
    with pytest.raises(NotRemovable, match="stands at the place itself"):
        without(b"y = x.abs()", [Stop("", 1, 5, "detach()")])


# --- packages that are installed ---

SMALL = ["entmax", "geomloss", "higher", "pytorch_crf", "pytorch_metric_learning", "pytorch_msssim", "snntorch"]
SMALL += ["spikingjelly", "torchdeq", "torchdiffeq", "vector_quantize_pytorch", "x_transformers"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", SMALL)
def test_a_small_package_gives_its_record_again(program):
    from benchmarks.atlas.comparison import compared_losses

    package = program.replace("_", "-")
    if not any(each.metadata["Name"] == package and each.version == PINS[package] for each in distributions()):
        pytest.skip(f"{package} {PINS[package]} is not installed")
    (record,) = (record for record in read_records() if record.package == package)
    found = compared_losses(f"benchmarks.atlas.programs.{program}")
    assert not any(answer.agrees is False for loss in found for answer in loss.answers)
    for loss, known in zip(found, record.losses, strict=True):
        kinds = [[(answer.places, answer.kind) for answer in each.answers] for each in (loss, known)]
        assert kinds[0] == kinds[1]
