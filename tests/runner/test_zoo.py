"""The bug zoo: every bug is found by an audit, every fixed program passes, and each bug is the one that is told."""

import ast
import html
import inspect
import json
import random
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from folders import ROOT

from toolkit import audit, stop_gradient
from toolkit.gradients import AliasWarning, alias_guard, mode_lint
from toolkit.runner._command import main
from toolkit.runner._records import damaged_records, read_zoo, write_zoo
from toolkit.runner._site import write_single
from toolkit.runner._zoo import complaints, examine, read_programs
from toolkit.testing import assert_blocked, assert_flows

PROGRAMS = {program.path.stem: program for program in read_programs(ROOT / "docs" / "zoo")}

every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


@pytest.fixture(autouse=True)
def _in_float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.fixture(scope="module")
def examined():
    return [examine(program) for program in PROGRAMS.values()]


def _audits(name):
    return PROGRAMS[name].audit("buggy"), PROGRAMS[name].audit("fixed")


def _complaints(program, found):
    return complaints(found, moves=program.module.MOVES, stays=program.module.STAYS)


def _setup(name):
    """Return what both variants of a program are made of: the same numbers as in `_audits`."""
    torch.manual_seed(0)
    return PROGRAMS[name].module.setup()


def _blocked(found, network):
    """Return weight and bias of a network's gradient."""
    return [found.blocked[f"{network}.{name}"] for name in ("weight", "bias")]


def _assert_linear(found, network, inputs, cotangents):
    """Assert the gradient of a linear layer by its inputs (N, D) and the cotangents (N, K) of its outputs."""
    weight, bias = _blocked(found, network)
    torch.testing.assert_close(weight, cotangents.T @ inputs, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(bias, cotangents.sum(0), rtol=1e-12, atol=1e-15)


def _score(networks, name, states, actions, weights):
    """Return the cotangents (N, K) of logits under ``-mean_n(weights_n log p(actions_n))``."""
    p = networks[name](states).softmax(1).detach()
    return weights[:, None] * (p - torch.eye(p.shape[1])[actions]) / len(p)


# --- every program -----------------------------------------------------------------------------------------------


def test_there_are_at_least_twelve():
    assert len(PROGRAMS) >= 12
    assert len({program.title for program in PROGRAMS.values()}) == len(PROGRAMS)


@every_program
def test_the_bug_is_found(program):
    found = program.audit("buggy")
    assert found.valid, found.reason
    assert _complaints(program, found)


@every_program
def test_the_fixed_program_passes(program):
    found = program.audit("fixed")
    assert found.valid, found.reason
    assert _complaints(program, found) == []


@every_program
def test_places_that_are_blamed_are_lines_of_the_bug(program):
    lines = {number for number, _ in program.changed_lines()["buggy"]}
    for complaint in _complaints(program, program.audit("buggy")):
        for line in re.findall(rf"{program.path.stem}\.py:(\d+):", complaint):
            assert int(line) in lines


@every_program
def test_a_program_is_plain_torch(program):
    for node in ast.walk(ast.parse(program.source)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} == {"torch"}
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] == "torch"


@every_program
def test_a_program_is_told_and_has_its_sources(program):
    assert re.fullmatch(r"[A-Z`].*\.", program.title)
    assert len(program.story) > 100
    assert program.module.SOURCES
    for source in program.module.SOURCES:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source)


@pytest.mark.portable
@every_program
def test_the_bug_cannot_be_seen_in_the_loss(program):
    """It is as silent as it is told: only two of the bugs change what the loss is, by more than rounding."""
    found, fixed = _audits(program.path.stem)
    same = found.loss == pytest.approx(fixed.loss, rel=1e-12, abs=1e-15)
    assert same is (program.path.stem not in ("forward_mode", "shared_memory"))


@every_program
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_the_assertions_of_the_toolkit_say_the_same(program):
    """What the audit says of a network, `toolkit.testing` says by the graph and the gradients of a comparison."""
    for variant in ("buggy", "fixed"):
        torch.manual_seed(0)
        loss, networks = getattr(program.module, variant)()
        found = audit(loss, networks)
        for assertion, names, fails in (
            (assert_blocked, program.module.STAYS, lambda gradients: any(g.any() for g in gradients)),
            (assert_flows, program.module.MOVES, lambda gradients: not all(g.any() for g in gradients)),
        ):
            for name in names:
                expected = fails([g for key, g in found.blocked.items() if key.startswith(f"{name}.")])
                try:
                    assertion(loss, networks[name])
                except (AssertionError, ValueError):
                    assert expected
                else:
                    assert not expected


# --- the fix is the place that the audit names: to open it is to have the bug back -------------------------------


@pytest.mark.parametrize(
    "name", ["constant_ratio", "forgotten_block", "hidden_by_retain_graph", "library_default", "moving_target"]
)
def test_the_block_of_the_fixed_program_opened_is_the_bug(name):
    found, fixed = _audits(name)
    assert found.effects == []
    (effect,) = fixed.effects
    opened = fixed.gradient([effect.name])
    assert all(torch.equal(opened[key], found.blocked[key]) for key in opened)


def test_the_block_of_the_buggy_program_opened_is_the_fix():
    found, fixed = _audits("misplaced_block")
    assert fixed.effects == []
    (effect,) = found.effects
    opened = found.gradient([effect.name])
    assert all(torch.equal(opened[key], fixed.blocked[key]) for key in opened)


def test_the_codebook_is_behind_the_straight_through_step():
    found, fixed = _audits("quantised_too_early")
    straight_through, _ = found.effects
    opened = found.gradient([straight_through.name])
    for key, gradient in fixed.blocked.items():
        torch.testing.assert_close(opened[key], gradient, rtol=0, atol=1e-14)


# --- each bug is the one that is told: closed forms --------------------------------------------------------------


def test_forgotten_block_by_hand():
    found, fixed = _audits("forgotten_block")
    networks, states, actions, returns = _setup("forgotten_block")
    advantage = returns - networks["critic"](states).squeeze(1).detach()
    for one in (found, fixed):
        _assert_linear(one, "actor", states, _score(networks, "actor", states, actions, advantage))
    log_prob = networks["actor"](states).log_softmax(1)[range(8), actions].detach()
    _assert_linear(found, "critic", states, log_prob[:, None] / 8)
    _assert_linear(fixed, "critic", states, torch.zeros(8, 1))


def test_bootstrapped_advantage_by_hand():
    found, fixed = _audits("bootstrapped_advantage")
    network, states, next_states, actions, _ = _setup("bootstrapped_advantage")
    features, next_features = (network["trunk"](x).tanh().detach() for x in (states, next_states))
    log_prob = network["policy"](features).log_softmax(1)[range(8), actions].detach()
    _assert_linear(found, "value", next_features, -0.9 * log_prob[:, None] / 8)
    _assert_linear(fixed, "value", next_features, torch.zeros(8, 1))


def test_moving_target_by_hand():
    """The semi-gradient of TD learning, and the residual gradient (Baird 1995)."""
    found, fixed = _audits("moving_target")
    networks, states, next_states, actions, rewards = _setup("moving_target")
    values, best = networks["target"](next_states).max(1)
    delta = (rewards + 0.9 * values - networks["online"](states)[range(8), actions]).detach()
    for one in (found, fixed):
        _assert_linear(one, "online", states, -2 / 8 * delta[:, None] * torch.eye(3)[actions])
    _assert_linear(found, "target", next_states, 2 / 8 * 0.9 * delta[:, None] * torch.eye(3)[best])
    _assert_linear(fixed, "target", next_states, torch.zeros(8, 3))


def test_library_default_by_hand():
    found, _ = _audits("library_default")
    networks, states, actions, _ = _setup("library_default")
    log_prob = networks["actor"](states[:-1]).log_softmax(1)[range(8), actions].detach()
    cotangents = torch.zeros(9, 1)
    for t in range(8):
        for later in range(t, 8):  # advantage_t = sum (discount trace)^(later - t) delta_later
            share = -(0.855 ** (later - t)) * log_prob[t] / 8
            cotangents[later] -= share
            cotangents[later + 1] += 0.9 * share
    _assert_linear(found, "critic", states, cotangents)


def test_constant_ratio_by_hand():
    found, fixed = _audits("constant_ratio")
    networks, states, actions, advantages = _setup("constant_ratio")
    _assert_linear(found, "policy", states, torch.zeros(8, 3))
    _assert_linear(fixed, "policy", states, _score(networks, "policy", states, actions, advantages))


def test_hidden_by_retain_graph_by_hand():
    """What the generator holds after `retain_graph`: with the minimax loss, exactly what undoes its own gradient."""
    found, _ = _audits("hidden_by_retain_graph")
    networks, _, noise = _setup("hidden_by_retain_graph")
    logits = networks["discriminator"](networks["generator"](noise))
    own = torch.nn.functional.logsigmoid(-logits).mean()  # log(1 - D(G(z))), which the generator lowers
    gradients = torch.autograd.grad(own, list(networks["generator"].parameters()))
    for leaked, gradient in zip(_blocked(found, "generator"), gradients, strict=True):
        torch.testing.assert_close(leaked + gradient, torch.zeros_like(leaked), rtol=0, atol=1e-15)


def test_data_in_place_by_hand():
    """The buggy gradient takes the derivative of the sigmoid at the clamped values: s' = s (1 - s) for another s."""
    found, fixed = _audits("data_in_place")
    networks, x = _setup("data_in_place")
    s, v = networks["gate"](x).sigmoid().detach(), networks["value"](x).detach()
    clamped = s.clamp(min=0.4)
    assert 0 < (s < 0.4).sum() < s.numel()
    outer = 2 * clamped * v.square() / v.numel()
    _assert_linear(found, "gate", x, outer * clamped * (1 - clamped))
    _assert_linear(fixed, "gate", x, outer * s * (1 - s) * (s >= 0.4))


def test_shared_memory_by_hand():
    found, fixed = _audits("shared_memory")
    networks, optimizer = _setup("shared_memory")
    steps = [-0.1 * parameter.grad for parameter in networks.parameters()]
    optimizer.step()
    assert found.loss == 0
    for step, gradient in zip(steps, fixed.blocked.values(), strict=True):
        torch.testing.assert_close(gradient, 2 * step, rtol=1e-12, atol=1e-15)


def test_forward_mode_by_hand():
    """The buggy slope is that of the whole function, by differences; the fixed one that with the scale held."""
    found, fixed = _audits("forward_mode")
    networks, x, direction = _setup("forward_mode")
    step = 1e-6

    def slope(scale):
        ends = [networks["network"](y / scale(y)).tanh() for y in (x - step * direction, x + step * direction)]
        return ((ends[1] - ends[0]) / (2 * step)).square().mean().item()

    assert found.loss == pytest.approx(slope(lambda y: y.abs().amax(1, keepdim=True)), rel=1e-7)
    assert fixed.loss == pytest.approx(slope(lambda _: x.abs().amax(1, keepdim=True)), rel=1e-7)
    assert found.loss != pytest.approx(fixed.loss, rel=1e-2)


def test_wrong_branch_and_checkpoint_leave_networks_as_they_were():
    for name, network in (("wrong_branch", "predictor"), ("checkpoint_without_inputs", "block")):
        found, fixed = _audits(name)
        assert all(gradient.eq(0).all() for gradient in _blocked(found, network))
        assert all(gradient.ne(0).any() for gradient in _blocked(fixed, network))


def test_wrong_branch_moves_towards_a_constant():
    for variant, found in zip(("buggy", "fixed"), _audits("wrong_branch"), strict=True):
        networks, view, other_view = _setup("wrong_branch")
        z, p = networks["encoder"](other_view), networks["predictor"](networks["encoder"](view))
        constant = (p if variant == "buggy" else z).detach()
        loss = -torch.nn.functional.cosine_similarity(constant, z if variant == "buggy" else p).mean()
        gradients = torch.autograd.grad(loss, list(networks["encoder"].parameters()))
        for gradient, expected in zip(_blocked(found, "encoder"), gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_loss_without_effect_has_the_gradient_of_the_other_term():
    found, fixed = _audits("loss_without_effect")
    networks, x = _setup("loss_without_effect")
    code = networks["encoder"](x)
    reconstruction = (networks["decoder"](code) - x).square().mean()
    for loss, one in ((reconstruction, found), (reconstruction + 0.1 * code.abs().mean(), fixed)):
        gradients = torch.autograd.grad(loss, list(networks.parameters()), retain_graph=True)
        assert all(map(torch.equal, gradients, one.blocked.values()))


def test_needless_block_is_needless():
    found, fixed = _audits("needless_block")
    assert [effect.verdict.kind for effect in found.effects] == ["no-op"]
    assert all(torch.equal(found.blocked[key], fixed.blocked[key]) for key in found.blocked)


# --- other lints find them as well -------------------------------------------------------------------------------


def test_the_mode_lint_names_the_same_place():
    for variant in ("buggy", "fixed"):
        torch.manual_seed(0)
        penalty, networks = getattr(PROGRAMS["forward_mode"].module, variant)()
        held = inspect.getclosurevars(penalty).nonlocals
        report = mode_lint(held["normalised"], held["x"])
        assert [finding.site for finding in report.findings] == audit(penalty, networks).one_mode
        assert len(report) == (variant == "buggy")


def test_the_alias_guard_sees_the_step_once_the_constant_has_a_name():
    """The program with `stop_gradient` in the place of `detach`."""
    source = PROGRAMS["shared_memory"].source.replace("parameter.detach()", "stop_gradient(parameter, 'zoo.old')")
    names = {"stop_gradient": stop_gradient}
    exec(source, names)
    with alias_guard():
        penalty, _ = names["buggy"]()
        with pytest.warns(AliasWarning, match=r"zoo\.old"):
            penalty()
        penalty, _ = names["fixed"]()
        penalty()  # a warning would be an error


# --- what is complained about ------------------------------------------------------------------------------------


def test_complaints_name_networks_and_places():
    found = PROGRAMS["misplaced_block"].audit("buggy")
    (site,) = (effect.site for effect in found.effects)
    assert complaints(found, moves=["generator"], stays=["discriminator"]) == [
        "The loss moves discriminator.weight, discriminator.bias, which should stay.",
        f"The loss does not move generator.weight, generator.bias: cut by detach() at {site}.",
    ]
    assert complaints(found, moves=["discriminator"], stays=["generator"]) == []


def test_a_derivative_inside_of_a_program_is_no_complaint_and_a_number_is():
    found = PROGRAMS["needless_block"].audit("fixed")
    assert [escape.kind for escape in found.escapes] == ["grad()"]
    assert complaints(found, moves=[], stays=[]) == []
    found = PROGRAMS["loss_without_effect"].audit("buggy")
    assert [escape.kind for escape in found.escapes] == ["item()"]
    assert len(complaints(found, moves=[], stays=[])) == 1


def test_an_audit_that_is_not_valid_is_a_complaint():
    w = torch.tensor(3.0, requires_grad=True)
    found = audit(lambda: w * random.SystemRandom().random(), {"w": w})  # the one generator that no audit can put back
    (complaint,) = complaints(found, moves=[], stays=[])
    assert complaint.startswith("The audit is not valid: the program is not deterministic")


def test_an_audit_draws_the_same_numbers_and_leaves_the_generator_alone():
    first = PROGRAMS["forgotten_block"].audit("buggy")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert PROGRAMS["forgotten_block"].audit("buggy").loss == first.loss
    assert torch.equal(torch.rand(3), expected)


def test_lines_that_differ_have_their_numbers():
    program = PROGRAMS["quantised_too_early"]
    changed = program.changed_lines()
    ((number, text),) = changed["buggy"]
    assert program.source.splitlines()[number - 1] == text == "        codes = z + (codes - z).detach()"
    assert changed["fixed"] == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "FOLDER should hold programs of the zoo. Found no .py files in "),
        ({"a.py": '"""A."""\nSOURCES = MOVES = STAYS = []'}, "a.py: a program of the zoo should have buggy, fixed."),
        (
            {"a.py": "SOURCES = MOVES = STAYS = buggy = fixed = []"},
            "a.py: a program of the zoo should have a docstring.",
        ),
    ],
    ids=["empty", "no fixed", "no story"],
)
def test_a_wrong_folder_is_one_clear_error(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_programs(tmp_path)
    done = CliRunner().invoke(main, ["zoo", str(tmp_path), "--results", str(tmp_path)])
    assert done.exit_code == 2
    assert message in done.stderr


# --- record, command, report -------------------------------------------------------------------------------------


def test_the_record_comes_back(examined, tmp_path):
    write_zoo(tmp_path, examined)
    assert read_zoo(tmp_path) == json.loads(json.dumps(examined, allow_nan=False))
    assert read_zoo(tmp_path / "elsewhere") == []
    (tmp_path / "zoo.json").write_text('{"schema": 0}')
    assert read_zoo(tmp_path) == []
    (damage,) = damaged_records(tmp_path)
    assert "damaged or of another version" in damage


BLAMED = '''
"""A program that is blamed with its bug and without, or not at all."""
import torch

SOURCES, STAYS, MOVES = ["a/b#1"], [{stays}], ["w"]

def buggy():
    w = torch.nn.Linear(2, 1)
    return lambda: w.weight.sum() + w.bias.sum(), torch.nn.ModuleDict({{"w": w}})

fixed = buggy
'''


@pytest.mark.parametrize(
    ("stays", "error"), [("", "one: no bug was found"), ("'w'", "one: a bug was found in `fixed()`")]
)
def test_the_command_fails_for_a_zoo_that_is_wrong(tmp_path, stays, error):
    (tmp_path / "one.py").write_text(
        BLAMED.format(stays=stays).replace("fixed = buggy", "def fixed():\n    return buggy()")
    )
    done = CliRunner().invoke(main, ["zoo", str(tmp_path), "--results", str(tmp_path / "results")])
    assert done.exit_code == 1
    assert done.stderr == f"error: {error}\n"
    assert "one" in (tmp_path / "results" / "pages" / "zoo.html").read_text()


def test_the_report_shows_every_bug_and_needs_no_torch(examined, tmp_path):
    write_zoo(tmp_path, examined)
    program = (
        "import sys\n"
        "for name in ('torch', 'toolkit.blocks', 'toolkit.gradients', 'pydantic'):\n"
        "    sys.modules[name] = None\n"
        "from toolkit.runner._command import main\n"
        f"main(['report', '--results', {str(tmp_path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "pages" / "zoo.html").read_text()
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for entry in examined:
        assert entry["title"].replace("`", "") in text
        assert entry["story"].replace("`", "") in text
        assert all(source in text for source in entry["sources"])
        for repository, number in (source.split("#") for source in entry["sources"]):
            assert f'href="https://github.com/{repository}/issues/{number}"' in page
        assert all(complaint in text for complaint in entry["buggy"]["complaints"])
        for variant in ("buggy", "fixed"):
            assert all(f"{what} at {where}: {verdict}" in text for where, what, verdict in entry[variant]["places"])
    assert page.count('class="line buggy"') == sum(len(entry["buggy"]["lines"]) for entry in examined)


def test_a_report_without_a_zoo_has_none(tmp_path):
    assert 'id="zoo"' not in write_single([], tmp_path / "index.html").read_text()


def test_what_a_record_says_is_escaped(examined, tmp_path):
    wrong = {**examined[0], "title": "<b>bold</b>", "story": "<script>"}
    page = write_single([], tmp_path / "index.html", [wrong]).read_text()
    assert "<b>bold" not in page
    plain = write_single([], tmp_path / "plain.html", [{**examined[0], "story": ""}]).read_text()
    assert page.count("<script") == plain.count("<script"), "the page's own"
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;bold" in page
