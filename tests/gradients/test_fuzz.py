"""Hundreds of random programs: every answer of `compare` and `audit` is that of the program without the stops."""

import dataclasses
import functools
import re

import fuzzing
import pytest
import torch
from fuzzing import Program, Statement, check, generate, script, shrink, truth

from toolkit.gradients import compare
from toolkit.gradients.verdict import Verdict

# Under a dispatch mode torch itself crashes on some of the programs.
pytestmark = pytest.mark.keeps_its_sums

CHUNKS, EACH = 10, 30


@functools.cache
def _findings(chunk):
    return {seed: check(generate(seed)) for seed in range(EACH * chunk, EACH * (chunk + 1))}


@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(2, CHUNKS))])
def test_every_answer_is_the_truth(chunk):
    wrong = {seed: finding.wrong for seed, finding in _findings(chunk).items() if finding.wrong}
    assert not wrong, f"`python tests/fuzzing.py {next(iter(wrong))}` prints the first as a short program"


@pytest.mark.slow
def test_an_answer_is_seldom_refused():
    findings = [finding for chunk in range(CHUNKS) for finding in _findings(chunk).values() if not finding.skipped]
    refused = [reason for finding in findings for reason in finding.refused]
    assert sum(bool(finding.refused) for finding in findings) < 0.02 * len(findings), refused
    assert len(findings) > 0.9 * CHUNKS * EACH, "torch itself refuses some programs, without any stop"
    assert sum(finding.answers for finding in findings) > 2 * len(findings)


# --- the fuzzer itself -------------------------------------------------------------------------------------------


def _program(*texts, dtype="float64", named=True, results=("v1",)):
    """Write statements by hand; each makes v1, v2, ... of the parameter u."""
    statements = tuple(Statement(text, "", f"v{i}", {f"v{i}": "u"}) for i, text in enumerate(texts, 1))
    return Program(0, dtype, named, statements, results)


SQUARE = _program("v1 = u * ⟨a|u⟩ + u.sin()")


def test_a_stop_is_removed_from_the_text():
    lines = "v1 = u * ⟨a|⟨b|u⟩ + 1⟩\nwith ⟦c⟧:\n    v1 = v1 * 2\n@⟦c⟧\ndef f():\n    pass"
    named, bare = _program(lines), _program(lines, named=False)
    assert named.stops == ("a", "b", "c")
    assert 'v1 = u * stop_gradient(stop_gradient(u, "b") + 1, "a")' in named.source()
    assert 'v1 = u * (stop_gradient(u, "b") + 1)' in named.source(["a"])
    assert "v1 = u * ((u) + 1)" in bare.source(["a", "b"])
    assert "v1 = u * ((u).detach() + 1)" in bare.source(["a"])
    assert "    with torch.no_grad():\n        v1 = v1 * 2\n    @torch.no_grad()\n" in bare.source()
    assert "    if True:\n        v1 = v1 * 2\n    # removed\n" in bare.source(["c"])
    assert {bare.source(open).count("\n") for open in ([], ["a"], ["c"])} == {bare.source().count("\n")}


@pytest.mark.parametrize(("open", "factor"), [((), 1), (("a",), 2)])
def test_the_truth_is_that_of_calculus(open, factor):
    found = truth(SQUARE, open)
    params = fuzzing.execute(SQUARE.source())[1]
    torch.set_default_dtype(torch.float32)
    u, weights = params["u"].detach(), torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).reshape(4, 3)
    torch.testing.assert_close(found.gradients["u"], weights * (factor * u + u.cos()))
    assert found.reached == {"u"}


def test_a_seed_is_a_program():
    assert generate(3).source() == generate(3).source() != generate(4).source()


@pytest.mark.slow
def test_every_statement_is_written():
    texts = [generate(seed).marked for seed in range(600)]
    every = [text for group in fuzzing.FLAT.values() for text in group] + list(fuzzing.INSIDE)
    for text in every:
        lines = [line.lstrip("| ") for line in text.splitlines() if line.strip() != "..."]
        patterns = [re.sub(r"\\\$\w", r"\\S+?", re.escape(line)) for line in lines]
        patterns = [re.sub("[⟨⟦]", r"\g<0>\\w+[|]?", pattern) for pattern in patterns]
        assert any(all(re.search(pattern, one) for pattern in patterns) for one in texts), text


def test_right_answers_are_not_blamed():
    assert check(SQUARE) == fuzzing.Finding(answers=1)
    assert check(dataclasses.replace(SQUARE, named=False)) == fuzzing.Finding(answers=1)


def test_a_program_that_fails_is_skipped():
    assert check(_program("v1 = u * ⟨a|undefined⟩")).skipped == "name 'undefined' is not defined"


def test_a_refusal_is_right_where_the_text_without_the_stop_fails():
    assert check(_program("with ⟦a⟧:\n    u.mul_(1)\nv1 = u.sin()")).refused == ()


class _Tampered:
    """A comparison of which some answers are replaced."""

    def __init__(self, found, **replaced):
        self.__dict__.update({name: getattr(found, name) for name in ("loss", "blocked", "effects", "unopened")})
        self.gradient, self.effect, self.reason = found.gradient, found.effect, found.reason
        self.__dict__.update(replaced)


def _effects(found, **changed):
    return [dataclasses.replace(effect, **changed) for effect in found.effects]


def _raising(error):
    def gradient(open):
        raise error

    return gradient


FAULTS = {
    "loss": lambda found: {"loss": found.loss * (1 + 1e-15)},
    "blocked": lambda found: {"blocked": {name: g * (1 + 1e-15) for name, g in found.blocked.items()}},
    "gradient": lambda found: {"gradient": lambda open: found.blocked},
    "leak": lambda found: {"effects": _effects(found, leak=found.effects[0].leak * (1 + 1e-6))},
    "missed": lambda found: {"effects": []},
    "crash": lambda found: {"gradient": _raising(ValueError("not raised by the toolkit"))},
}
VERDICTS = [
    Verdict("no-op"),
    Verdict("redundant"),
    Verdict("noise"),
    Verdict("cuts", ("u",)),
    Verdict("cuts", ("w",)),
    Verdict("makes", ("u",)),
]


def _kinds(monkeypatch, program, tamper):
    monkeypatch.setattr(
        fuzzing, "compare", lambda loss, params: _Tampered(found := compare(loss, params), **tamper(found))
    )
    return {kind for kind, _ in check(program).wrong}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, kind):
    assert _kinds(monkeypatch, SQUARE, FAULTS[kind]) == {kind}


@pytest.mark.parametrize("verdict", VERDICTS, ids=str)
def test_a_wrong_verdict_is_found(monkeypatch, verdict):
    assert _kinds(monkeypatch, SQUARE, lambda found: {"effects": _effects(found, verdict=verdict)}) == {"verdict"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_small_leak_is_not_redundant(monkeypatch, dtype):
    small = _program("v1 = w.sin() + 1e-6 * u * ⟨a|u⟩ + 1e-6 * u.sin()", dtype=dtype)
    tamper = lambda found: {"effects": _effects(found, verdict=Verdict("redundant"))}  # noqa: E731
    assert _kinds(monkeypatch, small, tamper) == {"verdict"}


def test_a_program_whose_block_cuts_may_not_be_called_partial(monkeypatch):
    cut = _program("v1 = u * ⟨a|w⟩")
    assert check(cut).wrong == ()
    partial = lambda found: {"effects": _effects(found, verdict=Verdict("partial"))}  # noqa: E731
    assert _kinds(monkeypatch, cut, partial) == {"verdict"}


def test_a_failure_is_shrunk():
    seed = next(seed for seed in range(1000) if "softmax" in (text := generate(seed).marked) and text.count("⟨") > 3)
    small = shrink(generate(seed), lambda program: "softmax" in program.marked)
    assert len(small.statements) == 1
    assert small.stops in ((), small.stops[:1])


def test_a_script_runs_alone(capsys):
    finding = fuzzing.Finding(wrong=(("leak", "open ('a',): 1 where it is 2"),))
    default = torch.get_default_dtype()
    try:
        exec(compile(script(SQUARE, finding), "script.py", "exec"), {"__name__": "script"})
    finally:
        torch.set_default_dtype(default)
    found = compare(*fuzzing.execute(SQUARE.source()))
    torch.set_default_dtype(default)
    assert f"truth: leak without a {{'u': {found.effects[0].leak}" in capsys.readouterr().out
