"""``audit train.py``: a script runs as it does from the shell, and one of its steps is answered."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import warm
from folders import ROOT

LOOP = """
import argparse
import copy
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.1)
arguments = parser.parse_args()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
target = copy.deepcopy(net).requires_grad_(False)
optimiser = torch.optim.SGD(net.parameters(), arguments.rate)
for step in range(6):
    x = torch.randn(16, 3)
    with torch.no_grad():
        label = x.square().sum(1, keepdim=True) + 0.5 * target(x)
    y = net(x)
    loss = ((y - label).square() * y.exp().detach()).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    with torch.no_grad():
        for average, weight in zip(target.parameters(), net.parameters()):
            average.lerp_(weight, 0.1)
    print("step", step, loss.item())
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def _run(folder, *arguments, python=None, input="", **environment):
    return subprocess.run(
        [python or warm.python(), "-m", "toolkit", "audit", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        input=input,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _verdicts(found):
    return {effect["name"]: effect["verdict"]["kind"] for effect in found["effects"]}


def test_a_backward_pass_that_a_step_does_not_have(write, tmp_path):
    write(LOOP)
    found = _run(tmp_path, "train.py", "--step", "2", "--backward", "4")
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].endswith(" and 1 in step 2: `--backward` should name an earlier one.")


def test_a_script_is_answered_and_computes_what_it_always_computes(write, tmp_path):
    write(LOOP)
    found = _run(tmp_path, "train.py", "--step", "3", "--verify", "--", "--rate", "0.2")
    assert found.returncode == 0, found.stderr
    assert "step 3, backward pass 1" in found.stdout
    assert "1 load-bearing" in found.stdout
    assert "train.py:19:36  detach()  partial" in found.stdout
    assert found.stdout.endswith("computes the same loss and gradients, bit for bit\n")
    assert "step 1" in found.stderr
    assert "step 2" not in found.stderr, "the script has ended"


def test_a_script_that_goes_on_ends_as_it_always_ends(write, tmp_path):
    write(LOOP)
    plain = subprocess.run([warm.python(), "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = _run(tmp_path, "train.py", "--step", "2", "--continue", "--verify")
    assert found.returncode == 0, found.stderr
    losses = [line for line in found.stderr.splitlines() if line.startswith("step")]
    assert losses == plain.stdout.splitlines() * 2, "once recorded, once as the witness"


def test_the_first_step_and_plain_json(write, tmp_path):
    write(LOOP)
    found = json.loads(_run(tmp_path, "train.py", "--json").stdout)
    assert found["valid"]
    assert found["backward"] == "step 1, backward pass 1"
    assert _verdicts(found)["train.py:19:36"] == "partial"
    assert set(found["effects"][0]["per_parameter"]) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}


def test_a_module(write, tmp_path):
    write("", "package/__init__.py")
    write(LOOP, "package/train.py")
    found = _run(tmp_path, "-m", "package.train", "--step", "2", "--verify", "--", "--rate", "0.3")
    assert found.returncode == 0, found.stderr
    assert "package/train.py:19:36" in found.stdout


GAN = """
import torch
from torch import nn
torch.manual_seed(0)
generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
optimisers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, critic)]
for _ in range(3):
    fake = generator(torch.randn(4, 2))
    loss = critic(fake.detach()).mean()
    loss.backward()
    (-critic(fake).mean()).backward()
    for optimiser in optimisers:
        optimiser.step()
"""


def test_all_backward_passes_of_a_step(write, tmp_path):
    write(GAN)
    first, second = json.loads(_run(tmp_path, "train.py", "--step", "2", "--all", "--json").stdout)
    assert (first["backward"], second["backward"]) == ("step 2, backward pass 1", "step 2, backward pass 2")
    assert _verdicts(first) == {"train.py:9:19": "cuts"}
    assert _verdicts(second) == {}
    only = json.loads(_run(tmp_path, "train.py", "--step", "2", "--backward", "2", "--json").stdout)
    assert {**only, "backward": ""} == {**second, "backward": ""}


def test_backward_passes_that_share_a_target(write, tmp_path):
    write(
        """
        import torch
        from torch import nn
        torch.manual_seed(0)
        critics, target = [nn.Linear(2, 1), nn.Linear(2, 1)], nn.Linear(2, 1)
        optimisers = [torch.optim.SGD(net.parameters(), 0.1) for net in critics]
        for _ in range(2):
            x = torch.randn(4, 2)
            with torch.no_grad():
                goal = target(x).exp()
            for critic in critics:
                (critic(x) - goal).square().mean().backward()
            for optimiser in optimisers:
                optimiser.step()
        """
    )
    found = _run(tmp_path, "train.py", "--all", "--verify")
    assert found.returncode == 0, found.stderr
    first, _, second = found.stdout.partition("step 1, backward pass 2")
    assert "cuts all paths" in first
    assert "not opened" not in first
    assert "not opened: no_grad at train.py:9:5: an earlier backward pass has used its values" in second
    assert "computes the same" in found.stdout


def test_a_running_mean_over_the_backward_passes_of_a_step(write, tmp_path):
    write(
        """
        import torch
        torch.manual_seed(0)
        net, centre = torch.nn.Linear(2, 2), None
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            for _ in range(2):
                y = net(torch.randn(4, 2))
                mean = y.mean(0).detach()
                centre = mean if centre is None else 0.9 * centre + 0.1 * mean
                (y * centre).square().mean().backward()
            optimiser.step()
        """
    )
    found = _run(tmp_path, "train.py", "--step", "2", "--all", "--verify")
    assert found.returncode == 0, found.stderr
    assert "the script fails" not in found.stdout
    assert found.stdout.count("train.py:9:16  detach()  partial") == 2
    assert "computes the same" in found.stdout


def test_a_graph_from_before_the_step_is_recorded_from_its_beginning(write, tmp_path):
    write(GAN.replace("    (-critic", "    optimisers[1].step()\n    (-critic"))
    found = _run(tmp_path, "train.py", "--step", "4", "--verify")
    assert found.returncode == 0, found.stderr
    assert "unknown" not in found.stdout
    assert "computes the same" in found.stdout


def test_compiled_functions_run_in_eager_mode(write, tmp_path):
    write(
        """
        import torch
        torch.manual_seed(0)
        net = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            y = net(torch.randn(3, 4))
            (y * y.detach().exp()).sum().backward()
            optimiser.step()
        """
    )
    found = _run(tmp_path, "train.py", "--step", "2", "--verify")
    assert found.returncode == 0, found.stderr
    assert "compiled functions ran in eager mode" in found.stdout
    assert "computes the same" in found.stdout


def test_functions_that_are_compiled_while_the_script_is_recorded_run_in_eager_mode(write, tmp_path):
    write(
        """
        import sys
        import torch
        assert "torch._dynamo" not in sys.modules
        w = torch.tensor(3.0, requires_grad=True)
        square = torch.compile(lambda: w * w.detach(), backend="eager")
        for _ in range(2):
            square().backward()
        """
    )
    found = _run(tmp_path, "train.py", python=sys.executable)  # the warm one has imported the compiler
    assert found.returncode == 0, found.stderr
    assert "train.py:6:36  detach()  partial" in found.stdout
    assert "compiled functions ran in eager mode" in found.stdout


def test_one_optimiser_for_each_parameter_takes_one_step(write, tmp_path):
    write(LOOP.replace(
        "optimiser = torch.optim.SGD(net.parameters(), arguments.rate)",
        "optimisers = [torch.optim.SGD([weight], arguments.rate) for weight in net.parameters()]",
    ).replace("    optimiser.zero_grad()", "    net.zero_grad()").replace(
        "    optimiser.step()", "    [optimiser.step() for optimiser in optimisers]"
    ))  # fmt: skip
    found = _run(tmp_path, "train.py", "--step", "3", "--verify")
    assert found.returncode == 0, found.stderr
    assert "step 1" in found.stderr
    assert "step 2" not in found.stderr


def test_optimisers_that_step_in_hooks_of_the_backward_pass(write, tmp_path):
    write(
        """
        import torch
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        optimisers = {weight: torch.optim.SGD([weight], 0.1) for weight in net.parameters()}
        def update(weight):
            optimisers[weight].step()
            optimisers[weight].zero_grad()
        for weight in net.parameters():
            weight.register_post_accumulate_grad_hook(update)
        for step in range(4):
            y = net(torch.randn(5, 3))
            loss = (y * y.detach()).mean()
            loss.backward()
            print("step", step, loss.item())
        """
    )
    found = _run(tmp_path, "train.py", "--step", "3", "--verify", "--continue", "--json")
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert _verdicts(told) == {"train.py:13:17": "partial"}
    assert f"step 2 {told['loss']}" in found.stderr.splitlines()


def test_a_script_without_an_optimiser(write, tmp_path):
    write(
        """
        import torch
        w = torch.tensor(3.0, requires_grad=True)
        (w * (w * w).detach()).backward()
        """
    )
    found = _run(tmp_path, "train.py", "--verify")
    assert found.returncode == 0, found.stderr
    assert "train.py:4:6  detach()  partial  18" in found.stdout


def test_a_place_that_cannot_be_recorded_keeps_its_meaning(write, tmp_path):
    write(
        """
        import torch
        w = torch.tensor(3.0, requires_grad=True)
        kept = torch.ones(2) * (w * w).detach()
        assert "grad_fn" not in str(kept), "a constant"
        (w * kept.sum() + (w * w).detach()).backward()
        """
    )
    found = _run(tmp_path, "train.py", "--verify")
    assert found.returncode == 0, found.stderr
    assert (
        "not opened: detach() at train.py:4:24: recorded, the script fails: AssertionError: a constant" in found.stdout
    )
    assert "train.py:6:19  detach()  cuts" in found.stdout or "train.py:6:19  detach()  partial" in found.stdout
    assert "computes the same" in found.stdout


def test_of_the_places_behind_an_error_those_keep_their_meaning_that_make_a_constant(write, tmp_path):
    write(
        """
        import torch
        from torch import nn

        class Rounded(nn.Module):
            def forward(self, x, top):
                scale = top.detach() / 127
                zero = torch.zeros((), dtype=torch.int32)
                return torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)

        net = nn.Linear(3, 2)
        x = net(torch.ones(4, 3))
        x = x + (x * x).detach()
        Rounded()(x, x.abs().max()).sum().backward()
        """
    )
    found = _run(tmp_path, "train.py", "--verify")
    assert found.returncode == 0, found.stderr
    reason = "it enters an operation that is not differentiable in it"
    assert f"not opened: detach() at train.py:7:17: {reason}" in found.stdout
    assert "detach()  partial" in found.stdout
    assert "computes the same" in found.stdout


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(0)"])
def test_a_script_that_trains_by_autograd_grad(write, tmp_path, end):
    write(
        f"""
        import torch
        from torch.autograd import grad
        w = torch.tensor(3.0, requires_grad=True)
        for step in range(3):
            inner = torch.ones((), requires_grad=True)
            (slope,) = grad(w * inner * inner, inner, create_graph=True)
            loss = slope * (w * w).detach()
            (found,) = grad(loss, [w])
            assert isinstance(found, torch.Tensor) and not found.requires_grad
            with torch.no_grad():
                w -= 0.01 * found
        {end}
        """
    )
    for backward, w in enumerate([3.0, 3.0 - 0.01 * 2 * 9.0], start=1):
        found = _run(tmp_path, "train.py", "--backward", str(backward), "--verify", "--json")
        assert found.returncode == 0, found.stderr
        told = json.loads(found.stdout)
        (effect,) = (effect for effect in told["effects"] if "train.py" in effect["name"])
        assert effect["leak"] == pytest.approx(4 * w * w, rel=1e-6), "the slope is 2 w"


def test_gradients_that_an_optimiser_takes_from_autograd_grad(write, tmp_path):
    write(
        """
        import torch
        w = torch.tensor(3.0, requires_grad=True)
        optimiser = torch.optim.SGD([w], 0.01)
        for step in range(3):
            w.grad = torch.autograd.grad(w * (w * w).detach(), w)[0]
            optimiser.step()
            print("end of step", step)
        """
    )
    found = _run(tmp_path, "train.py", "--step", "2", "--verify")
    assert found.returncode == 0, found.stderr
    assert "detach()  partial  16.9" in found.stdout
    assert "computes the same" in found.stdout


def test_an_optimiser_that_torch_does_not_know_takes_no_steps(write, tmp_path):
    write(
        """
        import torch
        w = torch.tensor(3.0, requires_grad=True)
        for step in range(3):
            w.grad = None
            (w * (w * w).detach()).backward()
            w.data -= 0.01 * w.grad
        """
    )
    found = _run(tmp_path, "train.py", "--step", "2")
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].endswith("so `--backward` should choose, without `--step`.")
    found = _run(tmp_path, "train.py", "--backward", "2", "--verify")
    assert found.returncode == 0, found.stderr
    assert "detach()  partial  16.9" in found.stdout


def test_a_copy_leaves_the_graph_where_the_script_copies(write, tmp_path):
    write(
        """
        import copy
        import torch
        w = torch.tensor([3.0], requires_grad=True)
        kept = copy.deepcopy({"y": [(2 * w).detach()]})
        (w * w.detach()).sum().backward()
        """
    )
    found = _run(tmp_path, "train.py")
    assert "leaves the graph: deepcopy() at train.py:5:8" in found.stdout, found.stdout


def test_a_number_that_the_standard_library_takes_leaves_where_the_script_asks(write, tmp_path):
    write(
        """
        import logging
        import statistics
        import torch
        logging.basicConfig(level=logging.INFO)
        w = torch.tensor([3.0], requires_grad=True)
        loss = (w * w.detach()).sum()
        logging.info("loss %.4f", loss)
        mean = statistics.fmean([loss, loss])
        loss.backward()
        """
    )
    found = _run(tmp_path, "train.py")
    assert "INFO:root:loss 9.0000" in found.stderr
    left = [line for line in found.stdout.splitlines() if line.startswith("leaves the graph")]
    assert [line.partition(" at ")[2] for line in left] == ["train.py:8:1", "train.py:9:8"], found.stdout


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("torch.func.grad(lambda w: (w * w.detach()).sum())(torch.ones(2))", "it trains by torch.func"),
        (
            "thread = threading.Thread(target=train, name='trainer'); thread.start(); thread.join()",
            "the thread trainer",
        ),
        (
            "child = multiprocessing.get_context('fork').Process(target=train); child.start(); child.join()",
            "starts other processes",
        ),
    ],
    ids=["transforms", "threads", "processes"],
)
def test_a_script_that_cannot_be_audited_says_why(write, tmp_path, loss, says):
    write(
        f"""
        import multiprocessing, threading
        import torch

        def train():
            w = torch.ones(2, requires_grad=True)
            optimiser = torch.optim.SGD([w], 0.1)
            (w * w.detach()).sum().backward()
            optimiser.step()

        {loss}
        """
    )
    found = _run(tmp_path, "train.py")
    assert found.returncode == 2
    assert says in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("raise ZeroDivisionError('of the script')", 1, "ZeroDivisionError: of the script"),
        ("import sys; sys.exit(7)", 7, ""),
        ("raise KeyboardInterrupt", 130, "line 3, in <module>\n    raise KeyboardInterrupt"),
        (
            "",
            2,
            "The script should come to backward pass 1 of step 1. Found its end after 0 steps and 0 more backward",
        ),
    ],
)
def test_a_script_that_ends_early_ends_as_without_the_tool(write, tmp_path, end, code, says):
    write(f"import torch\nw = torch.ones(2, requires_grad=True)\n{end}\n")
    found = _run(tmp_path, "train.py")
    assert found.returncode == code, found.stderr
    assert says in found.stderr
    assert "toolkit" not in found.stderr.partition("Traceback")[2], "the frames of the tool are left out"


@pytest.mark.parametrize(("end", "code"), [("raise ZeroDivisionError", 1), ("import sys; sys.exit(7)", 7), ("", 0)])
def test_an_answer_does_not_hide_how_the_script_ends(write, tmp_path, end, code):
    write(f"import torch\nw = torch.ones(2, requires_grad=True)\n(w * w.detach()).sum().backward()\n{end}\n")
    found = _run(tmp_path, "train.py", "--continue")
    assert "train.py:3:6  detach()  partial" in found.stdout
    assert found.returncode == code, found.stderr


def test_plain_json_says_that_another_run_computes_something_else(write, tmp_path):
    write("import os, torch\nw = torch.tensor([float(os.getpid())], requires_grad=True)\n(w * w).sum().backward()\n")
    found = _run(tmp_path, "train.py", "--json", "--verify")
    assert found.returncode == 1
    assert json.loads(found.stdout)["valid"]
    assert found.stderr.splitlines()[-1].startswith("NOT verified: the loss of backward pass 1 from there on is ")


def test_a_checkpoint_that_hides_its_graph_is_refused(write, tmp_path):
    write(
        """
        import torch
        from torch.utils.checkpoint import checkpoint
        w = torch.ones(2, requires_grad=True)
        checkpoint(lambda x: x * x.detach(), w, use_reentrant=True).sum().backward()
        """
    )
    found = _run(tmp_path, "train.py")
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith("error: The step should checkpoint with use_reentrant=False.")


def test_a_script_that_goes_on_after_errors_hides_no_refusal(write, tmp_path):
    write(
        """
        import torch
        from torch.utils.checkpoint import checkpoint
        w = torch.ones(2, requires_grad=True)
        for step in range(3):
            try:
                checkpoint(lambda x: x * x.detach(), w, use_reentrant=True).sum().backward()
            except Exception as error:
                print("skipping a batch:", error)
        """
    )
    found = _run(tmp_path, "train.py")
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith("error: The step should checkpoint with use_reentrant=False.")


def test_children_and_paths_are_as_without_the_tool(write, tmp_path):
    write("def double(x):\n    return 2 * x\n", "deep/helper.py")
    write(
        """
        import multiprocessing, sys
        from pathlib import Path
        import torch
        from helper import double

        if __name__ == "__main__":
            assert Path(__file__).name == "train.py" and sys.argv == ["deep/train.py", "a", "--b"]
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.map(double, [4]) == [8]
            w = torch.tensor(3.0, requires_grad=True)
            (w * w.detach()).backward()
        """,
        "deep/train.py",
    )
    found = _run(tmp_path, "deep/train.py", "--", "a", "--b")
    assert found.returncode == 0, found.stderr
    assert "deep/train.py:12:10  detach()  partial" in found.stdout


def test_a_forked_child_runs_as_without_the_tool(write, tmp_path):
    write(
        """
        import multiprocessing
        import torch
        from torch import nn
        from toolkit import stop_gradient, stop_recording

        def features(queue):
            net = nn.Linear(2, 1)
            with torch.no_grad():
                found = [net(torch.ones(2)), nn.Linear(2, 1).weight.detach()]
            with stop_recording("child.region"):
                found.append(net(torch.ones(2)))
            found.append(stop_gradient(net(torch.ones(2)), "child.tensor"))
            net(torch.ones(2)).sum().backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
            queue.put([tensor.requires_grad for tensor in found])

        w = torch.tensor(3.0, requires_grad=True)
        optimiser = torch.optim.SGD([w], 0.1)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=features, args=(queue,))
        child.start()
        child.join()
        print("the child ends with", child.exitcode, any(queue.get()))
        (w * w.detach()).backward()
        """
    )
    found = _run(tmp_path, "train.py")
    assert "the child ends with 0 False" in found.stderr
    assert found.stderr.count("\n") == 1
    assert "train.py:26:6  detach()  partial" in found.stdout
    assert "1 stop:" in found.stdout


def test_a_program_that_is_not_there(tmp_path):
    found = _run(tmp_path, "train.py")
    assert (found.returncode, found.stderr) == (
        2,
        "error: PROGRAM should be a file. Found none at train.py: check the path, or audit a module by -m.\n",
    )


READS = """
import sys
import torch
scale = float(input())
x, w = torch.tensor([float(line) for line in sys.stdin]), torch.nn.Parameter(torch.ones(()))
print("numbers", x.tolist())
optimiser = torch.optim.SGD([w], 0.1)
for step in range(2):
    loss = (scale * w * x - (w * x).detach()).square().mean()
    {}
    optimiser.step()
"""


@pytest.mark.parametrize(
    "backward",
    ["loss.backward()", "w.grad, = torch.autograd.grad(loss, w)"],
    ids=["with a witness", "from the start again"],
)
def test_each_run_of_a_script_reads_the_same_input(write, tmp_path, backward):
    write(READS.format(backward))
    folder = tmp_path / "temporary"
    folder.mkdir()
    found = _run(tmp_path, "train.py", "--step", "2", "--verify", input="2\n3\n4\n", TMPDIR=str(folder))
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("computes the same loss and gradients, bit for bit\n")
    assert set(found.stderr.splitlines()) == {"numbers [3.0, 4.0]"}
    assert list(folder.iterdir()) == []


def test_the_answer_alone_is_on_stdout_wherever_the_script_goes(write, tmp_path):
    write("", "elsewhere/nothing")
    write(
        """
        import atexit, os, subprocess
        import torch
        atexit.register(print, "printed at the end")
        subprocess.run(["echo", "printed by a child"])
        os.chdir("elsewhere")
        w = torch.ones(2, requires_grad=True)
        torch.autograd.grad((w * w.detach()).sum(), [w])  # it trains by gradients: the script starts again
        """
    )
    found = _run(tmp_path, "train.py", "--json", "--verify")
    assert found.returncode == 0, found.stderr
    assert _verdicts(json.loads(found.stdout)) == {"train.py:8:26": "partial"}
    assert found.stderr.count("printed by a child") == 3, "twice recorded, once as the witness"
    assert found.stderr.count("printed at the end") == 2


def test_a_stop_beside_a_derivative_inside_of_the_step_is_opened(write, tmp_path):
    write(
        """
        import torch
        w, a = torch.tensor([0.3, 0.5], requires_grad=True), torch.tensor([0.2, 0.7], requires_grad=True)
        held = w * w.detach()
        slope, = torch.autograd.grad((a * held).square().sum(), a, retain_graph=True)
        ((a * held).sum() * slope.norm().detach()).backward()
        """
    )
    found = _run(tmp_path, "train.py", "--json")
    assert found.returncode == 0, found.stderr
    assert _verdicts(json.loads(found.stdout))["train.py:4:12"] == "partial"


def test_stops_in_a_derivative_inside_of_the_step_are_not_opened(write, tmp_path):
    """Without them the loss itself would be another one."""
    write(
        """
        import torch
        w = torch.tensor([0.3, 0.5], requires_grad=True)
        optimiser = torch.optim.SGD([w], 0.1)
        def inner(v):
            with torch.no_grad():
                scale = v.exp()
            return (v.square() * v.detach() * scale).sum()
        (slope,) = torch.autograd.grad(inner(w), w, create_graph=True)
        loss = inner(w - 0.1 * slope) + (w.detach() * w).sum()
        loss.backward()
        """
    )
    found = _run(tmp_path, "train.py", "--verify", "--json")
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    reasons = {entry["site"]: entry["reason"] for entry in told["unopened"]}
    assert set(reasons) == {"train.py:6:5", "train.py:8:26"}
    assert all("a derivative inside of the step" in reason for reason in reasons.values())
    assert _verdicts(told) == {"train.py:10:34": "partial"}
