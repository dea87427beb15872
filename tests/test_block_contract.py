"""The same questions to every block of the project, and to the calls that put it in place.

1. Is the value unchanged by the block? 2. With it, is the gradient the stated target? 3. Without it, what is it?
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest
import torch
from contract import BlockCase, block_cases, finite_differences, relative_error
from each import each

import experiments
import toolkit
from toolkit import Block, stop_gradient, unblock
from toolkit.gradients import compare


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


MODULES = [*_modules(toolkit), *_modules(experiments)]
CASES = block_cases()
BLOCKS = {value.name: value for module in MODULES for value in vars(module).values() if isinstance(value, Block)}


def _gradient(case: BlockCase) -> dict[str, torch.Tensor]:
    parameters = case.parameters()
    gradients = torch.autograd.grad(case.loss(parameters), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def check_value_is_the_same_open_and_closed(case: BlockCase) -> None:
    closed = case.loss(case.parameters())
    with unblock(case.block):
        assert torch.equal(case.loss(case.parameters()), closed)


def check_blocked_gradient_is_the_witness(case: BlockCase) -> None:
    assert relative_error(_gradient(case), case.blocked(case.parameters())) <= case.tolerance


def check_open_gradient_is_the_witness(case: BlockCase) -> None:
    with unblock(case.block):
        found = _gradient(case)
        numerical = None if case.opened else finite_differences(case.loss, case.parameters())
    if case.opened:
        assert relative_error(found, case.opened(case.parameters())) <= case.tolerance
    else:
        assert relative_error(found, numerical) <= max(case.tolerance, 1e-7)


def check_gate_equals_removal_bit_for_bit(case: BlockCase) -> None:
    parameters = case.parameters()
    comparison = compare(lambda: case.loss(parameters), parameters)
    with unblock(case.block):
        removed = _gradient(case)
    for found, expected in ((comparison.gradient([case.block]), removed), (comparison.blocked, _gradient(case))):
        assert sorted(found) == sorted(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


CHECKS: list[Callable[[BlockCase], None]] = [
    check_value_is_the_same_open_and_closed,
    check_blocked_gradient_is_the_witness,
    check_open_gradient_is_the_witness,
    check_gate_equals_removal_bit_for_bit,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@each("case", CASES, ids=lambda case: case.id)
def test_block(case: BlockCase, check: Callable[[BlockCase], None]) -> None:
    check(case)


def test_every_block_has_a_case() -> None:
    assert BLOCKS.keys() <= {case.block.name for case in CASES}


# --- mutation: each call of stop_gradient is removed, and replaced by a bare detach ------------------------------


@dataclass(frozen=True)
class Mutation:
    """One call of `stop_gradient` in a module, and what becomes of it."""

    module: ModuleType
    line: int
    index: int  # among the module's calls
    kind: str  # "removed" or "detached"

    @property
    def id(self) -> str:
        return f"{self.module.__name__}:{self.line}:{self.kind}"

    def made(self) -> tuple[Block, FunctionType, CodeType]:
        """Return the block of that call, the function around it, and its code with the call replaced."""
        tree = ast.parse(Path(self.module.__file__).read_text("utf-8"))
        call = _stops(tree)[self.index]
        replacement = call.args[0] if self.kind == "removed" else _detached(call.args[0])
        block = eval(ast.unparse(call.args[1]), vars(self.module))
        around = [node for node in tree.body if node.lineno <= call.lineno <= node.end_lineno or _is_future(node)]
        mutated = ast.fix_missing_locations(_Replace(call, replacement).visit(ast.Module(around, [])))
        return block, *_enclosing(compile(mutated, self.module.__file__, "exec"), self.module, call.lineno)


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.Call, replacement: ast.expr) -> None:
        self.target, self.replacement = target, replacement

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return ast.copy_location(self.replacement, node) if node is self.target else self.generic_visit(node)


def _mutations() -> Iterator[Mutation]:
    for module in MODULES:
        if vars(module).get("stop_gradient") is not stop_gradient or module.__name__.startswith("toolkit.blocks"):
            continue
        for index, call in enumerate(_stops(ast.parse(Path(module.__file__).read_text("utf-8")))):
            for kind in ("removed", "detached"):
                yield Mutation(module, call.lineno, index, kind)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _stops(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if _is_stop(node)]


def _detached(value: ast.expr) -> ast.expr:
    if isinstance(value, ast.Tuple):
        return ast.Tuple(elts=[_detached(element) for element in value.elts], ctx=ast.Load())
    return ast.Call(func=ast.Attribute(value=value, attr="detach", ctx=ast.Load()), args=[], keywords=[])


def _is_stop(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "stop_gradient"


def _enclosing(module_code: CodeType, module: ModuleType, line: int) -> tuple[FunctionType, CodeType]:
    """Return the function object and the code of the outermost function or method around `line`."""
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    for cls in (value for value in vars(module).values() if inspect.isclass(value)):
        if cls.__module__ == module.__name__:
            functions += [value for value in vars(cls).values() if inspect.isfunction(value)]
    for function in map(inspect.unwrap, functions):
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            continue
        first = function.__code__.co_firstlineno
        last = max(line for _, _, line in _all_lines(function.__code__) if line)
        if first <= line <= last:
            for code in _nested(module_code):
                if code.co_qualname == function.__qualname__ and code.co_firstlineno == first:
                    return function, code
    raise AssertionError(f"no function around {module.__name__}:{line}")


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _all_lines(code: CodeType) -> Iterator[tuple[int, int, int | None]]:
    for part in (code, *_nested(code)):
        yield from part.co_lines()


@pytest.mark.parametrize("mutation", list(_mutations()), ids=lambda mutation: mutation.id)
def test_mutation_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    block, function, code = mutation.made()
    monkeypatch.setattr(function, "__code__", code)
    cases = [case for case in CASES if case.block == block]
    for check in CHECKS:  # the first notices most, in the case that meets the call
        for case in cases:
            try:
                check(case)
            except (AssertionError, RuntimeError, ValueError):
                return
    pytest.fail(f"nothing notices the mutation in any of {[case.id for case in cases]}")
