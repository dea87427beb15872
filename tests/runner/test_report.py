"""The report: what it says, that it stands alone, and that a browser shows it."""

import itertools
import math
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
import toy
from click.testing import CliRunner
from folders import ROOT

from toolkit.runner._chart import _DARK, _LIGHT, Key, fit, frame, line
from toolkit.runner._command import main
from toolkit.runner._comparison import run_config
from toolkit.runner._config import load_config
from toolkit.runner._figures import (
    COLOURS,
    METHODS,
    Arrow,
    Band,
    Level,
    Path,
    Strip,
    draw_arrows,
    draw_bands,
    draw_curves,
    draw_parameters,
    draw_plane,
    draw_strips,
    draw_sweep,
)
from toolkit.runner._findings import Difference, compared, verdict_of
from toolkit.runner._numbers import brief
from toolkit.runner._records import BLOCKED, Record, read_all
from toolkit.runner._report import _arrows, _command, experiment_view
from toolkit.runner._sections import methods_section, reference_levels, seeds_section, sweep_section
from toolkit.runner._sentences import (
    _agreed,
    _effect_on_training,
    _turn,
    count_of,
    meaning_of,
    of_blocks,
    outcome_of,
    training_effect,
)
from toolkit.runner._site import _breakable, _size, write_single, write_site

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.references, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.references.append(value)

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="session")
def results(tmp_path_factory, two_steps):
    root = tmp_path_factory.mktemp("report")
    path = toy.install("toy_report", root)
    toy.rewrite(path, root / "toy_broken.toml", ["kind=diverges", "title='A broken toy'"])
    for name, values in (
        ("toy_swept", ["kind=swept", "seeds=12", "steps=2"]),
        ("toy_beside", ["kind=methods", "references={'elsewhere <b>1999</b>' = 0.25}"]),
    ):
        toy.rewrite(toy.install(name, root), root / f"{name}.toml", values)
    for path in root.glob("*.toml"):
        run_config(load_config(path), root / "results")
    for path in reversed(CONFIGS):  # test_experiments.py, in another process, may make the same records from the first
        folder = two_steps(path)
        shutil.copytree(folder, root / "results" / path.stem / folder.name)
    run_config(load_config(root / "toy_report.toml", ["steps=3"]), root / "results")
    return root / "results"


@pytest.fixture(scope="session")
def page(results):
    return write_single(read_all(results), results / "single.html")


@pytest.fixture(scope="session")
def parsed(page):
    return _Page(page.read_text())


@pytest.mark.slow
def test_every_block_stands_there_with_its_reason_and_verdict(results, parsed):
    text = " ".join(" ".join(parsed.text).split())
    for found in read_all(results):
        data = found.records[-1].data
        assert data["config"]["title"] in text
        assert " ".join(data["config"]["finding"].split()) in text
        for name, why in data["blocks"].items():
            assert name in text
            assert why in text


def test_every_objective_has_its_direction(results):
    directions = set()
    for found in read_all(results):
        higher = found.records[-1].data["objective"]["higher_is_better"]
        assert experiment_view(found)["better"] == f"{'higher' if higher else 'lower'} is better"
        directions.add(higher)
    assert directions == {True, False}


def test_what_users_write_is_escaped(page):
    assert "<b>&amp;</b>" not in page.read_text()
    assert "A toy &lt;b&gt;&amp;amp;&lt;/b&gt;" in page.read_text()


def test_the_page_stands_alone(page, parsed):
    assert [reference for reference in parsed.references if not reference.startswith(("#", "data:"))] == []
    assert "@import" not in page.read_text()
    assert re.findall(r"url\((?!#)", page.read_text()) == []


def test_ids_are_unique_and_every_reference_has_one(parsed):
    assert [name for name, count in Counter(parsed.ids).items() if count > 1] == []
    targets = {reference[1:] for reference in parsed.references if reference.startswith("#")}
    assert targets <= set(parsed.ids)


def test_the_same_records_give_the_same_page(results, page, tmp_path):
    again = write_single(read_all(results), tmp_path / "index.html")
    assert again.read_bytes() == page.read_bytes()


def test_a_run_that_broke_off_is_told(parsed):
    assert "its loss was not finite" in " ".join(parsed.text)


def test_the_report_needs_no_torch(results, tmp_path):
    program = textwrap.dedent(f"""
        import sys
        for name in ("torch", "toolkit.blocks", "toolkit.gradients", "sklearn", "pydantic"):
            sys.modules[name] = None
        from toolkit.runner._command import main
        main(["report", "--results", {str(results)!r}, "--single", {str(tmp_path / "page.html")!r}])
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_without_records_the_command_says_what_to_do(tmp_path):
    for folder in (tmp_path, tmp_path / "not made yet"):
        done = CliRunner().invoke(main, ["report", "--results", str(folder)])
        assert done.exit_code == 2
        found = f"Found none in {folder}: `stopgrad run` writes them"
        assert done.stderr == f"error: `--results` should be a folder with records. {found}\n"


@pytest.mark.parametrize("option", ["--results", "--single", "--configs", "--page", "--expect", "CONFIGS", "FOLDER"])
def test_an_empty_path_is_refused_and_writes_nothing(option, tmp_path, monkeypatch):
    commands = {
        "--results": [["report"], ["run", "em_iris"], ["zoo"]],
        "--single": [["report"]],
        "--configs": [["list"]],
        "--page": [["audit", "train.py"]],
        "--expect": [["audit", "train.py", "--update"]],
        "CONFIGS": [["run"]],
        "FOLDER": [["init"], ["zoo"]],
    }
    monkeypatch.chdir(tmp_path)
    for command in commands[option]:
        done = CliRunner().invoke(main, [*command, *([option] if option.startswith("-") else []), ""])
        assert done.exit_code == 2
        assert re.search(rf"Error: Invalid value for '\[?{option}.*': the path is empty: .*\.$", done.stderr)
    assert not list(tmp_path.iterdir())


def test_an_empty_program_is_refused():
    for words in ([""], ["-m", ""]):
        done = CliRunner().invoke(main, ["audit", *words])
        assert done.exit_code == 2
        assert done.stderr.startswith("error: PROGRAM should be a script, FILE:FUNCTION, or -m MODULE. Found none")


def test_a_project_in_this_folder_needs_no_way_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["init", "."])
    assert "next: stopgrad run configs\n" in done.stdout


def _views(results, name):
    """Return the records of a config, its variants, and both views of its seeds."""
    records = next(found.records for found in read_all(results) if found.name == name)
    names = list(records[0].data["variants"])
    colours = dict.fromkeys(names, "#000000")
    return records, names, seeds_section(records, names, colours), sweep_section(records, names, colours)


def test_many_seeds_are_shown_one_by_one_and_few_are_not(results, page):
    records, names, seeds, _ = _views(results, "toy_swept")
    assert (seeds.label, [row[0] for row in seeds.rows]) == (
        "12 seeds",
        ["blocked", *(f"{name} open" for name in names[1:])],
    )
    finals = sorted(record.data["variants"][names[1]]["metrics"]["first weight"][-1] for record in records)
    middle = (finals[5] + finals[6]) / 2
    cell = seeds.rows[1][seeds.heads.index("first weight")]
    assert cell == f"{brief(middle)} ({brief(finals[0])} … {brief(finals[-1])})"
    assert _views(results, "toy_report")[2:] == (None, None)
    text = page.read_text()
    assert text.count("<h3>The 12 seeds</h3>") == 1
    assert "<h3>The 2 seeds</h3>" not in text


def test_events_are_counted_over_the_seeds(results, parsed):
    records, names, seeds, _ = _views(results, "toy_swept")
    head = "it went <b>low</b> (first weight below 0.1)"
    assert seeds.heads.count(head) == 1
    counts = {}
    for name, cells in zip(names, seeds.rows, strict=True):
        finals = [record.data["variants"][name]["metrics"]["first weight"][-1] for record in records]
        counts[name] = sum(value < 0.1 for value in finals)
        assert cells[seeds.heads.index(head)] == f"{counts[name]} of 12"
    assert 0 < counts["blocked"] < 12
    text = " ".join(" ".join(parsed.text).split())
    assert (
        f"It went <b>low</b> in {counts[names[1]]} of 12 seeds without the block, and in {counts['blocked']} of 12"
        in text
    )


@pytest.mark.parametrize(
    ("limits", "values", "expected"),
    [
        ({"below": 0.5, "above": None}, [0.4, 0.5, 0.6], "1 of 3"),
        ({"below": None, "above": 0.5}, [0.4, 0.5, 0.6, 0.7], "2 of 4"),
        ({"below": 0.5, "above": None}, [0.4, float("nan")], "1 of 1"),
        ({"below": 0.5, "above": None}, [float("nan")], "–"),
        ({"below": 0.1, "above": None}, [0.3 - 0.2, 0.09], "1 of 2"),
        ({"below": None, "above": 0.3}, [0.1 + 0.2, 0.31], "1 of 2"),
    ],
)
def test_an_event_counts_what_is_beyond_its_limit(limits, values, expected):
    assert count_of({"says": "x", "metric": "y", **limits}, values) == expected


def test_a_sweep_has_a_row_for_each_value_and_variant(results, page):
    records, names, _, sweep = _views(results, "toy_swept")
    assert sweep.heads == ["cut (toy units)", "variant", "tail", "gap", "a tail was heavy (tail above 2)"]
    assert [row[0] for row in sweep.rows] == [text for text in ("0", "1", "4") for _ in names]
    for index, value in enumerate(("0", "1", "4")):
        for row, name in zip([row for row in sweep.rows if row[0] == value], names, strict=True):
            tails = [record.data["variants"][name]["sweep"]["tail"][index] for record in records]
            assert row[4] == f"{sum(tail > 2 for tail in tails)} of 12"
    assert [row[3] for row in sweep.rows][: len(names)] == ["–"] * len(names)
    assert sweep.rows[-1][3] == "0"
    assert page.read_text().count("<h3>By cut (toy units)</h3>") == 1


def test_a_name_breaks_between_words_and_a_number_nowhere():
    assert _breakable("em.soft_max") == "em.<wbr>soft_<wbr>max"
    assert _breakable("0.25, 1 < 2.5") == "0.25, 1 &lt; 2.5"


def test_a_sweep_of_one_value_is_a_table_alone(results):
    records, names, *_ = _views(results, "toy_swept")
    for record in records:
        record.data["sweep"]["values"] = record.data["sweep"]["values"][:1]
        for variant in record.data["variants"].values():
            variant["sweep"] = {curve: values[:1] for curve, values in variant["sweep"].items()}
    sweep = sweep_section(records, names, dict.fromkeys(names, "#000000"))
    assert (sweep.picture, len(sweep.rows)) == ("", len(names))


@pytest.mark.parametrize("without", ["one", "all"])
def test_seeds_and_sweeps_of_open_runs_that_broke_off(results, without):
    records, names, *_ = _views(results, "toy_swept")
    for record in records if without == "all" else records[:1]:
        broken = record.data["variants"][names[1]]
        broken.update(diverged_at=1, sweep=None)
    colours = dict.fromkeys(names, "#000000")
    seeds, sweep = seeds_section(records, names, colours), sweep_section(records, names, colours)
    left = {"one": "of 11", "all": "–"}[without]
    assert seeds.rows[1][-1].endswith(left)
    assert sweep.rows[1][-1].endswith(left)
    assert seeds.rows[0][-1].endswith("of 12")


def test_other_methods_have_a_row_each(results, page, parsed):
    records = next(found.records for found in read_all(results) if found.name == "toy_beside")
    for record, seconds in zip(records, (0.5, 1.5), strict=True):
        record.data["methods"]["trained"]["walk <b>on</b>"]["seconds_per_step"] = seconds
    methods = methods_section(records)
    assert methods.heads == ["method", "best on the way", "at lap", "at the end", "first weight", "time per lap"]
    walk, jump, elsewhere = methods.rows
    # The objective is the better the lower. Seed 0 goes 3, 1, 2, and seed 1 goes 3, 2, 2.
    assert walk == ["walk <b>on</b>", "1.5 (1 … 2)", "5", "2", "0.0625 (0 … 0.125)", "1 s (500 ms … 1.5 s)"]
    assert jump == ["jump", "–", "–", "0.5", "–", "–"]
    assert elsewhere == ["elsewhere <b>1999</b>", "–", "–", "0.25", "–", "–"]
    assert methods.note == (
        " The time per lap is measured without the evaluations, while nothing else runs. "
        "Rows with a single number are published values. "
        "A horizontal line in the picture is a method of which only the end is known."
    )
    for record in records:
        record.data["methods"]["trained"]["walk <b>on</b>"]["seconds_per_step"] = None
        record.data["config"]["references"] = {}
    untimed = methods_section(records)
    assert untimed.heads == methods.heads[:-1]
    assert untimed.note == " A horizontal line in the picture is a method of which only the end is known."
    text = page.read_text()
    beside = [found for found in read_all(results) if found.records[-1].data["methods"] is not None]
    assert text.count("<h3>Other methods</h3>") == len(beside)
    assert "walk &lt;b&gt;on&lt;/b&gt;" in text
    assert "<b>1999" not in text


def test_a_plateau_is_reached_at_its_first_step(results):
    records = next(found.records for found in read_all(results) if found.name == "toy_beside")
    for record in records:
        record.data["methods"]["trained"]["walk <b>on</b>"]["metrics"]["objective"] = [3.0, 1.0, 1.0 - 1e-13]
    assert methods_section(records).rows[0][1:3] == ["1", "5"]


def _ended(dtype, pairs):
    """Return records of runs that ended at these objectives, blocked and open; the lower the better."""
    return [
        Record(
            seed,
            {
                "config": {"dtype": dtype},
                "objective": {"label": "loss", "higher_is_better": False},
                "variants": {
                    name: {"diverged_at": 1 if math.isnan(value) else None, "metrics": {"objective": [value]}}
                    for name, value in ((BLOCKED, blocked), ("open", opened))
                },
            },
            {},
        )
        for seed, (blocked, opened) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("dtype", "pairs", "training", "outcome"),
    [
        ("float64", [(2, 2.4), (2, 2.5), (2, 2.6)], "better by 0.5 (0.25 to 0.75)", "better in 3 and worse in 0 of 3"),
        ("float64", [(2, 1.6), (2, 1.5), (2, 1.4)], "worse by 0.5 (0.25 to 0.75)", "better in 0 and worse in 3 of 3"),
        (
            "float64",
            [(2, 2 + 1e-12), (2, 2.5), (2, 3)],
            "undecided",
            "better in 2 and worse in 0 of 3 seeds, typically 0.5 (-0.7",
        ),
        (
            "float64",
            [(2, 2 - 1e-12), (2, 2 + 1e-12)],
            "the same",
            "at the same value with and without the block, up to",
        ),
        (
            "float64",
            [(2, 2), (2, 2)],
            "the same",
            "at exactly the same value with and without the block, in every seed.",
        ),
        ("float64", [(2, 2)], "the same", "at exactly the same value with and without the block, in one seed."),
        (
            "float64",
            [(2, 2 - 1e-12), (2, 1.5), (2, 2.5)],
            "undecided",
            "better in 1 and worse in 1 of 3 seeds, typically 0 ",
        ),
        (
            "float64",
            [(2, 2 + gain) for gain in (1, 2, 3, 4, 5, 90)],
            "better by 3.5 (1 to 90)",
            "better in 6 and worse in 0",
        ),
        (
            "float64",
            [(2, 2 + gain) for gain in (-1, 2, 3, 4, 5, 9)],
            "undecided",
            "better in 5 and worse in 1 of 6 seeds",
        ),
        ("float64", [(2, 2 + gain) for gain in (-1, 2, 3, 4, 5, 6, 7, 8, 9)], "better by 5 (2 to 8)", "of 9 seeds"),
        ("float64", [(2, 3)], "undecided", "ends 1 better in the one seed, which decides nothing."),
        ("float32", [(2, 2 + 2e-6), (2, 2 + 3e-6)], "the same", "up to rounding"),
        ("float64", [(2, math.nan), (2, math.nan)], "open runs break off", "In 2 of 2 seeds the open run broke off"),
        ("float64", [(math.nan, 2), (math.nan, 1)], "blocked runs break off", "2 seeds the blocked run broke off"),
    ],
)
def test_better_and_worse_are_said_where_the_interval_excludes_zero(dtype, pairs, training, outcome):
    records = _ended(dtype, pairs)
    assert training_effect(records, "open") == training
    assert outcome in outcome_of(records, "open")


@pytest.mark.parametrize(
    ("pairs", "size"),
    [
        ([(2, 10)] * 6, 0.8),
        ([(2e-9, 1e-8)] * 6, 0.8),
        ([(0, 3)] * 6, 1.0),
        ([(2, math.nan), *[(2, 10)] * 6], 0.8),
        ([(10, 2)] * 6, 0.0),
        ([(2, 2)] * 6, 0.0),
        ([(2, 3), (2, 1)], 0.0),
    ],
)
def test_a_gain_counts_by_its_share_of_the_largest_final_objective(pairs, size):
    records = _ended("float64", pairs)
    assert _size(records, "open", compared(records, "open")) == pytest.approx(size)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((0.15, 0.161), "With the block, the loss ends 0.156 (0.15 to 0.16) better"),
        ((0.1551, 0.1569), "With the block, the loss ends 0.156 (0.155 to 0.157) better"),
        ((0.156, 0.156), "With the block, the loss ends 0.156 better"),
        ((math.nan, math.nan), "With the block, the loss ends 0.156 better"),
    ],
)
def test_the_ends_of_an_interval_are_two_numbers(ends, text):
    found = Difference(
        "better", [0.156] * 5, exact=False, size=0.156, low=ends[0], high=ends[1], broken=0, both_broken=0
    )
    assert _effect_on_training(found, "loss") == f"{text}: better in 5 and worse in 0 of 5 seeds."


VERDICTS = {
    "no-op": ("no-op", []),
    "redundant": ("redundant", []),
    "noise": ("below the noise of 0.5 %", []),
    "partial": ("partial", []),
    "cuts": ("cuts all paths", ["bias", "ws[1]"]),
    "makes": ("makes the gradient", ["ws[0]"]),
}


def _written(kind, parameters=None):
    """Return a verdict as a record has it."""
    label, known = VERDICTS[kind]
    parameters = known if parameters is None else parameters
    preposition = {"cuts": "to", "makes": "of"}.get(kind)
    text = f"{label} {preposition} [{', '.join(parameters)}]" if preposition else label
    return {"kind": kind, "parameters": parameters, "label": label, "text": text}


def _effect(kind, *, ratio=1.0, cosine=1.0, leak=0.0):
    return {"verdict": _written(kind), "ratio": ratio, "cosine": cosine, "leak": leak}


TURNED = {"ratio": 2.0, "cosine": math.cos(math.radians(30)), "leak": 1.2}
MADE = {"ratio": 0.0, "cosine": None, "leak": 9.66}  # of a straight-through estimator: opened, nothing is left


@pytest.mark.parametrize(
    ("kind", "numbers", "expected"),
    [
        ("no-op", {}, "No gradient reaches this block, so it has nothing to stop."),
        ("redundant", {}, "Opening the block does not change a single bit of the gradient: the leak is zero."),
        ("redundant", {"leak": 1e-17}, "by no more than the rounding of floating-point numbers: the leak is"),
        ("noise", {"leak": 1e-3}, "by no more than the rounding in this low precision: a leak, if there is"),
        (
            "partial",
            TURNED,
            "Opening the block turns the gradient by 30° and makes it 2 times as long, before the first step and once "
            "the model is trained.",
        ),
        ("cuts", TURNED, "is trained. With the block in place no gradient reaches bias, ws[1] at all."),
        (
            "makes",
            MADE,
            "Opening the block makes the gradient vanish, before the first step and once the model is trained. The "
            "block itself makes the gradient of ws[0]: without the block it is zero.",
        ),
    ],
)
def test_a_verdict_in_a_sentence(kind, numbers, expected):
    effects = [_effect(kind, **numbers)] * 3
    sentence = meaning_of(_written(kind), effects, effects)
    assert expected in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ([TURNED], "turns the gradient by 30° and makes it 2 times as long"),
        ([TURNED, TURNED, MADE], "turns the gradient by 30° and makes it 2 times as long"),
        ([{**TURNED, "ratio": 1.004}], "turns the gradient by 30° and keeps its length"),
        ([MADE], "makes the gradient vanish"),
        ([{**MADE, "ratio": 1e-16, "cosine": 0.3}], "makes the gradient vanish"),
        ([{"ratio": 3e7, "cosine": 0.5, "leak": 1.0}], "makes a vanished gradient 3e+07 times as long"),
        ([{"ratio": None, "cosine": None, "leak": 2.0}], "lets a gradient through where there is none with the block"),
        ([{"ratio": None, "cosine": None, "leak": 0.0}], "leaves a zero gradient at zero"),
        ([{"ratio": None, "cosine": None, "leak": None}], "makes the gradient infinite or NaN"),
    ],
    ids=[
        "turned",
        "turned in most seeds",
        "turned alone",
        "made",
        "made to rounding",
        "vanished",
        "out of nothing",
        "zero",
        "nan",
    ],
)
def test_what_opening_does_to_the_gradient(effects, expected):
    assert _turn(effects) == expected


def test_what_is_nothing_at_first_may_be_something_later():
    sentence = meaning_of(_written("redundant"), [_effect("redundant")], [_effect("partial", **TURNED)])
    assert sentence == (
        "Opening the block turns the gradient by 0° and keeps its length before the first step, and turns the gradient "
        "by 30° and makes it 2 times as long once the model is trained."
    )


@pytest.mark.parametrize(
    ("verdicts", "kind", "label", "text"),
    [
        (
            [_written("cuts", ["a[0]"]), _written("cuts", ["a[0]"])],
            "cuts",
            "cuts all paths",
            "cuts all paths to [a[0]]",
        ),
        (
            [_written("makes", ["a"]), _written("makes", ["a", "b"]), _written("makes", ["a"])],
            "makes",
            "makes the gradient",
            "makes the gradient of [a] in 2, makes the gradient of [a, b] in 1 of 3 seeds",
        ),
        (
            [_written("partial"), _written("redundant"), _written("redundant")],
            "differs",
            "differs between seeds",
            "redundant in 2, partial in 1 of 3 seeds",
        ),
        (
            [_written("noise"), {**_written("noise"), "text": "below the noise of 2 %"}],
            "noise",
            "below the noise",
            "below the noise of 0.5 % in 1, below the noise of 2 % in 1 of 2 seeds",
        ),
    ],
    ids=["the same", "other parameters", "other kinds", "other numbers"],
)
def test_the_verdict_of_all_seeds(verdicts, kind, label, text):
    found = _agreed(verdicts)
    assert (found["kind"], found["label"], found["text"]) == (kind, label, text)
    effects = [{**_effect("partial", **TURNED), "verdict": verdict} for verdict in verdicts]
    assert ("of 3 seeds." in meaning_of(found, effects, effects)) is (len(verdicts) == 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no-op", _written("no-op")),
        ("redundant", _written("redundant")),
        ("cuts all paths to [bias, ws[1]]", _written("cuts")),
    ],
)
def test_a_verdict_of_an_older_record_is_read(text, expected):
    assert verdict_of({"verdict": text}) == expected


def test_the_page_has_every_kind_of_verdict_and_explains_it(results, tmp_path):
    found = [experiment for experiment in read_all(results) if experiment.name == "toy_report"]
    legend = dict(re.findall(r'<li><span class="verdict ([\w-]+)">(.+?)</span>', _text_of(found, tmp_path)))
    assert legend.keys() == VERDICTS.keys()
    for kind, (label, _) in VERDICTS.items():
        assert label.startswith(legend[kind])
        for record in found[0].records:
            for effect in record.data["comparison"]["first"]["effects"].values():
                effect["verdict"] = _written(kind)
        text = _text_of(found, tmp_path)
        variants = len(found[0].records[0].data["variants"]) - 1
        pills = re.findall(r'<(?:td data-head="verdict"|p)><span class="verdict ([\w-]+)">(.+?)</span>', text)
        assert pills == [(kind, label)] * 2 * variants  # in the table of all, and beside the block
        assert ("reaches bias, ws[1] at all" in text) is (kind == "cuts")
        assert ("makes the gradient of ws[0]:" in text) is (kind == "makes")


def _text_of(found, folder):
    return write_single(found, folder / "index.html").read_text()


def test_references_are_lines_of_the_training_where_there_are_no_other_methods(results, tmp_path):
    found = [experiment for experiment in read_all(results) if experiment.name == "toy_report"]
    before = write_single(found, tmp_path / "before.html").read_text()
    for record in found[0].records:
        record.data["config"]["references"] = {"elsewhere": 0.25}
    (level,) = reference_levels(found[0].records[-1].data)
    assert (level.label, level.value) == ("elsewhere", 0.25)
    after = write_single(found, tmp_path / "after.html").read_text()
    assert re.search(r'aria-label="[^"]*; elsewhere 0.25', after)
    assert "<span>elsewhere</span>" in after
    assert "elsewhere" not in before


def test_a_plane_is_drawn_in_place_of_the_curves_of_its_coordinates(results, tmp_path):
    found = [experiment for experiment in read_all(results) if experiment.name == "toy_report"]
    for record in found[0].records:
        record.data["plane"] = ["psi", "theta"]
        for variant in record.data["variants"].values():
            count = len(variant["steps"])
            variant["metrics"] |= {"psi": [*range(count - 1), None], "theta": [0.5] * count}
    text = write_single(found, tmp_path / "plane.html").read_text()
    last = count - 2
    assert f"the path of (psi, theta): blocked from (0, 0.5) to ({last}, 0.5)" in text
    assert "psi, over the training step" not in text


def test_a_plane_has_equal_units_and_a_dot_where_each_path_begins():
    paths = [Path(Key("blocked", COLOURS[0]), [(0, 0), (3, 0), (3, 4)]), Path(Key("broken", COLOURS[1]), [])]
    svg = draw_plane(
        "x", "y", [("one", paths), ("other", [Path(Key("far", COLOURS[2]), [(9, -2)])]), ("none", paths[1:])]
    )
    (a, b, c) = (tuple(map(float, place.split())) for place in re.search(r'd="M([^"]*L[^"]*)"', svg)[1].split("L"))
    assert (b[0] - a[0]) / 3 == pytest.approx((b[1] - c[1]) / 4, rel=0.01)
    assert (b[1], c[0]) == (a[1], b[0])
    assert f'cx="{a[0]}" cy="{a[1]}"' in svg
    assert "one, the path of (x, y): blocked from (0, 0) to (3, 4)." in svg
    assert svg.count("<svg viewBox") == 2
    assert "broken" not in svg
    assert draw_plane("x", "y", [("none", paths[1:])]).count("viewBox") == 0


def test_records_from_before_there_were_events_are_still_drawn(results, tmp_path):
    found = [experiment for experiment in read_all(results) if experiment.name == "toy_swept"]
    for experiment in found:
        for record in experiment.records:
            del record.data["events"], record.data["sweep"], record.data["methods"], record.data["config"]["references"]
            for variant in record.data["variants"].values():
                del variant["sweep"]
    text = write_single(found, tmp_path / "old.html").read_text()
    assert "The 12 seeds" in text
    assert "By cut" not in text


def test_an_event_has_one_limit():
    from toolkit.runner import Event

    for limits in ({}, {"below": 1.0, "above": 2.0}):
        with pytest.raises(ValueError, match="`below` or `above` should be given, not both"):
            Event(says="x", metric="y", **limits)


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium and chromedriver on this machine")
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1100,900",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield started
    started.quit()


def _open(browser, page, width, scheme):
    """Show a page in a window of this width, with every part unfolded."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")


def _complaints(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_the_shortest_and_the_longest_gradient_have_a_place():
    """The axis ends at the inverse of the shortest, whose inverse is rounded to either side of it."""
    ratios = np.random.default_rng(0).uniform(0.01, 0.5, 300).tolist()
    for ratio in [*ratios, *(1 / ratio for ratio in ratios)]:
        assert "nan" not in draw_parameters(["weight"], [("open", [30.0], [ratio], "var(--open-1)")])


in_a_browser = [pytest.mark.browser, pytest.mark.filterwarnings("ignore")]


class TestInABrowser:
    pytestmark = in_a_browser

    def test_every_picture_is_shown_without_an_error(self, page, browser):
        _open(browser, page, 1100, "light")
        assert browser.title == "What each stop-gradient does"
        boxes = browser.execute_script(
            "return [...document.querySelectorAll('figure')].map(figure => "
            "  [...figure.querySelectorAll('.panel > svg, .sketch')].map(svg => {"
            "    const box = svg.getBoundingClientRect(), drawn = svg.getBBox();"
            "    return [box.width, box.height, drawn.width, drawn.height, svg.checkVisibility()]; }))"
        )
        assert len(boxes) == len(re.findall(r"<figure>", page.read_text())) > 4 * len(CONFIGS)
        for pictures in boxes:
            assert pictures
            for width, height, drawn_width, drawn_height, visible in pictures:
                assert visible
                assert width > 40
                assert min(height, drawn_width, drawn_height) > 15, "one bar with its text is 18 units high"
        assert _complaints(browser) == []

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [390, 1400])
    def test_a_page_can_be_read(self, site, page, browser, width, scheme):
        """Nothing is cut off, texts are 12 pixels high at least, and have a contrast of 4.5 at least."""
        names = ("toy_swept", "toy_beside", "em_iris")
        for file in (site, page, *(site.parent / "pages" / f"{name}.html" for name in names)):
            _open(browser, file, width, scheme)
            assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0, file
            texts = browser.execute_script(_TEXTS)
            assert len(texts) > 50
            for text, colour, ground, size, left, right in texts:
                assert size >= 12, f"{file.name}: {text}"
                assert _contrast(colour, ground) >= 4.5, f"{file.name}: {text}"
                assert left >= -1, f"{file.name}: {text}"
                assert right <= width + 1, f"{file.name}: {text}"
            assert _complaints(browser) == []

    def test_a_picture_in_a_card_has_text_of_twelve_pixels(self, site, browser):
        for width in (390, 1400):
            _open(browser, site, width, "light")
            widths = browser.execute_script("return [...document.querySelectorAll('img')].map(i => i.width)")
            assert len(widths) > len(CONFIGS)
            assert min(widths) >= 320, "a picture is 320 units wide, its text 12 units high"

    def test_values_are_told_on_hover(self, site, browser):
        _open(browser, site.parent / "pages" / "em_iris.html", 1400, "light")
        told = browser.execute_script(
            "return [...document.querySelectorAll('.panel > svg')].map(svg => {"
            "  const marks = svg.querySelectorAll('[data-tip]'), last = marks[marks.length - 1];"
            "  last.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 9, clientY: 9}));"
            "  return [marks.length, last.dataset.tip, document.getElementById('tip').textContent]; })"
        )
        assert len(told) >= 6
        for count, value, shown in told:
            assert count > 1
            assert shown == value != ""
        assert any(re.match(r"training step 2\nblocked: -[\d.]+\nopen: -", shown) for *_, shown in told)

    def test_a_picture_opens_large_and_closes(self, site, browser):
        _open(browser, site.parent / "pages" / "em_iris.html", 1400, "light")
        width, large, open_, closed = browser.execute_script(
            "const panel = [...document.querySelectorAll('.panel')].at(-1), dialog = document.querySelector('dialog');"
            "panel.querySelector('button').click();"
            "const sizes = [panel.querySelector('svg').clientWidth, dialog.querySelector('svg').clientWidth];"
            "const open = dialog.open; dialog.querySelector('button').click();"
            "return [...sizes, open, !dialog.open]"
        )
        assert large > 1.5 * width
        assert open_
        assert closed

    @pytest.mark.slow
    def test_cards_are_filtered_and_searched(self, site, browser):
        _open(browser, site, 1400, "light")
        shown = (
            "document.querySelector('#search').value = arguments[0];"
            "document.querySelector('#search').dispatchEvent(new Event('input', {bubbles: true}));"
            "return [...document.querySelectorAll('.card')].filter(card => !card.hidden).length"
        )
        assert browser.execute_script(shown, "") == len(read_all(site.parent))
        assert 1 <= browser.execute_script(shown, "species of IRIS") < 5
        assert browser.execute_script(shown, "no such words") == 0
        assert browser.execute_script(shown, "") > 5
        redundant = browser.execute_script(
            "document.querySelector('#verdict').value = 'redundant';"
            "document.querySelector('#subject').value = 'softmax';"
            "document.querySelector('#subject').dispatchEvent(new Event('input', {bubbles: true}));"
            "return [...document.querySelectorAll('.card')].filter(card => !card.hidden).map(card => card.innerText)"
        )
        assert len(redundant) == 2
        assert all("redundant" in text and "softmax." in text for text in redundant)


# Every text of a page: itself, its colour, the colour behind it, its height, and its ends.
_TEXTS = """
const found = [], range = document.createRange();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, element = node.parentElement, style = getComputedStyle(element);
  const unseen = element.closest("script, style, title, option, thead") || !element.checkVisibility();
  if (!node.data.trim() || unseen) continue;
  range.selectNode(node);
  const box = range.getBoundingClientRect(), chart = element.closest("svg");
  if (!box.width) continue;
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const unit = chart ? chart.clientWidth / chart.viewBox.baseVal.width : 1;
  const dark = chart?.matches(".sketch") && node.data === "block";
  found.push([node.data, chart ? style.fill : style.color,
    dark ? getComputedStyle(document.body).color : getComputedStyle(behind).backgroundColor,
    unit * parseFloat(style.fontSize), box.left, box.right]);
}
return found;
"""


def _luminance(colour):
    """Return the relative luminance of ``#rrggbb`` or ``rgb(r, g, b)``, as WCAG 2 defines it."""
    parts = [int(part, 16) for part in re.findall(r"\w\w", colour)] if colour[0] == "#" else None
    parts = [part / 255 for part in parts or map(int, re.findall(r"\d+", colour)[:3])]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [_LIGHT, _DARK], ids=["light", "dark"])
def test_lines_have_a_contrast_of_three_and_no_two_share_a_colour(palette):
    names = [colour.removeprefix("var(--").removesuffix(")") for colour in (*COLOURS, *METHODS, "var(--soft)")]
    assert all(_contrast(palette[name], palette["paper"]) >= 3 for name in names)
    assert len({palette[name] for name in names}) == len(names)


@pytest.fixture(scope="session")
def site(results):
    return write_site(results)


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file_of_it(site):
    pages = [site, *(site.parent / "pages").glob("*.html")]
    assert len(pages) == 1 + len(read_all(site.parent))
    for page in pages:
        for reference in _Page(page.read_text()).references:
            if not reference.startswith(("#", "data:")):
                assert (page.parent / reference).is_file(), f"{page.name}: {reference}"


def test_the_site_is_light(site):
    """Pages are sent over slow lines."""
    assert site.stat().st_size < 500_000
    assert max(page.stat().st_size for page in (site.parent / "pages").iterdir()) < 1_500_000


def test_cards_of_clear_gains_come_first_and_are_named_by_the_room_of_their_blocks(site):
    cards = re.findall(r"<article.*?</article>", site.read_text(), re.DOTALL)
    clear = ["training with the block: better" in card for card in cards]
    assert any(clear)
    assert clear == sorted(clear, reverse=True)
    subjects = {re.search(r'data-subject="([^"]*)"', card)[1] for card in cards}
    assert subjects >= {"em", "adversarial", "policy gradient", "self supervised"}


def test_every_picture_says_which_results_it_shows(site):
    found = re.findall(r'<img [^>]*alt="([^"]*)"', site.read_text())
    assert len(found) > len(CONFIGS)
    assert all("training with the block: " in text for text in found)
    pictures = re.findall(r'aria-label="([^"]*)"', (site.parent / "pages" / "em_iris.html").read_text())
    assert any(
        re.fullmatch(r"Gradients before the first step: blocked; open: \d+°, length ×[\d.]+\.", p) for p in pictures
    )
    assert any(re.fullmatch(r"log-likeli.*: blocked -[\d.]+ at 0, -[\d.]+ at 2; open -.*\.", p) for p in pictures)
    assert any(re.fullmatch(r"graph memory: blocked [\d.]+ KiB, open [\d.]+ KiB\.", p) for p in pictures)
    assert all(re.search(r"\d", text) for text in pictures if text != "On this page")


def test_every_head_of_a_table_has_a_scope(site, page):
    for file in (page, *(site.parent / "pages").glob("*.html")):
        heads = re.findall(r"<th\b[^>]*>", file.read_text())
        assert heads
        assert all(re.search(r'scope="(col|row)"', head) for head in heads)


def test_a_name_breaks_between_its_words_alone(site):
    text = (site.parent / "pages" / "em_iris.html").read_text()
    assert "em.<wbr>responsibilities" in text
    assert "overflow-wrap: anywhere" not in re.sub(r"\.line \{.*?\}", "", text), "code of the zoo may break anywhere"


def test_a_card_tells_that_its_values_are_not_the_configs(results, tmp_path):
    run_config(load_config(results.parent / "toy_report.toml", ["steps=4", "seeds=1"]), tmp_path)
    text = " ".join(write_site(tmp_path).read_text().split())
    assert "With other values than the config's: <code>steps=4" in text
    (found,) = read_all(tmp_path)
    single = " ".join(write_single([found], tmp_path / "single.html").read_text().split())
    assert "<small>with <code>steps=4" in single


def test_only_the_named_pages_are_drawn_again(site):
    pages = {page: page.stat().st_mtime_ns for page in (site.parent / "pages").glob("*.html")}
    write_site(site.parent, ["toy_report"])
    changed = {page.stem for page, time in pages.items() if page.stat().st_mtime_ns != time}
    assert changed == {"toy_report"}


def test_the_command_names_the_file_that_was_run():
    data = {"overrides": ["steps=3"], "path": "configs/own_data/mine here.toml"}
    expected = "stopgrad run 'configs/own_data/mine here.toml' --set steps=3"
    assert _command("mine here", data) == expected
    assert _command("old", {"overrides": []}) == "stopgrad run configs/old.toml"


def _tips(svg):
    """Return the ends of all arrows, in units of the chart."""
    tips = []
    for x, y, turn, path in re.findall(r'translate\((\S+) (\S+)\) rotate\((\S+)\)" d="([^"]+)"', svg):
        angle, length = math.radians(float(turn)), float(re.search(r"L(\S+) 0", path).group(1))
        tips.append((float(x) + length * math.cos(angle), float(y) + length * math.sin(angle), length))
    return tips


BLOCKED_ARROW = Arrow(label="blocked", ratio=1.0, angle=0.0, colour="#000000")


@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.3, 1.0, 1.65, 111.0, 1e12])
@pytest.mark.parametrize("angle", [0, 29, 90, 180])
def test_arrows_are_neither_cut_off_nor_dots(ratio, angle):
    other = Arrow(label="open", ratio=ratio, angle=angle, colour="#ff0000")
    svg = draw_arrows([("before", [BLOCKED_ARROW, other])])
    width, height = (float(size) for size in re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups())
    blocked, opened = _tips(svg)
    for x, y, length in (blocked, opened):
        assert 0 <= x <= width
        assert 8 <= y <= height
        assert length >= 8
    assert (opened[2] - blocked[2]) * (ratio - 1) >= 0
    assert math.atan2(148 - opened[1], opened[0] - 160) == pytest.approx(math.radians(angle), abs=1e-3)


@pytest.mark.parametrize("ratio", [1e-9, 0.01, 111.0, 1.35e12, 1e200])
def test_lengths_of_half_circles_do_not_touch(ratio):
    svg = draw_arrows([("after", [BLOCKED_ARROW, Arrow(label="open", ratio=ratio, angle=90, colour="#ff0000")])])
    numbers = sorted((float(x), len(number)) for x, number in re.findall(r'x="(\S+)" y="164.0"[^>]*>(×[^<]+)<', svg))
    assert numbers
    for (x, length), (following, next_length) in itertools.pairwise(numbers):
        assert x + 3.6 * length < following - 3.6 * next_length


def test_an_arrow_without_a_length_is_told_and_not_drawn():
    vanished = Arrow(label="open", ratio=0.0, angle=math.nan, colour="#ff0000")
    svg = draw_arrows([("before", [BLOCKED_ARROW, vanished])])
    assert len(_tips(svg)) == 1
    assert "open: zero gradient" in svg


def _centres(svg):
    return [float(x) for x in re.findall(r'cx="([\d.]+)"', svg)]


def _band(positions, rows):
    return Band("open", np.asarray(positions, dtype=float), np.asarray(rows, dtype=float), COLOURS[1])


def test_a_wide_sweep_has_a_logarithmic_axis():
    for positions in ([1e-3, 1.0, 1e3], [1.0, 1e15, 1e30]):
        left, middle, right = _centres(draw_sweep("rate", positions, [("loss", [_band(positions, [[1, 2, 3]])])]))
        assert middle - left == pytest.approx(right - middle, abs=0.11), "places have one decimal"
    with_zero = _centres(draw_sweep("rate", [0.0, 1.0, 1e30], [("loss", [_band([0.0, 1.0, 1e30], [[1, 2, 3]])])]))
    assert with_zero[1] - with_zero[0] > 1
    left, middle, right = _centres(draw_sweep("rate", [1, 2, 4], [("loss", [_band([1, 2, 4], [[1, 2, 3]])])]))
    assert 2 * (middle - left) == pytest.approx(right - middle, abs=0.21)


def test_a_best_value_of_zero_is_told_from_small_values():
    bands = [_band([0, 1, 2], [rows]) for rows in ([2.0, 2.0, 2.0], [2.0, 100.0, 6000.0])]
    svg = draw_curves("error", "step", bands, [Level("best possible", 0.0)])
    lines = re.findall(r'<path class="line".*? d="M[\d.]+ ([\d.]+)', svg)
    low_at, _, best_at = map(float, lines)
    assert best_at - low_at > 10, "the picture is 200 high"


@pytest.mark.parametrize(("n_evaluations", "n_dots"), [(2, 2), (6, 6), (7, 0)])
def test_a_curve_of_few_evaluations_shows_each_of_them(n_evaluations, n_dots):
    steps = [float(step) for step in range(n_evaluations)]
    svg = draw_curves("error", "step", [_band(steps, [steps])], [])
    assert svg.count('class="dot"') == n_dots


def test_an_angle_is_the_same_in_the_picture_and_in_its_sentence():
    effects = [{"ratio": 1.0, "cosine": math.cos(math.radians(angle)), "leak": 0.2} for angle in (9, 17)]
    records = [Record(i, {"comparison": {"first": {"effects": {"a": effect}}}}, {}) for i, effect in enumerate(effects)]
    _, arrow = _arrows(records, "first", {"a": COLOURS[1]})
    assert arrow.angle == pytest.approx(13)
    assert _turn(effects) == "turns the gradient by 13° and keeps its length"


def test_a_training_step_is_an_integer():
    svg = draw_bands([("loss", [_band([0, 1, 2], [[3.0, 2.0, 1.0]])], None)], [])
    assert re.findall(r'text-anchor="middle">(\S+?)<', svg) == ["0", "1", "2"]


def test_values_at_rounding_leave_an_axis_linear():
    assert fit([1e-16, -3e-17, 0.0, 8.0, -5.0], 0, 1).kind == "linear"
    assert fit([-1.0, -2.0, -3.0, -5e7], 0, 1).kind == "asinh"
    assert fit([1e-11, 1e-3], 0, 1).kind == "log"


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 1.0],
        [0.0, 0.0],
        [math.nan, math.nan],
        [1e-300, 1e300],
        [1e-240, 1e240],
        [-1e250, 3.0],
        [5e-324, 1.0],
        [1e308, -1e308],
        [7.0],
    ],
)
def test_any_values_have_a_place_and_a_number(values):
    positions = list(range(len(values)))
    svg = draw_bands([("loss", [_band(positions, [values])], None)], [])
    svg += draw_strips([("loss", [Strip("open", np.asarray(values), COLOURS[1])], 0.0)])
    assert "nan" not in re.sub(r"<title>.*?</title>", "", svg)
    assert "inf" not in svg
    numbers = [float(x) for x in re.findall(r'<text x="(\S+?)"', svg)]
    assert numbers
    assert all(0 <= x <= 320 for x in numbers)


def test_the_numbers_of_an_axis_differ_from_each_other():
    for low, high in ((0, 1), (-1.2345, -1.2344), (1e6, 1e6 + 3), (1e-9, 3e-9), (1e-9, 1e9), (-1e9, 1e3), (0, 1e30)):
        svg, _ = frame(fit([0, 10], 0, 1), fit([low, (low + high) / 3, high], 176, 8))
        numbers = re.findall(r'text-anchor="end">(\S+?)<', svg)
        assert len(numbers) >= 3
        assert len(set(numbers)) == len(numbers)
        heights = sorted(float(y) for y in re.findall(r'y="(\S+?)" text-anchor="end"', svg))
        assert min(b - a for a, b in itertools.pairwise(heights)) >= 12, "texts are 12 units high"


def test_a_line_breaks_where_a_value_is_missing():
    key = Key("open", COLOURS[1])
    assert line([(0, 1), (1, 2), (2, math.nan), (3, 4), (4, 5)], key).count("M") == 2
    assert 'd="M0.0 1.0h.01"' in line([(0, 1), (1, math.nan)], key)
    assert line([(0, math.nan)], key) == ""


@pytest.mark.parametrize(
    ("opened", "says"),
    [
        ("a", "Opening the block turns it; with the block in place 1, without the block 2, and 3 with it."),
        ("ab", "Opening both blocks turns it; with the blocks in place 1, without the blocks 2, and 3 with them."),
        ("abc", "Opening all 3 blocks turns it; with the blocks in place 1, without the blocks 2, and 3 with them."),
    ],
)
def test_several_blocks_are_not_called_the_block(opened, says):
    sentence = "Opening the block turns it; with the block in place 1, without the block 2, and 3 with it."
    assert of_blocks(opened, sentence) == says
