"""``audit train.py --rerun``: stops that a recorded step cannot open are removed in further runs of the script."""

import contextlib
import json
import os
import subprocess
import textwrap

import pytest
import torch
import warm
from folders import ROOT
from torch import nn

from toolkit.gradients.audit.schema import AnswerSchema

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
"""

WGAN_GP = """
critic, generator = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Linear(3, 2)
first, second = (torch.optim.Adam(net.parameters(), 1e-3) for net in (critic, generator))
for step in range(3):
    real, fake, a = torch.randn(8, 2), generator(torch.randn(8, 3)), torch.rand(8, 1)
    middle = (a * real + (1 - a) * fake.detach()).requires_grad_(True)
    slope, = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    first.zero_grad()
    (critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty).backward()
    first.step()
    second.zero_grad()
    (-critic(generator(torch.randn(8, 3))).mean()).backward()
    second.step()
"""

INNER_LOOP = """
w = torch.randn(1, 8, requires_grad=True)
v = torch.randn(8, 1, requires_grad=True)
optimizer = torch.optim.SGD([w, v], 1e-2)
for step in range(3):
    x = torch.randn(10, 1)
    parameters = [w, v]
    for _ in range(2):
        error = (torch.tanh(x[:5] @ parameters[0]) @ parameters[1] - x[:5].sin()).square().mean() / w.norm().detach()
        slopes = torch.autograd.grad(error, parameters, create_graph=True)
        parameters = [p - 0.1 * slope.detach() for p, slope in zip(parameters, slopes)]
    optimizer.zero_grad()
    (torch.tanh(x[5:] @ parameters[0]) @ parameters[1] - x[5:].sin()).square().mean().backward()
    optimizer.step()
"""

SAME_TENSOR = """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(3):
    y = net(torch.randn(7, 4))
    middle = y.detach().requires_grad_(True)
    slope, = torch.autograd.grad(middle.sum() + y.exp().sum(), middle, create_graph=True)
    optimizer.zero_grad()
    (slope * y).mean().backward()
    optimizer.step()
"""

CLIPPED = """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(3):
    y = net(torch.randn(7, 4))
    h = y * 2
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    optimizer.zero_grad()
    ((h * y).mean() + (h.detach() * y).mean()).backward()
    optimizer.step()
"""

SWITCHED = """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(3):
    x = torch.randn(7, 4)
    torch.set_grad_enabled(False)
    target = net(x).tanh()
    torch.set_grad_enabled(True)
    optimizer.zero_grad()
    (net(x) - target).square().mean().backward()
    optimizer.step()
"""


IN_PARTS = """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(3):
    optimizer.zero_grad()
    for part in range(2):
        x = torch.randn(7, 4)
        torch.set_grad_enabled(False)
        target = net(x).tanh()
        torch.set_grad_enabled(True)
        (net(x) - target).square().mean().backward()
    optimizer.step()
"""


def _asked(folder, text, *arguments):
    (folder / "train.py").write_text(HEAD + textwrap.dedent(text))
    return subprocess.run(
        [warm.python(), "-m", "toolkit", "audit", "train.py", "--json", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def ask(tmp_path):
    def ask(text, *arguments):
        found = _asked(tmp_path, text, *arguments)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return ask


class _Over(Exception):
    pass


def _gradient(text, number):
    """Run a script up to its backward pass `number`; return the gradient of all its parameters, as one vector."""
    names, count = {}, 0

    def backward(value, **options):
        nonlocal count, found
        count += 1
        if count < number:
            return original(value, **options)
        modules = {key: one for key, one in names.items() if isinstance(one, nn.Module)}
        leaves = [one for key, one in sorted(names.items()) if isinstance(one, torch.Tensor) and one.requires_grad]
        leaves = [
            *(one for one in leaves if one.is_leaf and "middle" not in names),
            *nn.ModuleDict(modules).parameters(),
        ]
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        pairs = zip(gradients, leaves, strict=True)
        found = torch.cat([(torch.zeros_like(leaf) if g is None else g).flatten() for g, leaf in pairs])
        raise _Over

    original, found = torch.Tensor.backward, None
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(), contextlib.suppress(_Over):
        patch.setattr(torch.Tensor, "backward", backward)
        exec(compile(HEAD + text, "train.py", "exec"), names)
    return found


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("text", "stop", "without", "step", "number"),
    [
        (WGAN_GP, "(1 - a) * fake.detach()", "(1 - a) * (fake if step == 1 else fake.detach())", 3, 3),
        slow(INNER_LOOP, "w.norm().detach()", "(w.norm() if step == 1 else w.norm().detach())", 2, 2),
        (INNER_LOOP, "slope.detach()", "(slope if step == 1 else slope.detach())", 2, 2),
        slow(SAME_TENSOR, "y.detach()", "(y if step == 1 else y.detach())", 2, 2),
        slow(CLIPPED, "h.detach()", "(h if step == 1 else h.detach())", 2, 2),
        slow(SWITCHED, "torch.set_grad_enabled(False)", "step == 1 or torch.set_grad_enabled(False)", 2, 2),
    ],
    ids=["gradient_penalty", "inner_loss", "inner_step", "same_tensor", "hook", "statement"],
)
def test_the_effect_is_that_of_the_script_without_the_stop(ask, text, stop, without, step, number):
    found = ask(text, "--step", str(step), "--rerun")
    AnswerSchema.model_validate(found)
    lines = (HEAD + text).splitlines()
    (line,) = (index for index, line in enumerate(lines, start=1) if stop in line)
    column = lines[line - 1].index(stop) + stop.index(stop.split(" ")[-1]) + 1
    place = f"train.py:{line}:{column}"
    beside = stop == "slope.detach()"  # the inner derivatives end in front of it, so the recorded step opens it
    assert (place in found["reruns"]) is not beside
    assert found["unopened"] == []
    (effect,) = (effect for effect in found["effects"] if effect["name"] == place)
    plain, opened = _gradient(text, number), _gradient(text.replace(stop, without), number)
    assert effect["leak"] == pytest.approx((opened - plain).norm().item(), rel=1e-4)  # sums of 100 float32 numbers
    assert effect["ratio"] == pytest.approx((opened.norm() / plain.norm()).item(), rel=1e-4)
    assert effect["verdict"]["kind"] == ("cuts" if text is WGAN_GP else "partial")


@pytest.mark.slow
def test_without_the_option_the_answer_names_it(ask):
    found = ask(INNER_LOOP, "--step", "2")
    assert "`--rerun` removes the stop that is not opened in a further run of the script" in found["remarks"]
    assert [len(found[key]) for key in ("effects", "unopened", "reruns")] == [1, 1, 0]


def test_a_script_that_computes_something_else_when_it_runs_again_is_not_compared(ask):
    found = ask(INNER_LOOP.replace("w = torch", "torch.seed()\nw = torch"), "--step", "2", "--rerun")
    assert [len(found[key]) for key in ("effects", "unopened", "reruns")] == [1, 1, 0]
    assert "the script computes another gradient" in " ".join(found["remarks"])


@pytest.mark.slow
def test_rounding_is_no_effect(ask):
    """The shift of a softmax drops out of its gradient, also of the one that an inner derivative takes."""
    found = ask(
        """
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(3):
            x = torch.randn(7, 4, requires_grad=True)
            y = net(x)
            p = (y - y.amax(1, keepdim=True).detach()).exp()
            slope, = torch.autograd.grad((p / p.sum(1, keepdim=True))[:, 0].sum(), x, create_graph=True)
            optimizer.zero_grad()
            slope.square().sum().backward()
            optimizer.step()
        """,
        *("--step", "2", "--rerun"),
    )
    assert [effect["verdict"]["kind"] for effect in found["effects"]] == ["redundant"]
    assert len(found["reruns"]) == 1


ENTROPY = """
actor, critic, log_alpha = nn.Linear(3, 2), nn.Linear(5, 1), torch.full((1,), 0.5, requires_grad=True)
optimizers = [torch.optim.SGD(held, 1e-2) for held in ([log_alpha], critic.parameters(), actor.parameters())]
for step in range(6):
    x = torch.randn(7, 3)
    action = actor(x) + torch.randn(7, 2)
    entropy = action.square().sum(1)
    alpha = log_alpha.detach().exp()
    (log_alpha * (entropy - 2).detach()).mean().backward()
    optimizers[0].step()
    with torch.no_grad():
        target = alpha * entropy
    (critic(torch.cat([x, action.detach()], 1))[:, 0] - target).square().mean().backward()
    optimizers[1].step()
    for held in optimizers:
        held.zero_grad()
    (-alpha * entropy - critic(torch.cat([x, action], 1))[:, 0]).mean().backward()
    optimizers[2].step()
"""


def test_a_parameter_that_only_a_further_run_reaches_is_cut(ask):
    stop = "log_alpha.detach()"
    found = ask(ENTROPY, "--step", "6", "--rerun")
    AnswerSchema.model_validate(found)
    (effect,) = (effect for effect in found["effects"] if effect["name"] in found["reruns"])
    assert effect["verdict"]["text"] == "cuts all paths to [log_alpha]"
    plain, opened = (
        _gradient(text, 6) for text in (ENTROPY, ENTROPY.replace(stop, "(log_alpha if step == 1 else " + stop + ")"))
    )
    assert effect["leak"] == pytest.approx((opened - plain).norm().item(), rel=1e-5)
    assert effect["per_parameter"]["log_alpha"]["leak"] == pytest.approx(effect["leak"])
    assert all("log_alpha" in other["per_parameter"] for other in found["effects"])


def test_a_stop_of_an_earlier_step_whose_graph_is_kept_opens(ask):
    text = """
encoder, head, critic = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)
optimizers = [torch.optim.SGD(held.parameters(), 1e-2) for held in (head, critic)]
for step in range(3):
    features = encoder(torch.randn(7, 3)).tanh()
    head(features).square().mean().backward(retain_graph=True)
    optimizers[0].step()
    encoder.zero_grad()
    (critic(features.detach()) - 1).square().mean().backward()
    optimizers[1].step()
"""
    found = ask(text, "--step", "4", "--rerun")
    (effect,) = found["effects"]
    assert effect["verdict"]["text"] == "cuts all paths to [encoder.bias, encoder.weight]"
    plain, opened = (
        _gradient(each, 4)
        for each in (text, text.replace("features.detach()", "(features if step else features.detach())"))
    )
    assert effect["leak"] == pytest.approx((opened - plain).norm().item(), rel=1e-5)


@pytest.mark.slow
def test_stops_that_do_not_open_then_either_say_why(ask):
    text = """
        net = nn.Linear(4, 3)
        held = nn.Linear(4, 3)
        optimizer = torch.optim.SGD([*net.parameters(), *held.parameters()], 1e-2)
        for step in range(3):
            x = torch.randn(7, 4)
            torch.set_grad_enabled(False)
            target = held(x)
            torch.set_grad_enabled(True)
            torch.set_grad_enabled(False)
            best = net(x).exp().mul_(2)
            best.add_(best.exp())
            torch.set_grad_enabled(True)
            y = net(x)
            optimizer.zero_grad()
            (y - target * best).square().mean().backward()
            optimizer.step()
        """
    found = ask(text, "--step", "2", "--rerun")
    told = {entry["site"].split(":")[1]: entry["reason"] for entry in found["unopened"]}
    assert told.keys() == {"14"}
    assert told["14"].startswith("opened, the script fails: RuntimeError: one of the variables needed for gradient")


def test_a_stop_that_changes_an_earlier_backward_pass_is_not_compared_afterwards(ask):
    twice = "backward(retain_graph=True)\n    (net(x) * target).mean().backward()"
    text = SWITCHED.replace("backward()", twice)
    first, second = ask(text, "--step", "2", "--all", "--rerun")
    assert [effect["verdict"]["kind"] for effect in first["effects"]] == ["partial"]
    assert [entry["reason"] for entry in second["unopened"]] == ["opened, it changes an earlier backward pass"]


@pytest.mark.slow
def test_a_script_that_goes_on_without_the_step(ask):
    text = SWITCHED.replace("    (net(x)", "    if target.requires_grad:\n        continue\n    (net(x)")
    (entry,) = ask(text, "--step", "2", "--rerun")["unopened"]
    assert entry["reason"] == "opened, the script does not come to this backward pass"


@pytest.mark.slow
def test_a_named_block_and_parameters_without_a_name(ask):
    text = """
        from toolkit import stop_gradient
        make = lambda *shape: torch.randn(*shape).requires_grad_()
        class Holder:
            __slots__ = ("both",)
        holder = Holder()
        holder.both = (make(3), make(3))
        optimizer = torch.optim.SGD(list(holder.both), 1e-2)
        def step():
            a, b = (one * 1 for one in holder.both)
            error = (a * b).sum().sin()
            slope, = torch.autograd.grad(error * stop_gradient(a, "script.inner").sum(), a, create_graph=True)
            optimizer.zero_grad()
            (slope * b).sum().backward()
            optimizer.step()
        step()
        step()
        """
    found = ask(text, "--step", "2", "--rerun")
    assert found["reruns"] == ["script.inner"]
    (effect,) = found["effects"]
    assert all(" #" in name for name in effect["per_parameter"])
    assert effect["verdict"]["kind"] == "partial"


def test_a_function_is_refused(tmp_path):
    (tmp_path / "loss.py").write_text("def make(): ...")
    found = subprocess.run(
        [warm.python(), "-m", "toolkit", "audit", "loss.py:make", "--rerun"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr.startswith("error: `--rerun` should stand beside a script.")


@pytest.mark.slow
def test_stops_that_act_only_together_are_a_set(ask):
    """One stop is inside of the other, and an operation in place keeps the recorded step from opening them."""
    text = """
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(3):
            y = net(torch.randn(7, 4))
            y.register_hook(lambda g: g.clamp(-1, 1))
            with torch.no_grad():
                best = y.detach().exp()
            optimizer.zero_grad()
            (y * best).square().mean().backward()
            optimizer.step()
        """
    found = ask(text, "--step", "2", "--rerun")
    (together,) = found["sets"]
    assert together["name"] == "train.py:11:5 + train.py:12:16"
    without = text.replace("torch.no_grad()", "torch.set_grad_enabled(step == 1)")
    without = without.replace("y.detach()", "(y if step == 1 else y.detach())")
    plain, opened = (_gradient(textwrap.dedent(one), 2) for one in (text, without))
    assert together["leak"] == pytest.approx((opened - plain).norm().item(), rel=1e-4)


@pytest.mark.slow
def test_a_stop_of_the_tensor_object_itself(ask, tmp_path):
    text = """
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(3):
            y = net(torch.randn(7, 4))
            features = y.sin()
            step == 9 or features.detach_()
            optimizer.zero_grad()
            (y * features).mean().backward()
            optimizer.step()
        """
    (effect,) = ask(text, "--step", "2", "--rerun", "--page", "page.html")["effects"]
    assert "in &lt;module&gt;, in a run without it</span>" in (tmp_path / "page.html").read_text()
    plain, opened = (_gradient(textwrap.dedent(one), 2) for one in (text, text.replace("step == 9", "step == 1")))
    assert effect["leak"] == pytest.approx((opened - plain).norm().item(), rel=1e-4)
    assert effect["verdict"]["kind"] == "partial"


@pytest.mark.parametrize("stop", ["y.detach()", slow('stop_gradient(y, "fixed")')])
def test_a_stop_that_another_thread_comes_to_as_well_is_not_compared(ask, stop):
    """Without the stop the backward pass of the function nests without end; autograd then takes another thread."""
    text = """
        from toolkit import stop_gradient
        class Fixed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = x.sin()
                ctx.save_for_backward(x, y)
                return y
            @staticmethod
            def backward(ctx, gradient):
                x, y = ctx.saved_tensors
                with torch.enable_grad():
                    f = (x + y.detach() / 4).sin()
                return torch.autograd.grad(f, x, gradient, retain_graph=True)[0]
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            Fixed.apply(net(torch.randn(4, 3))).mean().backward()
            optimizer.step()
        """
    found = ask(text.replace("y.detach()", stop), "--step", "2", "--rerun")
    assert found["reruns"] == []
    assert [entry["reason"] for entry in found["unopened"]] == [
        "a further run of the script comes to it in another thread, too, where it stays in place"
    ]


@pytest.mark.slow
def test_a_region_whose_result_passes_such_a_stop_acts_together_with_it(ask):
    """The recorded graph has nothing of the region, as its only tensor is detached in place."""
    text = """
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(3):
            x = torch.randn(7, 4)
            with torch.no_grad():
                best = net(x).exp()
                step == 9 or best.detach_()
            optimizer.zero_grad()
            (net(x) * best).square().mean().backward()
            optimizer.step()
        """
    found = ask(text, "--step", "2", "--rerun")
    assert [effect["verdict"]["kind"] for effect in found["effects"]] == ["no-op"]
    (together,) = found["sets"]
    assert together["name"] == "train.py:12:22 + train.py:10:5"
    without = text.replace("torch.no_grad()", "torch.set_grad_enabled(step == 1)").replace("step == 9", "step == 1")
    plain, opened = (_gradient(textwrap.dedent(one), 2) for one in (text, without))
    assert together["leak"] == pytest.approx((opened - plain).norm().item(), rel=1e-4)


@pytest.mark.slow
def test_stops_that_do_not_open_together_are_told(tmp_path):
    """Each alone changes nothing, as the other is in place."""
    text = """
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(3):
            x = torch.randn(7, 4)
            with torch.no_grad():
                best = net(x).detach().exp()
                best /= best.sum()
                best += best.square()
                best *= best
            optimizer.zero_grad()
            (net(x) * best).square().mean().backward()
            optimizer.step()
        """
    found = _asked(tmp_path, text, "--step", "2", "--rerun")
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    (remark,) = json.loads(found.stdout)["remarks"]
    start = "not opened together: train.py:11:16 + train.py:10:5: opened, the script fails: RuntimeError: one of the"
    assert remark.startswith(start)


def test_a_stop_that_changes_an_earlier_backward_pass_opens_after_it(ask):
    """As one inside of a critic, whose penalty is the last backward pass of its step."""
    first, second = ask(IN_PARTS, "--step", "2", "--all", "--rerun")
    assert (first["unopened"], first["effects"][0]["verdict"]["kind"]) == ([], "partial")
    (entry,), (effect,) = second["unopened"], second["effects"]
    assert entry["reason"].startswith("it opens from the end of the backward pass before this one on")
    removed = IN_PARTS.replace("set_grad_enabled(False)", "set_grad_enabled((step, part) == (1, 1))")
    leak = (_gradient(removed, 4) - _gradient(IN_PARTS, 4)).norm().item()
    assert effect["leak"] == pytest.approx(leak, rel=1e-4)
    assert leak > 0.01
