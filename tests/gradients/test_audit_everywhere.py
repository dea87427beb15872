"""Where an audit must work: programs with stops are audited, and written again without each of them.

A program is a text. A place marked ``# opened`` is opened, and its gradient is that of the same text with this stop
taken out of its syntax tree. A place marked ``# listed: words`` is not opened, and the audit says why in these words.
"""

import ast
import importlib
import math
import os
import queue
import re
import subprocess
import textwrap
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
import warm
from folders import ROOT
from torch import nn

from toolkit.gradients import audit

CLASSES = (torch.Tensor, nn.Parameter, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)


@pytest.fixture(scope="module", autouse=True)
def _dynamo():
    """Import it: it replaces `torch.manual_seed`, and comes with the first transform of `torch.func`."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(autouse=True)
def _everything_is_as_it_was():
    default, grad_mode = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(torch.float64)
    before = [dict(vars(owner)) for owner in (*CLASSES, torch)]
    yield
    assert torch.is_grad_enabled() is grad_mode
    assert torch.is_autocast_cache_enabled()
    assert torch._C._is_fwd_grad_enabled()
    for owner, attributes in zip((*CLASSES, torch), before, strict=True):
        changed = [name for name, value in attributes.items() if vars(owner).get(name) is not value]
        assert changed == [], f"{owner} is not as it was"
        assert owner is torch or vars(owner).keys() == attributes.keys()
    torch.set_default_dtype(default)


# --- a program, and the same program without one of its stops ----------------------------------------------------

HEAD = """\
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(3)
A, B = nn.Linear(4, 3), nn.Linear(4, 3)
x, y = torch.randn(6, 4), torch.randn(6, 4)
"""
REGIONS = {"no_grad", "inference_mode", "set_grad_enabled"}
SWITCHES = {"torch.set_grad_enabled", "torch.autograd.set_grad_enabled"}
STOPS = {"detach", "detach_", "tensor", "asarray", "new_tensor", "stop"}


class Program:
    """The text of a program, run once: `loss`, its parameters, and the modules whose state it has."""

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path = text, path
        self.module = types.ModuleType(path.stem)
        path.write_text(text)
        exec(compile(text, str(path), "exec"), vars(self.module))
        self.loss = self.module.loss
        default = {
            f"{name}.{key}": parameter
            for name, value in vars(self.module).items()
            if isinstance(value, nn.Module)
            for key, parameter in value.named_parameters()
        }
        self.parameters = getattr(self.module, "params", default)

    def gradients(self):
        wanted = list(self.parameters.values())
        found = torch.autograd.grad(self.loss(), wanted, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]

    def state(self):
        modules = {name: value for name, value in vars(self.module).items() if isinstance(value, nn.Module)}
        state = {f"{name}.{key}": value for name, m in modules.items() for key, value in m.state_dict().items()}
        return state | {name: value for name, value in vars(self.module).items() if isinstance(value, torch.Tensor)}

    def without(self, line: int, column: int) -> "Program":
        tree, stop = ast.parse(self.text), _Without(line, column - 1)
        text = ast.unparse(ast.fix_missing_locations(stop.visit(tree)))
        assert stop.found == 1, f"{stop.found} stops at {line}:{column}"
        return Program(text, self.path.with_name(f"without_{line}_{column}.py"))


class _Without(ast.NodeTransformer):
    def __init__(self, line: int, column: int) -> None:
        self.line, self.column, self.found = line, column, 0

    def _is_here(self, node: ast.AST) -> bool:
        return (node.lineno, node.col_offset) == (self.line, self.column)

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if not self._is_here(node) or name not in STOPS:
            return node
        self.found += 1
        return node.args[0] if node.args else node.func.value

    def visit_Expr(self, node):
        self.generic_visit(node)
        call = node.value
        if not (isinstance(call, ast.Call) and self._is_here(call) and ast.unparse(call.func) in SWITCHES):
            return node
        self.found += 1
        return ast.Pass()

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if not self._is_here(node) or node.attr != "data":
            return node
        self.found += 1
        return node.value

    def visit_With(self, node):
        here = self._is_here(node)
        self.generic_visit(node)
        regions = [item for item in node.items if here or self._is_here(item.context_expr) if _is_region(item)]
        if not regions:
            return node
        self.found += 1
        node.items = [item for item in node.items if item is not regions[0]]
        return node if node.items else ast.If(ast.Constant(True), node.body, [])

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        if node.decorator_list and node.decorator_list[0].lineno == self.line and self.column == 0:
            self.found += 1
            node.decorator_list = []
        return node


def _is_region(item: ast.withitem) -> bool:
    return any(getattr(part, "attr", getattr(part, "id", "")) in REGIONS for part in ast.walk(item.context_expr))


PROGRAMS = {
    # --- modules and functions ---
    "modules": """
        net = nn.Sequential(A, nn.Tanh(), nn.Linear(3, 3))
        def loss():
            return (net(x) * net(y).detach()).sum()  # opened
    """,
    "functional_call": """
        weights = dict(A.named_parameters())
        def loss():
            a = torch.func.functional_call(A, weights, x)
            target = torch.func.functional_call(B, {name: p.detach() for name, p in B.named_parameters()}, x)  # opened
            return ((a - target) ** 2).sum()
    """,
    "functional_call-stacked": """
        def loss():
            w, b = torch.func.stack_module_state([A, B])  # new leaves: it stops by itself
            out = torch.func.vmap(lambda w, b: torch.func.functional_call(A, (w, b), x))(w, b)
            return (out * A(x).detach()).sum()  # opened
    """,
    "two-on-one-line": """
        def loss():
            a, b = A(x), B(x)
            return (a * a.exp().detach() + b * b.sin().detach() * a).sum()  # opened opened
    """,
    "loop": """
        def loss():
            hidden, total = A(x), 0
            for _ in range(3):
                hidden = hidden.sin() + hidden.detach()  # opened
                total = total + hidden.square().sum()
            return total
    """,
    "recursion": """
        def nested(n, a):
            if n == 0:
                return a
            with torch.no_grad():  # opened
                held = nested(n - 1, a.sin())
            return a * held.cos() + nested(n - 1, a * 0.5)
        def loss(): return nested(3, A(x)).sum()
    """,
    "rnn": """
        net = nn.LSTM(4, 3, batch_first=True)
        sequence = torch.randn(2, 5, 4)
        def loss():
            _, (h, c) = net(sequence)
            out, _ = net(sequence, (h.detach(), c.detach()))  # opened opened
            return out.square().sum()
    """,
    "transformer": """
        net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.25, batch_first=True)
        sequence = torch.randn(2, 5, 4)
        def loss():
            with torch.no_grad():  # opened
                target = net(sequence)
            return (net(sequence) * target).sum()
    """,
    "attention-fast-path": """
        net = nn.MultiheadAttention(4, 2, batch_first=True).eval()
        sequence = torch.randn(2, 5, 4)
        def loss():
            with torch.no_grad():  # opened: fast path
                target, _ = net(sequence, sequence, sequence, need_weights=False)
            return (net(sequence, sequence, sequence)[0] * target).sum()
    """,
    "batch_norm": """
        norm = nn.BatchNorm1d(3)
        def loss():
            a = norm(A(x))
            norm.eval()
            with torch.no_grad():  # opened
                held = norm(A(y))
            norm.train()
            return (a * held * norm.running_mean).sum()
    """,
    "weight_norm": """
        net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        def loss():
            a = net(x)
            return (a * a.exp().detach()).sum()  # opened
    """,
    "sparse-gradient": """
        table = nn.Embedding(5, 3, sparse=True)
        def loss():
            rows = table(torch.tensor([0, 1, 1]))
            return (rows * rows.exp().detach()).sum()  # opened
    """,
    "complex": """
        C = nn.Linear(4, 3, dtype=torch.complex128)
        z = torch.randn(6, 4, dtype=torch.complex128)
        def loss():
            a = C(z)
            with torch.no_grad():  # opened
                held = a.conj() * a
            return (a * held * a.exp().detach()).abs().sum()  # opened
    """,
    "single-beside-double": """
        A.float()
        def loss():
            return (A(x.float()).double() * B(x).exp().detach()).sum()  # opened
    """,
    "distributions": """
        def loss():
            normal = torch.distributions.Normal(A(x), B(x).exp())
            free, path = normal.sample(), normal.rsample()
            return -(normal.log_prob(path.detach()) * path).sum() - normal.log_prob(free).sum()  # opened
    """,
    # --- torch.func ---
    "vmap": """
        def row(r):
            a = A(r)
            with torch.no_grad():  # opened
                held = a.sin()
            return (a * a.exp().detach() * held).sum()  # opened
        def loss(): return torch.func.vmap(row)(x).sum()
    """,
    "func.grad": """
        def inner(r):
            a = A(r)
            with torch.no_grad():  # opened
                held = a.sin()
            return (a * a.exp().detach() * held).sum()  # opened
        def loss(): return torch.func.grad(inner)(x).square().sum()
    """,
    "vmap-of-grad": """
        def inner(r):
            a = A(r)
            return (a * a.exp().detach()).sum()  # opened
        def loss(): return torch.func.vmap(torch.func.grad(inner))(x).square().sum()
    """,
    "grad-inside-no_grad": """
        def inner(r):
            a = A(r)
            return (a.exp() * a.sin().detach()).sum()  # opened
        def loss():
            with torch.no_grad():  # opened
                step = torch.func.grad(inner)(x)
            return A(x + step).square().sum()
    """,
    "vjp": """
        def inner(r):
            a = A(r)
            return a * a.exp().detach()  # opened
        def loss():
            out, pull = torch.func.vjp(inner, x)
            return pull(torch.ones_like(out))[0].square().sum()
    """,
    "jvp": """
        def inner(r):
            a = A(r)
            with torch.no_grad():  # opened
                held = a.sin()
            return a * a.exp().detach() * held  # opened
        def loss(): return torch.func.jvp(inner, (x,), (y,))[1].square().sum()
    """,
    "jacrev": """
        def inner(r):
            a = A(r)
            with torch.no_grad():  # opened
                held = a.sin()
            return (a * a.exp().detach() * held).sum(0)  # opened
        def loss(): return torch.func.jacrev(inner)(x).square().sum()
    """,
    "jacfwd": """
        def inner(r):
            a = A(r)
            with torch.no_grad():  # opened
                held = a.sin()
            return (a * a.exp().detach() * held).sum(0)  # opened
        def loss(): return torch.func.jacfwd(inner)(x).square().sum()
    """,
    "hessian": """
        def inner(r):
            a = A(r)
            return (a.square() * a.exp().detach()).sum()  # opened
        def loss(): return torch.func.hessian(inner)(x[0]).square().sum()
    """,
    # --- checkpoints, hooks, autocast, functions ---
    "checkpoint": """
        from torch.utils.checkpoint import checkpoint
        def body(r):
            a = A(r)
            with torch.no_grad():  # opened
                held = a.sin()
            return a * a.exp().detach() * held  # opened
        def loss(): return checkpoint(body, x, use_reentrant=False).sum()
    """,
    "checkpoint-inside-no_grad": """
        from torch.utils.checkpoint import checkpoint
        def loss():
            with torch.no_grad():  # opened
                held = checkpoint(lambda r: A(r).sin(), x, use_reentrant=False)
            return (A(x) * held).sum()
    """,
    "checkpoint-inside-no_grad-that-writes-in-place": """
        from torch.utils.checkpoint import checkpoint
        def body(r):
            parts = torch.zeros(6, 3)
            parts[0] = A(r[0])
            held = parts[:2].sin()  # its recomputation saves the values from before the next line
            parts[1:] = A(r[1:]) * B(r[1:]).detach()  # opened
            return parts + held.sum(0)
        def loss():
            with torch.no_grad():  # opened
                held = checkpoint(body, x, use_reentrant=False)
            return (A(x) * held).sum()
    """,
    "checkpoint-that-changes-a-buffer": """
        from torch.utils.checkpoint import checkpoint
        N = nn.BatchNorm1d(3)
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("factor", torch.ones(3))
            def forward(self, r):
                self.factor.mul_(1.25)
                return r * self.factor
        scale = Scale()
        def body(r):
            with torch.no_grad():  # opened
                held = scale(N(A(r)))
            return held * B(r).detach()  # opened
        def loss(): return checkpoint(body, x, use_reentrant=False).sum() + A(x).square().sum()
    """,
    "hooks": """
        C = nn.Linear(4, 4)
        A.register_forward_hook(lambda module, inputs, output: output * output.exp().detach())  # opened
        A.register_full_backward_hook(lambda module, before, after: tuple(g if g is None else 2 * g for g in before))
        def loss():
            a = A(C(x))
            a.register_hook(lambda g: 2 * g.detach())
            return (a * B(x)).sum()
    """,
    "autocast": """
        A.float(), B.float()
        def loss():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                with torch.no_grad():  # opened bfloat16
                    with torch.no_grad():  # opened
                        scale = B(x.float()).exp()
                    held = A(x.float()) * scale
                a = A(x.float())
                return (a * held * B(x.float()).exp().detach()).float().sum()  # opened
    """,
    "autograd.Function": """
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a):
                ctx.save_for_backward(a)
                return a.detach() ** 2  # opened
            @staticmethod
            def backward(ctx, g):
                (a,) = ctx.saved_tensors
                with torch.enable_grad():
                    leaf = a.detach().requires_grad_()  # opened
                    out = leaf ** 2
                return torch.autograd.grad(out, leaf, g)
        def loss():
            a = A(x)
            return (Square.apply(a) * a.exp().detach()).sum()  # opened
    """,
    "autograd.Function-setup_context": """
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(a):
                return a.detach() ** 2  # opened
            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(inputs[0].detach())  # opened
            @staticmethod
            def backward(ctx, g):
                return 2 * g * ctx.saved_tensors[0].detach()
        def loss():
            a = A(x)
            return (Square.apply(a) * a.exp().detach()).sum()  # opened
    """,
    # --- regions in every shape ---
    "nested": """
        def loss():
            a = A(x)
            with torch.no_grad():  # opened
                held = a.exp()
                with torch.no_grad():  # opened
                    more = a.sin()
            return (a * held * more).sum()
    """,
    "enable_grad-inside": """
        def loss():
            a = A(x)
            with torch.no_grad():  # opened
                held = a.exp()
                with torch.enable_grad():
                    passes = a.sin()
                more = a.cos()
            return (a * held * passes * more).sum()
    """,
    "enable_grad-at-once": """
        def loss():
            with torch.no_grad():  # opened
                with torch.enable_grad():
                    return A(x).exp().sum()
    """,
    "set_grad_enabled": """
        def loss():
            a = A(x)
            with torch.set_grad_enabled(mode=False):  # opened
                held = a.exp()
                with torch.set_grad_enabled(True):
                    passes = a.sin()
            return (a * held * passes).sum()
    """,
    "decorators": """
        from torch import no_grad, set_grad_enabled, inference_mode
        class Model:
            @torch.no_grad()  # opened
            def first(self, a): return a.exp()
            @no_grad  # opened
            def second(self, a): return a.sin()
            @set_grad_enabled(False)  # opened
            def third(self, a): return a.cos()
            @inference_mode()  # opened
            def fourth(self, a): return a.square()
        model = Model()
        def loss():
            a = A(x)
            return (a * model.first(a) * model.second(a) * model.third(a) * model.fourth(a).clone()).sum()
    """,
    "decorated-generators": """
        @torch.no_grad()  # opened
        def values(a):
            yield a.exp()
            yield a.sin()
        def loss():
            total = 0
            for held in values(A(x)):
                total = total + (B(x) * held).sum()
            return total
    """,
    "generators": """
        def values(a):
            with torch.no_grad():  # opened
                yield a.exp()
                yield a.sin()
        def loss():
            a = A(x)
            held, more = values(a)
            abandoned = values(a)
            last = next(abandoned)
            del abandoned
            return (a * held * more * last * B(x)).sum()
    """,
    "coroutines": """
        import asyncio
        async def value(a):
            with torch.no_grad():  # opened
                return a.exp()
        async def main():
            a = A(x)
            return (a * await value(a)).sum()
        def loss(): return asyncio.run(main())
    """,
    "exceptions": """
        def loss():
            a = A(x)
            try:
                with torch.no_grad():  # opened
                    held = a.exp()
                    raise KeyError
            except KeyError:
                pass
            return (a * held * a.sin().detach()).sum()  # opened
    """,
    "names-bound-earlier": """
        import operator
        from torch import no_grad, detach
        stop = torch.Tensor.detach
        tensor = torch.tensor
        def loss():
            a = A(x)
            with no_grad():  # opened
                held = a.cos()
            return (a * stop(a.exp()) * detach(a.sin()) * held * torch.ops.aten.detach(a)).sum()  # opened opened opened
    """,
    "several-contexts": """
        import contextlib
        def loss():
            a = A(x)
            with contextlib.nullcontext(), torch.no_grad():  # opened
                held = a.exp()
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.nullcontext())
                more = a.sin()
            return (a * held * more).sum()
    """,
    "own-context": """
        import contextlib
        @contextlib.contextmanager
        def frozen():
            with torch.no_grad():  # opened
                yield
        def loss():
            a = A(x)
            with frozen():
                held = a.exp()
            return (a * held).sum()
    """,
    "copies": """
        def loss():
            a = A(x)
            return (a * torch.asarray(a.exp(), requires_grad=False) * torch.as_tensor(a)).sum()  # opened
    """,
    "switched-without-with": """
        def loss():
            a = A(x)
            torch._C._set_grad_enabled(False)  # listed: has no end
            held = a.exp()
            torch._C._set_grad_enabled(True)
            torch.set_grad_enabled(False)  # opened
            more = a.exp()
            torch.set_grad_enabled(True)
            return (a * held * more * a.sin().detach()).sum()  # opened
    """,
    "switched-to-what-it-was": """
        def quietly(f, *args):
            before = torch.is_grad_enabled()
            torch.autograd.set_grad_enabled(False)  # opened
            try:
                return f(*args)
            finally:
                torch.autograd.set_grad_enabled(before)

        def loss():
            a = A(x)
            slope, = torch.autograd.grad(a.exp().sum(), a, create_graph=True)
            return (a * quietly(A, x).exp() + quietly(B, x) * a + slope * a).sum()
    """,
    "switched-by-a-decorator-or-a-guard": """
        def loss():
            @torch.set_grad_enabled(False)  # opened
            def held(x):
                return A(x).exp()
            a = A(x)
            guard = torch.set_grad_enabled(True)
            with guard:
                more = A(x).sin()
            return (a * held(x) * more).sum()
    """,
    "detached-in-place": """
        def loss():
            a, b = A(x), B(x)
            held = a.exp()
            held.detach_()  # opened
            keep = b * 2
            same = keep
            same.detach_()  # opened
            parts = torch.stack([a, b]).sin().detach_()  # opened
            return (a * held * keep + same.cos() * b).sum() + (parts * a).sum()
    """,
    # --- state ---
    "average-in-place": """
        def loss():
            a = A(x)
            with torch.no_grad():  # listed: updates older tensors in place
                for old, new in zip(B.parameters(), A.parameters()):
                    old.lerp_(new, 0.1)
                    old.copy_(0.9 * old + 0.1 * new)
                    old -= 0.1 * new
            return (a * B(x).detach()).sum()  # opened
    """,
    "average-foreach": """
        def loss():
            a = A(x)
            with torch.no_grad():  # listed: updates older tensors in place
                torch._foreach_mul_(list(B.parameters()), 0.9)
                torch._foreach_add_(list(B.parameters()), list(A.parameters()), alpha=0.1)
            return (a * B(x).detach()).sum()  # opened
    """,
    "average-data": """
        def loss():
            a, b = A(x), B(x)
            for old, new in zip(B.parameters(), A.parameters()):
                old.data = 0.9 * old.data + 0.1 * new.data  # opened opened listed: .data = ...
            return (a * b.detach()).sum()  # opened
    """,
    "batch_norm-in-no_grad": """
        norm = nn.BatchNorm1d(3)
        def loss():
            with torch.no_grad():  # opened
                held = norm(A(y))
            return (norm(A(x)) * held).sum()
    """,
    "one-culprit": """
        def loss():
            a, b = A(x), B(x)
            held = a.exp().detach()  # listed: modified by an inplace operation
            held.clamp_(max=1.0)
            b = b * b.sin().detach()  # opened
            return (a * held * b.exp().detach()).sum()  # opened
    """,
    "older-value-in-place": """
        def loss():
            a, b = A(x), A(x).exp() * 1
            with torch.no_grad():  # opened
                b.clamp_(max=1.0)
            return (a * b * a.sin().detach()).sum()  # opened
    """,
    "own-value-in-place": """
        def loss():
            a = A(x)
            with torch.no_grad():  # opened
                held = torch.zeros(6, 3)
                held += a
                held[0] = 1
                held.mul_(2)
            return (a * held).sum()
    """,
    "buffer-replaced": """
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(3))
            def forward(self, a):
                with torch.no_grad():  # opened
                    self.mean = 0.9 * self.mean + 0.1 * a.mean(0)
                return (a - self.mean) ** 2
        centred = Centred()
        def loss(): return centred(A(x)).sum()
    """,
    "asks-is_grad_enabled": """
        def loss():
            a = A(x)
            with torch.no_grad():  # listed: answers in it as if it were closed
                held = a.exp() if torch.is_grad_enabled() else a.sin()
            return (a * held).sum()
    """,
    "asks-requires_grad": """
        def loss():
            a = A(x)
            with torch.no_grad():  # opened
                held = a.exp()
                held = held if held.requires_grad else held.sin()
            return (a * held * a.exp().detach()).sum()  # opened
    """,
    "inner-step": """
        def loss():
            with torch.no_grad():  # opened
                start = B.weight.clone().requires_grad_()
            (g,) = torch.autograd.grad((x @ start.T).square().sum(), start)  # listed: grad()
            return (A(x) * (x @ (start - 0.1 * g).T)).sum()
    """,
    "attack": """
        def loss():
            z = x
            for _ in range(2):
                z = z.detach().requires_grad_()  # opened
                (g,) = torch.autograd.grad(A(z).exp().sum(), z)  # listed: grad()
                with torch.no_grad():  # opened
                    z = z + 0.1 * g
            return A(z).exp().sum()
    """,
    "inner-backward": """
        def loss():
            z = x.clone().requires_grad_()
            A(z).exp().sum().backward()  # listed: backward()
            return (A(x + z.grad) * B(x).detach()).sum()  # opened
    """,
    "gradient-penalty": """
        def loss():
            point = (A(x) - B(y)).detach().requires_grad_()  # opened
            (g,) = torch.autograd.grad((point**3).sum(), point, create_graph=True)
            return (g.norm() - 1) ** 2 + A(x).sum()
    """,
}


def _marks(text):
    """Return line -> how often it is marked as opened, and line -> the words that are listed for it."""
    comments = {n: line.partition("  # ")[2] for n, line in enumerate(text.splitlines(), 1) if "  # " in line}
    opened = {n: len(re.findall(r"\bopened\b", comment)) for n, comment in comments.items() if "opened" in comment}
    return opened, {n: words[1] for n, comment in comments.items() if (words := re.search(r"listed: (.*)", comment))}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", PROGRAMS)
def test_opening_a_place_is_writing_the_program_without_it(name, tmp_path):
    text = HEAD + textwrap.dedent(PROGRAMS[name])
    program, untouched = (Program(text, tmp_path / f"{stem}.py") for stem in ("program", "untouched"))
    random_state = torch.get_rng_state()
    found = audit(program.loss, program.parameters)
    assert found.valid, found.reason
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, value in untouched.state().items():
        assert torch.equal(program.state()[key], value), f"{key} is not as it was"
        assert program.state()[key].is_leaf

    opened, listed = _marks(text)
    effects = {tuple(map(int, effect.site.rsplit(":", 2)[1:])): effect for effect in found.effects if _is_in(effect)}
    for line, words in listed.items():
        assert any(f"program.py:{line}:" in note and words in note for note in found.notes()), found.notes()
    for row in found.rows()[1:]:
        line = int(row[0].rsplit(":", 2)[1]) if "program.py:" in row[0] else 0
        assert row[1].endswith(", in part") == (line in listed and line not in opened)
    assert {line: sum(at == line for at, _ in effects) for line in opened} == opened, found.notes()
    assert {line for line, _ in effects} <= opened.keys() | listed.keys()

    if not any(
        words in text for words in ("fast path", "lerp_", "_foreach_", "old.data")
    ):  # other bits; changes its parameters
        for expected, gradient in zip(program.gradients(), found.blocked.values(), strict=True):
            assert torch.equal(gradient.to_dense(), expected.to_dense())
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if "bfloat16" in text else {"rtol": 1e-11, "atol": 1e-13}
    for (line, column), effect in effects.items():
        if line in opened:
            direct = program.without(line, column)
            torch.set_rng_state(random_state)
            gradients = found.gradient([effect.name])
            leak = math.hypot(*((gradients[key] - found.blocked[key]).to_dense().norm() for key in gradients))
            assert effect.leak == pytest.approx(leak, rel=1e-5, abs=1e-11)
            for expected, gradient in zip(direct.gradients(), gradients.values(), strict=True):
                torch.testing.assert_close(gradient.to_dense(), expected.to_dense(), **tolerance)


def _is_in(effect):
    return "program.py:" in effect.site


# --- other threads, failures, compilers, processes ---------------------------------------------------------------


def test_another_thread_is_left_alone():
    net, x = nn.Linear(4, 3), torch.randn(6, 4)
    told = queue.SimpleQueue()  # which is not put back as it was

    def work():
        w = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            told.put((2 * w).requires_grad or torch.is_grad_enabled())
        told.put(w.detach().requires_grad or w.data.requires_grad or torch.detach(w).requires_grad)
        told.put(w.detach().grad_fn is not None)

    def loss():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return (net(x) * net(x).exp().detach()).sum()

    found = audit(loss, net)
    assert found.valid
    assert len(found.effects) == 1
    assert not any(told.get() for _ in range(told.qsize()))
    assert any("in another thread, and not looked into: no_grad at tests/" in note for note in found.notes())


def test_an_audit_inside_of_an_audit_is_refused():
    net, x = nn.Linear(4, 3), torch.randn(6, 4)
    found = audit(lambda: audit(lambda: net(x).sum(), net).loss + net(x).sum() * net(x).sum().detach(), net)
    assert found.reason.startswith("watched, the program fails: `audit` should run once at a time in a process")


def _raise_in_a_region(a):
    with torch.no_grad():
        raise KeyError("mine")


def _raise_in_a_transform(a):
    return torch.func.vmap(lambda row: row.data)(a)


def _raise_in_a_function(a):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.detach().clone()

        @staticmethod
        def backward(ctx, g):
            raise KeyError("mine")

    return Fails.apply(a)


@pytest.mark.parametrize("fail", [_raise_in_a_region, _raise_in_a_transform, _raise_in_a_function])
def test_an_error_of_the_program_stays_its_own_and_leaves_nothing_behind(fail):
    net, x = nn.Linear(4, 3), torch.randn(6, 4)

    def loss():
        value = (net(x) * fail(net(x)) * net(x).detach()).sum()
        torch.autograd.grad(value, net.weight, retain_graph=True)
        return value

    with pytest.raises(Exception) as own:
        loss()
    with pytest.raises(type(own.value)) as seen:
        audit(loss, net)
    assert str(seen.value) == str(own.value)
    assert torch.no_grad.__enter__.__module__ == "torch.autograd.grad_mode"


def test_left_over_generators_do_not_make_it_lie():
    """Two generators that end in the order in which they began leave torch's own switch off: a plain run says so."""
    net, x = nn.Linear(4, 3), torch.randn(6, 4)

    def held(a):
        with torch.no_grad():
            yield a.exp()

    def loss():
        a = net(x)
        first, second = held(a), held(a.sin())
        factors = next(first), next(second)
        list(first)
        list(second)
        return (a * factors[0] * factors[1]).sum() + net(x).sum()

    found = audit(loss, net)
    torch.set_grad_enabled(True)
    assert found.valid
    assert not any(gradient.any() for gradient in found.blocked.values())
    assert [str(effect.verdict) for effect in found.effects] == ["cuts all paths to [bias, weight]"]


def test_a_region_that_is_left_open_ends_as_it_would_have():
    net, x = nn.Linear(4, 3), torch.randn(6, 4)
    kept = []

    def held(a):
        with torch.no_grad():
            yield a.exp()

    def loss():
        kept.append(held(net(x)))
        factor = next(kept[-1])
        with torch.enable_grad():
            return (net(x) * factor).sum()

    found = audit(loss, net)
    assert found.valid, found.reason
    assert torch.is_autocast_cache_enabled()
    assert [effect.verdict.kind for effect in found.effects] == ["partial"]
    for generator in kept:
        generator.close()
        assert torch.is_grad_enabled()
    weight = net.weight.detach().clone().requires_grad_()
    a = nn.functional.linear(x, weight, net.bias)
    (expected,) = torch.autograd.grad((a * a.exp()).sum(), weight)
    torch.testing.assert_close(found.gradient([found.effects[0].name])["weight"], expected)


def test_the_stops_of_torchs_quantizers_are_listed():
    from torch.ao import quantization

    observer = quantization.MinMaxObserver
    rounded = quantization.FakeQuantize(observer=observer, quant_min=0, quant_max=255)
    w, x = torch.randn(4, requires_grad=True), torch.randn(4)
    found = audit(lambda: (rounded(w * x) - x).square().sum(), {"w": w})
    assert found.valid
    assert [found.sites[effect.name].function for effect in found.effects] == [
        "FakeQuantize.forward",
        "MinMaxObserver.forward",
    ]


class _WithStops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        with torch.no_grad():
            goal = self.net(x + 1).tanh()
        return (y - 0.5 * y.detach().roll(1, 0) - goal).square().mean()


def test_an_exported_program_has_the_stops_of_its_module():
    plain, x = _WithStops(), torch.randn(6, 4)
    exported = torch.export.export(plain, (x,)).module()
    exported.load_state_dict(plain.state_dict())
    found, expected = audit(lambda: exported(x), exported), audit(lambda: plain(x), plain)
    assert found.valid
    assert [found.kinds[effect.name] for effect in found.effects] == ["no_grad", "detach()"]
    assert [effect.leak for effect in found.effects] == pytest.approx([e.leak for e in expected.effects], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.randn(6, 4))])
def test_a_module_in_torchscript_is_listed_if_stops_are_in_it(make):
    net, free, x = make(_WithStops()), make(nn.Linear(4, 3)), torch.randn(6, 4)
    found = audit(lambda: net(x) + free(x).mean(), net)
    assert found.valid
    assert [entry.kind for entry in found.unopened] == ["TorchScript"]
    assert found.summary() == "1 stop: 1 not opened"


@pytest.mark.keeps_its_sums
def test_a_compiled_program_is_audited_as_it_was_written():
    torch._dynamo.reset()
    net, x = nn.Linear(4, 3), torch.randn(6, 4)

    def body(a):
        with torch.no_grad():
            held = a.sin()
        return a * a.exp().detach() * held

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
        before = torch.autograd.grad(compiled(net(x)).sum(), net.weight)[0]
        found, plain = (audit(lambda f=f: f(net(x)).sum(), net) for f in (compiled, body))
        after = torch.autograd.grad(compiled(net(x)).sum(), net.weight)[0]
    assert found.valid
    assert len(found.effects) == 2
    for effect in plain.effects:
        assert torch.equal(found.gradient([effect.name])["weight"], plain.gradient([effect.name])["weight"])
    assert torch.equal(before, after)  # no graph with gates was kept


DISTRIBUTED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from toolkit.gradients import audit

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
x = torch.randn(6, 4, dtype=torch.float64) + rank

def loss(model):
    a = model(x)
    with torch.no_grad():
        held = a.sin()
    return (a * a.exp().detach() * held).sum()

model = nn.parallel.DistributedDataParallel(net)
found, alone = audit(lambda: loss(model), net), audit(lambda: loss(net), net)
assert found.valid and len(found.effects) == 2, found
for effect in alone.effects:
    for key, gradient in alone.gradient([effect.name]).items():
        assert torch.equal(found.gradient([effect.name])[key], gradient), key

loss(model).backward()  # the reducer still works
mean = [parameter.grad.clone() for parameter in net.parameters()]
net.zero_grad()
loss(net).backward()
for parameter, expected in zip(net.parameters(), mean):
    dist.all_reduce(parameter.grad)
    torch.testing.assert_close(parameter.grad / 2, expected)
print("passed")
"""


@pytest.mark.slow
def test_two_ranks_are_audited_each_and_still_reduce(tmp_path):
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED)
    command = [warm.python(), str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [text.strip().splitlines()[-1] for text in texts] == ["passed"] * 2, "\n".join(texts)
